"""Linear maps of one input as a GPU computes them, here on a CPU: those of the modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from latte.layers import projections
from latte.layers.projections import cast, project
from latte.ops import use_backend
from tests.ops.helpers import randn

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.fixture
def calls(monkeypatch):
    """The calls that were computed together, as on a GPU."""
    found, apply = [], projections._Projections.apply
    monkeypatch.setattr(projections, "on_gpu", lambda x: True)
    monkeypatch.setattr(projections._Projections, "apply", lambda *x: found.append(x) or apply(*x))
    return found


def maps(dtype=torch.float32, bias=False):
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(6, M, bias=bias, dtype=dtype) for M in (6, 6, 4))


def gradients(outputs, x, linears):
    """Of x and the weights that ask for them."""
    leaves = [y for y in (x, *linears.parameters()) if y.requires_grad]
    total = sum((y.double() * randn(*y.shape, seed=i)).sum() for i, y in enumerate(outputs))
    return torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("lowered", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["all", "first unused", "frozen weight", "frozen input"])
def test_outputs_and_gradients(calls, dtype, lowered, case):
    linears, x = maps(dtype), randn(2, 5, 6).to(dtype).requires_grad_(case != "frozen input")
    linears[1].weight.requires_grad_(case != "frozen weight")
    used = slice(1 if case == "first unused" else 0, None)
    if case == "first unused":
        linears[0].weight.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16, enabled=lowered and dtype != torch.float64):
        own, plain = project(x, *linears), [linear(x) for linear in linears]
    assert len(calls) == 1
    for a, b in zip(own, plain, strict=True):
        assert torch.equal(a, b)
    coarse = lowered or dtype == torch.bfloat16
    for a, b in zip(*(gradients(y[used], x, linears) for y in (own, plain)), strict=True):
        torch.testing.assert_close(a, b, **({"atol": 0.03, "rtol": 0.03} if coarse else {}))


def test_gradients_that_lie_one_after_the_other_take_one_product(calls):
    x, linears = randn(2, 5, 6).float(), maps()[:2]
    dys, seen = torch.stack([randn(2, 5, 6, seed=i).float() for i in range(2)]), []
    for given in (dys.unbind(), [dy.clone() for dy in dys], dys.unbind()[::-1]):
        with profile(activities=[ProfilerActivity.CPU]) as ran:
            found = torch.autograd.grad(project(x, *linears), list(linears.parameters()), given)
        seen.append(sum(event.name == "aten::bmm" for event in ran.events()))
        for dw, dy in zip(found, given, strict=True):
            torch.testing.assert_close(dw, dy.flatten(0, 1).mT @ x.flatten(0, 1))
    assert seen == [1, 0, 0]


def test_others_are_called(calls):
    x, linears, seen = randn(2, 6).float(), maps(), []
    hook = linears[2].register_forward_hook(lambda *_: seen.append(1))
    project(x, *linears)
    hook.remove()
    project(x, *maps(bias=True))
    project(x.double(), *maps(torch.float64).double()[:1], nn.Identity())
    with use_backend("reference"):
        project(x, *linears)
    with torch.no_grad():
        project(x, *linears)
    assert seen == [1] and not calls
    assert len(project(x, *linears)) == 3 and len(calls) == 1


def test_second_derivatives_are_refused(calls):
    x, linears = randn(2, 6).float().requires_grad_(), maps()
    with pytest.raises(NotImplementedError, match="linear maps of one input"):
        torch.autograd.grad(project(x, *linears)[0].sum(), x, create_graph=True)


def test_a_cast_of_several_tensors():
    xs = [randn(2, 3), randn(4)[::2]]
    for y, x in zip(cast(torch.bfloat16, *xs), xs, strict=True):
        assert y.dtype == torch.bfloat16 and torch.equal(y, x.bfloat16())
    assert cast(torch.float64, *xs) == xs and cast(torch.float64) == []
