"""MQAR's published definition, held by laws; see experiments.mqar.data for the source."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from experiments.mqar.data import MQAR, check_cell, shifted_labels
from latte.errors import LatteError

CELLS = [(64, 4), (128, 8), (256, 16), (512, 64), (256, 64), (1024, 256), (4, 1), (16, 4)]


@pytest.mark.parametrize("random_non_queries", [False, True])
@pytest.mark.parametrize(("length", "pairs"), CELLS)
def test_definition(length, pairs, random_non_queries):
    """Pairs first; every query's key stood among them with that very value; each asked once."""
    data = MQAR(length, pairs, examples=8, vocab_size=2048, random_non_queries=random_non_queries)
    for item in data:
        tokens, labels = item["input_ids"].numpy(), item["labels"].numpy()
        assert tokens.shape == labels.shape == (length,) and tokens.dtype == np.int64
        keys, values = tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2]
        assert len(set(keys)) == len(set(values)) == pairs
        assert keys.min() >= 1 and keys.max() < 1024  # lower half, without the filler
        assert values.min() >= 1024 and values.max() < 2048  # upper half
        asked = np.flatnonzero(labels != -100)
        assert len(asked) == pairs
        assert asked.min() >= 2 * pairs and not (asked % 2).any()
        assert sorted(tokens[asked]) == sorted(keys)  # each key exactly once
        value_of = dict(zip(keys, values, strict=True))
        assert [value_of[key] for key in tokens[asked]] == list(labels[asked])
        rest = np.setdiff1d(np.arange(2 * pairs, length), asked)
        if not random_non_queries:
            assert not tokens[rest].any()
        # The answer is never shown: what follows a query tells nothing.
        assert (tokens[asked + 1] != labels[asked]).mean() > 0.9


def test_fillers_are_drawn_from_the_whole_vocabulary():
    data = MQAR(64, 4, examples=400, vocab_size=128, random_non_queries=True)
    table = data.table()
    free = torch.ones_like(table.tokens_MT, dtype=torch.bool)
    free[:, :8] = False
    free.scatter_(1, table.queries_MN.long(), False)
    counts = np.bincount(table.tokens_MT[free].numpy(), minlength=128)
    assert counts.sum() == 400 * (64 - 8 - 4)
    expected = counts.sum() / 128
    assert ((counts - expected) ** 2 / expected).sum() < 200  # 127 degrees of freedom: +4.6 sigma


@pytest.mark.parametrize("power_a", [0.01, 0.5, 1.0])
def test_gaps_follow_the_power_law(power_a):
    """The first draw's slot has p(g) ~ g^(a-1) exactly; chi-square over all 28 slots."""
    data = MQAR(64, 4, examples=6000, vocab_size=128, power_a=power_a)
    first = (data.table().queries_MN[:, 0].numpy() - 8) // 2
    law = np.arange(1, 29) ** (power_a - 1.0)
    expected = law / law.sum() * 6000
    counts = np.bincount(first, minlength=28)
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 27 + 5 * np.sqrt(2 * 27)
    other = np.arange(1, 29) ** (power_a - 1.5)  # the test can tell a wrong exponent
    wrong = other / other.sum() * 6000
    assert ((counts - wrong) ** 2 / wrong).sum() > 27 + 20 * np.sqrt(2 * 27)


def test_later_draws_are_those_without_replacement():
    """Two pairs in three slots: P(second = j | first = i) = p_j / (1 - p_i)."""
    data = MQAR(10, 2, examples=6000, vocab_size=64, power_a=0.01)
    p = data.slot_probabilities
    assert p == pytest.approx(np.array([1, 2**-0.99, 3**-0.99]) / (1 + 2**-0.99 + 3**-0.99))
    slots = (data.table().queries_MN.numpy() - 4) // 2
    for i in range(3):
        for j in range(3):
            share = np.mean((slots[:, 0] == i) & (slots[:, 1] == j))
            wanted = 0.0 if i == j else p[i] * p[j] / (1 - p[i])
            assert share == pytest.approx(wanted, abs=4.5 * 0.5 / np.sqrt(6000))


def test_an_example_is_a_pure_function_of_seed_and_index():
    data = MQAR(64, 4, examples=50, seed=3)
    forwards = [data[i]["input_ids"] for i in range(50)]
    np.random.seed(0)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    backwards = [MQAR(64, 4, examples=999, seed=3)[i]["input_ids"] for i in reversed(range(50))]
    assert torch.equal(torch.stack(forwards), torch.stack(backwards[::-1]))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(data[-1]["input_ids"], data[49]["input_ids"])
    table = data.table()
    assert torch.equal(table.tokens_MT, torch.stack(forwards).int())
    assert torch.equal(data.table(7).tokens_MT, table.tokens_MT[:7])
    for m, item in enumerate(data):
        assert torch.equal(item["labels"][table.queries_MN[m].long()], table.answers_MN[m].long())


def test_seeds_indices_and_splits_give_different_examples():
    tables = [
        MQAR(64, 4, examples=200, seed=seed, split=split).table().tokens_MT
        for seed in (0, 1)
        for split in ("train", "test")
    ]
    rows = {tuple(row.tolist()) for table in tables for row in table}
    assert len(rows) == 800


def test_indices_out_of_range():
    data = MQAR(64, 4, examples=5)
    for index in (5, -6):
        with pytest.raises(IndexError):
            data[index]
    assert len(list(data)) == len(data) == 5


def test_labels_of_a_model_that_shifts_inside():
    """`labels[t]` is what the output at t says; a causal model of Transformers wants it at t+1."""
    from latte.models import LatteForCausalLM, preset_config

    data = MQAR(16, 4, examples=3, vocab_size=32)  # every slot asks, the last one too
    items = [data[i] for i in range(3)]
    tokens = torch.stack([item["input_ids"] for item in items])
    labels = torch.stack([item["labels"] for item in items])
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1}
    config = preset_config("latte++", "tiny", **sizes, initializer_range=0.5)
    torch.manual_seed(0)
    model = LatteForCausalLM(config)
    shifted = shifted_labels(labels)
    assert ((shifted != -100).sum() == (labels != -100).sum()).item()
    loss = model(input_ids=tokens, labels=shifted).loss
    logits = model(input_ids=tokens).logits
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, wanted)
    unshifted = model(input_ids=tokens, labels=labels).loss
    assert abs(unshifted - wanted) > 1e-2  # the very mistake that this function is for


@pytest.mark.parametrize(
    ("length", "pairs", "vocab_size", "message"),
    [
        (64, 17, 8192, "expected a length of at least 68"),
        (64, 0, 8192, "at least 1 pair"),
        (63, 4, 8192, "must be even"),
        (64, 4, 8191, "vocab_size must be even"),
        (64, 4, 2, "vocab_size must be even and at least 4"),
        (512, 4, 512, "vocab_size must be above the length"),
    ],
)
def test_impossible_cells(length, pairs, vocab_size, message):
    for make in (check_cell, lambda t, n, v: MQAR(t, n, vocab_size=v)):
        with pytest.raises(LatteError, match=message) as error:
            make(length, pairs, vocab_size)
        assert f"length {length} with {pairs} pairs" in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"examples": 0}, "examples must be at least 1, got 0"),
        ({"power_a": 0.0}, "power_a must be above 0"),
        ({"power_a": float("nan")}, "power_a must be above 0"),
        ({"seed": -1}, "seed must be 0 or more"),
        ({"split": "validation"}, "split must be 'train' or 'test'"),
    ],
)
def test_impossible_arguments(arguments, message):
    with pytest.raises(LatteError, match=message):
        MQAR(64, 4, **arguments)
