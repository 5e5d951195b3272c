"""The division of the past, and Latte-Macchiato's state in any NamedTuple that has its parts."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from latte.ops import (
    LatteState,
    MacchiatoState,
    Partition,
    WindowState,
    cpp_backend,
    latte_attention,
    macchiato_attention,
)
from latte.ops.state import with_all_values
from tests.ops.helpers import latte_inputs, macchiato_inputs
from tests.ops.opdb import leaves

BACKENDS = ["reference", "torch", *(["cpu"] if cpp_backend.ABSENT is None else [])]
T, CUT = 17, 9


class LayerState(NamedTuple):
    """A layer's state, with more than the op's parts and in another order."""

    pending: WindowState | None = None
    position: Any = 7
    latent: LatteState | None = None
    window: WindowState | None = None


def equal(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("delay", [False, True])
def test_a_state_comes_back_in_the_type_in_which_it_came(delay, backend):
    inputs = macchiato_inputs(2, T)
    options = {"window": 5, "backend": backend, "partition": Partition(delay=delay)}
    results = []
    for start in (None, MacchiatoState(), LayerState()):
        state, outs = start, []
        for part in (slice(0, CUT), slice(CUT, T)):
            piece = [x[:, part] for x in inputs]
            out, state = macchiato_attention(
                *piece, initial_state=state, output_final_state=True, **options
            )
            assert type(state) is type(start or MacchiatoState()), type(state)
            assert (state.pending is not None) == delay
            outs.append(out)
        if start == LayerState():
            assert state.position == 7
        results.append((*outs, MacchiatoState(state.latent, state.window, state.pending)))
    assert equal(results[0], results[1]) and equal(results[0], results[2])
    plain = tuple(x for x in results[0][-1] if x is not None)  # as it was before it had names
    again, state = macchiato_attention(
        *inputs, initial_state=plain, output_final_state=True, **options
    )
    assert type(state) is MacchiatoState
    named, _ = macchiato_attention(*inputs, initial_state=results[0][-1], **options)
    assert torch.equal(again, named)


def test_an_empty_state_is_none_where_none_is_expected():
    """A bidirectional window, and packed sequences with the joint softmax, take no state."""
    inputs, bounds = macchiato_inputs(1, T), torch.tensor([0, CUT, T], dtype=torch.int32)
    cases = [{"causal": False}, {"cu_seqlens": bounds, "partition": Partition(joint=True)}]
    for options in cases:
        out, _ = macchiato_attention(*inputs, window=5, **options)
        again, _ = macchiato_attention(*inputs, window=5, initial_state=LayerState(), **options)
        assert torch.equal(out, again)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [1, 5, 12])
@pytest.mark.parametrize("packed", [False, True])
def test_pending_values_that_the_window_holds_too_need_not_be_there(packed, window, backend):
    bounds = torch.tensor([0, 4, CUT], dtype=torch.int32) if packed else None
    options: dict[str, Any] = {"window": window, "backend": backend, "cu_seqlens": bounds}
    options["partition"] = Partition(delay=True)
    inputs = [x[:, :CUT].requires_grad_() for x in macchiato_inputs(1, T)]
    _, state = macchiato_attention(*inputs, output_final_state=True, **options)
    N = 2 if packed else 1
    assert state.pending.keys.shape == (N, window, 4, 3)
    assert state.pending.values.shape == (N, 1, 2, 5) and state.pending.mask.shape == (N, window)
    whole = state._replace(pending=with_all_values(state.pending, state.window))
    assert whole.pending.values.shape == (N, window, 2, 5)
    grads = []
    for start in (state, whole):
        out, _ = macchiato_attention(*inputs, initial_state=start, **options)
        grads.append([out, *torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)])
    assert equal(grads[0][:1], grads[1][:1])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("op", "inputs"),
    [(latte_attention, latte_inputs(1, 4)), (macchiato_attention, macchiato_inputs(1, 4))],
)
def test_a_state_that_is_not_read_is_not_made(op, inputs, monkeypatch):
    def refused(*sizes: int, **options: Any) -> LatteState:
        raise AssertionError("an empty state was made")

    monkeypatch.setattr(LatteState, "empty", refused)
    op(*inputs, output_final_state=True)
