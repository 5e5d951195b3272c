"""Products with matrices of integers of 4 or 8 bits.

A token of a small model takes the time of reading its weights once, so weights of 4 bits are read
four times as fast as bf16. The native kernels multiply with the integers: they round x to 15 bits,
with a scale for each 32 numbers. Where they cannot serve, PyTorch's own CPU
kernel multiplies few rows with 4 bits. All other products dequantise the weights tile by tile, and
are ordinary.

* ``int4``: ``w = (q - 8) scale + zero``, with a scale and a zero for each 32 weights of a row. The
  blocks of GGUF's Q4_0, Q4_1 and Q4_K are of this form.
* ``int8``: ``w = q scale``, with a scale for each 32 weights of a row, as in blocks of Q8_0. One
  scale for a whole row errs seven times as much in SmolLM2's embedding, which is its head too: its
  perplexity is 0.2 to 0.3% higher.

A file has the integers in the order of the rows: two of 4 bits to a byte, the even column in the
low bits. The native kernels want them in panels of 16 outputs, the last one filled up, in the same
order on every processor. PyTorch's 4-bit kernel wants an order that depends on the processor.

Shape suffixes: M rows of the input, N outputs, K inputs, G groups of 32 inputs, P panels of 16
outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from latte.ops import cpp_backend, decoding
from latte.ops.widened import emulates

FORMATS = ("int4", "int8")
GROUP = 32  # inputs that share a scale of int4
PANEL = 16  # outputs that the native kernels have side by side
MOST_ROWS = 64  # up to which PyTorch's 4-bit kernel is faster than dequantising
TILE = 2**19  # weights that are dequantised at a time
# Outputs that PyTorch's 4-bit kernel has side by side, by the instructions that it uses.
BLOCKS = {"AVX512": 64, "AVX2": 32}
OUTPUTS = 16  # PyTorch's 4-bit kernel wants a multiple of it


class Integers(NamedTuple):
    """A quantised matrix of shape (N, K).

    Attributes:
        weight: uint8 (N, K / 2) with two integers to a byte, or int8 (N, K).
        scales: Scales and zeros (G, N, 2) of int4; scales (G, N) of int8.
    """

    weight: Tensor
    scales: Tensor


def instructions() -> str | None:
    """The instructions of PyTorch's fast 4-bit kernel on this CPU; None if there is none."""
    found = torch.backends.cpu.get_cpu_capability()
    return found.lower() if found in BLOCKS and _order_is_known(BLOCKS[found]) else None


def best_order(kind: str) -> int:
    """The order of the fastest kernel here for a format, as in :class:`Matrix`."""
    if cpp_backend.ABSENT is None:
        return PANEL
    found = instructions() if kind == "int4" else None
    return 0 if found is None else BLOCKS[found.upper()]


def fits(kind: str, outputs: int, inputs: int) -> bool:
    """Whether a matrix of this shape can have this format."""
    return not inputs % GROUP and (kind == "int8" or not outputs % OUTPUTS)


# --- from weights to integers, and back ---------------------------------------------------------


def quantise(weight: Tensor, kind: str) -> Integers:
    """A matrix (N, K) in integers, rounded to nearest, with scales in bf16.

    ``int8``: the largest magnitude of 32 weights becomes 127, so Q8_0's integers stay as they are.
    ``int4``: a few ranges around the least and the greatest of 32 weights are tried, and the one
    with the smallest squared error is taken.
    """
    w_NGJ = weight.detach().float().unflatten(1, (-1, GROUP))
    if kind == "int8":
        scale_NG = _rounded(w_NGJ.abs().amax(-1) / 127)
        integers = (w_NGJ / _not_zero(scale_NG)[..., None]).round_().clamp_(-127, 127)
        return Integers(integers.to(torch.int8).flatten(1), scale_NG.bfloat16().t().contiguous())
    least, greatest = w_NGJ.amin(-1, keepdim=True), w_NGJ.amax(-1, keepdim=True)
    best: tuple[Tensor, ...] = ()
    for part in (1.0, 0.95, 0.9, 0.85, 0.8):
        middle, width = (least + greatest) / 2, (greatest - least) * part
        scale = _rounded(width / 15)
        zero = _rounded(middle + scale / 2)  # the integers are -8 to 7
        q = ((w_NGJ - zero) / _not_zero(scale)).round_().clamp_(-8, 7)
        error = (q * scale + zero - w_NGJ).square_().sum(-1, keepdim=True)
        found: tuple[Tensor, ...] = error, scale, zero, q
        if best:
            better = error < best[0]
            found = tuple(torch.where(better, x, y) for x, y in zip(found, best, strict=True))
        best = found
    _, scale, zero, q = best
    return four_bits((q + 8).flatten(1), scale[..., 0], zero[..., 0])


