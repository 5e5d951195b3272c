"""Variants of latents that forget: what differs from the library's layer, and no look ahead."""

import pytest
import torch

from latte.models import registry
from latte.train.trainer import decayed_names

PLUGIN = "replication.forgetting_parts"
pytestmark = pytest.mark.usefixtures("plugin")


def make(name):
    torch.manual_seed(0)
    config = registry.find_model(name).config("tiny", vocab_size=64, sliding_window=4)
    model = registry.language_model(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mixer.latents.decay_proj.weight.normal_()
    return model


@pytest.mark.parametrize("name", ["x-gated-f++", "x-gated-r-f++", "weight-decay-f++", "asking-f++"])
def test_no_look_ahead(name, looks_back):
    looks_back(make(name))


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
