"""Compare presets by one recipe: with its own seed, or with several to measure chance.

    output_dir/
      PRESET/[seed-N/]   an ordinary run by the recipe, with training.seed = N
        measured.json    its results: parameters, losses, speed, memory, hardware
                         (measured-2.json ... at other context lengths or tokens)
        failed.json      why there is no result, if its last attempt failed
      comparison.csv, .md, .png; by several seeds seeds.csv, .md, .png

All runs read the same blocks in the same order, take the same number of steps and share every
hyperparameter; the number of tokens is fixed before the first step. A seed chooses the
initialisation and the order of the data, the same order for every preset, so that differences
between presets are paired by seed. Runs go seed by seed: after the first round every preset has a
result, and each further round narrows the intervals.
"""

from __future__ import annotations

import copy
import gc
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from latte.errors import LatteError, check_seed, one_line
from latte.lab.compare.grid import AGAIN, Grid, RunStatus, unfinished
from latte.lab.data.preparing import prepare_text
from latte.lab.evaluate.checkpoint import load_checkpoint
from latte.lab.evaluate.lengths import Row, check_positions, evaluate_lengths
from latte.lab.machine import describe
from latte.lab.results import Results, own_file, results_at
from latte.lab.train.metrics import read_metrics
from latte.lab.train.recipe import ComparisonSection, Recipe
from latte.lab.train.run import check_model, first_alone, model_config, train
from latte.lab.train.run_folder import FINISHED_FILE, check_same_recipe
from latte.lab.train.speed import autocasts
from latte.models.atomic_files import write_json
from latte.models.parameters import count_parameters, nearest_size
from latte.models.plain_files import read_object
from latte.models.registry import find_model, other_models, preset_names
from latte.ops.processes import number_of_processes

MEASURED_FILE = "measured.json"
TOLERANCE = 0.005  # greatest relative difference of numbers that count as equal


@dataclass(frozen=True)
class PresetRun:
    """One preset by one seed; None: the recipe's own."""

    preset: str
    seed: int | None
    recipe: Recipe
    lacks: str = ""  # what the model needs, and this machine does not have

    @property
    def folder(self) -> Path:
        return Path(self.recipe.output_dir)

    @property
    def label(self) -> str:
        return self.preset if self.seed is None else f"{self.preset}, seed {self.seed}"


@dataclass(frozen=True)
class Measured:
    """The results of a finished run. Losses and perplexities are in `rows`, by context length."""

    parameters: int
    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float  # median over the log lines, evaluations and saves left out
    peak_memory_bytes: int  # of training steps; on a CPU the process with its libraries
    hardware: dict[str, Any]
    rows: list[Row]


class Comparison(Grid):
    """The runs of `recipe.comparison`; :meth:`sweep` does them and reports.

    With several seeds, a run that fails is reported and the other runs continue. With one seed, all
    presets must succeed: they run in this process, and errors of `train` are raised.

    Args:
        recipe: Recipe that all runs share. Its `model.preset` is replaced, and its seed if there
            are `seeds`.
        quiet: Whether to print no bars and no lines.
        title: Title of the figure.
        references: Bits per byte of other methods, drawn as lines (with one seed).
        apart: Whether each run has a process of its own, with several seeds. Under torchrun runs
            share the processes.

    Raises:
        LatteError: There are no or repeated presets or seeds, the baseline is unknown, or a model
            cannot be built.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        quiet: bool = False,
        title: str = "",
        references: Mapping[str, float] | None = None,
        apart: bool = True,
    ) -> None:
        super().__init__(recipe, runs_of(recipe), quiet=quiet)
        self.title, self.references = title, references
        self.keeps_going = bool(recipe.comparison.seeds)
        self.apart = self.keeps_going and apart and number_of_processes() == 1

    def look(self, run: PresetRun) -> RunStatus:
        check_same_recipe(run.recipe)
        measured = stored_measurement(run, self.recipe.comparison)
        if measured is not None:
            if all(math.isfinite(row.loss) for row in measured.rows):
                return RunStatus(run, measured)
            return RunStatus(run, None, "diverged: the held-out loss is not finite")
        if run.lacks:
            return RunStatus(run, None, f"cannot run here, it needs {run.lacks}")
        if (run.folder / FINISHED_FILE).exists():
            return RunStatus(run, None, "trained, not scored yet at these lengths")
        return RunStatus(run, None, unfinished(run))

    def prepare(self) -> None:
        prepare_text(self.recipe.data, progress=self.first and not self.quiet)

    def do(self, run: PresetRun) -> None:
        train_and_measure(run, self.recipe.comparison, self.quiet)

    @property
    def report_files(self) -> tuple[str, ...]:
        """Names of the report's files."""
        if self.recipe.comparison.seeds:
            return "seeds.csv", "seeds.md", "seeds.png", "positions.csv"
        return "comparison.csv", "comparison.md", "comparison.png", "positions.csv"

    def report_place(self) -> Results:
        """The report's place; it has a number if there is a report of other settings."""
        settings = {
            "recipe": self.recipe.identity(),
            "comparison": asdict(self.recipe.comparison),
        }
        folder = Path(self.recipe.output_dir)
        return results_at(folder, self.report_files, settings, named=False, number="files")

    def write(self, statuses: Sequence[RunStatus]) -> str:
        from latte.lab.compare import report

        with self.report_place().writing() as folder:
            if self.recipe.comparison.seeds:
                return report.write_seeds(folder, statuses, self.recipe, self.title)
            shown = (self.recipe, self.title, self.references)
            return report.write_comparison(folder, statuses, *shown)

    def listing(self) -> str:
        steps = self.recipe.steps()
        tokens = steps * self.recipe.tokens_per_step()
        return f"{super().listing()} of {steps:,} steps, {tokens:,} tokens each\n"


