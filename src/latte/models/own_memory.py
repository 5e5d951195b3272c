"""Memory of their own for weights, in huge pages.

A token reads each weight once, and looking up small pages then limits the speed of memory. Linux
gives huge pages where it is asked, and glibc does not ask. Many matrices are smaller than a huge
page, so all are put next to each other.

https://docs.kernel.org/admin-guide/mm/transhuge.html
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable

import torch
from torch import Tensor, nn

PAGE = 1 << 21  # bytes
LINE = 64  # bytes, at a multiple of which a tensor begins


@torch.no_grad()
def own_memory(tensors: Iterable[Tensor]) -> None:
    """Copy tensors into memory of their own, in place: on Linux into one block of huge pages.

    Each keeps a storage of its own. Only one tensor at a time is in memory twice.
    """
    block, at, tensors = None, 0, [*tensors]
    room = sum(map(_room, tensors))
    if room >= PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory has no huge pages
        block = mmap.mmap(-1, room + PAGE, flags=private)
        with contextlib.suppress(OSError):  # a kernel without them
            block.madvise(mmap.MADV_HUGEPAGE)
        at = -torch.frombuffer(block, dtype=torch.uint8).data_ptr() % PAGE
    for x in tensors:
        if block is None or not _room(x):
            x.data = x.data.clone()
            continue
        own = torch.frombuffer(block, dtype=x.dtype, count=x.numel(), offset=at)
        x.data = own.view(x.shape).copy_(x.data)
        at += _room(x)


def _room(x: Tensor) -> int:
    """Number of bytes that a tensor takes in the block; 0 if it stays out of it."""
    plain = type(x) in (Tensor, nn.Parameter) and x.is_cpu and x.is_contiguous()
    return -(-x.nbytes // LINE) * LINE if plain else 0
