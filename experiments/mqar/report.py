"""What an MQAR grid found: accuracy.csv, accuracy.md, and two figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from experiments.grids import accuracies
from experiments.mqar.recipe import MQARRun
from latte.lab.evaluate.plots import canvas, line_style, save
from latte.lab.evaluate.tables import csv_text, table
from latte.lab.train.metrics import duration
from latte.models.atomic_files import write_text

Key = tuple[Any, ...]  # task, model, width, latents
CellKey = tuple[int, int]  # length, pairs

COLUMNS = (
    "task", "model", "preset", "window", "width", "latents", "parameters", "length", "pairs",
    "learning_rate", "seed", "accuracy", "correct", "queries", "stopped", "epochs", "steps",
    "seconds", "device", "threads", "torch", "date",
)  # fmt: skip


def write_report(folder: Path, results: Mapping[MQARRun, dict[str, Any]]) -> str:
    """Write the files into `folder`; returns the Markdown table."""
    write_text(folder / "accuracy.csv", csv_text(COLUMNS, _rows(results)))
    text = markdown(results)
    write_text(folder / "accuracy.md", text)
    if results:
        accuracy_figure(folder / "accuracy.png", results)
        if len({run.latents for run in results} - {None}) > 1:
            latents_figure(folder / "latents.png", results)
    return text


def best(results: Mapping[MQARRun, dict[str, Any]]) -> dict[Key, dict[CellKey, tuple[float, list]]]:
    """By model and size: of each cell the best learning rate and its accuracies, one per seed.

    Best is the highest mean over the seeds, chosen on the test examples for each cell, as in the
    figures of the Zoology paper.
    """
    found: dict[Key, dict[CellKey, dict[float, list[float]]]] = {}
    for run, result in results.items():
        for cell in result["outcome"]["cells"]:
            place = found.setdefault(run.key, {}).setdefault((cell["length"], cell["pairs"]), {})
            place.setdefault(run.learning_rate, []).append(cell["accuracy"])
    return {
        key: {
            cell: max(rates.items(), key=lambda entry: mean(entry[1]))
            for cell, rates in cells.items()
        }
        for key, cells in found.items()
    }


def markdown(results: Mapping[MQARRun, dict[str, Any]]) -> str:
    """A row per model and size, a column per cell: accuracy at the best learning rate."""
    if not results:
        return "No run has a result yet.\n"
    chosen = _merged(best(results))
    cells = sorted({cell for entry in chosen.values() for cell in entry})
    lines = [["model", "width", "latents", *(f"{length:,} / {pairs}" for length, pairs in cells)]]
    for (model, width, latents), entry in chosen.items():
        texts = [accuracies(entry[cell][1]) if cell in entry else "" for cell in cells]
        lines.append([f"`{model}`", str(width), str(latents or "-"), *texts])
    cut = sum(result["outcome"]["stopped"] == "minutes" for result in results.values())
    seconds = sum(result["outcome"]["seconds"] for result in results.values())
    note = f"\nColumns: length / pairs. {len(results)} runs, {duration(seconds)} of training"
    if cut:
        note += f"; {cut} of them cut by their minutes (`stopped` in accuracy.csv)"
    return table(lines) + note + ".\n"


def _merged(chosen: Mapping[Key, dict[CellKey, Any]]) -> dict[Key, dict[CellKey, Any]]:
    """Without the task: the runs of several cells make one line."""
    lines: dict[Key, dict[CellKey, Any]] = {}
    for (_, *rest), entry in chosen.items():
        lines.setdefault(tuple(rest), {}).update(entry)
    return lines


def accuracy_figure(path: Path, results: Mapping[MQARRun, dict[str, Any]]) -> None:
    """Accuracy against the cell, a line per model, a panel per width.

    Of a sweep over latents the largest number is shown.
    """
    chosen = _merged(best(results))
    widths = sorted({width for _, width, _ in chosen})
    models = list(dict.fromkeys(model for model, _, _ in chosen))
    cells = sorted({cell for entry in chosen.values() for cell in entry})
    figure, axes = canvas(len(widths), (max(6.4, 4.0 * len(widths)), 4.2))
    for axis, width in zip(axes, widths, strict=True):
        for index, model in enumerate(models):
            sizes = [key for key in chosen if key[:2] == (model, width)]
            if not sizes:
                continue
            entry = chosen[max(sizes, key=lambda key: key[2] or 0)]
            at = [place for place, cell in enumerate(cells) if cell in entry]
            axis.plot(
                at,
                [mean(entry[cells[place]][1]) for place in at],
                label=model,
                **line_style(index),
            )
        axis.set_xticks(range(len(cells)), [f"{length:,}\n{pairs}" for length, pairs in cells])
        axis.set_xlabel("length, key-value pairs")
        axis.set_ylim(-0.03, 1.03)
        axis.set_title(f"width {width}")
    axes[0].set_ylabel("accuracy of the answers")
    handles = {
        label: handle
        for axis in axes
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), frameon=False, loc="outside right upper",
                  fontsize=8)  # fmt: skip
    save(figure, path)


def latents_figure(path: Path, results: Mapping[MQARRun, dict[str, Any]]) -> None:
    """Accuracy against the number of latents, a line per cell, a panel per model and width."""
    chosen = _merged(best(results))
    numbers: dict[tuple[Any, Any], set[int]] = {}
    for model, width, latents in chosen:
        if latents is not None:
            numbers.setdefault((model, width), set()).add(latents)
    panels = [panel for panel, values in numbers.items() if len(values) > 1]
    if not panels:
        return
    cells = sorted({cell for key, entry in chosen.items() if key[:2] in panels for cell in entry})
    ticks = sorted(set().union(*(numbers[panel] for panel in panels)))
    figure, axes = canvas(len(panels), (max(6.4, 4.0 * len(panels)), 4.2))
    for axis, (model, width) in zip(axes, panels, strict=True):
        for index, cell in enumerate(cells):
            points = [
                (latents, mean(chosen[model, width, latents][cell][1]))
                for latents in sorted(numbers[model, width])
                if cell in chosen[model, width, latents]
            ]
            if points:
                label = f"length {cell[0]:,}, {cell[1]} pairs"
                axis.plot(*zip(*points, strict=True), label=label, **line_style(index))
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.set_xlabel("latents over all heads")
        axis.set_ylim(-0.03, 1.03)
        axis.set_title(f"{model}, width {width}")
    axes[0].set_ylabel("accuracy of the answers")
    axes[0].legend(frameon=False, fontsize=8)
    save(figure, path)


def _rows(results: Mapping[MQARRun, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for run, result in results.items():
        outcome = result["outcome"]
        for cell in outcome["cells"]:
            yield {
                **{k: getattr(run, k) for k in ("task", "model", "preset", "width", "seed")},
                "window": run.config.get("sliding_window", ""),
                "latents": "" if run.latents is None else run.latents,
                "learning_rate": run.learning_rate,
                **{k: outcome[k] for k in ("parameters", "stopped", "steps", "seconds")},
                "epochs": round(outcome["epochs"], 3),
                **{k: result[k] for k in ("device", "threads", "torch", "date")},
                **{k: cell[k] for k in ("length", "pairs", "correct", "queries")},
                "accuracy": round(cell["accuracy"], 6),
            }
