"""MXINT8: integers of 8 bits, and one power of two for each 32 of them.

The format is that of the OCP Microscaling Formats (MX) Specification 1.0. A number is m 2^(e - 6),
with -127 <= m <= 127 and e the exponent of the largest of its 32 numbers. The packed row of n
numbers has n bytes of integers in two's complement, then ceil(n / 32) bytes of exponents (E8M0:
e + 127, or 255 for NaN). A row of zeros is 0. 32 numbers with an infinity or a NaN among them
become NaN.

Every packed number is a bf16 number, so it is widened to any dtype without a loss, and packing it
again changes nothing. On a CPU native kernels do the same (``mxint8.cpp``).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.ops import decoding
from latte.ops.tensors import computation_dtype

BLOCK = 32  # numbers that share an exponent
NAN = 255
LEAST = 8  # of exponents that are stored: 2^-119. Smaller numbers lose bits.
STEP = 6  # an integer of 1 is 2^(e - 6)


def packed_width(width: int) -> int:
    """Number of bytes of a row of so many numbers."""
    return width + -(-width // BLOCK)


def pack(x: Tensor) -> Tensor:
    """Rows of numbers (..., n) of any floating-point dtype as uint8 (..., n + ceil(n / 32))."""
    n, x = x.shape[-1], x.detach()
    if decoding.takes(x, compiled=False):
        return torch.ops.latte.cpu_mx_pack(x.contiguous())
    integers, exponents = _integers(x)
    integers = integers.nan_to_num_(0.0).to(torch.int8).flatten(-2)[..., :n]
    return torch.cat([integers.view(torch.uint8), exponents.to(torch.uint8)], -1)


def unpack(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers (..., n) of packed rows, in a floating-point dtype."""
    like = rows.new_empty(0, dtype=dtype)
    if decoding.takes(like, compiled=False):
        return torch.ops.latte.cpu_mx_unpack(rows.contiguous(), like)
    width = rows.shape[-1]
    n = width - -(-width // (BLOCK + 1))
    scale = _scale(rows[..., n:].to(torch.int32)).repeat_interleave(BLOCK, -1)[..., :n]
    integers = rows[..., :n].contiguous().view(torch.int8).to(torch.float32)
    return (integers * scale).to(dtype)


def rounded(x: Tensor) -> Tensor:
    """The nearest numbers of the format, in the dtype of x. The gradient is that of x."""
    given = x.detach()
    if decoding.takes(given, compiled=False):
        near = torch.ops.latte.cpu_mx_rounded(given.contiguous())
    else:
        integers, exponents = _integers(given)
        near = integers.mul_(_scale(exponents)[..., None]).flatten(-2)
        near = near[..., : x.shape[-1]].to(x.dtype)
    return x + (near - x).detach() if x.requires_grad else near


def _integers(x: Tensor) -> tuple[Tensor, Tensor]:
    """The integers of each block (..., blocks, 32), as floating-point numbers, and its exponent."""
    x = x.to(computation_dtype(x.dtype))
    blocks = F.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    top = blocks.abs().amax(-1).float()
    exponents = (top.view(torch.int32) >> 23).clamp_min(LEAST)
    # 2^(6 - e): the bits of its exponent are 127 + 6 - (stored - 127).
    factor = ((2 * 127 + STEP - exponents) << 23).view(torch.float32)
    integers = (blocks * factor[..., None]).round_().clamp_(-127, 127)
    return integers, exponents.masked_fill(top == 0, 0)


def _scale(exponents: Tensor) -> Tensor:
    """What an integer of 1 is worth, in fp32, by the stored exponent (int32)."""
    scale = ((exponents.clamp_min(LEAST) - STEP) << 23).view(torch.float32)
    return torch.where(exponents == NAN, torch.nan, scale)
