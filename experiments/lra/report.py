"""What a Long Range Arena recipe found: accuracy.csv, accuracy.md and the curves' figure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from experiments.grids import accuracies
from latte.lab.evaluate.plots import canvas, line_style, note_on_line, save
from latte.lab.evaluate.tables import csv_text, table
from latte.lab.train.metrics import duration
from latte.models.atomic_files import write_text

COLUMNS = (
    "task", "model", "preset", "seed", "parameters", "test_accuracy", "test_correct",
    "test_examples", "majority_rate", "validation_accuracy", "best_step", "steps", "epochs",
    "stopped", "seconds", "device", "threads", "torch", "date",
)  # fmt: skip


def write_report(folder: Path, results: Sequence[Mapping[str, Any]]) -> str:
    """Write the files into `folder`; returns the Markdown table. `results`: see `LRASweep.do`.

    The files are written anew from all results there are.
    """
    write_text(folder / "accuracy.csv", csv_text(COLUMNS, _rows(results)))
    text = markdown(results)
    write_text(folder / "accuracy.md", text)
    if results:
        curves_figure(folder / "curves.png", results)
    return text


def markdown(results: Sequence[Mapping[str, Any]]) -> str:
    """A row per model, its seeds' mean with an interval; and what the most frequent class gives."""
    if not results:
        return "No run has a result yet.\n"
    lines = [["model", "parameters", "test accuracy", "validation accuracy", "training"]]
    for model, found in _by_model(results).items():
        outcomes = [result["outcome"] for result in found]
        lines.append(
            [
                f"`{model}`",
                f"{outcomes[0]['parameters'] / 1e6:.2f}M",
                accuracies([outcome["test"]["accuracy"] for outcome in outcomes]),
                accuracies([outcome["validation"]["accuracy"] for outcome in outcomes]),
                duration(mean(outcome["seconds"] for outcome in outcomes)),
            ]
        )
    rates = results[0]["balance"]
    shown = [f"{rates[split]['majority_rate']:.4f}" for split in ("test", "validation")]
    lines.append(["most frequent class", "", *shown, ""])
    first = results[0]
    examples = ", ".join(f"{sum(b['counts']):,} {split}" for split, b in rates.items())
    note = f"\nTask {first['task']}: {examples} examples. {len(results)} runs"
    cut = [r for r in results if r["outcome"]["stopped"] != "steps"]
    if cut:
        note += f", {len(cut)} of them ended early (`stopped` in accuracy.csv)"
    return table(lines) + note + f"; {first['device']}, {first['threads']} threads.\n"


def curves_figure(path: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Validation accuracy against step and time; a line per run, a colour per model."""
    figure, axes = canvas(2, (11.0, 4.3))
    for index, (model, found) in enumerate(_by_model(results).items()):
        for place, result in enumerate(found):
            curve = result["outcome"]["curve"]
            accuracy = [point["validation_accuracy"] for point in curve]
            label = model if place == 0 else None
            for axis, xs in (
                (axes[0], [point["step"] for point in curve]),
                (axes[1], [point["seconds"] / 60 for point in curve]),
            ):
                axis.plot(xs, accuracy, label=label, **line_style(index) | {"markersize": 3})
    rate = results[0]["balance"]["validation"]["majority_rate"]
    for axis, name in zip(axes, ("step", "minutes"), strict=True):
        axis.axhline(rate, color="#777777", linewidth=1, linestyle=(0, (4, 3)))
        axis.set_xlabel(name)
    note_on_line(axes[0], rate, "most frequent class")
    axes[0].set_ylabel("validation accuracy")
    axes[0].set_title(results[0]["task"])
    figure.legend(*axes[1].get_legend_handles_labels(), frameon=False, loc="outside right upper",
                  fontsize=8)  # fmt: skip
    save(figure, path)


def _by_model(results: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        found.setdefault(result["model"], []).append(result)
    return found


def _rows(results: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for result in results:
        outcome = result["outcome"]
        keys = ("parameters", "best_step", "steps", "stopped", "seconds")
        yield {
            **{k: result[k] for k in ("task", "model", "seed")},
            "preset": result["run"]["preset"],
            **{k: outcome[k] for k in keys},
            "epochs": round(outcome["epochs"], 3),
            "test_accuracy": round(outcome["test"]["accuracy"], 6),
            "test_correct": outcome["test"]["correct"],
            "test_examples": outcome["test"]["examples"],
            "validation_accuracy": round(outcome["validation"]["accuracy"], 6),
            "majority_rate": round(result["balance"]["test"]["majority_rate"], 6),
            **{k: result[k] for k in ("device", "threads", "torch", "date")},
        }
