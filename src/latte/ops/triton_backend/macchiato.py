"""Macchiato on kernels: both branches in one forward kernel, closed gradients.

Causal, forward: ``macchiato_walk`` walks as Latte's ``walk`` (latte_causal.py), with the window as
state 0. For each chunk the window's keys come first (:func:`attend`, window.py); then one softmax
over the L + 1 latent logits says what the window's part is worth; then the latents' weights in the
chunk join the window's, and one product with the chunk's values serves both. Neither branch's
output is ever in memory. Where a sequence is cut, ``segment_sums`` and ``scan`` (segments.py) find
the states before its segments. Backward: Latte's walks, beside the window's own kernels.

Bidirectional: the states of Latte's, then outputs and gradients by chunk.

Saved for the backward pass: the inputs, the final mean, where sequences are cut one state per
segment, and one fp32 number per token and head, the window's share p(0|t).

Shape suffixes: B batch, T tokens, H query heads, G key heads, R = H / G, L latents, K key width,
D value width, N sequences, M segments of all sequences, C tokens of a chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from latte.ops.custom_ops import connect_gradients, empty_gradients, final_buffers
from latte.ops.tensors import Local, Sequences, count_sequences, full_precision
from latte.ops.triton_backend.latte_bidirectional import bidirectional_gradients
from latte.ops.triton_backend.latte_causal import (
    begin,
    latent_gradients,
    leave_nothing,
    leave_state,
)
from latte.ops.triton_backend.launch import contiguous, launch, macchiato_tiles
from latte.ops.triton_backend.segments import (
    Between,
    Walker,
    between_segments,
    decays,
    scan_segments,
    state_buffers,
    state_gradients,
    states_before,
)
from latte.ops.triton_backend.tiles import (
    FORGETTING_REACH,
    REACH,
    SIZES,
    TINY,
    add_source,
    added,
    at_most,
    counted,
    factor,
    first_reference,
    first_token,
    inverse,
    larger,
    largest,
    load_inputs,
    load_key,
    load_keys,
    load_mixture,
    load_share,
    load_tile,
    load_value,
    mm,
    moved,
    place,
    power,
    reciprocal,
    store_numbers,
    store_tile,
    store_value,
    summed,
    walk_place,
    worn,
)
from latte.ops.triton_backend.window import (
    Window,
    WindowLauncher,
    attend,
    token_buffers,
    unit_stride,
)


def saved_states(
    latent_k: Tensor, D: int, cu_seqlens: Tensor | None, forgets: bool, causal: bool
) -> Between:
    """Empty buffers: :func:`between_segments`; bidirectional: the final (top, mass) alone.

    The last is empty where nothing is forgotten: an op has so many outputs.
    """
    if causal and forgets:
        return between_segments(latent_k, D, cu_seqlens, forgets)
    if causal:
        found = between_segments(latent_k, D, cu_seqlens)
    else:
        found = state_buffers(latent_k, D, 0, count_sequences(latent_k.shape[0], cu_seqlens))
    return *found, found[0].new_empty(0)


@torch.library.custom_op("latte::triton_macchiato", mutates_args=())
@full_precision
def macchiato_op(
    latent_q: Tensor,
    latent_k: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    log_mass: Tensor | None,
    mean: Tensor | None,
    tail_k: Tensor | None,
    tail_v: Tensor | None,
    tail_mask: Tensor | None,
    log_decay: Tensor | None,
    window: int,
    scale: float,
    softcap: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs, final state; then for the backward pass: the window's share of each token, and
    :func:`saved_states`."""
    sequences, tail = Sequences(key_mask, cu_seqlens, causal), (tail_k, tail_v, tail_mask)
    w = Window.of(k, v, Local(window, scale, softcap), sequences, tail)
    D = v.shape[-1]
    out, (gate,) = q.new_empty((*q.shape[:3], D)), token_buffers(q, 1)
    finals, earlier = final_buffers(latent_k, v, cu_seqlens), (log_mass, mean)
    walker = Walker(latent_k, D, cu_seqlens, log_decay is not None)
    R = q.shape[2] // v.shape[2]
    lq, q = latent_q[..., 1:], unit_stride(q)
    if not causal:
        states = saved_states(latent_k, D, cu_seqlens, False, causal)
        whole = (contiguous(*earlier), (None, None, None), (*states[3:5], *finals), R)
        scan_segments(walker, latent_k, w.v, w.mask, *whole)
        WindowLauncher(q, latent_k, w, cu_seqlens).outputs(q, lq, finals[1], out, gate)
        top_M, mass_M, mean_M, top, mass, falls = states
        return out, *finals, gate, top_M, mass_M, mean_M, top, mass, falls
    states, start, found = states_before(
        walker, latent_k, w.v, w.mask, cu_seqlens, earlier, finals, R, log_decay
    )
    parts, tiles = walker.parts, macchiato_tiles(walker.L, q.dtype)
    launch(
        q.device,
        macchiato_walk[(parts.M * walker.H * -(-D // tiles.BX),)],
        *(lq, latent_k, q, w.k, w.v, w.mask, parts.table, parts.bounds, *w.tail, *start),
        *(out, gate, *found, *lq.stride(), *latent_k.stride()),
        *(*q.stride()[:3], *w.k.stride()[:3], *w.v.stride()[:3]),
        *(w.scale, w.softcap, w.reach, w.P),
        *(walker.T, walker.length, parts.per_row, walker.H, walker.L, D),
        C=walker.walk.C,
        BL=walker.walk.BL,
        BX=tiles.BX,
        K=w.k.shape[-1],
        R=R,
        PRODUCT=walker.product,
        CAPPED=w.softcap != 0.0,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **walker.registers(),
        **decays(log_decay),
    )
    top_M, mass_M, mean_M, top, mass, *more = states
    falls = more[0] if more else top.new_empty(0)
    return out, *finals, gate, top_M, mass_M, mean_M, top, mass, falls


@macchiato_op.register_fake
def _(
    latent_q, latent_k, q, k, v, key_mask, cu_seqlens, log_mass, mean,
    tail_k, tail_v, tail_mask, log_decay, window, scale, softcap, causal,
):  # fmt: skip
    finals = final_buffers(latent_k, v, cu_seqlens)
    out = q.new_empty((*q.shape[:3], v.shape[-1]))
    states = saved_states(latent_k, v.shape[-1], cu_seqlens, log_decay is not None, causal)
    return out, *finals, *token_buffers(q, 1), *states


@torch.library.custom_op("latte::triton_macchiato_backward", mutates_args=())
@full_precision
def macchiato_backward_op(
    dout: Tensor,
    dlog_mass: Tensor,
    dmean: Tensor,
    latent_q: Tensor,
    latent_k: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    log_mass: Tensor | None,
    mean: Tensor | None,
    tail_k: Tensor | None,
    tail_v: Tensor | None,
    tail_mask: Tensor | None,
    log_decay: Tensor | None,
    final_mu: Tensor,
    gate: Tensor,
    top_M: Tensor,
    mass_M: Tensor,
    mean_M: Tensor,
    top: Tensor,
    mass: Tensor,
    falls: Tensor,
    window: int,
    scale: float,
    softcap: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the five inputs, of the initial state, of the earlier keys and values, and of
    ``log_decay``."""
    sequences, tail = Sequences(key_mask, cu_seqlens, causal), (tail_k, tail_v, tail_mask)
    w = Window.of(k, v, Local(window, scale, softcap), sequences, tail)
    dlatent_q, dlatent_k, dq, dk, dv, dtail_k, dtail_v, dg = empty_gradients(
        latent_q, latent_k, q, k, v, tail_k, tail_v, log_decay
    )
    run = WindowLauncher(q, None if causal else latent_k, w, cu_seqlens)
    q, dout = unit_stride(q), unit_stride(dout)
    top_w, mass_w, delta = token_buffers(q, 3)
    run.query_gradients(q, gate, top_w, mass_w, delta, dq, dy=dout)
    inputs = (latent_k, w.v, w.mask, dout)
    tokens, dtail = (top_w, mass_w, gate, delta), (dtail_k, dtail_v)
    if causal:
        # In memory once, for each query head: the window's kernel adds it up.
        latents_dv = torch.empty_like(dout, memory_format=torch.contiguous_format)
        dmean_0, lost_0 = latent_gradients(
            Walker(latent_k, run.D, cu_seqlens, log_decay is not None),
            (latent_q, *inputs),
            (log_mass, mean),
            (top_M, mass_M, mean_M, top, mass, falls),
            (dmean, final_mu, dlog_mass),
            (dlatent_q, dlatent_k, latents_dv),
            delta,
            run.R,
            None if log_decay is None else (log_decay, dg),
        )
        run.source_gradients(q, dout, tokens, (dk, dv), dtail, latents_dv)
    else:
        # The interface refuses an initial state that could have a gradient.
        dmean_0, lost_0 = bidirectional_gradients(
            run,
            (latent_q[..., 1:], *inputs),
            (top, mass, final_mu),
            (dmean, dlog_mass),
            (dlatent_q[..., 1:], dlatent_k, None),
            gate,
            delta,
            run.R,
        )
        states = (latent_k, top, mass, dmean_0)
        run.source_gradients(q, dout, tokens, (dk, dv), dtail, bidirectional=states)
    dA, dmu = state_gradients((log_mass, mean), dmean_0, lost_0)
    if mean is None:
        dA, dmu = q.new_empty(0), q.new_empty(0)
    return dlatent_q, dlatent_k, dq, dk, dv, dA, dmu, dtail_k, dtail_v, dg


connect_gradients(
    macchiato_op, macchiato_backward_op, (0, 1, 2, 3, 4, 7, 8, 9, 10, 12), outputs=3, saved_from=2
)


@triton.jit(do_not_specialize=SIZES)
def macchiato_walk(
    latent_q_ptr, latent_k_ptr, q_ptr, k_ptr, v_ptr, mask_ptr, table_ptr, bounds_ptr,
    tail_k_ptr, tail_v_ptr, tail_mask_ptr,
    top_ptr, mass_ptr, mean_ptr, log_mass0_ptr, mean0_ptr,
    out_ptr, gate_ptr, log_mass1_ptr, mean1_ptr,
    lq_b, lq_t, lq_h, lq_l, lk_b, lk_t, lk_h, lk_l,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
    scale, softcap, reach, P,
    T, length, per_row, H, L, D: tl.constexpr,
    K: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BL: tl.constexpr, BX: tl.constexpr,
    PRODUCT: tl.constexpr, CAPPED: tl.constexpr,
    g_ptr=None, g_b=None, g_t=None, g_h=None, g_l=None,
):  # fmt: skip
    """y_t = p(0|t) SWA_t + sum_l p(l|t) mu_t[l], contiguous, of one segment, head and tile of D.

    ``latent_q_ptr`` points to the first latent's logit, behind the window's. ``log_mass1_ptr`` and
    ``mean1_ptr`` take the final state where no scan has found it.
    """
    FORGETS: tl.constexpr = g_ptr is not None
    reach_l: tl.constexpr = FORGETTING_REACH if FORGETS else REACH
    d0, h, m = walk_place(H, D, BX)
    batch, start, stop, n = place(m, table_ptr, T, per_row, length)
    i = m.to(tl.int64) * H + h
    if start > stop:
        leave_nothing(top_ptr, mass_ptr, mean_ptr, i, L, D, d0, BL, BX)
        return
    first = first_token(bounds_ptr, n)
    if mask_ptr is not None:
        mask_ptr += batch * T
    latent_q_ptr += batch * lq_b + h * lq_h
    latent_k_ptr += batch * lk_b + h * lk_h
    q_ptr += batch * q_b + h * q_h
    k_ptr += batch * k_b + h // R * k_h
    v_ptr += batch * v_b + h // R * v_h
    out_ptr += batch * T * H * D + h * D
    if FORGETS:
        g_ptr += batch * g_b + h * g_h
    if tail_k_ptr is not None:
        tail_k_ptr += (n * P * (H // R) + h // R) * K
        tail_v_ptr += (n * P * (H // R) + h // R) * D
        tail_mask_ptr += n * P
    token = tl.arange(0, C)
    past = token[:, None] >= token[None, :]
    ones = tl.full((C, C), 1.0, tl.float32)
    ref, mass, total = begin(
        top_ptr, mass_ptr, mean_ptr, log_mass0_ptr, mean0_ptr, i, n * H + h, L, D, d0, BL, BX
    )
    fresh = (mass == 0.0).to(tl.int32)
    unseen = tl.max(fresh, 0)
    # Every token's the same: as products add to it.
    mass = mass[None, :] + tl.zeros((C, BL), tl.float32)
    # What was forgotten since the reference was chosen.
    fall = tl.zeros((C, BL), tl.float32)
    count = tl.cdiv(tl.minimum(stop - start, length).to(tl.int32), C)
    for j in tl.range(0, count, disable_licm=True):
        at = start + j * C
        if unseen == 1:
            k = load_keys(latent_k_ptr, mask_ptr, lk_t, lk_l, at, stop, L, C, BL)
            if FORGETS:
                g = load_tile(g_ptr, g_t, g_l, at, stop, 0, L, C, BL)
                k -= added(fall, summed(past.to(tl.float32), g, PRODUCT))
            ref, fresh = first_reference(k, token, ref, fresh, C)
            unseen = tl.max(fresh, 0)
        mass_w, w, kept_w, y = attend(
            q_ptr + at * q_t, q_t, tl.minimum(stop - at, C).to(tl.int32),
            k_ptr, k_t, v_ptr, v_t, mask_ptr, tail_k_ptr, tail_v_ptr, tail_mask_ptr, P, H // R,
            at, first, stop, d0, reach, scale, softcap,
            D, K, C, BX, PRODUCT, True, CAPPED,
        )  # fmt: skip
        p, gate = load_mixture(latent_q_ptr, lq_t, lq_l, at, stop, L, C, BL)
        if d0 == 0:
            store_numbers(gate_ptr, batch, h, at, stop, T, H, gate, C)
        share = inverse(mass_w) * gate
        k = load_keys(latent_k_ptr, mask_ptr, lk_t, lk_l, at, stop, L, C, BL)
        v = load_inputs(v_ptr, v_t, 1, at, stop, d0, D, C, BX)
        above = k - ref[None, :]
        if FORGETS:
            g = load_tile(g_ptr, g_t, g_l, at, stop, 0, L, C, BL)
            above -= added(fall, summed(past.to(tl.float32), g, PRODUCT))
            fall_after = added(fall, summed(ones, g, PRODUCT))
        rise = largest(above)
        near = token >= 0
        if rise > reach_l:
            highest = tl.max(tl.maximum(above, 0.0), 1)
            near = tl.associative_scan(highest, 0, larger) <= reach_l
        e = factor(power(at_most(above, reach_l)), PRODUCT)
        mass_t = added(mass, counted(past.to(tl.float32), e, PRODUCT))
        p_over_mass = p * reciprocal(tl.maximum(mass_t, TINY))
        p_over_mass = tl.where(near[:, None], p_over_mass, 0.0)
        scores = tl.where(past, mm(p_over_mass, tl.trans(e), PRODUCT), 0.0)
        y = y * (kept_w * share)[:, None] + mm(p_over_mass, tl.trans(total), PRODUCT)
        y += mm(w * share[:, None] + scores, v, PRODUCT)
        store_tile(out_ptr, H * D, 1, at, stop, d0, D, y, C, BX)
        after = added(total, mm(tl.trans(v), e, PRODUCT))
        mass_after = added(mass, counted(ones, e, PRODUCT))
        moves = rise > reach_l / 4
        if FORGETS:
            moves |= worn(j)
        if moves:
            if FORGETS:
                later, step = moved(ref, fall_after, above)
            else:
                later = tl.maximum(ref, tl.max(k, 0))
            if rise > reach_l:
                # Tokens beyond reach hold the window's part: the latents' comes token by token.
                tl.debug_barrier()
                ref_s, mass_s, fall_s, after = ref, tl.max(mass, 0), tl.max(fall, 0), total
                for s in range(0, tl.minimum(stop - at, C).to(tl.int32)):
                    k_s = load_key(latent_k_ptr, mask_ptr, lk_t, lk_l, at + s, L, BL)
                    p_s, _ = load_share(latent_q_ptr, lq_t, lq_l, at + s, L, BL)
                    v_s = load_value(v_ptr, v_t, 1, at + s, d0, D, BX)
                    if FORGETS:
                        fall_s += load_value(g_ptr, g_t, g_l, at + s, 0, L, BL)
                        ref_s, mass_s, after = add_source(ref_s, mass_s, after, k_s, v_s, fall_s)
                        fall_s = tl.zeros_like(fall_s)
                    else:
                        ref_s, mass_s, after = add_source(ref_s, mass_s, after, k_s, v_s)
                    y_s = tl.sum(after * (p_s * inverse(mass_s))[None, :], 1)
                    y_s += load_value(out_ptr, H * D, 1, at + s, d0, D, BX)
                    beyond = tl.max(tl.where(token == s, 1 - near.to(tl.int32), 0), 0) == 1
                    store_value(out_ptr, H * D, 1, at + s, d0, D, y_s, beyond, BX)
                mass_after = mass_s[None, :] + tl.zeros((C, BL), tl.float32)
                later = ref_s if FORGETS else later
            else:
                kept = tl.exp(step if FORGETS else ref - later)[None, :]
                mass_after, after = mass_after * kept, after * kept
            ref = later
            if FORGETS:
                fall_after = tl.zeros_like(fall_after)
        mass, total = mass_after, after
        if FORGETS:
            fall = fall_after
    if mean1_ptr is not None:
        i, mass = n * H + h, tl.max(mass, 0)
        ref = ref + tl.max(fall, 0) if FORGETS else ref
        leave_state(log_mass1_ptr, mean1_ptr, i, L, D, d0, ref, mass, total, BL, BX)
