"""The mixers of the plugin, small and in fp64, with parts that matter, and their models."""

from pathlib import Path

import torch

from experiments.ingredients.gsa import GatedSlotAttention
from experiments.ingredients.mixer import TrialMixer
from experiments.ingredients.raven import Raven
from latte.layers import RecurrentBlock
from latte.models.modeling import language_model
from latte.models.registry import find_model, load_plugin

load_plugin("experiments.ingredients.model")
example = load_plugin(Path(__file__).parents[3] / "examples" / "exponential_average.py")
TOLERANCE = {"atol": 1e-10, "rtol": 1e-10}
NARROW = {"value_dim": 3, "head_dim": 6, "num_key_value_heads": 2}
ALL = {
    "value_dim": 6, "output_gate": True, "value_skip": True, "short_conv": "qkv",
    "written_latents": 2, "write_noise": 1.0, "qk_norm": True, "output_norm": True,
    "one_softmax": True,
}  # fmt: skip
ALONE = [{name: value} for name, value in ALL.items() if name != "write_noise"]
PARTS = [{}, *ALONE, {"short_conv": "v"}, ALL]
BASE = {"latent_input": "conv", "forgetting": "gated", "window": 4}


def inputs(batch=2, length=40):
    """Random inputs of a mixer, (batch, length, 16), fp64."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, length, 16, dtype=torch.float64, generator=generator)


def model_of(preset, **fields):
    """A small model of three layers, with other values of its config's fields."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3, "num_latents": 8}
    config = find_model(preset).config("tiny", **sizes, initializer_range=0.5, **fields)
    torch.manual_seed(0)
    return language_model(config).eval()


def gsa(**options):
    torch.manual_seed(0)
    layer = GatedSlotAttention(16, 4, 12, **options).double()
    with torch.no_grad():
        layer.decay_proj.weight.mul_(20)  # so that slots differ in what they forget
        layer.output_norm.weight.normal_()
    return layer


def raven(**options):
    """In evaluation, since training adds noise to the choice of slots."""
    torch.manual_seed(0)
    layer = Raven(16, 4, 12, **options).double().eval()
    with torch.no_grad():
        for norm in (layer.q_norm, layer.k_norm, layer.output_norm):
            norm.weight.normal_()
    return layer


def recurrent():
    torch.manual_seed(0)
    return RecurrentBlock(16, 4).double().eval()


def trial(**parts):
    torch.manual_seed(0)
    return TrialMixer(16, 2, 8, **{"value_dim": 8, **BASE, **parts}).double().eval()


def average():
    """The mixer of the documents' example."""
    torch.manual_seed(0)
    return example.ExponentialAverage(16, 4, num_averages=3, num_key_value_heads=2).double()
