"""MQAR recipes: which cells, models, sizes and learning rates, and the runs that they make.

A recipe is one YAML file with the sections `data`, `models`, `shared`, `training`, the sizes to
sweep and an `output_dir`; `base: other.yaml` starts from another recipe, and every key can be
overridden by its dotted name. A cell is a pair (length, key-value pairs). `plugins` are imported
first: they register models. This module imports no torch, so that a mistake shows at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

from experiments.grids import (
    check_different,
    check_models,
    check_numbers,
    check_optimiser,
    model_config,
)
from latte.errors import LatteError, check_seed
from latte.lab.train.recipe import import_plugins, located, read_overridden
from latte.lab.train.typed import build


@dataclass
class MQARData:
    """The task. Give `cells` (a run for each, trained and tested on it) or `mixture` and `tests`.

    A mixture is trained on in one run, whatever the tests, as in the Based paper.
    """

    cells: list[list[int]] | None = None  # [length, pairs] each
    mixture: list[list[int]] | None = None  # [length, pairs, examples] each
    tests: list[list[int]] | None = None  # [length, pairs] each, with a mixture
    train_examples: int = 100_000  # of a cell; an epoch reads each of them once
    test_examples: int = 10_000  # of each tested cell
    vocab_size: int = 8192
    power_a: float = 0.01
    random_non_queries: bool = False
    seed: int = 0  # of the examples; training and test examples have streams of their own


@dataclass
class MQARTraining:
    """AdamW and a cosine to zero over `max_epochs`, ended early by success or by the clock."""

    max_epochs: int = 64
    learning_rates: list[float] = field(default_factory=lambda: [1e-3])
    # The embeddings' learning rate over the others'. A token is rare in small batches, and Adam
    # then moves its row by several times the learning rate whenever it comes.
    embedding_rate: float = 1.0
    seeds: list[int] = field(default_factory=lambda: [0])  # of weights and order
    batch_size: int = 512  # examples of a step, at most
    batch_tokens: int = 65_536  # tokens of a step, at most
    warmup_steps: int = 0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    weight_decay: float = 0.1  # on matrices; not on norms, biases and gates
    max_grad_norm: float = 1.0  # 0: no clipping
    bf16: bool = False  # autocast
    stop_at: float = 0.99  # accuracy on every tested cell that ends a run
    evaluations_per_epoch: int = 1
    # Examples of each cell scored on the way; a pass there is confirmed on all. None: all.
    quick_examples: int | None = None
    max_minutes: float | None = None  # of training, for each run
    skip_solved: bool = False  # once a learning rate reaches `stop_at`, leave out the later ones


@dataclass
class MQARRecipe:
    """A grid of runs, complete."""

    data: MQARData = field(default_factory=MQARData)
    # name -> {preset: ..., any field of LatteConfig: ...}
    models: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)  # fields of LatteConfig, for all models
    select: list[str] | None = None  # names of the models to run; None: all
    widths: list[int] = field(default_factory=lambda: [128])
    latents: list[int] = field(default_factory=lambda: [128])  # for the models that have them
    mlp_ratio: float = 4.0  # intermediate_size over the width
    # initializer_range is this over sqrt(width); None: the config's own
    init_scale: float | None = None
    training: MQARTraining = field(default_factory=MQARTraining)
    output_dir: str = "runs/mqar"
    plugins: list[str] = field(default_factory=list)  # files or modules, imported first


@dataclass(frozen=True)
class Cell:
    """A length and a number of pairs; `examples` of it are made."""

    length: int
    pairs: int
    examples: int

    @property
    def name(self) -> str:
        return f"{self.length}x{self.pairs}"


@dataclass(frozen=True)
class MQARRun:
    """One model trained once."""

    task: str  # a cell's name or "mixture"
    train: tuple[Cell, ...]
    tests: tuple[Cell, ...]
    model: str
    preset: str
    config: dict[str, Any]  # overrides of `preset_config(preset, "tiny", ...)`
    width: int
    latents: int | None
    learning_rate: float
    seed: int
    folder: Path
    recipe: MQARRecipe

    @property
    def key(self) -> tuple[Any, ...]:
        """All but the learning rate and the seed: what a line of the table is about."""
        return (self.task, self.model, self.width, self.latents)

    @property
    def label(self) -> str:
        latents = "" if self.latents is None else f" L{self.latents}"
        return (
            f"{self.task} {self.model} E{self.width}{latents} lr {self.learning_rate:g}"
            f" seed {self.seed}"
        )

    @property
    def output_dir(self) -> str:
        return str(self.folder)

    def as_dict(self) -> dict[str, Any]:
        """The run as plain JSON."""
        return self.identity()

    def identity(self) -> dict[str, Any]:
        """What decides the outcome, as plain JSON."""
        recipe, training = self.recipe, asdict(self.recipe.training)
        for key in ("learning_rates", "seeds", "skip_solved"):
            del training[key]
        data = {k: getattr(recipe.data, k) for k in ("vocab_size", "power_a", "seed")}
        return {
            "preset": self.preset,
            "config": self.config,
            "train": [asdict(cell) for cell in self.train],
            "tests": [asdict(cell) for cell in self.tests],
            "data": data | {"random_non_queries": recipe.data.random_non_queries},
            "training": training,
            "learning_rate": self.learning_rate,
            "seed": self.seed,
        }

    def __hash__(self) -> int:
        return hash(self.folder)


def load(path: str | Path, overrides: Sequence[str] = ()) -> MQARRecipe:
    """Read a YAML recipe, apply dotted overrides, check everything but the models' sizes.

    Raises:
        LatteError: missing file, bad YAML, unknown key, wrong type or impossible value.
    """
    tree = read_overridden(path, overrides)
    recipe = build(MQARRecipe, tree)
    import_plugins([located(plugin) for plugin in recipe.plugins])
    _check_values(recipe)
    tasks(recipe)
    return recipe


def tasks(recipe: MQARRecipe) -> dict[str, tuple[tuple[Cell, ...], tuple[Cell, ...]]]:
    """name -> (cells trained on, cells tested on). Raises LatteError for impossible cells."""
    data = recipe.data
    if (data.cells is None) == (data.mixture is None):
        raise LatteError("data: give exactly one of data.cells and data.mixture")
    if (data.mixture is None) != (data.tests is None):
        raise LatteError("data: data.mixture and data.tests go together")
    if data.cells is not None:
        trained = _cells(recipe, "cells", data.cells, data.train_examples)
        tested = _cells(recipe, "cells", data.cells, data.test_examples)
        return {one.name: ((one,), (other,)) for one, other in zip(trained, tested, strict=True)}
    assert data.mixture is not None and data.tests is not None
    return {
        "mixture": (
            _cells(recipe, "mixture", data.mixture, None),
            _cells(recipe, "tests", data.tests, data.test_examples),
        )
    }


def runs(recipe: MQARRecipe) -> list[MQARRun]:
    """All runs of the grid: easy cells first, then models, sizes, seeds and learning rates.

    Raises:
        LatteError: an unknown preset or field, or sizes that do not fit.
    """
    found = []
    for task, (train, tests) in tasks(recipe).items():
        for name, width in product(recipe.select or recipe.models, recipe.widths):
            values = {**recipe.shared, **recipe.models[name]}
            preset = values.pop("preset")
            values.setdefault("vocab_size", recipe.data.vocab_size)
            values.setdefault("hidden_size", width)
            values.setdefault("intermediate_size", max(1, round(recipe.mlp_ratio * width)))
            if recipe.init_scale is not None:
                values.setdefault("initializer_range", recipe.init_scale / math.sqrt(width))
            values.setdefault("max_position_embeddings", max(c.length for c in (*train, *tests)))
            uses = getattr(model_config(name, preset, values, causal=True), "mixer_uses", ())
            sweep: list[int | None] = [None]
            if "num_latents" in uses:
                own = values.get("num_latents")
                sweep = [own] if own is not None else list(recipe.latents)
            for latents in sweep:
                config = values | ({} if latents is None else {"num_latents": latents})
                model_config(name, preset, config)
                size = f"E{width}" + ("" if latents is None else f"-L{latents}")
                for seed, rate in product(recipe.training.seeds, recipe.training.learning_rates):
                    folder = Path(recipe.output_dir, task, name, size, f"lr{rate:g}-seed{seed}")
                    found.append(
                        MQARRun(
                            task, train, tests, name, preset, config,
                            width, latents, rate, seed, folder, recipe,
                        )
                    )  # fmt: skip
    return found


def _cells(
    recipe: MQARRecipe, key: str, values: list[list[int]], examples: int | None
) -> tuple[Cell, ...]:
    from experiments.mqar.data import check_cell

    wanted = "[length, pairs]" if examples is not None else "[length, pairs, examples]"
    if not values:
        raise LatteError(f"data.{key}: expected at least one {wanted}, got none")
    cells = []
    for value in values:
        if len(value) != (2 if examples is not None else 3):
            raise LatteError(f"data.{key}: expected {wanted}, got {value}")
        cell = Cell(value[0], value[1], value[2] if examples is None else examples)
        if cell.examples < 1:
            raise LatteError(f"data.{key}: expected at least 1 example, got {value}")
        check_cell(cell.length, cell.pairs, recipe.data.vocab_size)
        cells.append(cell)
    if len({cell.name for cell in cells}) != len(cells):
        raise LatteError(f"data.{key}: expected different cells, got {values}")
    return tuple(cells)


def _check_values(recipe: MQARRecipe) -> None:
    training, data = recipe.training, recipe.data
    for name in (
        "training.max_epochs",
        "training.batch_size",
        "training.batch_tokens",
        "training.evaluations_per_epoch",
        "training.quick_examples",
        "training.max_minutes",
        "training.embedding_rate",
        "data.train_examples",
        "data.test_examples",
        "data.power_a",
    ):
        check_numbers({name: attrgetter(name)(recipe)})
    check_numbers({"mlp_ratio": recipe.mlp_ratio, "init_scale": recipe.init_scale})
    check_optimiser(training)
    if not 0 < training.stop_at <= 1:
        raise LatteError(
            f"training.stop_at: expected above 0 and at most 1, got {training.stop_at}"
        )
    check_seed("data.seed", data.seed)
    for key, values in (
        ("widths", recipe.widths),
        ("latents", recipe.latents),
        ("training.learning_rates", training.learning_rates),
    ):
        check_different(key, values)
        if not 0 < min(values) <= max(values) < math.inf:
            raise LatteError(f"{key}: expected numbers above 0, got {values}")
    check_models(recipe.models, recipe.select)
