"""The window's tail: checking it, and rolling it forward with plain indexing.

Shape suffixes: B batch, T tokens, N states (B, or the packed sequences), P tail slots (W-1),
G key/value heads, K key width, D value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from latte.ops.buffers import without_masked
from latte.ops.state import WindowState
from latte.ops.validation import check_state


def check_window_state(
    op: str, state: WindowState, window: int | None, N: int, k_BTGK: Tensor, v_BTGD: Tensor
) -> WindowState:
    """The state fits the window (any length of tail if ``window`` is None)."""
    if not isinstance(state, tuple) or len(state) != 3 or not isinstance(state[0], Tensor):
        raise ValueError(
            f"{op}: initial_state must be a tuple (keys, values, mask), got {type(state).__name__}"
        )
    P = window - 1 if window is not None else state[0].shape[1] if state[0].ndim > 1 else 0
    G, K, D = *k_BTGK.shape[2:], v_BTGD.shape[-1]
    shapes = ((N, P, G, K), (N, P, G, D), (N, P))
    check_state(op, tuple(state), ("keys", "values", "mask"), shapes, k_BTGK.device)
    keys, values, mask = state
    return WindowState(keys.to(k_BTGK.dtype), values.to(v_BTGD.dtype), mask)


def final_window_state(
    k_BTGK: Tensor,
    v_BTGD: Tensor,
    window: int | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: WindowState | None,
) -> WindowState:
    """The last W-1 keys and values of every sequence; masked tokens are kept, as masked slots."""
    B, T = k_BTGK.shape[:2]
    real_BT = k_BTGK.new_ones(B, T, dtype=torch.bool) if key_mask is None else key_mask
    if window is None:
        k_BTGK, v_BTGD = without_masked(key_mask, k_BTGK), without_masked(key_mask, v_BTGD)
    if cu_seqlens is not None and window is not None:
        return _final_packed(k_BTGK, v_BTGD, real_BT, window - 1, cu_seqlens, initial_state)
    parts: list[tuple[Tensor, ...]] = [(k_BTGK, v_BTGD, real_BT)]
    if initial_state is not None:
        parts.insert(0, tuple(initial_state))
    if window is not None:
        missing = window - 1 - sum(part[2].shape[1] for part in parts)
        if missing > 0:
            blank = [x.new_zeros(B, missing, *x.shape[2:]) for x in parts[0]]
            parts.insert(0, tuple(blank))
    keys, values, mask = (
        torch.cat(xs, 1) if len(xs) > 1 else xs[0] for xs in zip(*parts, strict=True)
    )
    # narrow, not a negative slice: a window of 1 keeps nothing. clone: the tail must not keep
    # the whole sequence's buffer alive.
    start = 0 if window is None else keys.shape[1] - (window - 1)
    return WindowState(
        *(x.narrow(1, start, x.shape[1] - start).clone() for x in (keys, values, mask))
    )


def _final_packed(
    k_1TGK: Tensor,
    v_1TGD: Tensor,
    real_1T: Tensor,
    P: int,
    cu_seqlens: Tensor,
    initial_state: WindowState | None,
) -> WindowState:
    """Slot j of sequence n holds its token ``end - P + j``, or the earlier tail's slot."""
    T = k_1TGK.shape[1]
    start_N1, end_N1 = cu_seqlens[:-1, None].long(), cu_seqlens[1:, None].long()
    token_NP = end_N1 - P + torch.arange(P, device=cu_seqlens.device)
    own_NP = token_NP >= start_N1
    if T == 0:
        k_1TGK, v_1TGD, real_1T = (
            x.new_zeros(1, 1, *x.shape[2:]) for x in (k_1TGK, v_1TGD, real_1T)
        )
    index = token_NP.clamp(0, max(T - 1, 0))
    fresh = (k_1TGK[0, index], v_1TGD[0, index], real_1T[0, index])
    slot = (token_NP - start_N1 + P).clamp(0, max(P - 1, 0))
    merged = []
    for i, new in enumerate(fresh):
        own = own_NP.reshape(*own_NP.shape, *([1] * (new.ndim - 2)))
        if initial_state is None:
            old = torch.zeros_like(new)
        else:
            rows = torch.arange(new.shape[0], device=slot.device)[:, None]
            old = initial_state[i][rows, slot]
        merged.append(torch.where(own, new, old))
    return WindowState(*merged)