def runs_of(recipe: Recipe) -> list[PresetRun]:
    """All runs of `recipe.comparison`, seed by seed. Raises as :class:`Comparison` does."""
    recipe.import_plugins()  # for the models that they register
    section = recipe.comparison
    for name, values in (("presets", section.presets), ("seeds", section.seeds)):
        if len(set(values)) != len(values) or not section.presets:
            kind, given = "ones" if section.seeds else "names", ", ".join(map(str, values))
            raise LatteError(f"{name}: expected different {kind}, got {given or 'none'}")
    for seed in section.seeds:
        check_seed("seeds", seed)
    if section.baseline is not None and section.baseline not in section.presets:
        raise LatteError(
            f"baseline: expected one of {', '.join(section.presets)}, got {section.baseline!r}"
        )
    if any(length < 1 for length in section.lengths or []):
        raise LatteError(f"lengths: expected numbers of at least 1, got {section.lengths}")
    check_positions(section.positions)
    by_preset = {preset: preset_recipe(recipe, preset) for preset in section.presets}
    lacks = {preset: _lacks(preset) if section.seeds else "" for preset in section.presets}
    if section.equal_parameters is not None:
        _equalise(by_preset, preset_recipe(recipe, section.equal_parameters))
    for preset, each in by_preset.items():  # an error in the last is found before the first trains
        if not lacks[preset]:
            check_model(each)
    if not section.seeds:
        return [PresetRun(preset, None, each) for preset, each in by_preset.items()]
    runs = []
    for seed in section.seeds:
        for preset, each in by_preset.items():
            seeded = copy.deepcopy(each)
            seeded.training.seed = seed
            seeded.output_dir = str(Path(each.output_dir) / f"seed-{seed}")
            runs.append(PresetRun(preset, seed, seeded, lacks[preset]))
    return runs


def preset_recipe(recipe: Recipe, preset: str) -> Recipe:
    """The recipe for one preset, in a folder of its own.

    Overrides of the latents and the window go to the presets that have them.

    Raises:
        LatteError: The recipe's model is not a preset; every run would train the same model.
    """
    for name, value in (
        ("model.architecture", recipe.model.architecture),
        ("conversion.base", recipe.conversion.base),
    ):
        if value is not None:
            raise LatteError(f"{name}: expected none where presets are compared, got {value!r}")
    each = copy.deepcopy(recipe)
    each.model.preset = preset
    each.output_dir = str(Path(recipe.output_dir) / preset)
    if preset in preset_names():
        own = find_model(preset).config("tiny")
        for name in ("num_latents", "sliding_window"):
            if getattr(own, name) is None:
                each.model.overrides.pop(name, None)
    return each


