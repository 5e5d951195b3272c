"""Writes ingredient_costs.csv: parameters and state of the models of two studies on language.

    PYTHONPATH=. python experiments/figures/ingredient_costs.py

These are the models of the ingredients' recipes and those of ``ablation/past.yaml``. The state is
what a model keeps of one sequence in fp32 after 300 tokens, more than any window here: the tensors
of its cache, and those that recurrent blocks of Griffin keep in their modules. That of
``transformer++`` grows with the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from experiments.ingredients.recipe import load, planned
from latte import LatteCache
from latte.lab.compare.compare import preset_recipe
from latte.lab.evaluate.tables import write_csv
from latte.lab.train.recipe import load_recipe
from latte.lab.train.run import model_config
from latte.models import LatteForCausalLM

FILE = Path(__file__).with_suffix(".csv")
RECIPES = ("shakespeare", "wikipedia", "hybrid", "books")
READ = 300  # tokens
COLUMNS = ("recipe", "model", "parameters", "state_bytes")


def main() -> None:
    recipes = {}
    for file in RECIPES:
        for run in planned(load(f"recipes/ingredients/{file}.yaml")):
            recipes[f"ingredients/{file}", run.preset] = run.recipe
    past = load_recipe("recipes/ablation/past.yaml")
    for preset in (*past.comparison.presets, "mamba2"):
        recipes["ablation/past", preset] = preset_recipe(past, preset)
    rows = []
    for key, recipe in recipes.items():
        model = AutoModelForCausalLM.from_config(model_config(recipe, {"vocab_size": 4096})).eval()
        count = sum(x.numel() for x in model.parameters())
        rows.append(dict(zip(COLUMNS, (*key, count, state_bytes(model)), strict=True)))
    write_csv(FILE, COLUMNS, rows)


@torch.no_grad()
def state_bytes(model: Any) -> int | None:
    """Bytes of the state of one sequence; None if Transformers cannot make one."""
    tokens = torch.zeros(1, READ, dtype=torch.long)
    if isinstance(model, LatteForCausalLM):
        cache = LatteCache(model.config)
        model(tokens, past_key_values=cache)
        return cache.nbytes
    given = DynamicCache(config=model.config)
    try:
        out = model(tokens, past_key_values=given, use_cache=True)
    except ValueError:  # Griffin without attention has no count of tokens
        return None
    cache = out.get("cache_params", given)
    names = ("recurrent_states", "conv1d_state")
    own = [getattr(module, name, None) for module in model.modules() for name in names]
    tensors = {x.data_ptr(): x for x in (*held(cache), *held(own))}
    return sum(x.numel() * x.element_size() for x in tensors.values())


def held(value: Any) -> Iterator[Tensor]:
    """The tensors of an object and of what it holds."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from held(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from held(each)
    elif hasattr(value, "__dict__"):
        yield from held(vars(value))


if __name__ == "__main__":
    main()
