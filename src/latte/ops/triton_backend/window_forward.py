"""Softmax over a sliding window, alone or as state 0 of bidirectional Latte: one program makes the
outputs of a chunk of one head, or of a tile of their values where they are wide.

The C queries of a chunk meet the blocks of C keys that their window reaches, their own block last,
with a running maximum and sum: :func:`attend`, which the walk of causal Macchiato
(macchiato_walk.py) calls too. Beside latents each row's share of the window, ``gate`` = p(0|t), is
saved.

Shape suffixes: C tokens of a chunk, H query heads, R = H / G of them to each key head, L latents,
K key width, D value width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from latte.ops.triton_backend.tiles import (
    inverse,
    load_state,
    mm,
    place,
    store_tile,
)
from latte.ops.triton_backend.window_tiles import (
    block_logits,
    first_token,
    load_block,
    load_mixture,
    rows_at,
    softmax_step,
    store_numbers,
)


@triton.jit
def attend(
    q_ptr, q_t, queries, k_ptr, k_t, v_ptr, v_t, mask_ptr,
    tail_k_ptr, tail_v_ptr, tail_mask_ptr, P, G,
    start, begin, stop, d0, reach, scale, softcap,
    D: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BX: tl.constexpr,
    NARROW: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """(mass, w, y) of the chunk's rows: sum_s w_s v_s / mass is the window's part.

    ``w`` (C, C) are the weights of the chunk's own keys, ``y`` (C, BX) the sum over all others;
    both are yet to be divided by ``mass``. ``q_ptr`` points to the chunk's first query, the others
    to the first key of the row, or of the earlier state, for one of ``G`` heads.
    """
    blocks = tl.cdiv(reach, C)
    before = tl.minimum(blocks, tl.cdiv(start - begin + P, C)).to(tl.int32)
    after = 0 if CAUSAL else tl.minimum(blocks, tl.cdiv(stop - start, C) - 1).to(tl.int32)
    top = tl.full((C,), float("-inf"), tl.float32)
    mass = tl.zeros((C,), tl.float32)
    y = tl.zeros((C, BX), tl.float32)
    for j in tl.range(0, before + after, disable_licm=True):
        # The blocks before, then those behind.
        off = (j - before + tl.where(j < before, 0, 1)) * C
        logits, _, first, last = block_logits(
            q_ptr, q_t, queries, k_ptr, k_t, mask_ptr, tail_k_ptr, G * K, tail_mask_ptr, P,
            start + off, begin, stop, off, reach, scale, softcap,
            K, C, BX, NARROW, CAUSAL, CAPPED,
        )  # fmt: skip
        at, step = rows_at(start + off, begin, v_ptr, v_t, tail_v_ptr, G * D, P)
        v = load_block(at, step, first, last, d0, D, C, BX)
        top, mass, kept, w = softmax_step(top, mass, logits)
        y = y * kept[:, None] + mm(w, v, NARROW)
    logits, _, _, _ = block_logits(
        q_ptr, q_t, queries, k_ptr, k_t, mask_ptr, None, 0, None, P,
        start, begin, stop, 0, reach, scale, softcap,
        K, C, BX, NARROW, CAUSAL, CAPPED,
    )  # fmt: skip
    top, mass, kept, w = softmax_step(top, mass, logits)
    return mass, w, y * kept[:, None]


@triton.jit
def window_outputs(
    latent_q_ptr, q_ptr, k_ptr, v_ptr, mask_ptr, table_ptr, bounds_ptr,
    tail_k_ptr, tail_v_ptr, tail_mask_ptr, mean_ptr,
    out_ptr, gate_ptr,
    lq_b, lq_t, lq_h, lq_l,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
    scale, softcap, reach, P,
    T, chunks, H, L, D: tl.constexpr,
    K: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BL: tl.constexpr, BX: tl.constexpr,
    WIDE: tl.constexpr, NARROW: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """SWA_t, contiguous; beside bidirectional latents y_t = p(0|t) SWA_t + sum_l p(l|t) mu[l].

    ``latent_q_ptr`` points to the first latent's logit, behind the window's; ``mean_ptr`` to mu
    (N, H, L, D).
    """
    m, h, d0 = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2) * BX
    leads = tl.program_id(2) == 0
    row, start, stop, sequence = place(m, table_ptr, T, chunks, C)
    if start >= stop:
        return
    begin = first_token(bounds_ptr, sequence)
    q_ptr += row * q_b + start * q_t + h * q_h
    k_ptr += row * k_b + h // R * k_h
    v_ptr += row * v_b + h // R * v_h
    if mask_ptr is not None:
        mask_ptr += row * T
    if tail_k_ptr is not None:
        tail_k_ptr += (sequence * P * (H // R) + h // R) * K
        tail_v_ptr += (sequence * P * (H // R) + h // R) * D
        tail_mask_ptr += sequence * P
    queries = tl.minimum(stop - start, C).to(tl.int32)
    mass, w, y = attend(
        q_ptr, q_t, queries, k_ptr, k_t, v_ptr, v_t, mask_ptr,
        tail_k_ptr, tail_v_ptr, tail_mask_ptr, P, H // R,
        start, begin, stop, d0, reach, scale, softcap,
        D, K, C, BX, NARROW, CAUSAL, CAPPED,
    )  # fmt: skip
    share = inverse(mass)
    if latent_q_ptr is not None:
        latent_q_ptr += row * lq_b + h * lq_h
        p, gate = load_mixture(latent_q_ptr, lq_t, lq_l, start, stop, L, C, BL)
        if leads:
            store_numbers(gate_ptr, row, h, start, stop, T, H, gate, C)
        share *= gate
    w *= share[:, None]
    y *= share[:, None]
    if latent_q_ptr is not None:
        y += mm(p, load_state(mean_ptr, sequence * H + h, L, D, d0, BL, BX), WIDE)
    v = load_block(v_ptr + start * v_t, v_t, 0, queries, d0, D, C, BX)
    y += mm(w, v, NARROW)
    store_tile(out_ptr + row * T * H * D + h * D, H * D, 1, start, stop, d0, D, y, C, BX)
