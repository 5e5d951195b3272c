"""Causal Latte on kernels: a program walks over a segment of the sequence, its state on chip.

If sequences and heads fill the GPU, there is one segment per sequence, and ``walk`` alone is the
forward pass: it reads q, k and v once and writes y once. Otherwise ``segment_sums`` and ``scan``
(segments.py) find the state before each segment. The state is (ref, mass, S), with
S = sum_s exp(k_s - ref) v_s and mass = sum_s exp(k_s - ref). All sources of a chunk count from one
reference, while no logit is more than e^REACH above it:

    y_t = sum_l p(l|t) / mass_t (S + sum_s exp(k_s - ref) v_s)

Tokens after a logit beyond the reach compute their weights source by source. The choice is made for
each token and depends only on the past, so future inputs cannot change the rounding of an output.

The backward pass has two walks. delta_t[l] is <dy_t, mu_t[l]>, and w_ts[l] is exp(k_s[l] - A_t[l]):

    dq_t = p_t (delta_t - c_t),  c_t = sum_l p_t delta_t
    dv_s = sum_{t>=s} sum_l p_t w_ts dy_t
    dk_s = sum_{t>=s} p_t w_ts (<dy_t, v_s> - delta_t)

1. ``query_walk``, forwards: dq and c; (ref, mass) before each chunk; and, if sequences are cut, the
   segment's part of the gradient of the state before it. ``scan_back`` (segments.py) then computes
   the gradient of the state after each segment.
2. ``source_walk``, backwards: dk and dv. Its state is the gradient of the forward state,
   R = sum_t p_t exp(ref - A_t) dy_t over the later tokens t, and ``lost``, the same sum of
   p_t delta_t = dq_t + p_t c_t.

Saved for the backward pass: the inputs, the final mean and, if sequences are cut, one state per
segment.

Shape suffixes: B batch, T tokens, H heads, L latents, D value width, N sequences, M segments of all
sequences, C tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from latte.ops.arguments import LATTE_GRADIENTS, Earlier, Latte
from latte.ops.custom_ops import differentiable_op, empty_gradients, zeros_of
from latte.ops.state import final_buffers
from latte.ops.triton_backend.launch import contiguous, readable
from latte.ops.triton_backend.segments import (
    Walker, between_segments, decays, means_after, scan_back, state_gradients, states_before,
)  # fmt: skip
from latte.ops.triton_backend.tiles import (
    FORGETTING_REACH, REACH, SIZES, TINY, add_source, added, at_most, counted, factor, finite,
    first_reference, inverse, larger, largest, load_across, load_inputs, load_key, load_keys,
    load_latents, load_one_share, load_queries, load_query, load_shares, load_tile, load_value,
    log_mass_of, mass_up_to, mm, moved, place, power, reciprocal, slot_of, store_across,
    store_chosen, store_latents, store_row, store_tile, store_value, summed, uniform, walk_place,
    worn,
)  # fmt: skip


def forward(x: Latte) -> tuple[Tensor, ...]:
    """Outputs and final state; then, for the backward pass, :func:`between_segments`."""
    q, k, v = x.qkv
    run = walker(x)
    mask = readable(x.key_mask)
    (out,) = empty_gradients(v)
    finals = final_buffers(q, v, x.cu_seqlens)
    between, start, found = states_before(
        run, k, v, mask, x.cu_seqlens, x.earlier, finals, log_decay=x.log_decay
    )
    run.forward(
        walk,
        *(q, k, v, mask, run.parts.table, *start, out, *found),
        *(*q.stride(), *k.stride(), *v.stride()),
        **decays(x.log_decay),
    )
    return out, *finals, *between


def backward(
    x: Latte,
    dout: Tensor,
    dlog_mass: Tensor | None,
    dmean: Tensor | None,
    mean: Tensor,
    *between: Tensor,
) -> dict[str, Tensor]:
    """Gradients of all inputs, by one tile of D at a time."""
    dq, dk, dv, dg = empty_gradients(*x.qkv, x.log_decay)
    dmean_0, lost_0, _ = latent_gradients(
        walker(x),
        (*x.qkv, readable(x.key_mask), dout),
        x.earlier,
        between,
        (dmean, mean, dlog_mass),
        (dq, dk, dv),
        forgetting=None if x.log_decay is None else (x.log_decay, dg),
    )
    dA, dmu = state_gradients(x.earlier, dmean_0, lost_0)
    return {"q": dq, "k": dk, "v": dv, "log_mass": dA, "mean": dmu, "log_decay": dg}


def walker(x: Latte) -> Walker:
    """The walks of a call."""
    return Walker(x.q, x.v.shape[-1], x.cu_seqlens, x.log_decay is not None)


def latte_op(name: str, forgets: bool) -> Any:
    """The op for latents with decay, or for latents without."""

    def fake(x: Latte) -> tuple[Tensor, ...]:
        finals = final_buffers(x.q, x.v, x.cu_seqlens)
        states = between_segments(x.k, x.v.shape[-1], x.cu_seqlens, forgets)
        return *empty_gradients(x.v), *finals, *states

    return differentiable_op(
        name,
        Latte,
        fake,
        forward,
        backward,
        returns=["out", "log_mass", "mean"],
        gradients=LATTE_GRADIENTS,
        saves=["mean", "top_M", "mass_M", "mean_M", "top", "mass", *(["falls"] if forgets else [])],
        optional=["log_mass", "mean"],
    )


causal_op = latte_op("triton_causal", forgets=False)
forgetting_op = latte_op("triton_forgetting", forgets=True)


def latent_gradients(
    run: Walker,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor],
    earlier: Earlier,
    between: tuple[Tensor, ...],
    later: tuple[Tensor | None, Tensor, Tensor | None],
    results: tuple[Tensor, Tensor, Tensor],
    window_delta: Tensor | None = None,
    R: int = 1,
    forgetting: tuple[Tensor, Tensor] | None = None,
    window_logit: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Write ``results``, (dq, dk, dv) with all heads; return dmean, ``lost`` at the start, c.

    ``inputs`` are q, k, v, the mask and dy. ``earlier`` is the initial state. For ``between`` see
    :func:`between_segments`. ``later`` are the gradient of the final mean, this mean, and the
    gradient of the final log-mass; None for gradients of zero.

    If there is a window, it is state 0 and its delta (B, T, H) is ``window_delta``. q and dq then
    have its logit as column 0. ``window_logit`` (B, T, H) replaces this logit if it is given. Then
    c (B, T, H) is the delta of the whole mixture. ``R`` heads share one head of v. ``forgetting``
    are ``log_decay`` and the buffer for its gradient.
    """
    q, k, v, mask, dy = inputs
    dmean, final_mu, dlog_mass = later
    dq, dk, dv = results
    tiles = run.tiles()
    dmean_0 = torch.empty_like(final_mu, memory_format=torch.contiguous_format)
    sums: list[Tensor] = []
    for tile in tiles:
        # A single tile writes the results. Several tiles write parts in fp32.
        parts: tuple[Tensor, ...] = (dq, dk, *(forgetting or ())[1:])
        if len(tiles) > 1:
            parts = tuple(x.new_empty(x.shape, dtype=torch.float32) for x in parts)
        lost_0, c = _tile_gradients(
            run,
            (q, k, v[..., tile], mask, dy[..., tile]),
            (earlier[0], None if earlier[1] is None else earlier[1][..., tile]),
            (between[0], between[1], between[2][..., tile], *between[3:]),
            (
                None if dmean is None else dmean[..., tile],
                final_mu[..., tile],
                None if sums else dlog_mass,
            ),
            (*parts[:2], dv[..., tile], dmean_0[..., tile]),
            # Terms without a dimension D belong to the first tile.
            torch.zeros_like(window_delta) if sums and window_delta is not None else window_delta,
            R,
            None if forgetting is None else (forgetting[0], parts[2]),
            window_logit,
        )
        new = [*parts, lost_0, c] if len(tiles) > 1 else [lost_0, c]
        sums = [x + y for x, y in zip(sums, new, strict=True)] if sums else new
    if len(tiles) > 1:
        for x, total in zip((dq, dk, *(forgetting or ())[1:]), sums, strict=False):
            x.copy_(total)
    lost, c = sums[-2:]
    return dmean_0, lost, c


