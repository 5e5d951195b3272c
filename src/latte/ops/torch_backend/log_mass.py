"""The log-mass of a window: the logsumexp of its logits, the log of its softmax's denominator.

Queries are read in blocks, so that time and memory are linear in T. The gradients are autograd's.
They keep the weights of all blocks, (T, W + C) numbers per head.

Shape suffixes: B batch, T tokens, Z blocks of C queries, M = W + C keys of a block, H query heads,
G key/value heads, R = H / G, n sinks, K key width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.ops.arguments import Macchiato, Window
from latte.ops.state import SeenSinks
from latte.ops.tensors import (
    Local,
    computation_dtype,
    nothing_out,
    real_tokens,
    sequence_bounds,
)

LONGEST_BLOCK = 128  # queries
LOGITS_AT_ONCE = 1 << 24  # without gradients, as many as are held together


def window_log_mass(x: Window) -> Tensor:
    """``log sum_s exp(logit_ts)`` over the keys and sinks visible to a causal query, (B, T, H).

    The result has the dtype of the sums. A query without visible keys gets the lowest finite
    number or a little more. Values are not read.
    """
    q_BTHK, k_BTGK, window, sinks, mask = x.q, x.k, x.window, x.sinks, x.tail_mask
    B, T, H, _ = q_BTHK.shape
    if T == 0:
        nothing = q_BTHK.new_zeros(B, T, H, dtype=computation_dtype(q_BTHK.dtype))
        return nothing_out(nothing, q_BTHK, k_BTGK)
    # Comparisons, not minima: a compiled graph then serves every length of one case.
    keys = T + (0 if mask is None else mask.shape[1])
    if keys < window:  # there are no more keys
        window = keys
    local = x.local._replace(window=window)
    C = LONGEST_BLOCK if LONGEST_BLOCK < window else window
    C = C if C < T else T
    while C > 1 and B * H * C * window > LOGITS_AT_ONCE:
        C = (C + 1) // 2
    at_once, runs = T, 1
    if not (torch.is_grad_enabled() and (q_BTHK.requires_grad or k_BTGK.requires_grad)):
        blocks = LOGITS_AT_ONCE // (B * H * C * (window + C))
        at_once = C * blocks if blocks > 1 else C
        runs = -(-T // at_once)  # a compiled graph depends on the number of runs, not on the length
    real = real_tokens(q_BTHK, x.key_mask)
    sequence_BT = None
    if x.cu_seqlens is not None:
        token = torch.arange(T, device=q_BTHK.device)
        bounds = sequence_bounds(x.cu_seqlens)
        sequence_BT = torch.searchsorted(bounds, token, right=True)[None] - 1
    # The keys before the first query: the state's, or none.
    k_BSGK, real_BS = _after(x, real, window)
    found = []
    for run in range(runs):
        start = run * at_once
        own, seen = slice(start, start + at_once), slice(start, start + at_once + window)
        found.append(
            _of_queries(
                q_BTHK[:, own],
                k_BSGK[:, seen],
                real_BS[:, seen],
                local,
                C,
                None if sinks is None else _of_tokens(sinks, own, sequence_BT),
                None if sequence_BT is None else (sequence_BT, start),
            )
        )
    return torch.cat(found, 1)


def joint(op: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """A backend's op of :class:`Macchiato`, which itself computes no joint softmax."""

    def joint_op(x: Macchiato, causal: bool) -> tuple[Tensor, ...]:
        return op(x if not x.joint else with_window_mass(x), causal)

    return joint_op


def with_window_mass(x: Macchiato) -> Macchiato:
    """The call with the window's log-mass added to its logit, column 0, in place of ``joint``.

    The largest logit is subtracted from all, which changes no probability: what is rounded to half
    precision is then small where it matters. Logits stay finite: a softmax over latents that are
    all -inf would be NaN.
    """
    dtype, mass_BTH = x.latent_q.dtype, window_log_mass(x.near())
    logits = F.pad(mass_BTH[..., None], (0, x.latent_q.shape[-1] - 1)) + x.latent_q
    logits = logits - logits.detach().amax(-1, keepdim=True)
    return x._replace(latent_q=logits.clamp_min(torch.finfo(dtype).min).to(dtype), joint=False)


