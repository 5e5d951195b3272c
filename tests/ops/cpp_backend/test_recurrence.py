"""The native RG-LRU and convolution: extreme gates, transforms of PyTorch, contracts."""

from __future__ import annotations

import pytest
import torch

from latte.ops import causal_conv1d, cpp_backend, rg_lru
from tests.ops.helpers import (
    F64,
    assert_same,
    boundaries,
    key_mask,
    randn,
    values_and_gradients,
)


def lru_inputs(B, T, E):
    """x, both gates, theta."""
    return [*(randn(B, T, E, seed=s) for s in range(3)), randn(E, seed=3)]


def lru(backend, **options):
    def fn(x, r, i, theta, h0=None):
        options.setdefault("output_final_state", True)
        return rg_lru(x, r, i, theta, initial_state=h0, backend=backend, **options)

    return fn


def convolution(backend, **options):
    def fn(x, w, b=None, tail=None):
        options.setdefault("output_final_state", True)
        return causal_conv1d(x, w, b, initial_state=tail, backend=backend, **options)

    return fn


@pytest.mark.parametrize("gate", [-1e4, -90.0, 90.0, 1e4])
def test_saturated_gates(gate):
    x, theta = randn(1, 40, 5), randn(5)
    gates = torch.full((1, 40, 5), gate, dtype=F64)
    inputs = [x, gates, gates, theta]
    exact = values_and_gradients(lru("reference"), inputs)
    found = values_and_gradients(lru("cpu"), [z.float() for z in inputs])
    assert_same(found, exact, 1e-5)


def test_decays_near_one_keep_their_digits():
    """sqrt(1 - a^2) for log a from -1e-12 to -1: no cancellation in fp32."""
    theta = torch.linspace(-30, -2, 64, dtype=F64)
    x, opened = torch.zeros(1, 2, 64, dtype=F64), torch.full((1, 2, 64), 30.0, dtype=F64)
    x[:, 1] = 1.0
    exact, _ = lru("reference")(x, opened, opened, theta)
    found, _ = lru("cpu")(x.float(), opened.float(), opened.float(), theta.float())
    error = ((found[0, 1].double() - exact[0, 1]) / exact[0, 1]).abs().max().item()
    # theta and the logits are rounded to fp32 too: |theta| ulps of them.
    assert error < 40 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nan_comes_through(place, dtype):
    inputs = [z.to(dtype) for z in lru_inputs(1, 10, 21)]
    inputs[place].view(-1)[-11] = torch.nan  # channel 10 of the last token, or of theta
    states, _ = lru("cpu")(*inputs)
    expected, _ = lru("reference")(*inputs)
    assert torch.equal(states.isnan(), expected.isnan()) and expected.isnan().any()


def test_transforms_are_pytorchs():
    inputs = [z.requires_grad_() for z in (randn(1, 5, 2), randn(2, 3), randn(2))]
    batched = torch.func.vmap(lambda x: causal_conv1d(x, inputs[1])[0])(randn(3, 1, 5, 2))
    assert batched.shape == (3, 1, 5, 2)
    _, slope = torch.func.jvp(
        lambda x: causal_conv1d(x, inputs[1])[0], (inputs[0],), (randn(1, 5, 2),)
    )
    assert slope.abs().sum() > 0
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(inputs[0].detach(), randn(1, 5, 2))
        assert torch.autograd.forward_ad.unpack_dual(
            causal_conv1d(dual, inputs[1])[0]
        ).tangent.any()
        with pytest.raises(NotImplementedError, match="forward-mode"):
            convolution("cpu")(dual, inputs[1])


@pytest.mark.parametrize(  # every pair of choices
    ("masked", "packed", "carried"),
    [(False, False, False), (False, True, True), (True, False, True), (True, True, False)],
)
def test_custom_ops_keep_their_contracts(masked, packed, carried):
    B, T, E = (1 if packed else 2), 40, 3
    cu = boundaries(T).long() if packed else None
    N = B if cu is None else len(cu) - 1
    mask = key_mask(B, T) if masked else None
    state, tail = (randn(N, E), randn(N, 2, E)) if carried else (None, None)
    inputs = [x.requires_grad_() for x in lru_inputs(B, T, E)]
    checks = torch.library.opcheck(cpp_backend.rg_lru_op, (*inputs, state, mask, cu, False))
    args = (inputs[0], randn(E, 3).requires_grad_(), None, tail, mask, cu)
    checks |= torch.library.opcheck(cpp_backend.convolution_op, args)
    assert set(checks.values()) == {"SUCCESS"}
