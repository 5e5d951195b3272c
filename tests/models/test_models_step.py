"""Single tokens are decoded in place: as few operations as that takes, and nobody is surprised."""

import copy

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from latte.layers import Context, LatteAttention, LatteMacchiato, StepContext, StepState
from latte.models import PRESETS, LatteCache, LatteForCausalLM, preset_config
from latte.models.inputs import DecoderInputs
from latte.ops import cpp_backend, use_backend

FAMILY = (*PRESETS, "latte-conv-swa-f++", "latte-gated", "latte-hybrid")
TOLERANCE = {"atol": 1e-9, "rtol": 1e-9}


def read(model, cache, ids, mask=None):
    with torch.no_grad():
        return model(ids, attention_mask=mask, past_key_values=cache).logits


def decoded(model, ids, prompt, cache=None):
    """The cache after a prompt and single tokens."""
    cache = LatteCache(model.config) if cache is None else cache
    read(model, cache, ids[:, :prompt])
    for t in range(prompt, ids.shape[1]):
        read(model, cache, ids[:, t : t + 1])
    return cache


def test_steps_go_on_in_and_out_of_inference_mode(build, tokens):
    model, ids = build("latte-r-swa++"), tokens(1, 8)
    with torch.inference_mode():
        cache = decoded(model, ids[:, :6], 4)
        cache.reorder_cache(torch.tensor([0]))
    decoded(model, ids[:, 6:], 1, cache)
    expected = decoded(model, ids, 8)
    torch.testing.assert_close(cache.layers[1].state, expected.layers[1].state, **TOLERANCE)


def test_gradients_flow_through_a_step_that_is_recorded(build, tokens):
    model, ids = build("latte-r-swa++"), tokens(1, 6)
    cache = decoded(model, ids, 4)
    model(ids[:, :1], past_key_values=cache).logits.sum().backward()
    assert model.model.layers[0].mixer.v_proj.weight.grad.abs().sum() > 0
    model.zero_grad()