def _tile_gradients(
    run: Walker,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor],
    earlier: Earlier,
    between: tuple[Tensor, ...],
    later: tuple[Tensor | None, Tensor, Tensor | None],
    results: tuple[Tensor, ...],
    window_delta: Tensor | None,
    R: int,
    forgetting: tuple[Tensor, Tensor] | None,
    window_logit: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Write (dq, dk, dv, dmean_0) of one tile of D; return its part of ``lost`` at the start, of c.

    The arguments are as for :func:`latent_gradients`.
    """
    q, k, v, mask, dy = inputs
    dmean, final_mu, dlog_mass = later
    dq, dk, dv, dmean_0 = results
    table, D = run.parts.table, v.shape[-1]
    top_M, mass_M, mean_M, *final = contiguous(*between[:5])
    starts = tuple(final_mu.new_empty(shape) for shape in (final_mu.shape, final_mu.shape[:-1]))
    lost = None
    if dmean is not None:
        dmean = dmean.contiguous()
        lost = (dmean * final_mu).sum(-1)
    elif dlog_mass is not None or forgetting is not None and not run.cut:
        dmean, lost = zeros_of([(y.shape, y.dtype, y.device) for y in starts])
    if lost is not None and dlog_mass is not None:
        lost -= dlog_mass
    c = q.new_empty(q.shape[:3], dtype=torch.float32)
    gated = window_delta is not None
    if gated:
        # From the first latent on.
        q, dq = q[..., 1:], dq[..., 1:]
    at_slots = [c.new_empty((run.slots, run.H, run.L)) for _ in range(2)]
    at_ends = [c.new_empty((run.parts.M, run.H, run.L)) for _ in range(2)]
    asked: tuple[Tensor, ...] = ()
    if run.cut:
        asked = c.new_empty((*at_ends[0].shape, D)), torch.empty_like(at_ends[0])
    log_decay, dg = forgetting or (None, None)
    pointers: dict[str, Tensor] = {}
    if dg is not None:
        pointers = {f"slot_{x}_ptr": torch.empty_like(at_slots[0]) for x in ("fall", "step")}
        pointers |= {f"token_{x}_ptr": torch.empty_like(dg) for x in ("ref", "mass")}
    before = (top_M, mass_M, mean_M) if run.cut else (None, None, None)
    strides = (*q.stride(), *k.stride(), *v.stride(), *dy.stride())
    run.back(
        query_walk,
        D,
        *(q, k, v, mask, table, *before, *contiguous(*earlier), dy),
        *(dq, c, *at_slots, *at_ends, *(asked or (None, None)), *strides),
        window_delta_ptr=window_delta,
        window_logit_ptr=window_logit,
        R=R,
        **decays(log_decay),
        **pointers,
    )
    after: tuple[Tensor | None, ...] = (dmean, lost)
    if run.cut:
        after = tuple(torch.empty_like(x) for x in asked)
        given = (top_M, mass_M, *asked, run.parts.first, *final, dmean, lost)
        falls = {} if log_decay is None else {"fall_ptr": between[5]}
        run.by_sequence(scan_back, *given, *after, *starts, D=D, **falls)
    if dg is not None:
        assert after[0] is not None and after[1] is not None
        means = means_after(run, between[2], final_mu) if run.cut else final_mu
        pointers |= {"dlog_mass1_ptr": (after[0] * means).sum(-1) - after[1], "dg_ptr": dg}
    run.back(
        source_walk,
        D,
        *(q, k, v, mask, table, dy, dq, c, *at_slots, *at_ends, *after, dk, dv),
        *((None, None) if run.cut else starts),
        *(*strides, dv.stride(1), dv.stride(2)),
        GATED=gated,
        window_logit_ptr=window_logit,
        R=R,
        **decays(log_decay),
        **pointers,
    )
    if earlier[1] is not None:
        dmean_0.copy_(starts[0])
    return starts[1], c


@triton.jit
def begin(
    top_ptr, mass_ptr, mean_ptr, log_mass0_ptr, mean0_ptr, i, i0, L, D, d0,
    BL: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """(ref, mass, S) before a segment: the scan's result, else the initial state, else zeros.

    ``i`` and ``i0`` are the indices of the segment's and of the sequence's state.
    """
    if mean_ptr is not None:
        ref = load_latents(top_ptr, i, L, BL)
        mass = load_latents(mass_ptr, i, L, BL)
        total = load_across(mean_ptr, i, L, D, d0, BL, BD) * mass[None, :]
        return finite(ref), mass, total
    elif log_mass0_ptr is not None:
        ref = load_latents(log_mass0_ptr, i0, L, BL)
        seen = (ref != float("-inf")) & (tl.arange(0, BL) < L)
        mass = tl.where(seen, 1.0, 0.0)
        total = load_across(mean0_ptr, i0, L, D, d0, BL, BD) * mass[None, :]
        return finite(ref), mass, total
    else:
        nothing = tl.zeros((BL,), tl.float32)
        return nothing, nothing, tl.zeros((BD, BL), tl.float32)


@triton.jit
def leave_nothing(top_ptr, mass_ptr, mean_ptr, i, L, D, d0, BL: tl.constexpr, BD: tl.constexpr):
    """Write zeros for segments that packed sequences do not use: all saved numbers are defined."""
    if mean_ptr is not None:
        store_latents(top_ptr, i, L, tl.zeros((BL,), tl.float32), BL)
        store_latents(mass_ptr, i, L, tl.zeros((BL,), tl.float32), BL)
        store_across(mean_ptr, i, L, D, d0, tl.zeros((BD, BL), tl.float32), BL, BD)


@triton.jit
def leave_state(
    log_mass_ptr, mean_ptr, i, L, D, d0, ref, mass, total, BL: tl.constexpr, BD: tl.constexpr
):
    """Write the final state, if no scan has written it: then every sequence is one segment."""
    if d0 == 0:
        store_latents(log_mass_ptr, i, L, log_mass_of(ref, mass), BL)
    store_across(mean_ptr, i, L, D, d0, total * inverse(mass)[None, :], BL, BD)


@triton.jit(do_not_specialize=SIZES)
def walk(
    q_ptr, k_ptr, v_ptr, mask_ptr, table_ptr,
    top_ptr, mass_ptr, mean_ptr, log_mass0_ptr, mean0_ptr, out_ptr,
    log_mass1_ptr, mean1_ptr,
    q_b, q_t, q_h, q_l, k_b, k_t, k_h, k_l, v_b, v_t, v_h, v_d,
    T, length, per_row, H, L, D,
    C: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr, PRODUCT: tl.constexpr,
    STAGES: tl.constexpr, g_ptr=None, g_b=None, g_t=None, g_h=None, g_l=None,
):  # fmt: skip
    """y, contiguous, of one segment, head and tile of D.

    If every sequence is one segment, there is no scan. The final state is then written to
    ``log_mass1_ptr`` and ``mean1_ptr``.
    """
    FORGETS: tl.constexpr = g_ptr is not None
    reach: tl.constexpr = FORGETTING_REACH if FORGETS else REACH
    d0, h, m = walk_place(H, D, BD)
    batch, start, stop, n = place(m, table_ptr, T, per_row, length)
    i = m.to(tl.int64) * H + h
    if start > stop:
        leave_nothing(top_ptr, mass_ptr, mean_ptr, i, L, D, d0, BL, BD)
        return
    if mask_ptr is not None:
        mask_ptr += batch * T
    q_ptr += batch * q_b + h * q_h
    k_ptr += batch * k_b + h * k_h
    v_ptr += batch * v_b + h * v_h
    out_ptr += batch * T * H * D + h * D
    if FORGETS:
        g_ptr += batch * g_b + h * g_h
    token = tl.arange(0, C)
    past = token[:, None] >= token[None, :]
    ones = tl.full((C, C), 1.0, tl.float32)
    ref, mass, total = begin(
        top_ptr, mass_ptr, mean_ptr, log_mass0_ptr, mean0_ptr, i, n * H + h, L, D, d0, BL, BD
    )
    fresh = (mass == 0.0).to(tl.int32)
    unseen = uniform(tl.max(fresh, 0))
    # Every token's the same: as products add to it.
    mass = mass[None, :] + tl.zeros((C, BL), tl.float32)
    # What was forgotten since the reference was chosen.
    fall = tl.zeros((C, BL), tl.float32)
    count = tl.cdiv(tl.minimum(stop - start, length).to(tl.int32), C)
    for j in tl.range(0, count, num_stages=STAGES, disable_licm=True):
        at = start + j * C
        k = load_keys(k_ptr, mask_ptr, k_t, k_l, at, stop, L, C, BL)
        p = load_queries(q_ptr, q_t, q_l, at, stop, L, C, BL)
        v = load_inputs(v_ptr, v_t, v_d, at, stop, d0, D, C, BD)
        if FORGETS:
            g = load_tile(g_ptr, g_t, g_l, at, stop, 0, L, C, BL)
            fall_t = added(fall, summed(past.to(tl.float32), g, PRODUCT))
            fall_after = added(fall, summed(ones, g, PRODUCT))
        if unseen == 1:
            ref, fresh = first_reference(k - fall_t if FORGETS else k, token, ref, fresh, C)
            unseen = uniform(tl.max(fresh, 0))
        above = k - ref[None, :]
        if FORGETS:
            above -= fall_t
        rise = largest(above)
        e = factor(power(at_most(above, reach)), PRODUCT)
        mass_t = added(mass, counted(past.to(tl.float32), e, PRODUCT))
        p_over_mass = p * reciprocal(tl.maximum(mass_t, TINY))
        scores = tl.where(past, mm(p_over_mass, tl.trans(e), PRODUCT), 0.0)
        y = mm(scores, v, PRODUCT) + mm(p_over_mass, tl.trans(total), PRODUCT)
        after = added(total, mm(tl.trans(v), e, PRODUCT))
        mass_after = added(mass, counted(ones, e, PRODUCT))
        if rise > reach:
            highest = tl.max(tl.maximum(above, 0.0), 1)
            near = tl.associative_scan(highest, 0, larger) <= reach
            store_chosen(out_ptr, H * D, 1, at, stop, d0, D, y, near, C, BD)
            after = total
            ref_s, mass_s, fall_s = ref, tl.max(mass, 0), tl.max(fall, 0)
            for s in range(0, tl.minimum(stop - at, C).to(tl.int32)):
                k_s = load_key(k_ptr, mask_ptr, k_t, k_l, at + s, L, BL)
                p_s = load_query(q_ptr, q_t, q_l, at + s, L, BL)
                v_s = load_value(v_ptr, v_t, v_d, at + s, d0, D, BD)
                if FORGETS:
                    fall_s += load_value(g_ptr, g_t, g_l, at + s, 0, L, BL)
                    ref_s, mass_s, after = add_source(ref_s, mass_s, after, k_s, v_s, fall_s)
                    fall_s = tl.zeros_like(fall_s)
                else:
                    ref_s, mass_s, after = add_source(ref_s, mass_s, after, k_s, v_s)
                y_s = tl.sum(after * (p_s * inverse(mass_s))[None, :], 1)
                beyond = tl.max(tl.where(token == s, 1 - near.to(tl.int32), 0), 0) == 1
                store_value(out_ptr, H * D, 1, at + s, d0, D, y_s, beyond, BD)
            mass_after = mass_s[None, :] + tl.zeros((C, BL), tl.float32)
            if FORGETS:
                ref, fall = ref_s, tl.zeros_like(fall)
            else:
                ref = tl.maximum(ref, tl.max(k, 0))
        else:
            store_tile(out_ptr, H * D, 1, at, stop, d0, D, y, C, BD)
            if FORGETS:
                fall = fall_after
                if (rise > reach / 4) | worn(j):
                    later, step = moved(ref, fall, above)
                    kept = tl.exp(step)[None, :]
                    ref, mass_after, after = later, mass_after * kept, after * kept
                    fall = tl.zeros_like(fall)
            elif rise > reach / 4:
                later = tl.maximum(ref, tl.max(k, 0))
                kept = tl.exp(ref - later)[None, :]
                ref, mass_after, after = later, mass_after * kept, after * kept
        mass, total = mass_after, after
    if mean1_ptr is not None:
        i, mass = n * H + h, tl.max(mass, 0)
        ref = ref + tl.max(fall, 0) if FORGETS else ref
        leave_state(log_mass1_ptr, mean1_ptr, i, L, D, d0, ref, mass, total, BL, BD)


@triton.jit(do_not_specialize=SIZES)
def query_walk(
    q_ptr, k_ptr, v_ptr, mask_ptr, table_ptr,
    top_ptr, mass_ptr, mean_ptr, log_mass0_ptr, mean0_ptr, dy_ptr,
    dq_ptr, c_ptr, slot_ref_ptr, slot_mass_ptr, end_ref_ptr, end_mass_ptr, asked_ptr, lost_ptr,
    q_b, q_t, q_h, q_l, k_b, k_t, k_h, k_l, v_b, v_t, v_h, v_d, dy_b, dy_t, dy_h, dy_d,
    T, length, per_row, H, L, D,
    C: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr, PRODUCT: tl.constexpr,
    STAGES: tl.constexpr, window_delta_ptr=None, R: tl.constexpr = 1,
    g_ptr=None, g_b=None, g_t=None, g_h=None, g_l=None, slot_fall_ptr=None, slot_step_ptr=None,
    token_ref_ptr=None, token_mass_ptr=None, window_logit_ptr=None,
):  # fmt: skip
    """dq (B, T, H, L), c (B, T, H), (ref, mass) before each chunk and after the segment.

    If sequences are cut, ``asked`` (M, H, L, D) is sum_t p_t e^{A_0-A_t} dy_t over the segment, and
    ``lost`` (M, H, L) is the same sum of p_t delta_t.

    If there is a window, it is state 0, and ``window_delta`` (B, T, H) is its delta. Its logit is
    before the latents', in q and in dq, or it is in ``window_logit`` (B, T, H). ``R`` heads share
    one head of the values.

    If latents forget, two more numbers are written for each chunk: their log-decay before the chunk
    since its reference was chosen, and the logarithm of the factor by which the chunk changes a
    weight before it. The second is -inf if tokens are beyond reach. The (ref, mass) of these tokens
    are written to ``token_ref`` and ``token_mass`` (B, T, H, L).
    """
    GATED: tl.constexpr = window_delta_ptr is not None
    FORGETS: tl.constexpr = g_ptr is not None
    reach: tl.constexpr = FORGETTING_REACH if FORGETS else REACH
    width = L + 1 if GATED else L
    h, m = (tl.program_id(0) % H).to(tl.int64), tl.program_id(0) // H
    batch, start, stop, n = place(m, table_ptr, T, per_row, length)
    if start > stop:
        return
    if mask_ptr is not None:
        mask_ptr += batch * T
    q_ptr += batch * q_b + h * q_h
    k_ptr += batch * k_b + h * k_h
    v_ptr += batch * v_b + h // R * v_h
    dy_ptr += batch * dy_b + h * dy_h
    dq_ptr += (batch * T * H + h) * width
    c_ptr += batch * T * H + h
    if GATED:
        window_delta_ptr += batch * T * H + h
    if window_logit_ptr is not None:
        window_logit_ptr += batch * T * H + h
    if FORGETS:
        g_ptr += batch * g_b + h * g_h
        token_ref_ptr += (batch * T * H + h) * L
        token_mass_ptr += (batch * T * H + h) * L
    token = tl.arange(0, C)
    past = token[:, None] >= token[None, :]
    ones = tl.full((C, C), 1.0, tl.float32)
    i = m.to(tl.int64) * H + h
    ref, first_mass, total = begin(
        top_ptr, mass_ptr, mean_ptr, log_mass0_ptr, mean0_ptr, i, n * H + h, L, D, 0, BL, BD
    )
    first_ref = ref
    fresh = (first_mass == 0.0).to(tl.int32)
    unseen = uniform(tl.max(fresh, 0))
    mass = first_mass[None, :] + tl.zeros((C, BL), tl.float32)
    asked = tl.zeros((BD, BL), tl.float32)
    lost = tl.zeros((C, BL), tl.float32)
    fall = tl.zeros((C, BL), tl.float32)
    count = tl.cdiv(tl.minimum(stop - start, length).to(tl.int32), C)
    for j in tl.range(0, count, num_stages=STAGES, disable_licm=True):
        at = start + j * C
        k = load_keys(k_ptr, mask_ptr, k_t, k_l, at, stop, L, C, BL)
        p, gate = load_shares(q_ptr, q_t, q_l, at, stop, L, C, BL, GATED, window_logit_ptr, H)
        v = load_inputs(v_ptr, v_t, v_d, at, stop, 0, D, C, BD)
        dy = load_inputs(dy_ptr, dy_t, dy_d, at, stop, 0, D, C, BD)
        if FORGETS:
            g = load_tile(g_ptr, g_t, g_l, at, stop, 0, L, C, BL)
            fall_t = added(fall, summed(past.to(tl.float32), g, PRODUCT))
            fall_after = added(fall, summed(ones, g, PRODUCT))
        if unseen == 1:
            ref, fresh = first_reference(k - fall_t if FORGETS else k, token, ref, fresh, C)
            unseen = uniform(tl.max(fresh, 0))
        slot = slot_of(batch, at, T, n, C) * H + h
        store_latents(slot_ref_ptr, slot, L, ref, BL)
        if FORGETS:
            store_row(slot_mass_ptr, slot, L, mass, C, BL)
        else:
            store_latents(slot_mass_ptr, slot, L, tl.max(mass, 0), BL)
        above = k - ref[None, :]
        if FORGETS:
            above -= fall_t
            store_row(slot_fall_ptr, slot, L, fall, C, BL)
            step = tl.zeros((BL,), tl.float32)
        rise = largest(above)
        e = factor(power(at_most(above, reach)), PRODUCT)
        mass_t = added(mass, counted(past.to(tl.float32), e, PRODUCT))
        over = reciprocal(tl.maximum(mass_t, TINY))
        pairs = tl.where(past, mm(dy, tl.trans(v), PRODUCT), 0.0)
        pulled = p * over * (mm(dy, total, PRODUCT) + mm(pairs, e, PRODUCT))
        c = tl.sum(pulled, 1)
        if GATED:
            own = tl.load(window_delta_ptr + (at + token) * H, mask=at + token < stop, other=0.0)
            c += gate * own
        after = added(total, mm(tl.trans(v), e, PRODUCT))
        mass_after = added(mass, counted(ones, e, PRODUCT))
        lost_after = lost
        if asked_ptr is not None:
            # The weight of the first state in the present state, at most 1.
            if FORGETS:
                left = over * first_mass[None, :]
            else:
                left = over * (first_mass * tl.exp(tl.minimum(first_ref - ref, 0.0)))[None, :]
            asks = p * left
            lost_after += pulled * left
        if rise > reach:
            ref_s, mass_s, after = ref, tl.max(mass, 0), total
            lost_after, lost_s, fall_s = lost, tl.zeros((BL,), tl.float32), tl.max(fall, 0)
            for s in range(0, tl.minimum(stop - at, C).to(tl.int32)):
                k_s = load_key(k_ptr, mask_ptr, k_t, k_l, at + s, L, BL)
                p_s, gate_s = load_one_share(
                    q_ptr, q_t, q_l, at + s, L, BL, GATED, window_logit_ptr, H
                )
                v_s = load_value(v_ptr, v_t, v_d, at + s, 0, D, BD)
                dy_s = load_value(dy_ptr, dy_t, dy_d, at + s, 0, D, BD)
                if FORGETS:
                    fall_s += load_value(g_ptr, g_t, g_l, at + s, 0, L, BL)
                    before_s = ref_s
                    ref_s, mass_s, after = add_source(ref_s, mass_s, after, k_s, v_s, fall_s)
                    first_mass *= tl.exp(before_s - ref_s + fall_s)
                    fall_s = tl.zeros_like(fall_s)
                    store_value(token_ref_ptr, H * L, 1, at + s, 0, L, ref_s, True, BL)
                    store_value(token_mass_ptr, H * L, 1, at + s, 0, L, mass_s, True, BL)
                else:
                    ref_s, mass_s, after = add_source(ref_s, mass_s, after, k_s, v_s)
                over_s = inverse(mass_s)
                pulled_s = p_s * over_s * tl.sum(after * dy_s[:, None], 0)
                c_s = tl.sum(pulled_s, 0)
                if GATED:
                    own_s = tl.load(window_delta_ptr + (at + s) * H)
                    c_s += gate_s * own_s
                    dq_0 = (gate_s * (own_s - c_s)).to(dq_ptr.dtype.element_ty)
                    tl.store(dq_ptr + (at + s) * H * width - 1, dq_0)
                store_value(dq_ptr, H * width, 1, at + s, 0, L, pulled_s - p_s * c_s, True, BL)
                tl.store(c_ptr + (at + s) * H, c_s)
                if asked_ptr is not None:
                    if FORGETS:
                        left_s = over_s * first_mass
                    else:
                        left_s = over_s * first_mass * tl.exp(tl.minimum(first_ref - ref_s, 0.0))
                    asks = tl.where(token[:, None] == s, (p_s * left_s)[None, :], asks)
                    lost_s += pulled_s * left_s
            mass_after = mass_s[None, :] + tl.zeros((C, BL), tl.float32)
            if asked_ptr is not None:
                lost_after += tl.where(token[:, None] == 0, lost_s[None, :], 0.0)
            if FORGETS:
                step = tl.full((BL,), float("-inf"), tl.float32)
                ref, fall = ref_s, tl.zeros_like(fall)
            else:
                ref = tl.maximum(ref, tl.max(k, 0))
        else:
            store_tile(dq_ptr, H * width, 1, at, stop, 0, L, pulled - p * c[:, None], C, BL)
            if GATED:
                dq_0 = (gate * (own - c)).to(dq_ptr.dtype.element_ty)
                tl.store(dq_ptr + (at + token) * H * width - 1, dq_0, mask=at + token < stop)
            tl.store(c_ptr + (at + token) * H, c, mask=at + token < stop)
            if FORGETS:
                fall = fall_after
                if (rise > reach / 4) | worn(j):
                    later, step = moved(ref, fall, above)
                    first_mass *= tl.exp(step)
                    kept = tl.exp(step)[None, :]
                    ref, mass_after, after = later, mass_after * kept, after * kept
                    fall = tl.zeros_like(fall)
            elif rise > reach / 4:
                later = tl.maximum(ref, tl.max(k, 0))
                kept = tl.exp(ref - later)[None, :]
                ref, mass_after, after = later, mass_after * kept, after * kept
        if FORGETS:
            store_latents(slot_step_ptr, slot, L, step, BL)
        mass, total, lost = mass_after, after, lost_after
        if asked_ptr is not None:
            asked = added(asked, mm(tl.trans(dy), asks, PRODUCT))
    store_latents(end_ref_ptr, i, L, ref, BL)
    store_latents(end_mass_ptr, i, L, tl.max(mass, 0), BL)
    if asked_ptr is not None:
        store_latents(lost_ptr, i, L, tl.sum(lost, 0), BL)
        store_across(asked_ptr, i, L, D, 0, asked, BL, BD)


@triton.jit(do_not_specialize=SIZES)
def source_walk(
    q_ptr, k_ptr, v_ptr, mask_ptr, table_ptr, dy_ptr,
    dq_ptr, c_ptr, slot_ref_ptr, slot_mass_ptr, end_ref_ptr, end_mass_ptr,
    dmean1_ptr, lost1_ptr, dk_ptr, dv_ptr, dmean0_ptr, lost0_ptr,
    q_b, q_t, q_h, q_l, k_b, k_t, k_h, k_l, v_b, v_t, v_h, v_d, dy_b, dy_t, dy_h, dy_d, dv_t, dv_h,
    T, length, per_row, H, L, D,
    C: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr, PRODUCT: tl.constexpr,
    STAGES: tl.constexpr, GATED: tl.constexpr = False, R: tl.constexpr = 1,
    g_ptr=None, g_b=None, g_t=None, g_h=None, g_l=None, slot_fall_ptr=None, slot_step_ptr=None,
    token_ref_ptr=None, token_mass_ptr=None, dlog_mass1_ptr=None, dg_ptr=None,
    window_logit_ptr=None,
):  # fmt: skip
    """dk and dv of one segment, from ``dmean1`` and ``lost1``, the gradient of the state after it.
    None is a gradient of zero.

    ``dmean0`` and ``lost0`` are the gradient of the state before it, unless they are None. Sums
    over the tokens of a chunk are never computed as total - prefix, because that cancels. ``GATED``
    says whether there is a window. For ``R`` and ``window_logit`` see :func:`query_walk`.

    If latents forget, dg (B, T, H, L) is computed from ``dlog_mass1``, the gradient of the log-mass
    after the segment. dg of a token is the gradient of the log-mass before it, so dk is subtracted
    token by token.
    """
    FORGETS: tl.constexpr = g_ptr is not None
    reach: tl.constexpr = FORGETTING_REACH if FORGETS else REACH
    width = L + 1 if GATED else L
    h, m = (tl.program_id(0) % H).to(tl.int64), tl.program_id(0) // H
    batch, start, stop, n = place(m, table_ptr, T, per_row, length)
    if start > stop:
        return
    if mask_ptr is not None:
        mask_ptr += batch * T
    q_ptr += batch * q_b + h * q_h
    k_ptr += batch * k_b + h * k_h
    v_ptr += batch * v_b + h // R * v_h
    dy_ptr += batch * dy_b + h * dy_h
    dq_ptr += (batch * T * H + h) * width
    dk_ptr += batch * T * H * L + h * L
    dv_ptr += batch * T * dv_t + h * dv_h
    c_ptr += batch * T * H + h
    if window_logit_ptr is not None:
        window_logit_ptr += batch * T * H + h
    if FORGETS:
        g_ptr += batch * g_b + h * g_h
        dg_ptr += batch * T * H * L + h * L
        token_ref_ptr += batch * T * H * L + h * L
        token_mass_ptr += batch * T * H * L + h * L
    token = tl.arange(0, C)
    past = token[:, None] >= token[None, :]
    future = token[:, None] <= token[None, :]
    ones = tl.full((C, C), 1.0, tl.float32)
    i = m.to(tl.int64) * H + h
    later, mass = load_latents(end_ref_ptr, i, L, BL), load_latents(end_mass_ptr, i, L, BL)
    # Every token's the same: as products add to it.
    total, lost = tl.zeros((BD, BL), tl.float32), tl.zeros((C, BL), tl.float32)
    if dmean1_ptr is not None:
        total += load_across(dmean1_ptr, i, L, D, 0, BL, BD) * inverse(mass)[None, :]
        lost += (load_latents(lost1_ptr, i, L, BL) * inverse(mass))[None, :]
    if FORGETS:
        dA = load_latents(dlog_mass1_ptr, i, L, BL)[None, :] + tl.zeros((C, BL), tl.float32)
    count = tl.cdiv(tl.minimum(stop - start, length).to(tl.int32), C)
    for j in tl.range(0, count, num_stages=STAGES, disable_licm=True):
        at = start + (count - 1 - j) * C
        k = load_keys(k_ptr, mask_ptr, k_t, k_l, at, stop, L, C, BL)
        p, gate = load_shares(q_ptr, q_t, q_l, at, stop, L, C, BL, GATED, window_logit_ptr, H)
        v = load_inputs(v_ptr, v_t, v_d, at, stop, 0, D, C, BD)
        dy = load_inputs(dy_ptr, dy_t, dy_d, at, stop, 0, D, C, BD)
        dq = load_tile(dq_ptr, H * width, 1, at, stop, 0, L, C, BL)
        c = tl.load(c_ptr + (at + token) * H, mask=at + token < stop, other=0.0)
        slot = slot_of(batch, at, T, n, C) * H + h
        ref, mass = (
            load_latents(slot_ref_ptr, slot, L, BL),
            load_latents(slot_mass_ptr, slot, L, BL),
        )
        above = k - ref[None, :]
        if FORGETS:
            g = load_tile(g_ptr, g_t, g_l, at, stop, 0, L, C, BL)
            fall = load_latents(slot_fall_ptr, slot, L, BL)
            step = load_latents(slot_step_ptr, slot, L, BL)
            above -= fall[None, :] + summed(past.to(tl.float32), g, PRODUCT)
        e = factor(power(at_most(above, reach)), PRODUCT)
        mass_t = counted(past.to(tl.float32), e, PRODUCT)
        mass_t = added(tl.broadcast_to(mass[None, :], mass_t.shape), mass_t)
        over = reciprocal(tl.maximum(mass_t, TINY))
        asks = factor(p * over, PRODUCT)
        pulled = factor((dq + p * c[:, None]) * over, PRODUCT)
        kept = tl.exp(step if FORGETS else tl.minimum(ref - later, 0.0))[None, :]
        here, lost_here = total * kept, lost * kept
        # Results that are written early hold no registers. If tokens are beyond reach, none are.
        if FORGETS:
            beyond = tl.load(slot_step_ptr + slot * L) == float("-inf")
        else:
            beyond = largest(above) > reach
        reached = tl.where(beyond, at, stop)
        scores = tl.where(future, mm(e, tl.trans(asks), PRODUCT), 0.0)
        dv = mm(scores, dy, PRODUCT) + mm(e, tl.trans(here), PRODUCT)
        store_tile(dv_ptr, dv_t, 1, at, reached, 0, D, dv, C, BD)
        pairs = tl.where(future, mm(v, tl.trans(dy), PRODUCT), 0.0)
        dk = mm(v, here, PRODUCT) + mm(pairs, asks, PRODUCT)
        dk = dk - lost_here - counted(future.to(tl.float32), pulled, PRODUCT)
        dk *= e.to(tl.float32)
        store_tile(dk_ptr, H * L, 1, at, reached, 0, L, dk, C, BL)
        if FORGETS:
            dg = dA - summed(future.to(tl.float32), dk, PRODUCT)
            store_tile(dg_ptr, H * L, 1, at, reached, 0, L, dg, C, BL)
            dA_here = dA - summed(ones, dk, PRODUCT)
        here = added(here, mm(tl.trans(dy), asks, PRODUCT))
        lost_here = added(lost_here, counted(ones, pulled, PRODUCT))
        if beyond:
            top_s, lost_s, here = later, tl.max(lost, 0), total
            if FORGETS:
                dA_s, fall_s = tl.max(dA, 0), tl.zeros_like(ref)
            tokens = tl.minimum(stop - at, C).to(tl.int32)
            for back in range(0, tokens):
                s = tokens - 1 - back
                k_s = load_key(k_ptr, mask_ptr, k_t, k_l, at + s, L, BL)
                p_s, gate_s = load_one_share(
                    q_ptr, q_t, q_l, at + s, L, BL, GATED, window_logit_ptr, H
                )
                v_s = load_value(v_ptr, v_t, v_d, at + s, 0, D, BD)
                dy_s = load_value(dy_ptr, dy_t, dy_d, at + s, 0, D, BD)
                dq_s = load_value(dq_ptr, H * width, 1, at + s, 0, L, BL)
                c_s = tl.load(c_ptr + (at + s) * H)
                if FORGETS:
                    earlier = load_value(token_ref_ptr, H * L, 1, at + s, 0, L, BL)
                    mass_s = load_value(token_mass_ptr, H * L, 1, at + s, 0, L, BL)
                    kept_s = tl.exp(earlier - top_s + fall_s)
                    fall_s = load_value(g_ptr, g_t, g_l, at + s, 0, L, BL)
                else:
                    earlier, mass_s = mass_up_to(s, token, k, ref, mass)
                    kept_s = tl.exp(tl.minimum(earlier - top_s, 0.0))
                over_s = tl.where(mass_s == 0.0, 0.0, inverse(mass_s))
                here = here * kept_s[None, :] + dy_s[:, None] * (p_s * over_s)[None, :]
                lost_s = lost_s * kept_s + (dq_s + p_s * c_s) * over_s
                top_s = earlier
                e_s = tl.exp(at_most(k_s - top_s, 0.0))
                dk_s = e_s * (tl.sum(here * v_s[:, None], 0) - lost_s)
                store_value(dk_ptr, H * L, 1, at + s, 0, L, dk_s, True, BL)
                if FORGETS:
                    dA_s -= dk_s
                    store_value(dg_ptr, H * L, 1, at + s, 0, L, dA_s, True, BL)
                dv_s = tl.sum(here * e_s[None, :], 1)
                store_value(dv_ptr, dv_t, 1, at + s, 0, D, dv_s, True, BD)
            if FORGETS:
                kept_s = tl.exp(ref - top_s + (fall + fall_s))
                dA_here = dA_s[None, :] + tl.zeros((C, BL), tl.float32)
            else:
                kept_s = tl.exp(tl.minimum(ref - top_s, 0.0))
            here *= kept_s[None, :]
            lost_here = (lost_s * kept_s)[None, :] + tl.zeros((C, BL), tl.float32)
        total, lost, later = here, lost_here, ref
        if FORGETS:
            dA = dA_here
    if dmean0_ptr is not None:
        store_latents(lost0_ptr, i, L, tl.max(lost, 0) * mass, BL)
        store_across(dmean0_ptr, i, L, D, 0, total * mass[None, :], BL, BD)
