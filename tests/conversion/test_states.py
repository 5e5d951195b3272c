"""What a converted model carries on: rings, sinks and delay, and what is refused.

Its laws are in ``tests/models/test_laws.py``.
"""

import copy

import pytest
import torch

from latte.errors import LatteError
from latte.models import LatteCache
from latte.ops.state import with_all_values
from tests.conversion.bases import NAMES, converted, tokens

EXACT = {"rtol": 1e-9, "atol": 1e-9}


@pytest.mark.parametrize("layers", [(1, 3), (3,)])
def test_steps_fill_a_ring_of_each_layers_own(layers):
    """Far beyond all windows; growing rings are made anew when they are full."""
    model, ids = converted("gemma2", converted_layers=layers), tokens(90, 1)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        for room in (None, 90):
            cache = LatteCache(model.config, max_cache_len=room)
            model(ids[:, :7], past_key_values=cache)
            for t in range(7, 90):
                logits = model(ids[:, t : t + 1], past_key_values=cache).logits
                torch.testing.assert_close(logits, whole[:, t : t + 1], **EXACT)
            sizes = [layer.buffers.ring.keys.shape[2] for layer in cache.layers]
            assert sizes[0] == sizes[2] == 9 and sizes[3] == 5
            assert sizes[1] == 5 if 1 in layers else sizes[1] >= 90


def test_layers_without_a_step_have_no_static_cache():
    with pytest.raises(ValueError, match="needs layers with a step of decoding"):
        converted("llama", mixing="latents").generate(tokens(4), cache_implementation="static")


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_assisted_decoding_with_sinks_and_delay_is_greedy(family):
    options = {"num_sinks": 2, "delay_latents": True, "joint_softmax": True}
    model, assistant, ids = converted(family, **options), converted(family), tokens(6, 1)
    wanted = {"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    greedy = model.generate(ids, **wanted)
    for more in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 3}):
        assert torch.equal(model.generate(ids, **wanted, **more), greedy)


