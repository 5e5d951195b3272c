"""The parts of Griffin as mixers: what each layer is, and that none sees what comes after."""

import pytest
import torch

from latte.models import registry

PLUGIN = "replication.griffin_parts"
pytestmark = pytest.mark.usefixtures("plugin")

KINDS = {
    "hawk++": ["RecurrentBlock"] * 4,
    "griffin-made++": ["RecurrentBlock"] * 2 + ["SlidingWindowAttention", "RecurrentBlock"],
    "values-f++": ["MixtureOfConvolvedValues"] * 4,
    "gated-f++": ["GatedMixture"] * 4,
    "griffin-mlp-f++": ["BesideGriffinMLP"] * 4,
}


@pytest.mark.parametrize("name", KINDS)
def test_layers_are_of_their_kinds_and_look_back(name, looks_back):
    for _ in range(2):  # a second model begins with the first kind again
        config = registry.find_model(name).config("tiny", vocab_size=64, sliding_window=4)
        model = registry.language_model(config)
        kinds = [type(layer.mixer) for layer in model.model.layers]
        assert [kind.__name__ for kind in kinds] == KINDS[name]
    looks_back(model)


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
