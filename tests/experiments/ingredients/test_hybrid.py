"""Griffin's recurrent block: Transformers' block, and models of both kinds."""

import pytest
import torch
from transformers import RecurrentGemmaConfig
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import (
    RecurrentGemmaRecurrentBlock,
)

from experiments.ingredients.hybrid import TAPS, RecurrentBlock
from latte.errors import LatteError
from tests.experiments.ingredients.mixers import inputs, model_of, recurrent


def test_it_is_transformers_block_without_biases():
    config = RecurrentGemmaConfig(hidden_size=16, num_attention_heads=4, lru_width=16)
    torch.manual_seed(0)
    other = RecurrentGemmaRecurrentBlock(config, 0).double()
    ours = recurrent()
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


def test_it_reads_the_past_alone():
    with pytest.raises(ValueError, match="RecurrentBlock: expected causal=True"):
        RecurrentBlock(16, 4, causal=False)


def spread(weight):
    return weight.std().item()


def test_initial_weights_are_those_of_every_other_layer():
    """The outputs of all mixers begin smaller than other matrices, by the depth."""
    model = model_of("trial", recurrent_layers=[1])
    kinds = [type(layer.mixer).__name__ for layer in model.model.layers]
    assert kinds == ["TrialMixer", "RecurrentBlock", "TrialMixer"]
    for layer in model.model.layers:
        assert spread(layer.mixer.v_proj.weight) == pytest.approx(0.5, rel=0.15)
        assert spread(layer.mixer.o_proj.weight) == pytest.approx(0.5 / 6**0.5, rel=0.15)


@pytest.mark.parametrize("layers", [[3], [-1], [0, 0]], ids=str)
def test_layers_that_are_not_there_are_named(layers):
    with pytest.raises(LatteError, match="recurrent_layers"):
        model_of("trial", recurrent_layers=layers)


def test_recurrent_blocks_have_no_half_lives():
    with pytest.raises(LatteError, match=r"half_lives_by_layer: .* got \[1\]"):
        model_of("trial", recurrent_layers=[1], half_lives_by_layer=True)
