"""Weights in huge pages. A token reads each weight once, and looking up small pages limits that.

Linux gives huge pages to memory of which it is asked, and glibc does not ask. Matrices of a small
model have less than one each, so they are put next to each other.

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


def use_huge_pages(tensors: Iterable[Tensor]) -> None:
    """Move these tensors' memory into one block of huge pages, in their order, on Linux.

    Each keeps a storage of its own. Tensors on other devices, with gaps or of other classes stay.
    """
    moved = [
        x for x in tensors if type(x) in (Tensor, nn.Parameter) and x.is_cpu and x.is_contiguous()
    ]
    sizes = [-(-x.nbytes // LINE) * LINE for x in moved]
    if sum(sizes) < PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory has no huge pages
    block = mmap.mmap(-1, sum(sizes) + PAGE, flags=private)
    with contextlib.suppress(OSError):  # a kernel without them
        block.madvise(mmap.MADV_HUGEPAGE)
    at = -torch.frombuffer(block, dtype=torch.uint8).data_ptr() % PAGE
    for x, size in zip(moved, sizes, strict=True):
        if x.numel():
            own = torch.frombuffer(block, dtype=x.dtype, count=x.numel(), offset=at)
            x.data = own.view(x.shape).copy_(x.data)
        at += size
