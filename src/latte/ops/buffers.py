"""Output buffers, and inputs that may be read."""

from __future__ import annotations

import torch
from torch import Tensor


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
