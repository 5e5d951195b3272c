"""The equations of every op, written out in O(T^2) or token by token.

The other backends are tested against this one, usually in fp64. Inputs are already checked, and
states have the dtype of the sums. Half-precision inputs are computed in fp32 and rounded at the
end. Autograd gives the gradients.

Shape suffixes: B batch, T queries, S sources, H query heads, G key/value heads, L latents per
head, K key width (of a convolution: taps), D value width, F feature width, E channels, N states
(B, or the packed sequences), P tail slots, n sinks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.ops.arguments import RGLRU, Convolution, Latte, Linear, Macchiato, Three, Window
from latte.ops.state import last_tokens, merge_states, total_log_decay
from latte.ops.tensors import (
    Local,
    Sequences,
    computation_dtype,
    count_sequences,
    real_tokens,
    sequence_ids,
    sequence_starts,
    without_masked,
)


def wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The inputs in the dtype in which they are computed."""
    return tuple(x.to(computation_dtype(x.dtype)) for x in tensors)


def visible_sources(
    T: int, sequences: Sequences, device: torch.device, window: int | None = None
) -> Tensor:
    """Whether a query may read a source, (B or 1, T, S) bool.

    If causal: s <= t, and s > t - window. If not: |s - t| <= window // 2.
    """
    key_mask, cu_seqlens, causal = sequences
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
    """Softmax over the last dimension. A row that sees nothing is all zeros, not an average."""
    logits = logits.masked_fill(~seen, -torch.inf)
    top = logits.detach().amax(-1, keepdim=True)
    top = torch.where(torch.isneginf(top), 0.0, top)
    weights = torch.exp(logits - top)
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total == 0, 1.0, total)


def _per_token(state_NX: Tensor, sequences: Sequences, B: int, T: int) -> Tensor:
    """The state (B or N, ...) of every token's sequence, (B, T, ...)."""
    if sequences.cu_seqlens is None:
        return state_NX[:, None].expand(B, T, *state_NX.shape[1:])
    return state_NX[sequence_ids(sequences.cu_seqlens, T)][None]


def _own_sources(like: Tensor, sequences: Sequences) -> Tensor:
    """The mask (N, T) bool of each sequence's own valid tokens; ``like`` is (B, T, ...)."""
    B, T = like.shape[:2]
    key_mask, cu_seqlens, _ = sequences
    real = real_tokens(like, key_mask)
    if cu_seqlens is None:
        return real
    n = torch.arange(count_sequences(B, cu_seqlens), device=like.device)
    return real & (sequence_ids(cu_seqlens, T) == n[:, None])


def forgotten(log_decay_BTHL: Tensor, sequences: Sequences) -> Tensor:
    """Total log-decay of each latent from the start of the sequence to a token, (B, T, H, L)."""
    total_BTHL = log_decay_BTHL.cumsum(1)
    if sequences.cu_seqlens is None:
        return total_BTHL
    before_1THL = F.pad(total_BTHL, (0, 0, 0, 0, 1, 0))
    starts_T = sequence_starts(sequences.cu_seqlens, total_BTHL.shape[1])
    return total_BTHL - before_1THL[:, starts_T]


def latte_weights(
    k_BTHL: Tensor,
    seen_BTS: Tensor,
    latent: int,
    log_mass_BTH: Tensor | None = None,
    forgotten_BTHL: Tensor | None = None,
) -> Tensor:
    """p(s|l,t) for one latent (eq. 8): (B, H, T, S), or S+1 with the earlier state in column 0.

    The log-decay of the latent between s and t is added to the logit of s.
    """
    logits_BHTS = k_BTHL[..., latent].transpose(1, 2)[:, :, None, :]
    logits_BHTS = logits_BHTS.expand(-1, -1, seen_BTS.shape[1], -1)
    seen = seen_BTS[:, None].expand(logits_BHTS.shape[0], logits_BHTS.shape[1], -1, -1)
    if forgotten_BTHL is not None:
        forgotten_BHT = forgotten_BTHL[..., latent].transpose(1, 2)
        logits_BHTS = logits_BHTS + (forgotten_BHT[..., None] - forgotten_BHT[:, :, None, :])
        if log_mass_BTH is not None:
            log_mass_BTH = log_mass_BTH + forgotten_BTHL[..., latent]
    if log_mass_BTH is not None:
        logits_BHTS = torch.cat([log_mass_BTH.transpose(1, 2)[..., None], logits_BHTS], -1)
        seen = torch.cat([torch.ones_like(seen[..., :1]), seen], -1)
    return masked_softmax(logits_BHTS, seen)


