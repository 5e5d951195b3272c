"""A tiny recipe over a few hundred words, and a folder where nothing else is."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# A command that is called in the tests' own process would change malloc for the tests after it.
os.environ["LATTE_KEEP_MEMORY"] = "0"

MODEL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "num_latents": 8,
    "sliding_window": 16,
}


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Training and held-out documents, short ones."""
    folder = tmp_path_factory.mktemp("words")
    generator = random.Random(0)
    choice = ["latent", "window", "state", "mean", "mass", "token", "sum", "of", "the", "a"]
    for kind, count in (("train", 150), ("held-out", 30)):
        with open(folder / f"{kind}.jsonl", "w", encoding="utf-8") as file:
            for _ in range(count):  # documents end within blocks, so blocks count different tokens
                text = " ".join(generator.choices(choice, k=generator.randint(5, 60)))
                file.write(json.dumps({"text": text}) + "\n")
    return {
        "corpus": str(folder / "train.jsonl"),
        "validation": str(folder / "held-out.jsonl"),
        "cache_dir": str(folder / "cache"),
    }


@pytest.fixture
def make_recipe(recipe_in: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """make_recipe(preset, name, **training) -> a checked recipe in tmp_path / name."""

    def make(preset: str = "latte-r-swa++", name: str = "run", **training: Any) -> Any:
        return recipe_in(tmp_path / name, preset, **training)

    return make


@pytest.fixture(scope="session")
def recipe_in(words: dict[str, str]) -> Callable[..., Any]:
    """recipe_in(folder, preset, **training) -> a checked recipe that writes there."""
    from latte.lab.train.recipe import recipe_from_dict

    def make(folder: Path, preset: str = "latte-r-swa++", **training: Any) -> Any:
        overrides = dict(MODEL)
        if preset in ("transformer++", "swa++"):
            del overrides["num_latents"]
        if preset == "transformer++":
            del overrides["sliding_window"]
        values = {
            "max_steps": 6,
            "batch_size": 2,
            "warmup_steps": 2,
            "log_steps": 1,
            "eval_steps": 3,
            "save_steps": 2,
        }
        return recipe_from_dict(
            {
                "model": {"preset": preset, "size": "tiny", "overrides": overrides},
                "data": {**words, "block_length": 32, "max_validation_tokens": 1000},
                "training": {**values, **training},
                "output_dir": str(folder),
            }
        )

    return make


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    """make_model(preset, **fields) -> an untrained model of bytes whose weights are large enough
    for its probabilities to differ.
    """
    import torch

    from latte.models import LatteForCausalLM, preset_config

    def make(preset: str, **fields: Any) -> Any:
        sizes = {**MODEL, "num_latents": 16, **fields}
        if not preset.startswith(("latte", "linear")):
            del sizes["num_latents"]
        if "swa" not in preset:
            del sizes["sliding_window"]
        torch.manual_seed(0)
        model = LatteForCausalLM(preset_config(preset, "tiny", **sizes)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("q_proj.weight", "k_proj.weight")):
                    parameter.mul_(30)
        return model

    return make
