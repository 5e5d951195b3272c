"""What the runs found: runs.csv, a row for each, and runs.md, a row for each model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.ingredients.recipe import IngredientsRecipe
from latte.lab.compare.grid import RunStatus
from latte.lab.compare.intervals import Mean, mean_of
from latte.lab.evaluate.tables import csv_text, table
from latte.models.atomic_files import write_text

COMMIT_FILE = "commit.json"  # of a run's folder: the code that finished it
COLUMNS = (
    "model", "preset", "fields", "parameters", "rate", "seed", "problem", "steps", "tokens",
    "seconds", "tokens_per_second", "device", "threads", "torch", "date", "commit",
)  # fmt: skip
Losses = dict[str, dict[float, dict[int, float]]]  # by model, rate and seed


def write_report(recipe: IngredientsRecipe, statuses: Sequence[RunStatus]) -> str:
    """Write the files into the recipe's `output_dir`; returns the Markdown table."""
    folder = Path(recipe.output_dir)
    lengths = recipe.lengths or [recipe.data.block_length]
    columns = [*COLUMNS[:7], *(f"loss_at_{length}" for length in lengths), *COLUMNS[7:]]
    write_text(folder / "runs.csv", csv_text(columns, [row(status) for status in statuses]))
    text = markdown(recipe, statuses)
    write_text(folder / "runs.md", text)
    return text


def row(status: RunStatus) -> dict[str, Any]:
    """A run's row: what it is, and its losses in nats per token or its problem."""
    run, found = status.run, status.result
    own = run.recipe.model.overrides
    cells: dict[str, Any] = {
        "model": run.preset,
        "preset": run.recipe.model.preset,
        "fields": " ".join(f"{key}={value}".replace(" ", "") for key, value in own.items()),
        "rate": run.rate,
        "seed": run.seed,
        "problem": status.problem,
    }
    if found is None:
        return cells
    cells |= {key: getattr(found, key) for key in ("parameters", "steps", "tokens", "seconds")}
    cells["tokens_per_second"] = round(found.tokens_per_second, 1)
    cells |= {f"loss_at_{each.length}": each.loss for each in found.rows}
    return cells | found.hardware | {"commit": _commit(run.folder)}


def _commit(folder: Path) -> str:
    file = folder / COMMIT_FILE
    return json.loads(file.read_text(encoding="utf-8"))["commit"] if file.exists() else ""


def markdown(recipe: IngredientsRecipe, statuses: Sequence[RunStatus]) -> str:
    """A row per model, at its best rate: the lowest mean of the seeds that all its rates have."""
    finished = [status for status in statuses if status.result is not None]
    if not finished:
        return "No run has a result yet.\n"
    length, *others = recipe.lengths or [recipe.data.block_length]
    losses, further = losses_at(finished, length), [losses_at(finished, x) for x in others]
    size = {status.run.preset: status.result.parameters for status in finished}
    rates = {name: best_rate(by_rate) for name, by_rate in losses.items()}
    head = ["model", "parameters", "rate", "rates tried", f"loss at {length}", "by seed"]
    head += [f"at {other}" for other in others]
    if recipe.baseline:
        head.append(f"minus `{recipe.baseline}`, paired")
    lines = [head]
    for name in sorted(losses, key=lambda name: fmean(losses[name][rates[name]].values())):
        rate = rates[name]
        by_seed = dict(sorted(losses[name][rate].items()))
        line = [f"`{name}`", f"{size[name]:,}", f"{rate:g}"]
        line += [", ".join(f"{each:g}" for each in sorted(losses[name]))]
        line += [mean_of(list(by_seed.values())).text(".4f")]
        line += [", ".join(f"{loss:.4f}" for loss in by_seed.values())]
        line += [mean_of(list(other[name][rate].values())).text(".4f") for other in further]
        if recipe.baseline:
            other = losses.get(recipe.baseline, {}).get(rates.get(recipe.baseline, 0.0), {})
            line.append(difference(by_seed, other) if name != recipe.baseline else "")
        lines.append(line)
    steps = sorted({status.result.steps for status in finished})
    count = f"{len(finished)} run{'s' if len(finished) > 1 else ''}"
    return table(lines) + f"\n{count} of {' or '.join(f'{n:,}' for n in steps)} steps.\n"


def losses_at(finished: Sequence[RunStatus], length: int) -> Losses:
    """The losses of all runs at one context length."""
    found: Losses = {}
    for status in finished:
        for each in status.result.rows:
            if each.length == length:
                by_rate = found.setdefault(status.run.preset, {})
                by_rate.setdefault(status.run.rate, {})[status.run.seed] = each.loss
    return found


def best_rate(by_rate: dict[float, dict[int, float]]) -> float:
    """The rate with the lowest mean loss over the seeds that all rates have.

    Without such a seed it is the lowest mean of each rate's own seeds.
    """
    common = set.intersection(*(set(by_seed) for by_seed in by_rate.values()))
    return min(
        by_rate,
        key=lambda rate: fmean(
            loss for seed, loss in by_rate[rate].items() if seed in common or not common
        ),
    )


def difference(ours: dict[int, float], theirs: dict[int, float]) -> str:
    """Ours minus theirs over the seeds that both have, with its interval from two on."""
    seeds = sorted(set(ours) & set(theirs))
    if not seeds:
        return ""
    found: Mean = mean_of([ours[seed] - theirs[seed] for seed in seeds])
    return found.text("+.4f")
