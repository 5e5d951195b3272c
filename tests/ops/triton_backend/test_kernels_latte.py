"""Latte's Triton kernels against the reference: values and all gradients; laws; memory manners.

Odd shapes, extreme logits, and sequences that are cut into segments, which must not matter. In
fp32 a chunk of the walks has 16 tokens, one of the bidirectional form 64: most tests have some
whole chunks and a rest.
"""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from helpers import (
    F64,
    assert_same,
    boundaries,
    key_mask,
    latte_inputs,
    latte_state,
    macchiato_inputs,
    relative_error,
    values_and_gradients,
)
from kernel_helpers import DEVICE, Fences, call, compare, judged, same_when_compiled

from latte.ops import (
    LatteState,
    causal_conv1d,
    latte_attention,
    macchiato_attention,
    rg_lru,
    sliding_window_attention,
)
from latte.ops.triton_backend import launch, segments
from latte.ops.triton_backend.latte_bidirectional import bidirectional_op
from latte.ops.triton_backend.latte_causal import causal_op
from latte.ops.triton_backend.segments import segment_length
from latte.ops.triton_backend.tiles import counted


def combinations():
    """Mask, packing and state: none, all, and in the slow tests all the others."""
    for options in itertools.product([False, True], repeat=3):
        yield pytest.param(*options, marks=[] if len(set(options)) == 1 else pytest.mark.slow)


@pytest.mark.parametrize(("masked", "packed", "carried"), combinations())
@pytest.mark.parametrize("causal", [True, False])
def test_agrees_with_the_reference(causal, masked, packed, carried):
    compare(37 if causal else 66, causal=causal, masked=masked, packed=packed, carried=carried)


@pytest.mark.parametrize(
    ("causal", "T"),
    [(True, 1), (True, 32), (True, 63), (False, 1), (False, 63), (False, 64), (False, 130)],
)
def test_lengths(causal, T):
    compare(T, causal=causal, B=1, H=1 if T > 64 else 2, carried=True)


