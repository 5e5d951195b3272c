"""The probes' results: probes.csv, aligned tables, and a figure by length and depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from experiments.probes.scores import DISTRACTORS, ProbeRow
from latte.lab.evaluate.plots import COLOURS, MARKERS
from latte.lab.evaluate.tables import write_csv

SHOWN = {
    "retrieval": ("exact", "ranked_first", "beats_unsaid", "margin", "nll", "nll_unseen", "gain"),
    "copy": ("token_match", "token_match_unseen", "exact", "nll", "nll_unseen", "gain"),
    "continuation": (
        *("repeated_4_greedy", "repeated_4_sampled", "repeated_4_text"),
        *("distinct_2_greedy", "distinct_2_sampled", "distinct_2_text"),
    ),
}
HEATMAPS = {
    "exact": "Retrieval: says the word (share)",
    "ranked_first": f"Retrieval: ranks it first of {1 + DISTRACTORS} (share)",
    "gain": "Retrieval: gain by being told (nats/token)",
}


def write_probes(path: Path, rows: Sequence[ProbeRow], label: str) -> None:
    """A line per probe, length, depth and metric."""
    columns = ["model", *(field.name for field in fields(ProbeRow))]
    write_csv(path, columns, ({"model": label, **asdict(row)} for row in rows))


def probes_table(rows: Sequence[ProbeRow]) -> str:
    """A table per probe, a line per length and depth."""
    tables = []
    for probe in dict.fromkeys(row.probe for row in rows):
        here = [row for row in rows if row.probe == probe]
        metrics = SHOWN[probe]
        values = {(row.length, row.depth, row.metric): row.value for row in here}
        cells = list(dict.fromkeys((row.length, row.depth) for row in here))
        deep = any(depth is not None for _, depth in cells)
        lines = [f"{probe} ({here[0].cases} cases each)"]
        head = f"{'length':>8}" + (f"  {'depth':>6}" if deep else "")
        lines.append(head + "".join(f"  {metric:>{_width(metric)}}" for metric in metrics))
        for length, depth in cells:
            line = f"{length:>8}" + ("" if depth is None else f"  {depth:>6.2f}")
            numbers = (f"{values[length, depth, m]:.3f}".rjust(_width(m)) for m in metrics)
            lines.append(line + "".join(f"  {number}" for number in numbers))
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def _width(metric: str) -> int:
    return max(8, len(metric))


def probes_figure(path: Path, rows: Sequence[ProbeRow], title: str) -> None:
    """Retrieval as maps of length and depth; copying and repetition as lines over length."""
    probes = list(dict.fromkeys(row.probe for row in rows))
    panels: list[tuple[str, str]] = []
    if "retrieval" in probes:
        panels += [("retrieval", metric) for metric in HEATMAPS]
    panels += [(probe, "") for probe in probes if probe != "retrieval"]
    figure, axes = _grid(len(panels))
    for axis, (probe, metric) in zip(axes, panels, strict=True):
        here = [row for row in rows if row.probe == probe]
        if probe == "retrieval":
            _draw_map(axis, [row for row in here if row.metric == metric], metric)
        elif probe == "copy":
            lines = {"token_match": "seen before", "token_match_unseen": "not seen (control)"}
            _draw_lines(axis, here, lines)
            axis.set_ylabel("tokens copied (share)")
            axis.set_title("Copying a paragraph from the start", fontsize=10)
        else:
            how = {"greedy": "greedy", "sampled": "sampled", "text": "the text itself"}
            _draw_lines(axis, here, {f"repeated_4_{key}": name for key, name in how.items()})
            axis.set_ylabel("repeated 4-grams (share)")
            axis.set_title("Repetition in continuations", fontsize=10)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _grid(count: int, columns: int = 3) -> tuple[Any, list[Any]]:
    """Panels in rows of three; drawn without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(count, columns)
    rows = -(-count // columns)
    figure = Figure(figsize=(4.6 * columns, 3.7 * rows + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(rows, columns, place + 1) for place in range(count)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axis.set_axisbelow(True)
    return figure, axes


def _draw_map(axis: Any, rows: Sequence[ProbeRow], metric: str) -> None:
    lengths = sorted({row.length for row in rows})
    depths = sorted({row.depth for row in rows if row.depth is not None})
    values = {(row.length, row.depth): row.value for row in rows}
    grid = [[values[length, depth] for length in lengths] for depth in depths]
    # Shares run from 0 to 1; nats as far as they go, but noise shall not look like a signal.
    top = max(0.1, *(row.value for row in rows)) if metric == "gain" else 1.0
    axis.imshow(grid, vmin=0, vmax=top, cmap="viridis", aspect="auto")
    for y, line in enumerate(grid):
        for x, value in enumerate(line):
            colour = "white" if value < 0.6 * top else "black"
            axis.text(x, y, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=8)
    axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axis.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    axis.grid(False)
    axis.spines[:].set_visible(False)
    axis.set_xlabel("context length (tokens)")
    axis.set_ylabel("depth (0 is the start)")
    axis.set_title(HEATMAPS[metric], fontsize=10)


def _draw_lines(axis: Any, rows: Sequence[ProbeRow], names: dict[str, str]) -> None:
    lengths = sorted({row.length for row in rows})
    for index, (metric, name) in enumerate(names.items()):
        here = sorted(
            (row.length, row.value, row.stderr or 0.0) for row in rows if row.metric == metric
        )
        axis.errorbar(
            [length for length, _, _ in here],
            [value for _, value, _ in here],
            yerr=[stderr for _, _, stderr in here],
            color=COLOURS[index],
            marker=MARKERS[index],
            capsize=2,
            label=name,
        )
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axis.minorticks_off()
    axis.set_ylim(-0.03, 1.03)
    axis.set_xlabel("context length (tokens)")
    axis.legend(frameon=False)
