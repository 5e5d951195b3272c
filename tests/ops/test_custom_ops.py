"""How custom ops are registered, on an op that is small enough to know everything about it."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from latte.ops.custom_ops import Written, custom_op, differentiable_op
from tests.ops.helpers import F64, randn


class Affine(NamedTuple):
    a: Tensor
    b: Tensor
    bias: Tensor | None
    factor: float
    turned: bool = False


def formula(x):
    """out = factor e^a + b + bias, negative if ``turned``."""
    out = x.factor * x.a.exp() + x.b
    out = out if x.bias is None else out + x.bias
    return (-out if x.turned else out,)


def forward(x):
    return *formula(x), x.a.exp()


def backward(x, dout, power):
    dout = -dout.double() if x.turned else dout.double()
    found = {"a": x.factor * power * dout, "b": dout.clone()}
    return found if x.bias is None else found | {"bias": 1.0 * dout}


once = differentiable_op(
    "toy_once",
    Affine,
    lambda x: (torch.empty_like(x.a), torch.empty_like(x.a)),
    forward,
    backward,
    returns=["out"],
    gradients=["a", "b", "bias"],
    saves=["power"],
    stand_ins={"b": "out"},
)


def inputs(dtype=F64):
    return [randn(3, 2, seed=seed).to(dtype).requires_grad_() for seed in range(3)]


def test_fields_are_the_schema():
    assert str(once._schema) == (
        "latte::toy_once(Tensor a, Tensor b, Tensor? bias, float factor, bool turned=False)"
        " -> (Tensor, Tensor)"
    )
    assert str(torch.ops.latte.toy_once_backward.default._schema) == (
        "latte::toy_once_backward(Tensor dout, Tensor a, Tensor b, Tensor? bias,"
        " Tensor saved_power, float factor, bool turned) -> (Tensor, Tensor, Tensor)"
    )


@pytest.mark.parametrize("turned", [(), (True,)])
def test_gradients_go_to_the_arguments_of_their_names(turned):
    a, b, bias = inputs()
    for given in ((a, b, bias), (a, b)):
        args = (*given, *[None] * (3 - len(given)), 0.5, *turned)
        slope = randn(3, 2, seed=9)
        found = torch.autograd.grad(once(*args)[0], given, slope)
        expected = torch.autograd.grad(formula(Affine(*args)), given, slope)
        torch.testing.assert_close(found, expected)
        checks = torch.library.opcheck(once, args)
        assert set(checks.values()) == {"SUCCESS"}


def test_gradients_have_the_dtypes_of_their_arguments():
    leaves = inputs(torch.float32)
    found = torch.autograd.grad(once(*leaves, 0.5)[0].sum(), leaves)
    assert all(x.dtype == torch.float32 for x in found)


def test_what_is_saved_has_no_gradient():
    out, power = once(*inputs(), 0.5)
    assert out.requires_grad and not power.requires_grad


def test_an_argument_with_a_stand_in_is_not_kept():
    kept, (a, b, bias) = [], inputs()
    with saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        out, power = once(a, b, bias, 0.5)
    assert sorted(kept) == sorted(x.data_ptr() for x in (a, out, bias, power))


def test_gradients_of_gradients_are_refused():
    leaves = inputs()
    with pytest.raises(
        NotImplementedError, match='^latte::toy_once has no.*="reference" has them$'
    ):
        torch.autograd.grad(once(*leaves, 0.5)[0].sum(), leaves, create_graph=True)


class Filled(NamedTuple):
    x: Written
    y: Tensor
    z: Written | None
    count: int
    cap: float | None


def test_what_an_op_writes_is_in_its_schema():
    op = custom_op("toy_filled", Filled, 1, lambda x: torch.empty_like(x.y))
    assert str(op._schema) == (
        "latte::toy_filled(Tensor(a0!) x, Tensor y, Tensor(a2!)? z, int count, float? cap)"
        " -> Tensor"
    )


def test_autocast_is_off_in_a_kernel():
    seen = []

    def kernel(x):
        seen.append(torch.is_autocast_enabled("cpu"))
        return x.a + x.b

    op = custom_op("toy_sum", Affine, 1, lambda x: torch.empty_like(x.a), kernel)
    with torch.autocast("cpu", torch.bfloat16):
        op(randn(2), randn(2), None, 1.0)
    assert seen == [False]
