"""Recomputation: the backward pass computes some tensors again, and autograd does not save them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from latte.ops.tensors import on_cpu


class SavedMaker(NamedTuple):
    """What autograd saves in place of a tensor: how to compute the tensor, and which view of it."""

    make: Callable[[], Tensor]
    view: tuple[Any, Any, Any]  # sizes, strides, offset
    autocast: tuple[bool, torch.dtype]


@contextlib.contextmanager
def recomputed(*pairs: tuple[Tensor, Callable[[], Tensor]]) -> Iterator[None]:
    """Within the block, autograd saves functions in place of these tensors.

    Each pair is a contiguous tensor and a function that computes the same tensor, bit by bit, from
    tensors that stay in memory. The backward pass calls this function once for each operation that
    needs the tensor or a view of it, without gradients and under the block's autocast. Tensors are
    saved as usual on a GPU, in graphs and transforms, and where other hooks decide what is saved
    (gradient checkpointing, offloading).
    """
    if not pairs or not pairs[0][0].requires_grad or not on_cpu(pairs[0][0]) or _are_hooked():
        yield
        return
    makers = {x.untyped_storage().data_ptr(): make for x, make in pairs}
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def pack(x: Tensor) -> Tensor | SavedMaker:
        make = makers.get(x.untyped_storage().data_ptr())
        view = x.size(), x.stride(), x.storage_offset()
        return x if make is None else SavedMaker(make, view, autocast)

    with saved_tensors_hooks(pack, _unpack):
        yield


def _unpack(saved: Tensor | SavedMaker) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    enabled, dtype = saved.autocast
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled):
        return saved.make().as_strided(*saved.view)


def _are_hooked() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
