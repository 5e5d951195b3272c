"""The places of chunks and segments, launches over them, and the states between segments.

A *chunk* is the tokens of one matrix product. A *row* is a sequence of one head. A *segment* is
many chunks of one row, which one program computes. With too few programs, part of the GPU is idle.
With more than one segment per row, one more pass over k and v is necessary: ``segment_sums`` then
finds the sum of each segment, ``scan`` merges the sums into the state before each segment, and
``scan_back`` computes the gradients in the other direction.

Shape suffixes: B batch, T tokens, H heads, L latents, D value width, C tokens of a chunk,
N sequences, M chunks or segments of all sequences, U of them at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from latte.ops.tensors import count_sequences, sequence_bounds
from latte.ops.triton_backend.launch import (
    ENOUGH, SCAN, SHORTEST, WANTED, Walk, by_chunk, capability, contiguous, launch, padded,
    registers, rounding, walking, warn_of_assembler,
)  # fmt: skip
from latte.ops.triton_backend.tiles import (
    REACH, SIZES, added, compose, counted, factor, finite, first_reference, inverse, kept_share,
    largest, load_inputs, load_keys, load_tile, log_mass_of, merge_forgetting, merge_masses, mm,
    parts_of, place, power, state_tile, store_across, store_latents, summed, uniform, walk_place,
)  # fmt: skip

# For each ``cu_seqlens``: its version, and the tables of its parts.
_PACKED = WeakTensorKeyDictionary()


class Parts(NamedTuple):
    """The chunks, or the segments, of all sequences. Nothing here waits for a GPU."""

    M: int  # upper limit of the number of parts, at least one for each sequence
    N: int  # number of sequences
    per_row: int  # number of parts of a row; unused when packed
    table: Tensor | None  # (M, 3) int64: first token, end of the sequence, its number
    first: Tensor | None  # (N+1,) int64: first part of each sequence
    bounds: Tensor | None  # (N+1,) int64: first token of each sequence

    @classmethod
    def of(cls, B: int, T: int, C: int, cu_seqlens: Tensor | None, at_least: int = 0) -> Parts:
        """Parts of C tokens, of rows of equal length or of packed sequences.

        The tables of packed sequences are kept. All layers of a model and both passes share them.

        Args:
            at_least: Number of (empty) parts of a sequence without tokens.

        Raises:
            RuntimeError: ``cu_seqlens`` does not rise from 0 to T. On a GPU the kernel that finds
                this traps, and nothing runs after it.
        """
        M, N = count_parts(B, T, C, cu_seqlens, at_least), count_sequences(B, cu_seqlens)
        if cu_seqlens is None:
            return cls(M, N, max(at_least, -(-T // C)), None, None, None)
        # A captured graph can run at any time, with other numbers in its buffers.
        device, captured = cu_seqlens.device, False
        if device.type == "cuda":
            captured = torch.cuda.is_current_stream_capturing()
        if captured or cu_seqlens.is_inference():
            return cls._packed(T, C, cu_seqlens, at_least, M, N)
        known = _PACKED.get(cu_seqlens)
        if known is None or known[0] != cu_seqlens._version:
            known = _PACKED[cu_seqlens] = cu_seqlens._version, {}
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        key = (T, C, at_least, stream)
        if key not in known[1]:
            known[1][key] = cls._packed(T, C, cu_seqlens, at_least, M, N)
        return known[1][key]

    @classmethod
    def _packed(cls, T: int, C: int, cu_seqlens: Tensor, at_least: int, M: int, N: int) -> Parts:
        """:meth:`of` packed sequences. The bounds are checked on their device."""
        bounds = sequence_bounds(cu_seqlens)
        lengths = bounds.diff()
        rises = (lengths >= 0).all() & (bounds[0] == 0) & (bounds[-1] == T)
        torch._assert_async(rises, f"cu_seqlens must rise from 0 to T={T}")
        first = bounds.new_zeros(N + 1)
        counts = torch.div(lengths + (C - 1), C, rounding_mode="floor")
        first[1:] = counts.clamp(min=at_least).cumsum(0)
        m = torch.arange(M, device=bounds.device)
        sequence = torch.bucketize(m, first[1:], right=True)
        real = sequence < N
        sequence = sequence.clamp(max=N - 1)
        start = bounds[sequence] + (m - first[sequence]) * C
        stop = bounds[sequence + 1]
        # A part past the last one begins beyond its end.
        start = torch.where(real, start, stop + 1)
        return cls(M, N, 0, torch.stack([start, stop, sequence], 1), first, bounds)


def count_parts(B: int, T: int, C: int, cu_seqlens: Tensor | None, at_least: int = 0) -> int:
    """Upper limit of the number of parts of C tokens, from shapes alone."""
    if cu_seqlens is None:
        return B * torch.sym_max(at_least, -(-T // C))
    return T // C + count_sequences(B, cu_seqlens)


def segment_length(B: int, T: int, heads: int, C: int, packed: bool) -> int:
    """Number of tokens of a segment, a multiple of C. ``heads`` counts each tile of D.

    Packed sequences may have any lengths. They are cut as one sequence of T tokens would be.
    A graph for any length asks too. So no sizes are compared: the other answer would need another
    graph.
    """
    chunks, rows = torch.sym_max(1, -(-T // C)), B * heads
    cuts = -(-WANTED // rows)
    if not packed:
        few = 1 - torch.sym_min(1, rows // ENOUGH)  # 0 if rows alone are enough
        cuts = 1 + few * (cuts - 1)
    return torch.sym_min(chunks, torch.sym_max(SHORTEST, -(-chunks // cuts))) * C


def length_for(k: Tensor, D: int, walk: Walk, cu_seqlens: Tensor | None) -> int:
    """:func:`segment_length` for keys (B, T, H, L) and values of width D."""
    B, T, H, _ = k.shape
    return segment_length(B, T, H * -(-D // walk.BD), walk.C, cu_seqlens is not None)


class Launcher:
    """Launches kernels with the sizes and positions of one call."""

    def __init__(self, q: Tensor, D: int, parts: Parts) -> None:
        _, self.T, self.H, self.L = q.shape
        self.D, self.device, self.parts = D, q.device, parts
        warn_of_assembler(q.device)

    def warps_back(self, chosen: int) -> int:
        """Number of warps of the backward kernels. Four lack registers for some D."""
        return chosen if self.D % 16 == 0 else 8

    def states(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Empty fp32 buffers (M, H, L) twice and (M, H, L, D)."""
        top = like.new_empty((self.parts.M, self.H, self.L), dtype=torch.float32)
        return top, torch.empty_like(top), top.new_empty((*top.shape, self.D))

    def by_sequence(self, kernel: Any, *args: Any, D: int | None = None, **extras: Any) -> None:
        """One program per sequence, head and tile of the state. It goes over the parts.

        ``D`` is the width of a tile of the values, or the whole value width.
        """
        D = D or self.D
        grid = (self.parts.N * self.H, -(-self.L // SCAN["BL"]), -(-D // SCAN["BD"]))
        sizes = (self.parts.per_row, self.H, self.L, D)
        launch(self.device, kernel[grid], *args, *sizes, **SCAN, **extras)


class ChunkLauncher(Launcher):
    """Launches the kernels with one program per chunk."""

    def __init__(self, q: Tensor, D: int, cu_seqlens: Tensor | None, K: int = 1) -> None:
        B, T, _, L = q.shape
        self.config = by_chunk(L, q.dtype, capability(q.device), K)
        super().__init__(q, D, Parts.of(B, T, self.config.C, cu_seqlens))
        wide, narrow = rounding(self.config.wide), rounding(self.config.narrow)
        self.products = {"WIDE": wide, "NARROW": narrow}

    def by_chunk(
        self, kernel: Any, *args: Any, product: str, back: bool = False, **extras: Any
    ) -> None:
        """One program per chunk and head; ``back`` for the backward pass."""
        c, parts = self.config, self.parts
        sizes = (self.T, parts.per_row, self.H, self.L, self.D)
        options: dict[str, Any] = {"C": c.C, "BL": c.BL, "BD": min(c.BD, padded(self.D))}
        options |= {product: self.products[product], "num_stages": c.stages, **extras}
        warps = self.warps_back(c.warps_back) if back else c.warps
        launch(self.device, kernel[parts.M, self.H], *args, *sizes, **options, num_warps=warps)


class Walker(Launcher):
    """Launches the walks, and the scans over their segments."""

    def __init__(
        self, q: Tensor, D: int, cu_seqlens: Tensor | None, forgets: bool = False, K: int = 0
    ) -> None:
        B, T, _, L = q.shape
        self.walk, self.K = walking(L, D, q.dtype, capability(q.device), forgets, K), K
        self.length = length_for(q, D, self.walk, cu_seqlens)
        self.cut = self.length < T  # whether a sequence may have more than one segment
        super().__init__(q, D, Parts.of(B, T, self.length, cu_seqlens, at_least=1))
        self.slots = B * T // self.walk.C + self.parts.N  # places of chunks' numbers: tiles.slot_of
        self.product = rounding(self.walk.product)

    def forward(self, kernel: Any, *args: Any, **extras: Any) -> None:
        """One program per segment, head and tile of D."""
        c, tiles = self.walk, -(-self.D // self.walk.BD)
        self._walk(kernel, tiles, self.D, (c.BD, c.stages, c.warps), *args, **extras)

    def back(self, kernel: Any, D: int, *args: Any, **extras: Any) -> None:
        """One program per segment and head, for a tile of width D."""
        c = self.walk
        fixed = (c.BD_back, c.stages_back, self.warps_back(c.warps_back))
        self._walk(kernel, 1, D, fixed, *args, **extras)

    def _walk(
        self,
        kernel: Any,
        tiles_of_D: int,
        D: int,
        fixed: tuple[int, ...],
        *args: Any,
        **extras: Any,
    ) -> None:
        (BD, stages, warps), programs = fixed, self.parts.M * self.H * tiles_of_D
        sizes = (self.T, self.length, self.parts.per_row, self.H, self.L, D)
        tiles = (self.walk.C, self.walk.BL, BD, self.product, stages)
        options = {"num_warps": warps} | registers(self.walk.registers) | extras
        launch(self.device, kernel[(programs,)], *args, *sizes, *tiles, **options)

    def tiles(self) -> list[slice]:
        """The tiles of D, which the backward pass processes one after the other."""
        BD = self.walk.BD_back
        return [slice(d, min(d + BD, self.D)) for d in range(0, self.D, BD)]


# The numbers saved between segments: (top, mass, mean) before each, the final (top, mass); and, if
# latents forget, the total log-decay of each.
Between = tuple[Tensor, ...]


def decays(log_decay: Tensor | None) -> dict[str, Any]:
    """The kernels' arguments for latents that forget, (B, T, H, L) in fp32 with any strides."""
    if log_decay is None:
        return {}
    strides = zip(("g_b", "g_t", "g_h", "g_l"), log_decay.stride(), strict=True)
    return {"g_ptr": log_decay, **dict(strides)}


def between_segments(
    k: Tensor, D: int, cu_seqlens: Tensor | None, forgets: bool = False, K: int = 0
) -> Between:
    """Empty fp32 buffers: (top, mass, mean) before each segment, final (top, mass).

    Those of segments have two entries if no sequence is cut, because they are not needed then.
    Only shapes are read. ``forgets`` adds one more, (M, H, L), for the total log-decay of each
    segment. ``K`` is that of :func:`latte.ops.triton_backend.launch.walking`.
    """
    B, T = k.shape[:2]
    walk = walking(k.shape[-1], D, k.dtype, capability(k.device), forgets, K)
    length = length_for(k, D, walk, cu_seqlens)
    cut = torch.sym_min(1, (T - 1) // length)  # 0 if not: without a branch, as in `segment_length`
    # Without a cut two entries that are not used: a graph would be made for sizes of 0 and of 1.
    M = torch.sym_max(2, cut * count_parts(B, T, length, cu_seqlens))
    found = state_buffers(k, D, M, count_sequences(B, cu_seqlens))
    return (*found, torch.empty_like(found[0])) if forgets else found


def state_buffers(k: Tensor, D: int, M: int, N: int) -> Between:
    """Empty fp32 buffers: top, mass and mean of M states, top and mass of N."""
    H, L = k.shape[2:]
    top = k.new_empty((M, H, L), dtype=torch.float32)
    final = top.new_empty((N, H, L))
    mean = top.new_empty((M, H, L, D))
    return top, torch.empty_like(top), mean, final, torch.empty_like(final)


def states_before(
    run: Walker,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    earlier: tuple[Tensor | None, ...],
    finals: tuple[Tensor, Tensor],
    R: int = 1,
    log_decay: Tensor | None = None,
) -> tuple[Between, tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """The states from which a forward walk starts, as three values.

    The first are :func:`between_segments`. The second are the walk's arguments ``top`` to
    ``mean0``. The third are its last two arguments: ``finals`` if no scan has written them.

    ``earlier`` is the initial state. ``R`` heads share one head of the values.
    """
    between = between_segments(k, run.D, cu_seqlens, log_decay is not None, run.K)
    initial = contiguous(*earlier)
    if not run.cut:
        torch._foreach_zero_(between)
        return between, (None, None, None, *initial), finals
    forgetting = () if log_decay is None else (log_decay, between[5])
    scan_segments(run, k, v, mask, initial, between[:3], (*between[3:5], *finals), R, *forgetting)
    return between, (*between[:3], *initial), (None, None)


def scan_segments(
    run: Walker,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    earlier: tuple[Tensor | None, ...],
    before: tuple[Tensor | None, ...],
    final: tuple[Tensor, ...],
    R: int = 1,
    log_decay: Tensor | None = None,
    falls: Tensor | None = None,
) -> None:
    """Write the states before each segment, if wanted, and the final top, mass, log-mass, mean.

    ``earlier`` is the initial state. ``R`` heads share one head of the values. The log-decay of
    each segment is written to ``falls``.
    """
    sums, strides = run.states(k), (*k.stride(), *v.stride())
    pointers: dict[str, Any] = {} if falls is None else {"fall_ptr": falls}
    inputs = (k, v, mask, run.parts.table, *sums, *strides)
    run.forward(segment_sums, *inputs, R=R, **decays(log_decay), **pointers)
    given = (*sums, run.parts.first, *contiguous(*earlier), *before, *final)
    run.by_sequence(scan, *given, **pointers)


def means_after(run: Walker, mean_M: Tensor, final: Tensor) -> Tensor:
    """The mean after each segment, (M, H, L, D), from those before each and the final ones."""
    parts = run.parts
    m = torch.arange(parts.M, device=final.device)
    if parts.table is None or parts.first is None:
        n, last = m // parts.per_row, m % parts.per_row == parts.per_row - 1
    else:
        n = parts.table[:, 2]
        last = m + 1 >= parts.first[n + 1]
    following = mean_M[(m + 1).clamp(max=parts.M - 1)]
    return torch.where(last[:, None, None, None], final[n], following)


def state_gradients(
    earlier: tuple[Tensor | None, ...], dmean: Tensor, lost: Tensor
) -> tuple[Tensor, Tensor]:
    """(dlog_mass, dmean) of the initial state, from ``lost`` = <dmean, mean> - dlog_mass.

    The gradients of empty initial states are zero, because their mean has no influence.
    """
    log_mass, mean = earlier
    if log_mass is None or mean is None:
        return lost, dmean
    empty = torch.isneginf(log_mass)
    dA = ((dmean * mean).sum(-1) - lost).masked_fill_(empty, 0.0)
    return dA, dmean.masked_fill(empty[..., None], 0.0)


@triton.jit(do_not_specialize=SIZES)
def segment_sums(
    k_ptr, v_ptr, mask_ptr, table_ptr,
    top_ptr, mass_ptr, sum_ptr,
    k_b, k_t, k_h, k_l, v_b, v_t, v_h, v_d,
    T, length, per_row, H, L, D,
    C: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr, PRODUCT: tl.constexpr,
    STAGES: tl.constexpr, R: tl.constexpr = 1,
    g_ptr=None, g_b=None, g_t=None, g_h=None, g_l=None, fall_ptr=None,
):  # fmt: skip
    """(M, H, L) twice and (M, H, L, D): top, mass and sum_s exp(k_s - top) v_s of each segment.

    ``R`` heads share one head of the values. If latents forget, k_s has decayed up to the segment's
    end, and ``fall`` (M, H, L) is the total log-decay of the segment. The kernel walks backwards.
    So the data that it read last is still in the cache when ``walk`` begins.
    """
    FORGETS: tl.constexpr = g_ptr is not None
    d0, h, m = walk_place(H, D, BD)
    batch, start, stop, _ = place(m, table_ptr, T, per_row, length)
    if start > stop:
        return
    if mask_ptr is not None:
        mask_ptr += batch * T
    k_ptr += batch * k_b + h * k_h
    v_ptr += batch * v_b + h // R * v_h
    if FORGETS:
        g_ptr += batch * g_b + h * g_h
    token = tl.arange(0, C)
    later_ones = (token[:, None] < token[None, :]).to(tl.float32)
    fall = tl.zeros((C, BL), tl.float32)
    ones = tl.full((C, C), 1.0, tl.float32)
    ref, fresh, unseen = tl.zeros((BL,), tl.float32), tl.full((BL,), 1, tl.int32), 1
    mass = tl.zeros((C, BL), tl.float32)
    total = tl.zeros((BD, BL), tl.float32)
    count = tl.cdiv(tl.minimum(stop - start, length).to(tl.int32), C)
    for j in tl.range(0, count, num_stages=STAGES, disable_licm=True):
        at = start + (count - 1 - j) * C
        k = load_keys(k_ptr, mask_ptr, k_t, k_l, at, stop, L, C, BL)
        v = load_inputs(v_ptr, v_t, v_d, at, stop, d0, D, C, BD)
        if FORGETS:
            g = load_tile(g_ptr, g_t, g_l, at, stop, 0, L, C, BL)
            fall_t = added(fall, summed(later_ones, g, PRODUCT))
            fall = added(fall, summed(ones, g, PRODUCT))
        if unseen == 1:
            ref, fresh = first_reference(k + fall_t if FORGETS else k, token, ref, fresh, C)
            unseen = uniform(tl.max(fresh, 0))
        above = k - ref[None, :]
        if FORGETS:
            above += fall_t
        if largest(above) > REACH / 4:
            if FORGETS:
                later = ref + tl.maximum(tl.max(above, 0), 0.0)
            else:
                later = tl.maximum(ref, tl.max(k, 0))
            kept = tl.exp(ref - later)
            ref, mass, total = later, mass * kept[None, :], total * kept[None, :]
        above = k - ref[None, :]
        if FORGETS:
            above += fall_t
        e = factor(power(above), PRODUCT)
        mass = added(mass, counted(ones, e, PRODUCT))
        total = added(total, mm(tl.trans(v), e, PRODUCT))
    i = m.to(tl.int64) * H + h
    if d0 == 0:
        store_latents(top_ptr, i, L, tl.where(fresh == 1, float("-inf"), ref), BL)
        store_latents(mass_ptr, i, L, tl.max(mass, 0), BL)
        if FORGETS:
            store_latents(fall_ptr, i, L, tl.max(fall, 0), BL)
    store_across(sum_ptr, i, L, D, d0, total, BL, BD)


@triton.jit(do_not_specialize=SIZES)
def scan(
    top_ptr, mass_ptr, sum_ptr, first_ptr,
    log_mass0_ptr, mean0_ptr,
    before_top_ptr, before_mass_ptr, before_mean_ptr,
    top1_ptr, mass1_ptr, log_mass1_ptr, mean1_ptr,
    per_row, H, L, D,
    U: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr, fall_ptr=None,
):  # fmt: skip
    """Merge the segments of one sequence in order, U at a time, for one head and tile of (L, D).

    ``first_ptr`` (N+1,) has the sequences' first segments when packed, else it is None.
    ``before_*`` is None if the states between segments are not needed. The first tile of D writes
    the results that have no dimension D. ``fall_ptr`` has the log-decay of each segment, or is
    None.
    """
    n, h, x, d, real_L, real_LD, at_LD = state_tile(H, L, D, BL, BD)
    u = tl.arange(0, U)
    leads = tl.program_id(2) == 0
    first, last = parts_of(n, per_row, first_ptr)
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
        at_UL = ((m * H + h) * L)[:, None] + x[None, :]
        real_UL = (m < last)[:, None] & real_L[None, :]
        # Before each segment: the state carried by the loop, and the earlier segments of this
        # round.
        previous = at_UL - H * L
        inside = ((m <= last) & (u > 0))[:, None] & real_L[None, :]
        early = tl.load(top_ptr + previous, mask=inside, other=float("-inf"))
        early_mass = tl.load(mass_ptr + previous, mask=inside, other=0.0)
        if fall_ptr is not None:
            top_UL = top[None, :] + tl.zeros_like(early)
            mass_UL = mass[None, :] + tl.zeros_like(early)
            fall = tl.load(fall_ptr + previous, mask=inside, other=0.0)
            scanned = tl.associative_scan((early, early_mass, fall), 0, merge_forgetting)
            early, early_mass, _ = merge_forgetting(
                top_UL, mass_UL, tl.zeros_like(fall), scanned[0], scanned[1], scanned[2]
            )
        else:
            early, early_mass = tl.associative_scan((early, early_mass), 0, merge_masses)
            early, early_mass = merge_masses(
                top[None, :] + tl.zeros_like(early), mass[None, :] + tl.zeros_like(early),
                early, early_mass,
            )  # fmt: skip
        if before_top_ptr is not None:
            tl.store(before_top_ptr + at_UL, early, mask=real_UL & leads)
            tl.store(before_mass_ptr + at_UL, early_mass, mask=real_UL & leads)
        own = tl.load(top_ptr + at_UL, mask=real_UL, other=float("-inf"))
        own_mass = tl.load(mass_ptr + at_UL, mask=real_UL, other=0.0)
        if fall_ptr is not None:
            fall = tl.load(fall_ptr + at_UL, mask=real_UL, other=0.0)
            late, late_mass, _ = merge_forgetting(
                early, early_mass, tl.zeros_like(fall), own, own_mass, fall
            )
            share = kept_share(early, early_mass, late, late_mass, fall)
        else:
            late, late_mass = merge_masses(early, early_mass, own, own_mass)
            share = kept_share(early, early_mass, late, late_mass)
        kept = tl.where((m < last)[:, None], share, 1.0)
        added = tl.exp(own - finite(late)) * inverse(late_mass)
        at_ULD = (at_UL * D)[:, :, None] + d[None, None, :]
        real_ULD = real_UL[:, :, None] & (d < D)[None, None, :]
        sums_ULD = added[:, :, None] * tl.load(sum_ptr + at_ULD, mask=real_ULD, other=0.0)
        kept_ULD = kept[:, :, None] + tl.zeros_like(sums_ULD)
        kept_ULD, sums_ULD = tl.associative_scan((kept_ULD, sums_ULD), 0, compose)
        means_ULD = kept_ULD * mean[None, :, :] + sums_ULD
        if before_mean_ptr is not None:
            # The state after this segment is the one before the next segment.
            follows = real_ULD & (m + 1 < last)[:, None, None]
            tl.store(before_mean_ptr + at_ULD + H * L * D, means_ULD, mask=follows)
        ends = u == U - 1
        mean = tl.sum(tl.where(ends[:, None, None], means_ULD, 0.0), 0)
        # A sum with zeros would fail, because the top of an empty state is -inf.
        top = tl.max(tl.where(ends[:, None], late, float("-inf")), 0)
        mass = tl.sum(tl.where(ends[:, None], late_mass, 0.0), 0)
    i = n * H + h
    tl.store(top1_ptr + i * L + x, top, mask=real_L & leads)
    tl.store(mass1_ptr + i * L + x, mass, mask=real_L & leads)
    tl.store(log_mass1_ptr + i * L + x, log_mass_of(top, mass), mask=real_L & leads)
    tl.store(mean1_ptr + i * L * D + at_LD, mean, mask=real_LD)


@triton.jit(do_not_specialize=SIZES)
def scan_back(
    top_ptr, mass_ptr, asked_ptr, lost_ptr, first_ptr,
    top1_ptr, mass1_ptr, dmean1_ptr, lost1_ptr,
    after_dmean_ptr, after_lost_ptr, dmean0_ptr, lost0_ptr,
    per_row, H, L, D,
    U: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr, fall_ptr=None,
):  # fmt: skip
    """Gradients of the state after each segment of one sequence, and of the initial state.

    ``lost`` (L,) = <dmean, mean> - dlog_mass obeys the same recurrence as dmean (L, D).
    """
    n, h, x, d, real_L, real_LD, at_LD = state_tile(H, L, D, BL, BD)
    u = tl.arange(0, U)
    leads = tl.program_id(2) == 0
    first, last = parts_of(n, per_row, first_ptr)
    i = n * H + h
    top1 = tl.load(top1_ptr + i * L + x, mask=real_L, other=0.0)
    mass1 = tl.load(mass1_ptr + i * L + x, mask=real_L, other=0.0)
    lost, dmean = tl.zeros_like(mass1), tl.zeros(at_LD.shape, tl.float32)
    if dmean1_ptr is not None:
        lost = tl.load(lost1_ptr + i * L + x, mask=real_L, other=0.0)
        dmean = tl.load(dmean1_ptr + i * L * D + at_LD, mask=real_LD, other=0.0)
    i = (last - 1) * H + h
    tl.store(after_lost_ptr + i * L + x, lost, mask=real_L & leads & (first < last))
    tl.store(after_dmean_ptr + i * L * D + at_LD, dmean, mask=real_LD & (first < last))
    for back in tl.range(0, last - first, U):
        m = last - 1 - back - u
        at_UL = ((m * H + h) * L)[:, None] + x[None, :]
        real_UL = (m >= first)[:, None] & real_L[None, :]
        # The state after a segment is the one before the next, or the final one.
        next_UL = real_UL & (m + 1 < last)[:, None]
        late = tl.load(top_ptr + at_UL + H * L, mask=next_UL, other=0.0)
        late_mass = tl.load(mass_ptr + at_UL + H * L, mask=next_UL, other=0.0)
        ends = (m + 1 == last)[:, None]
        late = tl.where(ends, top1[None, :], late)
        late_mass = tl.where(ends, mass1[None, :], late_mass)
        early = tl.load(top_ptr + at_UL, mask=real_UL, other=0.0)
        early_mass = tl.load(mass_ptr + at_UL, mask=real_UL, other=0.0)
        if fall_ptr is not None:
            fall = tl.load(fall_ptr + at_UL, mask=real_UL, other=0.0)
            share = kept_share(early, early_mass, late, late_mass, fall)
        else:
            share = kept_share(early, early_mass, late, late_mass)
        decay = tl.where((m >= first)[:, None], share, 1.0)
        losses = tl.load(lost_ptr + at_UL, mask=real_UL, other=0.0)
        at_ULD = (at_UL * D)[:, :, None] + d[None, None, :]
        real_ULD = real_UL[:, :, None] & (d < D)[None, None, :]
        asked = tl.load(asked_ptr + at_ULD, mask=real_ULD, other=0.0)
        decay_ULD = decay[:, :, None] + tl.zeros_like(asked)
        decay, losses = tl.associative_scan((decay, losses), 0, compose)
        decay_ULD, asked = tl.associative_scan((decay_ULD, asked), 0, compose)
        losses += decay * lost[None, :]
        asked += decay_ULD * dmean[None, :, :]
        # The state before this segment is the one after the previous segment.
        follows = m - 1 >= first
        at = at_UL - H * L
        tl.store(after_lost_ptr + at, losses, mask=real_UL & leads & follows[:, None])
        at = at_ULD - H * L * D
        tl.store(after_dmean_ptr + at, asked, mask=real_ULD & follows[:, None, None])
        lost = tl.sum(tl.where((u == U - 1)[:, None], losses, 0.0), 0)
        dmean = tl.sum(tl.where((u == U - 1)[:, None, None], asked, 0.0), 0)
    i = n * H + h
    tl.store(lost0_ptr + i * L + x, lost, mask=real_L & leads)
    tl.store(dmean0_ptr + i * L * D + at_LD, dmean, mask=real_LD)
