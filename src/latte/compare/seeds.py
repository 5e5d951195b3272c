"""Presets by several seeds: the same comparison again and again, so that chance can be told.

    output_dir/
      PRESET/seed-N/     an ordinary run by the recipe with training.seed = N
        measured.json    what it was worth: parameters, losses, speed, memory, hardware
        failed.json      why there is no result, if there is none
      seeds.csv, seeds.md, seeds.png

A seed chooses the initialisation and the order of the data, the same order for every preset, so
that differences between presets are paired by seed. Runs go seed by seed: after the first round
every preset has a result, and each further round narrows the intervals. Each run has a process
of its own. A run that fails is reported, and costs the others nothing; a finished one is not
done again; one that another process is at is left to it, so two processes may share the work.
"""

from __future__ import annotations

import copy
import gc
import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from latte.compare.compare import preset_recipe
from latte.data.preparing import prepare_text
from latte.errors import LatteError, check_seed
from latte.evaluate.checkpoint import load_checkpoint
from latte.evaluate.lengths import Row, evaluate_lengths
from latte.machine import WorkFailed, describe, in_fresh_process
from latte.models.registry import other_models
from latte.train.metrics import duration, read_metrics
from latte.train.recipe import ComparisonSection, Recipe
from latte.train.run import check_model, first_alone, train
from latte.train.run_folder import (
    FINISHED_FILE,
    FolderInUse,
    check_same_recipe,
    checkpoints,
    writable_folder,
    write_json,
)
from latte.train.trainer import Diverged

MEASURED_FILE = "measured.json"
FAILED_FILE = "failed.json"


@dataclass(frozen=True)
class Run:
    """One preset by one seed."""

    preset: str
    seed: int
    recipe: Recipe
    lacks: str = ""  # what the model needs and this machine has not

    @property
    def folder(self) -> Path:
        return Path(self.recipe.output_dir)

    @property
    def label(self) -> str:
        return f"{self.preset}, seed {self.seed}"


@dataclass(frozen=True)
class Measured:
    """What a finished run was worth. Losses and perplexities are in `rows`, by context length."""

    parameters: int
    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float  # median over the log lines, evaluations and saves left out
    peak_memory_bytes: int  # of training steps; on a CPU the process with its libraries
    hardware: dict[str, Any]
    rows: list[Row]


@dataclass(frozen=True)
class Outcome:
    """Where a run stands: `measured` if it has a result, else why not."""

    run: Run
    measured: Measured | None
    problem: str = ""


def runs_of(recipe: Recipe) -> list[Run]:
    """All runs of `recipe.comparison`, seed by seed.

    Raises:
        LatteError: no or repeated presets or seeds, an unknown baseline, or a model that cannot be
            built.
    """
    section = recipe.comparison
    for name, values in (("presets", section.presets), ("seeds", section.seeds)):
        if not values or len(set(values)) != len(values):
            given = ", ".join(map(str, values)) or "none"
            raise LatteError(f"{name}: expected different ones, got {given}")
    for seed in section.seeds:
        check_seed("seeds", seed)
    if section.baseline is not None and section.baseline not in section.presets:
        raise LatteError(
            f"baseline: expected one of {', '.join(section.presets)}, got {section.baseline!r}"
        )
    if any(length < 1 for length in section.lengths or []):
        raise LatteError(f"lengths: expected numbers of at least 1, got {section.lengths}")
    by_preset = {preset: preset_recipe(recipe, preset) for preset in section.presets}
    lacks = {preset: _lacks(preset) for preset in section.presets}
    for preset, each in by_preset.items():  # the last one's mistake shows before the first trains
        if not lacks[preset]:
            check_model(each)
    runs = []
    for seed in section.seeds:
        for preset, each in by_preset.items():
            seeded = copy.deepcopy(each)
            seeded.training.seed = seed
            seeded.output_dir = str(Path(each.output_dir) / f"seed-{seed}")
            runs.append(Run(preset, seed, seeded, lacks[preset]))
    return runs


def _lacks(preset: str) -> str:
    """Why a comparator cannot run on this machine; empty if it can."""
    comparator = other_models().get(preset)
    if comparator is None:
        return ""
    if not comparator.causal:
        raise LatteError(f"{preset!r} reads both ways: it has no perplexity to compare")
    return comparator.missing() or ""


def compare_seeds(
    recipe: Recipe,
    *,
    report_only: bool = False,
    quiet: bool = False,
    title: str = "",
    apart: bool = True,
) -> tuple[list[Outcome], str]:
    """Do the runs that have no result yet; write the report after each. Returns its text too.

    Args:
        recipe: with its `comparison`.
        report_only: report what is there, train and score nothing.
        quiet: no bars and no lines.
        title: of the figure.
        apart: each run in a process of its own. Under torchrun runs share the processes.

    Raises:
        LatteError: for a recipe, text or folder that no run could use.
    """
    from latte.compare.seeds_report import write_report

    runs = runs_of(recipe)
    folder = writable_folder(Path(recipe.output_dir))
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    first = int(os.environ.get("RANK", "0")) == 0
    problems: dict[str, str] = {}  # of the runs of this call

    def outcomes() -> list[Outcome]:
        return [outcome_of(run, recipe.comparison, problems.get(run.label, "")) for run in runs]

    due = [] if report_only else [outcome.run for outcome in outcomes() if _is_due(outcome)]
    if due:
        prepare_text(recipe.data, progress=first and not quiet)
    began = time.perf_counter()
    for number, run in enumerate(due):
        if not _is_due(outcome_of(run, recipe.comparison)):
            continue  # another process has done it in the meantime
        if first and not quiet:
            spent = time.perf_counter() - began
            left = duration(spent / number * (len(due) - number)) if number else "unknown"
            print(_progress(run, outcomes(), left), flush=True)
        problems[run.label] = _do(run, recipe.comparison, quiet, apart and alone)
        if first:
            write_report(folder, outcomes(), recipe, title)
    found = outcomes()
    return found, write_report(folder, found, recipe, title) if first else ""


