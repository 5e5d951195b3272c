"""The states that the custom ops share: buffers, gradients, the scan over segments.

Shape suffixes: B batch, T tokens, H heads, L latents, D value width, N states, M segments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from latte.ops.triton_backend.segments import Walker, segment_length, walking

# What is saved between segments: (top, mass, mean) before each, final (top, mass).
Between = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def readable(key_mask: Tensor | None) -> Tensor | None:
    """The mask as contiguous bytes."""
    return None if key_mask is None else key_mask.contiguous().view(torch.uint8)


def contiguous_state(*state: Tensor | None) -> tuple[Tensor | None, ...]:
    """Contiguous tensors of a state that may be missing."""
    return tuple(None if x is None else x.contiguous() for x in state)


def state_gradients(
    log_mass: Tensor | None, mean: Tensor | None, dmean: Tensor, lost: Tensor
) -> tuple[Tensor, Tensor]:
    """(dlog_mass, dmean) of the initial state, from ``lost`` = <dmean, mean> - dlog_mass.

    An empty state has no mass to move and a mean that nobody reads: no gradient.
    """
    if log_mass is None or mean is None:
        return lost, dmean
    empty = torch.isneginf(log_mass)
    dA = ((dmean * mean).sum(-1) - lost).masked_fill_(empty, 0.0)
    return dA, dmean.masked_fill(empty[..., None], 0.0)


def final_buffers(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Empty fp32 buffers (N, H, L) and (N, H, L, D)."""
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    A = q.new_empty((N, *q.shape[2:]), dtype=torch.float32)
    return A, A.new_empty((*A.shape, v.shape[-1]))


def between_segments(k: Tensor, D: int, cu_seqlens: Tensor | None) -> Between:
    """Empty fp32 buffers: (top, mass, mean) before each segment, final (top, mass).

    Without entries where no sequence is cut: nobody needs them. From shapes alone.
    """
    B, T, H, L = k.shape
    config = walking(L, D, k.dtype)
    length = segment_length(B, T, H * -(-D // config.BD), config.C, cu_seqlens is not None)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    M = 0
    if length < T:
        M = B * -(-T // length) if cu_seqlens is None else T // length + N
    top = k.new_empty((M, H, L), dtype=torch.float32)
    final = top.new_empty((N if length < T else 0, H, L))
    mean = top.new_empty((M, H, L, D))
    return top, torch.empty_like(top), mean, final, torch.empty_like(final)


def scan_segments(
    run: Walker,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    earlier: tuple[Tensor | None, ...],
    before: tuple[Tensor | None, ...],
    final: tuple[Tensor, ...],
    R: int = 1,
) -> None:
    """Write the states before each segment, if wanted, and the final top, mass, log-mass, mean.

    ``R`` heads share one head of the values.
    """
    from latte.ops.triton_backend import forward
    from latte.ops.triton_backend.walk import segment_sums

    sums = run.states(k, run.chunks.M)
    strides = (*k.stride(), *v.stride())
    run.forward(segment_sums, k, v, mask, run.chunks.table, *sums, *strides, R=R)
    run.by_sequence(forward.scan, *sums, run.chunks.first, *earlier, *before, *final)
