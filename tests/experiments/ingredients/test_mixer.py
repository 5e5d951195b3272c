"""The trial's mixer: each part is what it says."""

import pytest
import torch
from torch.nn import functional as F

from experiments.ingredients.mixer import NOT_WRITTEN
from experiments.ingredients.model import layer_half_lives
from latte.layers import Context, LatteMacchiato
from latte.layers.mixer import EMPTY
from tests.experiments.ingredients.mixers import BASE, TOLERANCE, inputs, model_of, trial

# ---- what the parts are


def test_without_parts_it_is_macchiato():
    layer, x = trial(), inputs()
    plain = LatteMacchiato(16, 2, 8, **BASE).double()
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x)[0], plain(x)[0], **TOLERANCE)


def test_the_output_is_gated_normed_and_skips():
    layer, x = trial(output_gate=True, output_norm=True, value_skip=True), inputs()
    with torch.no_grad():
        layer.skip.normal_()
        layer.output_norm.weight.normal_()
        v = layer.v_proj(x).unflatten(-1, (2, 8))
        mixed = torch.einsum("bhts,bshd->bthd", layer.attention_weights(x), v) + layer.skip * v
        normed = mixed * (mixed.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        normed = normed * layer.output_norm.weight
        gate = F.silu(layer.gate_proj(x)).unflatten(-1, (2, 8))
        expected = layer.o_proj((normed * gate).flatten(-2))
        torch.testing.assert_close(layer(x)[0], expected, **TOLERANCE)


@pytest.mark.parametrize("parts", [{"short_conv": "v"}, {"short_conv": "qkv", "qk_norm": True}])
def test_the_short_convolution_and_the_norm_of_q_and_k(parts):
    """Three linear maps whose outputs are convolved are the mixer of those outputs."""
    layer, x = trial(**parts), inputs(1)
    plain = LatteMacchiato(16, 2, 8, **BASE).double()
    plain.latents.load_state_dict(layer.latents.state_dict())
    conv = layer.short_conv
    given = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], -1)
    kept, given = given.tensor_split([given.shape[-1] - conv.hidden_size], -1)
    padded = F.pad(given.transpose(1, 2), (3, 0))
    mixed = F.conv1d(padded, conv.weight[:, None], conv.bias, groups=conv.hidden_size)
    q, k, v = torch.cat([kept, F.silu(mixed.transpose(1, 2))], -1).chunk(3, -1)
    if layer.q_norm is not None:
        q, k = (F.rms_norm(y.unflatten(-1, (2, 8)), (8,), eps=1e-6).flatten(-2) for y in (q, k))
    for name, y in (("q_proj", q), ("k_proj", k), ("v_proj", v)):
        setattr(plain, name, torch.nn.Identity())
        getattr(plain, name).forward = lambda _, y=y: y
    plain.o_proj = layer.o_proj
    torch.testing.assert_close(layer(x)[0], plain(x)[0], **TOLERANCE)


def test_one_softmax_is_over_the_window_and_all_pairs_of_latent_and_token():
    layer, x = trial(one_softmax=True), inputs(1, 20)
    latent_q, latent_k, decay, _ = layer.latents(x, EMPTY, Context())
    q, k = layer.mixing_logits(x)[2:]
    total = decay.cumsum(1)
    pairs = latent_q[:, :, None, :, 1:] + latent_k[:, None] + total[:, :, None] - total[:, None]
    local = latent_q[..., None, :, 0] + torch.einsum("bthk,bshk->btsh", q, k) / 8**0.5
    back = torch.arange(20)[:, None] - torch.arange(20)
    local = local.masked_fill(((back < 0) | (back >= 4))[None, ..., None], -torch.inf)
    pairs = pairs.masked_fill((back < 0)[None, ..., None, None], -torch.inf)
    every = torch.cat([local[..., None], pairs], -1).logsumexp(-1)  # (B, T, S, H)
    torch.testing.assert_close(
        layer.attention_weights(x), every.softmax(2).permute(0, 3, 1, 2), **TOLERANCE
    )


def test_a_token_writes_its_best_latents_alone():
    layer, x = trial(written_latents=1), inputs()
    kept = layer.mixing_logits(x).latent_k
    free = trial().mixing_logits(x).latent_k
    k = trial().latents.k_proj(trial().latents.input.conv(x)[0]).unflatten(-1, (2, 4))
    best = F.one_hot(k.argmax(-1), 4).bool()
    torch.testing.assert_close(kept[best], free[best], **TOLERANCE)
    torch.testing.assert_close(kept[~best] - NOT_WRITTEN, (free - k)[~best], atol=1e-8, rtol=0)
    weights = layer.attention_weights(x)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 40).double(), **TOLERANCE)


def test_noise_changes_the_choice_in_training_alone():
    layer, x = trial(written_latents=1, write_noise=5.0), inputs()
    quiet = trial(written_latents=1)(x)[0]
    torch.testing.assert_close(layer(x)[0], quiet, **TOLERANCE)
    assert not torch.allclose(layer.train()(x)[0], quiet)


def test_written_latents_are_those_of_a_head():
    with pytest.raises(ValueError, match="written_latents must be from 1 to 4, .*, got 5"):
        trial(written_latents=5)


def test_half_lives_rise_with_the_layer():
    model = model_of("trial", half_lives_by_layer=True, half_life_range=[4.0, 400.0])
    assert layer_half_lives(model.config, 0) == pytest.approx((4, 40))
    assert layer_half_lives(model.config, 2) == pytest.approx((40, 400))
    rates = [F.softplus(layer.mixer.latents.decay_bias) for layer in model.model.layers]
    half_lives = [torch.log(torch.tensor(2.0)) / rate for rate in rates]
    assert 4 < half_lives[0].min() < half_lives[0].max() < 40 < half_lives[2].min() < 400
