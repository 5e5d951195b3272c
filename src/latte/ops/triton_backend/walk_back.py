"""Causal Latte, backward: two walks over each segment, the states kept on chip.

With delta_t[l] = <dy_t, mu_t[l]> and w_ts[l] = exp(k_s[l] - A_t[l]):

    dq_t = p_t (delta_t - c_t),  c_t = sum_l p_t delta_t
    dv_s = sum_{t>=s} sum_l p_t w_ts dy_t
    dk_s = sum_{t>=s} p_t w_ts (<dy_t, v_s> - delta_t)

1. ``query_walk``, forwards: dq and c; the reference and the mass before each chunk; and, where
   sequences are cut, what the segment asks of the state before it.
2. ``scan_back`` (backward.py), where sequences are cut: the gradient of the state after each
   segment.
3. ``source_walk``, backwards: dk and dv. It needs no state of the past: p_t delta_t is
   dq_t + p_t c_t.

The state that ``source_walk`` carries is R = sum_t p_t exp(ref - A_t) dy_t over the later tokens t,
and ``lost`` the same sum of p_t delta_t: the gradient of the state, counted from the reference.

Shape suffixes: M segments of all sequences, C tokens of a chunk, N sequences, H heads, L latents,
D value width, which one tile holds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from latte.ops.triton_backend.tiles import (
    REACH,
    TINY,
    factor,
    inverse,
    load_key,
    load_keys,
    load_row,
    load_tile,
    mm,
    place,
    power,
    reciprocal,
    store_row,
    store_tile,
)
from latte.ops.triton_backend.walk import SIZES, begin
from latte.ops.triton_backend.walk_tiles import (
    counted,
    first_reference,
    largest,
    load_across,
    load_inputs,
    load_value,
    mass_up_to,
    slot_of,
    step,
    store_across,
    store_value,
)
from latte.ops.triton_backend.window_tiles import load_one_share, load_shares


@triton.jit(do_not_specialize=SIZES)
def query_walk(
    q_ptr, k_ptr, v_ptr, mask_ptr, table_ptr,
    top_ptr, mass_ptr, mean_ptr, log_mass0_ptr, mean0_ptr, dy_ptr,
    dq_ptr, c_ptr, slot_ref_ptr, slot_mass_ptr, end_ref_ptr, end_mass_ptr, asked_ptr, lost_ptr,
    q_b, q_t, q_h, q_l, k_b, k_t, k_h, k_l, v_b, v_t, v_h, v_d, dy_b, dy_t, dy_h, dy_d,
    T, length, segments, H, L, D,
    C: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr, PRODUCT: tl.constexpr,
    STAGES: tl.constexpr, window_delta_ptr=None, R: tl.constexpr = 1,
):  # fmt: skip
    """dq (B, T, H, L), c (B, T, H), (ref, mass) before each chunk and after the segment.

    Where sequences are cut, ``asked`` (M, H, L, D) = sum_t p_t e^{A_0-A_t} dy_t over the segment,
    and ``lost`` (M, H, L) the same sum of p_t delta_t.

    With a window as state 0: ``window_delta`` (B, T, H) is its delta; its logit stands before the
    latents', in q and in dq. ``R`` heads share one head of the values.
    """
    GATED: tl.constexpr = window_delta_ptr is not None
    width = L + 1 if GATED else L
    h, m = (tl.program_id(0) % H).to(tl.int64), tl.program_id(0) // H
    row, start, stop, n = place(m, table_ptr, T, segments, length)
    if start > stop:
        return
    if mask_ptr is not None:
        mask_ptr += row * T
    q_ptr += row * q_b + h * q_h
    k_ptr += row * k_b + h * k_h
    v_ptr += row * v_b + h // R * v_h
    dy_ptr += row * dy_b + h * dy_h
    dq_ptr += (row * T * H + h) * width
    c_ptr += row * T * H + h
    if GATED:
        window_delta_ptr += row * T * H + h
    rows = tl.arange(0, C)
    past = rows[:, None] >= rows[None, :]
    ones = tl.full((C, C), 1.0, tl.float32)
    i = m.to(tl.int64) * H + h
    ref, first_mass, total = begin(
        top_ptr, mass_ptr, mean_ptr, log_mass0_ptr, mean0_ptr, i, n * H + h, L, D, 0, BL, BD
    )
    first_ref = ref
    fresh = (first_mass == 0.0).to(tl.int32)
    unseen = tl.max(fresh, 0)
    mass = first_mass[None, :] + tl.zeros((C, BL), tl.float32)
    asked = tl.zeros((BD, BL), tl.float32)
    lost = tl.zeros((C, BL), tl.float32)
    count = tl.cdiv(tl.minimum(stop - start, length).to(tl.int32), C)
    for j in tl.range(0, count, num_stages=STAGES, disable_licm=True):
        at = start + j * C
        k = load_keys(k_ptr, mask_ptr, k_t, k_l, at, stop, L, C, BL)
        p, gate = load_shares(q_ptr, q_t, q_l, at, stop, L, C, BL, GATED)
        v = load_inputs(v_ptr, v_t, v_d, at, stop, 0, D, C, BD)
        dy = load_inputs(dy_ptr, dy_t, dy_d, at, stop, 0, D, C, BD)
        if unseen == 1:
            ref, fresh = first_reference(k, rows, ref, fresh, C)
            unseen = tl.max(fresh, 0)
        slot = slot_of(row, at, T, n, C) * H + h
        store_row(slot_ref_ptr, slot, L, ref, BL)
        store_row(slot_mass_ptr, slot, L, tl.max(mass, 0), BL)
        rise = largest(k - ref[None, :])
        e = factor(power(tl.minimum(k - ref[None, :], REACH)), PRODUCT)
        over = reciprocal(tl.maximum(mass + counted(past.to(tl.float32), e, PRODUCT), TINY))
        pairs = tl.where(past, mm(dy, tl.trans(v), PRODUCT), 0.0)
        pulled = p * over * (mm(dy, total, PRODUCT) + mm(pairs, e, PRODUCT))
        c = tl.sum(pulled, 1)
        if GATED:
            own = tl.load(window_delta_ptr + (at + rows) * H, mask=at + rows < stop, other=0.0)
            c += gate * own
        after = total + mm(tl.trans(v), e, PRODUCT)
        mass_after = mass + counted(ones, e, PRODUCT)
        lost_after = lost
        if asked_ptr is not None:
            # The first state's share of the state now, at most 1.
            left = over * (first_mass * tl.exp(tl.minimum(first_ref - ref, 0.0)))[None, :]
            asks = p * left
            lost_after += pulled * left
        if rise > REACH:
            ref_s, mass_s, after = ref, tl.max(mass, 0), total
            lost_after, lost_s = lost, tl.zeros((BL,), tl.float32)
            for s in range(0, tl.minimum(stop - at, C).to(tl.int32)):
                k_s = load_key(k_ptr, mask_ptr, k_t, k_l, at + s, L, BL)
                p_s, gate_s = load_one_share(q_ptr, q_t, q_l, at + s, L, BL, GATED)
                v_s = load_value(v_ptr, v_t, v_d, at + s, 0, D, BD)
                dy_s = load_value(dy_ptr, dy_t, dy_d, at + s, 0, D, BD)
                ref_s, mass_s, after = step(ref_s, mass_s, after, k_s, v_s)
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
                    left_s = over_s * first_mass * tl.exp(tl.minimum(first_ref - ref_s, 0.0))
                    asks = tl.where(rows[:, None] == s, (p_s * left_s)[None, :], asks)
                    lost_s += pulled_s * left_s
            mass_after = mass_s[None, :] + tl.zeros((C, BL), tl.float32)
            if asked_ptr is not None:
                lost_after += tl.where(rows[:, None] == 0, lost_s[None, :], 0.0)
            ref = tl.maximum(ref, tl.max(k, 0))
        else:
            store_tile(dq_ptr, H * width, 1, at, stop, 0, L, pulled - p * c[:, None], C, BL)
            if GATED:
                dq_0 = (gate * (own - c)).to(dq_ptr.dtype.element_ty)
                tl.store(dq_ptr + (at + rows) * H * width - 1, dq_0, mask=at + rows < stop)
            tl.store(c_ptr + (at + rows) * H, c, mask=at + rows < stop)
            if rise > REACH / 4:
                later = tl.maximum(ref, tl.max(k, 0))
                kept = tl.exp(ref - later)[None, :]
                ref, mass_after, after = later, mass_after * kept, after * kept
        mass, total, lost = mass_after, after, lost_after
        if asked_ptr is not None:
            asked += mm(tl.trans(dy), asks, PRODUCT)
    store_row(end_ref_ptr, i, L, ref, BL)
    store_row(end_mass_ptr, i, L, tl.max(mass, 0), BL)
    if asked_ptr is not None:
        store_row(lost_ptr, i, L, tl.sum(lost, 0), BL)
        store_across(asked_ptr, i, L, D, 0, asked, BL, BD)


@triton.jit(do_not_specialize=SIZES)
def source_walk(
    q_ptr, k_ptr, v_ptr, mask_ptr, table_ptr, dy_ptr,
    dq_ptr, c_ptr, slot_ref_ptr, slot_mass_ptr, end_ref_ptr, end_mass_ptr,
    dmean1_ptr, lost1_ptr, dk_ptr, dv_ptr, dmean0_ptr, lost0_ptr,
    q_b, q_t, q_h, q_l, k_b, k_t, k_h, k_l, v_b, v_t, v_h, v_d, dy_b, dy_t, dy_h, dy_d, dv_t, dv_h,
    T, length, segments, H, L, D,
    C: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr, PRODUCT: tl.constexpr,
    STAGES: tl.constexpr, GATED: tl.constexpr = False, R: tl.constexpr = 1,
):  # fmt: skip
    """dk and dv of one segment, from ``dmean1`` and ``lost1``, the gradient of the state after it.

    ``dmean0``, ``lost0``: of the state before it, unless None. Sums over the rows of a chunk never
    come as total - prefix: that cancels. ``GATED``, ``R``: see :func:`query_walk`.
    """
    width = L + 1 if GATED else L
    h, m = (tl.program_id(0) % H).to(tl.int64), tl.program_id(0) // H
    row, start, stop, n = place(m, table_ptr, T, segments, length)
    if start > stop:
        return
    if mask_ptr is not None:
        mask_ptr += row * T
    q_ptr += row * q_b + h * q_h
    k_ptr += row * k_b + h * k_h
    v_ptr += row * v_b + h // R * v_h
    dy_ptr += row * dy_b + h * dy_h
    dq_ptr += (row * T * H + h) * width
    dk_ptr += row * T * H * L + h * L
    dv_ptr += row * T * dv_t + h * dv_h
    c_ptr += row * T * H + h
    rows = tl.arange(0, C)
    past = rows[:, None] >= rows[None, :]
    future = rows[:, None] <= rows[None, :]
    ones = tl.full((C, C), 1.0, tl.float32)
    i = m.to(tl.int64) * H + h
    later, mass = load_row(end_ref_ptr, i, L, BL), load_row(end_mass_ptr, i, L, BL)
    total = load_across(dmean1_ptr, i, L, D, 0, BL, BD) * inverse(mass)[None, :]
    lost = load_row(lost1_ptr, i, L, BL) * inverse(mass)
    # Every row the same: as products add to it.
    lost = lost[None, :] + tl.zeros((C, BL), tl.float32)
    count = tl.cdiv(tl.minimum(stop - start, length).to(tl.int32), C)
    for j in tl.range(0, count, num_stages=STAGES, disable_licm=True):
        at = start + (count - 1 - j) * C
        k = load_keys(k_ptr, mask_ptr, k_t, k_l, at, stop, L, C, BL)
        p, gate = load_shares(q_ptr, q_t, q_l, at, stop, L, C, BL, GATED)
        v = load_inputs(v_ptr, v_t, v_d, at, stop, 0, D, C, BD)
        dy = load_inputs(dy_ptr, dy_t, dy_d, at, stop, 0, D, C, BD)
        dq = load_tile(dq_ptr, H * width, 1, at, stop, 0, L, C, BL)
        c = tl.load(c_ptr + (at + rows) * H, mask=at + rows < stop, other=0.0)
        slot = slot_of(row, at, T, n, C) * H + h
        ref, mass = load_row(slot_ref_ptr, slot, L, BL), load_row(slot_mass_ptr, slot, L, BL)
        e = factor(power(tl.minimum(k - ref[None, :], REACH)), PRODUCT)
        mass_t = mass[None, :] + counted(past.to(tl.float32), e, PRODUCT)
        over = reciprocal(tl.maximum(mass_t, TINY))
        asks = factor(p * over, PRODUCT)
        pulled = factor((dq + p * c[:, None]) * over, PRODUCT)
        kept = tl.exp(tl.minimum(ref - later, 0.0))[None, :]
        here, lost_here = total * kept, lost * kept
        pairs = tl.where(future, mm(v, tl.trans(dy), PRODUCT), 0.0)
        scores = tl.where(future, mm(e, tl.trans(asks), PRODUCT), 0.0)
        dk = mm(v, here, PRODUCT) - lost_here - counted(future.to(tl.float32), pulled, PRODUCT)
        dk = (dk + mm(pairs, asks, PRODUCT)) * e.to(tl.float32)
        dv = mm(scores, dy, PRODUCT) + mm(e, tl.trans(here), PRODUCT)
        here += mm(tl.trans(dy), asks, PRODUCT)
        lost_here += counted(ones, pulled, PRODUCT)
        if largest(k - ref[None, :]) > REACH:
            top_s, lost_s, here = later, tl.max(lost, 0), total
            tokens = tl.minimum(stop - at, C).to(tl.int32)
            for back in range(0, tokens):
                s = tokens - 1 - back
                k_s = load_key(k_ptr, mask_ptr, k_t, k_l, at + s, L, BL)
                p_s, gate_s = load_one_share(q_ptr, q_t, q_l, at + s, L, BL, GATED)
                v_s = load_value(v_ptr, v_t, v_d, at + s, 0, D, BD)
                dy_s = load_value(dy_ptr, dy_t, dy_d, at + s, 0, D, BD)
                dq_s = load_value(dq_ptr, H * width, 1, at + s, 0, L, BL)
                c_s = tl.load(c_ptr + (at + s) * H)
                earlier, mass_s = mass_up_to(s, rows, k, ref, mass)
                kept_s = tl.exp(tl.minimum(earlier - top_s, 0.0))
                over_s = tl.where(mass_s == 0.0, 0.0, inverse(mass_s))
                here = here * kept_s[None, :] + dy_s[:, None] * (p_s * over_s)[None, :]
                lost_s = lost_s * kept_s + (dq_s + p_s * c_s) * over_s
                top_s = earlier
                e_s = tl.exp(tl.minimum(k_s - top_s, 0.0))
                dk_s = e_s * (tl.sum(here * v_s[:, None], 0) - lost_s)
                store_value(dk_ptr, H * L, 1, at + s, 0, L, dk_s, True, BL)
                dv_s = tl.sum(here * e_s[None, :], 1)
                store_value(dv_ptr, dv_t, 1, at + s, 0, D, dv_s, True, BD)
            kept_s = tl.exp(tl.minimum(ref - top_s, 0.0))
            here *= kept_s[None, :]
            lost_here = (lost_s * kept_s)[None, :] + tl.zeros((C, BL), tl.float32)
        else:
            store_tile(dk_ptr, H * L, 1, at, stop, 0, L, dk, C, BL)
            store_tile(dv_ptr, dv_t, 1, at, stop, 0, D, dv, C, BD)
        total, lost, later = here, lost_here, ref
    if dmean0_ptr is not None:
        store_row(lost0_ptr, i, L, tl.max(lost, 0) * mass, BL)
        store_across(dmean0_ptr, i, L, D, 0, total * mass[None, :], BL, BD)
