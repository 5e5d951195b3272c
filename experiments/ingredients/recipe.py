"""Recipes of the ingredients: models at equal parameters, and which of them are trained how.

A recipe has the sections `data` and `training` of `latte train`, `models`, fields that they share,
the number of `parameters` and a `plan`; `base: other.yaml` starts from another recipe.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from experiments.grids import check_different, check_models, check_numbers, model_config
from latte.errors import LatteError
from latte.lab.compare.compare import PresetRun
from latte.lab.data.preparing import DataSection
from latte.lab.train.recipe import (
    ComparisonSection,
    ModelSection,
    Recipe,
    TrainingSection,
    check,
    read_overridden,
)
from latte.lab.train.run_folder import RUN_FILE
from latte.lab.train.typed import build

PLUGIN = "experiments.ingredients.model"


@dataclass
class Stage:
    """Runs that belong together: every model at every rate by every seed."""

    models: list[str]
    rates: list[float]  # peak learning rates
    seeds: list[int] = field(default_factory=lambda: [0])


@dataclass
class IngredientsRecipe:
    """Models, what they are trained on, and the order of the runs."""

    # name -> {preset: ..., fit: ..., any field of the model's config: ...}
    models: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)  # fields for all models
    parameters: int | None = None  # number that every model with a `fit` has
    tolerance: float = 0.005  # greatest relative difference from it
    plan: list[Stage] = field(default_factory=list)
    baseline: str | None = None  # model that the report compares with
    data: DataSection = field(default_factory=DataSection)
    # The rates and seeds of the plan replace its own. The lowest rate stays in proportion.
    training: TrainingSection = field(default_factory=TrainingSection)
    lengths: list[int] = field(default_factory=list)  # of the evaluation; none: the block's
    max_tokens: int | None = None  # number of held-out tokens scored at the end; None: all
    output_dir: str = "runs/ingredients"

    @cached_property
    def overrides(self) -> dict[str, dict[str, Any]]:
        """The fields of each model's config, with the fitted one. Raises LatteError."""
        from latte.models.registry import load_plugin

        load_plugin(PLUGIN)
        return {name: self._fields(name) for name in self.models}

    def _fields(self, name: str) -> dict[str, Any]:
        values = {**self.shared, **self.models[name]}
        preset, fit = values.pop("preset"), values.pop("fit", None)
        if fit is not None and self.parameters is not None:
            values[fit] = fitted(name, preset, values, fit, self.parameters, self.tolerance)
        model_config(name, preset, values, causal=True)
        return values


@dataclass(frozen=True)
class IngredientsRun(PresetRun):
    """One model at one rate by one seed; `preset` is its name in the recipe."""

    rate: float = 0.0

    @property
    def label(self) -> str:
        return f"{self.preset}, rate {self.rate:g}, seed {self.seed}"


def load(path: str | Path, overrides: Sequence[str] = ()) -> IngredientsRecipe:
    """Read a YAML recipe, apply dotted overrides, check everything but the models' sizes.

    Raises:
        LatteError: missing file, bad YAML, unknown key, wrong type or impossible value.
    """
    tree = read_overridden(path, overrides)
    recipe = build(IngredientsRecipe, tree)
    check_numbers({"parameters": recipe.parameters, "tolerance": recipe.tolerance})
    check_models(recipe.models, None)
    if not recipe.plan:
        raise LatteError("plan: expected at least one stage, got none")
    for place, stage in enumerate(recipe.plan):
        for key in ("rates", "seeds"):
            check_different(f"plan[{place}].{key}", getattr(stage, key))
        for name in stage.models:
            _check_name(f"plan[{place}].models", name, recipe)
    if recipe.baseline is not None:
        _check_name("baseline", recipe.baseline, recipe)
    return recipe


def _check_name(key: str, name: str, recipe: IngredientsRecipe) -> None:
    if name not in recipe.models:
        raise LatteError(
            f"{key}: no model is called {name!r}; expected one of {', '.join(recipe.models)}"
        )


def planned(recipe: IngredientsRecipe) -> list[IngredientsRun]:
    """The runs of the plan in its order, each once. Raises LatteError for impossible ones."""
    runs = {}
    for stage in recipe.plan:
        for seed in stage.seeds:
            for name in stage.models:
                for rate in stage.rates:
                    runs[name, rate, seed] = make_run(recipe, name, rate, seed)
    return list(runs.values())


def make_run(recipe: IngredientsRecipe, name: str, rate: float, seed: int) -> IngredientsRun:
    """A run, whether the plan has it or not."""
    section = recipe.training
    floor = section.min_learning_rate / section.learning_rate * rate
    own = Recipe(
        model=ModelSection(preset=recipe.models[name]["preset"], overrides=recipe.overrides[name]),
        data=recipe.data,
        training=replace(section, learning_rate=rate, min_learning_rate=floor, seed=seed),
        comparison=ComparisonSection(lengths=recipe.lengths or None, max_tokens=recipe.max_tokens),
        output_dir=str(Path(recipe.output_dir, name, f"rate-{rate:g}-seed-{seed}")),
        plugins=[PLUGIN],
    )
    return IngredientsRun(name, seed, check(own), rate=rate)


def kept(recipe: IngredientsRecipe) -> list[IngredientsRun]:
    """All runs that have a folder, also those that the plan does not have."""
    runs = []
    for name in recipe.models:
        for file in sorted(Path(recipe.output_dir, name).glob(f"*/{RUN_FILE}")):
            with suppress(OSError, ValueError, KeyError, TypeError):
                training = json.loads(file.read_text(encoding="utf-8"))["recipe"]["training"]
                runs.append(make_run(recipe, name, training["learning_rate"], training["seed"]))
    return runs


# ---- equal parameters


def fitted(
    name: str, preset: str, values: dict[str, Any], fit: str, target: int, tolerance: float
) -> int:
    """The value of the field `fit` at which a model has about `target` parameters.

    Raises:
        LatteError: The nearest value differs from the target by more than `tolerance`.
    """
    from latte.models.parameters import count_parameters, nearest_size

    # Each head has as many latents as the others.
    per_head = fit == "num_latents"
    step = model_config(name, preset, values).num_attention_heads if per_head else 1

    def count(value: int) -> int:
        return count_parameters(model_config(name, preset, values | {fit: value}))

    value = nearest_size(count, target, step)
    found = count(value)
    if abs(found - target) > tolerance * target:
        raise LatteError(
            f"models.{name}: no {fit} gives {target:,} parameters within {tolerance:.1%}, the"
            f" nearest is {value} with {found:,}; expected other sizes or another fit"
        )
    return value
