"""Variants of latents that forget: what differs from the library's layer, and no look ahead."""

import sys
from unittest import mock

import pytest
import torch

from latte.layers import LatteMacchiato
from latte.models import registry
from latte.train.trainer import decayed_names


@pytest.fixture(scope="module", autouse=True)
def plugin():
    """Registered for as long as these tests last."""
    with mock.patch.dict(registry._mixers), mock.patch.dict(registry._presets):
        module = registry.load_plugin("replication.forgetting_parts")
        yield
    del sys.modules[module.__name__]


def make(name):
    torch.manual_seed(0)
    config = registry.find_model(name).config("tiny", vocab_size=64, sliding_window=4)
    model = registry.language_model(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mixer.latents.decay_proj.weight.normal_()
    return model


NAMES = ["x-gated-f++", "x-gated-r-f++", "weight-decay-f++", "asking-f++", "prior-f++"]


@pytest.mark.parametrize("name", NAMES)
def test_no_look_ahead(name):
    model, ids = make(name), torch.randint(64, (1, 40))
    with torch.no_grad():
        early, whole = model(ids[:, :30]).logits, model(ids).logits[:, :30]
    torch.testing.assert_close(early, whole)


def test_what_each_changes():
    plain, ids = make("latte-conv-swa-f++"), torch.randint(64, (1, 40))
    logits = {}
    for name in ("x-gated-f++", "weight-decay-f++", "asking-f++"):
        model = make(name)
        model.load_state_dict(plain.state_dict())
        with torch.no_grad():
            logits[name] = model(ids).logits
        gates = [n for n in decayed_names(model) if "decay_proj" in n]
        assert len(gates) == (4 if name == "weight-decay-f++" else 0)
    with torch.no_grad():
        expected = plain(ids).logits
    assert torch.equal(logits.pop("weight-decay-f++"), expected)
    assert all((other - expected).abs().max() > 1e-3 for other in logits.values())


def test_asking_has_the_mean_of_the_keys_that_a_latent_has_seen():
    """By the softmax over the past of the key logits, less what is forgotten since."""
    mixer, x = make("asking-f++").double().model.layers[0].mixer, torch.randn(2, 9, 128).double()
    piece = mixer._piece(x)
    q, k, log_decay, _ = mixer.latents(piece)
    keys = mixer._heads(mixer.k_proj(x), mixer.num_key_value_heads)
    mean = mixer._mean_keys(k, keys, log_decay, piece)
    logits = (k - log_decay.cumsum(1))[:, None].expand(-1, 9, -1, -1, -1)
    future = torch.ones(9, 9, dtype=torch.bool).triu(1)[None, :, :, None, None]
    shares = logits.masked_fill(future, -torch.inf).softmax(2)
    torch.testing.assert_close(mean, torch.einsum("btshl,bshk->bthlk", shares, keys))


def test_a_prior_is_a_source_before_the_first_token():
    """By the softmax over the prior and the past; texts packed or padded for themselves."""
    mixer = make("prior-f++").double().model.layers[0].mixer
    with torch.no_grad():
        mixer.prior_logit.normal_()
        mixer.prior_value.normal_()
    x, cut = torch.randn(1, 12, 128).double(), 5
    packed = mixer(x, cu_seqlens=torch.tensor([0, cut, cut, 12], dtype=torch.int32))[0]
    torch.testing.assert_close(packed[:, cut:], mixer(x[:, cut:])[0])
    padded = mixer(x, key_mask=torch.arange(12)[None] >= cut)[0]
    torch.testing.assert_close(padded[:, cut:], mixer(x[:, cut:])[0], atol=1e-6, rtol=1e-5)
    piece = mixer._piece(x)
    projected = mixer._project(piece)
    latent_q, latent_k, _, _ = projected.logits
    window_alone = latent_q.clone()
    window_alone[..., 1:] = -1e4
    alone = projected._replace(logits=projected.logits._replace(latent_q=window_alone))
    local = LatteMacchiato._attend(mixer, alone, piece)[0]
    forgot = projected.log_decay.cumsum(1)
    logits = (latent_k - forgot)[:, None] + forgot[:, :, None]
    future = torch.ones(12, 12, dtype=torch.bool).triu(1)[None, :, :, None, None]
    prior = (mixer.prior_logit + forgot)[:, :, None]
    shares = torch.cat([prior, logits.masked_fill(future, -torch.inf)], 2).softmax(2)
    values = torch.einsum("btshl,bshd->bthld", shares[:, :, 1:], projected.v)
    values = values + shares[:, :, 0, :, :, None] * mixer.prior_value[:, None]
    states = torch.cat([local[..., None, :], values], -2)
    expected = torch.einsum("bthl,bthld->bthd", latent_q.softmax(-1), states)
    torch.testing.assert_close(mixer._attend(projected, piece)[0], expected, atol=1e-6, rtol=1e-5)
