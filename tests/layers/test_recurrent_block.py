"""Griffin's recurrent block: Transformers' block, and models of which some layers are one."""

import pytest
import torch
from transformers import RecurrentGemmaConfig
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import (
    RecurrentGemmaRecurrentBlock,
)

from latte.errors import LatteError
from latte.layers import LatteMacchiato, RecurrentBlock
from latte.models import LatteConfig, preset_config
from latte.models.modeling import language_model
from latte.models.parameters import count_parameters, number_of_parameters


def test_it_is_transformers_block_without_biases():
    config = RecurrentGemmaConfig(hidden_size=16, num_attention_heads=4, lru_width=16)
    torch.manual_seed(0)
    other = RecurrentGemmaRecurrentBlock(config, 0).double()
    ours = RecurrentBlock(16, 4).double()
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
    assert other.conv1d_width == LatteConfig.short_conv_size
    x = torch.randn(2, 40, 16, dtype=torch.float64)
    wanted, _ = other(x, torch.arange(x.shape[1])[None], None, use_cache=False)
    # Its state is fp32.
    torch.testing.assert_close(ours(x)[0], wanted, atol=1e-4, rtol=1e-5)


def test_it_reads_the_past_alone():
    with pytest.raises(ValueError, match="RecurrentBlock: expected causal=True"):
        RecurrentBlock(16, 4, causal=False)


def hybrid(**fields):
    config = preset_config("latte-hybrid", "tiny", initializer_range=0.5, **fields)
    torch.manual_seed(0)
    return language_model(config).eval()


def test_its_blocks_repeat_over_the_layers():
    kinds = [type(layer.mixer) for layer in hybrid(num_hidden_layers=5).model.layers]
    r = RecurrentBlock
    assert kinds == [r, r, LatteMacchiato, r, r]


def test_initial_weights_are_those_of_every_other_layer():
    """The outputs of all mixers begin smaller than other matrices, by the depth."""
    for layer in hybrid(num_hidden_layers=3).model.layers:
        assert layer.mixer.v_proj.weight.std().item() == pytest.approx(0.5, rel=0.05)
        assert layer.mixer.o_proj.weight.std().item() == pytest.approx(0.5 / 6**0.5, rel=0.05)


@pytest.mark.parametrize("layers", [257, 258, 260])
def test_parameters_of_many_layers_are_counted_by_periods(layers):
    config = preset_config("latte-hybrid", "tiny", hidden_size=8, num_hidden_layers=layers)
    assert number_of_parameters(config) == count_parameters(config)


def test_layers_without_attention_have_no_weights():
    model = hybrid(num_hidden_layers=3)
    found = model(torch.arange(9)[None], output_attentions=True).attentions
    assert [x is None for x in found] == [True, True, False]
    assert found[2].shape == (1, 4, 9, 9)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"block_types": ["recurrent", "window"]}, r"block_types must be names among .*'window'"),
        ({"block_types": []}, "block_types must be names among"),
        ({"is_causal": False, "forgetting": "none"}, "recurrent blocks need is_causal=True"),
        ({"num_attention_heads": 3, "head_dim": 8, "num_latents": 12}, "multiple of num_attention"),
    ],
    ids=["unknown", "none", "bidirectional", "heads"],
)
def test_what_does_not_fit_is_said(fields, said):
    with pytest.raises(LatteError, match=said):
        preset_config("latte-hybrid", "tiny", **fields)
