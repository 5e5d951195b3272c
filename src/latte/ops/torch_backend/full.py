"""Full softmax attention through ``scaled_dot_product_attention``: the transformer's own mixer.

Shape suffixes: B batch, T tokens, S sources (earlier ones included), P earlier sources, H query
heads, G key/value heads, K key width, D value width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.ops import reference
from latte.ops.buffers import without_masked
from latte.ops.state import WindowState
from latte.ops.torch_backend.pieces import rows_of
from latte.ops.validation import computation_dtype


def full_attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGD: Tensor,
    *,
    scale: float,
    softcap: float | None,
    causal: bool,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: WindowState | None,
) -> Tensor:
    """Softmax attention over all (visible) keys, in O(T^2) operations; packed rows apart."""
    if softcap is not None:
        # No kernel of PyTorch's takes a soft cap on the CPU: the weights are formed.
        dtype = computation_dtype(q_BTHK.dtype)
        return reference.sliding_window_attention(
            q_BTHK.to(dtype),
            k_BTGK.to(dtype),
            v_BTGD.to(dtype),
            window=None,
            scale=scale,
            softcap=softcap,
            causal=causal,
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
            initial_state=initial_state,
        )
    T = q_BTHK.shape[1]
    if cu_seqlens is None:
        return _attend(q_BTHK, k_BTGK, v_BTGD, scale, causal, key_mask, initial_state)
    if torch.compiler.is_compiling():
        seen = reference.visible_sources(
            T, causal=causal, key_mask=key_mask, cu_seqlens=cu_seqlens, device=q_BTHK.device
        )
        k_BTGK, v_BTGD = without_masked(key_mask, k_BTGK), without_masked(key_mask, v_BTGD)
        return _sdpa(q_BTHK, k_BTGK, v_BTGD, scale, seen[:, None], False)
    out = v_BTGD.new_zeros(*q_BTHK.shape[:3], v_BTGD.shape[-1])
    everything = slice(0, T)
    for rows in rows_of(q_BTHK, q_BTHK[0, 0].numel(), T, cu_seqlens):
        q, k, v = (rows.take(x, everything) for x in (q_BTHK, k_BTGK, v_BTGD))
        mask = rows.visible(key_mask, everything)
        y = _attend(q, k, v, scale, causal, mask, None).to(out.dtype)
        out = rows.scattered(out, y)
    return out


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    key_mask: Tensor | None,
    earlier: WindowState | None,
) -> Tensor:
    T, P = q.shape[1], 0
    k, v = without_masked(key_mask, k), without_masked(key_mask, v)
    if earlier is not None:
        P = earlier.keys.shape[1]
        k, v = torch.cat([earlier.keys, k], 1), torch.cat([earlier.values, v], 1)
        own = k.new_ones(k.shape[0], T, dtype=torch.bool) if key_mask is None else key_mask
        key_mask = torch.cat([earlier.mask, own], 1)
    if key_mask is None:
        return _sdpa(q, k, v, scale, None, causal)
    seen = key_mask[:, None, None, :]
    if causal:
        gap = torch.arange(T, device=q.device)[:, None] + P
        seen = seen & (gap >= torch.arange(T + P, device=q.device)[None])
    else:
        seen = seen.expand(-1, 1, T, -1)
    return _sdpa(q, k, v, scale, seen, False)


def _sdpa(
    q_BTHK: Tensor, k_BSGK: Tensor, v_BSGD: Tensor, scale: float, seen: Tensor | None, causal: bool
) -> Tensor:
    repeats = q_BTHK.shape[2] // k_BSGK.shape[2]
    if repeats > 1:
        k_BSGK = k_BSGK.repeat_interleave(repeats, 2)
        v_BSGD = v_BSGD.repeat_interleave(repeats, 2)
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGD))
    if seen is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale).transpose(
            1, 2
        )
    # A query without a visible key would be NaN, or an average: let it look at all, then zero it.
    alive = seen.any(-1, keepdim=True)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen | ~alive, scale=scale)
    return (out * alive).transpose(1, 2)
