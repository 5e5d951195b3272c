"""Causal Macchiato, forward: one program walks a segment with the latents' state on chip.

As ``walk`` (walk.py), with the window as state 0. For each chunk the window's blocks come first
(:func:`attend`, window_forward.py); then one softmax over the L + 1 latent logits says what the
window's part is worth; then the latents' weights in the chunk join the window's, and one product
with the chunk's values serves both. Neither branch's output is ever in memory.

Where a sequence is cut into segments, ``segment_sums`` and ``scan`` find the states before them.
Of each row ``top``, ``mass`` and ``gate`` are saved: see window_forward.py.

Shape suffixes: M segments of all sequences, C tokens of a chunk, N sequences, H query heads,
R = H / G of them to each key head, L latents, K key width, D value width.
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
    log_mass_of,
    mm,
    place,
    power,
    reciprocal,
    store_row,
    store_tile,
)
from latte.ops.triton_backend.walk import SIZES, begin
from latte.ops.triton_backend.walk_tiles import (
    first_reference,
    larger,
    largest,
    load_inputs,
    load_value,
    step,
    store_across,
    store_value,
)
from latte.ops.triton_backend.window_forward import attend
from latte.ops.triton_backend.window_tiles import (
    first_token,
    load_mixture,
    load_share,
    store_numbers,
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
    T, length, segments, H, L, D: tl.constexpr,
    K: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BL: tl.constexpr, BX: tl.constexpr,
    PRODUCT: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """y_t = p(0|t) SWA_t + sum_l p(l|t) mu_t[l], contiguous, of one segment, head and tile of D.

    ``latent_q_ptr`` points to the first latent's logit, behind the window's. ``log_mass1_ptr`` and
    ``mean1_ptr`` take the final state where no scan has found it.
    """
    tiles = tl.cdiv(D, BX)
    d0 = (tl.program_id(0) % tiles) * BX
    h = (tl.program_id(0) // tiles % H).to(tl.int64)
    m = tl.program_id(0) // (tiles * H)
    row, start, stop, n = place(m, table_ptr, T, segments, length)
    i = m.to(tl.int64) * H + h
    if start > stop:
        if mean_ptr is not None:
            # Packed sequences may need fewer segments: what is saved is defined there too.
            store_row(top_ptr, i, L, tl.zeros((BL,), tl.float32), BL)
            store_row(mass_ptr, i, L, tl.zeros((BL,), tl.float32), BL)
            store_across(mean_ptr, i, L, D, d0, tl.zeros((BX, BL), tl.float32), BL, BX)
        return
    first = first_token(bounds_ptr, n)
    if mask_ptr is not None:
        mask_ptr += row * T
    latent_q_ptr += row * lq_b + h * lq_h
    latent_k_ptr += row * lk_b + h * lk_h
    q_ptr += row * q_b + h * q_h
    k_ptr += row * k_b + h // R * k_h
    v_ptr += row * v_b + h // R * v_h
    out_ptr += row * T * H * D + h * D
    if tail_k_ptr is not None:
        tail_k_ptr += (n * P * (H // R) + h // R) * K
        tail_v_ptr += (n * P * (H // R) + h // R) * D
        tail_mask_ptr += n * P
    rows = tl.arange(0, C)
    past = rows[:, None] >= rows[None, :]
    ref, mass, total = begin(
        top_ptr, mass_ptr, mean_ptr, log_mass0_ptr, mean0_ptr,
        i, n * H + h, L, D, d0, BL, BX,
    )  # fmt: skip
    fresh = (mass == 0.0).to(tl.int32)
    unseen = tl.max(fresh, 0)
    count = tl.cdiv(tl.minimum(stop - start, length).to(tl.int32), C)
    for j in tl.range(0, count, disable_licm=True):
        at = start + j * C
        if unseen == 1:
            k = load_keys(latent_k_ptr, mask_ptr, lk_t, lk_l, at, stop, L, C, BL)
            ref, fresh = first_reference(k, rows, ref, fresh, C)
            unseen = tl.max(fresh, 0)
        mass_w, w, y = attend(
            q_ptr + at * q_t, q_t, tl.minimum(stop - at, C).to(tl.int32),
            k_ptr, k_t, v_ptr, v_t, mask_ptr, tail_k_ptr, tail_v_ptr, tail_mask_ptr, P, H // R,
            at, first, stop, d0, reach, scale, softcap,
            D, K, C, BX, PRODUCT, True, CAPPED,
        )  # fmt: skip
        p, gate = load_mixture(latent_q_ptr, lq_t, lq_l, at, stop, L, C, BL)
        if d0 == 0:
            store_numbers(gate_ptr, row, h, at, stop, T, H, gate, C)
        share = (inverse(mass_w) * gate)[:, None]
        k = load_keys(latent_k_ptr, mask_ptr, lk_t, lk_l, at, stop, L, C, BL)
        v = load_inputs(v_ptr, v_t, 1, at, stop, d0, D, C, BX)
        rise = largest(k - ref[None, :])
        near = rows >= 0
        if rise > REACH:
            highest = tl.max(tl.maximum(k - ref[None, :], 0.0), 1)
            near = tl.associative_scan(highest, 0, larger) <= REACH
        e = factor(power(tl.minimum(k - ref[None, :], REACH)), PRODUCT)
        mass_t = mass[None, :] + mm(past.to(tl.float32), e, PRODUCT)
        p_over_mass = p * reciprocal(tl.maximum(mass_t, TINY))
        p_over_mass = tl.where(near[:, None], p_over_mass, 0.0)
        scores = tl.where(past, mm(p_over_mass, tl.trans(e), PRODUCT), 0.0)
        y = y * share + mm(p_over_mass, tl.trans(total), PRODUCT)
        y += mm(w * share + scores, v, PRODUCT)
        store_tile(out_ptr, H * D, 1, at, stop, d0, D, y, C, BX)
        after = total + mm(tl.trans(v), e, PRODUCT)
        # The last row's is the largest: it counts all of the chunk.
        mass_after = tl.max(mass_t, 0)
        if rise > REACH / 4:
            later = tl.maximum(ref, tl.max(k, 0))
            if rise > REACH:
                # Rows beyond reach hold the window's part: the latents' comes token by token.
                tl.debug_barrier()
                ref_s, mass_after, after = ref, mass, total
                for s in range(0, tl.minimum(stop - at, C).to(tl.int32)):
                    k_s = load_key(latent_k_ptr, mask_ptr, lk_t, lk_l, at + s, L, BL)
                    p_s, _ = load_share(latent_q_ptr, lq_t, lq_l, at + s, L, BL)
                    v_s = load_value(v_ptr, v_t, 1, at + s, d0, D, BX)
                    ref_s, mass_after, after = step(ref_s, mass_after, after, k_s, v_s)
                    y_s = tl.sum(after * (p_s * inverse(mass_after))[None, :], 1)
                    y_s += load_value(out_ptr, H * D, 1, at + s, d0, D, BX)
                    beyond = tl.max(tl.where(rows == s, 1 - near.to(tl.int32), 0), 0) == 1
                    store_value(out_ptr, H * D, 1, at + s, d0, D, y_s, beyond, BX)
            else:
                kept = tl.exp(ref - later)
                mass_after, after = mass_after * kept, after * kept[None, :]
            ref = later
        mass, total = mass_after, after
    if mean1_ptr is not None:
        i = n * H + h
        if d0 == 0:
            store_row(log_mass1_ptr, i, L, log_mass_of(ref, mass), BL)
        store_across(mean1_ptr, i, L, D, d0, total * inverse(mass)[None, :], BL, BX)
