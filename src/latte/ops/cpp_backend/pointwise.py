"""The RMSNorm, SwiGLU's product and the rotation by native CPU kernels (``pointwise.cpp``).

See :mod:`latte.ops.pointwise`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from latte.ops.custom_ops import check_first_order
from latte.ops.tensors import full_precision
from latte.ops.torch_backend.pointwise import Rotation, SiluProduct


class _RMSNorm(torch.autograd.Function):
    """The norm saves x and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scale = torch.ops.latte.cpu_norm_rows(x.contiguous(), weight, eps)
        ctx.save_for_backward(x, scale, weight)
        return out

    @staticmethod
    @full_precision
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        check_first_order("rms_norm")
        x, scale, weight = ctx.saved_tensors
        rows = dy.contiguous(), x.contiguous(), weight, scale
        return *torch.ops.latte.cpu_norm_rows_backward(*rows), None


rms_norm = _RMSNorm.apply


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """See :func:`latte.ops.pointwise.silu_product`."""
    ops = torch.ops.latte
    return SiluProduct.apply(ops.cpu_glu, ops.cpu_glu_backward, gate, up)


def rotate(x_BTHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See :func:`latte.ops.pointwise.rotate`."""
    return Rotation.apply(_turned, cos, sin, 1.0, x_BTHK)[0]


def _turned(cos: Tensor, sin: Tensor, sign: float, x: Tensor) -> tuple[Tensor, ...]:
    given = x.contiguous(), cos.contiguous(), sin.contiguous()
    return (torch.ops.latte.cpu_rotate(*given, sign),)
