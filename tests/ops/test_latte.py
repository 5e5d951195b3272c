"""Latte against the fp64 reference: values and all gradients, odd shapes, extreme logits."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    F64,
    assert_same,
    boundaries,
    key_mask,
    latte_inputs,
    latte_state,
    randn,
    relative_error,
    values_and_gradients,
)

from latte.ops import LatteState, latte_attention
from latte.ops.torch_backend import latte as torch_latte
from latte.ops.torch_backend import linear_domain, pairwise
from latte.ops.torch_backend.batching import Carry
from latte.ops.torch_backend.latte import Segment


def compare(
    T, *, causal=True, masked=False, packed=False, carried=False, H=2, L=3, D=5, B=2, scale=1.0
):
    B = 1 if packed else B
    cu = boundaries(T) if packed else None
    inputs = [*latte_inputs(B, T, H, L, D, scale)]
    if carried:
        inputs += latte_state(B if cu is None else len(cu) - 1, H, L, D, scale=scale)
    mask = key_mask(B, T) if masked else None

    def run(backend):
        def fn(q, k, v, *state):
            return latte_attention(
                q,
                k,
                v,
                causal=causal,
                key_mask=mask,
                cu_seqlens=cu,
                initial_state=LatteState(*state) if state else None,
                output_final_state=True,
                backend=backend,
            )

        return values_and_gradients(fn, inputs)

    assert_same(run("torch"), run("reference"))


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_agrees_with_the_reference(causal, masked, packed, carried, scale):
    for T in (1, 2, 63, 65, 257):
        compare(T, causal=causal, masked=masked, packed=packed, carried=carried, scale=scale)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("L", "D"), [(1, 5), (3, 64), (16, 96), (32, 256), (32, 1)])
def test_odd_widths(causal, L, D):
    compare(65, causal=causal, L=L, D=D, H=1)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("causal", [True, False])
def test_many_segments(causal, scale, packed, monkeypatch):
    """Segments of one chunk: the state passes through several boundaries, both ways."""
    monkeypatch.setattr(torch_latte, "LONGEST_SEGMENT", 64)
    compare(257, causal=causal, packed=packed, carried=True, scale=scale)


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_longer_than_one_segment(scale):
    compare(4099, carried=True, H=1, L=1, D=2, B=1, scale=scale)


@pytest.mark.parametrize("causal", [True, False])
def test_gradcheck(causal):
    q, k, v = (x.requires_grad_() for x in latte_inputs(1, 9, 2, 3, 2))
    state = [x.requires_grad_() for x in latte_state(1, 2, 3, 2)]
    state[0].data[0, 0] = 0.3  # finite differences cannot step away from -inf

    def fn(q, k, v, log_mass, mean):
        earlier = LatteState(log_mass, mean)
        out, last = latte_attention(
            q, k, v, causal=causal, initial_state=earlier, output_final_state=True, backend="torch"
        )
        return out, *last

    assert torch.autograd.gradcheck(fn, (q, k, v, *state))


def extreme(kind: str, T: int, H: int, L: int):
    q, k, v = latte_inputs(1, T, H, L, 4)
    if kind == "jump":
        k[:, T // 2 :] += 120.0
    elif kind == "fall":
        k[:, T // 2 :] -= 120.0
    elif kind == "dominant":
        k[:, T // 3] += 1e4
    elif kind == "rising":
        k += 70.0 * torch.arange(T, dtype=F64)[None, :, None, None]
    elif kind == "alternating":
        k += 1.5e4 * (-1.0) ** torch.arange(T)[None, :, None, None]
    elif kind == "huge queries":
        q *= 1e4
    return q, k, v


KINDS = ["jump", "fall", "dominant", "rising", "alternating", "huge queries"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_extreme_logits(kind, dtype):
    inputs = extreme(kind, 130, 2, 3)
    ref = values_and_gradients(lambda *x: latte_attention(*x, backend="reference"), inputs)
    low = [x.to(dtype) for x in inputs]
    # The reference sees the same rounded inputs, in fp64.
    if dtype != F64:
        same = [x.to(F64) for x in low]
        ref = values_and_gradients(lambda *x: latte_attention(*x, backend="reference"), same)
    out = values_and_gradients(lambda *x: latte_attention(*x, backend="torch"), low)
    assert all(torch.isfinite(x).all() for x in out)
    # fp32: at most twice what the reference errs in fp32, and a few ulps where it is exact.
    if dtype == F64:
        assert_same(out, ref)
        return
    judge = values_and_gradients(lambda *x: latte_attention(*x, backend="reference"), low)
    for got, plain, want in zip(out, judge, ref, strict=True):
        floor = 16 * torch.finfo(dtype).eps * max(1.0, want.norm().item())
        error = (got.to(F64) - want).norm().item()
        assert error <= max(2 * (plain.to(F64) - want).norm().item(), floor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
def test_low_precision_errs_at_most_twice_the_reference(dtype, causal):
    low = [x.to(dtype) for x in latte_inputs(2, 257, 2, 16, 64, scale=2.0)]
    exact = [x.to(F64) for x in low]

    def run(backend, inputs):
        return values_and_gradients(
            lambda *x: latte_attention(*x, causal=causal, backend=backend), inputs
        )

    want, judge, got = run("reference", exact), run("reference", low), run("torch", low)
    for a, b, e in zip(got, judge, want, strict=True):
        assert a.dtype == dtype
        assert relative_error(a, e) <= 2 * relative_error(b, e) + 4 * torch.finfo(F64).eps


@pytest.mark.parametrize("masked", [False, True])
def test_fast_and_safe_kernels_agree(masked, monkeypatch):
    """Both kernels serve ordinary logits; each is exact, so neither can hide the other."""
    inputs = latte_inputs(1, 192, 2, 4, 6)
    mask = key_mask(1, 192) if masked else None
    taken = []
    for module in (linear_domain, pairwise):

        def spy(*args, module=module, forward=module.forward):
            taken.append(module)
            return forward(*args)

        monkeypatch.setattr(module, "forward", spy)

    def fn(q, k, v):
        return latte_attention(q, k, v, key_mask=mask, output_final_state=True, backend="torch")

    quick = values_and_gradients(fn, inputs)
    assert taken == [linear_domain]
    run = Segment.run
    monkeypatch.setattr(Segment, "run", lambda self, t, state, short: run(self, t, state, True))
    slow = values_and_gradients(fn, inputs)
    assert taken == [linear_domain, pairwise]
    assert_same(quick, slow, 1e-12)


def test_runs_end_before_a_key_out_of_reach():
    """One reference for logits that span +-20 within a chunk is the family's classic NaN."""
    k = torch.linspace(0, 64, 65).view(1, 65, 1)
    nothing = Carry.of(torch.full((1, 1), -torch.inf), torch.zeros(1, 1, 1))
    top = k.amax(1)
    for start in (nothing, None):
        reference = linear_domain.reference_logits(k, start, None)
        assert reference.item() == 0.0 and linear_domain.run_length(k, top, reference) == 17
    assert linear_domain.run_length(k.flip(1), top, k.flip(1)[:, 0]) == 65


def test_outputs_do_not_depend_on_old_memory(monkeypatch):
    """Buffers from torch.empty are poisoned with NaN: every element must be written."""
    empty, empty_like, new_empty = torch.empty, torch.empty_like, torch.Tensor.new_empty

    def poison(x):
        return x.fill_(torch.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda self, *a, **k: poison(new_empty(self, *a, **k))
    )
    for packed in (False, True):
        compare(130, packed=packed, masked=True, carried=True)


def test_values_with_fewer_heads_are_repeated():
    q, k, _ = latte_inputs(2, 17, 4, 3, 5)
    v = randn(2, 17, 2, 5, seed=4)
    out, _ = latte_attention(q, k, v)
    assert_same([out], [latte_attention(q, k, v.repeat_interleave(2, 2))[0]], 0.0)


def test_non_contiguous_inputs():
    q, k, v = latte_inputs(2, 33, 2, 3, 5)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert not strided[0].is_contiguous()
    assert_same([latte_attention(*strided)[0]], [latte_attention(q, k, v)[0]], 0.0)
