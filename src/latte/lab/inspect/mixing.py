"""A model read on a text: p(l|t), p(s|l,t) and the window's weights of every layer, in one pass;
and how the states are used: means, effective numbers, collapse, distances, and by position.

Shape suffixes: T tokens read, P tokens shown (P <= T, the first ones), H heads, L latents, S
states of p(l|t): the window, if there is one, and then the latents.

Effective numbers are exponentials of entropies: n equal shares have n, one share has 1. The number
*on average* is that of the mean over t of p(l|t). The number *per token* is the exponential of the
mean entropy. If every token gives all latents the same probability, both numbers are large, though
the latents do not distinguish tokens. A large ratio of the two shows that they do.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from latte.conversion.attention import MacchiatoAttention
from latte.errors import LatteError, one_line
from latte.lab.inspect.kept import KeptTokens
from latte.layers import Context, LatteMacchiato, Mixer, RecurrentBlock
from latte.layers.mixer import EMPTY
from latte.layers.weights import state_probabilities, window_weights


@dataclass(frozen=True)
class LayerMixing:
    """One layer's probabilities over one text, whatever kind of layer it is.

    Args:
        states_THS: Probabilities p(l|t), fp32; None for a layer without latents.
        latent_k_THL: Key logits. p(s|l,t) is their softmax over s <= t - ``delay``.
        window_HPP: Softmax of the window, p(s|l=0,t). For a layer without latents, p(s|t).
        width: Number of keys that the window sees, self included; None is all earlier keys.
        delay: Number of tokens after which a latent reads a token.
        half_lives_2HL: Half-lives of latents with decay, in tokens. The first is ln 2 over the
            mean rate on this text. The second is the learnt one, without the part that depends on
            the text. None if nothing is forgotten.
    """

    states_THS: Tensor | None = None
    latent_k_THL: Tensor | None = None
    window_HPP: Tensor | None = None
    width: int | None = None
    delay: int = 0
    half_lives_2HL: Tensor | None = None

    @property
    def heads(self) -> int:
        parts = (self.states_THS, self.window_HPP)
        return next(x.shape[axis] for x, axis in zip(parts, (1, 0), strict=True) if x is not None)

    @property
    def latents(self) -> int:
        """L, 0 for a layer without latents."""
        return 0 if self.latent_k_THL is None else self.latent_k_THL.shape[2]

    @property
    def names(self) -> list[int]:
        """The number of each state: 0 is the window, 1 to L are the latents."""
        if self.states_THS is None:
            return []
        return list(range(self.latents + 1 - self.states_THS.shape[2], self.latents + 1))

    def latent_weights(self, head: int, shown: int) -> Tensor:
        """p(s|l,t) of the first tokens, (L, P, P); rows without a visible source are zero."""
        assert self.latent_k_THL is not None
        token = torch.arange(shown, device=self.latent_k_THL.device)
        seen = token[None] <= token[:, None] - self.delay
        logits = self.latent_k_THL[:shown, head].T[:, None].expand(-1, shown, -1)
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        return weights.masked_fill(~seen, 0.0).float()

    def state_weights(self, head: int, shown: int) -> Tensor:
        """p(s|state,t) of the first tokens for every state of ``names``, (S, P, P)."""
        parts = self.latent_weights(head, shown)
        if self.window_HPP is not None:
            parts = torch.cat([self.window_HPP[None, head, :shown, :shown], parts])
        return parts

    def source_weights(self, head: int, shown: int) -> Tensor:
        """p(s|t) of the first tokens, (P, P): the mixture of the window and the latents."""
        if self.states_THS is None:
            assert self.window_HPP is not None
            return self.window_HPP[head, :shown, :shown]
        p_PS = self.states_THS[:shown, head]
        return torch.einsum("ts,stu->tu", p_PS, self.state_weights(head, shown))


@dataclass(frozen=True)
class Inspection:
    """A model on a text.

    Args:
        label: Name of the model in figures.
        tokens: Labels of all tokens read. The first ``shown`` are shown with all their weights.
        layers: Layers by number, from 0.
        at: Positions of tokens that the user chose.
        kept: What layers keep after the text, by number; only of those that keep tokens.
    """

    label: str
    tokens: list[str]
    shown: int
    layers: dict[int, LayerMixing]
    at: tuple[int, ...] = ()
    kept: Mapping[int, KeptTokens] = field(default_factory=dict)

    @property
    def has_latents(self) -> bool:
        return any(mixing.latents for mixing in self.layers.values())


def find_layers(model: nn.Module, chosen: Sequence[int] | None = None) -> dict[int, nn.Module]:
    """The layers that have attention weights, by number from 0; all of them, or those chosen.

    A layer's number is its place among all layers: recurrent blocks are counted, and left out.

    Raises:
        LatteError: The model has no layers of Latte, is bidirectional, or has no layer of that
            number with attention weights.
    """
    found = [m for m in model.modules() if isinstance(m, Mixer | MacchiatoAttention)]
    if not found:
        raise LatteError(
            f"{type(model).__name__} has no layer of Latte: expected a checkpoint of latte train "
            "or latte convert"
        )
    shown = [i for i, layer in enumerate(found) if not isinstance(layer, RecurrentBlock)]
    wanted = shown if chosen is None else sorted(set(chosen))
    if not shown:
        raise LatteError(
            f"{type(model).__name__} has recurrent blocks alone: expected a layer that has"
            " attention weights"
        )
    if not all(getattr(layer, "causal", True) for layer in found):
        raise LatteError("a bidirectional model cannot be inspected: expected a causal one")
    for number in wanted:
        if not 0 <= number < len(found):
            raise LatteError(
                f"layers: expected numbers from 0 to {len(found) - 1}, since the model has "
                f"{len(found)} layers, got {number}"
            )
        if number not in shown:
            raise LatteError(
                f"layers: layer {number} is a recurrent block, which has no attention weights:"
                f" expected numbers among {', '.join(map(str, shown))}"
            )
    return {number: found[number] for number in wanted}


@torch.no_grad()
def collect(
    model: Any, input_ids: Sequence[int], layers: Mapping[int, nn.Module], shown: int
) -> dict[int, LayerMixing]:
    """Run the model over one text and keep what its layers do.

    Raises:
        LatteError: A user's own mixer does not return its weights.
    """
    kept: dict[nn.Module, LayerMixing] = {}

    def keep(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kind = MacchiatoAttention if isinstance(layer, MacchiatoAttention) else Mixer
        given = inspect.signature(kind.forward).bind(layer, *args, **kwargs).arguments
        try:
            kept[layer] = _mixing_of(layer, given, shown)
        except (TypeError, ValueError) as error:
            name = type(layer).__name__
            raise LatteError(f"{name} cannot be inspected: {one_line(error)}") from error

    hooks = [x.register_forward_pre_hook(keep, with_kwargs=True) for x in layers.values()]
    try:
        device = next(model.parameters()).device
        model.base_model(torch.tensor([list(input_ids)], device=device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return {number: kept[layer] for number, layer in layers.items()}


def _mixing_of(layer: nn.Module, arguments: Mapping[str, Any], shown: int) -> LayerMixing:
    """The probabilities of a layer on the arguments of its ``forward``, by name, on the CPU.

    Args:
        shown: Number of tokens whose window weights are kept. It takes O(shown^2) memory per head.
    """
    window = width = half_lives = None
    delay = 0
    if getattr(getattr(layer, "latents", None), "forgetting", "none") != "none":
        half_lives = _half_lives(layer, arguments)
    assert isinstance(layer, Mixer)
    x_BTE, context = _inputs(layer, arguments)
    latent_q, latent_k, q, k = layer.mixing_logits(x_BTE, context=context)
    if isinstance(layer, LatteMacchiato) and q is not None:
        near = layer.near(x_BTE, EMPTY, context)
        window, width = window_weights(layer, near, shown, context), layer.window
        if isinstance(layer, MacchiatoAttention) and layer.mixing == "base":
            width = layer.base_window
        if latent_k is not None and layer.delay_latents:
            delay = layer.window
    elif latent_q is None:
        # Softmax attention, or linear attention, which has weights but no softmax.
        width = layer.window
        window = layer.attention_weights(x_BTE[:, :shown])
    states = None
    if latent_q is not None:
        states = state_probabilities(latent_q.float(), window=q is not None)
        if q is not None:
            # While no token has reached the latents, all of the distribution is the window's.
            states[:, :delay] = torch.eye(states.shape[-1], device=states.device)[0]
    states_THS, window_HPP = (None if x is None else x[0].float().cpu() for x in (states, window))
    if latent_k is not None and latent_k.dtype != torch.float64:
        latent_k = latent_k.float()  # fp64: of latents with decay, large over a long text
    latent_k_THL = None if latent_k is None else latent_k[0].cpu()
    return LayerMixing(states_THS, latent_k_THL, window_HPP, width, delay, half_lives)


def _inputs(layer: nn.Module, arguments: Mapping[str, Any]) -> tuple[Tensor, Context]:
    """The input (B, T, E) and the context of a call of the layer's ``forward``."""
    context: Context = arguments["context"]
    if isinstance(layer, MacchiatoAttention):
        return arguments["hidden_states"], layer.turned(context, arguments["position_embeddings"])
    return arguments["x_BTE"], context


