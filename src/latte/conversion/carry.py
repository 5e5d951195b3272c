"""A layer's own loss on the way of the hidden states, so that its backward pass has a place.

In attention transfer every layer has a loss inside of it, and no gradient goes from one layer to
another. Plain autograd needs no more than the sum of the losses. What works by gradients that
arrive at a block's output, as FSDP2 does when it gathers a block's weights for the backward pass
and frees them after it, would see none. Here they arrive: the blocks' outputs are chained,

    h_in -> [detached: the layer and its loss, of their own] -> h_out, loss = carry(h_in, ...)

by an identity whose gradient for h_in is zero, one number for all elements. The backward pass of
layer n then begins when that of layer n + 1 has ended, and the gradients of the losses pass as
they are.

Shape suffixes: B batch, T tokens, E hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, previous: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # a zero gradient for hidden states would fill memory
        ctx.like = (previous.shape, previous.dtype, previous.device)
        return tuple(value.detach() for value in values)  # no copies, and not views for autograd

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        shape, dtype, device = ctx.like
        return torch.zeros((), dtype=dtype, device=device).expand(shape), *grads


def carry(previous: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """The values, unchanged, whose backward pass goes on, with a zero gradient, to ``previous``.

    Gradients of the values are handed on as they come. ``previous`` may have any shape; its
    gradient is one zero, expanded.
    """
    out: tuple[Tensor, ...] = _Carry.apply(previous, *values)  # type: ignore[no-untyped-call]
    return out


def hook_layer(layer: nn.Module) -> None:
    """Let a decoder layer tell the ``teacher`` among its keywords when it begins and ends.

    Hooks that come later, as FSDP2's do, stay outside of these: they see the hidden states that
    :meth:`latte.conversion.transfer.Teacher.leave` returns.
    """
    layer.register_forward_pre_hook(_enter, with_kwargs=True)
    layer.register_forward_hook(_leave, with_kwargs=True)


def _enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    teacher = kwargs.get("teacher")
    return None if teacher is None else ((teacher.enter(args[0]), *args[1:]), kwargs)


def _leave(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], x_BTE: Tensor) -> Any:
    teacher = kwargs.get("teacher")
    return None if teacher is None else teacher.leave(x_BTE)
