"""Small models of every preset, at a weight scale where a broken cache is seen."""

import functools

import pytest
import torch

from latte.models import (
    LatteForCausalLM,
    LatteForSequenceClassification,
    LatteModel,
    preset_config,
)

CLASSES = {
    "lm": LatteForCausalLM,
    "model": LatteModel,
    "classifier": LatteForSequenceClassification,
}


def tiny_config(preset, **overrides):
    values = {
        "vocab_size": 40,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "initializer_range": 0.4,  # at 0.02 broken reordering and cropping go unseen
        "tie_word_embeddings": False,  # tied, these models would repeat their last token
    }
    if preset.startswith("latte") or preset == "linear++":
        values["num_latents"] = 12
    if "swa" in preset:
        values["sliding_window"] = 4
    return preset_config(preset, "tiny", **(values | overrides))


@functools.cache
def _shared(preset, kind, dtype, overrides):
    torch.manual_seed(0)
    model = CLASSES[kind](tiny_config(preset, **dict(overrides))).to(dtype).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("decay_proj.weight"):  # 0 at the start: nothing of a gate would be seen
            torch.nn.init.normal_(parameter, std=0.4)
    return model


@pytest.fixture(scope="session")
def config():
    return tiny_config


@pytest.fixture(scope="session")
def build():
    """A model in eval mode, shared between tests: do not train it."""

    def make(preset, kind="lm", dtype=torch.float64, **overrides):
        return _shared(preset, kind, dtype, tuple(sorted(overrides.items())))

    return make


@pytest.fixture(scope="session")
def tokens():
    def make(batch, length, seed=0):
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, 40, (batch, length), generator=generator)

    return make


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    """No progress bars of Transformers between the tests' dots."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
