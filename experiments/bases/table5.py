"""The paper's Table 5: the tasks of several models side by side, the paper's numbers below them.

Tasks are lm-evaluation-harness's, run by `latte.lab.evaluate.tasks`, one by one, so that a run can
go on where it was. The paper says "accuracy or normalised accuracy", and not which; here it is
accuracy normalised by length for HellaSwag, ARC-C and PIQA, and plain accuracy for the others. MMLU
is the mean over its subjects, weighted by their items, as the harness has it.

Models answer the same items. So a second table has each model's difference from the first one with
an interval of its own, far narrower than that of the accuracies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import hypot, sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.bases.results import Row, by_model
from latte.lab.compare.intervals import Mean, mean_of
from latte.lab.evaluate.tables import table, write_csv
from latte.lab.evaluate.tasks import evaluate_tasks

KEY = ("task", "metric", "filter")
SETTINGS = ("limit", "num_fewshot", "max_length", "start", "dtype")
# `items` has a 1 for each item that is right and a 0 for each other one.
VALUES = ("value", "stderr", "samples", "shots", "version", "seconds", "items")

# Column: the harness's task (or how its tasks begin), the metric.
COLUMNS = {
    "MMLU": ("mmlu_", "acc"),
    "HellaSwag": ("hellaswag", "acc_norm"),
    "Lambada": ("lambada_openai", "acc"),
    "ARC-C": ("arc_challenge", "acc_norm"),
    "ARC-E": ("arc_easy", "acc"),
    "WinoGrande": ("winogrande", "acc"),
    "PIQA": ("piqa", "acc_norm"),
    "BoolQ": ("boolq", "acc"),
}
# Table 5 as printed, in percent.
PAPER = {
    "Gemma 2 2B (paper)": (53.0, 73.03, 69.8, 53.4, 80.2, 71.4, 79.1, 73.61),
    "Gemma-Macchiato 2B (paper)": (46.8, 73.11, 68.29, 52.9, 76.9, 70.6, 78.7, 71.48),
    "Mamba 3B (paper)": (26.2, 71.0, None, 41.7, 68.2, 65.9, 78.1, 71.0),
    "GLA 1.3B (paper)": (None, 49.8, 46.9, 26.6, 57.2, 53.9, 71.8, None),
}
SUMMARY = ("model", "column", "metric", "value", "stderr", "samples", "seeds")


def one_by_one(tasks: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, what `evaluate_tasks` takes) of each of the harness's tasks, without their groups."""
    for name, task in tasks["tasks"].items():
        yield name, {"tasks": {name: task}, "groups": {}, "group_map": {}}


def score_task(model: Any, tokenizer: Any, task: dict[str, Any], **options: Any) -> list[Row]:
    """A task's metrics, by the columns of `KEY` and `VALUES`."""
    scores = evaluate_tasks(model, tokenizer, task, **options)
    seconds = scores.record["seconds"]
    return [
        {
            "task": row.task,
            "metric": row.metric,
            "filter": row.filter,
            "value": row.value,
            "stderr": row.stderr,
            "samples": row.samples,
            "shots": row.num_fewshot,
            "version": row.version,
            "seconds": seconds,
            "items": right(scores.items.get((row.task, row.metric, row.filter), [])),
        }
        for row in scores.rows
    ]


def right(values: Sequence[float]) -> str:
    """Items that are right or wrong, as a 1 or 0 each; nothing for other metrics."""
    return "".join(f"{value:.0f}" for value in values) if {*values} <= {0.0, 1.0} else ""


def rows_of(rows: Sequence[Row], column: str) -> list[Row]:
    """A model's rows of one column. A seed that has not done all its tasks says nothing yet."""
    start, metric = COLUMNS[column]
    here = [
        row
        for row in rows
        if row["metric"] == metric
        and row["filter"] == "none"
        and (row["task"].startswith(start) if start.endswith("_") else row["task"] == start)
    ]
    tasks = {row["task"] for row in here}
    done = {
        seed
        for seed in {row["seed"] for row in here}
        if {row["task"] for row in here if row["seed"] == seed} == tasks
    }
    return [row for row in here if row["seed"] in done]


