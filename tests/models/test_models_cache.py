"""The cache: decoding, splitting, taking back, and moving rows about, against recomputation."""

import copy

import pytest
import torch

from latte.models import PRESETS, LatteCache, LatteForCausalLM

TOLERANCE = {"atol": 1e-9, "rtol": 1e-9}
FAMILY = (*PRESETS, "latte-r-swa-f++")
CONSTANT = [preset for preset in FAMILY if preset != "transformer++"]


def run(model, ids, cache, sizes, mask=None):
    """Feed ``ids`` through ``cache`` in pieces; returns all logits."""
    logits, start = [], 0
    with torch.no_grad():
        for size in sizes:
            stop = start + size
            seen = None if mask is None else mask[:, :stop]
            out = model(ids[:, start:stop], attention_mask=seen, past_key_values=cache)
            assert out.past_key_values is cache
            logits.append(out.logits)
            start = stop
    return torch.cat(logits, 1)


@pytest.fixture
def full():
    def forward(model, ids, mask=None):
        with torch.no_grad():
            return model(ids, attention_mask=mask, use_cache=False).logits

    return forward


@pytest.mark.parametrize("preset", FAMILY)
@pytest.mark.parametrize("sizes", [[1] * 15, [9, 1, 1, 4], [2, 13], [6, 1, 1, 3, 1, 1, 1, 1]])
def test_any_split_is_the_whole(build, tokens, full, preset, sizes):
    model, ids = build(preset), tokens(2, 15)
    cache = LatteCache(model.config)
    torch.testing.assert_close(run(model, ids, cache, sizes), full(model, ids), **TOLERANCE)
    assert cache.get_seq_length() == 15
    assert cache.batch_size == 2


@pytest.mark.parametrize("preset", ["latte-r++", "latte-r-swa++", "latte-conv++"])
def test_a_beginning_whose_embedding_is_zero_is_a_beginning(config, tokens, preset):
    """As where padding and the start of a text are one token, whose embedding is never trained."""
    torch.manual_seed(0)
    model = LatteForCausalLM(config(preset, pad_token_id=0)).double().eval()
    ids = tokens(2, 9)
    ids[:, :2] = 0
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        head = model(ids[:, :2], use_cache=True)
        rest = model(ids[:, 2:], past_key_values=head.past_key_values).logits
    torch.testing.assert_close(rest, whole[:, 2:], **TOLERANCE)


