"""Linear maps and embeddings whose weights are integers of 4 or 8 bits, and stay so.

Integers are never trained. Gradients flow through a map to its input, as for training adapters or
latents over frozen weights. torchao has tensors over the same kernels. On a CPU they have no rule
for many rows, no gradients, and no embedding, so the modules are our own. The products, and what
the integers stand for, are in :mod:`latte.ops.quantised`.

A state dict and a file have the integers in the order of the rows.

Shape suffixes: M rows of the input, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from latte.layers.latents import LatentLogits
from latte.ops.quantised import (
    GROUP,
    MOST_ROWS,
    PANEL,
    Integers,
    Matrix,
    Product,
    best_order,
    in_rows,
    ordered,
    tiles,
)


class Quantised(nn.Module):
    """What quantised maps and embeddings share: integers ``weight``, and ``scales``.

    The scales have the dtype of the model, so that ``model.to(dtype)`` and ``model.dtype`` are as
    ever; those of a file are bf16.

    Attributes:
        weight: Integers, never with a gradient. They may be in the order of a kernel.
        scales: As in :class:`Integers`.
        block: The order of the integers, as in :class:`Matrix`.
    """

    weight: nn.Parameter
    scales: nn.Parameter
    block: int = 0
    replaces: Any  # the class of the module in whose place this one is

    def original(self, dtype: torch.dtype) -> nn.Module:
        """The module that this one replaces, with the dequantised weights."""
        raise NotImplementedError

    def _hold(self, integers: Integers) -> None:
        self.weight = nn.Parameter(integers.weight, requires_grad=False)
        self.scales = nn.Parameter(integers.scales, requires_grad=False)
        self.block = 0

    @property
    def matrix(self) -> Matrix:
        return Matrix(self.weight, self.scales, self.block)

    @property
    def kind(self) -> str:
        """The format, one of :data:`FORMATS`."""
        return self.matrix.kind

    @torch.no_grad()
    def prepare(self) -> None:
        """Put the integers into the order of the fastest kernel of this CPU, if there is one."""
        self.weight.requires_grad_(False)
        self.scales.requires_grad_(False)
        order = best_order(self.kind)
        if order and not self.block and self.weight.is_cpu:
            parts = [self.weight[a:b] for a, b in tiles(*self.matrix.shape, order)]
            self.block = order
            self.weight.data = torch.cat([ordered(part, order) for part in parts])

    @torch.no_grad()
    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weights (N, K) as numbers of a dtype."""
        parts = tiles(*self.matrix.shape, self.block)
        return torch.cat([self.matrix.tile(*part, dtype).t() for part in parts])

    @torch.no_grad()
    def plain(self) -> Tensor:
        """The integers in the order of the rows, which does not depend on the processor."""
        return in_rows(self.weight.detach(), self.block, self.matrix.shape[0])

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.block:
            destination[f"{prefix}weight"] = self.plain()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        given = state_dict.get(f"{prefix}weight")
        block = self.block
        if given is not None and not given.dtype.is_floating_point:
            outputs, columns = self.matrix.shape[0], self.weight.shape[1]
            self.weight.data = self.weight.new_empty(outputs, columns)
            self.block = 0
        super()._load_from_state_dict(state_dict, prefix, *args)
        if block:
            self.prepare()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.kind}"


class QuantisedLinear(Quantised, nn.Linear):  # type: ignore[misc]
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
            y_MN = Product.apply(x_MK, self.weight, self.scales, self.block)
        else:
            y_MN = self.matrix.product(x_MK)
        if self.bias is not None:
            y_MN = y_MN + self.bias.to(y_MN.dtype)
        return y_MN.view(*input.shape[:-1], self.out_features)

    def original(self, dtype: torch.dtype) -> nn.Linear:
        """The map that this one replaces, with the dequantised weights."""
        sizes: Any = self.in_features, self.out_features
        made: Any = self.replaces(*sizes, bias=self.bias is not None, device="meta")
        made.weight = nn.Parameter(self.dequantised(dtype))
        if self.bias is not None:
            made.bias = nn.Parameter(self.bias.detach().to(dtype))
        return made

    def direct(self) -> Callable[[Tensor], Tensor]:
        """The output for few rows (M, K), in one call of PyTorch's kernel if that serves."""
        weight, scales, most = self.weight, self.scales, MOST_ROWS
        if scales.dtype != torch.bfloat16 or self.bias is not None:
            return self
        if not self.matrix.has_kernel(scales):
            return self
        few: Any = torch.ops.aten._weight_int4pack_mm_for_cpu.default
        return lambda x: few(x.contiguous(), weight, GROUP, scales) if len(x) <= most else self(x)

    def native_integers(self) -> tuple[Tensor, Tensor] | None:
        """What the native kernels read of the map, if they can."""
        native = self.block == PANEL and self.bias is None and self.weight.is_cpu
        return (self.weight, self.scales) if native else None


class QuantisedEmbedding(Quantised, nn.Embedding):  # type: ignore[misc]
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
        out = self.matrix.rows(input, self.scales.dtype)
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
