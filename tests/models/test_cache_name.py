"""A model takes its cache by both of Transformers' names: before 5.24, and since."""

import pytest
import torch

from latte.models import LatteCache
from latte.models.cache_name import CACHE_NAME, KEYWORDS
from latte.models.generation import StateGenerationMixin
from tests.models.modeldb import named, tokens

ROWS = named(["latte-r-swa++", "llama: plain", "gemma3_text: plain"])
over_rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


@pytest.mark.parametrize("part", ["whole", "decoder"])
@over_rows
@torch.no_grad()
def test_both_names_continue_a_sequence(row, part):
    whole = row.model()
    model = whole if part == "whole" else whole.model
    ids = tokens(1, 9)
    want = model(ids, use_cache=False)[0]
    for name in KEYWORDS:
        cache = LatteCache(model.config)
        for piece, expected in zip(ids.split([5, 4], 1), want.split([5, 4], 1), strict=True):
            output = model(piece, use_cache=True, **{name: cache})
            torch.testing.assert_close(output[0], expected, atol=1e-9, rtol=1e-9)
            assert output[CACHE_NAME] is cache
        assert cache.get_seq_length() == 9


@torch.no_grad()
def test_two_different_caches_are_refused():
    model, ids = ROWS[0].model(), tokens(1, 3)
    one, other = LatteCache(model.config), LatteCache(model.config)
    model(ids, past_key_values=one, cache=one)
    with pytest.raises(ValueError, match="one cache, got different ones as past_key_values and as"):
        model(ids, past_key_values=one, cache=other)


@over_rows
def test_generate_fills_the_cache_of_its_own_name(row):
    model, ids = row.model(), tokens(1, 4)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    alone = model.generate(ids, return_dict_in_generate=True, **options)
    assert type(alone[CACHE_NAME]) is LatteCache and alone[CACHE_NAME].get_seq_length() == 6
    given = LatteCache(model.config)
    assert torch.equal(model.generate(ids, **{CACHE_NAME: given}, **options), alone.sequences)
    assert given.get_seq_length() == 6


@pytest.mark.parametrize("name", KEYWORDS)
def test_the_mask_of_a_static_cache_takes_both_names(name):
    cache = LatteCache(ROWS[0].model().config)
    make = StateGenerationMixin.create_masks_for_generate
    inputs, mask = torch.empty(1, 2, 0), torch.ones(1, 2)
    assert make(None, inputs, mask, **{name: cache}).shape == (1, 2)
    with torch.no_grad():
        ROWS[0].model()(tokens(1, 3), cache=cache)
    with pytest.raises(ValueError, match="attention_mask"):
        make(None, inputs, mask, **{name: cache})
