"""The RMSNorm, SwiGLU's product and the rotation by native CPU kernels (``pointwise.cpp``).

See :mod:`latte.ops.pointwise`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from latte.ops.custom_ops import check_first_order
from latte.ops.tensors import full_precision
from latte.ops.torch_backend.pointwise import Rotation


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


class _SiluProduct(torch.autograd.Function):
    """Only ``gate`` and ``up`` are saved."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.ops.latte.cpu_glu(gate.contiguous(), up.contiguous())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        check_first_order("silu_product")
        return torch.ops.latte.cpu_glu_backward(*(x.contiguous() for x in (dy, *ctx.saved_tensors)))


silu_product = _SiluProduct.apply


def rotate(x_BTHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See :func:`latte.ops.pointwise.rotate`."""
    return Rotation.apply(_turned, x_BTHK, cos, sin, 1.0)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    return torch.ops.latte.cpu_rotate(x.contiguous(), cos.contiguous(), sin.contiguous(), sign)
