"""Latents that forget, on kernels, beyond the laws: any decay, and its digits."""

from __future__ import annotations

import pytest

from latte.ops.triton_backend import launch, segments
from tests.ops.helpers import relative_error
from tests.ops.opdb import BF16
from tests.ops.triton_backend.kernel_helpers import kernels


@pytest.mark.parametrize("shortest", [None, 1, 2], ids=["whole", "a chunk each", "two each"])
@pytest.mark.parametrize(
    ("op", "mean"), [("forgetting", m) for m in (1e-8, 2.0, 50.0)] + [("macchiato-forgetting", 6.0)]
)
@pytest.mark.parametrize("everything", [False, True])
def test_slow_and_fast_decays_agree_with_the_reference(op, mean, everything, shortest, monkeypatch):
    if shortest is not None:
        monkeypatch.setattr(segments, "SHORTEST", shortest)
    bench = kernels(op)
    inputs, state, options = bench.given(40, everything, everything, True, B=1)
    inputs[-1] *= mean / 0.16
    bench.judged(inputs, state, **options)


@pytest.mark.parametrize("op", ["forgetting", "macchiato-forgetting"])
def test_wide_values(op):
    """Several tiles of D, each of which gives a part of the gradient."""
    kernels(op, D=40).agrees(20, B=1, carried=True)


@pytest.mark.parametrize("kind", ["dominant", "at once", "large"])
def test_extreme_logits_and_decays(kind, monkeypatch):
    """What is far above its past, and what forgets all of it at one token."""
    monkeypatch.setattr(segments, "SHORTEST", 1)
    bench = kernels("forgetting")
    q, k, v, g = bench.inputs(1, 37)
    if kind == "dominant":
        k[:, 12] += 1e3
        g -= 30.0
    elif kind == "at once":
        g[:, 20] = -300.0
    else:
        k += 1e4
    assert all(x.isfinite().all() for x in bench.judged([q, k, v, g], output_final_state=True))


def test_products_in_bf16_keep_the_decays_digits():
    """What is forgotten is summed to 16 bits and more, whatever the inputs' precision."""
    bench = kernels("forgetting", L=16, D=16)._replace(dtype=BF16)
    *low, g = bench.inputs(1, 70)
    inputs, options = [*low, 0.3 * g.float()], {"output_final_state": True}
    got = bench.results(inputs, **options)
    plain = bench.judge(BF16).results(inputs, **options)
    want = bench.judge().results([x.double() for x in inputs], **options)
    assert len(got) == 8  # the output, the state, gradients of q, k, v and the decays
    for i in (0, 4, 5, 6):
        assert relative_error(got[i], want[i]) <= 2 * relative_error(plain[i], want[i])
    assert relative_error(got[7], want[7]) < 5e-3  # of dk in bf16, each of which it sums
    assert (got[1] - want[1]).abs().max() < 2e-3  # log-masses


def test_wide_heads_beside_a_window_in_bf16(monkeypatch):
    """Chunks of 32 tokens: those of 64 have products that an old assembler gets wrong."""
    monkeypatch.setattr(segments, "SHORTEST", 1)
    assert launch.walking(4, 72, BF16, forgets=True, K=8).C == 32
    assert launch.walking(4, 72, BF16, forgets=True).C == 64
    bench = kernels("macchiato-forgetting", D=72)._replace(dtype=BF16)
    *low, g = bench.inputs(1, 100)
    inputs, options = [*low, g.float()], {"output_final_state": True}
    got = bench.results(inputs, **options)
    plain = bench.judge(BF16).results(inputs, **options)
    want = bench.judge().results([x.double() for x in inputs], **options)
    for mine, low_precision, exact in zip(got, plain, want, strict=True):
        assert relative_error(mine, exact) <= 2 * relative_error(low_precision, exact) + 5e-3
