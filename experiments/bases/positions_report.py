"""Tables and a figure of `positions.csv`: see `experiments.bases.positions`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import exp, isfinite, sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.bases.paired import difference, won_back
from experiments.bases.results import Row, by_model
from latte.lab.compare.intervals import Mean, mean_of
from latte.lab.evaluate.plots import canvas, line_style, save
from latte.lab.evaluate.tables import table, write_csv

Cell = tuple[int, int]  # positions from (excluded) and to (included); of contexts (0, context)
Cells = dict[Cell, dict[str, float]]  # cell -> text -> nats a token
Found = dict[str, Cells]  # by model

SUMMARY = (
    *("corpus", "kind", "model", "from", "to", "texts", "loss", "loss_half_width", "perplexity"),
    *("seeds", "seeds_half_width"),
    *("minus_base", "minus_base_half_width", "won_back", "won_back_half_width"),
)
NAMES = {
    "position": "by position in the text",
    "whole": "from the start of the text to",
    "context": "the same tokens, with so many before them",
}


def by_seed(rows: Sequence[Row], kind: str) -> dict[str, dict[str, Cells]]:
    """Model -> seed -> cell -> text -> nats a token, of one corpus and kind.

    `whole` are the parts by position put together, from the start of the text on.
    """
    stored = "position" if kind == "whole" else kind
    found: dict[str, dict[str, Cells]] = {}
    for row in rows:
        if row["kind"] != stored:
            continue
        first, last, context = (row[name] for name in ("first", "last", "context"))
        cell = (0, int(context)) if kind == "context" else (int(first), int(last))
        cells = found.setdefault(row["model"], {}).setdefault(row["seed"], {})
        cells.setdefault(cell, {})[row["text"]] = float(row["loss"])
    if kind != "whole":
        return found
    return {m: {s: cumulated(cells) for s, cells in own.items()} for m, own in found.items()}


def over_seeds(seeds: Mapping[str, Cells]) -> Cells:
    """Of every text that all seeds have the mean over them."""
    first, *others = seeds.values()
    found: Cells = {}
    for cell, texts in sorted(first.items()):
        shared = [text for text in texts if all(text in other.get(cell, {}) for other in others)]
        if shared:
            each = [own[cell] for own in seeds.values()]
            found[cell] = {text: fmean(losses[text] for losses in each) for text in shared}
    return found


def between_seeds(seeds: Mapping[str, Cells], cell: Cell) -> Mean | None:
    """The mean over texts of each of several conversions: their mean, with its interval."""
    if len(seeds) < 2 or not all(cell in own for own in seeds.values()):
        return None
    return mean_of([fmean(own[cell].values()) for own in seeds.values()])


def cumulated(cells: Cells) -> Cells:
    """From the start of a text to each edge."""
    found: Cells = {}
    sums: dict[str, float] = {}
    for (first, last), texts in sorted(cells.items()):
        before = sums if first else dict.fromkeys(texts, 0.0)
        sums = {
            text: before[text] + (last - first) * loss
            for text, loss in texts.items()
            if text in before
        }
        found[0, last] = {text: total / last for text, total in sums.items()}
    return found


def report(
    folder: Path,
    rows: Sequence[Row],
    *,
    base: str | None,
    control: str | None,
    order: Sequence[str],
) -> str:
    """Write positions.md, positions-summary.csv and positions.png; returns the Markdown.

    Args:
        base: the model that others are compared with; None: the first.
        control: of the distance to the base, the share that a model wins back is in the table.
    """
    models = list(by_model(rows, order))
    base = base or models[0]
    summary: list[Row] = []
    parts = []
    curves: dict[str, Found] = {}
    for corpus in dict.fromkeys(row["corpus"] for row in rows):
        here = [row for row in rows if row["corpus"] == corpus]
        for kind in ("position", "whole", "context"):
            seeds = by_seed(here, kind)
            found = {model: over_seeds(seeds[model]) for model in models if model in seeds}
            if not found:
                continue
            if kind == "position":
                curves[corpus] = found
            for row in summarised(found, seeds, base, control):
                summary.append({"corpus": corpus, "kind": kind, **row})
            parts.append(f"### {corpus}, {NAMES[kind]}\n")
            parts += tables(kind, found, seeds, base, control)
    text = "\n".join(parts)
    (folder / "positions.md").write_text(text, encoding="utf-8")
    write_csv(folder / "positions-summary.csv", SUMMARY, summary)
    if curves:
        figure(folder / "positions.png", curves)
    return text


def summarised(
    found: Found, seeds: Mapping[str, Mapping[str, Cells]], base: str, control: str | None
) -> Iterator[Row]:
    """The rows of positions-summary.csv of one corpus and kind."""
    for model, cells in found.items():
        for cell, texts in cells.items():
            mean, spread = mean_of(list(texts.values())), between_seeds(seeds[model], cell)
            row: Row = {"model": model, "from": cell[0] + 1, "to": cell[1], "texts": mean.count}
            row |= {"loss": mean.value, "loss_half_width": mean.half_width}
            row |= {"perplexity": exp(mean.value), "seeds": len(seeds[model])}
            row |= {"seeds_half_width": None if spread is None else spread.half_width}
            for name, other in compared(found, model, cell, base, control):
                row |= {name: other.value, f"{name}_half_width": other.half_width}
            yield row


def compared(
    found: Found, model: str, cell: Cell, base: str, control: str | None
) -> list[tuple[str, Mean]]:
    """(column, what it says) of a model beside the base and the control, where both have a cell."""
    texts, reference = found[model][cell], found.get(base, {}).get(cell)
    means: list[tuple[str, Mean | None]] = []
    if reference is not None and model != base:
        means.append(("minus_base", difference(texts, reference)))
        other = found.get(control or "", {}).get(cell)
        if other is not None and model != control:
            means.append(("won_back", won_back(texts, other, reference)))
    return [(name, mean) for name, mean in means if mean is not None]


def tables(
    kind: str,
    found: Found,
    seeds: Mapping[str, Mapping[str, Cells]],
    base: str,
    control: str | None,
) -> list[str]:
    """Perplexity, nats with intervals, and both comparisons, where there are any."""
    cells = sorted({cell for own in found.values() for cell in own})
    most = max(len(own[cell]) for own in found.values() for cell in own)
    heads = [heading(kind, cell, found, most) for cell in cells]

    def lines(say: Callable[[str, Cell], str]) -> str:
        shown = [[m, *(say(m, c) if c in found[m] else "-" for c in cells)] for m in found]
        kept = [line for line in shown if any(x != "-" for x in line[1:])]
        return table([["model", *heads], *kept]) if kept else ""

    def comparing(column: str, form: str, scale: float) -> Callable[[str, Cell], str]:
        def say(model: str, cell: Cell) -> str:
            means = dict(compared(found, model, cell, base, control))
            return scaled(means[column], scale).text(form) if column in means else "-"

        return say

    def farther(model: str, cell: Cell) -> str:
        own, nearest = found[model], cells[0]
        means = difference(own[cell], own[nearest]) if cell != nearest and nearest in own else None
        return "-" if means is None else means.text("+.4f")

    def spread(model: str, cell: Cell) -> str:
        means = between_seeds(seeds[model], cell)
        return "-" if means is None else means.text(".4f")

    mean = {m: {c: mean_of(list(own[c].values())) for c in own} for m, own in found.items()}
    parts = [
        ("Perplexity:", lines(lambda m, c: f"{exp(mean[m][c].value):.4g}")),
        (
            "Nats a token, with 95% intervals over texts:",
            lines(lambda m, c: mean[m][c].text(".3f")),
        ),
        (
            f"Nats a token more than {base!r}, on the same texts:",
            lines(comparing("minus_base", "+.4f", 1)),
        ),
        (
            f"Of the distance from {control!r} to {base!r}, won back (%):",
            lines(comparing("won_back", ".0f", 100)),
        ),
        ("Nats a token, with 95% intervals over conversions (seeds):", lines(spread)),
    ]
    if kind == "context":
        title = (
            f"Nats a token more than with {cells[0][1]:,} tokens before them, on the same texts:"
        )
        parts.insert(2, (title, lines(farther)))
    return [f"{title}\n\n{text}" for title, text in parts if text]


def heading(kind: str, cell: Cell, found: Found, most: int) -> str:
    """A column's head; the number of texts where not all have so many tokens."""
    first, last = cell
    count = max(len(own[cell]) for own in found.values() if cell in own)
    name = f"{first + 1:,} to {last:,}" if kind == "position" else f"{last:,}"
    return name if count == most else f"{name} ({count} of {most} texts)"