def _equalise(by_preset: Mapping[str, Recipe], like: Recipe) -> None:
    """Give presets as many parameters as the model of `like`, in place, by `intermediate_size`.

    Presets without MLPs get them by `value_dim`. Other models stay as they are: they are fitted to
    `transformer++` (:mod:`latte.lab.baselines`).

    Raises:
        LatteError: The nearest size of a preset differs by more than half a percent.
    """
    # A tokenizer that is learnt has this size, unless the text is too short for it.
    words = {"vocab_size": like.data.vocab_size} if like.data.tokenizer == "bpe" else {}
    target = count_parameters(model_config(like, words))
    for preset, recipe in by_preset.items():
        if preset == like.model.preset or preset not in preset_names():
            continue

        without = model_config(recipe, words).mlp == "none"
        name = "value_dim" if without else "intermediate_size"

        def count(size: int, recipe: Recipe = recipe, name: str = name) -> int:
            fields = recipe.model.overrides | {name: size}
            sized = replace(recipe, model=replace(recipe.model, overrides=fields))
            return count_parameters(model_config(sized, words))

        size = nearest_size(count, target)
        found = count(size)
        if abs(found - target) > TOLERANCE * target:
            raise LatteError(
                f"equal_parameters: {preset} has {found:,} parameters at the nearest"
                f" {name}, {size}; expected the {target:,} of {like.model.preset}"
                f" within {TOLERANCE:.1%}"
            )
        recipe.model.overrides[name] = size


def _lacks(preset: str) -> str:
    """Why a model to compare with cannot run on this machine; empty if it can."""
    model = other_models().get(preset)
    if model is None:
        return ""
    if not model.causal:
        raise LatteError(f"{preset!r} reads both ways: it has no perplexity to compare")
    return model.missing() or ""


def _wanted(run: PresetRun, section: ComparisonSection) -> dict[str, Any]:
    block = run.recipe.data.block_length
    usual = [block, 4 * block, 16 * block] if run.seed is None else [block]
    return {
        "lengths": sorted(set(section.lengths or usual)),
        "max_tokens": section.max_tokens,
        "positions": section.positions,
    }


def stored_measurement(run: PresetRun, section: ComparisonSection) -> Measured | None:
    """The measurement in a run's folder, if it has the wanted lengths and tokens.

    Raises:
        LatteError: The file is damaged.
    """
    file = measured_file(run, section)
    if not file.exists():
        return None
    stored = read_object(file, "wanted", then=AGAIN)
    if stored.pop("wanted") != _wanted(run, section):
        return None
    try:
        return Measured(**{**stored, "rows": [Row(**row) for row in stored["rows"]]})
    except (KeyError, TypeError) as error:
        raise LatteError(f"{file} is damaged ({one_line(error)}); {AGAIN}") from None


def measured_file(run: PresetRun, section: ComparisonSection) -> Path:
    """The path of the measurement at the wanted lengths and tokens, whether it exists or not.

    Raises:
        LatteError: A file is damaged.
    """
    file = run.folder / MEASURED_FILE
    wanted = _wanted(run, section)

    def is_own(there: Path) -> bool:
        return bool(read_object(there, "wanted", then=AGAIN)["wanted"] == wanted)

    return own_file(file, is_own)[0]


def _training(folder: Path) -> dict[str, Any]:
    """What a finished run says about its training."""
    keys = ("steps", "tokens", "seconds")
    result = read_object(folder / FINISHED_FILE, *keys, then=AGAIN)
    lines = read_metrics(folder, "train")
    return {
        **{key: result[key] for key in keys},
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in lines),
        "peak_memory_bytes": max(line["peak_memory_bytes"] for line in lines),
    }


def train_and_measure(run: PresetRun, section: ComparisonSection, quiet: bool) -> None:
    """One run from start or checkpoint to its measured.json. Raises as `train` does."""
    result = train(run.recipe, label=run.label, quiet=quiet)
    if not result.finished and run.seed is None:
        raise LatteError(
            f"{run.preset} was stopped at step {result.steps} by training.max_minutes before its"
            " tokens were used up; a comparison needs equal tokens: run again with more"
        )
    if not result.finished:
        return  # it continues when run again

    def measure() -> None:
        wanted = _wanted(run, section)
        text = prepare_text(run.recipe.data, progress=False)
        gc.collect()
        model, _ = load_checkpoint(run.folder)
        rows = evaluate_lengths(
            model,
            text.held_out(wanted["max_tokens"]),
            wanted["lengths"],
            positions=section.positions,
            bf16=autocasts(run.recipe.training) and run.seed is not None,
            progress=not quiet,
            label=run.label,
        )
        measured = Measured(
            parameters=sum(p.numel() for p in model.parameters()),
            hardware=describe(next(model.parameters()).device),
            rows=rows,
            **_training(run.folder),
        )
        write_json(measured_file(run, section), {"wanted": wanted, **asdict(measured)})

    first_alone(measure)
