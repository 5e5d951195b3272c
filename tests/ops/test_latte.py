"""The PyTorch backend's segments and kernels, states that merge, and a million tokens."""

from __future__ import annotations

import pytest
import torch

from latte.ops import latte_attention
from latte.ops.torch_backend import latte as torch_latte
from latte.ops.torch_backend import linear_domain, pairwise
from latte.ops.torch_backend.batching import Carry
from latte.ops.torch_backend.latte import LatteSegment
from tests.ops.helpers import (
    assert_same,
    key_mask,
    latte_inputs,
    randn,
    values_and_gradients,
)
from tests.ops.opdb import OPS, Bench


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
@pytest.mark.parametrize("op", ["latte", "bidirectional", "forgetting", "delayed-forgetting"])
def test_many_segments(op, scale, packed, monkeypatch):
    """Segments of one chunk: the state passes through several boundaries, both ways."""
    monkeypatch.setattr(torch_latte, "LONGEST_SEGMENT", 64)
    Bench(OPS[op], "torch").agrees(257, packed=packed, carried=True, scale=scale)


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
    run_from = LatteSegment.run_from
    # Level 1: the run before was short.
    monkeypatch.setattr(
        LatteSegment, "run_from", lambda self, t, state, _: run_from(self, t, state, 1)
    )
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


def test_values_with_fewer_heads_are_repeated():
    q, k, _ = latte_inputs(2, 17, 4, 3, 5)
    v = randn(2, 17, 2, 5, seed=4)
    out, _ = latte_attention(q, k, v)
    assert_same([out], [latte_attention(q, k, v.repeat_interleave(2, 2))[0]], 0.0)


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_a_million_tokens_in_pieces(scale):
    """Streamed through a state: finite, exact against one fp64 sum, means bounded by max |v|."""
    T, piece, H, L, D = 1_000_000, 4096, 1, 4, 2
    generator = torch.Generator().manual_seed(0)
    state, exact_top, sums = None, None, None
    for start in range(0, T, piece):
        n = min(piece, T - start)
        q = torch.randn(1, n, H, L, generator=generator) * scale
        k = torch.randn(1, n, H, L, generator=generator) * scale
        v = torch.randn(1, n, H, D, generator=generator)
        out, state = latte_attention(
            q, k, v, initial_state=state, output_final_state=True, backend="torch"
        )
        assert torch.isfinite(out).all() and out.abs().max() < 6.5
        keys, values = k.double(), v.double()
        top = keys.amax(1)[0]
        top = top if exact_top is None else torch.maximum(top, exact_top)
        e = torch.exp(keys[0] - top)
        mass, weighted = e.sum(0), torch.einsum("shl,shd->hld", e, values[0])
        if sums is not None:
            decay = torch.exp(exact_top - top)
            mass, weighted = mass + decay * sums[0], weighted + decay[..., None] * sums[1]
        exact_top, sums = top, (mass, weighted)
    log_mass, mean = exact_top + sums[0].log(), sums[1] / sums[0][..., None]
    # fp32 states: the log-mass is rounded once per piece, so are the means.
    assert torch.allclose(state.log_mass[0].double(), log_mass, rtol=1e-6, atol=2e-5)
    assert (state.mean[0] - mean).abs().max() < 1e-3
