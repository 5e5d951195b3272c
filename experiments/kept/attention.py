"""Attention over a window, sinks and kept tokens in the place of a base's own: one softmax.

Between two updates, which are at multiples of `block`, query t sees the sinks s < S, the window
s > first - W with `first` the block's first position, and the kept sources: of all that have left
the window, those with the N largest scores (of equal ones the later). Shape suffixes: B batch, T
tokens, E hidden size, H heads, G key groups, R = H / G, K head width, N kept, M keys that a block
sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from latte.conversion.attention import MacchiatoAttention
from latte.layers.mixer import Projected


def blocks(layer: MacchiatoAttention, block: int, length: int) -> Iterator[tuple[int, int, int]]:
    """(first, stop, left) of each block: sources in [sinks, left) have left the window."""
    for first in range(0, length, block):
        yield first, min(first + block, length), max(layer.num_sinks, first - layer.window + 1)


def kept_sets(
    layer: MacchiatoAttention, score_GT: Tensor, count: int, block: int
) -> Iterator[tuple[int, int, int, Tensor]]:
    """The same, and the positions (G, n) that are kept, n <= count."""
    kept, gone = score_GT.new_zeros((len(score_GT), 0), dtype=torch.long), layer.num_sinks
    for first, stop, left in blocks(layer, block, score_GT.shape[1]):
        new = torch.arange(gone, left).expand(len(score_GT), -1)
        kept, gone = torch.cat([kept, new], 1).sort(1).values.flip(1), left
        order = score_GT.gather(1, kept).sort(dim=1, descending=True, stable=True).indices
        kept = kept.gather(1, order[:, :count])
        yield first, stop, left, kept


def kept_attention(
    layer: MacchiatoAttention, near: Projected, score_GT: Tensor, count: int, block: int
) -> Tensor:
    """Outputs (1, T, E) with at most `count` kept sources of each key group."""
    q, k, v, size = *grouped(layer, near), layer.head_dim
    found = []
    for first, stop, left, kept in kept_sets(layer, score_GT, count, block):
        sinks, window = torch.arange(min(layer.num_sinks, stop)), torch.arange(left, stop)
        near_GM = torch.cat([sinks, window]).expand(len(kept), -1)
        seen_GM = torch.cat([kept, near_GM], 1)
        index = seen_GM[..., None].expand(-1, -1, size)
        own_k, own_v = (x.gather(1, index)[:, None] for x in (k, v))
        later = seen_GM[:, None, :] > torch.arange(first, stop)[:, None]  # (G, t, M)
        logits = (q[:, :, first:stop] @ own_k.mT).masked_fill(later[:, None], -torch.inf)
        found.append(logits.softmax(-1) @ own_v)
    return projected(layer, found)


def projected(layer: MacchiatoAttention, found: list[Tensor]) -> Tensor:
    """The layer's outputs (1, T, E), of each block's outputs (G, R, C, K)."""
    y = torch.cat(found, 2).flatten(0, 1).transpose(0, 1)
    return layer.o_proj(y.flatten(1)[None])  # type: ignore[no-any-return]


def grouped(layer: MacchiatoAttention, near: Projected) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (G, R, T, K), scaled, keys and values (G, T, K) of one row."""
    q, k, v = (x[0].transpose(0, 1) for x in (near.q, near.k, near.v))
    return q.unflatten(0, (len(k), -1)) * layer.scale, k, v


def key_difference(layer: Any, x_BTE: Tensor, block: int) -> Tensor:
    """Minus the cosine (G, T) between each key, not rotated, and the mean direction of the keys
    before the position at which it leaves the window (KeyDiff, arXiv 2504.15364)."""
    k = layer.heads(x_BTE)[1][0].transpose(0, 1)
    k, length = torch.nn.functional.normalize(k, dim=-1), k.shape[1]
    leaves = -(-(torch.arange(length) + layer.window) // block) * block
    mean = torch.nn.functional.normalize(k.cumsum(1)[:, leaves.clamp(max=length) - 1], dim=-1)
    return -(k * mean).sum(-1)