def four_bits(q_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor) -> Integers:
    """``(q - 8) scale + zero`` of integers 0 to 15 (N, K), with scales and zeros in bf16."""
    q = q_NK.to(torch.uint8)
    scales_NG2 = torch.stack([scale_NG, zero_NG], -1).bfloat16()
    return Integers(q[:, ::2] | q[:, 1::2] << 4, scales_NG2.transpose(0, 1).contiguous())


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _not_zero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale)


@cache
def _order_is_known(block: int) -> bool:
    """Whether PyTorch's kernel has the order that this file can undo."""
    generator = torch.Generator().manual_seed(0)
    plain = torch.randint(256, (2 * block + OUTPUTS, 4), dtype=torch.uint8, generator=generator)
    with torch.no_grad():
        return torch.equal(in_rows(ordered(plain, block), block, len(plain)), plain)


def ordered(plain: Tensor, block: int) -> Tensor:
    """Integers of some outputs, from the order of the rows, in that of a kernel here."""
    if block == PANEL and len(plain) % PANEL:
        plain = torch.cat([plain, plain.new_zeros(-len(plain) % PANEL, plain.shape[1])])
    if plain.dtype == torch.int8:
        eight = (plain ^ -128).unflatten(0, (-1, PANEL)).unflatten(-1, (-1, 4))
        return eight.transpose(1, 2).reshape(plain.shape)
    q_NK = torch.stack([plain & 15, plain >> 4], -1).flatten(1)
    if block != PANEL:
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(q_NK.int(), 1)
    low, high = q_NK.unflatten(0, (-1, PANEL)).unflatten(-1, (-1, 2, 4)).unbind(-2)
    return (low | high << 4).transpose(1, 2).reshape(plain.shape)


