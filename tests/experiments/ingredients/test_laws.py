"""What holds for every mixer of the plugin and of the example, and for every model of one."""

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM

from latte.models import LatteCache
from tests.experiments.ingredients.mixers import (
    ALL,
    NARROW,
    PARTS,
    TOLERANCE,
    average,
    gsa,
    inputs,
    model_of,
    raven,
    recurrent,
    trial,
)

# A layer, and the part of its state that is compared.
LAYERS = {
    "gsa": (gsa, "own"),
    "gsa, narrow": (functools.partial(gsa, **NARROW), "own"),
    "raven": (raven, "own"),
    "raven, 3 slots": (functools.partial(raven, written_slots=3), "own"),
    "raven, narrow": (functools.partial(raven, written_slots=2, **NARROW), "own"),
    "raven, 1 slot": (functools.partial(raven, written_slots=1), "own"),
    "recurrent": (recurrent, "rglru"),
    "example": (average, "own"),
}
LAYERS |= {
    f"trial, {'+'.join(parts) or 'plain'} {parts.get('short_conv', '')}": (
        functools.partial(trial, **parts),
        "short_conv",
    )
    for parts in PARTS
}
every = pytest.mark.parametrize("name", LAYERS)


@every
def test_it_is_causal_and_every_parameter_learns(name):
    layer, x = LAYERS[name][0](), inputs()
    changed = x.clone()
    changed[:, 25:] += 1
    out = layer(x)[0]
    torch.testing.assert_close(layer(changed)[0][:, :25], out[:, :25], atol=0, rtol=0)
    assert not torch.allclose(layer(changed)[0][:, 25:], out[:, 25:])
    if name == "raven, 1 slot":
        return  # a single share is 1: the router does not learn
    out.square().sum().backward()
    for parameter_name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, parameter_name


@every
def test_pieces_make_the_whole_and_padding_does_not_count(name):
    layer, part = LAYERS[name][0](), LAYERS[name][1]
    x, mask = inputs(), torch.ones(2, 40, dtype=torch.bool)
    mask[1, :9], mask[0, 35:] = False, False
    whole, end = layer(x, mask, output_final_state=True)
    for cut in (1, 17):
        first, state = layer(x[:, :cut], mask[:, :cut], output_final_state=True)
        second, last = layer(x[:, cut:], mask[:, cut:], state=state, output_final_state=True)
        torch.testing.assert_close(torch.cat([first, second], 1)[mask], whole[mask], **TOLERANCE)
        torch.testing.assert_close(getattr(last, part), getattr(end, part), **TOLERANCE)
    torch.testing.assert_close(whole[1:, 9:], layer(x[1:, 9:])[0], **TOLERANCE)


@every
def test_packed_sequences_do_not_see_each_other(name):
    layer, part = LAYERS[name][0](), LAYERS[name][1]
    x, bounds = inputs(1), torch.tensor([0, 15, 16, 40], dtype=torch.int32)
    packed, end = layer(x, cu_seqlens=bounds, output_final_state=True)
    for row, (start, stop) in enumerate([(0, 15), (15, 16), (16, 40)]):
        alone, state = layer(x[:, start:stop], output_final_state=True)
        torch.testing.assert_close(packed[:, start:stop], alone, **TOLERANCE)
        if part != "short_conv":
            held = getattr(end, part)[row : row + 1]
            torch.testing.assert_close(held, getattr(state, part), **TOLERANCE)


@every
def test_tokens_can_be_taken_back(name):
    layer, x = LAYERS[name][0](), inputs()
    _, state = layer(x[:, :10], output_final_state=True)
    _, recorded = layer(x[:, 10:30], state=state.record(), output_final_state=True)
    _, wanted = layer(x[:, :25], output_final_state=True)
    again, _ = layer(x[:, 25:], state=layer.rollback(recorded, 5))
    torch.testing.assert_close(again, layer(x[:, 25:], state=wanted)[0], **TOLERANCE)


@pytest.mark.parametrize("name", ["gsa", "raven"])
def test_under_autocast_the_slots_stay_in_fp32(name):
    layer, x = LAYERS[name][0]().float(), inputs().float()
    with torch.autocast("cpu", torch.bfloat16):
        _, state = layer(x, output_final_state=True)
    assert state.own.dtype == torch.float32


MODELS = [
    ("gsa", {}),
    ("gsa", {"mlp": "none", "value_dim": 12}),
    ("raven", {"mlp": "none", "value_dim": 12}),
    ("trial", ALL | {"mlp": "swiglu", "half_lives_by_layer": True}),
    ("trial", ALL | {"mlp": "none", "half_lives_by_layer": True}),
    ("trial", {"block_types": ["recurrent", "attention"]}),
]


@pytest.mark.parametrize(("preset", "fields"), MODELS)
def test_token_by_token_is_the_whole_and_a_saved_model_is_loaded_again(preset, fields, tmp_path):
    model = model_of(preset, **fields)
    tokens = torch.randint(260, (2, 30), generator=torch.Generator().manual_seed(0))
    cache = LatteCache(model.config)
    with torch.no_grad():
        steps = [
            model(tokens[:, t : t + 1], past_key_values=cache, use_cache=True).logits
            for t in range(30)
        ]
        whole = model(tokens).logits
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=1e-4, rtol=1e-4)
    assert model.generate(tokens[:, :5], max_new_tokens=4, do_sample=False).shape == (2, 9)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(tokens).logits, model(tokens).logits)