def _half_lives(layer: nn.Module, arguments: Mapping[str, Any]) -> Tensor:
    """``LayerMixing.half_lives_2HL`` of a layer on these arguments."""
    latents: Any = layer.latents
    x_BTE, context = _inputs(layer, arguments)
    _, _, log_decay, _ = latents(x_BTE.to(latents.k_proj.weight.dtype), EMPTY, context)
    learnt_HL = softplus(latents.decay_bias.double()).unflatten(0, (latents.num_heads, -1))
    return math.log(2.0) / torch.stack([-log_decay[0].double().mean(0), learnt_HL]).cpu()


# ---- how the states are used

# A latent counts as unused if its mean probability is below this part of an equal share.
UNUSED = 0.01


@dataclass(frozen=True)
class Usage:
    """One row of usage.csv: a state of a head, averaged over all tokens read."""

    layer: int
    head: int
    state: int  # 0 is the window
    mean_probability: float
    of_equal_share: float  # 1 if all states had the same probability
    largest_probability: float
    mean_distance: float  # tokens back, weighted by p(l|t)
    unused: bool
    half_life: float | None = None  # tokens, in effect on this text; None: nothing is forgotten
    learnt_half_life: float | None = None  # without what the text adds to the rate


@dataclass(frozen=True)
class Summary:
    """One row of summary.csv: a head. Numbers of latents are None in layers without latents."""

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
                lives: list[float] = []
                if state and mixing.half_lives_2HL is not None:
                    lives = mixing.half_lives_2HL[:, head, state - 1].tolist()
                shown = (mean, share, largest, back, share < UNUSED, *lives)
                rows.append(Usage(layer, head, state, *shown))
    return rows