def _integers(weight: Tensor, block: int, first: int, last: int, dtype: torch.dtype) -> Tensor:
    """The integers of some outputs, (K, n), as numbers of a dtype: 0 to 15, or of 8 bits."""
    own = weight[first : last + -last % PANEL if block == PANEL else last]
    if weight.dtype == torch.int8:
        if block:
            panels_PKn4 = own.view(-1, weight.shape[1] // 4, PANEL, 4) ^ -128
            own = panels_PKn4.transpose(1, 2).reshape(own.shape)[: last - first]
        return own.to(dtype).t()
    if not block:
        return torch.stack([own & 15, own >> 4], -1).flatten(1).to(dtype).t()
    inputs = 2 * weight.shape[1]
    if block == PANEL:
        pairs = own.view(-1, inputs // 8, PANEL, 4).permute(1, 3, 0, 2)  # (K / 8, 4, P, 16)
        axis, shape = 1, (inputs, -1)
    elif first < len(weight) // block * block:
        # In a whole block the two integers of a byte are half a block apart.
        pairs = own.view(-1, inputs, block // 2).transpose(0, 1)
        axis, shape = 2, (inputs, -1)
    else:  # in a smaller block they are neighbours
        pairs, axis, shape = own.view(inputs, -1), 2, (inputs, -1)
    both = torch.stack([(pairs & 15).to(dtype), (pairs >> 4).to(dtype)], axis).reshape(shape)
    return both[:, : last - first]


def tiles(outputs: int, inputs: int, block: int) -> Iterator[tuple[int, int]]:
    """Ranges of outputs with few enough weights: whole blocks, and a smaller one last."""
    step = max(TILE // inputs // BLOCKS["AVX512"], 1) * BLOCKS["AVX512"]
    whole = outputs // block * block if block else outputs
    for first in range(0, whole, step):
        yield first, min(first + step, whole)
    if whole < outputs:
        yield whole, outputs


def in_rows(weight: Tensor, block: int, outputs: int) -> Tensor:
    """Integers in the order of the rows, from that of a kernel."""
    if not block:
        return weight
    parts, dtype = [], weight.dtype
    four = dtype == torch.uint8
    for first, last in tiles(outputs, weight.shape[1] * (2 if four else 1), block):
        q_NK = _integers(weight, block, first, last, dtype).t()
        parts.append(q_NK[:, ::2] | q_NK[:, 1::2] << 4 if four else q_NK)
    return torch.cat(parts)


# --- products -----------------------------------------------------------------------------------


class Matrix(NamedTuple):
    """Integers and the order that they are in.

    Attributes:
        block: 0 is the order of the rows, :data:`PANEL` that of the native kernels, one of
            :data:`BLOCKS` that of PyTorch's.
    """

    weight: Tensor
    scales: Tensor
    block: int

    @property
    def kind(self) -> str:
        return "int8" if self.weight.dtype == torch.int8 else "int4"

    @property
    def shape(self) -> tuple[int, int]:
        outputs, columns = self.scales.shape[1], self.weight.shape[1]
        return outputs, columns if self.kind == "int8" else 2 * columns

    def tile(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """The dequantised weights of some outputs, (K, n). They are computed in fp32 at least."""
        wide = torch.promote_types(dtype, torch.float32)
        scales = self.scales[:, first:last].to(wide)
        q_KN = _integers(self.weight, self.block, first, last, wide)
        q_GJN = q_KN.unflatten(0, (-1, GROUP))
        if self.kind == "int8":
            return (q_GJN * scales[:, None]).flatten(0, 1).to(dtype)
        scale_GN, zero_GN = scales.unbind(-1)
        return (
            torch.addcmul((zero_GN - 8 * scale_GN)[:, None], q_GJN, scale_GN[:, None])
            .flatten(0, 1)
            .to(dtype)
        )

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """The dequantised weights of the outputs with these numbers (...,), (..., K)."""
        native = ids.dtype == torch.int64 and self.kind == "int8" and dtype == self.scales.dtype
        if native and self.is_native(self.scales.data):
            return torch.ops.latte.cpu_quantised_rows(ids.contiguous(), self.weight, self.scales)
        q = self.weight[ids] if not self.block else self._panel_rows(ids)
        if self.kind == "int8":
            scales = self.scales[:, ids].movedim(0, -1).to(dtype)
            return (q.to(dtype).unflatten(-1, (-1, GROUP)) * scales[..., None]).flatten(-2)
        raise ValueError("rows of a matrix: expected integers of 8 bits, got 4 bits")

    def _panel_rows(self, ids: Tensor) -> Tensor:
        panels = self.weight.view(-1, self.weight.shape[1] // 4, PANEL, 4)
        return panels[ids // PANEL, :, ids % PANEL].flatten(-2) ^ -128

    def is_native(self, x: Tensor) -> bool:
        """Whether the native kernels multiply these integers with rows like x."""
        if self.block != PANEL or not self.weight.is_cpu or x.dtype == torch.float64:
            return False
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return False
        return forward_ad._current_level < 0 and decoding.takes(x)

    def has_kernel(self, x: Tensor) -> bool:
        """Whether PyTorch's kernel multiplies these integers with few rows like x."""
        return self.block not in (0, PANEL) and x.is_cpu and self.weight.is_cpu

    def product(self, x_MK: Tensor) -> Tensor:
        """``x W^T``, (M, N)."""
        if self.is_native(x_MK):
            return torch.ops.latte.cpu_quantised(x_MK, self.weight, self.scales)
        if 0 < len(x_MK) <= MOST_ROWS and self.has_kernel(x_MK):
            # With other dtypes than bf16 the kernel takes a path that is fifty times slower.
            x, scales = x_MK.to(torch.bfloat16).contiguous(), self.scales.to(torch.bfloat16)
            few = torch.ops.aten._weight_int4pack_mm_for_cpu
            return few(x, self.weight, GROUP, scales).to(x_MK.dtype)
        dtype = _product_dtype(x_MK)
        x, (outputs, inputs) = x_MK.to(dtype), self.shape
        parts = [x @ self.tile(*tile, dtype) for tile in tiles(outputs, inputs, self.block)]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return out.to(x_MK.dtype)

    def back(self, y_MN: Tensor) -> Tensor:
        """``y W``, (M, K): the gradient of the input of a product."""
        dtype = _product_dtype(y_MN)
        y, (outputs, inputs) = y_MN.to(dtype), self.shape
        out = y.new_zeros(len(y), inputs)
        for first, last in tiles(outputs, inputs, self.block):
            out = out + y[:, first:last] @ self.tile(first, last, dtype).t()
        return out.to(y_MN.dtype)


def _product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of products with many rows: fp32 where PyTorch emulates that of x."""
    return torch.float32 if x.is_cpu and emulates(x.dtype) else x.dtype


class Product(torch.autograd.Function):
    """``x W^T`` (M, N) with gradients of x, which keeps the integers alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x_MK: Tensor, weight: Tensor, scales: Tensor, block: int) -> Tensor:
        return Matrix(weight, scales, block).product(x_MK)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, weight, scales, ctx.block = inputs
        ctx.save_for_backward(weight, scales)
        ctx.save_for_forward(weight, scales)

    @staticmethod
    def backward(ctx: Any, y_MN: Tensor) -> Any:
        return _Back.apply(y_MN, *ctx.saved_tensors, ctx.block), None, None, None

    @staticmethod
    def jvp(ctx: Any, x_MK: Tensor, *_: Any) -> Tensor:
        return Product.apply(x_MK, *ctx.saved_tensors, ctx.block)


class _Back(torch.autograd.Function):
    """``y W`` (M, K), so that gradients have gradients too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(y_MN: Tensor, weight: Tensor, scales: Tensor, block: int) -> Tensor:
        return Matrix(weight, scales, block).back(y_MN)

    setup_context = staticmethod(Product.setup_context)

    @staticmethod
    def backward(ctx: Any, x_MK: Tensor) -> Any:
        return Product.apply(x_MK, *ctx.saved_tensors, ctx.block), None, None, None
