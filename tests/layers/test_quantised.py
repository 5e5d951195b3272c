"""Linear maps of 4 and 8 bits: their products, gradients and files, in every order of integers."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from latte.layers import quantised
from latte.layers.native import direct
from latte.layers.quantised import Quantised, QuantisedEmbedding, QuantisedLinear
from latte.ops import cpp_backend
from latte.ops.quantised import GROUP, PANEL, Integers, quantise

SHAPES = [(16, 32), (64, 32), (80, 64), (144, 96), (192, 64)]  # outputs, inputs
KINDS = ("int4", "int8")
ORDERS = ("rows", "pytorch", "native")


def prepare(module, order):
    """Put the integers of a map in the order of PyTorch's kernel, or of the native ones."""
    with pytest.MonkeyPatch.context() as patch:
        if order == "pytorch":
            patch.setattr(cpp_backend, "ABSENT", "left out")
        if order != "rows":
            module.prepare()
    if order == "native" and cpp_backend.ABSENT is None:
        assert module.block == PANEL


def made(outputs, inputs, kind="int4", order="native", dtype=torch.bfloat16, bias=False):
    """A map, and its dequantised weights (N, K) in fp32, read from the integers one by one."""
    torch.manual_seed(outputs + inputs)
    plain = nn.Linear(inputs, outputs, bias=bias)
    integers = quantise(plain.weight, kind)
    if kind == "int8":
        weight = integers.weight.float() * integers.scales.float().t().repeat_interleave(GROUP, 1)
    else:
        q = torch.stack([integers.weight & 15, integers.weight >> 4], -1).flatten(1).float() - 8
        scale, zero = integers.scales.float().transpose(0, 1).unbind(-1)
        scale, zero = (x.repeat_interleave(GROUP, 1) for x in (scale, zero))
        weight = q * scale + zero
    module = QuantisedLinear(integers, plain).to(dtype)
    prepare(module, order)
    return module, weight


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_the_dequantised_weights(shape, kind, order):
    for dtype, bound in ((torch.float32, 3e-3), (torch.bfloat16, 6e-3)):
        module, weight = made(*shape, kind, order, dtype)
        torch.testing.assert_close(module.dequantised(torch.float32), weight, rtol=1e-6, atol=1e-7)
        for rows in (0, 1, 5, 65):
            x = torch.randn(rows, 2, shape[1], dtype=dtype)
            with torch.no_grad():
                out, called = module(x), direct(x[:, 0], module)(x[:, 0])
            expected = F.linear(x.float(), weight)
            assert out.dtype == dtype and out.shape == (rows, 2, shape[0])
            # Of one product both factors are rounded to bf16, 2^-9 each at most; so is the result.
            assert (out.float() - expected).norm() <= bound * expected.norm()
            assert (called.float() - expected[:, 0]).norm() <= bound * expected[:, 0].norm()
            if module.block == PANEL and dtype == torch.float32:  # 15 bits of x
                assert (out - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_to_nearest_and_keeps_what_the_format_can_hold(kind):
    module, weight = made(64, 96, kind)
    again = quantise(weight, kind)
    if kind == "int8":  # exactly representable weights come back
        scales = again.scales.float().t().repeat_interleave(GROUP, 1)
        torch.testing.assert_close(again.weight.float() * scales, weight)
    plain = torch.randn(64, 96)
    error = (
        QuantisedLinear(quantise(plain, kind), nn.Linear(96, 64, False)).dequantised(torch.float32)
        - plain
    ).norm() / plain.norm()
    # Rounding errs by step / sqrt(12): a range of some 4 deviations in 15 or 254 steps.
    assert error < {"int4": 0.09, "int8": 0.006}[kind]
    for value in (0.0, 0.5):
        constant = torch.full((16, 32), value)
        found = QuantisedLinear(quantise(constant, kind), nn.Linear(32, 16, False))
        torch.testing.assert_close(found.dequantised(torch.float32), constant, rtol=8e-3, atol=0)


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_flow_through_to_the_input_and_nowhere_else(kind, rows):
    module, weight = made(80, 64, kind, dtype=torch.float32, bias=True)
    module.bias.requires_grad_()
    x = torch.randn(rows, 64, requires_grad=True)
    y = torch.randn(rows, 80)
    (x_grad,) = torch.autograd.grad(module(x), x, y)
    torch.testing.assert_close(x_grad, y @ weight, rtol=1e-5, atol=1e-5)
    module(x).sum().backward()
    assert module.weight.grad is None and module.scales.grad is None
    torch.testing.assert_close(module.bias.grad, torch.full((80,), float(rows)))
    # The gradient's own gradient is that of a linear map: the product again.
    v = torch.randn(rows, 80, requires_grad=True)
    (once,) = torch.autograd.grad(module(x), x, v, create_graph=True)
    (twice,) = torch.autograd.grad(once, v, torch.ones_like(once))
    torch.testing.assert_close(twice, torch.ones_like(once) @ weight.T, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_state_dict_has_the_integers_in_the_order_of_the_rows(shape, kind, order):
    plain, _ = made(*shape, kind, "rows")
    ready, _ = made(*shape, kind, order)
    for name, x in plain.state_dict().items():
        assert torch.equal(ready.state_dict()[name], x)
    other = copy.deepcopy(ready)
    with torch.no_grad():
        other.weight.zero_()
    other.load_state_dict(plain.state_dict())
    assert torch.equal(other.plain(), plain.weight)
    assert not other.block or other.block == quantised.best_order(kind)
    assert torch.equal(pickle.loads(pickle.dumps(ready)).weight, ready.weight)


@pytest.mark.skipif(cpp_backend.ABSENT is not None, reason="the native kernels are not built")
def test_a_row_does_not_depend_on_the_rows_beside_it_and_shows_what_is_not_finite():
    for kind in KINDS:
        module, _ = made(80, 64, kind, dtype=torch.float32)
        x = torch.randn(15, 64)
        x[3], x[5, 40], x[6, 2] = 0.0, float("nan"), -float("inf")
        with torch.no_grad():
            out = module(x)
            for one, row in zip(x, out, strict=True):
                assert torch.equal(module(one[None])[0], row) or row.isnan().all()
        finite = out.isfinite().all(1).tolist()
        assert finite == [row not in (5, 6) for row in range(15)]
        assert not out[3].any()


def test_integers_in_another_processors_order_are_dequantised(monkeypatch):
    module, weight = made(144, 96)
    x = torch.randn(1, 96, dtype=torch.bfloat16)
    monkeypatch.setattr(quantised, "best_order", lambda *_: 0)
    late = QuantisedLinear(Integers(module.plain(), module.scales), nn.Linear(96, 144, False))
    late.prepare()
    assert late.block == 0
    expected = F.linear(x.float(), weight)
    assert (late(x).float() - expected).norm() < 6e-3 * expected.norm()


@pytest.mark.parametrize("ready", [False, True])
def test_an_embedding_is_rows_of_its_weights_in_the_dtype_of_the_model(ready):
    like = nn.Embedding(43, 64, padding_idx=3)
    module = QuantisedEmbedding(quantise(like.weight, "int8"), like)
    if ready:
        module.prepare()
    ids = torch.tensor([[0, 7, 39], [3, 7, 1]])
    for dtype in (torch.float32, torch.bfloat16):
        module.to(dtype)
        assert torch.equal(module(ids), module.dequantised(dtype)[ids])
    original = module.original(torch.float32)
    assert type(original) is nn.Embedding and original.padding_idx == 3
    assert isinstance(module, Quantised)


def test_autocast_lowers_the_output_as_it_does_of_other_maps():
    module, _ = made(16, 32, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert module(torch.randn(2, 32)).dtype == torch.bfloat16


@pytest.mark.parametrize("order", ORDERS)
def test_outputs_that_fill_no_panel(order):
    """The head of a tokeniser of bytes."""
    for dtype in (torch.float32, torch.bfloat16):
        module, weight = made(259, 128, "int8", order, dtype)
        assert module.block == (PANEL if order == "native" and cpp_backend.ABSENT is None else 0)
        plain = module.state_dict()
        assert plain["weight"].shape == (259, 128)
        torch.testing.assert_close(module.dequantised(torch.float32), weight)
        for rows in (1, 8, 13):
            x = torch.randn(rows, 128, dtype=dtype)
            expected = F.linear(x.float(), weight)
            with torch.no_grad():
                out = module(x)
                compiled = torch.compile(module, fullgraph=True, backend="eager")(x)
            bound = 1e-4 if dtype == torch.float32 else 6e-3
            for found in (out, compiled):
                assert (found.float() - expected).norm() <= bound * expected.norm()
        module.load_state_dict(plain)
        assert torch.equal(module.plain(), plain["weight"])
