"""Gated Latte-Macchiato: what its output is, and the blocks and presets that are made of it."""

import pytest
import torch
from torch.nn import functional as F

from latte.errors import LatteError
from latte.layers import GatedMacchiato, LatteMacchiato
from latte.models import LatteConfig, count_parameters, preset_config
from latte.models.modeling import language_model

TOLERANCE = {"atol": 1e-10, "rtol": 1e-10}
H, G, K, D, E, TAPS = 4, 2, 4, 6, 16, 3


@pytest.fixture
def layer():
    torch.manual_seed(0)
    options = {"num_key_value_heads": G, "window": 4, "latent_input": "conv", "forgetting": "gated"}
    layer = GatedMacchiato(E, H, 12, value_dim=D, short_conv_size=TAPS, **options).double()
    for parameter in (layer.skip, layer.output_norm.weight, layer.short_conv.bias):
        torch.nn.init.normal_(parameter)
    return layer


@pytest.fixture
def x():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 30, E, dtype=torch.float64, generator=generator)


def convolved(layer, x):
    """q, k and v of the equation, (B, T, heads, width) each."""
    flat = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], -1)
    weight, bias = layer.short_conv.weight, layer.short_conv.bias
    padded = F.pad(flat.mT, (TAPS - 1, 0))
    flat = F.silu(F.conv1d(padded, weight[:, None], bias, groups=len(weight)).mT)
    q, k, v = flat.split([H * K, G * K, G * D], -1)
    return q.unflatten(-1, (H, K)), k.unflatten(-1, (G, K)), v.unflatten(-1, (G, D))


@torch.no_grad()
def test_the_output_is_that_of_its_equation(layer, x):
    v = convolved(layer, x)[2].repeat_interleave(H // G, 2)
    mixture = torch.einsum("bhts,bshd->bthd", layer.attention_weights(x), v) + layer.skip * v
    normed = mixture * (mixture.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    gate = F.silu(layer.gate_proj(x)).unflatten(-1, (H, D))
    expected = layer.o_proj((normed * layer.output_norm.weight * gate).flatten(-2))
    torch.testing.assert_close(layer(x)[0], expected, **TOLERANCE)


@torch.no_grad()
def test_the_weights_are_those_of_macchiato_for_convolved_queries_and_keys(layer, x):
    plain = LatteMacchiato(
        E, H, 12, num_key_value_heads=G, window=4, latent_input="conv", forgetting="gated"
    ).double()
    plain.latents.load_state_dict(layer.latents.state_dict())
    q, k, _ = convolved(layer, x)
    plain.q_proj.forward = lambda _: q.flatten(-2)
    plain.k_proj.forward = lambda _: k.flatten(-2)
    weights = layer.attention_weights(x)
    torch.testing.assert_close(weights, plain.attention_weights(x), **TOLERANCE)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, H, 30).double(), **TOLERANCE)


def test_no_output_depends_on_a_later_token_and_every_parameter_learns(layer, x):
    changed = x.clone()
    changed[:, 20:] += 1
    out, other = layer(x)[0], layer(changed)[0]
    torch.testing.assert_close(other[:, :20], out[:, :20], atol=0, rtol=0)
    assert not torch.allclose(other[:, 20:], out[:, 20:])
    out.square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_blocks_without_mlps_are_mixers_alone():
    model = language_model(preset_config("latte-gated", "tiny"))
    for layer in model.model.layers:
        parts = {name.split(".")[0] for name, _ in layer.named_parameters()}
        assert parts == {"mixer_norm", "mixer"}


@pytest.mark.parametrize("size", ["tiny", "small", "paper"])
def test_the_preset_has_about_as_many_parameters_as_the_transformer(size):
    found, target = (
        count_parameters(preset_config(preset, size)) for preset in ("latte-gated", "transformer++")
    )
    assert found == pytest.approx(target, rel=0.15)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"value_dim": 8}, "value_dim must be None for mixer='macchiato', got 8"),
        ({"mixer": "gated", "value_dim": 0}, "value_dim must be at least 1, got 0"),
        ({"mixer": "gated", "short_conv_size": 0}, "short_conv_size must be at least 1, got 0"),
        ({"mixer": "gated", "sliding_window": None}, "sliding_window must be given"),
    ],
)
def test_mistakes_are_one_line(fields, message):
    with pytest.raises(LatteError, match=message):
        LatteConfig(num_latents=64, **{"sliding_window": 16, **fields})


@pytest.mark.parametrize(
    "fields", [{"num_attention_heads": 0}, {"hidden_size": "wide"}, {"mixer": "swa"}]
)
def test_mistakes_in_the_preset_are_one_line_too(fields):
    with pytest.raises(LatteError) as raised:
        preset_config("latte-gated", "tiny", **fields)
    assert "\n" not in str(raised.value)
