"""The sequences that are decoded together: one cache, a row for each.

A new row begins with the state after its prompt. A row can be removed at any time. The states of
the other rows are then copied unchanged. The states of layers with full attention grow. Their rows
are padded on the left.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from latte.layers.mixer import MixerState
from latte.layers.rollback import map_tensors
from latte.models.cache import LatteCache
from latte.ops.state import WindowState


def joined(config: Any, caches: Sequence[LatteCache]) -> LatteCache:
    """One cache with the rows of all these caches. These must not be used any more.

    Each cache has read at least one token.
    """
    if len(caches) == 1:
        return caches[0]
    cache = LatteCache(config)
    cache.model = caches[-1].model
    seen = max(each.get_seq_length() for each in caches)
    states = []
    for index, layer in enumerate(cache.layers):
        each = [other.layers[index].state for other in caches]
        if layer.grows:
            each = _of_one_length(each)
            assert each[0].window is not None
            seen = each[0].window.mask.shape[1]  # number of tokens in it, padding included
        states.append(_cat(each))
    for layer, state in zip(cache.layers, states, strict=True):
        layer.update(state, seen)
    return cache


def _of_one_length(states: Sequence[MixerState]) -> list[MixerState]:
    """States that grow, padded on the left to the longest of their rows."""
    windows = [_without_padding(state.window) for state in states if state.window is not None]
    length = max(window.mask.shape[1] for window in windows)
    padded = [map_tensors(partial(_pad, length=length), window) for window in windows]
    return [x._replace(window=window) for x, window in zip(states, padded, strict=True)]


def _without_padding(window: WindowState) -> WindowState:
    """Remove padding that no row needs after a longer row was removed."""
    begin = int(window.mask.any(0).long().argmax())
    return WindowState(*(x[:, begin:] for x in window))


def _pad(x_BTX: Tensor, length: int) -> Tensor:
    missing = length - x_BTX.shape[1]
    blank = x_BTX.new_zeros(x_BTX.shape[0], missing, *x_BTX.shape[2:])
    return torch.cat([blank, x_BTX], 1) if missing else x_BTX


def _cat(trees: Sequence[Any]) -> Any:
    """Trees of tensors as one, row after row."""
    first = trees[0]
    if isinstance(first, Tensor):
        return torch.cat([x.to(first.dtype) for x in trees])
    if isinstance(first, tuple):
        items = [_cat(parts) for parts in zip(*trees, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else tuple(items)
    assert all(x is None for x in trees), "rows of one model have the same parts"
    return None
