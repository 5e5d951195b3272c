"""Sequences that are cut into segments, which only long ones are: the cut must not matter."""

from __future__ import annotations

import pytest
import torch

from latte.ops.triton_backend import launch, segments
from tests.ops.helpers import assert_same
from tests.ops.triton_backend.kernel_helpers import kernels

ROWS = ["latte", "forgetting", "macchiato", "macchiato-forgetting"]
SLOW = [
    pytest.param(op, marks=pytest.mark.slow) for op in ("sinks", "delayed", "joint", "converted")
]


@pytest.fixture(params=[1, 2], ids=["a chunk each", "two chunks each"])
def cut(request, monkeypatch):
    """Segments of one or two chunks. The scans over them take two at a time."""
    monkeypatch.setitem(launch.SCAN, "U", 2)
    monkeypatch.setattr(segments, "SHORTEST", request.param)


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("op", [*ROWS, *SLOW])
def test_they_agree_with_the_reference(cut, op, everything):
    """With a window that reaches into the segments before, and values shared by two heads."""
    bench = kernels(op, H=1 if op == "latte" else 2, W=34)
    bench.agrees(70, masked=everything, packed=everything, carried=True, B=1)


@pytest.mark.parametrize("kind", ["jump", "creeping", "dominant"])
@pytest.mark.parametrize("op", ["latte", "macchiato"])
def test_extreme_logits(op, kind, monkeypatch):
    monkeypatch.setattr(segments, "SHORTEST", 1)
    bench = kernels(op)
    assert all(x.isfinite().all() for x in bench.judged(bench.extreme(kind, 70)))


@pytest.mark.parametrize(("op", "sizes"), [("latte", {}), ("latte", {"L": 130}),
                                           ("macchiato", {"H": 2, "D": 70})])  # fmt: skip
def test_where_it_is_cut_does_not_matter(op, sizes, monkeypatch):
    """Nor do the tiles of D that the walks back take one after the other."""
    bench, results = kernels(op, **sizes), []
    inputs = bench.inputs(1, 52, scale=2.0)
    for shortest in (4, 2, 1):
        monkeypatch.setattr(segments, "SHORTEST", shortest)
        results.append(bench.results(inputs, output_final_state=True))
    for other in results[1:]:
        assert_same(other, results[0], 4e-6)


@pytest.mark.parametrize(("t", "change"), [(40, 1e4), (48, 1.0)])
@pytest.mark.parametrize("op", ROWS)
def test_the_future_cannot_change_the_past(cut, op, t, change):
    bench = kernels(op)
    inputs = bench.inputs(1, 70, scale=2.0)
    before, _ = bench.call(inputs)
    after, _ = bench.call(bench.filled(inputs, (slice(None), slice(t, None)), change, queries=True))
    assert torch.equal(before[:, :t], after[:, :t])
    assert not torch.equal(before[:, t:], after[:, t:])
