"""Macchiato on kernels: both branches in one forward kernel, gradients in closed form.

``macchiato_walk`` walks as Latte's ``walk`` (latte_causal.py), with the window as state 0. In each
chunk it processes the window's keys (:func:`attend`, softmax.py) and mixes by one softmax over the
L + 1 latent logits. The weights of the latents in the chunk are added to the window's, so that both
share the product with the chunk's values. The outputs of the branches are never in memory. The
backward pass uses Latte's walks and the window's kernels. The bidirectional form uses the states of
Latte's, then computes outputs and gradients by chunk.

Late latents read, at each token, the source that leaves the window, so each branch has its own
product with the values. If window and latents share one softmax, the window's log-mass is added to
its logit. The window's gradients then need the delta of the whole mixture, and dq is computed after
the latents' walk, in a launch of its own.

Saved for the backward pass: the inputs, the final mean, one state per segment if sequences are cut,
and for each token and head the window's share p(0|t), and its logit if that was computed.

Shape suffixes: B batch, T tokens, H query heads, G key heads, R = H / G, L latents, K key width,
D value width, N sequences, M segments of all sequences, C tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from latte.ops.arguments import MACCHIATO_GRADIENTS, WINDOW_GRADIENTS, Mixture
from latte.ops.custom_ops import differentiable_op, empty_gradients
from latte.ops.state import final_buffers
from latte.ops.tensors import count_sequences
from latte.ops.triton_backend.latte_bidirectional import bidirectional_gradients
from latte.ops.triton_backend.latte_causal import (
    begin,
    latent_gradients,
    leave_nothing,
    leave_state,
)
from latte.ops.triton_backend.launch import (
    contiguous, launch, macchiato_tiles, readable, registers,
)  # fmt: skip
from latte.ops.triton_backend.segments import (
    Between, Walker, between_segments, decays, scan_segments, state_buffers, state_gradients,
    states_before,
)  # fmt: skip
from latte.ops.triton_backend.softmax import attend, log_mass_of_softmax, unit_of
from latte.ops.triton_backend.tiles import (
    FORGETTING_REACH, REACH, SIZES, TINY, add_source, added, at_most, counted, factor,
    first_reference, first_token, inverse, larger, largest, load_inputs, load_key, load_keys,
    load_mixture, load_share, load_tile, load_value, load_window_logits, mm, moved, place, power,
    reciprocal, store_numbers, store_tile, store_value, summed, uniform, walk_place, worn,
)  # fmt: skip
from latte.ops.triton_backend.window import (
    Window,
    WindowLauncher,
    token_buffers,
    unit_stride,
)

# A logit of the window with which the latents have no share. It does not overflow when scaled.
ALL = tl.constexpr(1.0e38)


def saved_states(x: Mixture) -> Between:
    """Empty buffers of :func:`between_segments`; if bidirectional, only the final (top, mass).

    The last one is empty if latents do not forget, because the number of an op's outputs is fixed.
    """
    k, cu_seqlens, D = x.latent_k, x.cu_seqlens, x.v.shape[-1]
    if not x.causal:
        found = state_buffers(k, D, 0, count_sequences(k.shape[0], cu_seqlens))
    else:
        forgets = x.log_decay is not None
        found = between_segments(k, D, cu_seqlens, forgets, x.q.shape[-1])
        if forgets:
            return found
    return *found, found[0].new_empty(0)


def late_sources(x: Mixture, near: Window) -> tuple[Tensor, Tensor | None]:
    """Values and mask of the sources that the latents read."""
    if x.late_v is None:
        return near.v, near.mask
    return unit_stride(x.late_v), readable(x.late_mask)


def logit_found(x: Mixture) -> bool:
    """Whether the window's logit in the mixture differs from the one in column 0."""
    return x.joint or x.begun is not None


def walker_of(x: Mixture) -> Walker:
    """The latents' walks."""
    K, D = x.q.shape[-1], x.v.shape[-1]
    return Walker(x.latent_k, D, x.cu_seqlens, x.log_decay is not None, K)


