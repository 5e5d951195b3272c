"""Models and ops under ``torch.compile`` and ``torch.export``: the same values, few graphs."""

from __future__ import annotations

import functools

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from latte.models import inputs
from latte.ops import latte_attention
from latte.ops.checks import check_shape
from tests.models import modeldb
from tests.ops.opdb import OPS, Bench

TOLERANCE = {"atol": 1e-9, "rtol": 1e-9}
LENGTHS = (33, 34, 50)


@pytest.fixture(autouse=True)
def _anew():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def one_layer(preset, kind="lm", **options):
    return modeldb.made(preset, kind, num_hidden_layers=1, **options).double()


def graphs(fn, calls):
    """The number of graphs after each call of ``fn``, compiled for any length."""
    counter, seen = CompileCounter(), []
    compiled = torch.compile(fn, backend=counter, dynamic=True, fullgraph=True)
    for given in calls:
        expected = fn(*given)
        torch.testing.assert_close(compiled(*given), expected, **TOLERANCE)
        seen.append(counter.frame_count)
    return seen


@pytest.mark.parametrize("preset", ["latte-gated", "latte-hybrid", "transformer++"])
def test_one_graph_is_for_every_length(preset):
    model = one_layer(preset)
    calls = [(modeldb.tokens(2, length),) for length in LENGTHS]
    with torch.no_grad():
        seen = graphs(lambda ids: model(ids, use_cache=False).logits, calls)
    assert seen == [1] * len(LENGTHS)


SLOW = [pytest.param(op, marks=pytest.mark.slow) for op in ("linear", "joint")]


@pytest.mark.parametrize("op", ["macchiato", "log-mass", *SLOW])
def test_an_op_has_one_graph_for_every_length(op):
    bench = Bench(OPS[op], "torch")
    calls = [bench.given(length)[0] for length in LENGTHS]
    with torch.no_grad():
        seen = graphs(lambda *given: bench.call(given)[0], calls)
    assert seen[:2] == [1, 1] and seen[-1] <= 2


def test_a_size_that_does_not_fit_is_told_as_before():
    q = torch.zeros(2, 33, 2, 3)
    with pytest.raises(ValueError, match=r"k must have shape \(B=2, T=33, H=2, L=3\), got \(2, 33"):
        latte_attention(q, q[..., :2], q)
    with pytest.raises(ValueError, match=r"x must have shape \(B=2, T, N\), got \(3, 4, 5\)"):
        check_shape("op", "x", torch.zeros(3, 4, 5), "BTN", {"B": 2})


LENGTHS_OF_PARTS = (3, 11, 1, 9)


def packed_batch(lengths=LENGTHS_OF_PARTS):
    parts = [modeldb.tokens(1, length, seed=length) for length in lengths]
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    index = torch.repeat_interleave(torch.tensor(lengths))[None].int()
    return parts, torch.cat(parts, 1), {"position_ids": places, "seq_idx": index}


@pytest.mark.parametrize("name", ["position_ids", "seq_idx"])
def test_a_graph_keeps_packed_sequences_apart(name):
    model = one_layer("latte-gated")
    parts, ids, marks = packed_batch()
    with torch.no_grad():
        alone = torch.cat([model(part).logits for part in parts], 1)
        sums = [
            model(part, labels=part, num_items_in_batch=20).loss
            for part in parts
            if part.numel() > 1
        ]
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        found = compiled(ids, labels=ids, **{name: marks[name]})
    torch.testing.assert_close(found.logits, alone, **TOLERANCE)
    torch.testing.assert_close(found.loss, sum(sums))


@pytest.mark.parametrize("name", ["latte++", "llama: window"])
def test_a_graph_of_several_rows_takes_one_row_of_positions(name):
    model, ids = modeldb.BY_NAME[name].model(), modeldb.tokens(2, 9)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        found = compiled(ids, position_ids=torch.arange(9)[None], labels=ids)
        torch.testing.assert_close(found.logits, model(ids, labels=ids).logits, **TOLERANCE)


def test_a_graph_says_when_it_has_too_few_bounds(monkeypatch):
    monkeypatch.setattr(inputs, "MOST_IN_GRAPH", 3)
    model, (parts, ids, marks) = one_layer("latte++"), packed_batch()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        few = compiled(ids[:, :15], seq_idx=marks["seq_idx"][:, :15]).logits
        with pytest.raises(RuntimeError, match="at most 3 packed sequences .* pass cu_seq_lens_q"):
            compiled(ids, seq_idx=marks["seq_idx"])
    torch.testing.assert_close(few[:, :3], model(parts[0]).logits, **TOLERANCE)


@pytest.mark.parametrize(
    "make",
    [
        *(functools.partial(one_layer, x) for x in ("latte-r-swa++", "latte-gated")),
        modeldb.BY_NAME["llama: window"].model,
    ],
    ids=["latte-r-swa++", "latte-gated", "converted"],
)
def test_an_exported_forward_is_for_every_size(make):
    model, ids = make(), modeldb.tokens(2, 20)
    sizes = {"input_ids": {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}, "use_cache": None}
    with torch.no_grad():
        program = torch.export.export(model, (ids,), {"use_cache": False}, dynamic_shapes=sizes)
        other = modeldb.tokens(3, 33)
        found = program.module()(other, use_cache=False).logits
        torch.testing.assert_close(found, model(other, use_cache=False).logits, **TOLERANCE)
