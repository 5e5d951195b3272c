"""Laws of serving, for every model of ``modeldb.py``: kept states, and rows that share steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from latte.serve.prefix_cache import StateStore
from latte.serve.reading import Reader
from latte.serve.rows import joined
from tests.models.modeldb import ROWS, VOCABULARY

PIECE = 8
SAID = 8  # tokens of an answer


def over(rows):
    return pytest.mark.parametrize("row", rows, ids=[row.name for row in rows])


def text(length, seed=0):
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).astype(np.int32)


def read(reader, ids, marks=()):
    reading = reader.begin(ids, marks)
    while reading.left:
        reading.read()
    return reading


@torch.no_grad()
def step(model, cache, tokens):
    return model(torch.tensor(tokens)[:, None], past_key_values=cache).logits[:, -1]


def continued(model, cache):
    """Greedy."""
    said = [int(step(model, cache, [3]).argmax())]
    while len(said) < SAID:
        said.append(int(step(model, cache, said[-1:]).argmax()))
    return said


@over(ROWS)
def test_a_kept_state_goes_on_to_the_bit(row):
    model, store = row.model(torch.float32), StateStore(10**8)
    first, marks = text(21), (3, 11)
    read(Reader(model, PIECE, store), first, marks)
    then, marks = np.concatenate([first, text(10, 1)]), (3, 11, 21)
    again = read(Reader(model, PIECE, store), then, marks)
    anew = read(Reader(model, PIECE), then, marks)
    assert (again.reused, anew.reused) == (21, 0)
    for token in (3, 4, 5):
        ours, wanted = (step(model, x.cache, [token]) for x in (again, anew))
        assert torch.equal(ours, wanted)


@over(ROWS)
def test_rows_that_share_steps_say_what_each_says_alone(row):
    """Every second step one more row joins; a row leaves when it has said all."""
    model = row.model()
    reader, texts = Reader(model, PIECE), [text(n, n) for n in (1, 20, 4)]
    wanted = [continued(model, read(reader, ids).cache) for ids in texts]
    cache, said, alive, turn = None, [], [], 0
    while len(said) < len(texts) or alive:
        if turn % 2 == 0 and len(said) < len(texts):
            own = read(reader, texts[len(said)]).cache
            alive.append(len(said))
            said.append([int(step(model, own, [3]).argmax())])
            cache = joined(model.config, [own] if cache is None else [cache, own])
        chosen = step(model, cache, [said[i][-1] for i in alive]).argmax(-1)
        for i, token in zip(alive, chosen.tolist(), strict=True):
            said[i].append(token)
        staying = [place for place, i in enumerate(alive) if len(said[i]) < SAID]
        if staying and len(staying) < len(alive):
            cache.batch_select_indices(torch.tensor(staying))
        alive, turn = [alive[place] for place in staying], turn + 1
    assert said == wanted
