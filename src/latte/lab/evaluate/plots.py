"""Figures: bits per byte by context length, and learning curves. Matplotlib, no display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

# Okabe and Ito's colours, which colour-blind readers can tell apart; markers repeat the message.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def note(
    axis: Any, text: str, at: tuple[float, float], units: Any, offset: tuple[int, int], **style: Any
) -> None:
    """A small text near a point.

    Args:
        at: Point, in `units`, such as ("axes fraction", "data").
        offset: Distance from there to the text, in typographic points.
    """
    style = {"fontsize": 8, "color": "#555555"} | style
    axis.annotate(text, at, xycoords=units, xytext=offset, textcoords="offset points", **style)


def note_on_line(axis: Any, value: float, text: str) -> None:
    """A small text at the right end of a horizontal line, just above it."""
    note(axis, text, (1, value), ("axes fraction", "data"), (-4, 3), ha="right")


def lengths_figure(
    path: Path,
    rows: Mapping[str, Sequence[Any]],
    *,
    curves: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    train_length: int | None = None,
    references: Mapping[str, float] | None = None,
    title: str = "",
) -> None:
    """Bits per byte by context length, one line per model; to the left learning curves, if given.

    Args:
        rows: Labels and their `lengths.Row`s.
        curves: Labels and their "eval" records of metrics.jsonl.
        train_length: Training length in tokens, drawn as a vertical line.
        references: Labels and bits per byte of methods without training (gzip, xz).
    """
    figure, axes = canvas(1, (6.4, 4.2)) if curves is None else canvas(2, (11.0, 4.3))
    draw_lengths(axes[-1], rows, train_length, references)
    if curves is None:
        axes[0].set_title(title)
    else:
        draw_curves(axes[0], curves)
        figure.suptitle(title)
    save(figure, path)


def conversion_figure(
    path: Path,
    rows: Mapping[str, Sequence[Any]],
    *,
    close: Sequence[str],
    train_length: int | None = None,
) -> None:
    """Bits per byte by context length: all models, and beside it those of `close` at their scale.

    Args:
        rows: Labels and their `lengths.Row`s.
        close: Labels whose range is the second panel's axis. Other lines may leave it.
    """
    figure, axes = canvas(2, (11.0, 4.4))
    draw_lengths(axes[0], rows, train_length, None)
    axes[0].set_title("Base, controls and result")
    draw_lengths(axes[1], rows, train_length, None)
    values = [row.bits_per_byte for label in close for row in rows[label]]
    room = max(0.15 * (max(values) - min(values)), 1e-3)
    axes[1].set_ylim(min(values) - room, max(values) + room)
    axes[1].set_title("The same, close to the result")
    axes[1].get_legend().remove()
    save(figure, path)


def draw_curves(axis: Any, curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Held-out bits per byte against training tokens.

    The panel's upper end is above the values after a quarter of the tokens. Before that, all
    curves fall alike, and would make the later differences too small to see.
    """
    for index, (label, records) in enumerate(curves.items()):
        axis.plot(
            [record["tokens"] for record in records],
            [record["eval_bits_per_byte"] for record in records],
            label=label,
            **line_style(index),
        )
    records = [record for entries in curves.values() for record in entries]
    end = max((record["tokens"] for record in records), default=0)
    values = [r["eval_bits_per_byte"] for r in records if r["tokens"] >= end / 4]
    late = list(filter(isfinite, values))
    if late and min(late) < max(late):
        room = 0.05 * (max(late) - min(late))
        axis.set_ylim(min(late) - room, max(late) + room)
    axis.set_xlabel("training tokens")
    axis.set_ylabel("held-out bits per byte")
    axis.set_title("While training, at the training length")
    axis.xaxis.set_major_formatter(_thousands)
    axis.legend(frameon=False)


def draw_lengths(
    axis: Any,
    rows: Mapping[str, Sequence[Any]],
    train_length: int | None,
    references: Mapping[str, float] | None,
) -> None:
    """Bits per byte against context length, logarithmic in base 2, with reference lines."""
    for index, (label, entries) in enumerate(rows.items()):
        axis.plot(
            [row.length for row in entries],
            [row.bits_per_byte for row in entries],
            label=label,
            **line_style(index) | {"markersize": 6},
        )
    lengths = sorted({row.length for entries in rows.values() for row in entries})
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axis.minorticks_off()
    for label, value in (references or {}).items():
        axis.axhline(value, color="#777777", linewidth=1, linestyle=(0, (4, 3)))
        note_on_line(axis, value, f"{label} {value:.2f}")
    if train_length is not None:
        axis.axvline(train_length, color="#777777", linewidth=1, linestyle=":")
        at, units = (train_length, 0.98), ("data", "axes fraction")
        note(axis, "training length", at, units, (4, 0), rotation=90, va="top")
    axis.set_xlabel("context length (tokens)")
    axis.set_ylabel("held-out bits per byte")
    axis.set_title("The same text at several context lengths")
    axis.margins(y=0.15)
    axis.legend(frameon=False)


def _thousands(value: float, _: int) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if value >= 1e3 else f"{value:g}"


def canvas(
    columns: int, size: tuple[float, float], ratios: Sequence[float] | None = None
) -> tuple[Any, list[Any]]:
    """A figure without a display, and its panels side by side, of the given widths' ratios."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    grid = figure.add_gridspec(1, columns, width_ratios=ratios)
    axes = [figure.add_subplot(grid[column]) for column in range(columns)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axis.set_axisbelow(True)
    return figure, axes


def line_style(index: int) -> dict[str, Any]:
    """Colour, marker and dashes of line `index`; they repeat after 21 lines."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": ("-", "--", ":")[index // len(COLOURS) % 3],
        "markersize": 5,
    }


def save(figure: Any, path: Path) -> None:
    """Write a figure, and its folder if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
