"""Carrying a converted model on: cut anywhere, packed, padded, generated, cropped."""

import pytest
import torch
from bases import NAMES, converted, tokens
from transformers import CompileConfig

from latte.errors import LatteError
from latte.models import LatteCache, load_state, save_state

EXACT = {"rtol": 1e-9, "atol": 1e-9}
OPTIONS = {
    "plain": {},
    "conv": {"latent_input": "conv"},
    "sinks": {"num_sinks": 2},
    "delayed": {"delay_latents": True},
    "delayed, forgetting": {"delay_latents": True, "forgetting": "gated"},
    "both": {"num_sinks": 3, "delay_latents": True, "latent_input": "none"},
    "window": {"mixing": "window"},
    "latents": {"mixing": "latents"},
    "window with sinks": {"mixing": "window", "num_sinks": 2},
    "base": {"mixing": "base"},
    "kept": {"converted_layers": (1, 3)},
    "kept, both": {"num_sinks": 3, "delay_latents": True, "converted_layers": (1, 3)},
}
CASES = [(name, "llama") for name in OPTIONS] + [
    (name, family) for family in NAMES if family != "llama" for name in ("plain", "both")
]
# Layers 1 and 3 of these have full attention, and the others a window of their own, of 9 tokens.
OPTIONS["hybrid"] = {"converted_layers": (3,)}
CASES += [(name, family) for family in ("gemma2", "gemma3_text") for name in ("kept", "kept, both")]
CASES += [("hybrid", "gemma2")]
GROW = {("base", "llama"), ("kept", "llama"), ("kept, both", "llama"), ("hybrid", "gemma2")}


def in_pieces(model, ids, cuts, cache=None):
    parts, start = [], 0
    cache = cache or LatteCache(model.config)
    for stop in [*cuts, ids.shape[1]]:
        out = model(ids[:, start:stop], past_key_values=cache, use_cache=True)
        parts.append(out.logits)
        start = stop
    return torch.cat(parts, 1)


@pytest.mark.parametrize(("option", "family"), CASES)
def test_split_anywhere_is_whole(option, family):
    model = converted(family, **OPTIONS[option])
    ids = tokens(14)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        for cuts in ([1], [2, 3, 4], [7, 12], range(1, 14)):
            torch.testing.assert_close(in_pieces(model, ids, cuts), whole, **EXACT)


@pytest.mark.parametrize(("option", "family"), CASES)
def test_packed_is_separate(option, family):
    model = converted(family, **OPTIONS[option])
    parts = [tokens(n, 1, seed=n) for n in (3, 11, 1, 9)]
    bounds = torch.tensor([0, 3, 14, 15, 24], dtype=torch.int32)
    packed = model(torch.cat(parts, 1), cu_seq_lens_q=bounds).logits
    apart = torch.cat([model(part, use_cache=False).logits for part in parts], 1)
    torch.testing.assert_close(packed, apart, **EXACT)
    # Transformers' collators mark packed sequences by positions that start anew.
    places = torch.cat([torch.arange(part.shape[1])[None] for part in parts], 1)
    by_positions = model(torch.cat(parts, 1), position_ids=places, use_cache=False).logits
    torch.testing.assert_close(by_positions, packed, **EXACT)


@pytest.mark.parametrize(("option", "family"), CASES)
def test_left_padding_changes_nothing(option, family):
    model = converted(family, **OPTIONS[option])
    ids = tokens(18)
    padded = torch.cat([torch.ones(2, 4, dtype=torch.long), ids], 1)
    mask = torch.ones(2, 22, dtype=torch.long)
    mask[:, :4] = 0
    plain = model(ids).logits
    torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, 4:], plain, **EXACT)
    cache = LatteCache(model.config)
    first = model(padded[:, :9], attention_mask=mask[:, :9], past_key_values=cache)
    rest = model(padded[:, 9:], attention_mask=mask, past_key_values=cache)
    both = torch.cat([first.logits, rest.logits], 1)[:, 4:]
    torch.testing.assert_close(both, plain, **EXACT)


@pytest.mark.parametrize("option", OPTIONS)
def test_the_future_cannot_change_the_past(option):
    model = converted("llama", **OPTIONS[option])
    ids = tokens(24)
    other = ids.clone()
    other[:, 15:] = (other[:, 15:] + 7) % 50
    assert torch.equal(model(ids).logits[:, :15], model(other).logits[:, :15])


@pytest.mark.parametrize(
    ("option", "family"),
    [("plain", family) for family in NAMES]
    + [("kept", "llama"), ("kept", "gemma3_text"), ("hybrid", "gemma2")],
)
def test_generation_is_the_argmax_of_the_whole(option, family):
    model = converted(family, **OPTIONS[option])
    ids = tokens(9)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), out)
    for step in range(9, 17):
        wanted = model(out[:, :step]).logits[:, -1].argmax(-1)
        assert torch.equal(out[:, step], wanted)


