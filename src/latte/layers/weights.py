"""Attention weights as dense matrices, (B, H, T, T), for looking at: O(T^2) memory.

Latte's own are in ``latte.ops.attention_weights``; these are the baselines'.
Shape suffixes: B batch, T tokens, H query heads, G key heads, K key width, F feature width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _visible(
    x_BTHK: Tensor,
    window: int | None,
    causal: bool,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """Who sees whom: (B or 1, 1, T, T) bool, query rows and source columns."""
    token = torch.arange(x_BTHK.shape[1], device=x_BTHK.device)
    distance = token[:, None] - token[None, :]
    visible = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        visible = visible & ((distance < window) if causal else (distance.abs() <= window // 2))
    if cu_seqlens is not None:
        sequence = torch.searchsorted(cu_seqlens.long(), token, right=True)
        visible = visible & (sequence[:, None] == sequence[None, :])
    visible = visible[None, None]
    return visible if key_mask is None else visible & key_mask[:, None, None, :]


def softmax_weights(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    *,
    window: int | None = None,
    softcap: float | None = None,
    causal: bool = True,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Softmax attention's weights; a row that sees nothing is zero."""
    k_BTHK = k_BTGK.repeat_interleave(q_BTHK.shape[2] // k_BTGK.shape[2], 2)
    logits = torch.einsum("bthk,bshk->bhts", q_BTHK, k_BTHK) / q_BTHK.shape[-1] ** 0.5
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    visible = _visible(q_BTHK, window, causal, key_mask, cu_seqlens)
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
    return weights.masked_fill(~visible, 0.0)


def linear_weights(
    q_BTHF: Tensor,
    k_BTHF: Tensor,
    *,
    causal: bool = True,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Undirected linear attention's weights, from positive features (paper, eq. 4-5)."""
    visible = _visible(q_BTHF, None, causal, key_mask, cu_seqlens)
    scores = torch.einsum("bthf,bshf->bhts", q_BTHF, k_BTHF).masked_fill(~visible, 0.0)
    total = scores.sum(-1, keepdim=True)
    return scores / torch.where(total == 0, 1.0, total)
