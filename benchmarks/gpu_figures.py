"""The GPU benchmarks' figures, drawn from their CSV files alone.

python benchmarks/gpu_figures.py [DIR]      # default: benchmarks/results
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from common import RESULTS, Row
from figures import PALETTE, STYLES, dress, hardware, panels, save
from matplotlib.axes import Axes
from records import read_rows


class Panel(NamedTuple):
    """One panel: which rows, a line for every value of ``key``."""

    title: str
    keep: Callable[[Row], bool]
    key: str
    x: str
    y: str
    xlabel: str
    ylabel: str


def lines(ax: Axes, rows: Sequence[Row], panel: Panel, styles: dict[str, dict]) -> None:
    """One line for every side, in the order of the rows' first appearance."""
    for side in dict.fromkeys(row[panel.key] for row in rows):
        here = sorted((r for r in rows if r[panel.key] == side), key=lambda r: float(r[panel.x]))
        xs, ys = [float(r[panel.x]) for r in here], [float(r[panel.y]) for r in here]
        ax.plot(xs, ys, label=side, markersize=5, **styles[side])


def draw(out: Path, name: str, title: str, parts: Sequence[Panel]) -> Path | None:
    """The figure of one CSV file; None where it has no rows for any panel."""
    path = out / f"{name}.csv"
    if not path.exists():
        return None
    rows = read_rows(path)
    parts = [panel for panel in parts if any(panel.keep(row) for row in rows)]
    if not parts:
        return None
    sides = list(dict.fromkeys(row[parts[0].key] for row in rows))
    taken = {STYLES[side]["color"] for side in sides if side in STYLES}
    spare = iter([style for style in PALETTE if style["color"] not in taken] * 3)
    styles = {side: STYLES.get(side) or next(spare) for side in sides}
    figure, axes = panels(len(parts), title, hardware(rows[0]))
    for ax, panel in zip(axes, parts, strict=True):
        here = [row for row in rows if panel.keep(row)]
        lines(ax, here, panel, styles)
        dress(ax, panel.title, [float(row[panel.x]) for row in here], panel.ylabel, panel.xlabel)
    return save(figure, out / f"{name}.png")


LENGTH, CONTEXT = "tokens of a sequence", "tokens of context"
MS = "milliseconds (median)"
Keep = Callable[[Row], bool]


def having(**values: str) -> Keep:
    """Rows whose columns hold these values."""
    return lambda row: all(row[name] == value for name, value in values.items())


def one(title: str, keep: Keep, x: str = "T", xlabel: str = LENGTH) -> Panel:
    """A panel of the median times of every side."""
    return Panel(title, keep, "side", x, "median_ms", xlabel, MS)


MODES = ("forward", "forward+backward")


def of_latte(out: Path) -> Path | None:
    """gpu_latte.csv: the widest latents, at the narrowest and the widest values."""
    path = out / "gpu_latte.csv"
    rows = read_rows(path) if path.exists() else []
    L = max((row["L"] for row in rows), key=int, default="")
    ends = sorted({row["D"] for row in rows}, key=int)
    parts = [
        one(f"{mode}, L = {L}, D = {D}", having(mode=mode, L=L, D=D))
        for mode in MODES
        for D in dict.fromkeys((*ends[:1], *ends[-1:]))
    ]
    return draw(out, "gpu_latte", "Latte: one call on a constant number of tokens", parts)


def of_macchiato(out: Path) -> Path | None:
    parts = [one(mode, having(mode=mode)) for mode in MODES]
    return draw(
        out, "gpu_macchiato", "Latte-Macchiato (window 128) beside softmax attention", parts
    )


def of_rglru(out: Path) -> Path | None:
    parts = [one(f"{op}, {m}", having(op=op, mode=m)) for op in ("rg_lru", "conv") for m in MODES]
    return draw(out, "gpu_rglru", "RG-LRU and convolution on a constant number of tokens", parts)


def of_decode(out: Path) -> Path | None:
    parts = [
        one(f"batch of {B}, {how}", having(B=B, how=how), "context", CONTEXT)
        for B in ("1", "64", "2")
        for how in ("eager", "graph")
    ]
    return draw(out, "gpu_decode", "Decoding: time per token over the context", parts)


def of_runtime(out: Path) -> Path | None:
    parts = [one(f"size {size}", having(size=size)) for size in ("400m", "2.6b", "tiny")]
    return draw(
        out, "gpu_runtime", "Forward pass of whole models, a constant number of tokens", parts
    )


def of_training(out: Path) -> Path | None:
    parts = [
        Panel(title, having(compiled=value), "side", "T", "tokens_per_s", LENGTH, "tokens/s")
        for title, value in (("plain", "False"), ("compiled blocks", "True"))
    ]
    return draw(out, "gpu_training", "Training throughput", parts)


FIGURES = (of_latte, of_macchiato, of_rglru, of_decode, of_runtime, of_training)


def draw_all(out: Path) -> list[Path]:
    """Every figure whose CSV file is there."""
    return [path for path in (figure(out) for figure in FIGURES) if path is not None]


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    drawn = draw_all(out)
    if not drawn:
        raise SystemExit(f"no results of a GPU in {out}: run gpu_check.py first")
    for path in drawn:
        print(path)


if __name__ == "__main__":
    main()
