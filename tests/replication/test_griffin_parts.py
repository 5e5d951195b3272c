"""The parts of Griffin as mixers: what each layer is, and that none sees what comes after."""

import sys
from unittest import mock

import pytest
import torch

from latte.models import modeling, registry

KINDS = {
    "hawk++": ["RecurrentBlock"] * 4,
    "griffin-made++": ["RecurrentBlock"] * 2 + ["SlidingWindowAttention", "RecurrentBlock"],
    "values-f++": ["MixtureOfConvolvedValues"] * 4,
    "gated-f++": ["GatedMixture"] * 4,
    "griffin-mlp-f++": ["BesideGriffinMLP"] * 4,
}


@pytest.fixture(scope="module", autouse=True)
def plugin():
    """Registered for as long as this file's tests last."""
    presets = mock.patch.dict(registry._mixers), mock.patch.dict(registry._presets)
    with presets[0], presets[1], mock.patch.object(modeling, "make_mlp", modeling.make_mlp):
        module = registry.load_plugin("replication.griffin_parts")
        yield
    del sys.modules[module.__name__]


@pytest.mark.parametrize("name", KINDS)
def test_layers_are_of_their_kinds_and_look_back(name):
    for _ in range(2):  # a second model begins with the first kind again
        config = registry.find_model(name).config("tiny", vocab_size=64, sliding_window=4)
        model = registry.language_model(config)
        kinds = [type(layer.mixer) for layer in model.model.layers]
        assert [kind.__name__ for kind in kinds] == KINDS[name]
    ids = torch.randint(64, (1, 40))
    with torch.no_grad():
        early, whole = model(ids[:, :30]).logits, model(ids).logits[:, :30]
    torch.testing.assert_close(early, whole)


def test_feed_forward_layers_are_griffins_where_asked():
    options = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 512}
    for name, kind in [("griffin-mlp-f++", "GriffinMLP"), ("gated-f++", "SwiGLU")]:
        model = registry.language_model(registry.find_model(name).config("tiny", **options))
        assert {type(layer.mlp).__name__ for layer in model.model.layers} == {kind}
        if kind == "GriffinMLP":
            drawn = [p.std() for n, p in model.named_parameters() if ".mlp." in n and p.ndim == 2]
            torch.testing.assert_close(
                torch.stack(drawn), torch.full((12,), 0.05), atol=1e-3, rtol=0
            )
