"""Which tokens are kept from each update to the next, on a kernel.

One program walks over the blocks of a row and group. It holds the N largest keys so far in their
order. At each update every candidate is ranked: a kept one by its place and the number of leaving
ones that are not smaller, a leaving one by all that are better than it. The first N stay, the
latents read the rest. Nothing is sorted.

A long row is cut into segments, which are walked over three times: each from nothing, for its N
largest; then these one after another, for what is kept before each segment; then each from there.

Shape suffixes: B batch, S slots, G key/value heads, Z blocks of C tokens, M segments, N kept keys.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from latte.ops.custom_ops import custom_op
from latte.ops.torch_backend.kept_plan import NOTHING, Choice, ChoiceCall, Layout
from latte.ops.triton_backend.launch import CHOICE, SHORTEST_CHOICE, launch

LEAST = tl.constexpr(NOTHING[torch.float32])  # the key of a place where there is no candidate


def choose(keys_BGS: Tensor, layout: Layout, window: int, count: int) -> Choice:
    """See :func:`latte.ops.torch_backend.kept_plan.choose`."""
    return Choice(*choice_op(*ChoiceCall.of(keys_BGS, layout, window, count)))


def forward(x: ChoiceCall) -> tuple[Tensor, ...]:
    """Slots of the kept keys and whether there are any; the same of what is late."""
    index, there, late, late_there = x.buffers()
    (B, G, S), Z, N, keys = x.keys.shape, x.blocks, x.kept, x.keys
    best = keys.new_empty(index.shape)
    length = max(SHORTEST_CHOICE, 1 << math.isqrt(max(Z - 1, 1)).bit_length())
    M = -(-Z // length)
    # What is kept before each segment; before the first one what the state holds.
    first = keys[..., :N].sort(dim=-1, descending=True, stable=True)
    before = keys.new_empty((B, G, M, N)), index.new_empty((B, G, M, N))
    for buffer, held in zip(before, first, strict=True):
        buffer[:, :, 0] = held
    for buffer, held in zip((best, index), first, strict=True):
        buffer[:, :, 0] = held
    sizes: dict[str, Any] = {"Z": Z, "M": M, "length": length, "N": N}
    front = S - Z * x.block
    given = (keys, x.age, best, index, *before)
    walk = (S, front, x.window, x.block)
    if M > 1:
        launch(keys.device, walk_choice[(B * G * M,)], *given, None, None, *walk, **sizes, **CHOICE)
        launch(keys.device, join_choices[(B * G,)], *given, **sizes, **CHOICE)
    late_flags = late_there.view(torch.uint8)
    launch(
        keys.device, walk_choice[(B * G * M,)], *given, late, late_flags, *walk, **sizes, **CHOICE
    )
    torch.gt(best, NOTHING[torch.float32], out=there)
    return index, there, late, late_there


choice_op = custom_op("triton_kept_choice", ChoiceCall, 4, ChoiceCall.buffers, forward)


@triton.jit
def load_leaving(ptr, at, c0, count, lowest, STEP: tl.constexpr, BN: tl.constexpr):
    """Keys (BN,) from the ``c0``-th of ``count`` on, at ``at`` + STEP c; LEAST below ``lowest``."""
    c = c0 + tl.arange(0, BN)
    slot = at + STEP * c
    return tl.load(ptr + slot, mask=(c < count) & (slot >= lowest), other=LEAST)


@triton.jit
def put(rank, real, key, slot, N, best_ptr, index_ptr, late_ptr, late_there_ptr):
    """Write candidates of these ranks to what is kept, or to what is late."""
    tl.store(best_ptr + rank, key, mask=real & (rank < N))
    tl.store(index_ptr + rank, slot, mask=real & (rank < N))
    if late_ptr is not None:
        tl.store(late_ptr + rank - N, slot, mask=real & (rank >= N))
        tl.store(late_there_ptr + rank - N, (key != LEAST).to(tl.uint8), mask=real & (rank >= N))


@triton.jit
def choose_among(
    kept_ptr, kept_index_ptr, fresh, keys_ptr, slots_ptr, at, count, lowest, N,
    best_ptr, index_ptr, late_ptr, late_there_ptr, STEP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The N largest of N kept keys, in their order, and ``count`` new ones, in any order.

    ``fresh``: nothing was kept. Among equal keys the new ones are better, then the earlier ones.
    New keys are at ``at`` + STEP c. ``slots_ptr`` has their slots, or None: these are the places.
    """
    i = tl.arange(0, BN)
    for c0 in range(0, count, BN):
        key, real = load_leaving(keys_ptr, at, c0, count, lowest, STEP, BN), c0 + i < count
        rank = tl.zeros((BN,), tl.int32)
        for e0 in range(0, count, BN):
            other = load_leaving(keys_ptr, at, e0, count, lowest, STEP, BN)
            better = (other[None, :] > key[:, None]) | (
                (other[None, :] == key[:, None]) & (e0 + i[None, :] < c0 + i[:, None])
            )
            rank += tl.sum((better & (e0 + i < count)[None, :]).to(tl.int32), 1)
        for k0 in range(0, N, BN):
            there = k0 + i < N
            other = tl.load(kept_ptr + k0 + i, mask=there & (fresh == 0), other=LEAST)
            rank += tl.sum(((other[None, :] > key[:, None]) & there[None, :]).to(tl.int32), 1)
        slot = at + STEP * (c0 + i).to(tl.int64)
        if slots_ptr is not None:
            slot = tl.load(slots_ptr + slot, mask=real, other=0)
        else:
            slot = tl.maximum(slot, N)
        put(rank, real, key, slot, N, best_ptr, index_ptr, late_ptr, late_there_ptr)
    for k0 in range(0, N, BN):
        there = k0 + i < N
        key = tl.load(kept_ptr + k0 + i, mask=there & (fresh == 0), other=LEAST)
        slot = tl.load(kept_index_ptr + k0 + i, mask=there & (fresh == 0), other=0)
        rank = k0 + i
        for e0 in range(0, count, BN):
            other = load_leaving(keys_ptr, at, e0, count, lowest, STEP, BN)
            better = (other[None, :] >= key[:, None]) & (e0 + i < count)[None, :]
            rank += tl.sum(better.to(tl.int32), 1)
        put(rank, there, key, slot, N, best_ptr, index_ptr, late_ptr, late_there_ptr)