def _after(x: Window, real_BT: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """All keys and their mask, with exactly W before the first token."""
    B, _, G, K = x.k.shape
    before, mask = x.k.new_zeros(B, window, G, K), real_BT.new_zeros(B, window)
    if x.tail_k is not None and x.tail_mask is not None and x.tail_mask.shape[1]:
        held = min(window, x.tail_mask.shape[1])
        before = torch.cat([before[:, held:], x.tail_k[:, -held:].to(x.k.dtype)], 1)
        mask = torch.cat([mask[:, held:], x.tail_mask[:, -held:]], 1)
    k_BSGK, real_BS = torch.cat([before, x.k], 1), torch.cat([mask, real_BT], 1)
    return k_BSGK.masked_fill(~real_BS[..., None, None], 0.0), real_BS


def _of_tokens(sinks: SeenSinks, own: slice, sequence_BT: Tensor | None) -> SeenSinks:
    """The sinks of some queries; of packed rows each token's own, keys (1, t, n, G, K)."""
    q, keys, values, mask, seen = sinks
    if sequence_BT is not None:
        index = sequence_BT[0, own]
        keys, mask = keys[index][None], mask[index][None]
    return SeenSinks(q[:, own], keys, values, mask, seen[:, own])


def _of_queries(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    real_BS: Tensor,
    local: Local,
    C: int,
    sinks: SeenSinks | None,
    packed: tuple[Tensor, int] | None,
) -> Tensor:
    """The log-mass of consecutive queries, whose keys begin W tokens before them."""
    T, H, G, window = *q_BTHK.shape[1:3], k_BSGK.shape[2], local.window
    assert window is not None
    wide = computation_dtype(q_BTHK.dtype)
    Z = -(-T // C)
    device = q_BTHK.device

    def blocks(x: Tensor, length: int) -> Tensor:
        """(B, S, ...) -> (B, Z, length, ...): each begins C tokens after the one before."""
        short = (Z - 1) * C + length - x.shape[1]
        if short > 0:
            x = torch.cat([x, x.new_zeros(x.shape[0], short, *x.shape[2:])], 1)
        if Z == 1:
            return x[:, None]
        if length == C:
            return x.unflatten(1, (-1, C))
        return x.unfold(1, length, C).movedim(-1, 2)

    def scores(queries: Tensor, keys: Tensor, pattern: str) -> Tensor:
        queries = blocks(queries, C).unflatten(3, (G, H // G)).to(wide)
        logits = torch.einsum(pattern, queries, keys.to(wide)) * local.scale
        return local.softcap * torch.tanh(logits / local.softcap) if local.softcap else logits

    lowest = torch.finfo(wide).min / 2
    near = scores(q_BTHK, blocks(k_BSGK, window + C), "bzcgrk,bzmgk->bzgrcm")
    place_C1 = torch.arange(C, device=device)[:, None]
    gap_CM = place_C1 + window - torch.arange(window + C, device=device)
    seen = ((gap_CM >= 0) & (gap_CM < window)) & blocks(real_BS, window + C)[:, :, None]
    if packed is not None:
        sequence_BT, start = packed
        around = torch.cat([sequence_BT.new_full((1, window), -1), sequence_BT], 1)
        whole = blocks(around[:, start : start + window + T], window + C)
        seen = seen & (whole[:, :, None] == whole[:, :, window:, None])
    logits = near.masked_fill(~seen[:, :, None, None], lowest)
    if sinks is not None:
        n = sinks.mask.shape[-1]
        order = torch.arange(n, device=device)
        if packed is None:
            far = scores(sinks.q, sinks.keys, "bzcgrk,bngk->bzgrcn")
            kept = sinks.mask[:, None, None]
        else:
            far = scores(sinks.q, blocks(sinks.keys, C), "bzcgrk,bzcngk->bzgrcn")
            kept = blocks(sinks.mask, C)
        gone = (order < blocks(sinks.seen, C)[..., None]) & kept
        logits = torch.cat([logits, far.masked_fill(~gone[:, :, None, None], lowest)], -1)
    mass = torch.logsumexp(logits, -1)  # (B, Z, G, R, C)
    return mass.permute(0, 1, 4, 2, 3).flatten(3, 4).flatten(1, 2)[:, :T]