@pytest.mark.parametrize("preset", FAMILY)
def test_mixers_and_blocks_step_by_themselves(build, preset):
    block = build(preset).model.layers[0]
    x = torch.randn(2, 9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    room = 16 if block.mixer.grows else None
    with torch.no_grad():
        mixed, (hidden, _, _) = block.mixer(x)[0], block(x, Context.of(x))
        start = Context.of(x[:, :5], output_final_state=True)
        states = []
        for state in (block.mixer(x[:, :5], output_final_state=True)[1],
                      block(x[:, :5], start)[1]):  # fmt: skip
            step_context = StepContext(state.position.clone(), torch.zeros((), dtype=torch.long))
            step_context.length = None if room is None else 5
            states.append(StepState.of(state, step_context, room=room, masked=False))
        for t in range(5, 9):
            found = block.mixer.step(x[:, t], states[0]), block.step(x[:, t], states[1])
            torch.testing.assert_close(found, (mixed[:, t], hidden[:, t]), **TOLERANCE)
            for state in states:
                state.step_context.advance()


def test_a_step_says_what_it_expects(build):
    model = build("latte-r-swa++").model
    mixer, x = model.layers[0].mixer, torch.randn(2, 5, 16, dtype=torch.float64)
    with torch.no_grad():
        state = mixer(x, output_final_state=True)[1]
        step_context = StepContext(state.position, torch.zeros((), dtype=torch.long))
        buffers = StepState.of(state, step_context, room=None, masked=False)
        with pytest.raises(
            ValueError, match=r"LatteMacchiato.step: expected x \(B, E\).*got.*5, 16"
        ):
            mixer.step(x, buffers)
        with pytest.raises(ValueError, match="a StepState.* and MixerState, without gradients"):
            mixer.step(x[:, 0], state)
        with pytest.raises(ValueError, match="state must be the MixerState .* got StepState"):
            mixer(x[:, :1], state=buffers)
    with pytest.raises(ValueError, match="and StepState, with gradients"):
        mixer.step(x[:, 0], buffers)
    inputs = DecoderInputs(x, None, None, None, None, state)
    with pytest.raises(ValueError, match="expected inputs with the buffers of a step, got none"):
        model.step(inputs)


def test_a_mixer_that_changes_what_is_computed_has_no_step():
    class Doubled(LatteAttention):
        def _attend(self, projected, piece):
            out, after = super()._attend(projected, piece)
            return 2 * out, after

    class Renamed(LatteMacchiato):
        pass

    assert LatteAttention.steps and Renamed.steps and not Doubled.steps


@pytest.mark.parametrize(("backend", "most"), [("torch", 220), ("cpu", 80)])
def test_a_step_takes_few_operations(backend, most):
    """Counted as the profiler does, nested ones too; a count is the same on every machine."""
    if backend == "cpu" and cpp_backend.ABSENT is not None:
        pytest.skip(cpp_backend.ABSENT)
    model = LatteForCausalLM(preset_config("latte-r-swa++", "tiny")).eval()
    with torch.inference_mode(), use_backend(backend):
        cache = decoded(model, torch.zeros(1, 80, dtype=torch.long), 78)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            read(model, cache, torch.zeros(1, 1, dtype=torch.long))
    operations = sum(event.name.startswith("aten::") for event in seen.events())
    assert operations <= most * model.config.num_hidden_layers


@pytest.mark.parametrize("preset", ["latte-r-swa++", "r-swa++", "linear++", "transformer++"])
@pytest.mark.parametrize("rows", [1, 3, 6])
def test_native_kernels_decode_what_pytorchs_operations_do(build, tokens, preset, rows):
    if cpp_backend.ABSENT is not None:
        pytest.skip(cpp_backend.ABSENT)
    model, ids, logits = build(preset), tokens(rows, 9), []
    for backend in ("torch", "cpu"):
        with use_backend(backend):
            logits.append(read(model, decoded(model, ids[:, :8], 5), ids[:, 8:]))
    torch.testing.assert_close(*logits, **TOLERANCE)


def test_another_module_in_a_layer_is_not_passed_over(build, tokens):
    """Steps take weights by themselves only where a module is nothing but its class."""
    model, ids = copy.deepcopy(build("latte-r-swa++")), tokens(1, 8)
    layer = model.model.layers[1]
    with torch.no_grad():
        layer.mixer.q_proj = Twice(layer.mixer.q_proj)
    expected = read(model, LatteCache(model.config), ids)[:, -1:]
    found = read(model, decoded(model, ids[:, :7], 4), ids[:, 7:])
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("part", ["block", "mixer"])
@pytest.mark.parametrize("how", ["hook", "pre-hook", "forward"])
def test_a_block_or_mixer_that_is_watched_is_called(build, tokens, part, how):
    """A step calls neither, so it is not taken; the state goes on where the step left it."""
    model, ids, seen = copy.deepcopy(build("latte-r-swa++")), tokens(1, 9), []
    whole, cache = read(model, None, ids), decoded(model, ids[:, :6], 4)
    watched = model.model.layers[1] if part == "block" else model.model.layers[1].mixer
    if how == "forward":
        forward = watched.forward
        watched.forward = lambda *args, **named: seen.append(1) or forward(*args, **named)
    else:
        adding = "register_forward_hook" if how == "hook" else "register_forward_pre_hook"
        handle = getattr(watched, adding)(lambda *_: seen.append(1))
    found = [read(model, cache, ids[:, t : t + 1]) for t in (6, 7)]
    assert len(seen) == 2 and not cache.layers[0].is_written_in_place
    if how == "forward":
        del watched.forward
    else:
        handle.remove()
    found.append(read(model, cache, ids[:, 8:]))
    assert len(seen) == 2 and cache.layers[0].is_written_in_place
    torch.testing.assert_close(torch.cat(found, 1), whole[:, 6:], **TOLERANCE)


@pytest.mark.parametrize(
    "part", ["mixer.q_proj", "mixer.latents.k_proj", "mlp.up_proj", "mlp_norm"]
)
def test_weights_that_are_replaced_are_read(build, tokens, part):
    """A plan keeps the weights that kernels read, until another parameter is in their place."""
    model, ids = copy.deepcopy(build("latte-r-swa++")), tokens(1, 9)
    cache = decoded(model, ids[:, :7], 5)
    twin = copy.deepcopy(cache)
    module = model.model.layers[1].get_submodule(part)
    module.weight = torch.nn.Parameter(1.5 * module.weight)
    found = read(model, cache, ids[:, 7:8])
    assert cache.layers[0].is_written_in_place
    assert not torch.equal(found, read(build("latte-r-swa++"), copy.deepcopy(twin), ids[:, 7:8]))
    expected = read(copy.deepcopy(model), twin, ids[:, 7:8])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("whole", [True, False])
def test_dropout_acts_in_decoding(config, tokens, whole):
    """A step has none: models in training mode, or with one such dropout alone, take no step."""
    model, ids = LatteForCausalLM(config("latte-r-swa++", hidden_dropout=0.5)).eval(), tokens(1, 8)
    assert decoded(model, ids, 5).layers[0].is_written_in_place
    (model if whole else model.model.layers[1].dropout).train()
    cache = decoded(model, ids[:, :7], 5)
    assert not cache.layers[0].is_written_in_place
    found = [read(model, copy.deepcopy(cache), ids[:, 7:]) for _ in range(2)]
    assert not torch.equal(*found)
    assert decoded(model.eval(), ids, 5).layers[0].is_written_in_place


def parametrised(model):
    for layer in model.model.layers:
        for linear in (layer.mixer.q_proj, layer.mlp.down_proj):
            torch.nn.utils.parametrizations.weight_norm(linear)
            linear.parametrizations.weight.original0.data.mul_(3)
    return model


def with_low_rank_updates(model):
    peft = pytest.importorskip("peft")
    options = {"target_modules": ["v_proj", "up_proj", "o_proj"], "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(**options)).eval()


def in_int8(model):
    """Linear maps whose weights are 8-bit integers, as a quantiser puts them in."""
    for layer in model.model.layers:
        layer.mixer.v_proj, layer.mlp.gate_proj = map(
            Int8, (layer.mixer.v_proj, layer.mlp.gate_proj)
        )
    return model


class Int8(torch.nn.Linear):
    def __init__(self, base):
        super().__init__(base.in_features, base.out_features, bias=False)
        scale = base.weight.detach().abs().amax() / 127
        self.weight = torch.nn.Parameter((base.weight / scale).round().char(), requires_grad=False)
        self.scale = scale

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight.to(x) * self.scale)


@pytest.mark.parametrize("change", [parametrised, with_low_rank_updates, in_int8])
def test_changed_linear_maps_decode_what_the_whole_gives(build, tokens, change):
    plain, ids = build("latte-r-swa++"), tokens(1, 8)
    model = change(copy.deepcopy(plain))
    whole = read(model, None, ids)
    assert (whole - read(plain, None, ids)).abs().max() > 1e-3
    cache = decoded(model, ids[:, :7], 4)
    assert cache.layers[0].is_written_in_place
    torch.testing.assert_close(read(model, cache, ids[:, 7:]), whole[:, 7:], **TOLERANCE)


class Twice(torch.nn.Module):
    """An adapter around a linear map."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return 2 * self.base(x)


def test_a_static_cache_refuses_what_it_cannot_do(build, config, tokens):
    growing = build("transformer++")
    with pytest.raises(ValueError, match="at most max_cache_len=4 tokens, got 6"):
        read(growing, LatteCache(growing.config, max_cache_len=4), tokens(1, 6))
    model = build("latte-r-swa++")
    cache = LatteCache(model.config, max_cache_len=4)
    with pytest.raises(ValueError, match="records nothing"):
        cache.activate_past_recording()
    with pytest.raises(ValueError, match="keeps no sources"):
        model(tokens(1, 4), past_key_values=cache, output_attentions=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LatteMacchiato, "steps", False)
        with pytest.raises(ValueError, match="needs layers with a step of decoding"):
            model.generate(tokens(1, 4), cache_implementation="static")
