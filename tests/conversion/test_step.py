"""Single tokens of a converted decoder: the whole sequence's results, by few calls."""

import copy

import pytest
import torch
from bases import NAMES, WINDOW, converted, tokens
from torch.profiler import ProfilerActivity, profile

from latte.layers.state import map_tensors
from latte.models import LatteCache, load_state, save_state
from latte.ops import cpp_backend, use_backend

EXACT = {"rtol": 1e-9, "atol": 1e-9}
SINKS, DELAYED = {"num_sinks": 3}, {"delay_latents": True, "latent_input": "none"}
OPTIONS = {
    "sinks": SINKS,
    "sinks that forget": SINKS | {"forgetting": "gated"},
    "delayed": DELAYED,
    "both": SINKS | DELAYED,
    "both from a convolution": SINKS | DELAYED | {"latent_input": "conv"},
    "more sinks than window": DELAYED | {"num_sinks": WINDOW + 2},
    "a window of one": SINKS | DELAYED | {"local_window": 1},
    "window": SINKS | {"mixing": "window"},
    "one softmax": SINKS | DELAYED | {"joint_softmax": True},
    "one softmax of all": {"joint_softmax": True},
    "delayed that forget": DELAYED | {"forgetting": "gated"},
    "some layers": SINKS | DELAYED | {"joint_softmax": True, "converted_layers": (1, 3)},
}
CASES = [(option, "llama") for option in OPTIONS]
CASES += [
    (option, family)
    for option, family in (
        *(
            ("both", "gemma2"),
            ("one softmax", "gemma2"),
            ("both", "gemma3_text"),
            ("both", "qwen2"),
        ),
    )
]


@pytest.fixture(params=["torch", "cpu"])
def backend(request):
    """PyTorch's operations, then the native kernels."""
    if request.param == "cpu" and cpp_backend.ABSENT is not None:
        pytest.skip(cpp_backend.ABSENT)
    with use_backend(request.param):
        yield request.param


def read(model, cache, ids, mask=None):
    with torch.no_grad():
        return model(ids, attention_mask=mask, past_key_values=cache).logits


def stepped(model, cache, ids, start, mask=None):
    """Logits of single tokens from ``start`` on, each a step in place."""
    logits = []
    for t in range(start, ids.shape[1]):
        logits.append(
            read(model, cache, ids[:, t : t + 1], mask if mask is None else mask[:, : t + 1])
        )
        assert cache.layers[0].is_written_in_place
    return torch.cat(logits, 1)


def seen(state):
    """A state without what stands at slots that hold nothing."""

    def of(part):
        if part is None:
            return None
        return part._replace(
            keys=part.keys * part.mask[..., None, None],
            values=part.values * part.mask[..., None, None],
        )

    return state._replace(window=of(state.window), pending=of(state.pending), sinks=of(state.sinks))


@pytest.mark.parametrize(("option", "family"), CASES)
def test_steps_are_the_whole_after_a_prompt_of_any_length(option, family, backend):
    model, ids = converted(family, **OPTIONS[option]), tokens(19)
    whole_cache = LatteCache(model.config)
    whole = read(model, whole_cache, ids)
    for prompt in (1, 2, WINDOW, WINDOW + 1, 14):
        cache = LatteCache(model.config)
        read(model, cache, ids[:, :prompt])
        torch.testing.assert_close(stepped(model, cache, ids, prompt), whole[:, prompt:], **EXACT)
        for layer, other in zip(cache.layers, whole_cache.layers, strict=True):
            torch.testing.assert_close(seen(layer.state), seen(other.state), **EXACT)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_padded_rows_and_padding_in_between(family, backend):
    model, ids = converted(family, **OPTIONS["both"]), tokens(20)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    mask[1, [9, 10, 15]] = 0
    whole = model(ids, attention_mask=mask, use_cache=False).logits
    cache = LatteCache(model.config)
    read(model, cache, ids[:, :5], mask[:, :5])
    found = stepped(model, cache, ids, 5, mask)
    real = mask[:, 5:].bool()
    torch.testing.assert_close(found[real], whole[:, 5:][real], **EXACT)
    assert cache.position.tolist() == mask.sum(1).tolist()