def latte_attention(x: Latte, causal: bool) -> tuple[Tensor, ...]:
    """y_t = sum_l p(l|t) sum_s p(s|l,t) v_s (paper, eq. 6-14). Returns y, log-mass and mean."""
    dtype, sequences, log_decay = x.v.dtype, x.sequences._replace(causal=causal), x.log_decay
    earlier = None if x.log_mass is None or x.mean is None else (x.log_mass, x.mean)
    q_BTHL, k_BTHL, v_BTHD = wide(*x.qkv)
    B, T, H, L = q_BTHL.shape
    seen = visible_sources(T, sequences, q_BTHL.device)
    p_BTHL = F.softmax(q_BTHL, -1)
    v_BTHD = without_masked(sequences.key_mask, v_BTHD)
    v_BHTD = v_BTHD.transpose(1, 2)
    out_BHTD = torch.zeros_like(v_BHTD)
    lost = None if log_decay is None else forgotten(log_decay, sequences)
    for latent in range(L):
        if earlier is None:
            mean_BHTD = latte_weights(k_BTHL, seen, latent, None, lost) @ v_BHTD
        else:
            log_mass, mean = earlier
            earlier_BTH = _per_token(log_mass[..., latent], sequences, B, T)
            weights = latte_weights(k_BTHL, seen, latent, earlier_BTH, lost)
            mu_BTHD = _per_token(mean[..., latent, :], sequences, B, T)
            mean_BHTD = weights[..., 1:] @ v_BHTD + weights[..., :1] * mu_BTHD.transpose(1, 2)
        out_BHTD = out_BHTD + p_BTHL[..., latent].transpose(1, 2)[..., None] * mean_BHTD
    own_NT = _own_sources(k_BTHL, sequences)
    if log_decay is not None and lost is not None:
        # The final state of a sequence has decayed by the total over its tokens.
        total_NHL = total_log_decay(log_decay, None, sequences.cu_seqlens)
        assert total_NHL is not None
        k_BTHL = k_BTHL + (_per_token(total_NHL, sequences, B, T) - lost)
        if earlier is not None:
            earlier = (earlier[0] + total_NHL, earlier[1])
    return out_BHTD.transpose(1, 2).to(dtype), *_latte_state(k_BTHL, v_BTHD, own_NT, earlier)


