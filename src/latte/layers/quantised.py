"""Linear maps and embeddings whose weights are integers of 4 or 8 bits, and stay so.

A token of a small model takes the time of reading its weights once, so weights of 4 bits are read
four times as fast as bf16. For few rows PyTorch's own CPU kernels multiply with the integers. For
many rows the weights are dequantised tile by tile, and the product is an ordinary one.

* ``int4``: ``w = (q - 8) scale + zero``, with a scale and a zero for each 32 weights of a row. The
  blocks of GGUF's Q4_0, Q4_1 and Q4_K are of this form.
* ``int8``: ``w = q scale``, with a scale for each row.

Integers are never trained. Gradients flow through a map to its input, as for training adapters or
latents over frozen weights. torchao has tensors over the same kernels. On a CPU they have no rule
for many rows, no gradients, and no embedding, so the modules are our own.

The 4-bit kernel wants its integers in an order that depends on the processor. A state dict and a
file have them in the order of the rows, two to a byte, the even column in the low bits.

Shape suffixes: M rows of the input, N outputs, K inputs, G groups of 32 inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from latte.layers.latent_input import LatentLogits
from latte.layers.native import MAPS
from latte.ops.widened import emulates

FORMATS = ("int4", "int8")
GROUP = 32  # inputs that share a scale of int4
# Rows up to which the kernels are faster than dequantising, which takes as long for any number.
MOST_ROWS = {"int4": 64, "int8": 12}
TILE = 2**19  # weights that are dequantised at a time
# Outputs that the 4-bit kernel has side by side, by the instructions that PyTorch uses.
BLOCKS = {"AVX512": 64, "AVX2": 32}
OUTPUTS = 16  # the 4-bit kernel wants a multiple of it


class Integers(NamedTuple):
    """A quantised matrix of shape (N, K).

    Attributes:
        weight: uint8 (N, K / 2) with two integers to a byte, or int8 (N, K).
        scales: Scales and zeros (G, N, 2) of int4; scales (N,) of int8.
    """

    weight: Tensor
    scales: Tensor


def instructions() -> str | None:
    """The instructions of the 4-bit kernel's fast path on this CPU; None if it has none."""
    found = torch.backends.cpu.get_cpu_capability()
    return found.lower() if found in BLOCKS and _order_is_known(BLOCKS[found]) else None


def fits(kind: str, outputs: int, inputs: int) -> bool:
    """Whether a matrix of this shape can have this format."""
    return kind == "int8" or not (outputs % OUTPUTS or inputs % GROUP)


# --- from weights to integers, and back ---------------------------------------------------------


def quantise(weight: Tensor, kind: str) -> Integers:
    """A matrix (N, K) in integers, rounded to nearest, with scales in bf16.

    ``int8``: the largest magnitude of a row becomes 127. ``int4``: of a few ranges around the least
    and the greatest of 32 weights, the one with the smallest squared error.
    """
    wide = weight.detach().float()
    if kind == "int8":
        scale_N = _rounded(wide.abs().amax(1) / 127)
        integers = (wide / _not_zero(scale_N)[:, None]).round_().clamp_(-127, 127)
        return Integers(integers.to(torch.int8), scale_N.bfloat16())
    w_NGJ = wide.unflatten(1, (-1, GROUP))
    least, greatest = w_NGJ.amin(-1, keepdim=True), w_NGJ.amax(-1, keepdim=True)
    best: tuple[Tensor, ...] = ()
    for part in (1.0, 0.95, 0.9, 0.85, 0.8):
        middle, width = (least + greatest) / 2, (greatest - least) * part
        scale = _rounded(width / 15)
        zero = _rounded(middle + scale / 2)  # the integers are -8 to 7
        q = ((w_NGJ - zero) / _not_zero(scale)).round_().clamp_(-8, 7)
        error = (q * scale + zero - w_NGJ).square_().sum(-1, keepdim=True)
        found = error, scale, zero, q
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
    """Whether the kernel's order is the one that this file undoes."""
    generator = torch.Generator().manual_seed(0)
    plain = torch.randint(256, (2 * block + OUTPUTS, 4), dtype=torch.uint8, generator=generator)
    with torch.no_grad():
        return torch.equal(_plain(_ordered(plain), block), plain)


