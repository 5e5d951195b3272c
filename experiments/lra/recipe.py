"""Long Range Arena recipes: one task, the models that are trained on it, and their runs.

A recipe is one YAML file with a `task`, its `data` (whose keys depend on the task, see
`experiments.lra.data`), `models`, `shared`, `training` and an `output_dir`; `base: other.yaml`
starts from another recipe, and every key can be overridden by its dotted name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

from experiments.grids import check_models, check_numbers, check_optimiser, model_config
from latte.errors import LatteError
from latte.lab.train.recipe import read_overridden
from latte.lab.train.typed import build


@dataclass
class LRATraining:
    """AdamW with warmup and decay. Give exactly one of `max_steps` and `max_epochs`.

    `max_minutes` ends a run early, for good: what it has is scored, though its schedule is still
    that of the steps.
    """

    max_steps: int | None = None
    max_epochs: float | None = None
    max_minutes: float | None = None  # wall time of a run, over all resumes
    batch_size: int = 32  # examples of a step
    # So many batches at a time are drawn, sorted by length and cut: padding goes to the longest
    # of a batch alone. 1: batches of any lengths.
    bucket_batches: int = 50
    learning_rate: float = 1e-3  # the peak, after warmup
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = 100
    betas: list[float] = field(default_factory=lambda: [0.9, 0.98])
    weight_decay: float = 0.05  # on matrices; not on norms, biases and gates
    max_grad_norm: float = 1.0  # 0: no clipping
    bf16: bool = False  # autocast
    seeds: list[int] = field(default_factory=lambda: [0])  # of weights, order and dropout
    eval_steps: int = 500  # score the validation split, keep the best, write a checkpoint
    max_eval_examples: int | None = None  # of the validation split, while training; None: all
    log_steps: int = 50


@dataclass
class LRARecipe:
    """One task and several models."""

    task: str
    data: Any  # the task's options
    # name -> {preset: ..., any field of LatteConfig: ...}
    models: dict[str, Any] = field(default_factory=dict)
    # Fields of LatteConfig for all models; latents and windows only for those that have them.
    shared: dict[str, Any] = field(default_factory=dict)
    select: list[str] | None = None  # names of the models to run; None: all
    training: LRATraining = field(default_factory=LRATraining)
    # A checkpoint whose encoder the models begin with (and head, if it fits); None: from scratch.
    initial: str | None = None
    cache_dir: str | None = None  # generated data; None: ~/.cache/latte (or $LATTE_CACHE)
    workers: int = 1  # processes that generate data; the data is the same for any number
    output_dir: str = "runs/lra"


@dataclass
class LRARun:
    """One model trained once."""

    model: str
    preset: str
    config: dict[str, Any]  # overrides of `preset_config(preset, "tiny", ...)`
    seed: int
    output_dir: str
    recipe: LRARecipe

    @property
    def label(self) -> str:
        return f"{self.recipe.task} {self.model} seed {self.seed}"

    @property
    def folder(self) -> Path:
        return Path(self.output_dir)

    def as_dict(self) -> dict[str, Any]:
        """The run as plain JSON."""
        training = asdict(self.recipe.training)
        del training["seeds"]
        return {
            "task": self.recipe.task,
            "data": asdict(self.recipe.data),
            "preset": self.preset,
            "config": self.config,
            "training": training,
            "seed": self.seed,
            **({} if self.recipe.initial is None else {"initial": self.recipe.initial}),
        }

    def identity(self) -> dict[str, Any]:
        """What decides the outcome, but for the clock."""
        values = self.as_dict()
        for key in ("max_minutes", "log_steps"):
            del values["training"][key]
        return values


def load(path: str | Path, overrides: Sequence[str] = ()) -> LRARecipe:
    """Read a YAML recipe, apply dotted overrides, check everything but the models' sizes.

    Raises:
        LatteError: missing file, bad YAML, unknown task or key, wrong type or impossible value.
    """
    from experiments.lra.data import OPTIONS, options_of

    tree = read_overridden(path, overrides)
    if "task" not in tree:
        raise LatteError(f"missing key 'task': expected one of {', '.join(OPTIONS)}")
    data = build(options_of(tree["task"]), tree.pop("data", None) or {}, "data")
    recipe = build(LRARecipe, {**tree, "data": {}})
    recipe.data = data
    data.check()
    _check_values(recipe)
    return recipe


def runs(recipe: LRARecipe) -> list[LRARun]:
    """All runs of a recipe, seed by seed.

    Raises:
        LatteError: an unknown preset or field, or sizes that do not fit.
    """
    from experiments.lra.pairs import check_pairs

    data, found = recipe.data, []
    for seed, name in product(recipe.training.seeds, recipe.select or recipe.models):
        own = dict(recipe.models[name])
        preset = own.pop("preset")
        shared = dict(recipe.shared)
        plain = model_config(name, preset, {"mixer": own["mixer"]} if "mixer" in own else {})
        uses = getattr(plain, "mixer_uses", None)  # a library's model has none, and its own window
        for key in ("num_latents", "sliding_window"):
            if uses is not None and key not in uses:
                shared.pop(key, None)
        config = {
            "vocab_size": data.vocab_size,
            "num_labels": len(data.classes),
            "is_causal": False,
            "max_position_embeddings": data.longest,
            **shared,
            **own,
        }
        whole = model_config(name, preset, config)
        if data.towers == 2:
            check_pairs(whole)
        folder = Path(recipe.output_dir, name, f"seed{seed}")
        found.append(LRARun(name, preset, config, seed, str(folder), recipe))
    return found


def _check_values(recipe: LRARecipe) -> None:
    training = recipe.training
    if (training.max_steps is None) == (training.max_epochs is None):
        raise LatteError(
            "training: give exactly one of training.max_steps and training.max_epochs, got"
            f" max_steps={training.max_steps} and max_epochs={training.max_epochs}"
        )
    above_zero = (
        "max_steps", "max_epochs", "max_minutes", "batch_size", "bucket_batches", "learning_rate",
        "eval_steps", "max_eval_examples", "log_steps",
    )  # fmt: skip
    check_numbers({f"training.{key}": getattr(training, key) for key in above_zero})
    check_optimiser(training)
    if recipe.workers < 1:
        raise LatteError(f"workers: expected at least 1, got {recipe.workers}")
    check_models(recipe.models, recipe.select)
