"""Causal Latte, forward: one program walks a segment of the sequence, its state kept on chip.

A segment is many chunks of one sequence. Where sequences and heads fill the GPU there is one
segment per sequence, and ``walk`` alone is the forward pass: it reads q, k and v once and writes y
once. Where they do not, ``segment_sums`` reads k and v, ``scan`` (forward.py) merges what it finds
into the state before each segment, and ``walk`` starts from there.

The state is (ref, mass, S): S = sum_s exp(k_s - ref) v_s and mass = sum_s exp(k_s - ref), so that
the mean is S / mass. All sources of a chunk count from one reference, the log-mass before the
chunk, while no logit lies more than e^REACH above it:

    y_t = sum_l p(l|t) / mass_t (S + sum_s exp(k_s - ref) v_s)

Rows behind a logit beyond the reach take their weights source by source. The choice is made per row
and depends on the row's past alone: future inputs cannot change an output, not even its rounding.

Shape suffixes: M segments of all sequences, C tokens of a chunk, N sequences, H heads, L latents,
D value width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from latte.ops.triton_backend.tiles import (
    REACH,
    TINY,
    factor,
    finite,
    inverse,
    load_key,
    load_keys,
    load_queries,
    load_row,
    log_mass_of,
    mm,
    place,
    power,
    reciprocal,
    store_row,
    store_tile,
)
from latte.ops.triton_backend.walk_tiles import (
    counted,
    first_reference,
    larger,
    largest,
    load_across,
    load_inputs,
    load_query,
    load_value,
    step,
    store_across,
    store_rows,
    store_value,
)

SIZES = ["T", "length", "segments"]


@triton.jit(do_not_specialize=SIZES)
def segment_sums(
    k_ptr, v_ptr, mask_ptr, table_ptr,
    top_ptr, mass_ptr, sum_ptr,
    k_b, k_t, k_h, k_l, v_b, v_t, v_h, v_d,
    T, length, segments, H, L, D,
    C: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr, PRODUCT: tl.constexpr,
    STAGES: tl.constexpr, R: tl.constexpr = 1,
):  # fmt: skip
    """(M, H, L) twice and (M, H, L, D): top, mass and sum_s exp(k_s - top) v_s of each segment.

    ``R`` heads share one head of the values.
    It walks backwards, so that what it read last is still in the cache when ``walk`` begins.
    """
    tiles = tl.cdiv(D, BD)
    d0 = (tl.program_id(0) % tiles) * BD
    h = (tl.program_id(0) // tiles % H).to(tl.int64)
    m = tl.program_id(0) // (tiles * H)
    row, start, stop, _ = place(m, table_ptr, T, segments, length)
    if start > stop:
        return
    if mask_ptr is not None:
        mask_ptr += row * T
    k_ptr += row * k_b + h * k_h
    v_ptr += row * v_b + h // R * v_h
    rows = tl.arange(0, C)
    ones = tl.full((C, C), 1.0, tl.float32)
    ref, fresh, unseen = tl.zeros((BL,), tl.float32), tl.full((BL,), 1, tl.int32), 1
    mass = tl.zeros((C, BL), tl.float32)
    total = tl.zeros((BD, BL), tl.float32)
    count = tl.cdiv(tl.minimum(stop - start, length).to(tl.int32), C)
    for j in tl.range(0, count, num_stages=STAGES, disable_licm=True):
        at = start + (count - 1 - j) * C
        k = load_keys(k_ptr, mask_ptr, k_t, k_l, at, stop, L, C, BL)
        v = load_inputs(v_ptr, v_t, v_d, at, stop, d0, D, C, BD)
        if unseen == 1:
            ref, fresh = first_reference(k, rows, ref, fresh, C)
            unseen = tl.max(fresh, 0)
        if largest(k - ref[None, :]) > REACH / 4:
            later = tl.maximum(ref, tl.max(k, 0))
            kept = tl.exp(ref - later)
            ref, mass, total = later, mass * kept[None, :], total * kept[None, :]
        e = factor(power(k - ref[None, :]), PRODUCT)
        mass += counted(ones, e, PRODUCT)
        total += mm(tl.trans(v), e, PRODUCT)
    i = m.to(tl.int64) * H + h
    if d0 == 0:
        store_row(top_ptr, i, L, tl.where(fresh == 1, float("-inf"), ref), BL)
        store_row(mass_ptr, i, L, tl.max(mass, 0), BL)
    store_across(sum_ptr, i, L, D, d0, total, BL, BD)


@triton.jit
def begin(
    top_ptr, mass_ptr, mean_ptr, log_mass0_ptr, mean0_ptr, i, i0, L, D, d0,
    BL: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """(ref, mass, S) before a segment: what the scan found, else the initial state, else nothing.

    ``i``, ``i0``: which state of the segments', which of the sequences'.
    """
    if mean_ptr is not None:
        ref = load_row(top_ptr, i, L, BL)
        mass = load_row(mass_ptr, i, L, BL)
        total = load_across(mean_ptr, i, L, D, d0, BL, BD) * mass[None, :]
        return finite(ref), mass, total
    elif log_mass0_ptr is not None:
        ref = load_row(log_mass0_ptr, i0, L, BL)
        seen = (ref != float("-inf")) & (tl.arange(0, BL) < L)
        mass = tl.where(seen, 1.0, 0.0)
        total = load_across(mean0_ptr, i0, L, D, d0, BL, BD) * mass[None, :]
        return finite(ref), mass, total
    else:
        nothing = tl.zeros((BL,), tl.float32)
        return nothing, nothing, tl.zeros((BD, BL), tl.float32)


@triton.jit(do_not_specialize=SIZES)
def walk(
    q_ptr, k_ptr, v_ptr, mask_ptr, table_ptr,
    top_ptr, mass_ptr, mean_ptr, log_mass0_ptr, mean0_ptr, out_ptr,
    log_mass1_ptr, mean1_ptr,
    q_b, q_t, q_h, q_l, k_b, k_t, k_h, k_l, v_b, v_t, v_h, v_d,
    T, length, segments, H, L, D,
    C: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr, PRODUCT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """y, contiguous, of one segment, head and tile of D.

    ``log_mass1_ptr`` and ``mean1_ptr`` take the final state where no scan has found it: where every
    sequence is one segment.
    """
    tiles = tl.cdiv(D, BD)
    d0 = (tl.program_id(0) % tiles) * BD
    h = (tl.program_id(0) // tiles % H).to(tl.int64)
    m = tl.program_id(0) // (tiles * H)
    row, start, stop, n = place(m, table_ptr, T, segments, length)
    i = m.to(tl.int64) * H + h
    if start > stop:
        if mean_ptr is not None:
            # Packed sequences may need fewer segments: what is saved is defined there too.
            store_row(top_ptr, i, L, tl.zeros((BL,), tl.float32), BL)
            store_row(mass_ptr, i, L, tl.zeros((BL,), tl.float32), BL)
            store_across(mean_ptr, i, L, D, d0, tl.zeros((BD, BL), tl.float32), BL, BD)
        return
    if mask_ptr is not None:
        mask_ptr += row * T
    q_ptr += row * q_b + h * q_h
    k_ptr += row * k_b + h * k_h
    v_ptr += row * v_b + h * v_h
    out_ptr += row * T * H * D + h * D
    rows = tl.arange(0, C)
    past = rows[:, None] >= rows[None, :]
    ones = tl.full((C, C), 1.0, tl.float32)
    ref, mass, total = begin(
        top_ptr, mass_ptr, mean_ptr, log_mass0_ptr, mean0_ptr,
        i, n * H + h, L, D, d0, BL, BD,
    )  # fmt: skip
    fresh = (mass == 0.0).to(tl.int32)
    unseen = tl.max(fresh, 0)
    # Every row the same: as products add to it.
    mass = mass[None, :] + tl.zeros((C, BL), tl.float32)
    count = tl.cdiv(tl.minimum(stop - start, length).to(tl.int32), C)
    for j in tl.range(0, count, num_stages=STAGES, disable_licm=True):
        at = start + j * C
        k = load_keys(k_ptr, mask_ptr, k_t, k_l, at, stop, L, C, BL)
        p = load_queries(q_ptr, q_t, q_l, at, stop, L, C, BL)
        v = load_inputs(v_ptr, v_t, v_d, at, stop, d0, D, C, BD)
        if unseen == 1:
            ref, fresh = first_reference(k, rows, ref, fresh, C)
            unseen = tl.max(fresh, 0)
        rise = largest(k - ref[None, :])
        e = factor(power(tl.minimum(k - ref[None, :], REACH)), PRODUCT)
        mass_t = mass + counted(past.to(tl.float32), e, PRODUCT)
        p_over_mass = p * reciprocal(tl.maximum(mass_t, TINY))
        scores = tl.where(past, mm(p_over_mass, tl.trans(e), PRODUCT), 0.0)
        y = mm(scores, v, PRODUCT) + mm(p_over_mass, tl.trans(total), PRODUCT)
        after = total + mm(tl.trans(v), e, PRODUCT)
        mass_after = mass + counted(ones, e, PRODUCT)
        if rise > REACH:
            highest = tl.max(tl.maximum(k - ref[None, :], 0.0), 1)
            near = tl.associative_scan(highest, 0, larger) <= REACH
            store_rows(out_ptr, H * D, 1, at, stop, d0, D, y, near, C, BD)
            after = total
            ref_s, mass_s = ref, tl.max(mass, 0)
            for s in range(0, tl.minimum(stop - at, C).to(tl.int32)):
                k_s = load_key(k_ptr, mask_ptr, k_t, k_l, at + s, L, BL)
                p_s = load_query(q_ptr, q_t, q_l, at + s, L, BL)
                v_s = load_value(v_ptr, v_t, v_d, at + s, d0, D, BD)
                ref_s, mass_s, after = step(ref_s, mass_s, after, k_s, v_s)
                y_s = tl.sum(after * (p_s * inverse(mass_s))[None, :], 1)
                beyond = tl.max(tl.where(rows == s, 1 - near.to(tl.int32), 0), 0) == 1
                store_value(out_ptr, H * D, 1, at + s, d0, D, y_s, beyond, BD)
            mass_after = mass_s[None, :] + tl.zeros((C, BL), tl.float32)
            ref = tl.maximum(ref, tl.max(k, 0))
        else:
            store_tile(out_ptr, H * D, 1, at, stop, d0, D, y, C, BD)
            if rise > REACH / 4:
                later = tl.maximum(ref, tl.max(k, 0))
                kept = tl.exp(ref - later)[None, :]
                ref, mass_after, after = later, mass_after * kept, after * kept
        mass, total = mass_after, after
    if mean1_ptr is not None:
        i = n * H + h
        mass = tl.max(mass, 0)
        if d0 == 0:
            store_row(log_mass1_ptr, i, L, log_mass_of(ref, mass), BL)
        store_across(mean1_ptr, i, L, D, d0, total * inverse(mass)[None, :], BL, BD)
