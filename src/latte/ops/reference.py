"""The equations, spelled out in O(T^2): the judge of every backend, meant for fp64.

Shape suffixes: B batch, T queries, S sources, H query heads, G key/value heads, L latents per
head, K key width, D value width, E channels, N packed sequences.

Half-precision inputs are computed in fp32 and rounded at the end. Autograd gives the gradients.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.ops.buffers import without_masked
from latte.ops.packing import sequence_ids, sequence_starts
from latte.ops.state import LatteState, LinearState, WindowState, merge_states


def visible_sources(
    T: int,
    *,
    causal: bool,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    device: torch.device,
    window: int | None = None,
) -> Tensor:
    """(B or 1, T, S) bool: which source a query may read.

    Causal: s <= t, and s > t - window; otherwise |s - t| <= window // 2.
    """
    gap = torch.arange(T, device=device)[:, None] - torch.arange(T, device=device)[None, :]
    seen = gap >= 0 if causal else torch.ones_like(gap, dtype=torch.bool)
    if window is not None:
        seen = seen & ((gap < window) if causal else (gap.abs() <= window // 2))
    seen = seen[None]
    if cu_seqlens is not None:
        ids = sequence_ids(cu_seqlens, T)
        seen = seen & (ids[None, :, None] == ids[None, None, :])
    if key_mask is not None:
        seen = seen & key_mask[:, None, :]
    return seen


def masked_softmax(logits: Tensor, seen: Tensor) -> Tensor:
    """Softmax over the last dimension; a row with nothing to see is all zeros, not an average."""
    logits = logits.masked_fill(~seen, -torch.inf)
    top = logits.detach().amax(-1, keepdim=True)
    top = torch.where(torch.isneginf(top), 0.0, top)
    weights = torch.exp(logits - top)
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total == 0, 1.0, total)


def _per_token(state_NX: Tensor, cu_seqlens: Tensor | None, B: int, T: int) -> Tensor:
    """State (B or N, ...) as seen by every token: (B, T, ...)."""
    if cu_seqlens is None:
        return state_NX[:, None].expand(B, T, *state_NX.shape[1:])
    return state_NX[sequence_ids(cu_seqlens, T)][None]


def latte_weights(
    k_BTHL: Tensor,
    seen_BTS: Tensor,
    latent: int,
    log_mass_BTH: Tensor | None = None,
) -> Tensor:
    """p(s|l,t) for one latent (eq. 8): (B, H, T, S), or S+1 with the earlier state in column 0."""
    logits_BHTS = k_BTHL[..., latent].transpose(1, 2)[:, :, None, :]
    logits_BHTS = logits_BHTS.expand(-1, -1, seen_BTS.shape[1], -1)
    seen = seen_BTS[:, None].expand(logits_BHTS.shape[0], logits_BHTS.shape[1], -1, -1)
    if log_mass_BTH is not None:
        logits_BHTS = torch.cat([log_mass_BTH.transpose(1, 2)[..., None], logits_BHTS], -1)
        seen = torch.cat([torch.ones_like(seen[..., :1]), seen], -1)
    return masked_softmax(logits_BHTS, seen)


def latte_attention(
    q_BTHL: Tensor,
    k_BTHL: Tensor,
    v_BTHD: Tensor,
    *,
    causal: bool,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: LatteState | None,
    output_final_state: bool,
) -> tuple[Tensor, LatteState | None]:
    """y_t = sum_l p(l|t) sum_s p(s|l,t) v_s (paper, eq. 6-14)."""
    B, T, H, L = q_BTHL.shape
    seen = visible_sources(
        T, causal=causal, key_mask=key_mask, cu_seqlens=cu_seqlens, device=q_BTHL.device
    )
    p_BTHL = F.softmax(q_BTHL, -1)
    v_BTHD = without_masked(key_mask, v_BTHD)
    v_BHTD = v_BTHD.transpose(1, 2)
    out_BHTD = torch.zeros_like(v_BHTD)
    for latent in range(L):
        if initial_state is None:
            mean_BHTD = latte_weights(k_BTHL, seen, latent) @ v_BHTD
        else:
            earlier_BTH = _per_token(initial_state.log_mass[..., latent], cu_seqlens, B, T)
            weights = latte_weights(k_BTHL, seen, latent, earlier_BTH)
            mu_BTHD = _per_token(initial_state.mean[..., latent, :], cu_seqlens, B, T)
            mean_BHTD = weights[..., 1:] @ v_BHTD + weights[..., :1] * mu_BTHD.transpose(1, 2)
        out_BHTD = out_BHTD + p_BTHL[..., latent].transpose(1, 2)[..., None] * mean_BHTD
    state = None
    if output_final_state:
        state = _final_latte_state(k_BTHL, v_BTHD, key_mask, cu_seqlens, initial_state)
    return out_BHTD.transpose(1, 2), state


def _final_latte_state(
    k_BTHL: Tensor,
    v_BTHD: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: LatteState | None,
) -> LatteState:
    """Log-mass and mean over all the sources of a sequence, then merged with the earlier state."""
    B, T = k_BTHL.shape[:2]
    real_NT = k_BTHL.new_ones(B, T, dtype=torch.bool) if key_mask is None else key_mask
    if cu_seqlens is not None:
        N = cu_seqlens.shape[0] - 1
        ids = sequence_ids(cu_seqlens, T)
        real_NT = real_NT & (ids[None] == torch.arange(N, device=ids.device)[:, None])
        k_BTHL, v_BTHD = k_BTHL.expand(N, -1, -1, -1), v_BTHD.expand(N, -1, -1, -1)
    k_NHLT = k_BTHL.permute(0, 2, 3, 1)
    seen = real_NT[:, None, None, :].expand_as(k_NHLT)
    mean = masked_softmax(k_NHLT, seen) @ v_BTHD.transpose(1, 2)
    if T == 0:
        log_mass = k_NHLT.new_full(k_NHLT.shape[:-1], -torch.inf)
    else:
        logits = k_NHLT.masked_fill(~seen, -torch.inf)
        top = logits.detach().amax(-1)
        top = torch.where(torch.isneginf(top), 0.0, top)
        mass = torch.exp(logits - top[..., None]).sum(-1)
        empty = mass == 0
        log_mass = torch.where(empty, -torch.inf, top + torch.log(torch.where(empty, 1.0, mass)))
    if initial_state is not None:
        log_mass, mean = merge_states(*initial_state, log_mass, mean)
    return LatteState(log_mass, mean)


def window_logits(q_BTHK: Tensor, k_BSGK: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Local logits (B, H, T, S), scaled and softly capped: c tanh(x / c)."""
    k_BSHK = k_BSGK.repeat_interleave(q_BTHK.shape[2] // k_BSGK.shape[2], 2)
    logits = torch.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK) * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def sliding_window_attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGD: Tensor,
    *,
    window: int | None,
    scale: float,
    softcap: float | None,
    causal: bool,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: WindowState | None,
) -> Tensor:
    """Softmax attention over the last ``window`` keys, self included; over all keys if None."""
    B, T, H, _ = q_BTHK.shape
    k_BTGK, v_BTGD = without_masked(key_mask, k_BTGK), without_masked(key_mask, v_BTGD)
    seen = visible_sources(
        T,
        causal=causal,
        key_mask=key_mask,
        cu_seqlens=cu_seqlens,
        device=q_BTHK.device,
        window=window,
    ).expand(B, T, T)
    logits = window_logits(q_BTHK, k_BTGK, scale, softcap)
    repeats = H // v_BTGD.shape[2]
    v_BTHD = v_BTGD.repeat_interleave(repeats, 2)
    if initial_state is None:
        return torch.einsum("bhts,bshd->bthd", masked_softmax(logits, seen[:, None]), v_BTHD)
    # The earlier keys sit before the sequence's own: tail slot j of P lies at distance
    # (position in the sequence) + P - j from a query.
    P = initial_state.keys.shape[1]
    position = torch.arange(T, device=q_BTHK.device)
    if cu_seqlens is not None:
        position = position - sequence_starts(cu_seqlens, T)
    gap = position[:, None] + P - torch.arange(P, device=q_BTHK.device)[None]
    near = gap >= 0 if window is None else gap < window
    keys, values, earlier_mask = initial_state  # kept as they came; callers widen the others
    keys, values = keys.to(k_BTGK.dtype), values.to(v_BTGD.dtype)
    earlier = (*(without_masked(earlier_mask, x) for x in (keys, values)), earlier_mask)
    tail_k, tail_v, tail_mask = (
        (x if cu_seqlens is None else x[sequence_ids(cu_seqlens, T)]) for x in earlier
    )
    if cu_seqlens is None:
        tail_logits = window_logits(q_BTHK, tail_k, scale, softcap)
        tail_seen = near[None] & tail_mask[:, None]
    else:
        tail_logits = window_logits(q_BTHK.transpose(0, 1), tail_k, scale, softcap)
        tail_logits = tail_logits.permute(2, 1, 0, 3)
        tail_seen = (near & tail_mask)[None]
    weights = masked_softmax(
        torch.cat([tail_logits, logits], -1), torch.cat([tail_seen, seen], -1)[:, None]
    )
    pattern = "bhts,bshd->bthd" if cu_seqlens is None else "bhts,tshd->bthd"
    old = torch.einsum(pattern, weights[..., :P], tail_v.repeat_interleave(repeats, 2))
    return old + torch.einsum("bhts,bshd->bthd", weights[..., P:], v_BTHD)


