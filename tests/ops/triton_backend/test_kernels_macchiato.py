"""Macchiato's fused kernels against the reference: values, gradients, laws, memory manners."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    F64,
    assert_same,
    boundaries,
    flat,
    key_mask,
    latte_state,
    macchiato_inputs,
    relative_error,
    values_and_gradients,
    window_state,
)
from kernel_helpers import (
    DEVICE,
    Fences,
    compare_window,
    judged,
    macchiato,
    same_when_compiled,
    window,
)

from latte.ops import LatteState, macchiato_attention
from latte.ops.triton_backend import launch, segments
from latte.ops.triton_backend.macchiato import macchiato_op


def fp32_inputs(*shape, **options):
    return [x.float().to(DEVICE) for x in macchiato_inputs(*shape, **options)]


def states(N):
    """An earlier state for 2 heads, 1 key head, L = 3, K = 6, D = 5, W = 16; and its flags."""
    tail = window_state(N, 15, 1, 6, 5)
    tensors = [*latte_state(N, 2, 3, 5), *tail[:2]]
    return [x.float().to(DEVICE) for x in tensors], tail.mask.to(DEVICE)


@pytest.mark.parametrize(("packed", "carried"), [(False, False), (False, True), (True, True)])
def test_agrees_with_the_reference(packed, carried):
    H = 1 if packed else 2
    compare_window(macchiato, 66, H=H, masked=True, packed=packed, carried=carried)


@pytest.mark.parametrize("packed", [False, True])
def test_agrees_with_the_reference_in_both_directions(packed):
    compare_window(macchiato, 66, H=1, masked=True, packed=packed, causal=False)


@pytest.mark.parametrize(("T", "W"), [(1, 1), (64, 128), (65, 2)])
def test_lengths_and_windows(T, W):
    compare_window(macchiato, T, W=W, H=1, carried=True)


@pytest.mark.parametrize(
    ("L", "K", "D"), [(1, 1, 1), (16, 64, 70), (35, 5, 16), (3, 130, 5), (256, 3, 40)]
)
def test_widths(L, K, D):
    compare_window(macchiato, 20, L=L, K=K, D=D, H=1)
    compare_window(macchiato, 20, L=L, K=K, D=D, H=1, causal=False)


def test_groups_of_heads_batches_and_soft_cap():
    compare_window(macchiato, 20, B=2, H=4, G=2, carried=True, softcap=2.0)


@pytest.mark.parametrize("causal", [True, False])
def test_large_logits(causal):
    compare_window(macchiato, 37 if causal else 66, H=1, masked=True, causal=causal, scale=100.0)


@pytest.mark.parametrize("kind", ["jump", "alternating", "window closed", "window alone"])
def test_extreme_latent_logits(kind):
    """Rows beyond a reference's reach, and shares of the window that are 0 or 1 in fp32."""
    latent_q, latent_k, q, k, v = (x.float() for x in macchiato_inputs(1, 40, 1, 1))
    if kind == "jump":
        latent_k[:, 13:] += 120.0
    elif kind == "alternating":
        latent_k += 1.5e4 * (-1.0) ** torch.arange(40)[None, :, None, None]
    else:
        latent_q[..., 0] = -1e4 if kind == "window closed" else 1e4
    got = judged([latent_q, latent_k, q, k, v], macchiato)
    assert all(torch.isfinite(x).all() for x in got)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_errs_at_most_twice_the_reference(dtype):
    low = [x.to(DEVICE, dtype) for x in macchiato_inputs(1, 70, 2, 1, 16, 64, 64)]

    def run(backend, inputs):
        return values_and_gradients(
            lambda *x: macchiato(backend, *x, window=40, output_final_state=False), inputs
        )

    want = run("reference", [x.to(F64) for x in low])
    for a, b, e in zip(run("triton", low), run("reference", low), want, strict=True):
        assert a.dtype == dtype
        assert relative_error(a, e) <= 2 * relative_error(b, e)


@pytest.mark.parametrize("cut", [1, 20])
def test_split_equals_whole(cut):
    inputs = fp32_inputs(1, 37, 2, 1)
    whole, last = macchiato("triton", *inputs)
    first, (latte, tail) = macchiato("triton", *(x[:, :cut] for x in inputs))
    second, state = macchiato(
        "triton", *(x[:, cut:] for x in inputs), *latte, *tail[:2], tail_mask=tail.mask
    )
    assert_same([torch.cat([first, second], 1), *flat(state)], [whole, *flat(last)], 2e-6)


