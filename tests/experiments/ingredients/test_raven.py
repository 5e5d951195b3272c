"""Raven: the published layer's output, the mixer's laws, and its models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from experiments.ingredients.raven import STEPS, STRONGEST, Raven
from tests.experiments.ingredients.laws import (
    check_causal_and_learning,
    check_packed,
    check_pieces_and_padding,
    check_saved,
    check_steps,
    check_taken_back,
    inputs,
    model_of,
)

# The output for six tokens by the layer of flash-linear-attention, with its plain recurrence (the
# commit of 2026-08-22). Its parameters are sines, in the order of `NAMES`.
PUBLISHED = [
    [1.712693, 0.813605, -1.949451, -0.246314, 2.021129, -0.341835, -1.921655, 0.901036],
    [0.607523, 1.713531, -1.106161, -1.391638, 1.511127, 0.951900, -1.788131, -0.431554],
    [0.684397, 3.200860, -1.615848, -2.730648, 2.410466, 2.029202, -3.000964, -1.155921],
    [2.787333, 1.229038, -3.144984, -0.313848, 3.236313, -0.627920, -3.053589, 1.516514],
    [0.892745, 1.934856, -1.455788, -1.511221, 1.895553, 0.959615, -2.174802, -0.326748],
    [1.258818, 3.481981, -2.272075, -2.820807, 3.092930, 1.920764, -3.651872, -0.858069],
]
NAMES = ["strength", "decay_bias"]
NAMES += [f"{name}_proj.weight" for name in ("q", "k", "v", "decay", "router")]
NAMES += ["q_norm.weight", "k_norm.weight", "output_norm.weight", "o_proj.weight"]

OPTIONS: list[dict[str, Any]] = [
    {},
    {"written_slots": 3},
    {"written_slots": 1, "value_dim": 3, "head_dim": 6, "num_key_value_heads": 2},
]


def make(options: dict[str, Any]) -> Raven:
    """A layer in evaluation, since training adds noise to the choice of slots."""
    torch.manual_seed(0)
    layer = Raven(16, 4, 12, **options).double().eval()
    with torch.no_grad():
        for norm in (layer.q_norm, layer.k_norm, layer.output_norm):
            norm.weight.normal_()
    return layer


def test_it_is_the_published_layer():
    layer = Raven(8, 2, 8, written_slots=2).double().eval()
    parameters = dict(layer.named_parameters())
    assert parameters.keys() == {*NAMES}
    with torch.no_grad():
        for place, name in enumerate(NAMES):
            p = parameters[name]
            waves = torch.arange(100 * place, 100 * place + p.numel()).double().sin().view(p.shape)
            p.copy_(waves * (0.5 if p.ndim == 1 else 1) + ("norm" in name))
        out, _ = layer(torch.arange(5000, 5048).double().sin().view(1, 6, 8))
    torch.testing.assert_close(out[0], torch.tensor(PUBLISHED).double(), atol=5e-6, rtol=0)


def test_a_token_changes_the_chosen_slots_alone():
    """Two tokens later, at most four of six slots have been written."""
    layer = Raven(16, 2, 12, written_slots=2).double().eval()
    _, state = layer(inputs(1, 2), output_final_state=True)
    written = state.own.any(-1).sum(-1)
    assert (2 <= written).all() and (written <= 4).all()


def test_shares_sum_to_1_and_noise_changes_the_choice_in_training_alone():
    layer, router = make({"written_slots": 2}), torch.zeros(1, 200, 4, 3, dtype=torch.float64)
    router[..., 0] = 1.0
    shares = layer.shares(router)
    assert (shares > 0).sum(-1).eq(2).all() and (shares[..., 0] > 0.5).all()
    torch.testing.assert_close(shares.sum(-1), torch.ones_like(shares[..., 0]), atol=1e-8, rtol=0)
    noisy = layer.train().shares(router)
    assert (noisy > 0).sum(-1).eq(2).all() and (noisy[..., 0] == 0).any()


def test_initial_values_are_the_published_ones():
    layer = Raven(1024, 1024, 1024)
    step = torch.nn.functional.softplus(layer.decay_bias)
    assert STEPS[0] * 0.99 <= step.min() and step.max() <= STEPS[1] * 1.01
    assert step.log10().mean().item() == pytest.approx(-2, abs=0.1)
    assert layer.strength.exp().mean().item() == pytest.approx(STRONGEST / 2, abs=0.8)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_is_causal_and_every_parameter_learns(options):
    if options.get("written_slots") == 1:
        options = {**options, "written_slots": 2}  # a single share is 1: the router does not learn
    check_causal_and_learning(make(options))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_pieces_make_the_whole_and_padding_does_not_count(options):
    check_pieces_and_padding(make(options), "own")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_packed_sequences_do_not_see_each_other(options):
    check_packed(make(options), "own")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tokens_can_be_taken_back(options):
    check_taken_back(make(options))


def test_under_autocast_the_slots_stay_in_fp32():
    layer, x = make({}).float(), inputs().float()
    with torch.autocast("cpu", torch.bfloat16):
        _, state = layer(x, output_final_state=True)
    assert state.own.dtype == torch.float32


@pytest.mark.parametrize("count", [0, 4])
def test_mistakes_are_named(count):
    with pytest.raises(
        ValueError, match=f"Raven: written_slots must be from 1 to 3, .* got {count}"
    ):
        Raven(16, 4, 12, written_slots=count)


def test_token_by_token_is_the_whole():
    check_steps(model_of("raven", mlp="none", value_dim=12))


def test_a_saved_model_is_loaded_again(tmp_path):
    check_saved(model_of("raven", mlp="none", value_dim=12), tmp_path)


def test_a_new_model_begins_with_the_published_decays():
    layer = model_of("raven").model.layers[0].mixer
    assert layer.strength.exp().max() <= STRONGEST
    assert torch.nn.functional.softplus(layer.decay_bias).max() <= STEPS[1] * 1.01
