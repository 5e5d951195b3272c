"""The sequences that are decoded together: one cache, a row for each.

A row joins with the state that its prompt has left, and leaves at any time; the others' states are
copied as they are. In layers of full attention, whose states grow, rows are padded on the left.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from latte.layers.state import MixerState, map_tensors
from latte.models.cache import LatteCache
from latte.ops.state import WindowState


def joined(config: Any, first: LatteCache | None, second: LatteCache) -> LatteCache:
    """A cache with the rows of both, each after what it has read.

    Both may be used no more.
    """
    if first is None:
        return second
    cache = LatteCache(config)
    cache.model = second.model
    pairs = zip(cache.layers, first.layers, second.layers, strict=True)
    states = [(layer, _cat(a.state, b.state, layer.grows)) for layer, a, b in pairs]
    # Of a state that grows, so many tokens are held, padding included.
    grown = [s.window.mask.shape[1] for x, s in states if x.grows and s.window is not None]
    seen = grown[0] if grown else max(first.get_seq_length(), second.get_seq_length())
    for layer, state in states:
        layer.update(state, seen)
    return cache


def _cat(first: MixerState, second: MixerState, grows: bool) -> MixerState:
    if grows and first.window is not None and second.window is not None:
        first, second = (_without_padding(x) for x in (first, second))
        assert first.window is not None and second.window is not None
        length = max(x.window.mask.shape[1] for x in (first, second) if x.window is not None)
        first, second = (_padded(x, length) for x in (first, second))
    return _cat_tensors(first, second)


def _without_padding(state: MixerState) -> MixerState:
    """Without what no row needs any more, since a longer one has left."""
    assert state.window is not None
    used = state.window.mask.any(0)
    begin = int(used.long().argmax())
    return state._replace(window=WindowState(*(x[:, begin:] for x in state.window)))


def _padded(state: MixerState, length: int) -> MixerState:
    assert state.window is not None
    missing = length - state.window.mask.shape[1]

    def pad(x_BTX: Tensor) -> Tensor:
        blank = x_BTX.new_zeros(x_BTX.shape[0], missing, *x_BTX.shape[2:])
        return torch.cat([blank, x_BTX], 1)

    return state._replace(window=map_tensors(pad, state.window)) if missing else state


def _cat_tensors(first: Any, second: Any) -> Any:
    """Two trees of tensors as one, row after row."""
    if isinstance(first, Tensor):
        return torch.cat([first, second.to(first.dtype)])
    if isinstance(first, tuple):
        items = [_cat_tensors(a, b) for a, b in zip(first, second, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else tuple(items)
    assert first is None and second is None, "rows of one model have the same parts"
    return None
