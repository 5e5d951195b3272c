"""What Transformers' common suite asks of every model, where Latte's states make it special."""

import pytest
import torch
from torch.nn import functional as F

from latte.models import PRESETS, LatteCache, LatteForCausalLM
from tests.conversion import bases
from tests.models import modeldb

TOLERANCE = {"atol": 1e-10, "rtol": 1e-10}


def generated(model, ids, **options):
    return model.generate(
        ids, max_new_tokens=4, return_dict_in_generate=True, output_attentions=True, pad_token_id=0,
        eos_token_id=None, **options,
    )  # fmt: skip


def padded(ids):
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return mask


def name(row):
    return row.name


# All of Latte's own rows: presets, and pasts that are divided.
OWN = pytest.mark.parametrize(
    "row", [row for row in modeldb.ROWS if row.name.partition(":")[0] not in bases.NAMES], ids=name
)


def weights(attentions):
    """Those of the layers that have any: recurrent blocks have None."""
    return [x for x in attentions if x is not None]


@OWN
def test_weights_over_the_past_are_those_of_the_whole(tokens, row):
    model, ids = row.model(), tokens(2, 11)
    mask, start, rows = padded(ids), 0, []
    cache = LatteCache(model.config)
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, use_cache=False, output_attentions=True)
        for stop in (5, 6, 9, 11):
            out = model(
                ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache,
                output_attentions=True,
            )  # fmt: skip
            rows.append([F.pad(x, (0, 11 - stop)) for x in weights(out.attentions)])
            torch.testing.assert_close(
                out.logits[mask[:, start:stop].bool()],
                whole.logits[:, start:stop][mask[:, start:stop].bool()],
                **TOLERANCE,
            )
            start = stop
    assert rows[0]
    for pieces, expected in zip(zip(*rows, strict=True), weights(whole.attentions), strict=True):
        torch.testing.assert_close(torch.cat(pieces, 2), expected, **TOLERANCE)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("beams", [1, 3])
def test_generate_gives_the_weights_of_new_tokens(build, tokens, preset, beams):
    model, ids = build(preset), tokens(2, 7)
    found = generated(model, ids, num_beams=beams, do_sample=False)
    plain = model.generate(
        ids, max_new_tokens=4, num_beams=beams, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    assert torch.equal(found.sequences, plain)
    assert len(found.attentions) == 4
    for step, layers in enumerate(found.attentions):
        shape = (2 * beams, 4, 7 if step == 0 else 1, 7 + step)
        assert [layer.shape for layer in layers] == [shape] * 2
        for layer in layers:
            torch.testing.assert_close(layer.sum(-1), torch.ones(shape[:3]).double(), **TOLERANCE)


@pytest.mark.parametrize("preset", ["latte-r-swa++", "transformer++", "linear++"])
def test_assisted_decoding_gives_weights(build, tokens, preset):
    """Of their values the prompt's alone: Transformers cuts the first round's others wrongly."""
    model, ids = build(preset), tokens(1, 7)
    greedy = generated(model, ids, do_sample=False)
    assisted = generated(model, ids, do_sample=False, assistant_model=model)
    looked_up = generated(model, ids, do_sample=False, prompt_lookup_num_tokens=2)
    for other in (assisted, looked_up):
        assert torch.equal(other.sequences, greedy.sequences)
        assert len(other.attentions) == len(greedy.attentions)
        for ours, theirs in zip(other.attentions, greedy.attentions, strict=True):
            assert [x.shape for x in ours] == [x.shape for x in theirs]
        torch.testing.assert_close(other.attentions[0], greedy.attentions[0], **TOLERANCE)


@OWN
def test_weights_after_taking_tokens_back(tokens, row):
    model, ids = row.model(), tokens(2, 10)
    cache = LatteCache(model.config)
    cache.keep_sources()
    cache.activate_past_recording()
    with torch.no_grad():
        whole = weights(model(ids, use_cache=False, output_attentions=True).attentions)
        model(ids[:, :8], past_key_values=cache)
        for back, stop in ((5, 10), (7, 4), (4, 10)):  # the last empties the cache
            cache.crop(-back)
            start = cache.get_seq_length()
            found = model(ids[:, start:stop], past_key_values=cache, output_attentions=True)
            for ours, all_of_it in zip(weights(found.attentions), whole, strict=True):
                expected = all_of_it[:, :, start:stop, :stop]
                torch.testing.assert_close(ours, expected, **TOLERANCE)


def test_weights_are_asked_for_from_the_first_token_on(build, tokens):
    model, ids = build("latte-r-swa++"), tokens(2, 6)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        with pytest.raises(ValueError, match="or from its first token on"):
            model(ids[:, :1], past_key_values=cache, output_attentions=True)
        cache.reset()
        out = model(ids, past_key_values=cache, output_attentions=True)
        cache.reset()  # goes on keeping what weights are made of
        model(ids[:, :4], past_key_values=cache)
        rest = model(ids[:, 4:], past_key_values=cache, output_attentions=True)
    torch.testing.assert_close(rest.attentions[0], out.attentions[0][:, :, 4:], **TOLERANCE)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("causal", [True, False])
def test_returned_states_and_weights_keep_gradients(config, tokens, preset, causal):
    """As `test_retain_grad_hidden_states_attentions`; and they are the gradients of the model."""
    torch.manual_seed(0)
    model = LatteForCausalLM(config(preset)).double().model
    for layer in model.layers:
        layer.mixer.causal = causal
    ids = tokens(2, 9)
    mask = padded(ids)
    out = model(ids, attention_mask=mask, output_attentions=True, output_hidden_states=True,
                use_cache=False)  # fmt: skip
    kept = (*out.hidden_states, *out.attentions)
    for x in kept:
        x.retain_grad()
    score = torch.randn(2, 9, 16, dtype=torch.float64) * mask[..., None]
    (out.last_hidden_state * score).sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in kept)
    assert all(x.grad.abs().max() > 0 for x in kept)
    through = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    plain = model(ids, attention_mask=mask, use_cache=False)
    assert torch.equal(plain.last_hidden_state, out.last_hidden_state)
    (plain.last_hidden_state * score).sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(through[name], p.grad, atol=1e-8, rtol=1e-8, msg=name)


@pytest.mark.parametrize("preset", ["transformer++", "swa++", "latte-r-swa++"])
def test_a_cache_shows_keys_and_values_as_other_libraries_do(build, tokens, preset):
    model, ids = build(preset), tokens(2, 9)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    length = 9 if preset == "transformer++" else 3  # W - 1
    assert len(cache) == 2
    for layer in cache.layers:
        assert layer.keys.shape == (2, 2, length, 4) == layer.values.shape  # (B, G, S, K)
        assert torch.equal(layer.keys.transpose(1, 2), layer.state.window.keys)


@pytest.mark.parametrize("chunked", [False, True])
def test_shifted_labels_are_labels_of_the_next_token(build, config, tokens, chunked):
    torch.manual_seed(0)
    model, ids = LatteForCausalLM(config("latte-r-swa++")).train(chunked), tokens(2, 9)
    model.chunked_loss = chunked
    labels = ids.clone()
    labels[0, 3] = -100
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    expected = model(ids, labels=labels, num_items_in_batch=5).loss
    for given in ({}, {"labels": labels}):
        out = model(ids, shift_labels=shifted, num_items_in_batch=5, **given)
        assert torch.equal(out.loss, expected)
        assert out.past_key_values is None
    with pytest.raises(ValueError, match=r"labels must be \(2, 9\), one per logit"):
        model(ids, shift_labels=shifted[:, :8])
