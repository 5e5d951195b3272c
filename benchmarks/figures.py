"""The benchmarks' figures, drawn from their CSV files alone.

    python benchmarks/figures.py [DIR]      # default: benchmarks/results

Tokens and times are on logarithmic axes: a straight line of slope 1 is linear time.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from common import RESULTS, Row, exponent
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator
from records import read_rows

# Okabe and Ito's colours, which colour-blind readers can tell apart; Latte is the strong one.
STYLES: dict[str, dict[str, Any]] = {
    "latte": {"color": "#D55E00", "marker": "o", "linewidth": 2.2, "zorder": 5},
    "jax scan": {"color": "#0072B2", "marker": "s"},
    "sdpa": {"color": "#000000", "marker": "^"},
    "macchiato": {"color": "#E69F00", "marker": "D"},
    "window 128": {"color": "#009E73", "marker": "v"},
    "rg-lru": {"color": "#CC79A7", "marker": "P"},
    "latte-r-swa++": {"color": "#D55E00", "marker": "o", "linewidth": 2.2, "zorder": 5},
    "transformer++": {"color": "#000000", "marker": "^"},
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
    "latte": "Latte",
    "jax scan": "jitted jax.lax.scan of Listing 1",
    "sdpa": "softmax attention (SDPA)",
    "macchiato": "Latte-Macchiato (window 128)",
    "window 128": "sliding window (128)",
    "rg-lru": "RG-LRU (512 channels)",
}


def compact(value: float) -> str:
    """300 -> 300; 65536 -> 64k; 100000 -> 100k."""
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:g}k"
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


def hardware(row: Row, jax: str = "") -> str:
    """The subtitle: where and with what the figures were measured."""
    versions = f"torch {row['torch']}" + (f", jax {jax}" if jax else "")
    cores, threads = (
        f"{row[name]} {name[:-1] if row[name] == '1' else name}" for name in ("cores", "threads")
    )
    precision = {"float32": "fp32", "bfloat16": "bf16"}.get(row.get("dtype", "float32"))
    where = (
        f"{row['cpu']}, {cores}, {threads}" if row.get("device", "cpu") == "cpu" else row["device"]
    )
    return f"{where}; {precision or row['dtype']}; {versions}; {row['date']}"


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


def plot(ax: Axes, rows: Sequence[Row], key: str, x: str, y: str) -> None:
    """One line for every value of the key, in the order of the rows."""
    for side in dict.fromkeys(row[key] for row in rows):
        here = [row for row in rows if row[key] == side]
        xs, ys = [float(row[x]) for row in here], [float(row[y]) for row in here]
        ax.plot(xs, ys, label=NAMES.get(side, side), markersize=5, **STYLES[side])


def widen(ax: Axes, values: Sequence[float]) -> None:
    """At least a decade on the y axis, so that noise does not look like growth."""
    low, high = min(values), max(values)
    middle = math.sqrt(low * high)
    ax.set_ylim(min(low / 1.5, middle / 3.2), max(high * 1.5, middle * 3.2))


def save(figure: Figure, path: Path) -> Path:
    """One legend below all the panels, and the file."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    columns = len(labels) if len(labels) <= 3 else -(-len(labels) // 2)
    figure.legend(handles, labels, loc="lower center", ncol=columns, frameon=False, fontsize=8.5)
    figure.tight_layout(rect=(0, 0.03 + 0.045 * -(-len(labels) // columns), 1, 0.95))
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def draw_ops(out: Path) -> Path:
    """cpu_ops.csv: time of every side over the length, a panel per mode."""
    rows = read_rows(out / "cpu_ops.csv")
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    first = rows[0]
    sizes = f"H = {first['H']}, L = {first['L']}, D = {first['D']}, batch of 1"
    jax = first["jax"] if any(row["side"] == "jax scan" for row in rows) else ""
    title = f"Time of one call on a CPU ({sizes})"
    figure, axes = panels(len(modes), title, hardware(first, jax))
    for ax, mode in zip(axes, modes, strict=True):
        here = [row for row in rows if row["mode"] == mode]
        plot(ax, here, "side", "tokens", "median_ms")
        tokens = [float(row["tokens"]) for row in here]
        dress(ax, mode, tokens, "milliseconds (median)", "tokens")
    return save(figure, out / "cpu_ops.png")


def draw_scaling(out: Path) -> Path:
    """cpu_scaling.csv: time and peak memory over the length, fitted, with lines of slope 1."""
    rows = read_rows(out / "cpu_scaling.csv")
    first = rows[0]
    sizes = f"H = {first['H']}, L = {first['L']}, D = {first['D']}, batch of 1"
    title = f"Latte's time and peak memory on a CPU ({sizes})"
    figure, axes = panels(2, title, hardware(first))
    columns = (
        ("time of one call", "median_ms", "milliseconds (median)"),
        ("peak memory beyond the bare process", "peak_net_mb", "MB"),
    )
    colours = {"forward": "#0072B2", "forward+backward": "#D55E00"}
    for ax, (title, column, ylabel) in zip(axes, columns, strict=True):
        for mode, colour in colours.items():
            here = [row for row in rows if row["mode"] == mode]
            xs = [float(row["tokens"]) for row in here]
            ys = [float(row[column]) for row in here]
            ax.plot(xs, ys, "o-", color=colour, label=mode, markersize=5)
            height = 0.10 if mode == "forward+backward" else 0.03
            slope = f"{mode}: exponent {exponent(xs, ys):.3f}"
            corner: Any = {"transform": ax.transAxes, "ha": "right", "fontsize": 8.5}
            ax.text(0.98, height, slope, color=colour, **corner)
            # Through the last point: what is above it at the left are fixed costs.
            ideal = [ys[-1] * x / xs[-1] for x in xs]
            label = "slope 1 (exactly linear)" if mode == "forward+backward" else None
            ax.plot(xs, ideal, ":", color="#777777", linewidth=1, label=label, zorder=1)
        dress(ax, title, xs, ylabel, "tokens")
    return save(figure, out / "cpu_scaling.png")


def draw_decode(out: Path) -> Path:
    """cpu_decode.csv: time per token, cache and peak memory over the context."""
    rows = read_rows(out / "cpu_decode.csv")
    first = rows[0]
    title = f"Decoding on a CPU (models of size '{first['size']}', batch of 1)"
    figure, axes = panels(3, title, hardware(first))
    megabytes = [row | {"cache_mb": float(row["cache_bytes"]) / 2**20} for row in rows]
    columns = (
        ("time per token", "median_ms", "milliseconds (median)"),
        ("cache", "cache_mb", "MB"),
        ("peak memory beyond the model", "peak_net_mb", "MB"),
    )
    for ax, (title, column, ylabel) in zip(axes, columns, strict=True):
        plot(ax, megabytes, "model", "context", column)
        contexts = [float(row["context"]) for row in rows]
        ax.set_yscale("log")
        widen(ax, [float(row[column]) for row in megabytes])
        dress(ax, title, contexts, ylabel, "tokens of context")
    return save(figure, out / "cpu_decode.png")


def draw_generation(out: Path) -> Path:
    """generation.csv: time per token and the cache's size over the context, a line a checkpoint."""
    rows = read_rows(out / "generation.csv")
    rows = [row | {"cache_mb": float(row["cache_bytes"]) / 2**20} for row in rows]
    figure, axes = panels(2, "Generation with growing context (batch of 1)", hardware(rows[0]))
    columns = (
        ("time per token", "median_ms", "milliseconds (median; band: p10 to p90)"),
        ("cache", "cache_mb", "MB"),
    )
    for ax, (title, column, ylabel) in zip(axes, columns, strict=True):
        for name, style in zip(dict.fromkeys(row["model"] for row in rows), PALETTE, strict=False):
            here = [row for row in rows if row["model"] == name]
            xs = [float(row["context"]) for row in here]
            ax.plot(xs, [float(row[column]) for row in here], label=name, markersize=5, **style)
            if column == "median_ms":
                low, high = ([float(row[q]) for row in here] for q in ("p10_ms", "p90_ms"))
                ax.fill_between(xs, low, high, color=style["color"], alpha=0.15, linewidth=0)
        ax.set_yscale("log")
        widen(ax, [float(row[column]) for row in rows])
        dress(ax, title, [float(row["context"]) for row in rows], ylabel, "tokens of context")
    return save(figure, out / "generation.png")


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    drawn = 0
    for name, draw in (("ops", draw_ops), ("scaling", draw_scaling), ("decode", draw_decode)):
        if (out / f"cpu_{name}.csv").exists():
            print(draw(out))
            drawn += 1
    if (out / "generation.csv").exists():
        print(draw_generation(out))
        drawn += 1
    if not drawn:
        raise SystemExit(f"no results in {out}: run the benchmarks first")


if __name__ == "__main__":
    main()
