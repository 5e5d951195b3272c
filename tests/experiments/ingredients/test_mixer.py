"""The trial's mixer: each part is what it says, and none breaks a mixer's laws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from experiments.ingredients.mixer import NOT_WRITTEN, TrialMixer
from experiments.ingredients.model import layer_half_lives
from latte.layers import LatteMacchiato, Piece
from tests.experiments.ingredients.laws import (
    TOLERANCE,
    check_causal_and_learning,
    check_packed,
    check_pieces_and_padding,
    check_saved,
    check_steps,
    check_taken_back,
    inputs,
    model_of,
)

ALL: dict[str, Any] = {
    "value_dim": 6,
    "output_gate": True,
    "value_skip": True,
    "short_conv": "qkv",
    "written_latents": 2,
    "write_noise": 1.0,
    "qk_norm": True,
    "output_norm": True,
    "one_softmax": True,
}
ALONE: list[dict[str, Any]] = [
    *({name: value} for name, value in ALL.items() if name != "write_noise"),
    {"short_conv": "v"},
]
PARTS = [{}, *ALONE, ALL]
BASE: dict[str, Any] = {"latent_input": "conv", "forgetting": "gated", "window": 4}


def named(parts):
    return "+".join(parts) or "none"


def make(parts):
    torch.manual_seed(0)
    return TrialMixer(16, 2, 8, **{"value_dim": 8, **BASE, **parts}).double().eval()


# ---- what the parts are


def test_without_parts_it_is_macchiato():
    trial, x = make({}), inputs()
    plain = LatteMacchiato(16, 2, 8, **BASE).double()
    plain.load_state_dict(trial.state_dict())
    torch.testing.assert_close(trial(x)[0], plain(x)[0], **TOLERANCE)


def test_the_output_is_gated_normed_and_skips():
    layer, x = make({"output_gate": True, "output_norm": True, "value_skip": True}), inputs()
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
    layer, x = make(parts), inputs(1)
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
    plain._piece = lambda x, *given: TrialMixer._piece(layer, x, *given)  # v_proj has no weight
    torch.testing.assert_close(layer(x)[0], plain(x)[0], **TOLERANCE)


def test_one_softmax_is_over_the_window_and_all_pairs_of_latent_and_token():
    layer, x = make({"one_softmax": True}), inputs(1, 20)
    latent_q, latent_k, decay, _ = layer.latents(Piece(x))
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
    layer, x = make({"written_latents": 1}), inputs()
    kept = layer.mixing_logits(x).latent_k
    free = make({}).mixing_logits(x).latent_k
    k = make({}).latents.k_proj(make({}).latents.input.conv(x)[0]).unflatten(-1, (2, 4))
    best = F.one_hot(k.argmax(-1), 4).bool()
    torch.testing.assert_close(kept[best], free[best], **TOLERANCE)
    torch.testing.assert_close(kept[~best] - NOT_WRITTEN, (free - k)[~best], atol=1e-8, rtol=0)
    weights = layer.attention_weights(x)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 40).double(), **TOLERANCE)


def test_noise_changes_the_choice_in_training_alone():
    layer, x = make({"written_latents": 1, "write_noise": 5.0}), inputs()
    quiet = make({"written_latents": 1})(x)[0]
    torch.testing.assert_close(layer(x)[0], quiet, **TOLERANCE)
    assert not torch.allclose(layer.train()(x)[0], quiet)


def test_written_latents_are_those_of_a_head():
    with pytest.raises(ValueError, match="written_latents must be from 1 to 4, .*, got 5"):
        make({"written_latents": 5})


# ---- a mixer's laws


@pytest.mark.parametrize("parts", PARTS, ids=named)
def test_it_is_causal_and_every_parameter_learns(parts):
    check_causal_and_learning(make(parts))


@pytest.mark.parametrize("parts", PARTS, ids=named)
def test_pieces_make_the_whole_and_padding_does_not_count(parts):
    check_pieces_and_padding(make(parts), "short_conv")


@pytest.mark.parametrize("parts", PARTS, ids=named)
def test_packed_sequences_do_not_see_each_other(parts):
    check_packed(make(parts))


@pytest.mark.parametrize("parts", PARTS, ids=named)
def test_tokens_can_be_taken_back(parts):
    check_taken_back(make(parts))


# ---- models


@pytest.mark.parametrize("mlp", ["swiglu", "none"])
def test_token_by_token_is_the_whole(mlp):
    check_steps(model_of("trial", **ALL, mlp=mlp, half_lives_by_layer=True))


def test_half_lives_rise_with_the_layer():
    model = model_of("trial", half_lives_by_layer=True, half_life_range=[4.0, 400.0])
    assert layer_half_lives(model.config, 0) == pytest.approx((4, 40))
    assert layer_half_lives(model.config, 2) == pytest.approx((40, 400))
    rates = [F.softplus(layer.mixer.latents.decay_bias) for layer in model.model.layers]
    half_lives = [torch.log(torch.tensor(2.0)) / rate for rate in rates]
    assert 4 < half_lives[0].min() < half_lives[0].max() < 40 < half_lives[2].min() < 400


def test_a_saved_model_is_loaded_again(tmp_path):
    check_saved(model_of("trial", **ALL, mlp="none", half_lives_by_layer=True), tmp_path)
