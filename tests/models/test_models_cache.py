"""The cache: what it shows and refuses, and tokens that are taken back (its laws: test_laws.py)."""

import copy
import pickle

import pytest
import torch

from latte.errors import LatteError
from latte.models import PRESETS, LatteCache, LatteForCausalLM, save_state

TOLERANCE = {"atol": 1e-9, "rtol": 1e-9}
CONSTANT = [preset for preset in PRESETS if preset != "transformer++"]


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
    cache = LatteCache(model.config)
    cache.activate_past_recording()
    run(model, ids, cache, [8])
    with pytest.raises(ValueError, match="needs the model that has filled this cache: it is gone"):
        pickle.loads(pickle.dumps(cache)).crop(-2)
    growing = build("transformer++")
    cache = LatteCache(growing.config)
    run(growing, ids, cache, [8])
    cache.crop(-3)
    assert cache.get_seq_length() == 5 and cache.layers[0].keys.shape[2] == 5


@pytest.mark.parametrize("preset", CONSTANT)
def test_parts_have_the_shapes_of_the_model(build, tokens, preset):
    model = build(preset)
    cache = LatteCache(model.config)
    run(model, tokens(2, 5), cache, [5])
    layer = cache.layers[0]
    if "swa" in preset:
        assert layer.keys.shape == (2, 2, 3, 4) == layer.values.shape
    if preset.startswith("latte"):
        assert layer.log_mass.shape == (2, 4, 3) and layer.mean.shape == (2, 4, 3, 4)
    if "-r-" in preset:
        assert layer.rglru.shape == (2, 16)
    if "conv" in preset:
        assert layer.conv.shape == (2, 2, 16)


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
    shallow = LatteCache(build("latte-r-swa++", num_hidden_layers=1).config)
    with pytest.raises(ValueError, match="of a model with 1 layers, this one has 2"):
        model(ids, past_key_values=shallow)


@pytest.mark.parametrize("preset", ["latte-r-swa++", "transformer++"])
@pytest.mark.parametrize("new", [1, 4])
def test_an_interrupted_forward_leaves_no_cache_to_go_on_with(build, tokens, preset, new, tmp_path):
    """Some layers have read its tokens, or their buffers are overwritten."""
    model, ids = copy.deepcopy(build(preset)), tokens(2, 12)

    def interrupt(*given, **options):
        raise KeyboardInterrupt

    with torch.no_grad():
        cache = LatteCache(model.config)
        run(model, ids, cache, [7, 1])
        last = model.model.layers[1]
        last.forward = last.step = interrupt
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, 8 : 8 + new], past_key_values=cache)
        del last.forward, last.step
        with pytest.raises(ValueError, match="was interrupted, and has changed this cache in part"):
            model(ids[:, 8:], past_key_values=cache)
        with pytest.raises(LatteError, match="whose last forward ended, got one in which it was"):
            save_state(cache, tmp_path / "state")
        cache.reset()
        found = model(ids, past_key_values=cache).logits
        torch.testing.assert_close(found, model(ids, use_cache=False).logits)


def test_cache_is_made_on_request_only(build, tokens):
    model, ids = build("latte-r-swa++"), tokens(2, 6)
    with torch.no_grad():
        assert isinstance(model(ids).past_key_values, LatteCache)
        assert model(ids, use_cache=False).past_key_values is None
        assert model(ids, labels=ids).past_key_values is None