def token_numbers(x: Mixture) -> tuple[Tensor, Tensor]:
    """Empty buffers for the window's share of each token, and for its logit, if it is computed."""
    (gate,) = token_buffers(x.q, 1)
    return gate, torch.empty_like(gate) if logit_found(x) else gate.new_empty(0)


def forward(x: Mixture) -> tuple[Tensor, ...]:
    """Outputs and final state; then numbers of each token, and the states that are saved."""
    w, latent_k, D = Window.of(x.near()), x.latent_k, x.v.shape[-1]
    out, (gate, logit) = x.q.new_empty((*x.q.shape[:3], D)), token_numbers(x)
    finals, earlier = final_buffers(latent_k, x.v, x.cu_seqlens), x.earlier
    walker, R = walker_of(x), x.q.shape[2] // x.v.shape[2]
    lq, q = x.latent_q[..., 1:], unit_stride(x.q)
    if not x.causal:
        states = saved_states(x)
        whole = (contiguous(*earlier), (None, None, None), (*states[3:5], *finals), R)
        scan_segments(walker, latent_k, w.v, w.mask, *whole)
        WindowLauncher(q, latent_k, w, x.cu_seqlens).outputs(q, lq, finals[1], out, gate)
        return out, *finals, gate, logit, *states
    values, mask = late_sources(x, w)
    states, start, found = states_before(
        walker, latent_k, values, mask, x.cu_seqlens, earlier, finals, R, x.log_decay
    )
    parts, tiles = walker.parts, macchiato_tiles(walker.L, q.dtype)
    late: dict[str, Any] = {}
    if x.late_v is not None:
        late = {"late_v_ptr": values, "late_mask_ptr": mask, "begun_ptr": readable(x.begun)}
        late |= dict(zip(("lv_b", "lv_t", "lv_h"), values.stride(), strict=False))
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
        window_logit_ptr=logit if logit_found(x) else None,
        JOINT=x.joint,
        **registers(walker.walk.registers),
        **decays(x.log_decay),
        **w.far,
        **late,
    )
    falls = () if len(states) > 5 else (states[0].new_empty(0),)
    return out, *finals, gate, logit, *states, *falls


def fake(x: Mixture) -> tuple[Tensor, ...]:
    D = x.v.shape[-1]
    finals = final_buffers(x.latent_k, x.v, x.cu_seqlens)
    out = x.q.new_empty((*x.q.shape[:3], D))
    return out, *finals, *token_numbers(x), *saved_states(x)


