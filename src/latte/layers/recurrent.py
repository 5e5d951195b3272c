"""The RG-LRU of Griffin (arXiv 2402.19427, section 2.4): the bare recurrent layer.

Shape suffixes: B batch, T tokens, E channels, N blocks, P channels per block.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from latte.layers.checks import check_input, check_multiple
from latte.layers.context_parallel import ShardedOps, across
from latte.layers.latent_fields import LatentFields, check_decay_range
from latte.layers.native import READ, is_hooked
from latte.layers.parts import InitializedModule, RMSNorm
from latte.layers.projections import cast
from latte.layers.recomputation import NOTHING, recomputed
from latte.ops import rg_lru
from latte.ops.backend import named_backend
from latte.ops.custom_ops import check_first_order
from latte.ops.step import in_dtype, rg_lru_step
from latte.ops.tensors import computation_dtype, full_precision, on_gpu, product_dtype

DECAY_RANGE = LatentFields.rglru_decay_range


class BlockDiagonalLinear(InitializedModule):
    """An affine map of N independent blocks of E/N channels."""

    def __init__(self, hidden_size: int, num_blocks: int) -> None:
        super().__init__()
        check_multiple("BlockDiagonalLinear", hidden_size=hidden_size, num_blocks=num_blocks)
        width = hidden_size // num_blocks
        self.weight = nn.Parameter(torch.empty(num_blocks, width, width))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        weight = torch.empty_like(self.weight).normal_(std=1.0 / math.sqrt(self.weight.shape[-1]))
        return {"weight": weight, "bias": torch.zeros_like(self.bias)}

    def forward(self, x_BTE: Tensor) -> Tensor:
        (N, P, _), (B, T, E) = self.weight.shape, x_BTE.shape
        x_NMP = x_BTE.reshape(-1, N, P).transpose(0, 1)
        y_NMP = torch.baddbmm(self.bias.view(N, 1, P), x_NMP, self.weight)
        return y_NMP.transpose(0, 1).reshape(B, T, E)

    def step(self, x_NBP: Tensor) -> Tensor:
        """The same for single tokens given by blocks, (B, E), in at least fp32."""
        N, B, P = x_NBP.shape
        wide = computation_dtype(x_NBP.dtype)  # a CPU's batched products in bf16 take twice as long
        bias, x_NBP, weight = (in_dtype(y, wide) for y in (self.bias, x_NBP, self.weight))
        y_NBP = torch.baddbmm(bias.view(N, 1, P), x_NBP, weight)
        return y_NBP.transpose(0, 1).reshape(B, N * P)

    def extra_repr(self) -> str:
        return f"hidden_size={self.bias.shape[0]}, num_blocks={self.weight.shape[0]}"


class _Gates(torch.autograd.Function):
    """Two :class:`BlockDiagonalLinear` of one input, as a GPU computes them without copies.

    The products are in ``dtype``, and read and write the blocks where they are in (B, T, E). Biases
    are added in at least the gates' dtype. The third output is x, for the recurrence: both gates
    add to its gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, x: Tensor, *affine: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``affine`` are the weight and the bias of each gate."""
        ctx.dtype, N = affine[0].dtype, len(affine[0])
        low, weights = x.to(dtype).contiguous(), cast(dtype, *affine[::2])
        ctx.save_for_backward(low, *weights)
        gates = []
        for w, b in zip(weights, affine[1::2], strict=True):
            product = torch.empty_like(low)
            torch.bmm(_blocks(low, N), w, out=_blocks(product, N))
            gates.append((product + b).to(x.dtype))
        return *gates, x  # type: ignore[return-value]

    @staticmethod
    @full_precision
    def backward(ctx: Any, dr: Tensor, di: Tensor, dx: Tensor) -> tuple[Tensor | None, ...]:
        check_first_order("the gates of the RG-LRU")
        x, weight, weight2 = ctx.saved_tensors
        db, db2 = (y.flatten(0, -2).sum(0, dtype=ctx.dtype) for y in (dr, di))
        (dr, di), dx, N = cast(x.dtype, dr, di), dx.contiguous(), len(weight)
        # The recurrence alone has read x, so that its gradient of x may be overwritten.
        lowered = dx.dtype != x.dtype
        own = torch.empty_like(x) if lowered else dx
        dr_NMP, di_NMP, own_NMP = (_blocks(y.contiguous(), N) for y in (dr, di, own))
        if lowered:
            torch.bmm(dr_NMP, weight.mT, out=own_NMP)
        else:
            own_NMP.baddbmm_(dr_NMP, weight.mT)
        own_NMP.baddbmm_(di_NMP, weight2.mT)
        x_NPM = _blocks(x, N).mT
        dw, dw2 = cast(ctx.dtype, *(torch.bmm(x_NPM, y) for y in (dr_NMP, di_NMP)))
        if lowered:
            dx.add_(own)
        return None, dx, dw, db, dw2, db2


def _blocks(x_BTE: Tensor, N: int) -> Tensor:
    """A view of the channels' blocks, (N, B T, P)."""
    return x_BTE.view(-1, N, x_BTE.shape[-1] // N).transpose(0, 1)


class RGLRU(InitializedModule):
    """Real-gated linear recurrent unit.

        r_t = sigmoid(R x_t),  i_t = sigmoid(I x_t)       block-diagonal affine maps
        log a_t = -8 r_t softplus(theta)
        h_t = a_t h_{t-1} + sqrt(1 - a_t^2) (i_t x_t)     at a sequence's start h_t = i_t x_t

    Initially, the decay at r = 1, a = exp(-8 softplus(theta)), is drawn from ``decay_range`` with
    a^2 uniform. The state h is fp32.

    Args:
        num_blocks: Number of blocks of the gates' maps. The models use the number of heads.
        reverse: Whether to run from the end to the start, for bidirectional models. There is no
            state then.
        decay_range: Lowest and highest initial decay a, both inside (0, 1). A channel with decay a
            averages over about 1 / (1 - a) tokens.
    """

    stepped = ("recurrence_gate", "input_gate")

    def __init__(
        self,
        hidden_size: int,
        num_blocks: int = 1,
        *,
        reverse: bool = False,
        decay_range: Sequence[float] = DECAY_RANGE,
    ) -> None:
        super().__init__()
        check_decay_range("RGLRU: decay_range", decay_range)
        self.hidden_size, self.reverse = hidden_size, reverse
        self.decay_range = decay_range
        self.recurrence_gate = BlockDiagonalLinear(hidden_size, num_blocks)
        self.input_gate = BlockDiagonalLinear(hidden_size, num_blocks)
        self.theta = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        """A fresh draw of theta: softplus(theta) = -log(a) / 8 with a^2 uniform."""
        squares = torch.empty_like(self.theta, dtype=torch.float32)
        low, high = self.decay_range
        squares.uniform_(low**2, high**2)
        squares.clamp_max_(1 - 2**-24)  # the largest below 1 in fp32: a decay of 1 cannot learn
        return {"theta": torch.log(torch.expm1(-0.5 * torch.log(squares) / 8.0))}

    def forward(
        self,
        x_BTE: Tensor,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: Tensor | None = None,
        output_final_state: bool = False,
        *,
        shards: ShardedOps | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Output (B, T, E) and the state (B, E) fp32 (None unless ``output_final_state``)."""
        check_input("RGLRU", x_BTE, self.hidden_size, self.recurrence_gate.weight)
        dtype = x_BTE.dtype

        def gate(affine: nn.Module) -> Tensor:
            return affine(x_BTE).to(dtype)  # autocast may have lowered it

        parts = self.recurrence_gate, self.input_gate, self
        gpu = on_gpu(x_BTE) and named_backend() != "reference"
        again: tuple[Any, ...] = ()
        own = (gpu or torch.is_grad_enabled()) and tuple(map(type, parts)) == STEP_KINDS[:3]
        own = own and not any(map(is_hooked, parts))
        if own and gpu:
            r, i, x_BTE = self._both_gates(x_BTE)
        else:
            r, i = self.recurrence_gate(x_BTE).to(dtype), self.input_gate(x_BTE).to(dtype)
        if r.requires_grad and own:
            makers = (functools.partial(gate, part) for part in parts[:2])
            again = tuple(zip((r, i), makers, strict=True))
        op = rg_lru if shards is None else across(rg_lru, shards)
        with recomputed(*again) if again else NOTHING:
            return op(
                x_BTE,
                r,
                i,
                self.theta,
                key_mask=key_mask,
                cu_seqlens=cu_seqlens,
                initial_state=state,
                output_final_state=output_final_state,
                reverse=self.reverse,
            )

    def _both_gates(self, x_BTE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Both gates, (B, T, E), and x: in fewer launches than by the modules."""
        parts = self.recurrence_gate, self.input_gate
        affine = [y for part in parts for y in (part.weight, part.bias)]
        return _Gates.apply(product_dtype(x_BTE), x_BTE, *affine)  # type: ignore[no-any-return]

    def step(self, x_BE: Tensor, state_BE: Tensor, real_B: Tensor | None) -> Tensor:
        """Read one token per row. Returns the new state, which is also written in place."""
        x_NBP = x_BE.view(len(x_BE), *self.input_gate.weight.shape[:2]).transpose(0, 1)
        gates = self.recurrence_gate.step(x_NBP), self.input_gate.step(x_NBP)
        return rg_lru_step(x_BE, *gates, self.theta, state_BE, real_B)

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, reverse={self.reverse}"


READ |= {BlockDiagonalLinear: ("weight", "bias"), RGLRU: ("theta",)}
# One kernel computes both gates, the recurrence, and the norm of its state.
STEP_KINDS = BlockDiagonalLinear, BlockDiagonalLinear, RGLRU, RMSNorm
