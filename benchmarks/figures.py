"""The benchmarks' figures, drawn from their CSV files alone.

    python -m benchmarks.figures [DIR]      # default: benchmarks/results, drawn to docs/figures

Tokens and times are on logarithmic axes: a straight line of slope 1 is linear time.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from benchmarks.records import FIGURES, MODES, RESULTS, Row, read_rows

# Okabe and Ito's colours, which colour-blind readers can tell apart; Latte is the strong one.
STYLES: dict[str, dict[str, Any]] = {
    "latte": {"color": "#D55E00", "marker": "o", "linewidth": 2.2, "zorder": 5},
    "jax scan": {"color": "#0072B2", "marker": "s"},
    "sdpa": {"color": "#000000", "marker": "^"},
    "forgets 1/64": {"color": "#56B4E9", "marker": "X"},
    "forgets 1/4": {"color": "#999999", "marker": "*"},
    "macchiato": {"color": "#E69F00", "marker": "D"},
    "window 128": {"color": "#009E73", "marker": "v"},
    "rg-lru": {"color": "#CC79A7", "marker": "P"},
    "conv": {"color": "#8C510A", "marker": "p"},
    # Variants have the colour of their op.
    "sinks, late": {"color": "#E69F00", "marker": "h", "linestyle": "-."},
    "packed 15:1": {"color": "#E69F00", "marker": "<", "linestyle": ":"},
    "macchiato, bf16": {"color": "#E69F00", "marker": "d", "linestyle": "--"},
    "rg-lru, bf16": {"color": "#CC79A7", "marker": "x", "linestyle": "--"},
    "conv, bf16": {"color": "#8C510A", "marker": "+", "linestyle": "--"},
    "latte-r-swa++": {"color": "#D55E00", "marker": "o", "linewidth": 2.2, "zorder": 5},
    "transformer++": {"color": "#000000", "marker": "^"},
    "forward": {"color": "#0072B2", "marker": "o"},
    "forward+backward": {"color": "#D55E00", "marker": "o"},
}
# For checkpoints, which have names of the user's own.
PALETTE: tuple[dict[str, Any], ...] = tuple(
    {"color": color, "marker": marker}
    for color, marker in zip(
        ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
        "^osDvPX",
        strict=True,
    )
)
NAMES = {
    "sinks, late": "Latte-Macchiato, sinks",
    "packed 15:1": "Latte-Macchiato, packed",
    "conv": "convolution (4 taps)",
    "latte": "Latte",
    "jax scan": "jitted jax.lax.scan of Listing 1",
    "sdpa": "softmax attention (SDPA)",
    "forgets 1/64": "Latte, forgets 1/64 a token",
    "forgets 1/4": "Latte, forgets 1/4 a token",
    "macchiato": "Latte-Macchiato (window 128)",
    "window 128": "sliding window (128)",
    "rg-lru": "RG-LRU (512 channels)",
}


def compact(value: float) -> str:
    """300 -> 300; 65536 -> 64k; 100000 -> 100k."""
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:g}k"
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


def hardware(rows: Sequence[Row]) -> str:
    """The subtitle: where and with what the figures were measured."""
    row = rows[0]
    jax = f", jax {row['jax']}" if any(r.get("side") == "jax scan" for r in rows) else ""
    cores, threads = (
        f"{row[name]} {name[:-1] if row[name] == '1' else name}" for name in ("cores", "threads")
    )
    precision = {"float32": "fp32", "bfloat16": "bf16"}.get(row.get("dtype", "float32"))
    where = (
        f"{row['cpu']}, {cores}, {threads}" if row.get("device", "cpu") == "cpu" else row["device"]
    )
    return f"{where}; {precision or row['dtype']}; torch {row['torch']}{jax}; {row['date']}"


def panels(count: int, title: str, subtitle: str) -> tuple[Figure, list[Axes]]:
    """A row of panels under a title, with the hardware below it."""
    figure, axes = plt.subplots(1, count, figsize=(4.7 * count, 4.9), squeeze=False)
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.02, y=0.985, ha="left")
    figure.text(0.02, 0.915, subtitle, fontsize=8, color="#555555", ha="left")
    return figure, list(axes[0])


def ticks_per_decade(ax: Axes) -> tuple[float, ...]:
    """1, 2 and 5 on a short axis, powers of ten on a long one."""
    low, high = ax.get_ylim()
    return (1.0, 2.0, 5.0) if high / low < 500 else (1.0,)


def dress(ax: Axes, title: str, tokens: Sequence[float], ylabel: str, xlabel: str) -> None:
    """Logarithmic axes with the measured lengths as ticks."""
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_title(title, fontsize=10, loc="left")
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.xaxis.set_major_locator(FixedLocator(sorted(set(tokens))))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: compact(x)))
    ax.yaxis.set_major_locator(LogLocator(10, subs=ticks_per_decade(ax)))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))
    ax.grid(True, which="major", color="#DDDDDD", linewidth=0.7)
    ax.spines[["top", "right"]].set_visible(False)


def widen(ax: Axes, values: Sequence[float]) -> None:
    """At least a decade on the y axis, so that noise does not look like growth."""
    low, high = min(values), max(values)
    middle = math.sqrt(low * high)
    ax.set_yscale("log")
    ax.set_ylim(min(low / 1.5, middle / 3.2), max(high * 1.5, middle * 3.2))


def save(figure: Figure, path: Path) -> Path:
    """One legend below all the panels, and the file."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    columns = len(labels) if len(labels) <= 3 else min(4, -(-len(labels) // 2))
    figure.legend(handles, labels, loc="lower center", ncol=columns, frameon=False, fontsize=8.5)
    figure.tight_layout(rect=(0, 0.03 + 0.045 * -(-len(labels) // columns), 1, 0.95))
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


# --- a figure of one CSV file: panels side by side, a line for every side ------------------------

Keep = Callable[[Row], bool]
LENGTH, CONTEXT = "tokens of a sequence", "tokens of context"
MS = "milliseconds (median)"


class Panel(NamedTuple):
    """One panel: which rows, a line for every value of ``key``.

    ``finish(ax, rows, color)`` is called after each line; ``steady`` widens the y axis.
    """

    title: str
    keep: Keep = lambda row: True
    key: str = "side"
    x: str = "T"
    y: str = "median_ms"
    xlabel: str = LENGTH
    ylabel: str = MS
    steady: bool = False
    finish: Callable[[Axes, Sequence[Row], str], None] = lambda ax, rows, color: None


OF_A_CONTEXT: dict[str, Any] = {"key": "model", "x": "context", "xlabel": CONTEXT, "steady": True}


def having(**values: str) -> Keep:
    """Rows whose columns hold these values."""
    return lambda row: all(row[name] == value for name, value in values.items())


def draw(out: Path, name: str) -> Path | None:
    """The figure of one CSV file, as ``PLAIN`` says; None where it has no rows for any panel."""
    return draw_panels(out, name, *PLAIN[name])


def draw_panels(out: Path, name: str, title: str, parts: Sequence[Panel]) -> Path | None:
    """The panels of one CSV file for which it has rows; None where it has none."""
    rows = rows_of(out, name)
    parts = [p for p in parts if any(p.keep(row) and row.get(p.y) for row in rows)]
    if not parts:
        return None
    shown = [row for row in rows if any(panel.keep(row) for panel in parts)]
    sides = list(dict.fromkeys(row[parts[0].key] for row in shown))
    taken = {STYLES[side]["color"] for side in sides if side in STYLES}
    spare = cycle([style for style in PALETTE if style["color"] not in taken] or PALETTE)
    styles = {side: STYLES.get(side) or next(spare) for side in sides}
    figure, axes = panels(len(parts), title, hardware(rows))
    for ax, panel in zip(axes, parts, strict=True):
        here = [row for row in rows if panel.keep(row) and row.get(panel.y)]
        for side in dict.fromkeys(row[panel.key] for row in here):
            own = [row for row in here if row[panel.key] == side]
            own.sort(key=lambda row: float(row[panel.x]))
            xs, ys = ([float(row[column]) for row in own] for column in (panel.x, panel.y))
            ax.plot(xs, ys, label=NAMES.get(side, side), markersize=5, **styles[side])
            panel.finish(ax, own, styles[side]["color"])
        if panel.steady:
            widen(ax, [float(row[panel.y]) for row in here])
        dress(ax, panel.title, [float(row[panel.x]) for row in here], panel.ylabel, panel.xlabel)
    return save(figure, (FIGURES if out == RESULTS else out) / f"{name}.png")


def rows_of(out: Path, name: str) -> list[Row]:
    """Rows of a CSV file, none where it is missing, with the cache's size in MB where there is."""
    path = out / f"{name}.csv"
    rows = read_rows(path) if path.exists() else []
    for row in rows:
        if row.get("cache_bytes"):
            row["cache_mb"] = str(float(row["cache_bytes"]) / 2**20)
    return rows


def of_generation(out: Path) -> Path | None:
    """Time per token and the cache's size over the context, a line a checkpoint."""

    def band(ax: Axes, rows: Sequence[Row], color: str) -> None:
        xs, low, high = ([float(r[c]) for r in rows] for c in ("context", "p10_ms", "p90_ms"))
        ax.fill_between(xs, low, high, color=color, alpha=0.15, linewidth=0)

    label = f"{MS[:-1]}; band: p10 to p90)"
    parts = [
        Panel("time per token", ylabel=label, finish=band, **OF_A_CONTEXT),
        Panel("cache", y="cache_mb", ylabel="MB", **OF_A_CONTEXT),
    ]
    return draw_panels(out, "generation", "Generation with growing context (batch of 1)", parts)


def of_latte(out: Path) -> Path | None:
    """The widest latents, at the narrowest and the widest values."""
    rows = rows_of(out, "gpu_latte")
    L = max((row["L"] for row in rows), key=int, default="")
    ends = sorted({row["D"] for row in rows}, key=int)
    parts = [
        Panel(f"{mode}, L = {L}, D = {D}", having(mode=mode, L=L, D=D))
        for mode in MODES
        for D in dict.fromkeys((*ends[:1], *ends[-1:]))
    ]
    return draw_panels(out, "gpu_latte", "Latte: one call on a constant number of tokens", parts)


FROM_THEIR_ROWS = (of_generation, of_latte)
# Name, title and panels of the others.
SHAPE = "H = 8, L = 32, D = 64, batch of 1"
PLAIN: dict[str, tuple[str, list[Panel]]] = {
    "gpu_macchiato": (
        "Latte-Macchiato (window 128) beside softmax attention",
        [Panel(mode, having(mode=mode)) for mode in MODES],
    ),
    "gpu_converted": (
        "A layer of a converted SmolLM2 (window 128, 4 sinks) beside softmax attention",
        [Panel(mode, having(mode=mode)) for mode in MODES],
    ),
    "gpu_rglru": (
        "RG-LRU and convolution on a constant number of tokens",
        [Panel(f"{op}, {m}", having(op=op, mode=m)) for op in ("rg_lru", "conv") for m in MODES],
    ),
    "gpu_decode": (
        "Decoding: time per token over the context",
        [
            Panel(f"batch of {B}, {how}", having(B=B, how=how), x="context", xlabel=CONTEXT)
            for B in ("1", "64", "2")
            for how in ("eager", "graph")
        ],
    ),
    "gpu_runtime": (
        "Forward pass of whole models, a constant number of tokens",
        [Panel(f"size {size}", having(size=size)) for size in ("400m", "2.6b", "tiny")],
    ),
    "cpu_ops": (
        f"Time of one call on a CPU ({SHAPE})",
        [
            Panel(mode, having(mode=mode, dtype="float32"), x="tokens", xlabel="tokens")
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
                f"{what}, size {size}",
                having(size=size, dtype="float32", how="eager"),
                y=y,
                ylabel=ylabel,
                **OF_A_CONTEXT,
            )
            for what, size, y, ylabel in (
                ("time per token", "tiny", "median_ms", MS),
                ("time per token", "small", "median_ms", MS),
                ("cache", "tiny", "cache_mb", "MB"),
            )
        ],
    ),
    "cpu_training": (
        "Training on a CPU: tokens per second, and peak memory of a step",
        [
            Panel(title, having(dtype="float32"), y=y, ylabel=ylabel)
            for title, y, ylabel in (
                ("throughput", "tokens_per_s", "tokens/s"),
                ("memory", "peak_process_mb", "MB"),
            )
        ],
    ),
    "gpu_training": (
        "Training throughput",
        [
            Panel(title, having(compiled=value), y="tokens_per_s", ylabel="tokens/s")
            for title, value in (("plain", "False"), ("compiled blocks", "True"))
        ],
    ),
}


def draw_all(out: Path) -> list[Path]:
    """Every figure whose CSV file is there."""
    drawn = [figure(out) for figure in FROM_THEIR_ROWS]
    drawn += [draw(out, name) for name in PLAIN]
    return [path for path in drawn if path is not None]


def main() -> None:
    out = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else RESULTS
    drawn = draw_all(out)
    if not drawn:
        raise SystemExit(f"no results in {out}: run the benchmarks first")
    for path in drawn:
        print(path)


if __name__ == "__main__":
    main()