def linear_attention(
    q_BTHF: Tensor,
    k_BTHF: Tensor,
    v_BTHD: Tensor,
    *,
    causal: bool,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: LinearState | None,
    output_final_state: bool,
) -> tuple[Tensor, LinearState | None]:
    """y_t = S_t phi(q_t) / (phi(q_t) z_t) on features that are already positive (eq. 4-5)."""
    B, T = q_BTHF.shape[:2]
    k_BTHF, v_BTHD = without_masked(key_mask, k_BTHF), without_masked(key_mask, v_BTHD)
    seen = visible_sources(
        T, causal=causal, key_mask=key_mask, cu_seqlens=cu_seqlens, device=q_BTHF.device
    )
    scores = torch.einsum("bthf,bshf->bhts", q_BTHF, k_BTHF).masked_fill(~seen[:, None], 0.0)
    above = torch.einsum("bhts,bshd->bthd", scores, v_BTHD)
    below = scores.sum(-1).transpose(1, 2)
    if initial_state is not None:
        memory = _per_token(initial_state.memory, cu_seqlens, B, T)
        normaliser = _per_token(initial_state.normaliser, cu_seqlens, B, T)
        above = above + torch.einsum("bthf,bthfd->bthd", q_BTHF, memory)
        below = below + torch.einsum("bthf,bthf->bth", q_BTHF, normaliser)
    out = above / torch.where(below == 0, 1.0, below)[..., None]
    if not output_final_state:
        return out, None
    real_NT = k_BTHF.new_ones(B, T, dtype=torch.bool) if key_mask is None else key_mask
    if cu_seqlens is not None:
        N = cu_seqlens.shape[0] - 1
        ids = sequence_ids(cu_seqlens, T)
        real_NT = real_NT & (ids[None] == torch.arange(N, device=ids.device)[:, None])
        k_BTHF, v_BTHD = k_BTHF.expand(N, -1, -1, -1), v_BTHD.expand(N, -1, -1, -1)
    k_real = k_BTHF.masked_fill(~real_NT[:, :, None, None], 0.0)
    memory, normaliser = torch.einsum("nshf,nshd->nhfd", k_real, v_BTHD), k_real.sum(1)
    if initial_state is not None:
        memory = memory + initial_state.memory
        normaliser = normaliser + initial_state.normaliser
    return out, LinearState(memory, normaliser)


