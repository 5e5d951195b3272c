"""The scan over segments in reverse; bidirectional Latte, backward.

* ``scan_back``: the gradient of the state after each segment of the walks (walk_back.py): dmean
  (L, D), and ``lost`` (L,) = <dmean, mean> - dlog_mass, which obeys the same recurrence as dmean.
* ``queries_ask``, ``add_up``, ``mixture_gradients``: the bidirectional form. With delta_t[l] =
  <dy_t, mu[l]>, mu over the whole sequence, g[l] = dmean + sum_t p_t dy_t, w_s = exp(k_s - A):

    dq_t = p_t (delta_t - sum_l p_t delta_t)
    dv_s = sum_l w_s g
    dk_s = w_s (<g, v_s> - lost)

Shape suffixes: M chunks or segments of all sequences, C tokens of a chunk, N sequences, H heads,
L latents, D value width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from latte.ops.triton_backend.tiles import (
    chunks_of,
    compose,
    finite,
    inverse,
    kept_share,
    load_keys,
    load_row,
    load_state,
    load_tile,
    mm,
    place,
    store_state,
    store_tile,
)
from latte.ops.triton_backend.window_tiles import load_shares, store_query_gradients


@triton.jit
def scan_back(
    top_ptr, mass_ptr, asked_ptr, lost_ptr, first_ptr,
    top1_ptr, mass1_ptr, dmean1_ptr, lost1_ptr,
    after_dmean_ptr, after_lost_ptr, dmean0_ptr, lost0_ptr,
    chunks, H, L, D,
    U: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Gradients of the state after each chunk of one sequence, and of the initial state."""
    n, h = (tl.program_id(0) // H).to(tl.int64), (tl.program_id(0) % H).to(tl.int64)
    x = tl.program_id(1) * BL + tl.arange(0, BL)
    d = tl.program_id(2) * BD + tl.arange(0, BD)
    u = tl.arange(0, U)
    real_L = x < L
    real_LD = real_L[:, None] & (d < D)[None, :]
    at_LD = x[:, None].to(tl.int64) * D + d[None, :]
    leads = tl.program_id(2) == 0
    first, last = chunks_of(n, chunks, first_ptr)
    i = n * H + h
    top1 = tl.load(top1_ptr + i * L + x, mask=real_L, other=0.0)
    mass1 = tl.load(mass1_ptr + i * L + x, mask=real_L, other=0.0)
    lost = tl.load(lost1_ptr + i * L + x, mask=real_L, other=0.0)
    dmean = tl.load(dmean1_ptr + i * L * D + at_LD, mask=real_LD, other=0.0)
    i = (last - 1) * H + h
    tl.store(after_lost_ptr + i * L + x, lost, mask=real_L & leads & (first < last))
    tl.store(after_dmean_ptr + i * L * D + at_LD, dmean, mask=real_LD & (first < last))
    for back in tl.range(0, last - first, U):
        m = last - 1 - back - u
        row_UL = ((m * H + h) * L)[:, None] + x[None, :]
        real_UL = (m >= first)[:, None] & real_L[None, :]
        # The state after a chunk is the one before the next, or the final one.
        next_UL = real_UL & (m + 1 < last)[:, None]
        late = tl.load(top_ptr + row_UL + H * L, mask=next_UL, other=0.0)
        late_mass = tl.load(mass_ptr + row_UL + H * L, mask=next_UL, other=0.0)
        ends = (m + 1 == last)[:, None]
        late = tl.where(ends, top1[None, :], late)
        late_mass = tl.where(ends, mass1[None, :], late_mass)
        early = tl.load(top_ptr + row_UL, mask=real_UL, other=0.0)
        early_mass = tl.load(mass_ptr + row_UL, mask=real_UL, other=0.0)
        decay = tl.where((m >= first)[:, None], kept_share(early, early_mass, late, late_mass), 1.0)
        losses = tl.load(lost_ptr + row_UL, mask=real_UL, other=0.0)
        at_ULD = (row_UL * D)[:, :, None] + d[None, None, :]
        real_ULD = real_UL[:, :, None] & (d < D)[None, None, :]
        asked = tl.load(asked_ptr + at_ULD, mask=real_ULD, other=0.0)
        decay_ULD = decay[:, :, None] + tl.zeros_like(asked)
        decay, losses = tl.associative_scan((decay, losses), 0, compose)
        decay_ULD, asked = tl.associative_scan((decay_ULD, asked), 0, compose)
        losses += decay * lost[None, :]
        asked += decay_ULD * dmean[None, :, :]
        # Before this chunk is after the previous one.
        follows = m - 1 >= first
        at = row_UL - H * L
        tl.store(after_lost_ptr + at, losses, mask=real_UL & leads & follows[:, None])
        at = at_ULD - H * L * D
        tl.store(after_dmean_ptr + at, asked, mask=real_ULD & follows[:, None, None])
        lost = tl.sum(tl.where((u == U - 1)[:, None], losses, 0.0), 0)
        dmean = tl.sum(tl.where((u == U - 1)[:, None, None], asked, 0.0), 0)
    i = n * H + h
    tl.store(lost0_ptr + i * L + x, lost, mask=real_L & leads)
    tl.store(dmean0_ptr + i * L * D + at_LD, dmean, mask=real_LD)


@triton.jit
def queries_ask(
    q_ptr, table_ptr, dy_ptr, asked_ptr,
    q_b, q_t, q_h, q_l, dy_b, dy_t, dy_h, dy_d,
    T, chunks, H, L, D,
    C: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr, NARROW: tl.constexpr,
    GATED: tl.constexpr = False,
):  # fmt: skip
    """Bidirectional: sum_t p_t dy_t of each chunk, (M, H, L, D)."""
    m, h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, start, stop, _ = place(m, table_ptr, T, chunks, C)
    if start >= stop:
        return
    q_ptr += row * q_b + h * q_h
    dy_ptr += row * dy_b + h * dy_h
    p, _ = load_shares(q_ptr, q_t, q_l, start, stop, L, C, BL, GATED)
    p = tl.trans(p)
    for d0 in range(0, D, BD):
        dy = load_tile(dy_ptr, dy_t, dy_d, start, stop, d0, D, C, BD)
        i = m.to(tl.int64) * H + h
        store_state(asked_ptr, i, L, D, d0, mm(p, dy, NARROW), BL, BD)


@triton.jit
def add_up(
    asked_ptr, first_ptr, dmean_ptr,
    chunks, H, L, D,
    U: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Add each sequence's (M, H, L, D) blocks to dmean (N, H, L, D)."""
    n, h = (tl.program_id(0) // H).to(tl.int64), (tl.program_id(0) % H).to(tl.int64)
    x = tl.program_id(1) * BL + tl.arange(0, BL)
    d = tl.program_id(2) * BD + tl.arange(0, BD)
    real_LD = (x < L)[:, None] & (d < D)[None, :]
    at_LD = x[:, None].to(tl.int64) * D + d[None, :]
    first, last = chunks_of(n, chunks, first_ptr)
    i = n * H + h
    total = tl.load(dmean_ptr + i * L * D + at_LD, mask=real_LD, other=0.0)
    for m0 in tl.range(first, last, U):
        m = m0 + tl.arange(0, U)
        at_ULD = ((m * H + h) * L * D)[:, None, None] + at_LD[None, :, :]
        real_ULD = (m < last)[:, None, None] & real_LD[None, :, :]
        total += tl.sum(tl.load(asked_ptr + at_ULD, mask=real_ULD, other=0.0), 0)
    tl.store(dmean_ptr + i * L * D + at_LD, total, mask=real_LD)


@triton.jit
def mixture_gradients(
    q_ptr, k_ptr, v_ptr, mask_ptr, table_ptr,
    top_ptr, mass_ptr, mean_ptr, dy_ptr, dmean_ptr, lost_ptr, dq_ptr, dk_ptr, dv_ptr,
    q_b, q_t, q_h, q_l, k_b, k_t, k_h, k_l, v_b, v_t, v_h, v_d, dy_b, dy_t, dy_h, dy_d,
    T, chunks, H, L, D,
    C: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr, WIDE: tl.constexpr,
    gate_ptr=None, window_delta_ptr=None, R: tl.constexpr = 1,
):  # fmt: skip
    """Bidirectional: dv_s = w_s g and dk_s = w_s (<g, v_s> - lost), g = dmean and w = e^{k-A}."""
    m, h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, start, stop, sequence = place(m, table_ptr, T, chunks, C)
    if start >= stop:
        return
    if mask_ptr is not None:
        mask_ptr += row * T
    q_ptr += row * q_b + h * q_h
    k_ptr += row * k_b + h * k_h
    v_ptr += row * v_b + h // R * v_h
    dy_ptr += row * dy_b + h * dy_h
    dk_ptr += row * T * H * L + h * L
    if dv_ptr is not None:
        dv_ptr += row * T * H * D + h * D
    i = sequence * H + h
    k = load_keys(k_ptr, mask_ptr, k_t, k_l, start, stop, L, C, BL)
    top, mass = load_row(top_ptr, i, L, BL), load_row(mass_ptr, i, L, BL)
    weight = tl.exp(k - finite(top)[None, :]) * inverse(mass)[None, :]
    delta = tl.zeros((C, BL), tl.float32)
    dk = tl.zeros((C, BL), tl.float32)
    for d0 in range(0, D, BD):
        v = load_tile(v_ptr, v_t, v_d, start, stop, d0, D, C, BD)
        dy = load_tile(dy_ptr, dy_t, dy_d, start, stop, d0, D, C, BD)
        delta += mm(dy, tl.trans(load_state(mean_ptr, i, L, D, d0, BL, BD)), WIDE)
        g = load_state(dmean_ptr, i, L, D, d0, BL, BD)
        dk += mm(v, tl.trans(g), WIDE)
        if dv_ptr is not None:
            dv = mm(weight, g, WIDE)
            store_tile(dv_ptr, H * D, 1, start, stop, d0, D, dv, C, BD)
    dk = weight * (dk - load_row(lost_ptr, i, L, BL)[None, :])
    store_tile(dk_ptr, H * L, 1, start, stop, 0, L, dk, C, BL)
    p, _ = load_shares(q_ptr, q_t, q_l, start, stop, L, C, BL, gate_ptr is not None)
    store_query_gradients(
        dq_ptr, p, delta, gate_ptr, window_delta_ptr, row, h, start, stop, T, H, L, C, BL
    )