def test_rows_are_reordered_repeated_and_selected(backend):
    model, ids = converted("llama", **OPTIONS["both"]), tokens(20)
    cache, rows = LatteCache(model.config), torch.tensor([1, 0, 0])
    read(model, cache, ids[:, :3])
    stepped(model, cache, ids[:, :9], 3)
    cache.reorder_cache(torch.tensor([1, 1]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3, 2]))
    again = torch.cat([ids[[1, 1, 1], :9], ids[rows, 9:]], 1)
    whole = model(again, use_cache=False).logits
    torch.testing.assert_close(stepped(model, cache, again, 9), whole[:, 9:], **EXACT)


def test_what_was_read_off_goes_on_elsewhere(backend, tmp_path):
    """A state, a copy and a file made in the middle of decoding; a static cache from the file."""
    model, ids = converted("gemma3_text", **OPTIONS["both"]), tokens(20)
    whole = model(ids, use_cache=False).logits[:, 12:]
    cache = LatteCache(model.config)
    read(model, cache, ids[:, :4])
    stepped(model, cache, ids[:, :12], 4)
    kept, twin = cache.layers[1].state, copy.deepcopy(cache)
    before = map_tensors(torch.clone, kept)
    save_state(cache, tmp_path / "state")
    torch.testing.assert_close(stepped(model, cache, ids, 12), whole, **EXACT)
    torch.testing.assert_close(kept, before, rtol=0, atol=0)
    torch.testing.assert_close(stepped(model, twin, ids, 12), whole, **EXACT)
    for options in ({}, {"static_room": 8}):
        loaded = load_state(tmp_path / "state", model, **options)
        torch.testing.assert_close(stepped(model, loaded, ids, 12), whole, **EXACT)
    # In pieces again, after steps.
    loaded = load_state(tmp_path / "state", model)
    stepped(model, loaded, ids[:, :14], 12)
    torch.testing.assert_close(read(model, loaded, ids[:, 14:]), whole[:, 2:], **EXACT)


@pytest.mark.parametrize("option", ["both", "sinks", "window"])
def test_buffers_of_a_static_cache_stay_where_they_are(option, backend):
    model, ids = converted("llama", **OPTIONS[option]), tokens(20)
    whole = model(ids, use_cache=False).logits
    cache = LatteCache(model.config, max_cache_len=32)
    for _ in range(2):
        read(model, cache, ids[:, :3])
        home = cache.layers[1].buffers.sinks[0].data_ptr()
        assert cache.layers[1].buffers.ring.keys.shape[2] == WINDOW
        found = stepped(model, cache, ids[:, :9], 3)
        torch.testing.assert_close(found, whole[:, 3:9], **EXACT)
        read(model, cache, ids[:, 9:13])
        torch.testing.assert_close(stepped(model, cache, ids, 13), whole[:, 13:], **EXACT)
        assert cache.layers[1].buffers.sinks[0].data_ptr() == home
        cache.reset()


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_with_a_static_cache_and_beams(beams):
    model, ids = converted("llama", **OPTIONS["both"]), tokens(4)
    options = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"num_beams": beams}
    with use_backend("reference"):  # no step in place
        expected = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, **options), expected)
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), expected)


@pytest.mark.parametrize("family", NAMES)
def test_generation_takes_steps(family):
    model, ids = converted(family, **OPTIONS["both"]), tokens(4)
    cache = LatteCache(model.config)
    model.generate(ids, max_new_tokens=3, past_key_values=cache, eos_token_id=None)
    assert cache.get_seq_length() == 6 and cache.layers[0].is_written_in_place