def scaled(mean: Mean, scale: float) -> Mean:
    half = None if mean.half_width is None else scale * mean.half_width
    return Mean(scale * mean.value, half, mean.count)


def figure(path: Path, curves: Mapping[str, Found]) -> None:
    """Perplexity over the position in the text, a panel a corpus and a line a model.

    The axis ends above four times the lowest perplexity: a base that has left its range leaves it.
    """
    canvas_, axes = canvas(len(curves), (6.4 * len(curves), 4.4))
    for axis, (corpus, found) in zip(axes, curves.items(), strict=True):
        values, ends = [], set()
        for index, (model, cells) in enumerate(found.items()):
            points = [exp(mean_of(list(texts.values())).value) for texts in cells.values()]
            axis.plot([middle(cell) for cell in cells], points, label=model, **line_style(index))
            values += [point for point in points if isfinite(point)]
            ends |= {last for _, last in cells}
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_ylim(0.95 * min(values), min(1.1 * max(values), 4 * min(values)))
        axis.set_xticks(sorted(ends), [f"{end:,}" for end in sorted(ends)])
        axis.yaxis.set_major_formatter(plain)
        axis.yaxis.set_minor_formatter(plain)
        axis.xaxis.minorticks_off()
        axis.set_xlabel("position in the text (tokens)")
        axis.set_ylabel("perplexity")
        axis.set_title(corpus)
    axes[0].legend(frameon=False, fontsize=8)
    save(canvas_, path)


def middle(cell: Cell) -> float:
    """Where a part stands on a logarithmic axis."""
    first, last = cell
    return sqrt(first * last) if first else last / 2


def plain(value: float, _: Any) -> str:
    return f"{value:g}"
