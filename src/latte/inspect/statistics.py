"""How the states are used: means, effective numbers, collapse, distances, and by position.

Shape suffixes: T tokens read, P tokens shown, H heads, L latents, S states.

Effective numbers are exponentials of entropies: n equal shares have n, one share has 1. The number
*on average* is that of the mean over t of p(l|t); the number *per token* is the exponential of the
mean entropy. A head whose every token asks all latents alike has a large number of both and tells
tokens apart by none: it is the ratio of the two that shows a division of labour.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from latte.inspect.mixing import Inspection, Mixing

# A latent counts as unused if its mean probability is below this part of an equal share.
UNUSED = 0.01


@dataclass(frozen=True)
class Usage:
    """One row of usage.csv: a state of a head, averaged over all tokens read."""

    layer: int
    head: int
    state: int  # 0 is the window
    mean_probability: float
    of_equal_share: float  # 1 if every state were asked alike
    largest_probability: float
    mean_distance: float  # tokens back, weighted by p(l|t)
    unused: bool


@dataclass(frozen=True)
class Summary:
    """One row of summary.csv: a head. What a layer without latents does not have is None."""

    layer: int
    head: int
    latents: int = 0
    window_share: float | None = None  # mean of p(l=0|t)
    effective_states: float | None = None
    effective_states_per_token: float | None = None
    effective_latents: float | None = None  # over l >= 1, renormalised
    effective_latents_per_token: float | None = None
    unused_latents: int | None = None  # below 1% of an equal share of all states
    unused_among_latents: int | None = None  # below 1% of an equal share of the latents' own mass
    effective_sources: float = math.nan  # of p(s|t), per token, over the tokens shown
    mean_distance: float = math.nan  # of p(s|t), tokens back, over the tokens shown


@dataclass(frozen=True)
class Share:
    """One row of window_share.csv: p(l=0|t) over a range of positions."""

    layer: int
    head: int
    first_position: int
    last_position: int
    window_share: float


def usage_rows(inspection: Inspection) -> list[Usage]:
    """One row per layer, head and state, for the layers with latents."""
    rows = []
    for layer, mixing in inspection.layers.items():
        if mixing.states_THS is None:
            continue
        p_THS = mixing.states_THS.double()
        found = (p_THS.mean(0), p_THS.amax(0), _distances(mixing, inspection.shown))
        for head in range(mixing.heads):
            numbers = (x_HS[head].tolist() for x_HS in found)
            for state, mean, largest, back in zip(mixing.names, *numbers, strict=True):
                share = mean * len(mixing.names)
                rows.append(Usage(layer, head, state, mean, share, largest, back, share < UNUSED))
    return rows


def summary_rows(inspection: Inspection) -> list[Summary]:
    """One row per layer and head."""
    rows = []
    for layer, mixing in inspection.layers.items():
        for head in range(mixing.heads):
            sources, distance = _sources(mixing, head, inspection.shown)
            shared: Any = {"effective_sources": sources, "mean_distance": distance}
            if mixing.states_THS is None:
                rows.append(Summary(layer, head, **shared))
                continue
            p_TS = mixing.states_THS[:, head].double()
            mean_S = p_TS.mean(0)
            has_window = mixing.names[0] == 0
            latent_TL, latent_L = (x[..., int(has_window) :] for x in (p_TS, mean_S))
            row = Summary(
                layer,
                head,
                latents=mixing.latents,
                window_share=float(mean_S[0]) if has_window else None,
                effective_states=_effective(mean_S[None]),
                effective_states_per_token=_effective(p_TS),
                effective_latents=_effective(latent_L[None]),
                effective_latents_per_token=_effective(latent_TL),
                unused_latents=int((latent_L * len(mean_S) < UNUSED).sum()),
                unused_among_latents=int(
                    (latent_L * mixing.latents < UNUSED * latent_L.sum()).sum()
                ),
                **shared,
            )
            rows.append(row)
    return rows


def share_rows(inspection: Inspection) -> list[Share]:
    """The window's share by position, in ranges that grow with it."""
    rows = []
    edges = position_edges(len(inspection.tokens))
    for layer, mixing in inspection.layers.items():
        if mixing.states_THS is None or mixing.names[0] != 0:
            continue
        for head in range(mixing.heads):
            share_T = mixing.states_THS[:, head, 0].double()
            for first, end in zip(edges, edges[1:], strict=False):
                rows.append(Share(layer, head, first, end - 1, float(share_T[first:end].mean())))
    return rows


def position_edges(tokens: int, ranges: int = 40) -> list[int]:
    """Bounds of about so many ranges: one position each at first, then growing by a factor."""
    return [0, *np.unique(np.geomspace(1, tokens, ranges + 1).round().astype(int)).tolist()]


def _effective(p_NS: Tensor) -> float:
    """exp of the mean entropy of rows, each normalised and weighted by its mass."""
    mass_N = p_NS.sum(-1)
    entropy_N = torch.special.entr(p_NS / mass_N.clamp_min(1e-300)[:, None]).sum(-1)
    total = mass_N.sum()
    return float("nan") if total == 0 else float(((mass_N * entropy_N).sum() / total).exp())


def _distances(mixing: Mixing, shown: int) -> Tensor:
    """(H, S): how far back a state looks when it is asked: the mean of t - s under
    p(l|t) p(s|l,t). The latents' is over all tokens, the window's over those shown.
    """
    assert mixing.states_THS is not None and mixing.latent_k_THL is not None
    p_THS, k_THL = mixing.states_THS.double(), mixing.latent_k_THL.double()
    T = len(k_THL)
    position_T = torch.arange(T, dtype=torch.float64)
    seen = T - mixing.delay  # tokens that any latent sees by the end
    distances = torch.full((p_THS.shape[1], k_THL.shape[2]), torch.nan, dtype=torch.float64)
    if seen > 0:
        # E[s|l,t] by two running log-sums; positions count from 1 to have a logarithm.
        k_THL = k_THL[:seen]
        log_mass = k_THL.logcumsumexp(0)
        first_moment = (k_THL + (position_T[:seen] + 1).log()[:, None, None]).logcumsumexp(0)
        back_THL = position_T[mixing.delay :, None, None] - ((first_moment - log_mass).exp() - 1)
        asked_THL = p_THS[mixing.delay :, :, -k_THL.shape[2] :]
        distances = (asked_THL * back_THL).sum(0) / asked_THL.sum(0)
    if mixing.names[0] != 0:
        return distances
    assert mixing.window_HPP is not None
    back_PP = position_T[:shown, None] - position_T[None, :shown]
    back_HP = (mixing.window_HPP.double() * back_PP).sum(-1)
    asked_HP = p_THS[:shown, :, 0].T
    window_H = (asked_HP * back_HP).sum(-1) / asked_HP.sum(-1)
    return torch.cat([window_H[:, None], distances], 1)


def _sources(mixing: Mixing, head: int, shown: int) -> tuple[float, float]:
    """Effective number of sources per token, and the mean distance, of p(s|t)."""
    weights_PP = mixing.source_weights(head, shown).double()
    position = torch.arange(shown, dtype=torch.float64)
    distance = (weights_PP * (position[:, None] - position[None])).sum(-1).mean()
    return _effective(weights_PP), float(distance)