# --- the base's own modules ----------------------------------------------------------------------


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_as_exact_as_the_general_way(family, dtype):
    exact, ids = converted(family, **OPTIONS["both"]), tokens(12)
    model = copy.deepcopy(exact).to(dtype)
    for layer in model.model.layers:
        layer.self_attn.latents.float()
    rounded = copy.deepcopy(model).double()
    expected = rounded(ids, use_cache=False).logits[:, -1]
    errors = []
    for backend in ("reference", "torch", None):
        cache = LatteCache(model.config)
        with use_backend(backend) if backend else torch.no_grad():
            read(model, cache, ids[:, :6])
            for t in range(6, 12):
                logits = read(model, cache, ids[:, t : t + 1])[:, -1]
            assert cache.layers[0].is_written_in_place == (backend != "reference")
        errors.append((logits.double() - expected).norm() / expected.norm())
    assert max(errors[1:]) <= max(2 * errors[0], 16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_hook_or_an_adapter_is_not_passed_over(family):
    model, ids, calls = converted(family, **OPTIONS["both"]).float(), tokens(8, 1), []
    cache, twin = LatteCache(model.config), LatteCache(model.config)
    for one in (cache, twin):
        read(model, one, ids[:, :6])
    expected = read(model, twin, ids[:, 6:7])
    layer = model.model.layers[1]
    attention, mlp = layer.self_attn, layer.mlp
    inside = [
        *(attention.v_proj, attention.o_proj, attention.latents.k_proj, mlp, mlp.up_proj),
        *(mlp.act_fn, mlp.down_proj, layer.input_layernorm, model.model.norm, model.lm_head),
    ]
    for watched in (inside, [layer], [attention]):
        hooks = [m.register_forward_hook(lambda m, _i, _o: calls.append(m)) for m in watched]
        found = read(model, copy.deepcopy(cache), ids[:, 6:7])
        assert set(calls) == set(watched)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        calls.clear()
        for hook in hooks:
            hook.remove()
    layer.mlp.gate_proj = Twice(layer.mlp.gate_proj)
    attention.q_proj = Twice(attention.q_proj)
    whole = model(ids[:, :7], use_cache=False).logits[:, 6:]
    assert (whole - expected).abs().max() > 1e-3
    cache = LatteCache(model.config)
    read(model, cache, ids[:, :6])
    torch.testing.assert_close(read(model, cache, ids[:, 6:7]), whole, rtol=1e-4, atol=1e-4)


class Twice(torch.nn.Module):
    """An adapter around a linear map."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return 2 * self.base(x)


def test_what_is_asked_of_a_step_is_answered():
    model, ids = converted("llama", **OPTIONS["both"]), tokens(8)
    cache = LatteCache(model.config)
    read(model, cache, ids[:, :6])
    with torch.no_grad():
        out = model(ids[:, 6:7], past_key_values=cache, output_hidden_states=True)
        assert len(out.hidden_states) == 5 and out.hidden_states[0].shape == (2, 1, 32)
        plain = model(ids[:, 7:8], past_key_values=cache, return_dict=False)
    assert isinstance(plain, tuple)
    torch.testing.assert_close(plain[0], model(ids, use_cache=False).logits[:, 7:], **EXACT)


@pytest.mark.parametrize(("family", "most"), [("llama", 16), ("gemma3_text", 22)])
def test_a_step_takes_few_operations(family, most):
    """Counted as the profiler does, nested ones too; a count is the same on every machine."""
    if cpp_backend.ABSENT is not None:
        pytest.skip(cpp_backend.ABSENT)
    model, ids = converted(family, **OPTIONS["both"]).float(), tokens(9, 1)
    cache = LatteCache(model.config)
    with torch.inference_mode():
        read(model, cache, ids[:, :7])
        read(model, cache, ids[:, 7:8])
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            read(model, cache, ids[:, 8:])
    names = [event.name for event in seen.events()]
    layers = model.config.num_hidden_layers
    kernels = sum(name.startswith("latte::") for name in names)
    others = sum(name.startswith("aten::") for name in names)
    assert kernels <= 12 * layers + 2
    assert others <= most * layers + 130  # once: the embedding, masks and rotary tables
