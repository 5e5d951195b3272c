"""What all ops ask of their tensors: precision, buffers, packed indices, gradients connected.

Shape suffixes: B batch, T tokens of a row, packed or not, N packed sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def computation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 stays fp64; everything else is computed, and carried, in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _has_autocast(kind: str) -> bool:
    if torch.compiler.is_compiling():
        return kind != "meta"  # PyTorch 2.11 cannot trace the question
    return torch.amp.is_autocast_available(kind)


def full_precision(fn: Callable[P, R]) -> Callable[P, R]:
    """Run ``fn`` with autocast, which would round its sums, off on its first tensor's device."""

    @functools.wraps(fn)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        first = next(tensors, None)
        kind = "cpu" if first is None else first.device.type
        if not _has_autocast(kind):
            return fn(*args, **kwargs)
        with torch.autocast(kind, enabled=False):
            return fn(*args, **kwargs)

    return wrapped


def empty_gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Contiguous buffers of the inputs' shapes and dtypes, not written yet."""
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs)


def nothing_out(v: Tensor, *inputs: Tensor) -> Tensor:
    """The output (B, 0, ...) of no tokens: like ``v``, and differentiable in ``inputs`` too."""
    for x in inputs:
        v = v + x.sum().to(v.dtype)
    return v.clone()


def without_masked(key_mask: Tensor | None, x: Tensor) -> Tensor:
    """Zeros in the place of masked sources of x (B, T, ...), whatever they held.

    Their weight is 0, but 0 times infinity, or NaN, is not.
    """
    if key_mask is None:
        return x
    return x.masked_fill(~key_mask.view(*key_mask.shape, *[1] * (x.ndim - 2)), 0.0)


def sequence_ids(cu_seqlens: Tensor, T: int) -> Tensor:
    """(T,) int64: the sequence that each token of the packed row belongs to.

    Like all of this file, without reading a value on the host.
    """
    positions = torch.arange(T, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.bucketize(positions, cu_seqlens[1:].contiguous(), right=True)


def sequence_starts(cu_seqlens: Tensor, T: int) -> Tensor:
    """(T,) int64: where the sequence of each token begins."""
    return cu_seqlens[:-1].long()[sequence_ids(cu_seqlens, T)]


def connect_gradients(op: Any, backward_op: Any, *, saved_from: int) -> None:
    """Let the custom op ``backward_op`` give the gradients of ``op``, one of ``latte_attention``'s.

    Args:
        op: of (q, k, v, key_mask, cu_seqlens, log_mass, mean), to the output, the final log-mass
            and mean, and whatever else the backward pass needs.
        backward_op: of the three gradients, the inputs and the saved outputs, to the gradients of
            q, k, v and the initial state.
        saved_from: the first of the outputs that the backward pass needs.
    """

    def fake(dout, dlog_mass, dmean, q, k, v, *_):
        return empty_gradients(q, k, v, dlog_mass, dmean)

    def save(ctx, inputs, output):
        ctx.save_for_backward(*inputs, *output[saved_from:])
        # Gradients flow from the outputs and the final state alone.
        ctx.mark_non_differentiable(*output[3:])

    def gradients(ctx, dout, dlog_mass, dmean, *_):
        saved = ctx.saved_tensors
        dq, dk, dv, dA, dmu = backward_op(dout, dlog_mass, dmean, *saved)
        earlier = (None, None) if saved[5] is None else (dA, dmu)
        return dq, dk, dv, None, None, *earlier

    backward_op.register_fake(fake)
    op.register_autograd(gradients, setup_context=save)
