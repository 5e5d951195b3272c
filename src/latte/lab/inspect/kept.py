"""What a model keeps of a text: the tokens that stay exact after they have left the window.

Each layer keeps N tokens in each group of key heads, those with the largest scores (module
:mod:`latte.ops.kept`). They are taken from the cache after the text, and shown as the text with
these tokens marked, by layer and group: a page, a figure, two tables and a few lines.

Shape suffixes: N kept tokens, M slots of a state, G groups of key heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from latte.lab.evaluate.generate import read
from latte.lab.evaluate.plots import canvas, save
from latte.lab.evaluate.tables import write_csv
from latte.lab.inspect.pages import filled_page, rounded
from latte.models import LatteCache

FILES = ("kept.csv", "kept_summary.csv", "kept.png", "kept.html")
COLUMNS = ("layer", "group", "rank", "position", "token", "score")  # of kept.csv
MOST_KEPT = 8  # tokens that the outline names
BINS = 400  # columns of the figure
MAP = "viridis"


@dataclass(frozen=True)
class KeptTokens:
    """What one layer keeps after a text.

    Attributes:
        positions_NG: Positions of the kept tokens, the largest score first, int64; -1 where fewer
            are kept.
        scores_NG: Their scores.
        window: First position that the window still sees, so that it is not decided yet whether it
            is kept.
    """

    positions_NG: Tensor
    scores_NG: Tensor
    window: int

    @classmethod
    def of_state(cls, state: Any, count: int) -> KeptTokens:
        """The kept tokens of the first sequence of a :class:`latte.ops.kept.KeptState`.

        Args:
            state: State with ``positions`` and ``scores``, (N, M, G), and ``seen``, (N,).
            count: Number of slots for kept tokens. The other slots are the window's.
        """
        positions_MG, scores_MG = (x[0].detach().cpu() for x in (state.positions, state.scores))
        recent = positions_MG[count:]
        recent = recent[recent >= 0]
        window = int(recent.min()) if recent.numel() else int(state.seen[0])
        return cls(positions_MG[:count], scores_MG[:count].double(), window)

    @property
    def groups(self) -> int:
        return self.positions_NG.shape[1]

    def of_group(self, group: int) -> Iterator[tuple[int, int, float]]:
        """(rank from 1 on, position, score) of each kept token."""
        both = zip(self.positions_NG[:, group].tolist(), self.scores_NG[:, group].tolist(),
                   strict=True)  # fmt: skip
        yield from ((n, p, score) for n, (p, score) in enumerate(both, 1) if p >= 0)


@dataclass(frozen=True)
class Token:
    """One row of kept_summary.csv: a token that is kept somewhere.

    Attributes:
        layers: Number of layers that keep it in at least one group.
        groups: Number of groups that keep it, over all layers.
        highest: Largest of its scores.
    """

    position: int
    token: str
    layers: int
    groups: int
    highest: float


def collect_kept(
    model: Any, ids: Sequence[int], layers: Mapping[int, nn.Module]
) -> dict[int, KeptTokens]:
    """What these layers keep after the tokens; none for a model that keeps none.

    Args:
        ids: Tokens of the text.
        layers: Layers by number, from 0.
    """
    sizes = getattr(model.config, "kept_sizes", lambda layer: None)
    # Where not every layer of a model is of Latte, its caches count the others too.
    places: dict[int, int] = {n: getattr(x, "layer_idx", n) for n, x in layers.items()}
    counts = {n: size[0] for n, place in places.items() if (size := sizes(place)) is not None}
    if not counts:
        return {}
    cache = LatteCache(model.config)
    read(model, list(ids), cache)
    found = {}
    for number, count in counts.items():
        state: Any = cache.layers[places[number]].state
        found[number] = KeptTokens.of_state(state.kept, count)
    return found


def write_kept(
    folder: Path, tokens: Sequence[str], kept: Mapping[int, KeptTokens], title: str
) -> None:
    """Write :data:`FILES` into a folder.

    Args:
        tokens: Labels of all tokens of the text.
        kept: What layers keep of it, by number.
        title: Name of model and text.
    """
    write_csv(folder / "kept.csv", COLUMNS, rows(tokens, kept))
    names = [each.name for each in fields(Token)]
    found = [asdict(token) | {"highest": f"{token.highest:.6g}"} for token in summary(tokens, kept)]
    write_csv(folder / "kept_summary.csv", names, found)
    figure(folder / "kept.png", tokens, kept, f"Kept tokens: {title}")
    (folder / "kept.html").write_text(build_page(tokens, kept, title), encoding="utf-8")


def summary(tokens: Sequence[str], kept: Mapping[int, KeptTokens]) -> list[Token]:
    """One row for each token that is kept somewhere, in the text's order."""
    groups: dict[int, int] = {}
    layers: dict[int, set[int]] = {}
    highest: dict[int, float] = {}
    for layer, found in kept.items():
        for group in range(found.groups):
            for _, position, score in found.of_group(group):
                groups[position] = groups.get(position, 0) + 1
                layers.setdefault(position, set()).add(layer)
                highest[position] = max(score, highest.get(position, -math.inf))
    return [
        Token(position, tokens[position], len(layers[position]), groups[position],
              highest[position])
        for position in sorted(groups)
    ]  # fmt: skip


