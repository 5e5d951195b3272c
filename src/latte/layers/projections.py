"""Several linear maps of one input, as a GPU computes them in few launches.

By itself autograd makes a gradient of the input for each map and adds these, and autocast casts the
input for each map, and each weight.

Shape suffixes: N rows, E inputs, M outputs of a map.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from latte.layers.native import is_hooked
from latte.ops.backend import named_backend
from latte.ops.custom_ops import check_first_order
from latte.ops.decoding import PLAIN
from latte.ops.tensors import autocasts, full_precision, on_gpu, product_dtype


def project(x: Tensor, *maps: Any) -> tuple[Tensor, ...]:
    """The output (..., M) of each linear map for x (..., E).

    On a GPU, maps that are plain share one gradient of x, to which each product adds, and one cast
    under autocast. Others are called.
    """
    if torch.is_grad_enabled() and on_gpu(x) and named_backend() != "reference":
        dtype, weights = product_dtype(x), _weights(x, maps)
        if weights:
            return _Projections.apply(dtype, x, *weights)  # type: ignore[no-any-return]
    found = []  # a comprehension would be one more call
    for linear in maps:
        found.append(linear(x))
    return tuple(found)


def cast(dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    """These tensors, all of one dtype, as another one: in one launch."""
    if all(x.dtype == dtype for x in tensors):
        return list(tensors)
    found = [torch.empty_like(x, dtype=dtype) for x in tensors]
    torch._foreach_copy_(found, tensors)
    return found


def _weights(x: Tensor, maps: Sequence[Any]) -> list[Tensor]:
    """The weights of plain linear maps; empty if one of the maps must be called."""
    weights: list[Tensor] = []
    for linear in maps:
        if type(linear) is not nn.Linear or is_hooked(linear) or linear.bias is not None:
            return []
        weights.append(linear.weight)
    like = weights[0].dtype if autocasts(x.device.type) else x.dtype
    alike = all(type(w) in PLAIN and w.dtype == like and w.device == x.device for w in weights)
    return weights if alike and type(x) in PLAIN else []


class _Projections(torch.autograd.Function):
    """``x W^T`` for each weight (M, E), in this dtype."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.dtypes = x.dtype, weights[0].dtype
        ctx.set_materialize_grads(False)
        x, weights = x.to(dtype), tuple(cast(dtype, *weights))
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    @full_precision
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        check_first_order("linear maps of one input")
        x, *weights = ctx.saved_tensors
        _, wants_x, *wants = ctx.needs_input_grad
        dx, asked = None, {}
        for i, (dy, weight) in enumerate(zip(dys, weights, strict=True)):
            if dy is None:
                continue
            dy_NM = dy.reshape(-1, dy.shape[-1])
            if wants_x:
                dx = dy_NM @ weight if dx is None else dx.addmm_(dy_NM, weight)
            if wants[i]:
                asked[i] = dy_NM
        if dx is not None:
            dx = dx.view(x.shape).to(ctx.dtypes[0])
        found = _weight_gradients(list(asked.values()), x.reshape(-1, x.shape[-1]))
        dweights = dict(zip(asked, cast(ctx.dtypes[1], *found), strict=True))
        return None, dx, *(dweights.get(i) for i in range(len(weights)))


def _weight_gradients(dys_NM: Sequence[Tensor], x_NE: Tensor) -> Sequence[Tensor]:
    """``dy^T x`` for each: in one product if they lie one after the other, as SwiGLU's two do."""
    places = [_place(dy, i) for i, dy in enumerate(dys_NM)]
    if len(places) < 2 or len(set(places)) > 1 or not dys_NM[0].is_contiguous():
        return [dy.mT @ x_NE for dy in dys_NM]
    first, count = dys_NM[0], len(dys_NM)
    together = first.as_strided((count, *first.shape), (first.numel(), *first.stride()))
    return torch.bmm(together.mT, x_NE.expand(count, -1, -1)).unbind()


def _place(x: Tensor, i: int) -> tuple[Any, ...]:
    """Where the first of tensors lies if x is number ``i`` after it, and their form."""
    start = x.storage_offset() - i * x.numel()
    return x.untyped_storage().data_ptr(), start, x.shape, x.stride()