@pytest.mark.parametrize(
    ("option", "family"), [("kept", "llama"), ("kept", "gemma3_text"), ("hybrid", "gemma2")]
)
def test_beams_and_padding_go_through_steps_as_through_the_whole(option, family):
    model = converted(family, **OPTIONS[option])
    ids = torch.cat([torch.ones(2, 4, dtype=torch.long), tokens(11)], 1)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0,
               "num_beams": 3, "attention_mask": mask}  # fmt: skip
    expected = model.generate(ids, use_cache=False, **options)
    for kind in ("dynamic", "static", "offloaded"):
        assert torch.equal(model.generate(ids, cache_implementation=kind, **options), expected)


@pytest.mark.parametrize("option", ["kept", "hybrid"])
def test_steps_fill_a_ring_of_each_layers_own(option):
    """Far beyond all windows; growing rings are made anew when they are full."""
    model, ids = converted("gemma2", **OPTIONS[option]), tokens(90, 1)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        for room in (None, 90):
            cache = LatteCache(model.config, max_cache_len=room)
            stepped = in_pieces(model, ids, range(7, 90), cache)
            torch.testing.assert_close(stepped, whole, **EXACT)
            sizes = [layer.buffers.ring.keys.shape[2] for layer in cache.layers]
            assert sizes[0] == sizes[2] == 9 and sizes[3] == 5
            assert sizes[1] == 5 if option == "kept" else sizes[1] >= 90


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "family"),
    [
        *(("plain", "gemma2"), ("base", "llama"), ("both", "llama")),
        *(("kept", "llama"), ("hybrid", "gemma2")),
    ],
)
def test_compiled_decoding_is_one_graph(option, family):
    torch._dynamo.reset()
    model = converted(family, **OPTIONS[option])
    compiled = CompileConfig(backend="aot_eager", fullgraph=True)
    compiled._compile_all_devices = True
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(tokens(9), **options)
    options |= {"cache_implementation": "static", "compile_config": compiled}
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(model.generate(tokens(9), **options), expected)


def test_layers_without_a_step_have_no_static_cache():
    with pytest.raises(ValueError, match="needs layers with a step of decoding"):
        converted("llama", **OPTIONS["latents"]).generate(tokens(4), cache_implementation="static")


@pytest.mark.parametrize(("option", "family"), CASES)
def test_the_cache_is_constant_in_size_but_for_full_attention(option, family):
    ids = tokens(40)
    model = converted(family, **OPTIONS[option])
    cache = LatteCache(model.config)
    model(ids[:, :20], past_key_values=cache)
    before = cache.nbytes
    model(ids[:, 20:], past_key_values=cache)
    assert (cache.nbytes > before) == ((option, family) in GROW)


@pytest.mark.parametrize(("option", "family"), CASES)
def test_a_state_as_a_file_goes_on_bit_for_bit(option, family, tmp_path):
    model, ids = converted(family, **OPTIONS[option]), tokens(18)
    cache = LatteCache(model.config)
    with torch.no_grad():
        model(ids[:, :11], past_key_values=cache)
        save_state(cache, tmp_path / "state")
        loaded = load_state(tmp_path / "state", model)
        assert torch.equal(
            in_pieces(model, ids[:, 11:], [3, 4], loaded),
            in_pieces(model, ids[:, 11:], [3, 4], cache),
        )


@pytest.mark.parametrize(
    ("option", "family"),
    [("plain", "gemma3_text"), ("kept", "llama"), ("kept", "gemma3_text"), ("hybrid", "gemma2")],
)
def test_tokens_are_taken_back(option, family):
    model = converted(family, **OPTIONS[option])
    ids = tokens(20)
    cache = LatteCache(model.config)
    model(ids[:, :9], past_key_values=cache)
    cache.activate_past_recording()
    model(ids[:, 9:16], past_key_values=cache)
    for layer in cache.layers:
        layer.crop(-4)
    rest = model(ids[:, 12:], past_key_values=cache).logits
    torch.testing.assert_close(rest, model(ids).logits[:, 12:], **EXACT)


@pytest.mark.parametrize("option", ["sinks", "delayed"])
def test_options_that_cannot_take_tokens_back_say_so(option):
    model = converted("llama", **OPTIONS[option])
    cache = LatteCache(model.config)
    cache.activate_past_recording()
    with pytest.raises(ValueError, match="cannot be taken back"):
        model(tokens(4), past_key_values=cache)


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
    from bases import WINDOW, base_logits

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
