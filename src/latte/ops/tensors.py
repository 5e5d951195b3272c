"""What all ops ask of their tensors: which they see, precision, packed indices.

Shape suffixes: B batch, T tokens of a row, packed or not, N packed sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

P = ParamSpec("P")
R = TypeVar("R")


class Sequences(NamedTuple):
    """The sequences in the rows of a call, and which of their tokens a query may see."""

    key_mask: Tensor | None  # (B, T) bool, True = a valid token
    cu_seqlens: Tensor | None  # (N+1,) when packed
    causal: bool = True


class Local(NamedTuple):
    """Softmax attention to the nearest keys."""

    window: int | None  # keys, self included; None: all
    scale: float  # of the logits
    softcap: float  # logits become softcap * tanh(logit / softcap); 0: they stay


def computation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 stays fp64; everything else is computed, and carried, in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def on_cpu(x: Tensor, or_gpu: bool = False) -> bool:
    """Whether PyTorch runs x's operations one by one on a CPU, where few and large ones pay.

    False where it traces them, and where it takes derivatives that an autograd function does not
    have: forward mode and the transforms of ``torch.func``. ``or_gpu``: a CUDA device will do too.
    """
    kind = x.device.type
    return (kind == "cpu" or or_gpu and kind == "cuda") and _one_by_one()


def on_gpu(x: Tensor) -> bool:
    """As :func:`on_cpu`, of a CUDA device, where every launch takes the host's time."""
    return x.device.type == "cuda" and _one_by_one()


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of products with x: autocast may lower it."""
    lowers = autocasts(x.device.type) and x.dtype != torch.float64
    return torch.get_autocast_dtype(x.device.type) if lowers else x.dtype


def autocasts(kind: str) -> bool:
    """Whether autocast is on for a kind of device; some, such as meta, have none."""
    known = kind == "cpu" or kind == "cuda" or _has_autocast(kind)
    return known and torch.is_autocast_enabled(kind)


def _one_by_one() -> bool:
    if torch.compiler.is_compiling():
        return False
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return not transformed and forward_ad._current_level < 0


def has_tangent(tensors: Iterable[Tensor | None]) -> bool:
    """Whether one of the tensors has a forward-mode derivative."""
    for x in tensors:
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            return True
    return False


def _has_autocast(kind: str) -> bool:
    if torch.compiler.is_compiling():
        return kind != "meta"  # PyTorch 2.11 cannot trace the question
    return torch.amp.is_autocast_available(kind)


def full_precision(fn: Callable[P, R]) -> Callable[P, R]:
    """Run ``fn`` with autocast, which would round its sums, off on its first tensor's device.

    Where it is off anyhow nothing is done: a context costs as much as a small operation.
    """

    @functools.wraps(fn)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0] if args else None  # mostly a tensor, and then no other is looked for
        if not isinstance(first, Tensor):
            tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
            first = next(tensors, None)
        kind = "cpu" if first is None or first.is_cpu else first.device.type
        known = kind == "cpu" or kind == "cuda" or _has_autocast(kind)  # one call fewer
        if not known or not torch.is_autocast_enabled(kind):
            return fn(*args, **kwargs)
        with torch.autocast(kind, enabled=False):
            return fn(*args, **kwargs)

    return wrapped


def number(value: float, like: Tensor) -> Any:
    """``value`` for arithmetic with ``like``: outside of graphs a tensor that is kept.

    A Python number is made into a tensor at every use, which takes four operations more.
    """
    return value if torch.compiler.is_compiling() else _kept(value, like.dtype)


@functools.cache
def _kept(value: float, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype, device="cpu")


def nothing_out(v: Tensor, *inputs: Tensor | None) -> Tensor:
    """The output (B, 0, ...) of no tokens: like ``v``, and differentiable in ``inputs`` too."""
    for x in inputs:
        if x is not None:
            v = v + x.sum().to(v.dtype)
    return v.clone()


def without_masked(key_mask: Tensor | None, x: Tensor) -> Tensor:
    """Zeros in the place of masked sources of x (B, T, ...), whatever they held.

    Their weight is 0, but 0 times infinity, or NaN, is not.
    """
    if key_mask is None:
        return x
    return x.masked_fill(~key_mask.view(*key_mask.shape, *[1] * (x.ndim - 2)), 0.0)


def real_tokens(x_BTX: Tensor, key_mask: Tensor | None) -> Tensor:
    """The mask (B, T) bool of the valid tokens of ``x``."""
    return x_BTX.new_ones(x_BTX.shape[:2], dtype=torch.bool) if key_mask is None else key_mask


def count_sequences(B: int, cu_seqlens: Tensor | None) -> int:
    """N: how many sequences there are, from shapes alone."""
    return B if cu_seqlens is None else cu_seqlens.shape[0] - 1


def sequence_bounds(cu_seqlens: Tensor) -> Tensor:
    """(N+1,) int64, contiguous: what every op reads, whichever dtype and strides came."""
    return cu_seqlens.long().contiguous()


def sequence_ids(cu_seqlens: Tensor, T: int) -> Tensor:
    """(T,) int64: the sequence that each token of the packed row belongs to.

    Like all of this file, without reading a value on the host.
    """
    positions = torch.arange(T, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.bucketize(positions, cu_seqlens[1:].contiguous(), right=True)


def sequence_starts(cu_seqlens: Tensor, T: int) -> Tensor:
    """(T,) int64: where the sequence of each token begins."""
    return sequence_bounds(cu_seqlens)[:-1][sequence_ids(cu_seqlens, T)]


def token_positions(
    x_BTE: Tensor,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    start: Tensor | None = None,
) -> Tensor:
    """Position of each token in its own sequence, (B or 1, T) int64.

    Masked tokens do not count, so that a padded sequence has the positions of the bare one; a
    packed sequence starts at 0; ``start`` (B,) continues an earlier piece.
    """
    T, device = x_BTE.shape[1], x_BTE.device
    if cu_seqlens is not None:
        token = torch.arange(T, device=device)
        bounds = sequence_bounds(cu_seqlens)
        sequence = torch.searchsorted(bounds, token, right=True) - 1
        first = bounds[sequence.clamp_min(0)]
        if key_mask is None:
            positions = (token - first)[None]
        else:
            counted = F.pad(key_mask[0].long().cumsum(0), (1, 0))
            positions = (counted[1:] - 1 - counted[first]).clamp_min(0)[None]
        return positions if start is None else positions + start[sequence][None]
    if key_mask is None:
        positions = torch.arange(T, device=device)[None]
    else:
        positions = key_mask.long().cumsum(1) - 1
    if start is not None:
        positions = positions + start[:, None]
    return positions.clamp_min(0)
