"""The RG-LRU's gates as a GPU computes them, here on a CPU: those of the modules."""

from __future__ import annotations

import pytest
import torch

from latte.layers import recurrent
from latte.layers.recurrent import RGLRU
from latte.ops import use_backend
from tests.ops.helpers import randn

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.fixture
def fused(monkeypatch):
    """A function that says whether the next calls are as on a GPU, and a list of these calls."""
    calls, apply = [], recurrent._Gates.apply
    monkeypatch.setattr(recurrent._Gates, "apply", lambda *x: calls.append(x) or apply(*x))

    def on(there):
        monkeypatch.setattr(recurrent, "on_gpu", lambda x: there)
        return calls

    return on


def results(layer, x, slope):
    out, _ = layer(x)
    return [out, *torch.autograd.grad(out, [x, *layer.parameters()], slope)]


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("lowered", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_gates_and_their_gradients(fused, dtype, lowered, blocks):
    torch.manual_seed(0)
    layer = RGLRU(12, blocks).to(dtype)
    x, slope = randn(2, 5, 12).to(dtype), randn(2, 5, 12, seed=1).to(dtype)
    x = x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()  # strides do not matter
    found = []
    for there in (False, True):
        calls = fused(there)
        with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
            found.append(results(layer, x, slope))
    assert len(calls) == 1
    coarse = lowered or dtype == torch.bfloat16
    tolerance = {"atol": 0.02, "rtol": 0.02} if coarse else {}
    for own, plain in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(own, plain, **tolerance)


def test_a_hook_and_the_reference_call_the_modules(fused):
    layer, x, seen = RGLRU(12, 3), randn(2, 5, 12).float(), []
    calls = fused(True)
    with use_backend("reference"):
        layer(x)
    hook = layer.input_gate.register_forward_hook(lambda *_: seen.append(1))
    layer(x)
    assert seen == [1] and not calls
    hook.remove()
    layer(x)
    assert len(calls) == 1
