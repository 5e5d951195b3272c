"""The ops that the checks look at: their inputs, a call of each, and what they promise.

Shape suffixes: B batch, T tokens, H query heads, G key/value heads, L latents per head, K key
width, D value width, E channels, N states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from latte.ops import (
    LatteState,
    WindowState,
    causal_conv1d,
    latte_attention,
    macchiato_attention,
    rg_lru,
    sliding_window_attention,
)

WINDOW = 128
Sizes = dict[str, int]
Normal = Callable[..., Tensor]  # (*shape) -> standard normal numbers


@dataclass(frozen=True)
class Case:
    """One op: ``run(*make(...), **options)`` gives the output and the state.

    ``values``: which input is averaged, so that ones in give ones out; ``sources``: which input's
    gradient sums to zero over the tokens; ``tokens``: how many inputs have tokens (the rest are
    parameters); ``past``: whether an output depends on earlier tokens alone.
    """

    run: Callable[..., tuple[Tensor, Any]]
    make: Callable[[Normal, int, int, Sizes], list[Tensor]]
    state: Callable[[Normal, int, Sizes], Any]
    tokens: int
    values: int | None = None
    sources: int | None = None
    past: bool = True
    options: dict[str, Any] = field(default_factory=dict)


def _latte(normal: Normal, B: int, T: int, s: Sizes) -> list[Tensor]:
    return [normal(B, T, s["H"], n) for n in (s["L"], s["L"], s["D"])]


def _latte_state(normal: Normal, N: int, s: Sizes) -> LatteState:
    return LatteState(normal(N, s["H"], s["L"]).float(), normal(N, s["H"], s["L"], s["D"]).float())


def _local(normal: Normal, B: int, T: int, s: Sizes) -> list[Tensor]:
    return [normal(B, T, s[h], s[n]) for h, n in (("H", "K"), ("G", "K"), ("G", "D"))]


def _local_state(normal: Normal, N: int, s: Sizes) -> WindowState:
    k, v = (normal(N, WINDOW - 1, s["G"], s[n]) for n in ("K", "D"))
    return WindowState(k, v, torch.ones_like(k[:, :, 0, 0], dtype=torch.bool))


def _macchiato(normal: Normal, B: int, T: int, s: Sizes) -> list[Tensor]:
    latent = [normal(B, T, s["H"], s["L"] + 1), normal(B, T, s["H"], s["L"])]
    return [*latent, *_local(normal, B, T, s)]


def _macchiato_state(normal: Normal, N: int, s: Sizes) -> Any:
    return _latte_state(normal, N, s), _local_state(normal, N, s)


def _rg_lru(normal: Normal, B: int, T: int, s: Sizes) -> list[Tensor]:
    return [*(normal(B, T, s["E"]) for _ in range(3)), normal(s["E"]) - 4.0]


def _conv(normal: Normal, B: int, T: int, s: Sizes) -> list[Tensor]:
    return [normal(B, T, s["E"]), normal(s["E"], s["taps"]), normal(s["E"])]


def _tail(normal: Normal, N: int, s: Sizes) -> Tensor:
    return normal(N, s["taps"] - 1, s["E"])


CASES = {
    "latte": Case(latte_attention, _latte, _latte_state, 3, values=2, sources=1),
    "bidirectional": Case(
        latte_attention,
        _latte,
        _latte_state,
        3,
        values=2,
        sources=1,
        past=False,
        options={"causal": False},
    ),
    "macchiato": Case(
        macchiato_attention,
        _macchiato,
        _macchiato_state,
        5,
        values=4,
        sources=1,
        options={"window": WINDOW},
    ),
    "window": Case(
        sliding_window_attention,
        _local,
        _local_state,
        3,
        values=2,
        options={"window": WINDOW},
    ),
    "rg_lru": Case(rg_lru, _rg_lru, lambda normal, N, s: normal(N, s["E"]).float(), 3),
    "conv": Case(causal_conv1d, _conv, _tail, 1),
}


def tensors_of(tree: Any) -> list[Tensor]:
    """The floating-point tensors of nested tuples, in order."""
    if isinstance(tree, Tensor):
        return [tree] if tree.is_floating_point() else []
    return [x for item in tree for x in tensors_of(item)] if isinstance(tree, tuple) else []


def map_state(fn: Callable[[Tensor], Tensor], state: Any) -> Any:
    """``fn`` of every floating-point tensor of a state."""
    if isinstance(state, Tensor):
        return fn(state) if state.is_floating_point() else state
    if hasattr(state, "_fields"):
        return type(state)(*(map_state(fn, x) for x in state))
    return tuple(map_state(fn, x) for x in state)
