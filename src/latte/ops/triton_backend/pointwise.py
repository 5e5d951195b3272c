"""The rotation, SwiGLU's product, and a residual sum with its RMSNorm, on kernels.

Each is one launch forward and one backward; the gradient of the norm's weight is one more, a sum of
what each program has found. They are no custom ops, which cost the host more than these launches
do: :mod:`latte.ops.pointwise` calls them where PyTorch runs operations one by one.

Shape suffixes: B batch, T tokens, H heads, K width of a head, E width, N rows, P programs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from latte.ops.custom_ops import check_first_order, empty_gradients
from latte.ops.tensors import autocasts, full_precision
from latte.ops.torch_backend.pointwise import Rotation, SiluProduct
from latte.ops.triton_backend.launch import (
    GATED_PRODUCT, NORM_PROGRAMS, ROTATION, contiguous, launch, norm_tile,
)  # fmt: skip
from latte.ops.triton_backend.recurrence import sigmoids
from latte.ops.triton_backend.tiles import SIZES


def rotate(cos: Tensor, sin: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
    """See :func:`latte.ops.pointwise.rotate_both`: one tensor or two."""
    return Rotation.apply(_turned, cos, sin, 1.0, *xs)  # type: ignore[no-any-return]


def _turned(cos: Tensor, sin: Tensor, sign: float, *xs: Tensor) -> tuple[Tensor, ...]:
    """The rotation by the angles times ``sign``."""
    outs, (B, T, _, K) = empty_gradients(*xs), xs[0].shape
    tables, width = contiguous(cos, sin), triton.next_power_of_2(K // 2)
    C = max(1, ROTATION["elements"] // width)
    heads = [x.shape[2] for x in xs]
    if B * T * sum(heads) * K == 0:
        return outs
    first, last = (xs[0], outs[0], *xs[0].stride()), (xs[-1], outs[-1], *xs[-1].stride())
    launch(
        xs[0].device,
        rotate_heads[-(-B * T // C), sum(heads)],
        *(*first, *last, *tables, sign, 0 if cos.shape[0] == 1 else T),
        *(B * T, T, heads[0], heads[-1], K // 2),
        C=C,
        BK=width,
        num_warps=ROTATION["num_warps"],
    )
    return outs


def _products(gate: Tensor, up: Tensor) -> Tensor:
    (out,) = empty_gradients(gate)
    _by_elements(gated_product, gate, up, out)
    return out


def _product_gradients(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    # In one buffer, so that one product gives both weights their gradients.
    found = torch.empty((2, *gate.shape), dtype=gate.dtype, device=gate.device).unbind()
    _by_elements(gated_product_back, dy, gate, up, *found)
    return found


def _by_elements(kernel: Any, *tensors: Tensor) -> None:
    """A launch over the elements of contiguous tensors of one size."""
    count = tensors[0].numel()
    if count:
        grid = (-(-count // GATED_PRODUCT["BE"]),)
        launch(tensors[0].device, kernel[grid], *tensors, count, **GATED_PRODUCT)


silu_product = functools.partial(SiluProduct.apply, _products, _product_gradients)


class _AddNorm(torch.autograd.Function):
    """The sum, or x itself, and its norm, of dtype ``kind`` if given.

    The sum and one number for each row are saved.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        added: Tensor | None,
        weight: Tensor,
        eps: float,
        kind: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        wide = autocasts(x.device.type)
        total, rows, E = x, x.contiguous(), x.shape[-1]
        if added is not None:
            dtype = torch.promote_types(x.dtype, added.dtype)
            rows = total = torch.empty(x.shape, dtype=dtype, device=x.device)
        # As PyTorch's norm, which autocast does not lower.
        kind = kind or (torch.float32 if wide else rows.dtype)
        out = torch.empty(rows.shape, dtype=kind, device=x.device)
        scale = torch.empty(rows.shape[:-1], dtype=torch.float32, device=x.device)
        if rows.numel():
            given = (*contiguous(x, added, weight), None if added is None else total, out, scale)
            launch(x.device, add_norm[(scale.numel(),)], *given, eps, E, **norm_tile(E))
        ctx.save_for_backward(rows, scale, weight)
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    @full_precision
    def backward(ctx: Any, dtotal: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        check_first_order("rms_norm")
        rows, scale, weight = ctx.saved_tensors
        dx, dweight, (N, E) = dtotal, None, (scale.numel(), rows.shape[-1])
        if dy is not None:
            (dx,) = empty_gradients(rows)
            programs = min(N, NORM_PROGRAMS)
            parts = torch.empty((programs, E), dtype=torch.float32, device=rows.device)
            if rows.numel():
                given = (*contiguous(dy, dtotal), rows, weight.contiguous(), scale, dx, parts)
                each = -(-N // programs)
                grid = (programs,)
                launch(rows.device, add_norm_back[grid], *given, N, each, E, **norm_tile(E))
            dweight = parts.sum(0)
        return dx, dx if ctx.needs_input_grad[1] else None, dweight, None, None


add_rms_norm = _AddNorm.apply


@triton.jit
def turn(
    x_ptr, out_ptr, x_b, x_t, x_h, x_k, H, h, b, t, row, real, cos, sin,
    HALF: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write the rotated head ``h`` of these rows to contiguous (B, T, H, 2 * HALF)."""
    i = tl.arange(0, BK).to(tl.int64)[None, :]
    inside = real[:, None] & (i < HALF)
    at = x_ptr + (b * x_b + t * x_t)[:, None] + h * x_h + i * x_k
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF * x_k, mask=inside, other=0.0).to(tl.float32)
    to = out_ptr + ((row * H + h) * (2 * HALF))[:, None] + i
    kind = out_ptr.dtype.element_ty
    tl.store(to, (first * cos - second * sin).to(kind), mask=inside)
    tl.store(to + HALF, (second * cos + first * sin).to(kind), mask=inside)


@triton.jit(do_not_specialize=[*SIZES, "rows", "table_t"])
def rotate_heads(
    x_ptr, x_out_ptr, x_b, x_t, x_h, x_k, y_ptr, y_out_ptr, y_b, y_t, y_h, y_k,
    cos_ptr, sin_ptr, sign, table_t, rows, T, H, G,
    HALF: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One head of C tokens: of x (B, T, H, K), or after its last of y (B, T, G, K).

    ``table_t`` is the number of rows of the table from one row of the batch to the next.
    """
    row = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)
    real, b, t = row < rows, row // T, row % T
    h = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BK)[None, :]
    at, inside = (b * table_t + t)[:, None] * HALF + i, real[:, None] & (i < HALF)
    cos = tl.load(cos_ptr + at, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + at, mask=inside, other=0.0) * sign
    if h < H:
        turn(x_ptr, x_out_ptr, x_b, x_t, x_h, x_k, H, h, b, t, row, real, cos, sin, HALF, BK)
    else:
        h -= H
        turn(y_ptr, y_out_ptr, y_b, y_t, y_h, y_k, G, h, b, t, row, real, cos, sin, HALF, BK)


@triton.jit
def elements(count, BE: tl.constexpr):
    """The elements of a program, and which exist."""
    i = tl.program_id(0).to(tl.int64) * BE + tl.arange(0, BE)
    return i, i < count


@triton.jit(do_not_specialize=["count"])
def gated_product(gate_ptr, up_ptr, out_ptr, count, BE: tl.constexpr):
    """silu(gate) up."""
    i, real = elements(count, BE)
    gate = tl.load(gate_ptr + i, mask=real, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + i, mask=real, other=0.0).to(tl.float32)
    share, _ = sigmoids(gate)
    tl.store(out_ptr + i, (gate * share * up).to(out_ptr.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["count"])
def gated_product_back(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, count, BE: tl.constexpr
):  # fmt: skip
    """dgate and dup."""
    i, real = elements(count, BE)
    dy = tl.load(dy_ptr + i, mask=real, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + i, mask=real, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + i, mask=real, other=0.0).to(tl.float32)
    share, rest = sigmoids(gate)
    dgate = dy * up * share * (1.0 + gate * rest)
    tl.store(dgate_ptr + i, dgate.to(dgate_ptr.dtype.element_ty), mask=real)
    tl.store(dup_ptr + i, (dy * gate * share).to(dup_ptr.dtype.element_ty), mask=real)


@triton.jit
def add_norm(
    x_ptr, added_ptr, weight_ptr, total_ptr, out_ptr, scale_ptr, eps, E, BE: tl.constexpr
):  # fmt: skip
    """One row: the sum, if something is added, its norm, and the factor of the norm."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BE)
    x = tl.load(x_ptr + row * E + e, mask=e < E, other=0.0).to(tl.float32)
    if added_ptr is not None:
        x += tl.load(added_ptr + row * E + e, mask=e < E, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * E + e, total, mask=e < E)
        x = total.to(tl.float32)  # the backward pass reads it
    scale = tl.rsqrt(tl.sum(x * x, 0) / E + eps)
    y = x * scale * tl.load(weight_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * E + e, y.to(out_ptr.dtype.element_ty), mask=e < E)
    tl.store(scale_ptr + row, scale)


@triton.jit(do_not_specialize=["N", "each"])
def add_norm_back(
    dy_ptr, dtotal_ptr, total_ptr, weight_ptr, scale_ptr, dx_ptr, dweight_ptr,
    N, each, E, BE: tl.constexpr,
):  # fmt: skip
    """dx of ``each`` rows, and their part of dweight (P, E). ``dtotal`` is the sum's gradient."""
    first = tl.program_id(0).to(tl.int64) * each
    e = tl.arange(0, BE)
    weight = tl.load(weight_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    dweight = tl.zeros((BE,), tl.float32)
    for row in range(first, tl.minimum(first + each, N)):
        dy = tl.load(dy_ptr + row * E + e, mask=e < E, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + row)
        x = tl.load(total_ptr + row * E + e, mask=e < E, other=0.0).to(tl.float32) * scale
        dweight += dy * x
        dy *= weight
        dx = (dy - x * (tl.sum(dy * x, 0) / E)) * scale
        if dtotal_ptr is not None:
            dx += tl.load(dtotal_ptr + row * E + e, mask=e < E, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * E + e, dx.to(dx_ptr.dtype.element_ty), mask=e < E)
    tl.store(dweight_ptr + tl.program_id(0) * E + e, dweight, mask=e < E)
