"""Recipes: one YAML file per experiment and size, checked before anything slow starts.

    latte train recipes/tiny.yaml training.max_steps=200 output_dir=runs/mine

A recipe has the sections `model`, `data`, `training` and an `output_dir`. `base: other.yaml`
(relative to the file) takes another recipe's values first. `plugins: [my_mixer.py, a.module]` are
imported before the model is built, so that `model` can name mixers and models that they register.
Every key below can be overridden on the command line by its dotted name. This module never imports
torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from latte.errors import LatteError, check_seed
from latte.lab.data.preparing import DataSection
from latte.lab.train.typed import apply_override, build, merge, read_yaml
from latte.layers.latent_fields import ConversionOptions

# Keys of `training` for reports and duration. A run may be resumed with other values of them.
REPORTING = ("max_minutes", "log_steps", "save_steps", "eval_steps", "keep_checkpoints")
LENGTHS = ("max_steps", "max_tokens", "max_epochs")  # of a run: a section has one of them
# Keys of `training` that cannot be 0.
COUNTS = ("max_steps", "max_tokens", "batch_size", "gradient_accumulation", "context_parallel")
POSITIVE = (*COUNTS, "learning_rate", "epsilon", *REPORTING)


@dataclass
class ModelSection:
    """The model: `latte.models.preset_config(preset, size, **overrides)`.

    `preset` may also be the name of any other model of `latte.models.registry`. With an
    `architecture` it is a plain model of Transformers instead, such as a base to convert. Then
    `preset` and `size` are not used, and `overrides` are fields of its config.
    """

    # name of a preset, of a baseline, or of a model that a plugin registers
    preset: str = "latte-r-swa++"
    size: str = "tiny"  # `tiny`, `small`, `paper`, `400m` or `2.6b`
    # model type of Transformers, such as `llama`, used instead of a preset
    architecture: str | None = None
    # fields of `LatteConfig`, or of the architecture's config, by name
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The model's name in tables and figures."""
        return self.architecture or self.preset

    @property
    def is_comparator(self) -> bool:
        """Whether this is a baseline: a registered model that is not a preset."""
        from latte.models.registry import other_models

        return self.architecture is None and self.preset in other_models()


@dataclass
class TrainingSection:
    """AdamW with warmup and decay. Lengths are in optimiser steps unless a name says otherwise.

    Give exactly one of `max_steps` and `max_tokens`. `max_minutes` limits the wall time too: the
    run saves and stops then, but the learning-rate schedule does not change.
    """

    max_steps: int | None = None  # number of optimiser steps. Give this or `max_tokens`, not both
    max_tokens: int | None = None  # number of tokens to train on
    # training saves and stops after this time; the learning-rate schedule does not change
    max_minutes: float | None = None
    batch_size: int = 16  # blocks per process (or group of processes) and micro-batch
    gradient_accumulation: int = 1  # number of micro-batches per step
    learning_rate: float = 1e-3  # peak of the learning rate
    # how the learning rate falls after the warmup
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = 100  # number of steps in which the learning rate rises to its peak
    min_learning_rate: float = 0.0  # learning rate at the end
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # of AdamW
    epsilon: float = 1e-8  # of AdamW
    weight_decay: float = 0.1  # of AdamW, on matrices only: not on norms, biases and gates
    max_grad_norm: float = 1.0  # gradients are scaled down to this norm
    bf16: bool = False  # compute in bfloat16 (autocast); parameters and optimiser stay in fp32
    # backend of Latte's ops; None: the default
    backend: Literal["torch", "cpu", "triton"] | None = None
    torch_compile: bool = False  # compile the model: Latte's own block by block, others whole
    # compute the loss of Latte's own models without holding all logits (PyTorch 2.13)
    chunked_loss: bool = False
    gradient_checkpointing: bool = False  # save memory by computing each layer twice
    # with several processes: `ddp`, every process holds the model; `fsdp2`, it is sharded
    strategy: Literal["ddp", "fsdp2"] = "ddp"
    context_parallel: int = 1  # number of processes that share each block, under torchrun
    seed: int = 0  # seed of weights, data order and dropout
    log_steps: int = 10  # number of steps between lines of `metrics.jsonl`
    save_steps: int = 500  # number of steps between checkpoints
    eval_steps: int = 500  # number of steps between scores on held-out text
    keep_checkpoints: int = 2  # number of newest checkpoints that are kept