def backward(
    x: Mixture,
    dout: Tensor,
    dlog_mass: Tensor | None,
    dmean: Tensor | None,
    mean: Tensor,
    gate: Tensor,
    logit: Tensor,
    *states: Tensor,
) -> dict[str, Tensor]:
    """Gradients of the inputs."""
    w, latent_k, earlier = Window.of(x.near()), x.latent_k, x.earlier
    dlatent_q, dlatent_k, dq, dk, dv, dtail_k, dtail_v, dg = empty_gradients(
        *(x.latent_q, latent_k, x.q, x.k, x.v, x.tail_k, x.tail_v, x.log_decay)
    )
    run = WindowLauncher(x.q, None if x.causal else latent_k, w, x.cu_seqlens)
    q, dout = unit_stride(x.q), unit_stride(dout)
    top_w, mass_w, delta = token_buffers(q, 3)
    run.query_gradients(q, gate, top_w, mass_w, delta, None if x.joint else dq, dy=dout)
    values, mask = late_sources(x, w)
    inputs_of_latents = (latent_k, values, mask, dout)
    dtail, found = (dtail_k, dtail_v), {"latent_q": dlatent_q, "latent_k": dlatent_k}
    if x.causal:
        # It is written once, for each query head. The window's kernel sums the heads.
        latents_dv = torch.empty_like(dout, memory_format=torch.contiguous_format)
        dmean_0, lost_0, c = latent_gradients(
            walker_of(x),
            (x.latent_q, *inputs_of_latents),
            earlier,
            states,
            (dmean, mean, dlog_mass),
            (dlatent_q, dlatent_k, latents_dv),
            delta,
            run.R,
            None if x.log_decay is None else (x.log_decay, dg),
            logit if logit_found(x) else None,
        )
        if x.joint:
            # One softmax has one delta, that of the mixture. The latents' walk has computed it.
            delta = c
            run.query_gradients(q, gate, top_w, mass_w, delta, dq, dy=dout, given=True)
        tokens = (top_w, mass_w, gate, delta)
        near_too = latents_dv if x.late_v is None else None
        run.source_gradients(q, dout, tokens, (dk, dv), dtail, near_too)
        if x.late_v is not None:
            found["late_v"] = latents_dv.unflatten(2, (-1, run.R)).sum(3)
    else:
        # The interface refuses an initial state that needs a gradient.
        _, _, _, top, mass, _ = states
        dmean_0, lost_0 = bidirectional_gradients(
            run,
            (x.latent_q[..., 1:], *inputs_of_latents),
            (top, mass, mean),
            (dmean, dlog_mass),
            (dlatent_q[..., 1:], dlatent_k, None),
            gate,
            delta,
            run.R,
        )
        tokens, whole = (top_w, mass_w, gate, delta), (latent_k, top, mass, dmean_0)
        run.source_gradients(q, dout, tokens, (dk, dv), dtail, bidirectional=whole)
    dA, dmu = state_gradients(earlier, dmean_0, lost_0)
    dsinks = run.sink_gradients(dout, tokens, x.k, x.v)
    near = (dq, dk, dv, *dtail, *dsinks)
    found |= dict(zip(WINDOW_GRADIENTS, near, strict=True))
    return found | {"log_mass": dA, "mean": dmu, "log_decay": dg}


