"""Linear maps in half precision on a CPU that emulates them: computed in fp32, otherwise alike."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from latte.ops import widened
from latte.ops.widened import LEAST_ROWS, Widened, widen_calls
from tests.conversion.bases import converted, tokens

HALF = (torch.bfloat16, torch.float16)


class Fp32Calls(TorchFunctionMode):
    """The shapes of inputs of linear maps in fp32."""

    def __init__(self):
        self.shapes = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear and args[0].dtype == torch.float32:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def widened_shapes(monkeypatch):
    """The products that are widened on a CPU without half-precision products."""
    monkeypatch.setattr(widened, "emulates", lambda dtype: dtype in HALF)
    with Fp32Calls() as calls:
        yield calls.shapes


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("bias", [True, False])
def test_many_rows_are_computed_in_fp32(widened_shapes, dtype, bias):
    torch.manual_seed(0)
    layer = nn.Linear(24, 40, bias=bias).to(dtype)
    x = torch.randn(2, LEAST_ROWS, 24).to(dtype).requires_grad_()
    with Widened():
        out = layer(x)
    assert widened_shapes == [(2, LEAST_ROWS, 24)] and out.dtype == dtype
    b = None if layer.bias is None else layer.bias.float()
    assert torch.equal(out, F.linear(x.float(), layer.weight.float(), b).to(dtype))
    mine = torch.autograd.grad(out.sum(), (x, *layer.parameters()))
    theirs = torch.autograd.grad(layer(x).sum(), (x, *layer.parameters()))
    for own, other in zip(mine, theirs, strict=True):
        assert own.dtype == dtype
        torch.testing.assert_close(own.float(), other.float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("rows", "dtype", "autocast"),
    [
        (LEAST_ROWS - 1, torch.bfloat16, False),
        (LEAST_ROWS, torch.bfloat16, True),
        (LEAST_ROWS, torch.float64, False),
    ],
)
def test_what_stays_as_it_is(widened_shapes, rows, dtype, autocast):
    x, weight = torch.randn(rows, 8).to(dtype), torch.randn(6, 8).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain = F.linear(x, weight)
        with Widened():
            assert torch.equal(F.linear(x, weight), plain)
    assert not widened_shapes


def test_a_model_whose_calls_are_widened(widened_shapes):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).bfloat16()
    widen_calls(model)
    x = torch.randn(LEAST_ROWS, 8).bfloat16()
    model(x)
    assert len(widened_shapes) == 1
    with pytest.raises(RuntimeError):
        model(x[:, :3])  # the context is left where the call fails
    widened_shapes.clear()
    F.linear(x, model[0].weight)
    assert not widened_shapes
    plain = nn.Linear(8, 8)
    widen_calls(plain)
    assert not plain._forward_hooks


def test_a_converted_model_widens_its_batches(widened_shapes):
    model = converted("llama", latent_input="none").bfloat16()
    widened_shapes.clear()
    with torch.no_grad():
        model(tokens(LEAST_ROWS)[:1])
    # In each of four layers q, k, v, o, gate, up and down and the latents' two; then the head.
    assert len(widened_shapes) == 4 * (7 + 2) + 1


@pytest.mark.parametrize("available", [True, False])
@pytest.mark.parametrize("supported", [True, False])
def test_what_the_cpu_emulates(available, supported, monkeypatch):
    asked = {torch.bfloat16: supported, torch.float16: not supported}
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: available)
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        told = asked[dtype]
        monkeypatch.setattr(
            torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", lambda told=told: told
        )
        assert widened._emulates.__wrapped__(dtype) == (available and not told)
    assert not widened._emulates.__wrapped__(torch.float32)
