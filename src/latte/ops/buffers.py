"""Output buffers of the custom ops."""

from __future__ import annotations

import torch
from torch import Tensor


def empty_gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Contiguous buffers of the inputs' shapes and dtypes, not written yet."""
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs)
