"""Retrieval by length and depth: gain in nats by having been told, and exact passkeys.

* `retrieval`: the secret word of somebody, said at a depth of a long text (`experiments.probes`).
* `facts`: the same, read less: `experiments.bases.facts`.
* `passkey`: a number hidden in it, asked for in the chat's form (`experiments.bases.passkey`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.bases.facts import fact_texts, score_facts
from experiments.bases.passkey import Frame, make_frame, passkey_case, score_passkeys
from experiments.bases.reading import TextFiles
from experiments.bases.results import Row, by_model
from experiments.probes.questions import Material, make_material
from experiments.probes.scores import Scores, mean_and_error, run_probes
from latte.lab.evaluate.plots import canvas, line_style, save
from latte.lab.evaluate.tables import table

PROBES = ("retrieval", "facts", "passkey")
KEY = ("probe", "length", "depth", "metric")
SETTINGS = ("digest", "start", "dtype", "cases", "probe_seed", "chat")
VALUES = ("value", "stderr")
# Of each probe what its table shows: metric, title, and how a value is written.
SHOWN = {
    "retrieval": (
        ("gain", "Retrieval: nats a token that having been told saves", ".2f"),
        ("exact", "Retrieval: the greedy answer is the word (share)", ".2f"),
    ),
    "facts": (
        ("gain", "Facts: nats a token that having been told saves", ".2f"),
        ("exact", "Facts: the greedy answer is the word (share)", ".2f"),
    ),
    "passkey": (("exact", "Passkey: the greedy answer is the number (share)", ".2f"),),
}


def material_of(corpus: TextFiles, tokenizer: Any, start: int, most: int) -> Material:
    """What questions are hidden in: the corpus's first texts, `most` tokens of them together."""
    found, count = [], 0
    for _, ids in corpus.texts(tokenizer, start, most):
        found.append(ids)
        count += len(ids)
        if count >= most:
            break
    return replace(make_material(tokenizer, np.concatenate(found)), start=start)


def ask(
    model: Any,
    tokenizer: Any,
    material: Material,
    probe: str,
    length: int,
    depths: Sequence[float],
    *,
    cases: int,
    seed: int,
    segment: int,
    batch_tokens: int,
    chat: bool | None,
) -> list[Row]:
    """The metrics of one length, by the columns of `KEY` and `VALUES`."""
    if probe == "retrieval":
        options: dict[str, Any] = {"depths": depths, "cases": cases, "seed": seed}
        options |= {"segment": segment, "batch_tokens": batch_tokens, "progress": False}
        rows = run_probes(model, material, ["retrieval"], [length], **options)
        found = {
            (row.depth, row.metric): (row.value, row.stderr)
            for row in rows
            if row.depth is not None
        }
    else:
        frame = make_frame(tokenizer, material.start, chat=chat)
        sizes: dict[str, Any] = {"length": length, "depths": depths}
        asked = (
            all_facts(model, material, seed, cases, segment, **sizes)
            if probe == "facts"
            else all_passkeys(
                model, tokenizer, material, frame, seed, cases, segment, batch_tokens, **sizes
            )
        )
        scores: dict[tuple[float, str], list[float]] = {}
        with torch.no_grad():
            for depth, metrics in asked:
                for metric, values in metrics.items():
                    scores.setdefault((depth, metric), []).extend(values)
        found = {cell: mean_and_error(values[:cases]) for cell, values in scores.items()}
    return [
        {"probe": probe, "length": length, "depth": f"{depth:g}", "metric": metric}
        | {"value": value, "stderr": stderr}
        for (depth, metric), (value, stderr) in found.items()
    ]