@pytest.mark.parametrize(("L", "D"), [(1, 5), (3, 64), (16, 96), (32, 64), (130, 5), (256, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_odd_widths(causal, L, D):
    compare(65 if L == 3 and not causal else 35, causal=causal, L=L, D=D, B=1)


@pytest.mark.parametrize("causal", [True, False])
def test_many_tiles(causal):
    compare(20, causal=causal, L=3, D=200, B=1, carried=True)


@pytest.mark.parametrize("scale", [30.0, 1e4])
def test_large_logits(scale):
    compare(50, masked=True, packed=True, carried=True, scale=scale)


def extreme(kind: str, T: int, H: int, L: int):
    q, k, v = latte_inputs(1, T, H, L, 4)
    steps = torch.arange(T, dtype=F64)[None, :, None, None]
    if kind == "jump":
        k[:, T // 3 :] += 120.0
    elif kind == "fall":
        k[:, T // 3 :] -= 120.0
    elif kind == "dominant":
        k[:, T // 3] += 1e4
    elif kind == "rising":
        k += 70.0 * steps
    elif kind == "creeping":
        k += 0.5 * steps
    elif kind == "alternating":
        k += 1.5e4 * (-1.0) ** steps
    elif kind == "huge queries":
        q *= 1e4
    return [x.float() for x in (q, k, v)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "kind", ["jump", "fall", "dominant", "rising", "creeping", "alternating", "huge queries"]
)
def test_extreme_logits(kind, causal):
    got = judged(extreme(kind, 37 if causal else 66, 1, 3), causal=causal)
    assert all(torch.isfinite(x).all() for x in got)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
def test_low_precision_errs_at_most_twice_the_reference(dtype, causal):
    """Outputs and gradients; the fp32 state is as exact as its products' factors."""
    low = [x.to(DEVICE, dtype) for x in latte_inputs(1, 70, 1, 16, 64, scale=2.0)]

    def run(backend, inputs, state=False):
        return values_and_gradients(
            lambda *x: call(backend, *x, causal=causal, output_final_state=state), inputs
        )

    exact = [x.to(F64) for x in low]
    want, judge, got = run("reference", exact), run("reference", low), run("triton", low)
    for a, b, e in zip(got, judge, want, strict=True):
        assert a.dtype == dtype
        assert relative_error(a, e) <= 2 * relative_error(b, e)
    mean = run("triton", low, state=True)[2]
    error = relative_error(mean, run("reference", exact, state=True)[2])
    assert error < torch.finfo(dtype).eps / 4


def fp32_inputs(*shape, **options):
    return [x.float().to(DEVICE) for x in latte_inputs(*shape, **options)]


@pytest.mark.parametrize("cut", [1, 20, 32])
def test_split_equals_whole(cut):
    inputs = fp32_inputs(1, 37, 2, 3, 5, scale=3.0)
    whole, last = call("triton", *inputs)
    first, state = call("triton", *(x[:, :cut] for x in inputs))
    second, state = call("triton", *(x[:, cut:] for x in inputs), *state)
    assert_same([torch.cat([first, second], 1), *state], [whole, *last], 2e-6)


@pytest.mark.parametrize("change", [1.0, 90.0, 1e4])
@pytest.mark.parametrize("t", [3, 31, 32, 36])
def test_the_future_cannot_change_the_past(t, change):
    """To the last bit, also where the change moves later tokens beyond a reference's reach."""
    q, k, v = fp32_inputs(1, 37, 1, 3, 5, scale=2.0)
    before, _ = call("triton", q, k, v)
    q[:, t:] *= -1.0
    k[:, t:] += change
    v[:, t:] += 7.0
    after, _ = call("triton", q, k, v)
    assert torch.equal(before[:, :t], after[:, :t])
    assert not torch.equal(before[:, t:], after[:, t:])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_key_gradients_sum_to_zero(causal, scale):
    T = 37 if causal else 70
    q, k, v = (x.requires_grad_() for x in fp32_inputs(1, T, 1, 3, 5, scale=scale))
    out, _ = call("triton", q, k, v, causal=causal)
    (dk,) = torch.autograd.grad((out * torch.linspace(-1, 1, 5, device=DEVICE)).sum(), k)
    assert dk.abs().max() > 1e-4
    # exp(k - A) sums to 1 as closely as fp32 holds its argument, some 30 here: 2e-6.
    assert dk.sum(1).abs().max() <= 1e-5 * dk.abs().sum(1).max()


def test_rows_sum_to_one():
    q, k, _ = fp32_inputs(1, 70, 1, 3, 1, scale=9.0)
    out, _ = call("triton", q, k, torch.ones(1, 70, 1, 1, device=DEVICE))
    assert_same([out], [torch.ones_like(out)], 2e-6)


def test_packed_equals_separate():
    # All in one segment: cutting rounds in its own way.
    cu = [0, 0, 17, 18, 60]
    q, k, v = fp32_inputs(1, 60, 1, 3, 5)
    bounds = torch.tensor(cu, dtype=torch.int32, device=DEVICE)
    packed, state = call("triton", q, k, v, cu_seqlens=bounds)
    for n, (a, b) in enumerate(zip(cu, cu[1:], strict=False)):
        apart, last = call("triton", *(x[:, a:b] for x in (q, k, v)))
        # A token alone goes to decoding's kernel, which rounds in its own way.
        tolerance = 1e-6 if b - a == 1 else 0.0
        assert_same([packed[:, a:b], *(x[n : n + 1] for x in state)], [apart, *last], tolerance)


def test_strided_inputs():
    q, k, v = fp32_inputs(2, 18, 2, 3, 5)
    want, _ = call("triton", q, k, v)
    strided = [x.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0) for x in (q, k, v)]
    assert strided[0].stride(-1) != 1
    assert_same([call("triton", *strided)[0]], [want], 0.0)
    expanded = v[:, :, :1].expand(-1, -1, 2, -1)
    got, _ = call("triton", q, k, expanded)
    assert_same([got], [call("triton", q, k, expanded.contiguous())[0]], 0.0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [False, True])
def test_memory_is_neither_read_nor_written_beyond(causal, packed, monkeypatch):
    """Every element of a buffer is written, and nothing around it; inputs lie among NaN."""
    fences = Fences()
    fences.guard(monkeypatch)
    T = 37 if causal else 70
    cu = boundaries(T).to(DEVICE) if packed else None
    N = 1 if cu is None else len(cu) - 1
    inputs = [*fp32_inputs(1, T, 1, 3, 5)]
    inputs += [x.float().to(DEVICE) for x in latte_state(N, 1, 3, 5)]
    leaves = [fences.of(x).requires_grad_() for x in inputs]
    mask = key_mask(1, T).to(DEVICE)
    out, state = call("triton", *leaves, causal=causal, key_mask=mask, cu_seqlens=cu)
    total = out.sum() + state.mean.sum() + state.log_mass.nan_to_num(neginf=0.0).sum()
    grads = torch.autograd.grad(total, leaves)
    assert not any(torch.isnan(x).any() for x in (out, *state, *grads))
    fences.check()


@pytest.mark.parametrize("causal", [True, False])
def test_a_sequence_that_is_all_masked(causal):
    q, k, v = (x.requires_grad_() for x in fp32_inputs(1, 20, 1, 3, 5))
    mask = torch.zeros(1, 20, dtype=torch.bool, device=DEVICE)
    out, state = call("triton", q, k, v, causal=causal, key_mask=mask)
    assert not out.any() and torch.isneginf(state.log_mass).all() and not state.mean.any()
    assert not any(g.any() for g in torch.autograd.grad(out.sum() + state.mean.sum(), (q, k, v)))


def masked_sources():
    """Op, options, its inputs of 20 tokens, and which of them belong to sources alone."""
    q, k, v = fp32_inputs(1, 20, 2, 3, 5)
    window = [x.float().to(DEVICE) for x in macchiato_inputs(1, 20, 2, 2, 3, 6, 5)]
    gates = [x[:, :, 0] for x in (v, v + 1.0, v - 1.0)]
    theta, weight = torch.zeros(5, device=DEVICE), torch.ones(5, 4, device=DEVICE)
    recurrent = partial(rg_lru, theta=theta)
    convolved = partial(causal_conv1d, weight=weight)
    return {
        "latte": (latte_attention, [q, k, v], (1, 2)),
        "bidirectional": (partial(latte_attention, causal=False), [q, k, v], (1, 2)),
        "macchiato": (partial(macchiato_attention, window=7), window, (1, 3, 4)),
        "window": (partial(sliding_window_attention, window=7), window[2:], (1, 2)),
        "rg_lru": (recurrent, gates, (0, 1, 2)),
        "convolution": (convolved, gates[:1], (0,)),
    }


@pytest.mark.parametrize("junk", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", masked_sources())
def test_a_masked_source_may_hold_anything(name, junk):
    """Also what is not finite: for outputs, gradients and what follows."""
    op, inputs, sources = masked_sources()[name]
    mask = torch.ones(1, 20, dtype=torch.bool, device=DEVICE)
    mask[:, :3] = mask[:, 9:13] = mask[:, 18] = False
    carries = name != "bidirectional"
    results = []
    for fill in (0.0, junk):
        parts = [x.clone() for x in inputs]
        for i in sources:
            parts[i][~mask] = fill
        parts = [x.requires_grad_() for x in parts]
        options = {"key_mask": mask, "backend": "triton", "output_final_state": carries}
        out, state = op(*parts, **options)
        total = out[mask].square().sum()
        if carries:
            more, _ = op(*(x[:, :4] for x in inputs), initial_state=state, backend="triton")
            total = total + more.square().sum()
        gradients = torch.autograd.grad(total, parts)
        results.append([out[mask], total, *(g[mask] for g in gradients)])
    assert_same(*results, 0.0)


@pytest.mark.filterwarnings("ignore:All-NaN")
@pytest.mark.parametrize("name", masked_sources())
def test_a_source_that_is_not_a_number_is_not_dropped(name):
    op, inputs, sources = masked_sources()[name]
    for i in sources:
        parts = [x.clone() for x in inputs]
        parts[i][0, 17] = torch.nan
        out = op(*parts, backend="triton")[0]
        assert out[0, 17:].isnan().all(-1).any() and not out[1:].isnan().any()


def test_values_with_fewer_heads_and_no_tokens():
    q, k, v = fp32_inputs(1, 17, 4, 3, 5)
    shared = v[:, :, :2]
    out, _ = call("triton", q, k, shared)
    assert_same([out], [call("triton", q, k, shared.repeat_interleave(2, 2))[0]], 0.0)
    out, state = call("triton", q[:, :0], k[:, :0], v[:, :0])
    assert out.shape == (1, 0, 4, 5) and torch.isneginf(state.log_mass).all()


@pytest.mark.parametrize(("causal", "packed"), [(True, True), (False, False)])
def test_compiles_in_one_graph(causal, packed):
    cu = torch.tensor([0, 3, 8], device=DEVICE) if packed else None
    options = {"causal": causal, "key_mask": key_mask(1, 8).to(DEVICE), "cu_seqlens": cu}
    same_when_compiled(lambda *x: call("triton", *x, **options), fp32_inputs(1, 8, 1, 3, 5))


@pytest.mark.parametrize(("op", "packed"), [(causal_op, True), (bidirectional_op, False)])
def test_custom_ops_keep_their_contracts(op, packed):
    """Schema, fake tensors, autograd registration and dynamic shapes (torch.library.opcheck)."""
    inputs = [x.requires_grad_() for x in fp32_inputs(1, 5, 1, 3, 5)]
    cu = torch.tensor([0, 2, 5], device=DEVICE) if packed else None
    mask = key_mask(1, 5).to(DEVICE)
    checks = torch.library.opcheck(op, (*inputs, mask, cu, None, None))
    assert set(checks.values()) == {"SUCCESS"}


def test_what_the_kernels_cannot_serve_is_told():
    q, k, v = latte_inputs(1, 4, 1, 3, 5)
    with pytest.raises(ValueError, match="'triton' is not available for torch.float64"):
        latte_attention(q, k, v, backend="triton")
    wide = torch.zeros(1, 4, 1, 600)
    with pytest.raises(ValueError, match="not available for L=3, D=600: expected L from 1 to 256"):
        latte_attention(q.float(), k.float(), wide, backend="triton")


def test_a_state_comes_back_as_it_went_in():
    q, k, v = fp32_inputs(1, 9, 1, 3, 5)
    state = LatteState(*(x.float().to(DEVICE) for x in latte_state(1, 1, 3, 5)))
    _, after = call("triton", q, k, v, *state, key_mask=torch.zeros_like(q[..., 0, 0]).bool())
    assert_same([*after], [*state], 1e-6)


def test_sequences_without_tokens_keep_their_state():
    compare(3, packed=True, carried=True)


@pytest.fixture(params=[1, 2], ids=["a chunk each", "two chunks each"])
def cut(request, monkeypatch):
    """Segments of one or two chunks, which else are cut from long sequences alone.

    The scans over them take two at a time.
    """
    monkeypatch.setitem(launch.SCAN, "U", 2)
    monkeypatch.setattr(segments, "SHORTEST", request.param)
    return request.param


@pytest.mark.parametrize(
    ("masked", "packed", "carried"), [(False, False, True), (True, True, True)]
)
def test_segments_agree_with_the_reference(cut, masked, packed, carried):
    compare(70, masked=masked, packed=packed, carried=carried)


@pytest.mark.parametrize("kind", ["jump", "creeping", "dominant"])
def test_extreme_logits_across_segments(kind, monkeypatch):
    monkeypatch.setattr(segments, "SHORTEST", 1)
    got = judged(extreme(kind, 70, 1, 3))
    assert all(torch.isfinite(x).all() for x in got)


@pytest.mark.parametrize("latents", [3, 130])
def test_the_cut_does_not_matter(latents, monkeypatch):
    inputs = [x.float().to(DEVICE) for x in latte_inputs(1, 52, 1, latents, 5, scale=2.0)]
    results = []
    for shortest in (4, 2, 1):
        monkeypatch.setattr(segments, "SHORTEST", shortest)
        results.append(values_and_gradients(lambda *x: call("triton", *x), inputs))
    for other in results[1:]:
        assert_same(other, results[0], 2e-6)


@pytest.mark.parametrize("change", [1.0, 1e4])
@pytest.mark.parametrize("t", [40, 48])
def test_the_future_cannot_change_the_past_across_segments(t, change, cut):
    q, k, v = (x.float().to(DEVICE) for x in latte_inputs(1, 70, 1, 3, 5, scale=2.0))
    before, _ = call("triton", q, k, v)
    k[:, t:] += change
    v[:, t:] += 7.0
    after, _ = call("triton", q, k, v)
    assert torch.equal(before[:, :t], after[:, :t])
    assert not torch.equal(before[:, t:], after[:, t:])


@pytest.mark.parametrize("shortest", [4, 1], ids=["whole", "cut"])
def test_gradients_of_outputs_that_nothing_has_reached(shortest, monkeypatch):
    """Masked tokens come first. Their outputs are 0 whatever follows, so nobody feels them."""
    monkeypatch.setattr(segments, "SHORTEST", shortest)
    inputs = [x.float().to(DEVICE).requires_grad_() for x in latte_inputs(1, 60, 1, 3, 5)]
    mask = (torch.arange(60, device=DEVICE) >= 45)[None]
    out, _ = call("triton", *inputs, key_mask=mask)
    ones = torch.ones_like(out)
    want = torch.autograd.grad(out, inputs, ones, retain_graph=True)
    ones[:, :45] = 1e12
    got = torch.autograd.grad(out, inputs, ones)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_nothing_is_saved_between_chunks(monkeypatch):
    """One segment: the inputs and the final mean alone. Several: one state for each."""
    inputs = [x.float().to(DEVICE) for x in latte_inputs(1, 60, 1, 3, 5)]
    between = causal_op(*inputs, None, None, None, None)[3:]
    assert all(x.numel() == 0 for x in between)
    monkeypatch.setattr(segments, "SHORTEST", 2)
    between = causal_op(*inputs, None, None, None, None)[3:]
    assert [x.shape[0] for x in between] == [2, 2, 2, 1, 1]


@pytest.mark.parametrize(
    ("B", "T", "heads", "packed", "count"),
    [
        (32, 2048, 8, False, 1),  # B x H programs are enough
        (64, 1 << 20, 4, False, 1),
        (1, 65536, 8, False, 64),  # 66 wanted, of whole chunks
        (1, 65536, 8, True, 64),
        (16, 4096, 8, False, 5),
        (1, 256, 8, False, 1),  # too short to be worth a pass
        (1, 512, 8, False, 2),
        (1, 0, 8, False, 1),
    ],
)
def test_segments_fill_the_gpu(B, T, heads, packed, count):
    length = segment_length(B, T, heads, 64, packed)
    assert length % 64 == 0 and max(1, -(-T // length)) == count


@triton.jit
def prefix_sums(x_ptr, out_ptr, C: tl.constexpr, BL: tl.constexpr):
    rows = tl.arange(0, C)
    at = rows[:, None] * BL + tl.arange(0, BL)[None, :]
    past = (rows[:, None] >= rows[None, :]).to(tl.float32)
    tl.store(out_ptr + at, counted(past, tl.load(x_ptr + at), "tf32x3"))


def test_counting_in_two_products_loses_nothing():
    """Beside a factor of zeros and ones, two parts of ten bits hold fp32's sums."""
    x = torch.rand(16, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    out = torch.empty_like(x)
    prefix_sums[(1,)](x, out, 16, 32)
    torch.testing.assert_close(out.double(), x.double().cumsum(0), rtol=2e-6, atol=0.0)
