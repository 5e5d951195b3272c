"""Gradients of sinks. w_tj is sink j's weight in the window's softmax; the rest is as in window.py.

    dlogit_tj = p_t w_tj (<dy_t, v_j> - delta_t)
    dq'_t     = sum_j dlogit_tj k_j,   dk_j = sum_t dlogit_tj q'_t,   dv_j = sum_t p_t w_tj dy_t

``sink_gradients`` computes dq' of a chunk of queries, and what they add to dk and dv. ``add_sinks``
sums that over a sequence's chunks and a group's heads, in a fixed order, without atomics.

Shape suffixes: B batch, T tokens, H query heads, G key heads, R = H / G, K key width, D value
width, N sequences, S sinks, M chunks of all sequences, C tokens of a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from latte.ops.triton_backend.softmax import (
    SINKS_AT_ONCE, load_chunk, sink_logits, store_chunk, unit_of, value_products, window_weights,
)  # fmt: skip
from latte.ops.triton_backend.tiles import (
    SIZES, inverse, load_numbers, mm, parts_of, place, store_tile,
)  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def sink_gradients(
    table_ptr, dy_ptr, token_top_ptr, token_mass_ptr, gate_ptr, delta_ptr,
    dq_ptr, dk_ptr, dv_ptr, dy_b, dy_t, dy_h,
    scale, softcap, reach, P,
    T, per_row, H, L, D: tl.constexpr,
    K: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BX: tl.constexpr,
    NARROW: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr,
    sink_q_ptr, sink_k_ptr, sink_v_ptr, sink_mask_ptr, seen_ptr, sq_b, sq_t, sq_h, S,
):  # fmt: skip
    """dq (B, T, H, K); parts of dk (M, H, S, K) and dv (M, H, S, D), in fp32.

    One program per chunk, head and tile of K and of D.
    """
    m, h, x0 = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2) * BX
    batch, start, stop, n = place(m, table_ptr, T, per_row, C)
    if start >= stop:
        return
    k_t, v_t = H // R * K, H // R * D
    sink_q_ptr += batch * sq_b + start * sq_t + h * sq_h
    sink_k_ptr += n * S * k_t + h // R * K
    sink_v_ptr += n * S * v_t + h // R * D
    sink_mask_ptr += n * S
    seen_ptr += batch * T + start
    dy_ptr += batch * dy_b + start * dy_t + h * dy_h
    dk_ptr += (m.to(tl.int64) * H + h) * S * K
    dv_ptr += (m.to(tl.int64) * H + h) * S * D
    queries = tl.minimum(stop - start, C).to(tl.int32)
    unit = unit_of(scale, softcap, CAPPED)
    top = load_numbers(token_top_ptr, batch, h, start, stop, T, H, C)
    delta = load_numbers(delta_ptr, batch, h, start, stop, T, H, C)
    share = inverse(load_numbers(token_mass_ptr, batch, h, start, stop, T, H, C))
    if gate_ptr is not None:
        share *= load_numbers(gate_ptr, batch, h, start, stop, T, H, C)
    dq = tl.zeros((C, BX), tl.float32)
    for s0 in tl.range(0, S, SINKS_AT_ONCE, num_stages=1):
        logits, slope = sink_logits(
            sink_q_ptr, sq_t, queries, sink_k_ptr, k_t, sink_mask_ptr, seen_ptr,
            s0, S, scale, softcap, K, C, BX, NARROW, CAPPED,
        )  # fmt: skip
        w = window_weights(logits, unit, top) * share[:, None]
        products = value_products(
            dy_ptr, dy_t, queries, sink_v_ptr + s0 * v_t, v_t, 0, S - s0,
            D, C, SINKS_AT_ONCE, BX, NARROW,
        )  # fmt: skip
        pulled = w * (products - delta[:, None]) * slope
        k = load_chunk(sink_k_ptr + s0 * k_t, k_t, 0, S - s0, x0, K, SINKS_AT_ONCE, BX)
        dq += mm(pulled, k, NARROW)
        q = load_chunk(sink_q_ptr, sq_t, 0, queries, x0, K, C, BX)
        dk = mm(tl.trans(pulled), q, NARROW) * scale
        store_chunk(dk_ptr + s0 * K, K, 0, S - s0, x0, K, dk, SINKS_AT_ONCE, BX)
        dy = load_chunk(dy_ptr, dy_t, 0, queries, x0, D, C, BX)
        dv = mm(tl.trans(w), dy, NARROW)
        store_chunk(dv_ptr + s0 * D, D, 0, S - s0, x0, D, dv, SINKS_AT_ONCE, BX)
    dq *= scale
    store_tile(dq_ptr + batch * T * H * K + h * K, H * K, 1, start, stop, x0, K, dq, C, BX)


@triton.jit(do_not_specialize=SIZES)
def add_sinks(
    parts_ptr, first_ptr, dx_ptr, per_row, H, S, X,
    R: tl.constexpr, U: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """dx (N, S, G, X) from the parts (M, H, S, X): one program per sequence, sink, head, tile of X.

    U chunks at a time.
    """
    G = H // R
    i = tl.program_id(0).to(tl.int64)
    n, s, g = i // (S * G), i // G % S, i % G
    x = tl.program_id(1) * BX + tl.arange(0, BX)
    first, last = parts_of(n, per_row, first_ptr)
    total = tl.zeros((U, BX), tl.float32)
    for m0 in tl.range(first, last, U):
        m = m0 + tl.arange(0, U)
        inside = (m < last)[:, None] & (x < X)[None, :]
        for r in range(0, R):
            at = ((m * H + g * R + r) * S + s) * X
            total += tl.load(parts_ptr + at[:, None] + x[None, :], mask=inside, other=0.0)
    tl.store(dx_ptr + i * X + x, tl.sum(total, 0).to(dx_ptr.dtype.element_ty), mask=x < X)
