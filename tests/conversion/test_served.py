"""Converted models behind the server: kept states to the bit, and rows that share steps."""

import numpy as np
import pytest
import torch
from bases import converted
from test_states import CASES, OPTIONS

from latte.serve.reading import Reader
from latte.serve.rows import joined
from latte.serve.states import StateStore

PIECE = 8


def text(length, seed=0):
    return np.random.default_rng(seed).integers(0, 50, length).astype(np.int32)


def read(reader, ids, marks=()):
    reading = reader.begin(ids, marks)
    while reading.left:
        reading.read()
    return reading


@torch.no_grad()
def step(model, cache, tokens):
    return model(torch.tensor(tokens)[:, None], past_key_values=cache).logits[:, -1]


def continued(model, cache, tokens):
    said = [int(step(model, cache, [3]).argmax())]
    while len(said) < tokens:
        said.append(int(step(model, cache, [said[-1]]).argmax()))
    return said


@pytest.mark.parametrize(("option", "family"), CASES)
def test_a_kept_state_goes_on_to_the_bit(option, family):
    model, store = converted(family, **OPTIONS[option]).float(), StateStore(10**8)
    first, marks = text(21), (3, 11)
    read(Reader(model, PIECE, store), first, marks)
    then, marks = np.concatenate([first, text(10, 1)]), (3, 11, 21)
    again = read(Reader(model, PIECE, store), then, marks)
    anew = read(Reader(model, PIECE), then, marks)
    assert (again.reused, anew.reused) == (21, 0)
    for token in (3, 4, 5):
        ours, wanted = (step(model, x.cache, [token]) for x in (again, anew))
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize(("option", "family"), CASES)
def test_rows_share_steps(option, family):
    model = converted(family, **OPTIONS[option])
    reader, texts = Reader(model, PIECE), [text(n, n) for n in (1, 20, 4)]
    wanted = [continued(model, read(reader, ids).cache, 8) for ids in texts]
    cache, said = None, []
    for ids in texts:
        own = read(reader, ids).cache
        said.append([int(step(model, own, [3]).argmax())])
        cache = joined(model.config, [own] if cache is None else [cache, own])
        chosen = step(model, cache, [row[-1] for row in said]).argmax(-1)
        for row, token in zip(said, chosen.tolist(), strict=True):
            row.append(token)
    cache.batch_select_indices(torch.tensor([0, 2]))
    said.pop(1)
    wanted.pop(1)
    for _ in range(4):
        chosen = step(model, cache, [row[-1] for row in said]).argmax(-1)
        for row, token in zip(said, chosen.tolist(), strict=True):
            row.append(token)
    assert said == [row[: len(own)] for row, own in zip(wanted, said, strict=True)]
