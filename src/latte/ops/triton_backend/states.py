"""The states that the custom ops share: buffers, gradients, the scan over segments.

Shape suffixes: B batch, T tokens, H heads, L latents, D value width, N states, M segments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from latte.ops.triton_backend.launch import Launcher
from latte.ops.triton_backend.segments import Walker


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


def scan_segments(
    run: Walker,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    earlier: tuple[Tensor | None, ...],
    before: tuple[Tensor | None, ...],
    final: tuple[Tensor, ...],
) -> None:
    """Write the states before each segment, if wanted, and the final top, mass, log-mass, mean."""
    from latte.ops.triton_backend import forward
    from latte.ops.triton_backend.walk import segment_sums

    sums = run.states(k, run.chunks.M)
    strides = (*k.stride(), *v.stride())
    run.forward(segment_sums, k, v, mask, run.chunks.table, *sums, *strides)
    run.by_sequence(forward.scan, *sums, run.chunks.first, *earlier, *before, *final)


def walk(
    run: Launcher,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    log_mass: Tensor | None,
    mean: Tensor | None,
    before: tuple[Tensor, ...] | None,
    R: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same chunk by chunk: final top, mass, log-mass and mean; states into ``before``.

    ``R`` query heads share one head of the values.
    """
    from latte.ops.triton_backend import forward

    chunks = run.chunks
    of_chunks = run.states(k, chunks.M)
    strides = (*k.stride(), *v.stride())
    inputs = (k, v, mask, chunks.table, *of_chunks, *strides)
    run.by_chunk(forward.sums, *inputs, products=("WIDE",), R=R)
    top, mass, final_mu = run.states(k, chunks.N)
    final_A = torch.empty_like(top)
    run.by_sequence(
        forward.scan,
        *(*of_chunks, chunks.first, *contiguous_state(log_mass, mean)),
        *(before or (None, None, None)),
        *(top, mass, final_A, final_mu),
    )
    return top, mass, final_A, final_mu