def cell(rows: Sequence[Row], column: str) -> Row | None:
    """A model's accuracy in one column, its standard error and items; over seeds their mean.

    The standard error is of the items: that of several seeds is not smaller, since they answer the
    same items.
    """
    here = rows_of(rows, column)
    if not here:
        return None
    seeds = len({row["seed"] for row in here})
    weights = [int(row["samples"]) for row in here]
    total = sum(weights)
    value = sum(n * float(row["value"]) for n, row in zip(weights, here, strict=True)) / total
    squares = [
        (n * float(row["stderr"] or "nan")) ** 2 for n, row in zip(weights, here, strict=True)
    ]
    stderr = sqrt(sum(squares) * seeds) / total
    return {
        "column": column,
        "metric": COLUMNS[column][1],
        "value": value,
        "stderr": stderr,
        "samples": total // seeds,
        "seeds": seeds,
    }


def difference(rows: Sequence[Row], reference: Sequence[Row], column: str) -> Mean | None:
    """A model's accuracy minus another's, with the 95% interval over the items that both answered.

    Over seeds an item counts as often as it is right in the mean.
    """

    def shares(rows: Sequence[Row]) -> dict[tuple[str, int], float]:
        found: dict[tuple[str, int], list[int]] = defaultdict(list)
        for row in rows_of(rows, column):
            for place, mark in enumerate(row["items"]):
                found[row["task"], place].append(int(mark))
        return {item: fmean(marks) for item, marks in found.items()}

    own, other = shares(rows), shares(reference)
    common = own.keys() & other.keys()
    return mean_of([own[item] - other[item] for item in common]) if common else None


def differences(models: dict[str, list[Row]], columns: Sequence[str]) -> str:
    """The table of each model's differences from the first one; nothing of one model."""
    (reference, *others), lines = models, [["model", *columns, "mean"]]
    for model in others:
        found = [difference(models[model], models[reference], name) for name in columns]
        there = [each for each in found if each and each.half_width is not None]
        if len(there) == len(columns):
            half = hypot(*(each.half_width or 0 for each in there)) / len(there)
            found.append(Mean(fmean(each.value for each in there), half, len(there)))
        else:
            found.append(None)
        lines.append([model, *(points(each) for each in found)])
    head = f"\nDifference from {reference} on the same items, in points, with its 95% interval.\n\n"
    return head + table(lines) if others else ""


def points(part: Mean | None) -> str:
    if part is None:
        return "-"
    half = None if part.half_width is None else 100 * part.half_width
    return Mean(100 * part.value, half, part.count).text("+.1f")


def report(folder: Path, rows: Sequence[Row], *, order: Sequence[str]) -> str:
    """Write table5.md and table5.csv; returns the Markdown."""
    models = by_model(rows, order)
    found = {model: {name: cell(own, name) for name in COLUMNS} for model, own in models.items()}
    summary = [{"model": m, **c} for m, own in found.items() for c in own.values() if c]
    write_csv(folder / "table5.csv", SUMMARY, summary)
    columns = [name for name in COLUMNS if any(own[name] for own in found.values())]
    lines = [["model", *columns, "mean"]]
    for model, own in found.items():
        cells = [own[name] for name in columns]
        shown = [f"{100 * c['value']:.1f} ({100 * c['stderr']:.1f})" if c else "-" for c in cells]
        lines.append([model, *shown, mean([100 * c["value"] if c else None for c in cells])])
    places = [list(COLUMNS).index(name) for name in columns]
    for model, values in PAPER.items():
        chosen = [values[place] for place in places]
        shown = ["-" if value is None else f"{value:.1f}" for value in chosen]
        lines.append([model, *shown, mean(chosen)])
    counts = sorted(
        {f"{name} {c['samples']:,}" for own in found.values() for name, c in own.items() if c}
    )
    text = (
        "Accuracy in percent, in brackets its standard error over the items.\n\n"
        + table(lines)
        + f"\nItems: {', '.join(counts)}. Normalised by length: "
        + ", ".join(name for name in columns if COLUMNS[name][1] == "acc_norm")
        + ".\n"
        + differences(models, columns)
    )
    (folder / "table5.md").write_text(text, encoding="utf-8")
    return text


def mean(values: Sequence[float | None]) -> str:
    """The mean over tasks; none where one is missing."""
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.1f}" if known and len(known) == len(values) else "-"