def _ordered(plain: Tensor) -> Tensor:
    """Integers (N, K / 2) in the order of this CPU's kernel."""
    q_NK = torch.stack([plain & 15, plain >> 4], -1).flatten(1)
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(q_NK.int(), 1)


def _pairs(weight: Tensor, block: int, first: int, last: int) -> tuple[Tensor, int]:
    """The bytes of some outputs in the kernel's order, (K, b, p), and the axis of a pair's two.

    Of a whole block the two integers of a byte are half a block apart, of a smaller one neighbours.
    """
    inputs = 2 * weight.shape[1]
    own = weight[first:last].reshape(-1)
    if first < len(weight) // block * block:
        return own.view(-1, inputs, block // 2).transpose(0, 1), 2
    return own.view(inputs, 1, -1), 3


def _integers(weight: Tensor, block: int, first: int, last: int, dtype: torch.dtype) -> Tensor:
    """The integers 0 to 15 of some outputs, (K, n), as numbers of a dtype."""
    if block:
        pairs, axis = _pairs(weight, block, first, last)
        halves = torch.stack([(pairs & 15).to(dtype), (pairs >> 4).to(dtype)], axis)
        return halves.flatten(1)
    plain = weight[first:last]
    return torch.stack([plain & 15, plain >> 4], -1).flatten(1).to(dtype).t()


def _tiles(outputs: int, inputs: int, block: int) -> Iterator[tuple[int, int]]:
    """Ranges of outputs with few enough weights: whole blocks, and a smaller one last."""
    step = max(TILE // inputs // BLOCKS["AVX512"], 1) * BLOCKS["AVX512"]
    whole = outputs // block * block if block else outputs
    for first in range(0, whole, step):
        yield first, min(first + step, whole)
    if whole < outputs:
        yield whole, outputs


def _plain(weight: Tensor, block: int) -> Tensor:
    """Integers (N, K / 2) in the order of the rows, from that of the kernel."""
    parts = []
    for first, last in _tiles(len(weight), 2 * weight.shape[1], block):
        q_NK = _integers(weight, block, first, last, torch.uint8).t()
        parts.append(q_NK[:, ::2] | q_NK[:, 1::2] << 4)
    return torch.cat(parts)


# --- products -----------------------------------------------------------------------------------


class _Matrix(NamedTuple):
    """Integers and the order that they are in: 0, or the block of the kernel's."""

    weight: Tensor
    scales: Tensor
    block: int

    @property
    def kind(self) -> str:
        return "int8" if self.weight.dtype == torch.int8 else "int4"

    @property
    def shape(self) -> tuple[int, int]:
        outputs, columns = self.weight.shape
        return outputs, columns if self.kind == "int8" else 2 * columns

    def tile(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """The dequantised weights of some outputs, (K, n). They are computed in fp32 at least."""
        wide = torch.promote_types(dtype, torch.float32)
        if self.kind == "int8":
            q_NK, scale_N = self.weight[first:last], self.scales[first:last]
            return (q_NK.to(wide) * scale_N.to(wide)[:, None]).to(dtype).t()
        scale_GN, zero_GN = self.scales[:, first:last].to(wide).unbind(-1)
        q_KN = _integers(self.weight, self.block, first, last, wide)
        q_GJN = q_KN.unflatten(0, (-1, GROUP))
        return (
            torch.addcmul((zero_GN - 8 * scale_GN)[:, None], q_GJN, scale_GN[:, None])
            .flatten(0, 1)
            .to(dtype)
        )

    def has_kernel(self, x: Tensor) -> bool:
        """Whether PyTorch's kernels multiply these integers with few rows like x."""
        if not (x.is_cpu and self.weight.is_cpu):
            return False
        return self.kind == "int8" or self.block > 0

    def product(self, x_MK: Tensor) -> Tensor:
        """``x W^T``, (M, N)."""
        rows, ops = len(x_MK), torch.ops.aten
        if 0 < rows <= MOST_ROWS[self.kind] and self.has_kernel(x_MK):
            # With other dtypes than bf16 the kernels take a path that is fifty times slower.
            x, scales = x_MK.to(torch.bfloat16), self.scales.to(torch.bfloat16)
            if self.kind == "int8":
                out = ops._weight_int8pack_mm(x, self.weight, scales)
            else:
                out = ops._weight_int4pack_mm_for_cpu(x.contiguous(), self.weight, GROUP, scales)
            return out.to(x_MK.dtype)
        dtype = _product_dtype(x_MK)
        x, (outputs, inputs) = x_MK.to(dtype), self.shape
        parts = [x @ self.tile(*tile, dtype) for tile in _tiles(outputs, inputs, self.block)]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return out.to(x_MK.dtype)

    def back(self, y_MN: Tensor) -> Tensor:
        """``y W``, (M, K): the gradient of the input of a product."""
        dtype = _product_dtype(y_MN)
        y, (outputs, inputs) = y_MN.to(dtype), self.shape
        out = y.new_zeros(len(y), inputs)
        for first, last in _tiles(outputs, inputs, self.block):
            out = out + y[:, first:last] @ self.tile(first, last, dtype).t()
        return out.to(y_MN.dtype)


def _product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of products with many rows: fp32 where PyTorch emulates that of x."""
    return torch.float32 if x.is_cpu and emulates(x.dtype) else x.dtype


class _Product(torch.autograd.Function):
    """``x W^T`` (M, N) with gradients of x, which keeps the integers alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x_MK: Tensor, weight: Tensor, scales: Tensor, block: int) -> Tensor:
        return _Matrix(weight, scales, block).product(x_MK)

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
        return _Product.apply(x_MK, *ctx.saved_tensors, ctx.block)


class _Back(torch.autograd.Function):
    """``y W`` (M, K), so that gradients have gradients too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(y_MN: Tensor, weight: Tensor, scales: Tensor, block: int) -> Tensor:
        return _Matrix(weight, scales, block).back(y_MN)

    setup_context = staticmethod(_Product.setup_context)

    @staticmethod
    def backward(ctx: Any, x_MK: Tensor) -> Any:
        return _Product.apply(x_MK, *ctx.saved_tensors, ctx.block), None, None, None


# --- modules ------------------------------------------------------------------------------------


class Quantised(nn.Module):
    """What quantised maps and embeddings share: integers ``weight``, and ``scales``.

    The scales have the dtype of the model, so that ``model.to(dtype)`` and ``model.dtype`` are as
    ever; those of a file are bf16.

    Attributes:
        weight: Integers, never with a gradient. Those of 4 bits may be in the kernel's order.
        scales: As in :class:`Integers`.
        block: The order of the integers: 0 is that of the rows, else the block of the kernel's.
    """

    weight: nn.Parameter
    scales: nn.Parameter
    block: int = 0

    def _hold(self, integers: Integers) -> None:
        self.weight = nn.Parameter(integers.weight, requires_grad=False)
        self.scales = nn.Parameter(integers.scales, requires_grad=False)
        self.block = 0

    @property
    def matrix(self) -> _Matrix:
        return _Matrix(self.weight, self.scales, self.block)

    @property
    def kind(self) -> str:
        """The format, one of :data:`FORMATS`."""
        return self.matrix.kind

    @torch.no_grad()
    def prepare(self) -> None:
        """Put 4-bit integers into the order of this CPU's kernel, if it has a fast one."""
        self.weight.requires_grad_(False)
        self.scales.requires_grad_(False)
        if self.kind == "int4" and not self.block and self.weight.is_cpu and instructions():
            self.block = BLOCKS[instructions().upper()]  # type: ignore[union-attr]
            tiles = _tiles(*self.matrix.shape, self.block)
            self.weight.data = torch.cat([_ordered(self.weight[a:b]) for a, b in tiles])

    @torch.no_grad()
    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weights (N, K) as numbers of a dtype."""
        tiles = _tiles(*self.matrix.shape, self.block)
        return torch.cat([self.matrix.tile(*tile, dtype).t() for tile in tiles])

    @torch.no_grad()
    def plain(self) -> Tensor:
        """The integers in the order of the rows, which does not depend on the processor."""
        return _plain(self.weight, self.block) if self.block else self.weight.detach()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.block:
            destination[f"{prefix}weight"] = self.plain()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        given = state_dict.get(f"{prefix}weight")
        block = self.block
        if given is not None and not given.dtype.is_floating_point:
            self.block = 0
        super()._load_from_state_dict(state_dict, prefix, *args)
        if block:
            self.prepare()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.kind}"


class QuantisedLinear(Quantised, nn.Linear):
    """``y = x W^T + b`` with W in integers, for x (..., K); outputs have the dtype of x.

    Args:
        integers: The weights.
        like: Linear map that it replaces; its bias moves here.
    """

    def __init__(self, integers: Integers, like: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.replaces = type(like)
        self._hold(integers)
        self.out_features, self.in_features = self.matrix.shape
        self.register_parameter("bias", like.bias)

    def forward(self, input: Tensor) -> Tensor:
        x_MK = input.reshape(-1, self.in_features)
        if torch.is_autocast_enabled(x_MK.device.type):
            x_MK = x_MK.to(torch.get_autocast_dtype(x_MK.device.type))
        if torch.is_grad_enabled() and x_MK.requires_grad:
            y_MN = _Product.apply(x_MK, self.weight, self.scales, self.block)
        else:
            y_MN = self.matrix.product(x_MK)
        if self.bias is not None:
            y_MN = y_MN + self.bias.to(y_MN.dtype)
        return y_MN.view(*input.shape[:-1], self.out_features)

    def original(self, dtype: torch.dtype) -> nn.Linear:
        """The map that this one replaces, with the dequantised weights."""
        sizes: Any = self.in_features, self.out_features
        made = self.replaces(*sizes, bias=self.bias is not None, device="meta")
        made.weight = nn.Parameter(self.dequantised(dtype))
        if self.bias is not None:
            made.bias = nn.Parameter(self.bias.detach().to(dtype))
        return made


def _direct(module: QuantisedLinear) -> Callable[[Tensor], Tensor]:
    """The output of a map for few rows (M, K), in one call of a kernel if that serves."""
    weight, scales, most = module.weight, module.scales, MOST_ROWS[module.kind]
    if scales.dtype != torch.bfloat16 or module.bias is not None:
        return module
    if not module.matrix.has_kernel(scales):
        return module
    four, eight = torch.ops.aten._weight_int4pack_mm_for_cpu, torch.ops.aten._weight_int8pack_mm
    if module.kind == "int8":
        kernel = eight.default
        return lambda x: kernel(x.contiguous(), weight, scales) if len(x) <= most else module(x)
    kernel = four.default
    return lambda x: kernel(x.contiguous(), weight, GROUP, scales) if len(x) <= most else module(x)


MAPS[QuantisedLinear] = _direct


class QuantisedEmbedding(Quantised, nn.Embedding):
    """Rows of a matrix in 8 bits, for ids (...): (..., K) in the dtype of the scales.

    Args:
        integers: The weights, ``int8``.
        like: Embedding that it replaces. Gemma's are multiplied by a number.
    """

    def __init__(self, integers: Integers, like: nn.Embedding) -> None:
        nn.Module.__init__(self)
        self.replaces, self.padding_idx = type(like), like.padding_idx
        self.embed_scale = getattr(like, "scalar_embed_scale", None)
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = (
            None,
            2.0,
            False,
            False,
        )
        self._hold(integers)
        self.num_embeddings, self.embedding_dim = self.matrix.shape

    def forward(self, input: Tensor) -> Tensor:
        rows = F.embedding(input, self.weight)
        out = rows.to(self.scales.dtype) * self.scales[input][..., None]
        return out if self.embed_scale is None else out * out.new_full((), self.embed_scale)

    def original(self, dtype: torch.dtype) -> nn.Embedding:
        """The embedding that this one replaces, with the dequantised weights."""
        given: Any = {} if self.embed_scale is None else {"embed_scale": self.embed_scale}
        with torch.device("meta"):
            made = self.replaces(self.num_embeddings, self.embedding_dim, self.padding_idx, **given)
        made.weight = nn.Parameter(self.dequantised(dtype))
        if self.embed_scale is not None:
            made.embed_scale = torch.tensor(self.embed_scale, device=self.weight.device)
        return made


def quantisable(model: nn.Module) -> dict[str, Any]:
    """The maps and embeddings whose weights may be integers, by name: all but the latents'."""
    kept = {id(x) for m in model.modules() if isinstance(m, LatentLogits) for x in m.modules()}
    return {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Linear | nn.Embedding) and id(module) not in kept
    }
