"""The state of latents: what it is made of, and how states merge."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from latte.ops import LatteState, cpp_backend, latte_attention
from tests.ops.helpers import F64, assert_same, latte_inputs, latte_state, randn

FORGETTING = pytest.mark.parametrize("forgetting", [False, True])


def state(seed: int, forgetting: bool) -> LatteState:
    latents = latte_state(2, 3, 4, 5, seed=seed, scale=50.0)
    decay = -randn(2, 3, 4, seed=seed).abs() if forgetting else None
    return LatteState(latents.log_mass, latents.mean, decay)


@FORGETTING
def test_a_state_is_the_tuple_of_its_parts(forgetting):
    given = state(1, forgetting)
    log_mass, mean, *rest = given
    assert given.log_mass is log_mass and given.mean is mean and given.forgets == forgetting
    want = rest[0] if forgetting else torch.zeros_like(log_mass)
    assert len(rest) == forgetting and torch.equal(given.log_decay, want)
    parts = {"log_mass": log_mass, "mean": mean, "log_decay": rest[0] if rest else None}
    assert all(a is b for a, b in zip(LatteState(**parts), given, strict=True))


@FORGETTING
def test_copies_and_maps_of_a_state_are_states(forgetting):
    given = state(1, forgetting)
    made = {
        "copy": copy.deepcopy(given),
        "pickle": pickle.loads(pickle.dumps(given)),
        "pytree": tree_map(torch.clone, given),
        "vmap": torch.func.vmap(lambda x: LatteState(*(2 * part for part in x)))(given),
    }
    for name, found in made.items():
        assert type(found) is LatteState, name
        times = 2 if name == "vmap" else 1
        assert all(torch.equal(a, times * b) for a, b in zip(found, given, strict=True)), name


@FORGETTING
@pytest.mark.parametrize("forgetting_before", [False, True])
def test_a_compiled_call_takes_merges_and_returns_states(forgetting_before, forgetting):
    def call(before: LatteState, decay: Tensor | None, *inputs: Tensor):
        own = latte_attention(*inputs, log_decay=decay, output_final_state=True)[1]
        assert own is not None
        return before.merge(own), LatteState(own.log_mass, own.mean, before.log_decay)

    inputs = latte_inputs(2, 9, 3, 4, 5)
    decay = -randn(3, 4).abs() if forgetting else None
    arguments = state(1, forgetting_before), decay, *inputs
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(*arguments)
    for a, b in zip(found, call(*arguments), strict=True):
        assert type(a) is LatteState
        assert_same([*a], [*b], 1e-12)


@pytest.mark.parametrize("backend", ["reference", "torch", "cpu"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_log_mass_that_is_not_finite_gives_no_number(backend, bad):
    """In the outputs of its own head, and in the next state."""
    if backend == "cpu" and cpp_backend.ABSENT is not None:
        pytest.skip(cpp_backend.ABSENT)
    before, alone = latte_state(2, 3, 4, 5), torch.zeros(2, 3, dtype=torch.bool)
    before.log_mass[0, 1, 2], alone[0, 1] = bad, True
    options = {"initial_state": before, "output_final_state": True, "backend": backend}
    out, after = latte_attention(*latte_inputs(2, 9, 3, 4, 5), **options)
    lost = out.isnan().transpose(1, 2).flatten(2)
    assert torch.equal(lost.all(2), alone) and torch.equal(lost.any(2), alone)
    assert after.log_mass.isnan().nonzero().tolist() == [[0, 1, 2]]
    assert torch.equal(after.mean.isnan().flatten(2).any(2), alone)


@FORGETTING
def test_merge_is_associative_and_has_a_neutral_element(forgetting):
    a, b, c = (state(seed, forgetting) for seed in (1, 20, 40))
    assert_same([*a.merge(b).merge(c)], [*a.merge(b.merge(c))], 1e-12)
    other = state(60, not forgetting)
    assert_same([*a.merge(other).merge(b)], [*a.merge(other.merge(b))], 1e-12)
    empty = LatteState.empty(2, 3, 4, 5, dtype=F64)
    assert_same([*a.merge(empty)], [*a], 0.0)
    assert_same([*empty.merge(a)], [*a], 0.0)
    assert a.merge(other).forgets and not empty.merge(empty).forgets
    nothing = empty.merge(empty)
    assert torch.isneginf(nothing.log_mass).all() and (nothing.mean == 0).all()


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (LatteState.empty(1, 3, 4, 5, dtype=F64), r"log_mass .*\(2, 3, 4\), got \(1, 3, 4\)"),
        (LatteState.empty(2, 3, 4, 1, dtype=F64), r"mean .*\(2, 3, 4, 5\), got \(2, 3, 4, 1\)"),
        (LatteState.empty(2, 3, 4, 5), r"log_mass must be torch.float64 on cpu, got torch.float32"),
        ((torch.zeros(2, 3, 4), torch.zeros(2, 3, 4, 5)), "expected a LatteState, got tuple"),
    ],
)
def test_merge_takes_the_state_of_as_many_sequences(other, told):
    """Nothing is broadcast."""
    with pytest.raises(ValueError, match=told):
        state(1, False).merge(other)


@FORGETTING
def test_merge_of_parts_is_the_state_of_the_whole(forgetting):
    inputs = latte_inputs(2, 65, 2, 3, 5, scale=5.0)
    decay = -randn(2, 65, 2, 3).abs() if forgetting else None

    def state_after(tokens: slice) -> LatteState:
        given = [x[:, tokens] for x in inputs]
        g = None if decay is None else decay[:, tokens]
        after = latte_attention(*given, log_decay=g, output_final_state=True)[1]
        assert after is not None
        return after

    parts = state_after(slice(0, 31)).merge(state_after(slice(31, 65)))
    assert_same([*parts], [*state_after(slice(0, 65))], 1e-12)


def test_merge_of_empty_states_has_finite_gradients():
    parts = [x.requires_grad_() for _ in range(2) for x in LatteState.empty(1, 1, 2, 3, dtype=F64)]
    merged = LatteState(*parts[:2]).merge(LatteState(*parts[2:]))
    grads = torch.autograd.grad(merged.mean.sum(), parts, allow_unused=True)
    assert all(g is None or torch.isfinite(g).all() for g in grads)