macchiato_op = differentiable_op(
    "triton_macchiato",
    Mixture,
    fake,
    forward,
    backward,
    returns=["out", "log_mass", "mean"],
    gradients=(*MACCHIATO_GRADIENTS, "late_v"),
    # For each token and head, the window's share and its logit; then what is saved of the states.
    saves=["mean", "gate", "logit", "top_M", "mass_M", "mean_M", "top", "mass", "falls"],
    optional=["log_mass", "mean"],
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
    sink_q_ptr=None, sink_k_ptr=None, sink_v_ptr=None, sink_mask_ptr=None, seen_ptr=None,
    sq_b=None, sq_t=None, sq_h=None, S=None,
    late_v_ptr=None, late_mask_ptr=None, begun_ptr=None, lv_b=None, lv_t=None, lv_h=None,
    window_logit_ptr=None, JOINT: tl.constexpr = False,
):  # fmt: skip
    """y_t = p(0|t) SWA_t + sum_l p(l|t) mu_t[l], contiguous, of one segment, head and tile of D.

    ``latent_q_ptr`` points to the first latent's logit, after the window's. The final state is
    written to ``log_mass1_ptr`` and ``mean1_ptr`` if no scan has written it.

    With late latents, ``latent_k``, ``late_v`` and ``late_mask`` are those of the sources that the
    latents read at each token. ``begun`` (B, T) says whether there has been a source. Until then
    the window has the whole weight. With ``JOINT`` the log-mass of the window's keys is added to
    its logit. In both cases the logit that is used in the mixture is written to ``window_logit``
    (B, T, H).
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
    source_ptr, source_t, source_mask_ptr = v_ptr, v_t, mask_ptr
    if late_v_ptr is not None:
        source_ptr, source_t = late_v_ptr + batch * lv_b + h // R * lv_h, lv_t
        source_mask_ptr = late_mask_ptr + batch * T
        begun_ptr += batch * T
    if sink_q_ptr is not None:
        sink_q_ptr += batch * sq_b + h * sq_h
        sink_k_ptr += (n * S * (H // R) + h // R) * K
        sink_v_ptr += (n * S * (H // R) + h // R) * D
        sink_mask_ptr += n * S
        seen_ptr += batch * T
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
    unseen = uniform(tl.max(fresh, 0))
    # Every token's the same: as products add to it.
    mass = mass[None, :] + tl.zeros((C, BL), tl.float32)
    # What was forgotten since the reference was chosen.
    fall = tl.zeros((C, BL), tl.float32)
    count = tl.cdiv(tl.minimum(stop - start, length).to(tl.int32), C)
    for j in tl.range(0, count, disable_licm=True):
        at = start + j * C
        if unseen == 1:
            k = load_keys(latent_k_ptr, source_mask_ptr, lk_t, lk_l, at, stop, L, C, BL)
            if FORGETS:
                g = load_tile(g_ptr, g_t, g_l, at, stop, 0, L, C, BL)
                k -= added(fall, summed(past.to(tl.float32), g, PRODUCT))
            ref, fresh = first_reference(k, token, ref, fresh, C)
            unseen = uniform(tl.max(fresh, 0))
        top_w, mass_w, w, kept_w, y = attend(
            q_ptr + at * q_t, q_t, tl.minimum(stop - at, C).to(tl.int32),
            k_ptr, k_t, v_ptr, v_t, mask_ptr, tail_k_ptr, tail_v_ptr, tail_mask_ptr, P, H // R,
            at, first, stop, d0, reach, scale, softcap,
            D, K, C, BX, PRODUCT, True, CAPPED,
            sink_q_ptr, sq_t, sink_k_ptr, sink_v_ptr, sink_mask_ptr, seen_ptr, S,
        )  # fmt: skip
        own = None
        if window_logit_ptr is not None:
            own = load_window_logits(latent_q_ptr, lq_t, lq_l, at, stop, C)
            if JOINT:
                own += log_mass_of_softmax(top_w, mass_w, unit_of(scale, softcap, CAPPED))
            if begun_ptr is not None:
                begun = tl.load(begun_ptr + at + token, mask=at + token < stop, other=0) != 0
                own = tl.where(begun, own, ALL)
            if d0 == 0:
                store_numbers(window_logit_ptr, batch, h, at, stop, T, H, own, C)
        p, gate = load_mixture(latent_q_ptr, lq_t, lq_l, at, stop, L, C, BL, own)
        if d0 == 0:
            store_numbers(gate_ptr, batch, h, at, stop, T, H, gate, C)
        share = inverse(mass_w) * gate
        k = load_keys(latent_k_ptr, source_mask_ptr, lk_t, lk_l, at, stop, L, C, BL)
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
        if late_v_ptr is None:
            source = v
            y += mm(w * share[:, None] + scores, v, PRODUCT)
        else:
            source = load_inputs(source_ptr, source_t, 1, at, stop, d0, D, C, BX)
            y += mm(w * share[:, None], v, PRODUCT)
            y += mm(scores, source, PRODUCT)
        store_tile(out_ptr, H * D, 1, at, stop, d0, D, y, C, BX)
        after = added(total, mm(tl.trans(source), e, PRODUCT))
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
                # Tokens beyond reach have the window's part. The latents' is added token by token.
                tl.debug_barrier()
                ref_s, mass_s, fall_s, after = ref, tl.max(mass, 0), tl.max(fall, 0), total
                for s in range(0, tl.minimum(stop - at, C).to(tl.int32)):
                    k_s = load_key(latent_k_ptr, source_mask_ptr, lk_t, lk_l, at + s, L, BL)
                    own_s = None
                    if window_logit_ptr is not None:
                        own_s = tl.sum(tl.where(token == s, own, 0.0), 0)
                    p_s, _ = load_share(latent_q_ptr, lq_t, lq_l, at + s, L, BL, own_s)
                    v_s = load_value(source_ptr, source_t, 1, at + s, d0, D, BX)
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
