"""Griffin's recurrent block: Transformers' block, the mixer's laws, and models of both kinds."""

from __future__ import annotations

import pytest
import torch
from transformers import RecurrentGemmaConfig
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import (
    RecurrentGemmaRecurrentBlock,
)

from experiments.ingredients.hybrid import TAPS, RecurrentBlock
from latte.errors import LatteError
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


def make() -> RecurrentBlock:
    torch.manual_seed(0)
    return RecurrentBlock(16, 4).double().eval()


def test_it_is_transformers_block_without_biases():
    config = RecurrentGemmaConfig(hidden_size=16, num_attention_heads=4, lru_width=16)
    torch.manual_seed(0)
    other = RecurrentGemmaRecurrentBlock(config, 0).double()
    ours = make()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
        pairs = [(ours.v_proj, other.linear_x), (ours.gate_proj, other.linear_y)]
        for map_, given in [*pairs, (ours.o_proj, other.linear_out)]:
            map_.weight.copy_(given.weight)
            given.bias.zero_()
        ours.short_conv.weight.copy_(other.conv_1d.weight[:, 0])
        ours.short_conv.bias.copy_(other.conv_1d.bias)
        unit, gates = other.rg_lru, (ours.rglru.input_gate, ours.rglru.recurrence_gate)
        weights = unit.input_gate_weight, unit.recurrent_gate_weight
        biases = unit.input_gate_bias, unit.recurrent_gate_bias
        for gate, weight, bias in zip(gates, weights, biases, strict=True):
            gate.weight.copy_(weight)
            gate.bias.copy_(bias.flatten())
        ours.rglru.theta.copy_(unit.recurrent_param)
    assert other.conv1d_width == TAPS
    x = inputs()
    wanted, _ = other(x, torch.arange(x.shape[1])[None], None, use_cache=False)
    # Its state is fp32.
    torch.testing.assert_close(ours(x)[0], wanted, atol=1e-4, rtol=1e-5)


def test_it_is_causal_and_every_parameter_learns():
    check_causal_and_learning(make())


@pytest.mark.parametrize("part", ["rglru", "short_conv"])
def test_pieces_make_the_whole_and_packed_sequences_do_not_see_each_other(part):
    check_packed(make(), part)
    if part == "rglru":
        check_taken_back(make())


def test_pieces_and_padding():
    check_pieces_and_padding(make(), "rglru")


def test_it_reads_the_past_alone():
    with pytest.raises(ValueError, match="RecurrentBlock: expected causal=True"):
        RecurrentBlock(16, 4, causal=False)


@pytest.mark.parametrize("layers", [[0, 2], [0, 1, 2]], ids=str)
def test_models_of_both_kinds_step_and_are_saved(layers, tmp_path):
    model = model_of("trial", recurrent_layers=layers)
    kinds = [type(layer.mixer).__name__ for layer in model.model.layers]
    assert kinds == ["RecurrentBlock" if i in layers else "TrialMixer" for i in range(3)]
    check_steps(model)
    check_saved(model, tmp_path)


def spread(weight: torch.Tensor) -> float:
    return weight.std().item()


def test_initial_weights_are_those_of_every_other_layer():
    """The outputs of all mixers begin smaller than other matrices, by the depth."""
    model = model_of("trial", recurrent_layers=[1])
    for layer in model.model.layers:
        assert spread(layer.mixer.v_proj.weight) == pytest.approx(0.5, rel=0.15)
        assert spread(layer.mixer.o_proj.weight) == pytest.approx(0.5 / 6**0.5, rel=0.15)


def test_other_initial_weights_and_decays():
    fields = {"output_range": 0.01, "mlp_range": 0.02, "small_recurrence": True}
    decays = (0.2, 0.3)
    model = model_of("trial", recurrent_layers=[0, 1], rglru_decay_range=decays, **fields)
    for layer in model.model.layers:
        assert spread(layer.mixer.o_proj.weight) == pytest.approx(0.01, rel=0.15)
        for linear in layer.mlp.children():
            assert spread(linear.weight) == pytest.approx(0.02, rel=0.15)
    block = model.model.layers[1].mixer
    assert spread(block.short_conv.weight) == pytest.approx(0.1 / TAPS**0.5, rel=0.25)
    assert spread(block.rglru.input_gate.weight) == pytest.approx(0.1 / 8**0.5, rel=0.25)
    decay = torch.exp(-8 * torch.nn.functional.softplus(block.rglru.theta))
    assert 0.199 < decay.min() and decay.max() < 0.301


@pytest.mark.parametrize("layers", [[3], [-1], [0, 0]], ids=str)
def test_layers_that_are_not_there_are_named(layers):
    with pytest.raises(LatteError, match="recurrent_layers"):
        model_of("trial", recurrent_layers=layers)


def test_recurrent_blocks_have_no_half_lives():
    with pytest.raises(LatteError, match=r"half_lives_by_layer: .* got \[1\]"):
        model_of("trial", recurrent_layers=[1], half_lives_by_layer=True)