@dataclass
class ConversionSection(ConversionOptions):
    """The conversion of a pretrained decoder to Latte-Macchiato, and the weights that are trained.

    With a `base`, `model` is not used, and `data.tokenizer` is the base's. If the base is already
    converted, its training continues; its window, latents and the like must be the same as here.
    """

    # pretrained decoder: a folder, a GGUF file or a Hub name. A converted model is trained further.
    # `model` is then not used, and the tokenizer is the base's
    base: str | None = None
    # precision of the base's weights; `auto`: the checkpoint's
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    mass_weight: float = 1.0  # weight of KL(m, p(l=0)) in the stage `layers`
    distillation: float = 0.0  # share of KL(base, model) in next-token training, 0 to 1
    # probability that a layer's window is hidden in the first step of next tokens; it falls
    # linearly to 0, so that latents learn to be of use (arXiv 2510.05901)
    window_dropout: float = 0.0
    # what is trained: `latents`, `lora` (latents and low-rank updates) or `all`
    trainable: Literal["latents", "lora", "all"] = "latents"
    lora_rank: int = 16  # rank of the low-rank updates
    lora_alpha: float = 32.0  # scale of the low-rank updates
    # projections that get low-rank updates
    lora_targets: list[str] = field(default_factory=lambda: ["q_proj", "k_proj", "v_proj"])


@dataclass
class ComparisonSection:
    """Options of `latte compare`. A single run ignores them."""

    presets: list[str] = field(default_factory=list)  # names of the models to compare
    # seeds; with none, one run of each model by `training.seed`
    seeds: list[int] = field(default_factory=list)
    # model that the others are compared with; `transformer++`, or the first
    baseline: str | None = None
    # model whose number of parameters all presets get, within half a percent, by their
    # `intermediate_size`; None: no fit
    equal_parameters: str | None = None
    lengths: list[int] | None = None  # context lengths of the evaluation, in tokens
    # positions at which the scores of each window are divided, such as [64, 256]
    positions: list[int] = field(default_factory=list)
    max_tokens: int | None = None  # number of held-out tokens scored at the end; None: all