def all_facts(
    model: Any, material: Material, seed: int, cases: int, segment: int, **sizes: Any
) -> Iterator[tuple[float, Scores]]:
    """Scores by depth, two cases of each at a time."""
    for index in range(-(-cases // 2)):
        pair = fact_texts(material, seed, index, **sizes)
        yield from score_facts(model, pair, segment).items()


def all_passkeys(
    model: Any,
    tokenizer: Any,
    material: Material,
    frame: Frame,
    seed: int,
    cases: int,
    segment: int,
    batch_tokens: int,
    *,
    length: int,
    depths: Sequence[float],
) -> Iterator[tuple[float, Scores]]:
    """Scores by depth, some cases at a time."""
    size = max(1, batch_tokens // length)
    for depth in depths:
        for first in range(0, cases, size):
            batch = [
                passkey_case(tokenizer, material, frame, seed, i, length=length, depth=depth)
                for i in range(first, min(first + size, cases))
            ]
            yield depth, score_passkeys(model, batch, segment)


def report(folder: Path, rows: Sequence[Row], *, order: Sequence[str]) -> str:
    """Write retrieval.md and retrieval.png; returns the Markdown.

    Over depths and seeds a value is the mean, and its standard error that of independent cases.
    """
    parts, curves = [], {}
    for probe, metrics in SHOWN.items():
        for metric, title, form in metrics:
            here = [r for r in rows if r["probe"] == probe and r["metric"] == metric]
            if not here:
                continue
            found = {model: by_length(own) for model, own in by_model(here, order).items()}
            curves[title] = found
            lengths = sorted({length for own in found.values() for length in own})
            lines = [["model", *(f"{length:,}" for length in lengths)]]
            for model, own in found.items():
                cells = (own.get(length) for length in lengths)
                lines.append([model, *(written(cell, form) for cell in cells)])
            parts += [f"{title}:\n\n{table(lines)}", depths_table(here, order, form)]
    text = "\n".join(parts)
    (folder / "retrieval.md").write_text(text, encoding="utf-8")
    if curves:
        figure(folder / "retrieval.png", curves)
    return text


def by_length(rows: Sequence[Row]) -> dict[int, tuple[float, float | None]]:
    """Length -> (mean over depths and seeds, its standard error)."""
    found = {}
    for length in sorted({int(row["length"]) for row in rows}):
        here = [row for row in rows if int(row["length"]) == length]
        mean = sum(float(row["value"]) for row in here) / len(here)
        errors = [float(row["stderr"]) for row in here if row["stderr"]]
        whole = len(errors) == len(here)
        error = sum(error**2 for error in errors) ** 0.5 / len(here) if whole else None
        found[length] = (mean, error)
    return found


def depths_table(rows: Sequence[Row], order: Sequence[str], form: str) -> str:
    """A line per model and length, a column per depth."""
    depths = sorted({float(row["depth"]) for row in rows})
    lines = [["model", "length", *(f"depth {depth:g}" for depth in depths)]]
    for model, own in by_model(rows, order).items():
        for length in sorted({int(row["length"]) for row in own}):
            cells = []
            for depth in depths:
                at = [r for r in own if int(r["length"]) == length and float(r["depth"]) == depth]
                mean = by_length(at).get(length)
                cells.append("-" if mean is None else format(mean[0], form))
            lines.append([model, f"{length:,}", *cells])
    return "By depth (0 is the start):\n\n" + table(lines)


def written(cell: tuple[float, float | None] | None, form: str) -> str:
    """A mean and its standard error."""
    if cell is None:
        return "-"
    value, error = cell
    return format(value, form) + ("" if error is None else f" ({error:{form}})")


def figure(path: Path, curves: dict[str, dict[str, dict[int, tuple[float, float | None]]]]) -> None:
    """A panel for each metric: its mean over depths by length, a line a model."""
    canvas_, axes = canvas(len(curves), (5.2 * len(curves), 4.2))
    for axis, (title, found) in zip(axes, curves.items(), strict=True):
        lengths = sorted({length for own in found.values() for length in own})
        for index, (model, own) in enumerate(found.items()):
            values, errors = zip(*own.values(), strict=True)
            bars = [error or 0.0 for error in errors]
            axis.errorbar(list(own), values, yerr=bars, capsize=2, label=model, **line_style(index))
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axis.minorticks_off()
        axis.set_xlabel("context length (tokens)")
        axis.set_title(title, fontsize=9)
    axes[0].legend(frameon=False, fontsize=8)
    save(canvas_, path)