@pytest.mark.parametrize(("t", "change"), [(3, 1.0), (32, 1e4), (36, 1.0)])
def test_the_future_cannot_change_the_past(t, change):
    inputs = fp32_inputs(1, 37, 1, 1)
    before, _ = macchiato("triton", *inputs)
    for x in inputs:
        x[:, t:] += change
    inputs[2][:, t:] *= -1.0
    after, _ = macchiato("triton", *inputs)
    assert torch.equal(before[:, :t], after[:, :t])
    assert not torch.equal(before[:, t:], after[:, t:])


def test_packed_equals_separate():
    # All in one segment: cutting rounds in its own way.
    cu = [0, 0, 17, 18, 60]
    inputs = fp32_inputs(1, 60, 1, 1)
    bounds = torch.tensor(cu, dtype=torch.int32, device=DEVICE)
    packed, _ = macchiato("triton", *inputs, cu_seqlens=bounds)
    for a, b in zip(cu, cu[1:], strict=False):
        apart, _ = macchiato("triton", *(x[:, a:b] for x in inputs))
        # A token alone goes to decoding's kernel, which rounds in its own way.
        assert_same([packed[:, a:b]], [apart], 1e-6 if b - a == 1 else 0.0)


def test_rows_are_one_distribution():
    latent_q, latent_k, q, k, _ = fp32_inputs(1, 70, 1, 1, scale=3.0)
    out, _ = macchiato("triton", latent_q, latent_k, q, k, torch.ones(1, 70, 1, 1, device=DEVICE))
    assert_same([out], [torch.ones_like(out)], 2e-6)


def test_a_window_that_takes_all_is_the_window():
    latent_q, latent_k, q, k, v = fp32_inputs(1, 40, 2, 1)
    latent_q[..., 0] = 1e4
    want, _ = window("triton", q, k, v)
    assert_same([macchiato("triton", latent_q, latent_k, q, k, v)[0]], [want], 1e-6)


def test_strided_inputs():
    inputs = fp32_inputs(2, 18, 2, 1)
    want, _ = macchiato("triton", *inputs)
    strided = [x.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0) for x in inputs]
    assert torch.equal(macchiato("triton", *strided)[0], want)


@pytest.mark.parametrize("causal", [True, False])
def test_what_sees_nothing_is_zero_and_has_no_gradient(causal):
    leaves = [x.requires_grad_() for x in fp32_inputs(1, 20, 2, 1)]
    mask = torch.zeros(1, 20, dtype=torch.bool, device=DEVICE)
    out, _ = macchiato("triton", *leaves, key_mask=mask, causal=causal, output_final_state=False)
    assert not out.any()
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize(("causal", "packed"), [(True, True), (False, False)])
def test_memory_is_neither_read_nor_written_beyond(causal, packed, monkeypatch):
    fences = Fences()
    cu = boundaries(70).to(DEVICE) if packed else None
    earlier, flags = states(1 if cu is None else len(cu) - 1)
    inputs = fp32_inputs(1, 70, 2, 1) + (earlier if causal else [])
    leaves = [fences.of(x).requires_grad_() for x in inputs]
    fences.guard(monkeypatch)
    options = {"key_mask": key_mask(1, 70).to(DEVICE), "cu_seqlens": cu, "causal": causal}
    out, _ = macchiato("triton", *leaves, tail_mask=flags, output_final_state=False, **options)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert not any(torch.isnan(x).any() for x in (out, *grads))
    fences.check()


@pytest.mark.parametrize("causal", [True, False])
def test_compiles_in_one_graph(causal):
    cu = torch.tensor([0, 3, 8], device=DEVICE)
    earlier, flags = states(2)
    inputs = fp32_inputs(1, 8, 2, 1) + (earlier if causal else [])
    options = {"key_mask": key_mask(1, 8).to(DEVICE), "cu_seqlens": cu, "causal": causal}
    same_when_compiled(lambda *x: macchiato("triton", *x, tail_mask=flags, **options), inputs)


def test_custom_op_keeps_its_contract():
    inputs = [x.requires_grad_() for x in fp32_inputs(1, 5, 1, 1)]
    cu = torch.tensor([0, 2, 5], device=DEVICE)
    options = (key_mask(1, 5).to(DEVICE), cu, *[None] * 14, 16, 0.4, 0.0, True, False)
    checks = torch.library.opcheck(macchiato_op, (*inputs, *options))
    assert set(checks.values()) == {"SUCCESS"}