def outcome_of(run: Run, section: ComparisonSection, problem: str = "") -> Outcome:
    """What a run's folder says. `problem` is what its last attempt ended with.

    Raises:
        LatteError: a damaged file, or the run of another recipe.
    """
    check_same_recipe(run.recipe)
    file = run.folder / MEASURED_FILE
    try:
        if file.exists():
            stored = json.loads(file.read_text(encoding="utf-8"))
            if stored.pop("wanted") == _wanted(run, section):
                measured = Measured(**{**stored, "rows": [Row(**r) for r in stored["rows"]]})
                if all(math.isfinite(row.loss) for row in measured.rows):
                    return Outcome(run, measured)
                return Outcome(run, None, "diverged: the held-out loss is not finite")
        file = run.folder / FAILED_FILE
        if not problem and file.exists():
            problem = json.loads(file.read_text(encoding="utf-8"))["problem"]
    except (ValueError, KeyError, TypeError) as error:
        raise LatteError(f"{file} is damaged ({error}); delete it to do that again") from None
    if problem or run.lacks:
        return Outcome(run, None, problem or f"cannot run here, it needs {run.lacks}")
    if (run.folder / FINISHED_FILE).exists():
        return Outcome(run, None, "trained, not scored yet at these lengths")
    saved = checkpoints(run.folder)
    if saved:
        return Outcome(run, None, f"stopped at step {saved[-1].name.removeprefix('checkpoint-')}")
    return Outcome(run, None, "not run yet")


def _wanted(run: Run, section: ComparisonSection) -> dict[str, Any]:
    lengths = section.lengths or [run.recipe.data.block_length]
    return {"lengths": sorted(set(lengths)), "max_tokens": section.max_tokens}


def _is_due(outcome: Outcome) -> bool:
    """Not what has a result, what would diverge again at the same step, or cannot run here."""
    hopeless = outcome.run.lacks or outcome.problem.startswith("diverged")
    return outcome.measured is None and not hopeless


def _do(run: Run, section: ComparisonSection, quiet: bool, apart: bool) -> str:
    """Train and score one run; returns what went wrong, if something of its own did."""
    try:
        if apart:
            in_fresh_process(train_and_measure, run, section, quiet)
        else:
            train_and_measure(run, section, quiet)
    except FolderInUse:
        return "another process is at it"
    except Diverged as error:
        return _note(run, f"diverged: {error}")
    except (WorkFailed, torch.OutOfMemoryError) as error:
        return _note(run, f"failed: {' '.join(str(error).split())[:300]}")
    return ""


def _note(run: Run, problem: str) -> str:
    """Keep a problem in the run's folder."""
    if run.folder.is_dir():
        write_json(run.folder / FAILED_FILE, {"problem": problem})
    return problem


def train_and_measure(run: Run, section: ComparisonSection, quiet: bool) -> None:
    """One run from start or checkpoint to its measured.json. Raises as `train` does."""
    result = train(run.recipe, label=run.label, quiet=quiet)
    (run.folder / FAILED_FILE).unlink(missing_ok=True)
    if not result.finished:
        return  # by training.max_minutes; it goes on when run again

    def measure() -> None:
        wanted = _wanted(run, section)
        text = prepare_text(run.recipe.data, progress=False)
        gc.collect()
        model, _ = load_checkpoint(run.folder)
        lines = read_metrics(run.folder, "train")
        rows = evaluate_lengths(
            model,
            text.held_out(wanted["max_tokens"]),
            wanted["lengths"],
            bf16=run.recipe.training.bf16,
            progress=not quiet,
            label=run.label,
        )
        measured = Measured(
            parameters=sum(p.numel() for p in model.parameters()),
            steps=result.steps,
            tokens=result.tokens,
            seconds=result.seconds,
            tokens_per_second=statistics.median(x["tokens_per_second"] for x in lines),
            peak_memory_bytes=max(x["peak_memory_bytes"] for x in lines),
            hardware=describe(next(model.parameters()).device),
            rows=rows,
        )
        write_json(run.folder / MEASURED_FILE, {"wanted": wanted, **asdict(measured)})

    first_alone(measure)


def _progress(run: Run, outcomes: Sequence[Outcome], left: str) -> str:
    done = sum(outcome.measured is not None for outcome in outcomes)
    failed = sum(outcome.problem.startswith(("diverged", "failed")) for outcome in outcomes)
    return (
        f"[{done + failed + 1}/{len(outcomes)}] {run.label} | {done} finished, {failed} failed,"
        f" about {left} left"
    )


def list_runs(recipe: Recipe) -> str:
    """For a dry run: each run, its folder and where it stands."""
    lines = []
    for run in runs_of(recipe):
        outcome = outcome_of(run, recipe.comparison)
        state = "finished" if outcome.measured is not None else outcome.problem
        lines.append(f"{run.label}: {run.folder} ({state})")
    steps = recipe.steps()
    tokens = steps * recipe.tokens_per_step()
    number = f"{len(lines)} run{'s' if len(lines) > 1 else ''}"
    lines.append(f"{number} of {steps:,} steps, {tokens:,} tokens each")
    return "\n".join(lines) + "\n"
