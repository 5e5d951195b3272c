"""What the custom ops of the PyTorch backend promise to the compiler."""

from __future__ import annotations

import pytest
import torch

from latte.ops import cpp_backend
from latte.ops.torch_backend.latte import bidirectional_op, causal_op
from latte.ops.torch_backend.macchiato import causal_op as macchiato_op
from latte.ops.torch_backend.recurrence import linear_recurrence
from latte.ops.torch_backend.window import window_op
from tests.ops.helpers import (
    boundaries,
    key_mask,
    latte_inputs,
    macchiato_inputs,
    randn,
    seen_sinks,
)
from tests.ops.opdb import OPS, Bench


@pytest.mark.parametrize("op", [causal_op, bidirectional_op])
def test_gradients_are_laid_out_as_promised_whatever_comes_in(op):
    q, k, v = latte_inputs(2, 6, 2, 3, 4)
    start = [randn(2, 2, 3).requires_grad_(), randn(2, 2, 3, 4).requires_grad_()]
    _, *state = op(q, k, v, None, None, *start)[:3]
    slopes = randn(3, 2, 2).permute(1, 2, 0), randn(4, 2, 2, 3).permute(1, 2, 3, 0)
    found = torch.autograd.grad(state, start, slopes)
    assert all(x.is_contiguous() for x in found)  # the compiler is told so


@pytest.mark.parametrize(("masked", "packed"), [(False, False), (True, True)])
def test_custom_ops_keep_their_contracts(packed, masked):
    """Schema, fake tensors, autograd registration and dynamic shapes (torch.library.opcheck)."""
    B = 1 if packed else 2
    q, k, v = (x.requires_grad_() for x in latte_inputs(B, 20))
    mask = key_mask(B, 20) if masked else None
    cu = boundaries(20) if packed else None
    checks = {}
    for op in (causal_op, bidirectional_op):
        checks |= torch.library.opcheck(op, (q, k, v, mask, cu, None, None))
    g = (-k.detach().abs()).requires_grad_()
    checks |= torch.library.opcheck(causal_op, (q, k, v, mask, cu, None, None, g))
    inputs = [x.requires_grad_() for x in macchiato_inputs(B, 20)]
    sinks = seen_sinks(B, 20, len(cu) - 1 if packed else B) if masked else [None] * 5
    around = (*[None] * 3, *sinks, 8, 0.4, 0.0, True)
    checks |= torch.library.opcheck(window_op, (*inputs[2:], mask, cu, *around))
    if masked:  # once is enough: it takes long
        late = [randn(B, 20, 2, 5).requires_grad_(), key_mask(B, 20), key_mask(B, 20)]
        around = (*[None] * 6, *sinks, *late, 8, 0.4, 0.0)
        checks |= torch.library.opcheck(macchiato_op, (*inputs, mask, cu, *around))
    assert set(checks.values()) == {"SUCCESS"}


def test_the_recurrence_keeps_its_contract():
    a, b, h0 = (randn(*shape).requires_grad_() for shape in ((2, 9, 3), (2, 9, 3), (2, 3)))
    checks = torch.library.opcheck(linear_recurrence, (a, b, h0))
    a, b = (randn(3, 9, 2).transpose(0, 2).requires_grad_() for _ in range(2))  # strides kept
    checks |= torch.library.opcheck(linear_recurrence, (a, b, h0))
    assert set(checks.values()) == {"SUCCESS"}


ONE_OF_EACH = ("bidirectional", "forgetting", "macchiato", "window-sinks", "full", "log-mass")
ONE_OF_EACH += ("linear", "rg_lru-reversed", "conv")
BACKENDS = ("torch",) if cpp_backend.ABSENT is not None else ("torch", "cpu")


@pytest.mark.parametrize("name", [*ONE_OF_EACH, "converted"])
def test_what_is_not_finite_stays_in_its_sequence_in_a_graph(name):
    """Where no value is looked at, as on a GPU: in the middle of three sequences."""
    bench, bounds, at = Bench(OPS[name], "torch"), [0, 20, 43, 60], 33
    inputs, cu = bench.inputs(1, 60, 3), torch.tensor(bounds, dtype=torch.int32)

    def run(*given):
        return bench.call(given, cu_seqlens=cu, output_final_state=name == "linear")

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    wanted, _ = run(*inputs)
    torch.testing.assert_close(compiled(*inputs)[0], wanted)
    first = at if bench.op.past else bounds[1]
    for i, (source, shape) in enumerate(bench.op.inputs.items()):
        if shape[:2] != "BT":
            continue
        bad = [x.clone() for x in inputs]
        bad[i][0, at] = torch.nan
        found, state = compiled(*bad)
        alone = [*range(first), *range(bounds[2], 60)]
        torch.testing.assert_close(found[:, alone], wanted[:, alone])
        assert found[:, at].isnan().all(), source
        if state is not None and source != "q":
            assert [bool(x.isnan().any()) for x in state.memory] == [False, True, False]


@pytest.mark.parametrize(
    ("name", "backend"), [(x, y) for x in ONE_OF_EACH for y in BACKENDS if y in OPS[x].backends]
)
def test_a_graph_refuses_bounds_that_do_not_fit(name, backend):
    """In the words of a call without a graph."""
    bench = Bench(OPS[name], backend)
    inputs = bench.inputs(1, 20, 3)

    def run(*given):
        return bench.call(given[1:], cu_seqlens=given[0])[0]

    def told(call, bounds):
        with pytest.raises(ValueError, match="must rise from 0 to T=20, got") as error:
            call(torch.tensor(bounds, dtype=torch.int32), *inputs)
        return str(error.value)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    good = torch.tensor([0, 5, 9, 20], dtype=torch.int32)
    torch.testing.assert_close(compiled(good, *inputs), run(good, *inputs))
    for bad in ([0, 9, 5, 20], [0, 5, 9, 19], [1, 5, 9, 20], [0, 5, 9, 25]):
        assert told(compiled, bad) == told(run, bad)
