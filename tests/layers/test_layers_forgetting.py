"""Layers whose latents forget: half-lives, gates, what is refused, and no change without."""

import math

import pytest
import torch
from torch.nn import functional as F

from latte.layers import LatteAttention, LatteMacchiato
from latte.layers.latents import LatentLogits
from latte.layers.mixer import EMPTY, Context


def half_lives(layer):
    return math.log(2.0) / F.softplus(layer.latents.decay_bias).unflatten(0, (2, -1))


@pytest.mark.parametrize("forgetting", ["static", "gated"])
@pytest.mark.parametrize("kind", [LatteAttention, LatteMacchiato])
def test_half_lives_start_evenly_in_their_logarithms(kind, forgetting):
    layer = kind(16, 2, 16, forgetting=forgetting, half_life_range=(4.0, 4096.0))
    found = half_lives(layer).log2()
    gaps = found.diff(dim=-1)
    torch.testing.assert_close(gaps, torch.full_like(gaps, 10 / 8))
    torch.testing.assert_close(found[:, 0], torch.full((2,), 2 + 10 / 16))


def test_without_gates_all_tokens_forget_alike_and_gates_read_the_latent_input():
    x = torch.randn(1, 9, 16)
    layer = LatteMacchiato(16, 2, 8, latent_input="conv", forgetting="gated", window=4)
    projected = layer._begin(x)[0]
    assert torch.equal(projected.log_decay[:, 0], projected.log_decay[:, 5])  # weights start at 0
    torch.nn.init.normal_(layer.latents.decay_proj.weight)
    projected = layer._begin(x)[0]
    z, _ = layer.latents.input(x, EMPTY, Context())
    rate = layer.latents.decay_bias + layer.latents.decay_proj(z)
    torch.testing.assert_close(projected.log_decay, -F.softplus(rate).unflatten(-1, (2, 4)))
    out, _ = layer(x)
    out.square().sum().backward()
    assert layer.latents.decay_proj.weight.grad.abs().max() > 0
    assert layer.latents.decay_bias.grad.abs().min() > 0


def test_a_layer_that_forgets_at_once_sees_the_present_alone():
    layer = LatteAttention(16, 2, 8, forgetting="static")
    torch.nn.init.constant_(layer.latents.decay_bias, 200.0)
    x = torch.randn(1, 9, 16)
    present = layer.o_proj(layer.v_proj(x))
    torch.testing.assert_close(layer(x)[0], present, atol=1e-5, rtol=1e-5)


def test_rates_of_forgetting_are_fp32_under_autocast():
    layer = LatteAttention(16, 2, 8, forgetting="gated")
    x = torch.randn(1, 9, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer._begin(x)[0].log_decay.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forgetting": "some"}, "forgetting must be one of"),
        ({"forgetting": "gated", "causal": False}, "forgetting='gated' needs causal=True"),
        ({"half_life_range": (8.0, 4.0)}, "half_life_range must be two numbers with 0 < low"),
        ({"half_life_range": (0.0, 4.0)}, "half_life_range must be two numbers"),
    ],
)
def test_bad_options_are_one_line(options, message):
    with pytest.raises(ValueError, match=message):
        LatteAttention(16, 2, 8, **options)


def test_nothing_is_added_where_nothing_is_forgotten():
    plain = {name for name, _ in LatentLogits(16, 2, 8).named_parameters()}
    assert plain == {"q_proj.weight", "k_proj.weight"}
