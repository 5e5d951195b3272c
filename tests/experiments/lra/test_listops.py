"""ListOps: the values are right, the splits share nothing, and everything follows from the seed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.lra.data import ListOpsOptions, class_balance, load_task
from experiments.lra.data.examples import Examples
from experiments.lra.data.listops import (
    TOKENS,
    expression,
    make_splits,
    to_text,
)
from latte.errors import LatteError

SMALL = ListOpsOptions(
    min_length=5,
    max_length=40,
    max_depth=4,
    max_args=5,
    train_examples=60,
    validation_examples=20,
    test_examples=20,
)


def evaluate(text: str) -> int:
    """A stack machine over the written expression, with numpy's own functions."""
    functions = {
        "[MIN": np.min,
        "[MAX": np.max,
        "[MED": np.median,
        "[SM": lambda values: np.sum(values) % 10,
    }
    stack: list = []
    for word in text.split():
        if word != "]":
            stack.append(word if word in functions else int(word))
            continue
        values = []
        while not isinstance(stack[-1], str):
            values.append(stack.pop())
        stack.append(int(functions[stack.pop()](values)))
    (value,) = stack
    return value


def shape(text: str) -> tuple[int, int, int]:
    """(depth, fewest and most arguments) of an expression."""
    open_counts: list[int] = []
    depth, fewest, most = 1, 99, 0
    for word in text.split():
        if word == "]":
            fewest, most = min(fewest, open_counts[-1]), max(most, open_counts[-1])
            open_counts.pop()
            continue
        if open_counts:
            open_counts[-1] += 1
        depth = max(depth, len(open_counts) + 1)
        if word.startswith("["):
            open_counts.append(0)
    return depth, fewest, most


def test_the_evaluator_of_this_test() -> None:
    assert evaluate("[MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]") == 5
    assert evaluate("[MED 1 2 ]") == 1 and evaluate("[SM 9 9 4 ]") == 2
    assert shape("[MAX 4 [MIN 2 3 1 ] ]") == (3, 2, 3)


def test_values_are_right_and_sizes_are_kept() -> None:
    found = [expression(SMALL, index) for index in range(300)]
    shapes = []
    for tokens, value in found:
        assert SMALL.min_length < len(tokens) < SMALL.max_length
        assert evaluate(to_text(tokens)) == value
        shapes.append(shape(to_text(tokens)))
    assert max(depth for depth, _, _ in shapes) == 4
    assert min(fewest for _, fewest, _ in shapes) == 2
    assert max(most for _, _, most in shapes) == 5
    assert {int(t) for tokens, _ in found for t in tokens} == set(range(1, len(TOKENS)))


def test_full_size_expressions() -> None:
    for index in range(3):
        tokens, value = expression(ListOpsOptions(), index)
        assert 500 < len(tokens) < 2000 and evaluate(to_text(tokens)) == value
        assert shape(to_text(tokens))[0] <= 10


def test_a_node_is_an_operator_a_quarter_of_the_time() -> None:
    """At the second level, where the length hardly selects."""
    wide = replace(SMALL, min_length=3, max_length=1000, max_depth=3, max_args=10)
    operators = nodes = 0
    for index in range(400):
        depth = 0
        for word in to_text(expression(wide, index)[0]).split():
            depth -= word == "]"
            if depth == 1 and word != "]":
                nodes += 1
                operators += word.startswith("[")
            depth += word.startswith("[")
    assert nodes > 1500 and abs(operators / nodes - 0.25) < 0.04


def test_an_expression_depends_on_seed_and_index_alone() -> None:
    state = np.random.get_state()[1].copy()
    again = [expression(SMALL, index)[0].tolist() for index in (7, 3, 7)]
    assert again[0] == again[2] != again[1]
    assert expression(replace(SMALL, seed=1), 7)[0].tolist() != again[0]
    assert (np.random.get_state()[1] == state).all()


def sequences(examples: Examples) -> list[bytes]:
    return [examples.sequence(i).tobytes() for i in range(len(examples))]


def test_no_expression_comes_twice_in_or_between_the_splits() -> None:
    tight = replace(SMALL, max_length=9, max_depth=2)  # few different ones: duplicates are met
    drawn = [expression(tight, index)[0].tobytes() for index in range(4000)]
    assert len(set(drawn)) < len(drawn)
    splits = make_splits(replace(tight, train_examples=2000))
    everything = [s for examples in splits.values() for s in sequences(examples)]
    assert len(everything) == 2040 == len(set(everything))


def test_more_training_examples_leave_the_other_splits_alone() -> None:
    few, many = make_splits(SMALL), make_splits(replace(SMALL, train_examples=80))
    for split in ("validation", "test"):
        assert sequences(few[split]) == sequences(many[split])
    assert sequences(many["train"])[:60] == sequences(few["train"])


def test_the_most_frequent_class() -> None:
    """The published law: a sixth of the values are the most frequent digit, 0 or 9."""
    options = replace(SMALL, min_length=30, max_length=200, max_depth=5, max_args=8)
    values = [expression(options, index)[1] for index in range(1500)]
    balance = class_balance(Examples.pack([np.zeros(1, np.uint8)] * 1500, values), 10)
    assert sum(balance.counts) == 1500 and balance.majority in (0, 9)
    assert 0.13 < balance.majority_rate < 0.20


def test_made_once_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = load_task("listops", SMALL, tmp_path)
    (file,) = tmp_path.iterdir()
    monkeypatch.setattr("experiments.lra.data.listops.expression", None)
    read = load_task("listops", SMALL, tmp_path)
    for split in ("train", "validation", "test"):
        one, other = made.splits()[split], read.splits()[split]
        assert sequences(one) == sequences(other)
        assert (one.labels_N == other.labels_N).all()
    assert [len(examples) for examples in read.splits().values()] == [60, 20, 20]
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(LatteError, match="is damaged .* delete it"):
        load_task("listops", SMALL, tmp_path)


def test_two_processes_make_the_same() -> None:
    few = replace(SMALL, train_examples=10, validation_examples=3, test_examples=3)
    one, two = make_splits(few), make_splits(few, workers=2)
    for split, examples in one.items():
        assert sequences(examples) == sequences(two[split])
        assert (examples.labels_N == two[split].labels_N).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_length": 40}, "expected a length between them .* 40 and 40"),
        ({"max_depth": 2}, "data.min_length: expected below 7"),
        ({"max_args": 1}, "data.max_args: expected at least 2, got 1"),
        ({"train_examples": 0}, "data.train_examples: expected at least 1, got 0"),
        ({"seed": -1}, "data.seed: expected 0 or more"),
    ],
)
def test_impossible_options(changes: dict, message: str, tmp_path: Path) -> None:
    options = replace(SMALL, **changes)
    if "max_depth" in changes:
        options = replace(options, min_length=7)
    with pytest.raises(LatteError, match=message):
        load_task("listops", options, tmp_path)
    assert not list(tmp_path.iterdir())


def test_more_examples_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.lra.data.listops.MAX_ATTEMPTS", 2000)
    few = replace(SMALL, min_length=3, max_length=5, max_depth=2, train_examples=1000)
    with pytest.raises(LatteError, match="only 400 different expressions were found, expected 1,"):
        make_splits(few)  # 4 operators, two digits


def test_a_length_that_no_tree_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.lra.data.listops.MAX_ATTEMPTS", 50)
    with pytest.raises(LatteError, match="none of 50 expressions had a length between 1 and 3"):
        expression(replace(SMALL, min_length=1, max_length=3), 0)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LatteError, match="cannot be kept here"):
        load_task("listops", SMALL, tmp_path / "file")