def _latte_state(
    k_BTHL: Tensor, v_BTHD: Tensor, seen_NT: Tensor, earlier: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Log-mass and mean over all sources of a sequence, merged with the earlier state."""
    N = seen_NT.shape[0]
    k_NHLT = k_BTHL.expand(N, -1, -1, -1).permute(0, 2, 3, 1)
    seen = seen_NT[:, None, None, :].expand_as(k_NHLT)
    mean = masked_softmax(k_NHLT, seen) @ v_BTHD.expand(N, -1, -1, -1).transpose(1, 2)
    logits = k_NHLT.masked_fill(~seen, -torch.inf)
    top = logits.detach().amax(-1)
    top = torch.where(torch.isneginf(top), 0.0, top)
    mass = torch.exp(logits - top[..., None]).sum(-1)
    empty = mass == 0
    log_mass = torch.where(empty, -torch.inf, top + torch.log(torch.where(empty, 1.0, mass)))
    if earlier is not None:
        log_mass, mean = merge_states(*earlier, log_mass, mean)
    return log_mass, mean


def window_logits(q_BTHK: Tensor, k_BSGK: Tensor, local: Local) -> Tensor:
    """Local logits (B, H, T, S), scaled and softly capped: c tanh(x / c)."""
    k_BSHK = k_BSGK.repeat_interleave(q_BTHK.shape[2] // k_BSGK.shape[2], 2)
    logits = torch.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK) * local.scale
    return local.softcap * torch.tanh(logits / local.softcap) if local.softcap else logits


def _kept_logits(
    q_BTHK: Tensor, keys_NPGK: Tensor, local: Local, cu_seqlens: Tensor | None
) -> Tensor:
    """Local logits of the keys that each sequence keeps, (B, H, T, P)."""
    if cu_seqlens is None:
        return window_logits(q_BTHK, keys_NPGK, local)
    keys_TPGK = keys_NPGK[sequence_ids(cu_seqlens, q_BTHK.shape[1])]
    return window_logits(q_BTHK.transpose(0, 1), keys_TPGK, local).permute(2, 1, 0, 3)


def sliding_window_attention(x: Window) -> tuple[Tensor]:
    """Softmax attention over the last ``window`` keys, self included; over all keys if None.

    Sinks that have left the window are visible too.
    """
    dtype, local, sequences, sinks = x.v.dtype, x.local, x.sequences, x.sinks
    key_mask, cu_seqlens, _ = sequences
    q_BTHK, k_BTGK, v_BTGD = wide(*x.qkv)
    B, T, H, _ = q_BTHK.shape
    k_BTGK, v_BTGD = without_masked(key_mask, k_BTGK), without_masked(key_mask, v_BTGD)
    seen = visible_sources(T, sequences, q_BTHK.device, local.window).expand(B, T, T)
    logits = window_logits(q_BTHK, k_BTGK, local)
    repeats = H // v_BTGD.shape[2]
    # The past that each sequence keeps: logits, whether they are seen, values (N, P, G, D).
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    keys, values, mask = x.tail
    if keys is not None and values is not None and mask is not None:
        # The earlier keys come before the sequence's own: the distance of tail slot j of P from
        # a query is (position in the sequence) + P - j.
        P = keys.shape[1]
        position = torch.arange(T, device=q_BTHK.device)
        if cu_seqlens is not None:
            position = position - sequence_starts(cu_seqlens, T)
        gap = position[:, None] + P - torch.arange(P, device=q_BTHK.device)[None]
        near = gap >= 0 if local.window is None else gap < local.window
        keys, values = keys.to(k_BTGK.dtype), values.to(v_BTGD.dtype)
        keys, values = (without_masked(mask, x) for x in (keys, values))
        tail_seen = near[None] & _per_token(mask, sequences, B, T)
        kept.append((_kept_logits(q_BTHK, keys, local, cu_seqlens), tail_seen, values))
    if sinks is not None:
        sink_q, keys, values = wide(sinks.q, sinks.keys, sinks.values)
        number = torch.arange(keys.shape[1], device=q_BTHK.device)
        sink_seen = (number < sinks.seen[..., None]) & _per_token(sinks.mask, sequences, B, T)
        kept.append((_kept_logits(sink_q, keys, local, cu_seqlens), sink_seen, values))
    weights = masked_softmax(
        torch.cat([*(x for x, _, _ in kept), logits], -1),
        torch.cat([*(x for _, x, _ in kept), seen], -1)[:, None],
    )
    sizes = [x.shape[-1] for x, _, _ in kept]
    *kept_weights, own_weights = weights.split([*sizes, T], -1)
    out = torch.einsum("bhts,bshd->bthd", own_weights, v_BTGD.repeat_interleave(repeats, 2))
    for part, (_, _, values) in zip(kept_weights, kept, strict=True):
        values = values.repeat_interleave(repeats, 2)
        if cu_seqlens is None:
            out = out + torch.einsum("bhts,bshd->bthd", part, values)
        else:
            values = values[sequence_ids(cu_seqlens, T)]
            out = out + torch.einsum("bhts,tshd->bthd", part, values)
    return (out.to(dtype),)


def macchiato_attention(x: Macchiato, causal: bool) -> tuple[Tensor, ...]:
    """y_t = p(0|t) SWA_t + sum_{l>=1} p(l|t) mu_t[l] (paper, eq. 15-17).

    The softmax over the L+1 logits is computed in two factors: p(0|t) =
    sigmoid(q_0 - logsumexp_{l>=1} q_l), and the other states share 1 - p(0|t). Both gates come from
    the same difference, so there is no cancellation. With ``delay`` the latents read a source when
    it leaves the window, and p(0|t) is 1 while they have read none.
    """
    (near,) = sliding_window_attention(x.near(causal))
    keys, values, mask, begun = x.latent_k, x.v, x.key_mask, None
    if x.delay:
        keys, values, mask, begun = x.late(causal)
        begun = begun[..., None, None]
    v_BTHD = values.repeat_interleave(x.q.shape[2] // values.shape[2], 2)
    latents = (x.latent_q[..., 1:], keys, v_BTHD, mask, x.cu_seqlens)
    far, *state = latte_attention(Latte(*latents, x.log_mass, x.mean, x.log_decay), causal)
    logits, near, far = wide(x.latent_q, near, far)
    odds = (logits[..., 0] - torch.logsumexp(logits[..., 1:], -1))[..., None]
    near_share, far_share = torch.sigmoid(odds), torch.sigmoid(-odds)
    if begun is not None:
        near_share = torch.where(begun, near_share, 1.0)
        far_share = torch.where(begun, far_share, 0.0)
    return (near_share * near + far_share * far).to(x.v.dtype), *state


def linear_attention(x: Linear) -> Three:
    """y_t = S_t phi(q_t) / (phi(q_t) z_t) on features that are already positive (eq. 4-5)."""
    q_BTHF, (B, T), sequences = x.q, x.q.shape[:2], Sequences(x.key_mask, x.cu_seqlens, x.causal)
    k_BTHF, v_BTHD = (without_masked(x.key_mask, y) for y in (x.k, x.v))
    seen = visible_sources(T, sequences, q_BTHF.device)
    scores = torch.einsum("bthf,bshf->bhts", q_BTHF, k_BTHF).masked_fill(~seen[:, None], 0.0)
    above = torch.einsum("bhts,bshd->bthd", scores, v_BTHD)
    below = scores.sum(-1).transpose(1, 2)
    if x.memory is not None and x.normaliser is not None:
        memory, normaliser = (_per_token(y, sequences, B, T) for y in (x.memory, x.normaliser))
        above = above + torch.einsum("bthf,bthfd->bthd", q_BTHF, memory)
        below = below + torch.einsum("bthf,bthf->bth", q_BTHF, normaliser)
    out = above / torch.where(below == 0, 1.0, below)[..., None]
    seen_NT = _own_sources(k_BTHF, sequences)
    N = seen_NT.shape[0]
    k_real = k_BTHF.expand(N, -1, -1, -1).masked_fill(~seen_NT[:, :, None, None], 0.0)
    memory = torch.einsum("nshf,nshd->nhfd", k_real, v_BTHD.expand(N, -1, -1, -1))
    normaliser = k_real.sum(1)
    if x.memory is not None and x.normaliser is not None:
        memory, normaliser = memory + x.memory, normaliser + x.normaliser
    return out, memory, normaliser


def rg_lru(call: RGLRU) -> tuple[Tensor, Tensor]:
    """h_t = a_t h_{t-1} + sqrt(1 - a_t^2) (i_t x_t), token by token (Griffin; eq. 18-19)."""
    *inputs, theta_E, initial_state, key_mask, cu_seqlens, reverse = call
    dtype = call.x.dtype
    x, r, i = (without_masked(key_mask, z) for z in wide(*inputs))
    B, T, E = x.shape
    # log a = -8 r softplus(theta). It may underflow to 0, where the square root has no slope.
    log_a = -8.0 * torch.sigmoid(r) * F.softplus(theta_E.to(x.dtype))
    log_a = log_a.clamp(max=-torch.finfo(x.dtype).tiny)
    decay, factor = torch.exp(log_a), torch.sqrt(-torch.expm1(2.0 * log_a))
    gated = torch.sigmoid(i) * x
    before_NE = (
        x.new_zeros(count_sequences(B, cu_seqlens), E) if initial_state is None else initial_state
    )
    started_N1 = (before_NE != 0).any(-1, keepdim=True)
    # Row b of the batch holds, at time t, sequence id_BT[b, t].
    if cu_seqlens is None:
        id_BT = torch.arange(B, device=x.device)[:, None].expand(B, T)
    else:
        id_BT = sequence_ids(cu_seqlens, T)[None]
    h_BE, started_B1, outputs = before_NE[id_BT[:, 0]], started_N1[id_BT[:, 0]], []
    order = range(T - 1, -1, -1) if reverse else range(T)
    last: int | None = None
    for t in order:
        here = id_BT[:, t]
        other = torch.ones_like(started_B1) if last is None else (here != id_BT[:, last])[:, None]
        h_BE = torch.where(other, before_NE[here], h_BE)
        started_B1 = torch.where(other, started_N1[here], started_B1)
        kept, share = decay[:, t] * h_BE, factor[:, t] * gated[:, t]
        new_BE = torch.where(started_B1, kept + share, gated[:, t])
        if key_mask is None:
            h_BE, started_B1 = new_BE, torch.ones_like(started_B1)
        else:
            real_B1 = key_mask[:, t, None]
            h_BE, started_B1 = torch.where(real_B1, new_BE, h_BE), started_B1 | real_B1
        outputs.append(h_BE)
        last = t
    h_BTE = torch.stack(outputs[::-1] if reverse else outputs, 1)
    if cu_seqlens is None:
        return h_BTE.to(dtype), h_BTE[:, 0 if reverse else -1]
    start_N, stop_N = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    end_N = start_N.clamp(max=T - 1) if reverse else (stop_N - 1).clamp(min=0)
    final_NE = torch.where((start_N == stop_N)[:, None], before_NE, h_BTE[0, end_N])
    return h_BTE.to(dtype), final_NE


def causal_conv1d(call: Convolution) -> tuple[Tensor, Tensor]:
    """y_t = bias + sum_i weight[:, i] x_{t-K+1+i}: taps before a sequence come from its tail."""
    x_BTE, weight_EK, bias_E, initial_state, key_mask, cu_seqlens = call
    dtype, (B, T, E), K = x_BTE.dtype, x_BTE.shape, weight_EK.shape[1]
    (x_BTE,) = wide(without_masked(key_mask, x_BTE))
    weight_EK = weight_EK.to(x_BTE.dtype)
    P = K - 1
    tail_NPE = x_BTE.new_zeros(count_sequences(B, cu_seqlens), P, E)
    if initial_state is not None:
        tail_NPE = initial_state.to(x_BTE.dtype)
    place = torch.arange(T, device=x_BTE.device)
    position = place if cu_seqlens is None else place - sequence_starts(cu_seqlens, T)
    y_BTE = torch.zeros_like(x_BTE)
    for i in range(K):
        back = P - i
        tap_BTE = x_BTE[:, (place - back).clamp(min=0)]
        if back:
            slot_T = (position + i).clamp(max=P - 1)
            if cu_seqlens is None:
                earlier_BTE = tail_NPE[:, slot_T]
            else:
                earlier_BTE = tail_NPE[sequence_ids(cu_seqlens, T), slot_T][None]
            tap_BTE = torch.where((position >= back)[None, :, None], tap_BTE, earlier_BTE)
        y_BTE = y_BTE + weight_EK[:, i] * tap_BTE
    if bias_E is not None:
        y_BTE = y_BTE + bias_E.to(y_BTE.dtype)
    return y_BTE.to(dtype), last_tokens(x_BTE, P, cu_seqlens, tail_NPE).to(dtype)


def attention_weights(
    latent_q: Tensor,
    latent_k: Tensor,
    q: Tensor | None,
    k: Tensor | None,
    local: Local | None,
    sequences: Sequences,
    log_decay: Tensor | None = None,
) -> Tensor:
    """p(s|t) = sum_l p(l|t) p(s|l,t), with the window as state 0 if q and k are given."""
    latent_q, latent_k = wide(latent_q, latent_k)
    T, L = latent_k.shape[1], latent_k.shape[-1]
    if T == 0:
        return latent_q.new_zeros(latent_q.shape[0], latent_q.shape[2], 0, 0)
    seen = visible_sources(T, sequences, latent_k.device)
    p_BHTL = F.softmax(latent_q, -1).transpose(1, 2)
    total = p_BHTL.new_zeros(p_BHTL.shape[0], p_BHTL.shape[1], T, T)
    if q is not None and k is not None and local is not None:
        q, k = wide(q, k)
        near = visible_sources(T, sequences, q.device, local.window)
        weights = masked_softmax(window_logits(q, k, local), near[:, None])
        total = total + p_BHTL[..., :1] * weights
        p_BHTL = p_BHTL[..., 1:]
    lost = None if log_decay is None else forgotten(log_decay, sequences)
    for latent in range(L):
        weights = latte_weights(latent_k, seen, latent, None, lost)
        total = total + p_BHTL[..., latent, None] * weights
    return total


def rms_norm(x: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """``w x / sqrt(mean(x^2) + eps)`` over the last dimension of x (..., E)."""
    y, w_E = wide(x, weight_E)
    out = w_E * y / torch.sqrt(y.square().mean(-1, keepdim=True) + eps)
    return out.to(x.dtype)


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) up``, with ``silu(g) = g sigmoid(g)``."""
    g, u = wide(gate, up)
    return (g * torch.sigmoid(g) * u).to(torch.promote_types(gate.dtype, up.dtype))


def rotate(x_BTHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The pairs (a, b) at (i, i + K/2) of each head: ``(a cos - b sin, b cos + a sin)``."""
    (x,) = wide(x_BTHK)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x_BTHK.dtype)
