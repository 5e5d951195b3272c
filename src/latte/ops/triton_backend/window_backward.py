"""Softmax over a sliding window, backward, alone or as state 0 of Latte.

With w_ts the softmax over the window, p_t its share p(0|t) (1 without latents) and
delta_t = <dy_t, SWA_t> = sum_s w_ts <dy_t, v_s>:

    dlogit_ts = p_t w_ts (<dy_t, v_s> - delta_t)
    dv_s      = sum_t p_t w_ts dy_t, and what the latents add

1. ``window_query_gradients``: each row's largest logit, mass and delta, then dq, block by block of
   the keys that a chunk reaches.
2. ``window_source_gradients``: dk and dv of a chunk of keys, from the blocks of queries that reach
   it, over all heads of their group: nothing is added up between programs. A second launch serves
   the keys of the earlier state.

The weights are computed anew, and not from what the forward pass found: a product of another shape
may round a logit of 15,000 otherwise, and e^0.001 is not 1.

Shape suffixes: C tokens of a chunk, H query heads, R = H / G of them to each key head, L latents,
K key width, D value width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from latte.ops.triton_backend.tiles import (
    finite,
    inverse,
    load_keys,
    load_row,
    load_state,
    mm,
    place,
    store_tile,
)
from latte.ops.triton_backend.window_tiles import (
    block_logits,
    first_token,
    load_block,
    load_numbers,
    rows_at,
    softmax_step,
    store_block,
    store_numbers,
    value_products,
    window_weights,
)


@triton.jit
def window_query_gradients(
    q_ptr, k_ptr, v_ptr, mask_ptr, table_ptr, bounds_ptr, tail_k_ptr, tail_v_ptr, tail_mask_ptr,
    dy_ptr, gate_ptr, row_top_ptr, row_mass_ptr, delta_ptr, dq_ptr,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, dy_b, dy_t, dy_h,
    scale, softcap, reach, P,
    T, chunks, H, L, D: tl.constexpr,
    K: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BX: tl.constexpr,
    NARROW: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Each row's top, mass and delta (B, T, H); dq. One program per chunk, head and tile of K."""
    m, h, x0 = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2) * BX
    row, start, stop, sequence = place(m, table_ptr, T, chunks, C)
    if start >= stop:
        return
    begin = first_token(bounds_ptr, sequence)
    q_ptr += row * q_b + start * q_t + h * q_h
    k_ptr += row * k_b + h // R * k_h
    v_ptr += row * v_b + h // R * v_h
    dy_ptr += row * dy_b + start * dy_t + h * dy_h
    if mask_ptr is not None:
        mask_ptr += row * T
    if tail_k_ptr is not None:
        tail_k_ptr += (sequence * P * (H // R) + h // R) * K
        tail_v_ptr += (sequence * P * (H // R) + h // R) * D
        tail_mask_ptr += sequence * P
    queries = tl.minimum(stop - start, C).to(tl.int32)
    blocks = tl.cdiv(reach, C)
    before = tl.minimum(blocks, tl.cdiv(start - begin + P, C)).to(tl.int32)
    after = 0 if CAUSAL else tl.minimum(blocks, tl.cdiv(stop - start, C) - 1).to(tl.int32)
    top = tl.full((C,), float("-inf"), tl.float32)
    mass = tl.zeros((C,), tl.float32)
    delta = tl.zeros((C,), tl.float32)
    for j in range(0, before + after + 1):
        off = (j - before) * C
        logits, _, first, last = block_logits(
            q_ptr, q_t, queries, k_ptr, k_t, mask_ptr, tail_k_ptr, H // R * K, tail_mask_ptr, P,
            start + off, begin, stop, off, reach, scale, softcap,
            K, C, BX, NARROW, CAUSAL, CAPPED,
        )  # fmt: skip
        at, step = rows_at(start + off, begin, v_ptr, v_t, tail_v_ptr, H // R * D, P)
        products = value_products(dy_ptr, dy_t, queries, at, step, first, last, D, C, BX, NARROW)
        top, mass, kept, w = softmax_step(top, mass, logits)
        delta = delta * kept + tl.sum(w * products, 1)
    delta *= inverse(mass)
    if tl.program_id(2) == 0:
        store_numbers(row_top_ptr, row, h, start, stop, T, H, top, C)
        store_numbers(row_mass_ptr, row, h, start, stop, T, H, mass, C)
        store_numbers(delta_ptr, row, h, start, stop, T, H, delta, C)
    share = tl.full((C,), 1.0, tl.float32)
    if gate_ptr is not None:
        share = load_numbers(gate_ptr, row, h, start, stop, T, H, C)
    share *= scale
    dq = tl.zeros((C, BX), tl.float32)
    for j in range(0, before + after + 1):
        off = (j - before) * C
        logits, slope, first, last = block_logits(
            q_ptr, q_t, queries, k_ptr, k_t, mask_ptr, tail_k_ptr, H // R * K, tail_mask_ptr, P,
            start + off, begin, stop, off, reach, scale, softcap,
            K, C, BX, NARROW, CAUSAL, CAPPED,
        )  # fmt: skip
        at, step = rows_at(start + off, begin, v_ptr, v_t, tail_v_ptr, H // R * D, P)
        products = value_products(dy_ptr, dy_t, queries, at, step, first, last, D, C, BX, NARROW)
        pulled = window_weights(logits, top, mass) * (products - delta[:, None]) * slope
        at, step = rows_at(start + off, begin, k_ptr, k_t, tail_k_ptr, H // R * K, P)
        k = load_block(at, step, first, last, x0, K, C, BX)
        dq += mm(pulled * share[:, None], k, NARROW)
    store_tile(dq_ptr + row * T * H * K + h * K, H * K, 1, start, stop, x0, K, dq, C, BX)


@triton.jit
def window_source_gradients(
    latent_k_ptr, latents_dv_ptr, q_ptr, k_ptr, v_ptr, mask_ptr, table_ptr, bounds_ptr,
    dy_ptr, row_top_ptr, row_mass_ptr, gate_ptr, delta_ptr,
    top_ptr, mass_ptr, dmean_ptr, dk_ptr, dv_ptr,
    lk_b, lk_t, lk_h, lk_l,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, dy_b, dy_t, dy_h,
    scale, softcap, reach, P,
    T, chunks, H, L, D: tl.constexpr,
    K: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BL: tl.constexpr, BX: tl.constexpr,
    WIDE: tl.constexpr, NARROW: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr,
    EARLIER: tl.constexpr,
):  # fmt: skip
    """dk and dv, contiguous; one program per chunk of keys, key head and tile of K and of D.

    ``EARLIER``: the keys, values, flags and gradients are those of the earlier state, (N, P, G, .).
    Otherwise P is not used, and the latents' part of dv is added. Causal: ``latents_dv``
    (B, T, H, D). Bidirectional: from ``top`` and ``mass`` of the whole sequences, and the gradient
    of their means, ``dmean``.
    """
    m, g, x0 = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2) * BX
    if EARLIER:
        blocks = tl.cdiv(P, C)
        sequence = (m // blocks).to(tl.int64)
        if bounds_ptr is None:
            row, begin, stop = sequence, sequence * 0, tl.cast(T, tl.int64)
        else:
            row = sequence * 0
            begin, stop = tl.load(bounds_ptr + sequence), tl.load(bounds_ptr + sequence + 1)
        at = begin - (m % blocks + 1) * C
        # So that position p is found p strides behind these pointers, as it is for tokens.
        held = sequence
        k_ptr += (P - begin) * k_t
        v_ptr += (P - begin) * v_t
        mask_ptr += sequence * P + P - begin
        dk_ptr += (sequence * P + P - begin) * (H // R) * K
        dv_ptr += (sequence * P + P - begin) * (H // R) * D
        oldest = begin - P
    else:
        row, at, stop, sequence = place(m, table_ptr, T, chunks, C)
        if at >= stop:
            return
        begin = first_token(bounds_ptr, sequence)
        held = row
        if mask_ptr is not None:
            mask_ptr += row * T
        dk_ptr += row * T * (H // R) * K
        dv_ptr += row * T * (H // R) * D
        oldest = begin
    k_ptr += held * k_b + g * k_h
    v_ptr += held * v_b + g * v_h
    q_ptr += row * q_b
    dy_ptr += row * dy_b
    # Queries stand from `nearest` up to `farthest` blocks behind the keys.
    farthest = tl.minimum(tl.cdiv(reach, C), tl.cdiv(stop - at, C) - 1).to(tl.int32)
    if EARLIER:
        nearest = ((begin - at) // C).to(tl.int32)
    elif CAUSAL:
        nearest = farthest * 0
    else:
        nearest = -tl.minimum(tl.cdiv(reach, C), (at - begin) // C).to(tl.int32)
    dk = tl.zeros((C, BX), tl.float32)
    dv = tl.zeros((C, BX), tl.float32)
    first, last = tl.maximum(oldest - at, 0), stop - at
    if latents_dv_ptr is not None:
        for r in range(0, R):
            part_ptr = latents_dv_ptr + ((row * T + at) * H + g * R + r) * D
            dv += load_block(part_ptr, H * D, first, last, x0, D, C, BX)
    if latent_k_ptr is not None:
        for r in range(0, R):
            h = g * R + r
            i = sequence * H + h
            keys_ptr = latent_k_ptr + row * lk_b + h * lk_h
            lk = load_keys(keys_ptr, mask_ptr, lk_t, lk_l, at, stop, L, C, BL)
            top, mass = load_row(top_ptr, i, L, BL), load_row(mass_ptr, i, L, BL)
            worth = tl.exp(lk - finite(top)[None, :]) * inverse(mass)[None, :]
            dv += mm(worth, load_state(dmean_ptr, i, L, D, x0, BL, BX), WIDE)
    for r in range(0, R):
        h = g * R + r
        for j in range(nearest, farthest + 1):
            start = at + j * C
            queries = tl.minimum(stop - start, C).to(tl.int32)
            qs_ptr = q_ptr + start * q_t + h * q_h
            dys_ptr = dy_ptr + start * dy_t + h * dy_h
            logits, slope, _, _ = block_logits(
                qs_ptr, q_t, queries, k_ptr, k_t, mask_ptr, None, 0, None, begin - oldest,
                at, begin, stop, -j * C, reach, scale, softcap,
                K, C, BX, NARROW, CAUSAL, CAPPED,
            )  # fmt: skip
            top = load_numbers(row_top_ptr, row, h, start, stop, T, H, C)
            mass = load_numbers(row_mass_ptr, row, h, start, stop, T, H, C)
            delta = load_numbers(delta_ptr, row, h, start, stop, T, H, C)
            w = window_weights(logits, top, mass)
            if gate_ptr is not None:
                w *= load_numbers(gate_ptr, row, h, start, stop, T, H, C)[:, None]
            dy = load_block(dys_ptr, dy_t, 0, queries, x0, D, C, BX)
            dv += mm(tl.trans(w), dy, NARROW)
            products = value_products(
                dys_ptr, dy_t, queries, v_ptr + at * v_t, v_t, first, last, D, C, BX, NARROW
            )
            pulled = w * (products - delta[:, None]) * slope * scale
            q = load_block(qs_ptr, q_t, 0, queries, x0, K, C, BX)
            dk += mm(tl.trans(pulled), q, NARROW)
    step = H // R * K
    store_block(dk_ptr + at * step + g * K, step, first, last, x0, K, dk, C, BX)
    step = H // R * D
    store_block(dv_ptr + at * step + g * D, step, first, last, x0, D, dv, C, BX)
