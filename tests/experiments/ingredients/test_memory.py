"""Kept tokens and content keys of a trial are what they say."""

from itertools import pairwise

import pytest
import torch

from experiments.ingredients.memory import KEPT_BY, content_logits
from experiments.ingredients.mixer import log_mass
from latte.layers import Context, LatteMacchiato
from latte.layers.mixer import EMPTY
from tests.experiments.ingredients.mixers import BASE, TOLERANCE, inputs, trial

KEPT = {"delay_latents": True, "joint_softmax": True, "kept_tokens": 3, "kept_block": 4}
OPTIONS = [{"kept_by": by, **KEPT} for by in KEPT_BY[1:]] + [{"content_width": 5}]


@pytest.mark.parametrize("options", OPTIONS)
def test_it_is_causal_and_its_weights_are_probabilities_of_the_values(options):
    layer, x = trial(**options), inputs()
    changed = x.clone()
    changed[:, 25:] += 1

    def seeded(run, x):
        torch.manual_seed(1)  # for random scores
        return run(x)

    out, other = (seeded(layer, y)[0] for y in (x, changed))
    torch.testing.assert_close(other[:, :25], out[:, :25], atol=0, rtol=0)
    assert not torch.allclose(other[:, 25:], out[:, 25:])
    weights = seeded(layer.attention_weights, x)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 40).double(), **TOLERANCE)
    v = layer.v_proj(x).unflatten(-1, (2, 8))
    mixed = torch.einsum("bhts,bshd->bthd", weights, v)
    torch.testing.assert_close(layer.o_proj(mixed.flatten(-2)), out, **TOLERANCE)
    out.square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name


def test_the_latest_tokens_are_those_of_the_library_with_equal_scores():
    layer, plain = trial(kept_by="latest", **KEPT), LatteMacchiato(16, 2, 8, **BASE, **KEPT)
    plain.double().load_state_dict(layer.state_dict(), strict=False)
    learnt = trial(kept_by="map", **KEPT)
    learnt.load_state_dict(layer.state_dict(), strict=False)
    torch.nn.init.zeros_(learnt.score_proj.weight)
    for other in (plain, learnt):
        torch.testing.assert_close(other(inputs())[0], layer(inputs())[0], **TOLERANCE)


def test_surprise_is_the_error_of_the_latents_answer():
    found = trial(kept_by="surprise", **KEPT)._project(inputs(), EMPTY, Context())
    k, v, total = found.latent_k, found.v, found.log_decay.cumsum(1)
    assert found.scores.shape == (2, 40, 2)
    torch.testing.assert_close(found.scores[:, 0], v[:, 0].norm(dim=-1).float())
    for t in range(1, 40):
        shares = (k[:, :t] - total[:, :t]).softmax(1)
        means = torch.einsum("bshl,bshd->bhld", shares, v[:, :t])
        answer = torch.einsum("bhl,bhld->bhd", k[:, t].softmax(-1), means)
        torch.testing.assert_close(found.scores[:, t], (v[:, t] - answer).norm(dim=-1).float())
    written = trial(kept_by="write", **KEPT)._project(inputs(), EMPTY, Context()).scores
    size = found.scores * k.exp().sum(-1)
    torch.testing.assert_close(written.exp(), size.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [1, 5, 70])
def test_content_logits_are_products_with_the_mean_keys(length):
    q, k = torch.randn(2, 2, length, 2, 5, dtype=torch.float64)
    latent_k = 30 * torch.randn(2, length, 2, 4, dtype=torch.float64)
    decay = -3 * torch.rand(2, length, 2, 4, dtype=torch.float64)
    total = decay.cumsum(1)
    pairs = latent_k[:, None] + total[:, :, None] - total[:, None]
    later = torch.ones(length, length, dtype=torch.bool).triu(1)[None, ..., None, None]
    shares = pairs.masked_fill(later, -torch.inf).softmax(2)
    expected = torch.einsum("bthw,bshw,btshl->bthl", q, k, shares)
    mass = log_mass(latent_k, decay, None, Context())
    torch.testing.assert_close(content_logits(q, k, latent_k, decay, mass), expected, **TOLERANCE)


def test_without_weights_content_keys_change_nothing():
    layer, plain = trial(content_width=5), trial()
    plain.load_state_dict(layer.state_dict(), strict=False)
    assert not torch.allclose(layer(inputs())[0], plain(inputs())[0])
    torch.nn.init.zeros_(layer.content_proj.weight)
    torch.testing.assert_close(layer(inputs())[0], plain(inputs())[0], **TOLERANCE)


@pytest.mark.parametrize("options", OPTIONS[-2:])
def test_packed_sequences_are_separate(options):
    layer, x, cuts = trial(**options), inputs(batch=1), [0, 13, 14, 40]
    apart = torch.cat([layer(x[:, a:b])[0] for a, b in pairwise(cuts)], 1)
    packed = layer(x, cu_seqlens=torch.tensor(cuts, dtype=torch.int32))[0]
    torch.testing.assert_close(packed, apart, **TOLERANCE)


@pytest.mark.parametrize("options", OPTIONS[-2:])
def test_masked_sequences_are_refused(options):
    with pytest.raises(ValueError, match="need whole sequences"):
        trial(**options)(inputs(), torch.ones(2, 40, dtype=torch.bool))
