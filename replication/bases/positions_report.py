"""Tables and a figure of `positions.csv`: see `replication.bases.positions`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import exp, isfinite, sqrt
from pathlib import Path
from typing import Any

from latte.compare.intervals import Mean, mean_of
from latte.evaluate.plots import canvas, line_style, save
from latte.evaluate.tables import table, write_csv
from replication.bases.results import Row, by_model
from replication.bases.statistics import Losses, difference, over_seeds, won_back

Cell = tuple[int, int]  # positions from (excluded) and to (included); of contexts (0, context)
Found = dict[str, dict[Cell, dict[str, float]]]  # model -> cell -> text -> nats a token

SUMMARY = (
    *("corpus", "kind", "model", "from", "to", "texts", "loss", "loss_half_width", "perplexity"),
    *("minus_base", "minus_base_half_width", "won_back", "won_back_half_width"),
)
NAMES = {"position": "by position", "whole": "from the start", "context": "by context"}


def losses(rows: Sequence[Row], kind: str) -> Found:
    """The losses of one corpus and kind; over several seeds of a model their mean.

    `whole` are the parts by position put together, from the start of the text on.
    """
    stored = "position" if kind == "whole" else kind
    found: Found = {}
    for model, own in by_model(row for row in rows if row["kind"] == stored).items():
        seeds: dict[Cell, dict[str, dict[str, float]]] = {}
        for row in own:
            cell = (0, int(row["context"])) if kind == "context" else span(row)
            texts = seeds.setdefault(cell, {}).setdefault(row["seed"], {})
            texts[row["text"]] = float(row["loss"])
        cells = {cell: over_seeds(by_seed) for cell, by_seed in sorted(seeds.items())}
        found[model] = cumulated(cells) if kind == "whole" else cells
    return found


def span(row: Row) -> Cell:
    return int(row["first"]), int(row["last"])


def cumulated(cells: Mapping[Cell, Losses]) -> dict[Cell, dict[str, float]]:
    """From the start of a text to each edge."""
    found: dict[Cell, dict[str, float]] = {}
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
            found = losses(here, kind)
            found = {model: found[model] for model in models if model in found}
            if not found:
                continue
            if kind == "position":
                curves[corpus] = found
            summary += summarised(corpus, kind, found, base, control)
            parts += [f"### {corpus}, {NAMES[kind]}\n", *tables(kind, found, base, control)]
    text = "\n".join(parts)
    (folder / "positions.md").write_text(text, encoding="utf-8")
    write_csv(folder / "positions-summary.csv", SUMMARY, summary)
    if curves:
        figure(folder / "positions.png", curves)
    return text


def summarised(corpus: str, kind: str, found: Found, base: str, control: str | None) -> list[Row]:
    rows = []
    for model, cells in found.items():
        for cell, texts in cells.items():
            mean = mean_of(list(texts.values()))
            row: Row = {"corpus": corpus, "kind": kind, "model": model}
            row |= {"from": cell[0] + 1, "to": cell[1], "texts": mean.count}
            row |= {"loss": mean.value, "loss_half_width": mean.half_width}
            row |= {"perplexity": exp(mean.value)}
            for name, other in compared(found, model, cell, base, control):
                row |= {name: other.value, f"{name}_half_width": other.half_width}
            rows.append(row)
    return rows


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


def tables(kind: str, found: Found, base: str, control: str | None) -> list[str]:
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
    ]
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
        axis.tick_params(axis="y", which="minor", labelsize=8)
        axis.minorticks_on()
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