def rows(tokens: Sequence[str], kept: Mapping[int, KeptTokens]) -> Iterator[dict[str, Any]]:
    """The rows of kept.csv: a kept token of a group."""
    for layer, found in kept.items():
        for group in range(found.groups):
            for rank, position, score in found.of_group(group):
                yield {
                    **{"layer": layer, "group": group, "rank": rank},
                    **{"position": position, "token": tokens[position], "score": f"{score:.6g}"},
                }


def outline(tokens: Sequence[str], kept: Mapping[int, KeptTokens]) -> str:
    """A few lines: how many tokens are kept, and which by the most groups."""
    groups = sum(found.groups for found in kept.values())
    counts = {len(found.positions_NG) for found in kept.values()}
    most = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    found = summary(tokens, kept)
    lines = [
        f"kept tokens: up to {most} in each of {groups} groups of {len(kept)} layers,"
        f" {len(found):,} different ones of {len(tokens):,}"
    ]
    if not found:
        return f"{lines[0]}; none has left the window yet"
    leading = sorted(found, key=lambda token: (-token.groups, token.position))[:MOST_KEPT]
    named = (f"{x.token!r} at {x.position} ({x.groups} of {groups})" for x in leading)
    return "\n".join([*lines, f"kept by the most groups: {', '.join(named)}"])


def figure(path: Path, tokens: Sequence[str], kept: Mapping[int, KeptTokens], title: str) -> None:
    """Share of a layer's groups that keep a token, by position; the most kept token of a bin."""
    layers = sorted(kept)
    width = -(-len(tokens) // BINS)
    grid = np.zeros((len(layers), -(-len(tokens) // width)))
    for row, layer in enumerate(layers):
        positions = kept[layer].positions_NG
        counts = np.bincount(positions[positions >= 0].numpy(), minlength=len(tokens))
        padded = np.pad(counts, (0, -len(tokens) % width))
        grid[row] = padded.reshape(-1, width).max(1) / kept[layer].groups
    drawn, (axis,) = canvas(1, (10.0, max(2.6, 1.4 + 0.16 * len(layers))))
    extent = (0, grid.shape[1] * width, len(layers) - 0.5, -0.5)
    picture = axis.imshow(
        grid, aspect="auto", cmap=MAP, vmin=0, vmax=1, extent=extent, interpolation="nearest"
    )
    step = -(-len(layers) // 16)
    axis.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    axis.axvline(min(x.window for x in kept.values()), color="white", linestyle=":", linewidth=1)
    axis.grid(False)
    axis.set(xlabel="position (tokens); behind the line is the window", ylabel="layer")
    axis.set_title(title, fontsize=11)
    drawn.colorbar(picture, ax=axis, pad=0.015).set_label("share of groups that keep the token")
    save(drawn, path)


def build_page(tokens: Sequence[str], kept: Mapping[int, KeptTokens], label: str) -> str:
    """The page as text: the text with kept tokens marked, by layer and group."""
    data = {
        "tokens": list(tokens),
        "layers": [
            {
                "number": layer,
                "window": found.window,
                "groups": [
                    [[position, rounded(score, 5)] for _, position, score in found.of_group(g)]
                    for g in range(found.groups)
                ],
            }
            for layer, found in kept.items()
        ],
    }
    return filled_page("kept.html", label, data)