def summary_rows(inspection: Inspection) -> list[Summary]:
    """One row per layer and head."""
    rows = []
    position = torch.arange(inspection.shown, dtype=torch.float64)
    back_PP = position[:, None] - position[None]
    for layer, mixing in inspection.layers.items():
        for head in range(mixing.heads):
            weights_PP = mixing.source_weights(head, inspection.shown).double()
            distance = (weights_PP * back_PP).sum(-1).mean()
            shared: Any = {
                "effective_sources": _effective(weights_PP),
                "mean_distance": float(distance),
            }
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


def position_edges(tokens: int) -> list[int]:
    """Bounds of up to 40 ranges: one position each at first, then growing by a factor."""
    return [0, *np.unique(np.geomspace(1, tokens, 41).round().astype(int)).tolist()]


def _effective(p_NS: Tensor) -> float:
    """exp of the mean entropy of rows, each normalised and weighted by its mass."""
    mass_N = p_NS.sum(-1)
    entropy_N = torch.special.entr(p_NS / mass_N.clamp_min(1e-300)[:, None]).sum(-1)
    total = mass_N.sum()
    return float("nan") if total == 0 else float(((mass_N * entropy_N).sum() / total).exp())


def _distances(mixing: LayerMixing, shown: int) -> Tensor:
    """(H, S): how far back a state reads: the mean of t - s under
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
