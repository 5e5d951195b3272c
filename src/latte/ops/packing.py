"""Index arithmetic for packed sequences (``cu_seqlens``), without reading values on the host.

Shape suffixes: T tokens of the packed row, N sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_ids(cu_seqlens: Tensor, T: int) -> Tensor:
    """(T,) int64: the sequence that each token of the packed row belongs to."""
    positions = torch.arange(T, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.bucketize(positions, cu_seqlens[1:].contiguous(), right=True)


def sequence_starts(cu_seqlens: Tensor, T: int) -> Tensor:
    """(T,) int64: where the sequence of each token begins."""
    return cu_seqlens[:-1].long()[sequence_ids(cu_seqlens, T)]