def linear_recurrence(a_BTE: Tensor, b_BTE: Tensor, h0_BE: Tensor) -> Tensor:
    """h_t = a_t h_{t-1} + b_t, one step at a time."""
    h_BE, outputs = h0_BE, []
    for t in range(a_BTE.shape[1]):
        h_BE = a_BTE[:, t] * h_BE + b_BTE[:, t]
        outputs.append(h_BE)
    return torch.stack(outputs, 1) if outputs else torch.zeros_like(b_BTE)


def attention_weights(
    latent_q: Tensor,
    latent_k: Tensor,
    q: Tensor | None,
    k: Tensor | None,
    *,
    window: int,
    scale: float | None,
    softcap: float | None,
    causal: bool,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """p(s|t) = sum_l p(l|t) p(s|l,t), with the window as state 0 if q and k are given."""
    T, L = latent_k.shape[1], latent_k.shape[-1]
    common: dict[str, Any] = {"causal": causal, "key_mask": key_mask, "cu_seqlens": cu_seqlens}
    seen = visible_sources(T, device=latent_k.device, **common)
    p_BHTL = F.softmax(latent_q, -1).transpose(1, 2)
    total = p_BHTL.new_zeros(p_BHTL.shape[0], p_BHTL.shape[1], T, T)
    if q is not None and k is not None:
        near = visible_sources(T, device=q.device, window=window, **common)
        scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
        local = masked_softmax(window_logits(q, k, scale, softcap), near[:, None])
        total = total + p_BHTL[..., :1] * local
        p_BHTL = p_BHTL[..., 1:]
    for latent in range(L):
        total = total + p_BHTL[..., latent, None] * latte_weights(latent_k, seen, latent)
    return total
