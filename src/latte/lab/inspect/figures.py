"""Figures of how the latents are used. Matplotlib, no display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from latte.lab.evaluate.plots import canvas, note, save
from latte.lab.inspect.mixing import UNUSED, Share, Summary, Usage

MUTED = "#6b7280"
MAP = "viridis"
MOST_IN_LEGEND = 12


def collapse_figure(path: Path, rows: Sequence[Usage], title: str) -> None:
    """Mean p(l|t) of every state in every layer and head, relative to an equal share.

    The latents of a head have no order: they are sorted, the most used first, so that a head
    that uses few of them fades towards the bottom. The window, where there is one, is on top.
    """
    from matplotlib.colors import LogNorm

    heads = sorted({(row.layer, row.head) for row in rows})
    latents = max(sum(r.state > 0 for r in rows if (r.layer, r.head) == head) for head in heads)
    windowed = any(row.state == 0 for row in rows)
    grid = np.full((latents + windowed, len(heads)), np.nan)
    for column, head in enumerate(heads):
        shares = {r.state: r.of_equal_share for r in rows if (r.layer, r.head) == head}
        if windowed:
            grid[0, column] = shares.pop(0, np.nan)
        grid[windowed : windowed + len(shares), column] = sorted(shares.values(), reverse=True)
    width = min(16.0, max(6.4, 1.9 + 0.19 * len(heads)))
    figure, (axis,) = canvas(1, (width, min(9.0, max(3.4, 1.7 + 0.16 * len(grid)))))
    # Below the lowest colour a latent is unused; the colours' middle is not an equal share.
    top = max(2.0, float(np.nanmax(grid)))
    picture = axis.imshow(
        np.maximum(grid, UNUSED / 10), aspect="auto", cmap=MAP, norm=LogNorm(UNUSED, top)
    )
    for row, column in np.argwhere(grid < UNUSED):
        axis.plot(column, row, marker="x", color="white", markersize=4)
    if windowed:
        axis.axhline(0.5, color="white", linewidth=2.5)
    layers = sorted({layer for layer, _ in heads})
    starts = [next(i for i, (layer, _) in enumerate(heads) if layer == n) for n in layers]
    ends = [*starts[1:], len(heads)]
    for start in starts[1:]:
        axis.axvline(start - 0.5, color="white", linewidth=1.5)
    middles = [(a + b - 1) / 2 for a, b in zip(starts, ends, strict=True)]
    axis.set_xticks(middles, [str(layer) for layer in layers])
    axis.set_xlabel("layer (a column per head)")
    axis.tick_params(length=0)
    axis.grid(False)
    rank = [1, *(n for n in range(8, latents + 1, 8))]
    ticks = [n - 1 + windowed for n in rank]
    names = [str(n) for n in rank]
    axis.set_yticks([0, *ticks] if windowed else ticks, ["window", *names] if windowed else names)
    axis.set_ylabel("latents of a head, most used first")
    axis.set_title(title, fontsize=11)
    bar = figure.colorbar(picture, ax=axis, pad=0.015, extend="min")
    bar.set_label("mean p(l|t), relative to an equal share")
    bar.set_ticks(
        ticks=[x for x in (0.01, 0.1, 1, 10, 100) if x <= top],
        labels=[f"{x:g}" for x in (0.01, 0.1, 1, 10, 100) if x <= top],
    )
    bar.ax.axhline(1, color="white", linewidth=1)
    count = int((grid[int(windowed) :] < UNUSED).sum())
    words = f"x: below {UNUSED:.0%} of an equal share; {count} of {latents * len(heads)} latents"
    look = {"ha": "right", "va": "top", "color": MUTED}
    note(axis, words, (1, -0.01), "axes fraction", (0, -24), **look)
    save(figure, path)


def effective_figure(path: Path, rows: Sequence[Summary], title: str) -> None:
    """Effective number of latents by layer: a dot per head, on average and per token."""
    rows = [row for row in rows if row.latents]
    layers = sorted({row.layer for row in rows})
    figure, (axis,) = canvas(1, (max(5.6, 1.6 + 0.45 * len(layers)), 3.9))
    for name, label, colour, marker, shift in (
        ("effective_latents", "on average over the text", "#0072B2", "o", -0.12),
        ("effective_latents_per_token", "per token", "#D55E00", "s", 0.12),
    ):
        values = [[getattr(r, name) for r in rows if r.layer == layer] for layer in layers]
        axis.plot(
            [place + shift for place, mine in enumerate(values) for _ in mine],
            [value for mine in values for value in mine],
            linestyle="",
            marker=marker,
            markersize=4.5,
            alpha=0.75,
            color=colour,
            label=f"{label} (a mark per head)",
        )
        axis.plot(
            np.arange(len(layers)) + shift,
            [np.mean(mine) for mine in values],
            color=colour,
            linewidth=1.4,
            label=f"{label}, mean over heads",
        )
    latents = max(row.latents for row in rows)
    axis.axhline(latents, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    look = {"ha": "right", "va": "top", "color": MUTED}
    units = ("axes fraction", "data")
    note(axis, f"all {latents} latents alike", (1, latents), units, (-2, -3), **look)
    axis.set_xticks(range(len(layers)), [str(layer) for layer in layers])
    axis.set(xlabel="layer", ylabel="effective number of latents", ylim=(0, latents * 1.08))
    axis.set_title(title, fontsize=11)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    save(figure, path)


def share_figure(
    path: Path,
    rows: Sequence[Share],
    summaries: Sequence[Summary],
    width: int | None,
    equal: float,
    title: str,
) -> None:
    """The window's share p(l=0|t): by position for every layer, and averaged for every head.

    Args:
        width: Width of the window, drawn as a vertical line.
        equal: Share of the window if all states have the same probability.
    """
    import matplotlib

    layers = sorted({row.layer for row in rows})
    heads = sorted({row.head for row in rows})
    figure, (left, right) = canvas(2, (11.0, max(4.2, 0.2 * len(layers))), (1.5, 1.0))
    colours = matplotlib.colormaps[MAP](np.linspace(0.0, 0.9, len(layers)))
    for layer, colour in zip(layers, colours, strict=True):
        curve: dict[float, list[float]] = {}
        for row in [row for row in rows if row.layer == layer]:
            middle = 1 + (row.first_position + row.last_position) / 2
            curve.setdefault(middle, []).append(row.window_share)
        values = [np.mean(shares) for shares in curve.values()]
        left.plot(list(curve), values, color=colour, linewidth=1.6, label=f"layer {layer}")
    left.set_xscale("log", base=2)
    left.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    left.axhline(equal, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    # The words stand outside the axes: inside, lines may run anywhere.
    at, units = (1, equal), ("axes fraction", "data")
    note(left, "equal\nshare", at, units, (3, 0), ha="left", va="center", color=MUTED)
    if width is not None:
        left.axvline(width, color=MUTED, linewidth=1, linestyle=":")
        at, units = (width, 1), ("data", "axes fraction")
        note(left, "window full", at, units, (0, 2), ha="center", va="bottom", color=MUTED)
    left.set(xlabel="position (tokens)", ylabel="p(l=0), mean over heads", ylim=(0, 1))
    if len(layers) <= MOST_IN_LEGEND:
        left.legend(
            frameon=False, fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.14)
        )
    else:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import ListedColormap, Normalize

        depth = ScalarMappable(Normalize(layers[0], layers[-1]), ListedColormap(colours))
        figure.colorbar(depth, ax=left, pad=0.08).set_label("layer")
    means = np.array([[r.window_share for r in summaries if r.layer == n] for n in layers])
    right.grid(False)
    picture = right.imshow(means, aspect="auto", cmap=MAP, vmin=0, vmax=1)
    if means.size <= 160:
        for (row, column), value in np.ndenumerate(means):
            ink = "white" if value < 0.6 else "black"
            right.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=ink)
    right.set_xticks(range(len(heads)), [str(head) for head in heads])
    step = -(-len(layers) // 16)
    right.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    right.set(xlabel="head", ylabel="layer")
    right.set_title("mean over the text", fontsize=10)
    figure.colorbar(picture, ax=right, pad=0.02).set_label("p(l=0)")
    figure.suptitle(title, fontsize=11)
    save(figure, path)