@triton.jit(do_not_specialize=["S", "Z", "M", "length", "front"])
def walk_choice(
    keys_ptr, age_ptr, best_ptr, index_ptr, before_ptr, before_index_ptr, late_ptr, late_there_ptr,
    S, front, W, block, Z, M, length, N, BN: tl.constexpr,
):  # fmt: skip
    """What is kept after each update of one segment, (B, G, Z+1, N), and what is late.

    Without ``late_ptr`` from nothing, else from what was kept before the segment, (B, G, M, N).
    """
    bg, m = (tl.program_id(0) // M).to(tl.int64), tl.program_id(0) % M
    keys_ptr += bg * S
    best_ptr += bg * (Z + 1) * N
    index_ptr += bg * (Z + 1) * N
    for z in range(m * length, tl.minimum(m * length + length, Z)):
        fresh, lowest = 0, N
        if age_ptr is not None:
            age = tl.load(age_ptr + z)
            fresh = (age == 0).to(tl.int32)
            lowest = front + (z - age.to(tl.int32)) * block
        kept_ptr, kept_index_ptr = best_ptr + z * N, index_ptr + z * N
        if z == m * length:
            if late_ptr is None:
                fresh = 1
            else:
                kept_ptr = before_ptr + (bg * M + m) * N
                kept_index_ptr = before_index_ptr + (bg * M + m) * N
        late_z = None
        there_z = None
        if late_ptr is not None:
            late_z = late_ptr + (bg * Z + z) * block
            there_z = late_there_ptr + (bg * Z + z) * block
        choose_among(
            kept_ptr, kept_index_ptr, fresh, keys_ptr, None, front - W + z * block, block, lowest,
            N, best_ptr + (z + 1) * N, index_ptr + (z + 1) * N, late_z, there_z, -1, BN,
        )  # fmt: skip
        tl.debug_barrier()  # the next update reads what this one wrote


@triton.jit(do_not_specialize=["Z", "M", "length"])
def join_choices(
    keys_ptr, age_ptr, best_ptr, index_ptr, before_ptr, before_index_ptr,
    Z, M, length, N, BN: tl.constexpr,
):  # fmt: skip
    """What is kept before each segment except the first, from the N largest of each."""
    bg = tl.program_id(0).to(tl.int64)
    before_ptr += bg * M * N
    before_index_ptr += bg * M * N
    for m in range(0, M - 1):
        last = bg * (Z + 1) + m * length + length
        fresh = 0
        if age_ptr is not None:
            # Whether a sequence began in this segment.
            fresh = (tl.load(age_ptr + m * length + length - 1) < length).to(tl.int32)
        choose_among(
            before_ptr + m * N, before_index_ptr + m * N, fresh,
            best_ptr, index_ptr, last * N, N, 0,
            N, before_ptr + (m + 1) * N, before_index_ptr + (m + 1) * N, None, None, 1, BN,
        )  # fmt: skip
        tl.debug_barrier()
