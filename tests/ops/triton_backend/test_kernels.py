"""Triton kernels against the reference: values and all gradients, odd shapes, extreme logits."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import F64, latte_inputs, relative_error, values_and_gradients
from kernel_helpers import DEVICE, call, compare, judged


def combinations():
    """Mask, packing and state: none, all, and in the slow tests all the others."""
    for options in itertools.product([False, True], repeat=3):
        yield pytest.param(*options, marks=[] if len(set(options)) == 1 else pytest.mark.slow)


@pytest.mark.parametrize(("masked", "packed", "carried"), combinations())
@pytest.mark.parametrize("causal", [True, False])
def test_agrees_with_the_reference(causal, masked, packed, carried):
    compare(66, causal=causal, masked=masked, packed=packed, carried=carried)


@pytest.mark.parametrize("T", [1, 63, 64, 130])
@pytest.mark.parametrize("causal", [True, False])
def test_lengths(causal, T):
    compare(T, causal=causal, B=1, H=1 if T > 64 else 2, carried=True)


@pytest.mark.parametrize(("L", "D"), [(1, 5), (3, 64), (16, 96), (32, 64), (130, 5), (256, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_odd_widths(causal, L, D):
    compare(35 if L != 3 else 65, causal=causal, L=L, D=D, B=1)


@pytest.mark.parametrize("causal", [True, False])
def test_many_tiles(causal):
    compare(20, causal=causal, L=3, D=512, B=1, carried=True)


@pytest.mark.parametrize("scale", [30.0, 1e4])
def test_large_logits(scale):
    compare(66, masked=True, packed=True, carried=True, scale=scale)


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
    got = judged(extreme(kind, 66, 1, 3), causal=causal)
    assert all(torch.isfinite(x).all() for x in got)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
def test_low_precision_errs_at_most_twice_the_reference(dtype, causal):
    """Outputs and gradients; the fp32 state is as exact as its products' factors."""
    low = [x.to(DEVICE, dtype) for x in latte_inputs(1, 90, 1, 16, 64, scale=2.0)]

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