@dataclass
class Recipe:
    """All settings of one training run."""

    model: ModelSection = field(default_factory=ModelSection)
    conversion: ConversionSection = field(default_factory=ConversionSection)
    data: DataSection = field(default_factory=DataSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    comparison: ComparisonSection = field(default_factory=ComparisonSection)
    output_dir: str = "runs/latte"
    plugins: list[str] = field(default_factory=list)  # files or modules, see `import_plugins`

    def as_dict(self) -> dict[str, Any]:
        """All settings, as plain JSON: with lists, as a file has them, and no tuples."""
        values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return values

    def import_plugins(self) -> None:
        """Call :func:`import_plugins` for the plugins of the recipe."""
        import_plugins(self.plugins)

    @property
    def name(self) -> str:
        """The model's name in tables and figures."""
        if self.conversion.base is not None:
            return f"{Path(self.conversion.base).name}, converted"
        return self.model.name

    def tokens_per_step(self, processes: int = 1) -> int:
        """The number of tokens of one optimiser step, over all processes."""
        section = self.training
        groups = max(1, processes // section.context_parallel)
        return section.batch_size * section.gradient_accumulation * groups * self.data.block_length

    def steps(self, processes: int = 1) -> int:
        """The number of optimiser steps of the run (tokens are rounded up to whole steps)."""
        if self.training.max_steps is not None:
            return self.training.max_steps
        assert self.training.max_tokens is not None  # `check` ensures it
        return -(-self.training.max_tokens // self.tokens_per_step(processes))

    def identity(self) -> dict[str, Any]:
        """The settings that must be the same to resume a run: all but those of reports."""
        values = self.as_dict()
        del values["output_dir"], values["comparison"]
        del values["data"]["cache_dir"]
        values["plugins"] = plugin_names(self.plugins)
        for key in REPORTING:
            del values["training"][key]
        return values


def load_recipe(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Read a YAML recipe, apply dotted overrides, check everything.

    Raises:
        LatteError: The file is missing or not valid YAML, a key is unknown, or a value has a wrong
            type or is impossible.
    """
    recipe = check(build(Recipe, read_current(path, overrides)))
    recipe.plugins = [located(plugin) for plugin in recipe.plugins]
    return recipe


def import_plugins(plugins: Sequence[str]) -> None:
    """Import files or modules, which register models or mixers in `latte.models.registry`.

    Raises:
        LatteError: A file or module does not exist, or its import fails.
    """
    from latte.models.registry import load_plugin

    for plugin in plugins:
        load_plugin(plugin)


def check_plugins(recipe: Recipe, file: Path) -> None:
    """Check that the plugins of a folder's recipe have been imported: a folder may only ask.

    Raises:
        LatteError: One has not.
    """
    from latte.models.registry import is_loaded

    asked = [plugin for plugin in recipe.plugins if not is_loaded(plugin)]
    if asked:
        raise LatteError(
            f"{file} asks to run code, which is run only if you name it: add --plugins"
            f" {','.join(asked)} if you trust it, or remove it from the file's plugins"
        )


def plugin_names(plugins: list[str]) -> list[str]:
    """The names of plugins in a run's identity, without folders: a file may be moved."""
    return [Path(plugin).name if plugin.endswith(".py") else plugin for plugin in plugins]


def located(plugin: str) -> str:
    """The absolute path of a file, so that a stored recipe finds it; a module's name unchanged."""
    if not plugin.endswith(".py"):
        return plugin
    path = Path(plugin).expanduser()
    if not path.is_file():
        raise LatteError(
            f"plugins: {plugin} is not a file, neither next to the recipe nor in {Path.cwd()}"
        )
    return str(path.resolve())


def recipe_from_dict(values: dict[str, Any]) -> Recipe:
    """The inverse of `Recipe.as_dict`, checked."""
    return check(build(Recipe, current(values, ("next-token", "transfer"))))


def current(values: Any, objectives: Sequence[str] = ("next-token",)) -> Any:
    """A recipe's values without those of earlier versions that change nothing.

    Earlier versions could also distil all layers at once, in a stage `transfer`.

    Args:
        objectives: The values of `conversion.objective` that are left out.
    """
    if not isinstance(values, dict):
        return values
    found = {key: value for key, value in values.items() if (key, value) != ("transfer", None)}
    section = found.get("conversion")
    if isinstance(section, dict) and section.get("objective") in objectives:
        found["conversion"] = {key: x for key, x in section.items() if key != "objective"}
    return found


def read_current(path: str | Path, overrides: Sequence[str]) -> dict[str, Any]:
    """:func:`read_overridden`, and LatteError for a recipe that asks for the stage `transfer`."""
    tree: dict[str, Any] = current(read_overridden(path, overrides))
    section = tree.get("conversion")
    objective = isinstance(section, dict) and section.get("objective") == "transfer"
    if "transfer" in tree or objective:
        raise LatteError(
            f"{'conversion.objective=' if objective else ''}transfer: the distillation of all"
            " layers at once was removed; expected a section layers in a recipe of latte convert,"
            " which fits each layer alone, such as layers: {rows: 60, steps: 100}"
        )
    return tree


def read_overridden(path: str | Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The values of a recipe and its bases, with dotted overrides.

    A section has one length of :data:`LENGTHS`. An override of one replaces the recipe's other.
    """
    tree = read_with_bases(Path(path))
    given = [assignment.partition("=")[0] for assignment in overrides]
    for key in given:
        name, _, length = key.rpartition(".")
        section = tree.get(name)
        if length in LENGTHS and isinstance(section, dict):
            for other in LENGTHS:
                if other != length and f"{name}.{other}" not in given:
                    section.pop(other, None)
    for assignment in overrides:
        apply_override(tree, assignment)
    if isinstance(folder := tree.get("output_dir"), str):
        tree["output_dir"] = os.path.expanduser(folder)
    return tree


def read_with_bases(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The values of a recipe, merged into those of its bases."""
    if path.resolve() in seen:
        raise LatteError(f"recipe {path} is its own base: {' -> '.join(map(str, seen))}")
    if path.is_dir():
        raise LatteError(f"recipe {path} is a folder; expected a YAML file")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise LatteError(f"recipe {path} does not exist; expected a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise LatteError(f"recipe {path} cannot be read as text: {error}") from None
    tree = read_yaml(text, f"recipe {path}")
    if isinstance(plugins := tree.get("plugins"), list):  # beside the recipe, if they are there
        beside = [path.parent / plugin if isinstance(plugin, str) else None for plugin in plugins]
        tree["plugins"] = [
            str(file) if file is not None and file.is_file() else plugin
            for plugin, file in zip(plugins, beside, strict=True)
        ]
    base = tree.pop("base", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise LatteError(f"recipe {path}: base: expected a path (str), got {base!r}")
    return merge(read_with_bases(path.parent / base, (*seen, path.resolve())), tree)


# Checks of values, by the words that errors use for what is expected.
EXPECTED: dict[str, Callable[[Any], bool]] = {
    "a number above 0": lambda value: value > 0,
    "0 or more": lambda value: value >= 0,
    "0 to 1": lambda value: 0 <= value <= 1,
    "at least 2": lambda value: value >= 2,
    "numbers of at least 1": lambda value: min(value, default=1) >= 1,
    "two numbers from 0 up to but not 1": lambda value: (
        len(value) == 2 and all(0 <= each < 1 for each in value)
    ),
}


def expect(recipe: Any, what: str, *keys: str) -> None:
    """Raise LatteError if the value of a dotted key is given and is not as expected."""
    for key in keys:
        value = operator.attrgetter(key)(recipe)
        if value is None:
            continue
        numbers = value if isinstance(value, Sequence) else [value]
        large = any(x >= (2**63 if isinstance(x, int) else math.inf) for x in numbers)
        if large or not EXPECTED[what](value):
            raise LatteError(f"{key}: expected {what}{' and below 2^63' * large}, got {value}")


def check(recipe: Recipe) -> Recipe:
    """Refuse values of the right type that are impossible, or that do not go together."""
    training, conversion = recipe.training, recipe.conversion
    if (training.max_steps is None) == (training.max_tokens is None):
        raise LatteError(
            "training: give exactly one of training.max_steps and training.max_tokens, got"
            f" max_steps={training.max_steps} and max_tokens={training.max_tokens}"
        )
    expect(recipe, "a number above 0", *(f"training.{key}" for key in POSITIVE))
    expect(recipe, "a number above 0", "data.vocab_size", "data.max_validation_tokens")
    expect(recipe, "a number above 0", "comparison.max_tokens")
    expect(recipe, "at least 2", "data.block_length")
    expect(recipe, "0 or more", "training.warmup_steps", "training.min_learning_rate")
    expect(recipe, "0 or more", "training.weight_decay", "training.max_grad_norm")
    expect(recipe, "two numbers from 0 up to but not 1", "training.betas")
    expect(recipe, "numbers of at least 1", "comparison.lengths")
    expect(recipe, "0 or more", "conversion.mass_weight")
    expect(recipe, "0 to 1", "conversion.distillation", "conversion.window_dropout")
    check_seed("training.seed", training.seed)
    if not recipe.output_dir.strip():
        raise LatteError("output_dir: expected the name of a folder, got none")
    if training.min_learning_rate > training.learning_rate:
        raise LatteError(
            f"training.min_learning_rate: expected at most training.learning_rate"
            f" ({training.learning_rate}), got {training.min_learning_rate}"
        )
    if training.context_parallel > 1:
        if training.torch_compile:
            raise LatteError(
                "training.context_parallel: expected torch_compile=false, since processes exchange"
                " states within a layer"
            )
        if conversion.distillation:
            raise LatteError(
                "training.context_parallel: the base as a teacher has full attention, which is not"
                f" cut; expected conversion.distillation=0, got {conversion.distillation}"
            )
        if training.context_parallel > recipe.data.block_length:
            raise LatteError(
                f"training.context_parallel: expected at most data.block_length"
                f" ({recipe.data.block_length}) processes, got {training.context_parallel}"
            )
    if conversion.trainable == "lora" and (conversion.lora_rank < 1 or not conversion.lora_targets):
        raise LatteError(
            "conversion.trainable=lora: expected lora_rank of at least 1 and some lora_targets, got"
            f" {conversion.lora_rank} and {conversion.lora_targets}"
        )
    if conversion.distillation and conversion.trainable == "all":
        raise LatteError(
            "conversion.distillation takes the base's own weights as its teacher; expected"
            f" conversion.trainable=latents or lora, got {conversion.trainable}"
        )
    return recipe