@pytest.mark.parametrize("preset", FAMILY)
def test_left_padding_goes_through_the_cache(build, tokens, full, preset):
    model, ids = build(preset), tokens(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    cache = LatteCache(model.config)
    logits = run(model, ids, cache, [3, 5, 1, 1, 1, 1], mask)
    torch.testing.assert_close(logits[0], full(model, ids[:1])[0], **TOLERANCE)
    torch.testing.assert_close(logits[1, 5:], full(model, ids[1:, 5:])[0], **TOLERANCE)
    # The cache itself knows how many tokens were real, also where no mask comes along any more.
    assert cache.position.tolist() == [12, 7]


@pytest.mark.parametrize("preset", FAMILY)
def test_crop_after_several_forwards_is_recomputation(build, tokens, full, preset):
    model, ids = build(preset), tokens(2, 20)
    cache = LatteCache(model.config)
    run(model, ids, cache, [6])
    cache.activate_past_recording()
    run(model, ids[:, 6:], cache, [3, 1, 1, 4])  # the log covers tokens 6 to 14
    cache.crop(-7)  # back inside the first of these forwards
    assert cache.get_seq_length() == 8
    other = tokens(2, 9, seed=1)
    logits = run(model, other, cache, [1, 2, 6])
    expected = full(model, torch.cat([ids[:, :8], other], 1))[:, 8:]
    torch.testing.assert_close(logits, expected, **TOLERANCE)
    cache.crop(-9)  # all of what came since
    again = run(model, ids[:, 8:], cache, [12])
    torch.testing.assert_close(again, full(model, ids)[:, 8:], **TOLERANCE)


@pytest.mark.parametrize("preset", FAMILY)
def test_crop_to_every_length_from_an_empty_start(build, tokens, full, preset):
    model, ids = build(preset), tokens(1, 9)
    cache = LatteCache(model.config)
    cache.activate_past_recording()
    run(model, ids, cache, [4, 1, 4])
    expected = full(model, ids)
    for count in range(10):
        cropped = copy.deepcopy(cache)
        cropped.crop(-count)
        assert cropped.get_seq_length() == 9 - count
        if count:
            logits = run(model, ids[:, 9 - count :], cropped, [count])
            torch.testing.assert_close(logits, expected[:, 9 - count :], **TOLERANCE)


@pytest.mark.parametrize("preset", ["latte-r-swa++", "latte-conv-swa++", "latte++"])
def test_crop_of_a_left_padded_batch(build, tokens, full, preset):
    model, ids = build(preset), tokens(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :6] = 0  # all that is logged and kept of row 1 is padding
    cache = LatteCache(model.config)
    run(model, ids, cache, [2], mask)
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids[:, 2:10], attention_mask=mask[:, :10], past_key_values=cache)
    cache.crop(-5)
    with torch.no_grad():
        logits = model(ids[:, 5:], attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(logits[0], full(model, ids[:1])[0, 5:], **TOLERANCE)
    torch.testing.assert_close(logits[1, 1:], full(model, ids[1:, 6:])[0], **TOLERANCE)


def test_the_log_empties_when_cropped(build, tokens):
    model, ids = build("latte-r-swa++"), tokens(1, 40)
    cache = LatteCache(model.config)
    run(model, ids, cache, [8])
    size = cache.nbytes
    cache.activate_past_recording()
    run(model, ids[:, 8:], cache, [32])
    assert cache.nbytes > size
    cache.crop(0)
    assert cache.get_seq_length() == 40
    assert cache.nbytes <= 2 * size  # the state, and the same state as the log's base
    with pytest.raises(ValueError, match="cannot take 1 tokens back: 0 have been recorded"):
        cache.crop(-1)


def test_crop_refuses_what_it_cannot_do(build, tokens):
    model, ids = build("latte-r-swa++"), tokens(1, 8)
    cache = LatteCache(model.config)
    run(model, ids, cache, [8])
    with pytest.raises(ValueError, match="were not recorded"):
        cache.crop(-2)
    with pytest.raises(ValueError, match="minus the number of tokens"):
        cache.crop(2)
    with pytest.raises(ValueError, match="here -8 to 0, got -9"):
        cache.crop(-9)
    cache.crop(0)
    assert cache.get_seq_length() == 8
    growing = build("transformer++")
    cache = LatteCache(growing.config)
    run(growing, ids, cache, [8])
    cache.crop(-3)
    assert cache.get_seq_length() == 5 and cache.layers[0].keys.shape[2] == 5


@pytest.mark.parametrize("preset", FAMILY)
def test_rows_can_be_reordered_repeated_and_selected(build, tokens, full, preset):
    model, ids = build(preset), tokens(3, 10)
    new = tokens(4, 3, seed=2)
    expected_rows = {"reorder": [2, 0, 0], "repeat": [0, 0, 1, 1, 2, 2], "select": [2, 1]}
    for what, rows in expected_rows.items():
        cache = LatteCache(model.config)
        run(model, ids, cache, [10])
        if what == "reorder":
            cache.reorder_cache(torch.tensor(rows))
        elif what == "repeat":
            cache.batch_repeat_interleave(2)
        else:
            cache.batch_select_indices(torch.tensor(rows))
        more = new[torch.arange(len(rows)) % 4]
        logits = run(model, more, cache, [1, 2])
        expected = full(model, torch.cat([ids[rows], more], 1))[:, 10:]
        torch.testing.assert_close(logits, expected, **TOLERANCE)


@pytest.mark.parametrize("preset", CONSTANT)
def test_size_does_not_depend_on_the_length(build, tokens, preset):
    model = build(preset)
    sizes = []
    for length in (1, 5, 60):
        cache = LatteCache(model.config)
        run(model, tokens(2, length), cache, [length])
        sizes.append(cache.nbytes)
        layer = cache.layers[0]
        if "swa" in preset:
            assert layer.keys.shape == (2, 2, 3, 4) == layer.values.shape
        if preset.startswith("latte"):
            assert layer.log_mass.shape == (2, 4, 3) and layer.mean.shape == (2, 4, 3, 4)
        if "-r-" in preset:
            assert layer.rglru.shape == (2, 16)
        if "conv" in preset:
            assert layer.conv.shape == (2, 2, 16)
    assert sizes[0] == sizes[1] == sizes[2]


def test_softmax_cache_grows(build, tokens):
    model = build("transformer++")
    cache = LatteCache(model.config)
    run(model, tokens(2, 7), cache, [7])
    assert cache.layers[0].keys.shape == (2, 2, 7, 4)


@pytest.mark.parametrize("preset", ["latte-r-swa++", "transformer++"])
def test_reset_offload_and_copies(build, tokens, full, preset):
    model, ids = build(preset), tokens(2, 10)
    cache = LatteCache(model.config, offloading=True)
    assert not cache.is_initialized
    torch.testing.assert_close(run(model, ids, cache, [6, 4]), full(model, ids), **TOLERANCE)
    assert cache.is_initialized
    kept = copy.deepcopy(cache)
    cache.reset()
    assert not cache.is_initialized
    assert cache.get_seq_length() == 0 and cache.position is None and cache.batch_size == -1
    torch.testing.assert_close(run(model, ids, cache, [10]), full(model, ids), **TOLERANCE)
    assert kept.get_seq_length() == 10
    longer = torch.cat([ids, ids], 1)
    torch.testing.assert_close(
        run(model, ids, kept, [10]), full(model, longer)[:, 10:], **TOLERANCE
    )


def test_wrong_caches_are_refused(build, tokens):
    from transformers import DynamicCache

    model, ids = build("latte-r-swa++"), tokens(2, 6)
    with pytest.raises(ValueError, match="past_key_values must be a LatteCache, got DynamicCache"):
        model(ids, past_key_values=DynamicCache())
    cache = LatteCache(model.config)
    run(model, ids, cache, [6])
    with pytest.raises(ValueError, match="holds a batch of 2, got a batch of 1"):
        model(ids[:1], past_key_values=cache)
    with pytest.raises(ValueError, match="needs the whole sequence at once"):
        model(ids, past_key_values=cache, output_attentions=True)


def test_cache_is_made_on_request_only(build, tokens):
    model, ids = build("latte-r-swa++"), tokens(2, 6)
    with torch.no_grad():
        assert isinstance(model(ids).past_key_values, LatteCache)
        assert model(ids, use_cache=False).past_key_values is None
        assert model(ids, labels=ids).past_key_values is None