@pytest.mark.parametrize("family", NAMES)
def test_weights_are_refused_in_one_line(family):
    """They would be empty, which assisted decoding does not expect."""
    model, assistant = converted(family), converted(family)
    ids = tokens(6, 1)
    wanted = {"output_attentions": True, "return_dict_in_generate": True, "max_new_tokens": 4}
    wanted |= {"eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    with pytest.raises(LatteError, match="output_attentions: a converted model returns no weights"):
        model(ids, output_attentions=True)
    for more in ({}, {"assistant_model": assistant}):
        with pytest.raises(LatteError, match="a converted model returns no weights; expected Fals"):
            model.generate(ids, **wanted, **more)
        told = wanted | {"output_attentions": False, "output_hidden_states": True}
        assert len(model.generate(ids, **told, **more).hidden_states) == 4


def test_another_cache_is_refused():
    from transformers import DynamicCache

    with pytest.raises(ValueError, match="LatteCache, got DynamicCache"):
        converted("llama")(tokens(4), past_key_values=DynamicCache())


def test_delayed_latents_hold_only_what_has_left_the_window():
    """While everything fits the window, the model is the base, whatever the latents say."""
    from tests.conversion.bases import WINDOW, base_logits

    model = converted("llama", delay_latents=True)
    ids = tokens(WINDOW)
    torch.testing.assert_close(model(ids).logits, base_logits("llama", ids, None), **EXACT)
    longer = tokens(WINDOW + 1)
    difference = model(longer).logits - base_logits("llama", longer, WINDOW)
    assert difference[:, :WINDOW].abs().max() < 1e-9
    assert difference[:, WINDOW:].abs().max() > 1e-4


def test_sinks_are_seen_by_every_query():
    """Without latents, a first token out of all windows' reach still changes the last logits."""
    ids = tokens(40)
    other = ids.clone()
    other[:, 0] = (other[:, 0] + 1) % 50
    for num_sinks, seen in ((0, False), (1, True)):
        model = converted("llama", mixing="window", num_sinks=num_sinks)
        changed = (model(ids).logits - model(other).logits)[:, -1].abs().max()
        assert bool(changed > 1e-6) == seen


def test_pending_tokens_share_their_values_with_the_window():
    """A state that holds all of them, as older files do, continues the same."""
    model, ids = converted("llama", delay_latents=True), tokens(20, 1)
    logits = []
    for older in (False, True):
        cache = LatteCache(model.config)
        model(ids[:, :13], past_key_values=cache)
        for layer in cache.layers:
            state = layer.state
            assert state.pending.values.shape[1] == 1 < state.pending.keys.shape[1]
            if older:
                whole = with_all_values(state.pending, state.window)
                assert whole.values.shape[1] == state.pending.keys.shape[1]
                layer.update(state._replace(pending=whole), 0)
        logits.append(model(ids[:, 13:], past_key_values=cache).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.parametrize("form", ["row", "padded", "packed"])
def test_hidden_windows_stay_for_tokens_that_delayed_latents_have_nothing_for(delayed, form):
    """Of every sequence: the first W tokens are the window's, and the others the latents'."""
    from latte.lab.train.conversion_trainer import attention_layers
    from tests.conversion.bases import WINDOW

    model = converted("llama", delay_latents=delayed, num_sinks=2, converted_layers=(0,))
    ids, starts, given = tokens(24, 1), [0], {}
    if form == "padded":
        given["attention_mask"] = (torch.arange(24) >= 4)[None].long()
        starts = [4]
    elif form == "packed":
        given["cu_seq_lens_q"] = torch.tensor([0, 9, 24], dtype=torch.int32)
        starts = [0, 9]
    outputs = {}
    for mixing in ("window", "latents", "hidden"):
        attention_layers(model)[0].mixing = mixing
        hidden_states = model(ids, output_hidden_states=True, **given).hidden_states
        outputs[mixing] = hidden_states[1][0, starts[0] :]
    at = torch.arange(starts[0], 24)
    began = torch.tensor([max(start for start in starts if start <= t) for t in at])
    first = ((at - began) < WINDOW)[:, None] & delayed
    expected = torch.where(first, outputs["window"], outputs["latents"])
    torch.testing.assert_close(outputs["hidden"], expected, **EXACT)
    differ = (outputs["window"] - outputs["latents"]).abs().amax(-1) > 1e-6
    assert differ.double().mean() > 0.8  # a first token sees itself alone in both


KEPT = {"num_sinks": 2, "delay_latents": True, "joint_softmax": True, "latent_input": "none"}
KEPT |= {"kept_tokens": 6, "kept_block": 4}


@pytest.mark.parametrize("dtype", ["auto", "mxint8"])
def test_a_text_read_under_autocast_goes_on_without_it(dtype):
    model, ids = converted("llama", **KEPT, kept_dtype=dtype).float(), tokens(40, 2)
    cache = LatteCache(model.config)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            model(ids[:, :38], past_key_values=cache)
        together = model(ids[:, 38:], past_key_values=copy.deepcopy(cache)).logits
        steps = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in (38, 39)]
    assert (torch.cat(steps, 1) - together).norm() < 0.01 * together.norm()


def test_a_refused_crop_changes_nothing():
    """The first layer keeps its attention, and could remove tokens that the others did not note."""
    model, ids = converted("llama", converted_layers=(1, 3)), tokens(30, 1)
    cache = LatteCache(model.config)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
        with pytest.raises(ValueError, match="were not recorded"):
            cache.crop(-5)
        cache.activate_past_recording()
        found = model(ids[:, 20:23], past_key_values=cache).logits
        with pytest.raises(ValueError, match="cannot take 5 tokens back: 3 have been recorded"):
            cache.crop(-5)
        found = torch.cat([found, model(ids[:, 23:], past_key_values=cache).logits], 1)
        whole = model(ids, use_cache=False).logits
    torch.testing.assert_close(found, whole[:, 20:], **EXACT)


@pytest.mark.parametrize("options", [{}, KEPT], ids=["plain", "kept tokens"])
def test_no_tokens_and_no_rows(options):
    model, ids = converted("llama", **options), tokens(6, 2)
    V = model.config.vocab_size
    with torch.no_grad():
        assert model(ids[:, :0], use_cache=False).logits.shape == (2, 0, V)
        assert model(ids[:0], use_cache=False).logits.shape == (0, 6, V)
        cache = LatteCache(model.config)
        for cut in (ids[:, :3], ids[:, :0]):
            model(cut, past_key_values=cache)
        found = model(ids[:, 3:], past_key_values=cache).logits
        torch.testing.assert_close(found, model(ids).logits[:, 3:], **EXACT)
