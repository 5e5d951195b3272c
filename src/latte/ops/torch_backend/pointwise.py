"""The RMSNorm, SwiGLU's product and the rotation by PyTorch's operations.

On a CPU the RMSNorm, and without tracing the rotation, have gradients of their own, which save less
and make fewer intermediates. Elsewhere plain operations are used.

Shape suffixes: B batch, T tokens, H heads, K width of a head, E width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.ops.custom_ops import check_first_order
from latte.ops.tensors import full_precision, number, on_cpu


def rms_norm(x: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """See :func:`latte.ops.pointwise.rms_norm`."""
    exact = x.dtype == weight_E.dtype and x.dtype in (torch.float32, torch.float64)
    if not exact or not on_cpu(x):
        return F.rms_norm(x, weight_E.shape, weight_E, eps)
    single = x.ndim <= 2 or x.shape[1] == 1  # one token per row
    if torch.is_grad_enabled() or not single:
        return _RMSNorm.apply(x, weight_E, eps)
    E = x.shape[-1]
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    size = torch.hypot(size, number(math.sqrt(E * eps), x))
    return x * (number(math.sqrt(E), x) / size) * weight_E


class _RMSNorm(torch.autograd.Function):
    """The norm saves x and one number per row. PyTorch's on a CPU saves the normed x too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(number(eps, x), norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
        ctx.save_for_backward(x, scale, weight)
        return (x * scale).mul_(weight)

    @staticmethod
    @full_precision
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        check_first_order("rms_norm")
        x, scale, weight = ctx.saved_tensors
        normed = x * scale
        pulled = (dy * normed).reshape(-1, x.shape[-1])
        along = torch.mv(pulled, weight).view(scale.shape)
        dx = (dy * weight).addcmul_(normed, along, value=-1.0 / x.shape[-1]).mul_(scale)
        return dx, pulled.sum(0), None


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """See :func:`latte.ops.pointwise.silu_product`."""
    return F.silu(gate) * up


def rotate(x_BTHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See :func:`latte.ops.pointwise.rotate`."""
    if on_cpu(x_BTHK, or_gpu=True):  # a launch for each operation
        return Rotation.apply(_turned, cos, sin, 1.0, x_BTHK)[0]
    first, second = x_BTHK.chunk(2, -1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(rotated, -1).to(x_BTHK.dtype)


def _turned(cos: Tensor, sin: Tensor, sign: float, x: Tensor) -> tuple[Tensor, ...]:
    """The rotation by the angles times ``sign``, without intermediates."""
    out = torch.empty(x.shape, dtype=cos.dtype, device=x.device)
    split = (*x.shape[:-1], 2, cos.shape[-1])
    halves, turned = x.view(split), out.view(split)
    torch.mul(halves, cos[..., None, :], out=turned)
    turned[..., 0, :].addcmul_(halves[..., 1, :], sin, value=-sign)
    turned[..., 1, :].addcmul_(halves[..., 0, :], sin, value=sign)
    return (out.to(x.dtype),)


class Rotation(torch.autograd.Function):
    """The rotation of tensors by ``kernel``. Its gradient is the inverse rotation."""

    @staticmethod
    def forward(
        ctx: Any, kernel: Any, cos: Tensor, sin: Tensor, sign: float, *xs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.kernel, ctx.sign = kernel, sign
        return kernel(cos, sin, sign, *xs)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        return (
            None,
            None,
            None,
            None,
            *Rotation.apply(ctx.kernel, *ctx.saved_tensors, -ctx.sign, *dys),
        )


class SiluProduct(torch.autograd.Function):
    """``silu(gate) up`` by kernels of contiguous tensors. Only ``gate`` and ``up`` are saved.

    ``kernel`` takes them, and ``kernel_back`` the output's gradient and them.
    """

    @staticmethod
    def forward(ctx: Any, kernel: Any, kernel_back: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kernel_back = kernel_back
        return kernel(gate.contiguous(), up.contiguous())  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        check_first_order("silu_product")
        given = (x.contiguous() for x in (dy, *ctx.saved_tensors))
        return None, None, *ctx.kernel_back(*given)
