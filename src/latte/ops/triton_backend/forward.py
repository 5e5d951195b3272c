"""The states between segments; bidirectional Latte, forward.

* ``scan``: the state before each segment, by merging what ``segment_sums`` (walk.py) finds in each;
  the final states.
* ``mixtures``: the final state mixed by the queries, which is the bidirectional form.

Shape suffixes: M segments or chunks of all sequences, C tokens of a chunk, N sequences, H heads,
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
    load_queries,
    load_state,
    log_mass_of,
    merge_masses,
    mm,
    place,
    store_tile,
)


@triton.jit
def scan(
    top_ptr, mass_ptr, sum_ptr, first_ptr,
    log_mass0_ptr, mean0_ptr,
    before_top_ptr, before_mass_ptr, before_mean_ptr,
    top1_ptr, mass1_ptr, log_mass1_ptr, mean1_ptr,
    chunks, H, L, D,
    U: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Merge the segments of one sequence in order, U at a time, for one head and tile of (L, D).

    ``first_ptr``: (N+1,) the sequences' first segments when packed, else None. ``before_*`` is None
    if nobody needs the states between segments. The first tile of D writes what has no D.
    """
    n, h = (tl.program_id(0) // H).to(tl.int64), (tl.program_id(0) % H).to(tl.int64)
    x = tl.program_id(1) * BL + tl.arange(0, BL)
    d = tl.program_id(2) * BD + tl.arange(0, BD)
    u = tl.arange(0, U)
    real_L = x < L
    real_LD = real_L[:, None] & (d < D)[None, :]
    at_LD = x[:, None].to(tl.int64) * D + d[None, :]
    leads = tl.program_id(2) == 0
    first, last = chunks_of(n, chunks, first_ptr)
    if log_mass0_ptr is None:
        top = tl.full((BL,), float("-inf"), tl.float32)
        mass = tl.zeros((BL,), tl.float32)
        mean = tl.zeros((BL, BD), tl.float32)
    else:
        i = n * H + h
        top = tl.load(log_mass0_ptr + i * L + x, mask=real_L, other=0.0)
        mass = tl.where(top == float("-inf"), 0.0, 1.0)
        mean = tl.load(mean0_ptr + i * L * D + at_LD, mask=real_LD, other=0.0)
    if before_mean_ptr is not None:
        at = before_mean_ptr + (first * H + h) * L * D + at_LD
        tl.store(at, mean, mask=real_LD & (first < last))
    for m0 in tl.range(first, last, U):
        m = m0 + u
        row_UL = ((m * H + h) * L)[:, None] + x[None, :]
        real_UL = (m < last)[:, None] & real_L[None, :]
        # Before each chunk: what came with the loop, and the chunks of this round that precede it.
        previous = row_UL - H * L
        inside = ((m <= last) & (u > 0))[:, None] & real_L[None, :]
        early = tl.load(top_ptr + previous, mask=inside, other=float("-inf"))
        early_mass = tl.load(mass_ptr + previous, mask=inside, other=0.0)
        early, early_mass = tl.associative_scan((early, early_mass), 0, merge_masses)
        early, early_mass = merge_masses(
            top[None, :] + tl.zeros_like(early), mass[None, :] + tl.zeros_like(early),
            early, early_mass,
        )  # fmt: skip
        if before_top_ptr is not None:
            tl.store(before_top_ptr + row_UL, early, mask=real_UL & leads)
            tl.store(before_mass_ptr + row_UL, early_mass, mask=real_UL & leads)
        own = tl.load(top_ptr + row_UL, mask=real_UL, other=float("-inf"))
        own_mass = tl.load(mass_ptr + row_UL, mask=real_UL, other=0.0)
        late, late_mass = merge_masses(early, early_mass, own, own_mass)
        kept = tl.where((m < last)[:, None], kept_share(early, early_mass, late, late_mass), 1.0)
        added = tl.exp(own - finite(late)) * inverse(late_mass)
        at_ULD = (row_UL * D)[:, :, None] + d[None, None, :]
        real_ULD = real_UL[:, :, None] & (d < D)[None, None, :]
        sums_ULD = added[:, :, None] * tl.load(sum_ptr + at_ULD, mask=real_ULD, other=0.0)
        kept_ULD = kept[:, :, None] + tl.zeros_like(sums_ULD)
        kept_ULD, sums_ULD = tl.associative_scan((kept_ULD, sums_ULD), 0, compose)
        means_ULD = kept_ULD * mean[None, :, :] + sums_ULD
        if before_mean_ptr is not None:
            # After this chunk is before the next one.
            follows = real_ULD & (m + 1 < last)[:, None, None]
            tl.store(before_mean_ptr + at_ULD + H * L * D, means_ULD, mask=follows)
        ends = u == U - 1
        mean = tl.sum(tl.where(ends[:, None, None], means_ULD, 0.0), 0)
        # Not a sum with zeros: the top of what has seen nothing is -inf.
        top = tl.max(tl.where(ends[:, None], late, float("-inf")), 0)
        mass = tl.sum(tl.where(ends[:, None], late_mass, 0.0), 0)
    i = n * H + h
    tl.store(top1_ptr + i * L + x, top, mask=real_L & leads)
    tl.store(mass1_ptr + i * L + x, mass, mask=real_L & leads)
    tl.store(log_mass1_ptr + i * L + x, log_mass_of(top, mass), mask=real_L & leads)
    tl.store(mean1_ptr + i * L * D + at_LD, mean, mask=real_LD)


@triton.jit
def mixtures(
    q_ptr, table_ptr, mean_ptr, out_ptr,
    q_b, q_t, q_h, q_l,
    T, chunks, H, L, D,
    C: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Bidirectional: y_t = sum_l p(l|t) mu[l], with mu (N, H, L, D) over the whole sequence."""
    m, h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, start, stop, sequence = place(m, table_ptr, T, chunks, C)
    if start >= stop:
        return
    q_ptr += row * q_b + h * q_h
    out_ptr += row * T * H * D + h * D
    p = load_queries(q_ptr, q_t, q_l, start, stop, L, C, BL)
    for d0 in range(0, D, BD):
        y = mm(p, load_state(mean_ptr, sequence * H + h, L, D, d0, BL, BD), WIDE)
        store_tile(out_ptr, H * D, 1, start, stop, d0, D, y, C, BD)
