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
    rows = [row for row in read_rows(path) if row[parts[0].y] != ""]
    parts = [panel for panel in parts if any(panel.keep(row) for row in rows)]
    if not parts:
        return None
    sides = list(dict.fromkeys(row[parts[0].key] for row in rows))
    spare = iter(PALETTE * 3)
    styles = {side: STYLES.get(side) or next(spare) for side in sides}
    figure, axes = panels(len(parts), title, hardware(rows[0]))
    for ax, panel in zip(axes, parts, strict=True):
        here = [row for row in rows if panel.keep(row)]
        lines(ax, here, panel, styles)
        dress(ax, panel.title, [float(row[panel.x]) for row in here], panel.ylabel, panel.xlabel)
    return save(figure, out / f"{name}.png")


def of_latte(out: Path) -> Path | None:
    """gpu_latte.csv: time over the length at a constant number of tokens."""

    def keep(mode: str, D: int) -> Callable[[Row], bool]:
        return lambda r: r["mode"] == mode and int(r["D"]) == D and r["L"] == widest

    path = out / "gpu_latte.csv"
    widest = max((r["L"] for r in read_rows(path)), key=int, default="") if path.exists() else ""
    parts = [
        Panel(f"{mode}, L = {widest}, D = {D}", keep(mode, D), "side", "T", "median_ms", *AXES)
        for mode in ("forward", "forward+backward")
        for D in (64, 16)
    ]
    return draw(out, "gpu_latte", "Latte: one call on a constant number of tokens", parts)


AXES = ("tokens of a sequence", "milliseconds (median)")
FIGURES = (of_latte,)


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