def test_what_cannot_be_served_is_told():
    inputs = fp32_inputs(1, 4, 2, 1)

    def refused(message, *inputs, **options):
        with pytest.raises(ValueError, match=message):
            macchiato_attention(*inputs, window=4, backend="triton", **options)

    refused("'triton' is not available for torch.float64", *(x.double() for x in inputs))
    many = [torch.zeros(1, 4, 1, L, device=DEVICE) for L in (301, 300, 6, 6, 5)]
    refused("not available for L=300, D=5: expected L from 1 to 256", *many)
    refused("bidirectional window has no state", *inputs, causal=False, output_final_state=True)
    state = (LatteState.empty(2, 2, 3, 5, device=DEVICE), None)
    refused(r"initial_state.log_mass must have shape \(1, 2, 3\)", *inputs, initial_state=state)


def test_no_tokens():
    out, state = macchiato("triton", *(x[:, :0] for x in fp32_inputs(1, 4, 2, 1)))
    assert out.shape == (1, 0, 2, 5) and torch.isneginf(state[0].log_mass).all()


@pytest.fixture
def cut(monkeypatch):
    """Segments of one chunk, else cut from long sequences alone; scanned two at a time."""
    monkeypatch.setitem(launch.SCAN, "U", 2)
    monkeypatch.setattr(segments, "SHORTEST", 1)


@pytest.mark.parametrize("packed", [False, True])
def test_segments_agree_with_the_reference(cut, packed):
    """With a window that reaches into the segments before, and values shared by two heads."""
    compare_window(macchiato, 70, W=34, masked=True, packed=packed, carried=True)


def test_extreme_logits_across_segments(cut):
    latent_q, latent_k, q, k, v = (x.float() for x in macchiato_inputs(1, 70, 1, 1))
    latent_k[:, 35:] += 120.0
    latent_k[:, 50:] += 1e4
    got = judged([latent_q, latent_k, q, k, v], macchiato)
    assert all(torch.isfinite(x).all() for x in got)


def test_the_cut_does_not_matter(monkeypatch):
    """Nor do the tiles of D that the walks back take one after the other."""
    inputs = fp32_inputs(1, 52, 2, 1, D=70, scale=2.0)
    results = []
    for shortest in (4, 2, 1):
        monkeypatch.setattr(segments, "SHORTEST", shortest)
        results.append(values_and_gradients(lambda *x: macchiato("triton", *x), inputs))
    for other in results[1:]:
        assert_same(other, results[0], 4e-6)


@pytest.mark.parametrize(("t", "change"), [(40, 1e4), (48, 1.0)])
def test_the_future_cannot_change_the_past_across_segments(t, change, cut):
    inputs = fp32_inputs(1, 70, 1, 1, scale=2.0)
    before, _ = macchiato("triton", *inputs)
    for x in inputs:
        x[:, t:] += change
    inputs[2][:, t:] *= -1.0
    after, _ = macchiato("triton", *inputs)
    assert torch.equal(before[:, :t], after[:, :t])
    assert not torch.equal(before[:, t:], after[:, t:])


def test_rows_beyond_reach_keep_the_windows_part():
    """A jump inside a chunk: later rows take their latents token by token, and their window too."""
    latent_q, latent_k, q, k, v = fp32_inputs(1, 20, 1, 1)
    latent_k[:, 7:] += 1e4
    want = macchiato("reference", *(x.double() for x in (latent_q, latent_k, q, k, v)))[0]
    got = macchiato("triton", latent_q, latent_k, q, k, v)[0]
    assert_same([got.double()], [want], 2e-6)


def test_nothing_is_saved_between_chunks(monkeypatch):
    """One segment: the inputs and the final mean alone. Several: one state for each."""
    inputs = fp32_inputs(1, 60, 2, 1)
    options = (*[None] * 16, 16, 0.4, 0.0, True, False)
    assert all(x.numel() == 0 for x in macchiato_op(*inputs, *options)[4:])
    monkeypatch.setattr(segments, "SHORTEST", 2)
    *between, falls = macchiato_op(*inputs, *options)[5:]
    assert [x.shape[0] for x in between] == [2, 2, 2, 1, 1] and falls.numel() == 0


def test_memory_of_segments_is_neither_read_nor_written_beyond(cut, monkeypatch):
    fences = Fences()
    cu = torch.tensor([0, 0, 33, 70], device=DEVICE)
    leaves = [fences.of(x).requires_grad_() for x in fp32_inputs(1, 70, 2, 1)]
    fences.guard(monkeypatch)
    out, _ = macchiato("triton", *leaves, cu_seqlens=cu, output_final_state=False)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert not any(torch.isnan(x).any() for x in (out, *grads))
    fences.check()
