"""The benchmarks' figures, drawn from their CSV files alone.

    python -m experiments.benchmarks.figures [DIR]
    # default: experiments/results/benchmarks, drawn to experiments/figures

Tokens and times are on logarithmic axes: a straight line of slope 1 is linear time.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from experiments.benchmarks.records import (
    FIGURES,
    MODES,
    RESULTS,
    Row,
    Table,
    document,
    pivot,
    read_rows,
    say,
    select,
)

# Okabe and Ito's colours, which colour-blind readers can tell apart, the strong one first: sides
# have them in the order of their rows, ours first. With the markers all of them differ.
COLORS = ("#D55E00", "#000000", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
MARKERS = "o^sDvPX"
LENGTH, CONTEXT = "tokens of a sequence", "tokens of context"
MS = "milliseconds (median)"


class Panel(NamedTuple):
    """One panel: the rows whose columns hold some values, a line for every value of ``key``."""

    title: str
    keep: Mapping[str, Any] = {}
    key: str = "side"
    x: str = "T"
    y: str = "median_ms"
    xlabel: str = LENGTH
    ylabel: str = MS
    scale: float = 1.0  # of y
    steady: bool = False  # at least a decade on the y axis, so that noise does not look like growth
    band: bool = False  # from p10 to p90

    def rows(self, rows: Sequence[Row]) -> list[Row]:
        return [row for row in select(rows, **self.keep) if row.get(self.y)]


OF_A_CONTEXT: dict[str, Any] = {"key": "model", "x": "context", "xlabel": CONTEXT, "steady": True}
CACHE = {"y": "cache_bytes", "ylabel": "MB", "scale": 2**-20, **OF_A_CONTEXT}
SHAPE = "H = 8, L = 32, D = 64, batch of 1"
# Title and panels by the name of the CSV file; panels without rows are left out.
FIGURE: dict[str, tuple[str, list[Panel]]] = {
    "generation": (
        "Generation with growing context (batch of 1)",
        [
            Panel(
                "time per token", ylabel=f"{MS[:-1]}; band: p10 to p90)", band=True, **OF_A_CONTEXT
            ),
            Panel("cache", **CACHE),
        ],
    ),
    "gpu_latte": (
        "Latte: one call on a constant number of tokens",
        [
            Panel(f"{mode}, L = {L}, D = {D}", {"mode": mode, "L": L, "D": D, "sigma": 1.0})
            for mode, (L, D) in product(MODES, ((32, 64), (32, 256), (16, 16)))
        ],
    ),
    "gpu_macchiato": (
        "Latte-Macchiato (window 128) beside softmax attention",
        [Panel(mode, {"mode": mode}) for mode in MODES],
    ),
    "gpu_converted": (
        "A layer of a converted SmolLM2 (window 128, 4 sinks) beside softmax attention",
        [Panel(mode, {"mode": mode}) for mode in MODES],
    ),
    "gpu_kept": (
        "The same layer with 64 kept tokens, and without",
        [Panel(mode, {"mode": mode}) for mode in MODES],
    ),
    "gpu_rglru": (
        "RG-LRU and convolution on a constant number of tokens",
        [
            Panel(f"{op}, {mode}", {"op": op, "mode": mode})
            for op, mode in product(("rg_lru", "conv"), MODES)
        ],
    ),
    "gpu_decode": (
        "Decoding: time per token over the context",
        [
            Panel(f"batch of {B}, {how}", {"B": B, "how": how}, x="context", xlabel=CONTEXT)
            for B, how in product((1, 64, 2), ("eager", "graph"))
        ],
    ),
    "gpu_runtime": (
        "Forward pass of 65,536 tokens",
        [Panel(f"size {size}", {"size": size}) for size in ("400m", "2.6b", "tiny")],
    ),
    "gpu_training": (
        "Training throughput",
        [
            Panel(title, {"compiled": value}, y="tokens_per_s", ylabel="tokens/s")
            for title, value in (("plain", False), ("compiled blocks", True))
        ],
    ),
    "cpu_ops": (
        f"Time of one call on a CPU ({SHAPE})",
        [
            Panel(mode, {"mode": mode, "dtype": "float32"}, x="tokens", xlabel="tokens")
            for mode in MODES
        ],
    ),
    "cpu_scaling": (
        f"Latte's time and peak memory on a CPU ({SHAPE})",
        [
            Panel(title, y=y, ylabel=ylabel, key="mode", x="tokens", xlabel="tokens")
            for title, y, ylabel in (
                ("time of one call", "median_ms", MS),
                ("peak memory beyond the bare process", "peak_net_mb", "MB"),
            )
        ],
    ),
    "cpu_decode": (
        "Decoding on a CPU (batch of 1, fp32)",
        [
            Panel(
                f"{what}, size {size}", {"size": size, "dtype": "float32", "how": "eager"}, **more
            )
            for what, size, more in (
                ("time per token", "tiny", OF_A_CONTEXT),
                ("time per token", "small", OF_A_CONTEXT),
                ("cache", "tiny", CACHE),
            )
        ],
    ),
    "cpu_training": (
        "Training on a CPU: tokens per second, and peak memory of a step",
        [
            Panel(title, {"dtype": "float32"}, y=y, ylabel=ylabel)
            for title, y, ylabel in (
                ("throughput", "tokens_per_s", "tokens/s"),
                ("memory", "peak_process_mb", "MB"),
            )
        ],
    ),
}


def draw(out: Path, name: str) -> Path | None:
    """The figure of one CSV file; None where it has no rows for any panel."""
    path, (title, panels) = out / f"{name}.csv", FIGURE[name]
    rows = read_rows(path) if path.exists() else []
    panels = [panel for panel in panels if panel.rows(rows)]
    if not panels:
        return None
    key = panels[0].key
    sides = list(dict.fromkeys(r[key] for row in panels for r in row.rows(rows)))
    figure, axes = plt.subplots(1, len(panels), figsize=(4.7 * len(panels), 4.9), squeeze=False)
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.02, y=0.985, ha="left")
    figure.text(0.02, 0.915, hardware(rows), fontsize=8, color="#555555", ha="left")
    for ax, panel in zip(axes[0], panels, strict=True):
        here = panel.rows(rows)
        for number, side in enumerate(sides):
            own = sorted(select(here, **{key: side}), key=lambda row: float(row[panel.x]))
            color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
            more: Any = {"linewidth": 2.2, "zorder": 5} if number == 0 else {}
            if number >= len(COLORS):
                more = {"linestyle": "--"}
            xs, ys = [float(row[panel.x]) for row in own], [y_of(panel, row) for row in own]
            ax.plot(xs, ys, label=side, markersize=5, color=color, marker=marker, **more)
            if panel.band:
                low, high = ([float(row[column]) for row in own] for column in ("p10_ms", "p90_ms"))
                ax.fill_between(xs, low, high, color=color, alpha=0.15, linewidth=0)
        dress(ax, panel, here)
    return save(figure, (FIGURES if out == RESULTS else out) / f"{name}.png")


def y_of(panel: Panel, row: Row) -> float:
    return float(row[panel.y]) * panel.scale


def hardware(rows: Sequence[Row]) -> str:
    """The subtitle: where and with what the figures were measured."""
    row = rows[0]
    jax = f", jax {row['jax']}" if select(rows, side="jax scan") else ""
    where = f"{row['cpu']}, cores: {row['cores']}, threads: {row['threads']}"
    if row.get("device", "cpu") != "cpu":
        where = row["device"]
    precision = row.get("dtype", "float32")
    return f"{where}; {precision}; torch {row['torch']}{jax}; {row['date']}"


def dress(ax: Axes, panel: Panel, rows: Sequence[Row]) -> None:
    """Logarithmic axes with the measured lengths as ticks."""
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    if panel.steady:
        values = [y_of(panel, row) for row in rows]
        low, high = min(values), max(values)
        middle = math.sqrt(low * high)
        ax.set_ylim(min(low / 1.5, middle / 3.2), max(high * 1.5, middle * 3.2))
    ax.set_title(panel.title, fontsize=10, loc="left")
    ax.set_xlabel(panel.xlabel)
    ax.set_ylabel(panel.ylabel)
    ax.xaxis.set_major_locator(FixedLocator(sorted({float(row[panel.x]) for row in rows})))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: compact(x)))
    low, high = ax.get_ylim()
    steps = (1.0, 2.0, 5.0) if high / low < 500 else (1.0,)  # powers of ten alone on a long axis
    ax.yaxis.set_major_locator(LogLocator(10, subs=steps))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))
    ax.grid(True, which="major", color="#DDDDDD", linewidth=0.7)
    ax.spines[["top", "right"]].set_visible(False)


def compact(value: float) -> str:
    """300 -> 300; 65536 -> 64k; 100000 -> 100k."""
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:g}k"
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


def save(figure: Figure, path: Path) -> Path:
    """One legend below all the panels, and the file."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    columns = len(labels) if len(labels) <= 3 else min(4, -(-len(labels) // 2))
    figure.legend(handles, labels, loc="lower center", ncol=columns, frameon=False, fontsize=8.5)
    figure.tight_layout(rect=(0, 0.03 + 0.045 * -(-len(labels) // columns), 1, 0.95))
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def publish(
    table: Table,
    section: str,
    down: Sequence[str],
    across: str,
    captions: Mapping[str, str],
    only: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """The figure of a CPU's CSV file, and its tables in the documents, one for each caption.

    Args:
        only: Values of columns that the documents show; by default all of them.
    """
    out = table.path.parent
    rows = [row for row in table.rows if all(row[c] in x for c, x in (only or {}).items())]
    tables = [pivot(text, rows, down, across, column) for column, text in captions.items()]
    document(out, section, table.rows, *tables)
    say(f"wrote {table.path} and {draw(out, table.path.stem)}")


def draw_all(out: Path) -> list[Path]:
    """Every figure whose CSV file is there."""
    return [path for path in (draw(out, name) for name in FIGURE) if path is not None]


def main() -> None:
    out = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else RESULTS
    drawn = draw_all(out)
    if not drawn:
        raise SystemExit(f"no results in {out}: run the benchmarks first")
    for path in drawn:
        print(path)


if __name__ == "__main__":
    main()
