"""Tensors that the backward pass makes again, where that is cheaper than keeping them till then."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from latte.ops.tensors import on_cpu


class SavedMaker(NamedTuple):
    """A tensor in the place of which its maker was saved, and as what view of it."""

    make: Callable[[], Tensor]
    view: tuple[Any, Any, Any]  # sizes, strides, offset
    autocast: tuple[bool, torch.dtype]


@contextlib.contextmanager
def made_again(*pairs: tuple[Tensor, Callable[[], Tensor]]) -> Iterator[None]:
    """Operations within save no tensor of these pairs, contiguous ones, but how to make it.

    A maker gives the same tensor, bit by bit, from tensors that stay in memory anyway. It is called
    in the backward pass, without gradients and under the autocast of now, once for each operation
    that had saved the tensor or a view of it. Nothing changes on a GPU, in graphs and transforms,
    and where somebody else already decides what is saved (gradient checkpointing, offloading).
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
