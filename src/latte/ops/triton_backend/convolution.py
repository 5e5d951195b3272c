"""``causal_conv1d`` on Triton kernels: a custom op with closed gradients. The inputs are saved.

Shape suffixes: B batch, T tokens, E channels, K taps, N states, P = K - 1, M chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from latte.ops.buffers import empty_gradients
from latte.ops.precision import full_precision
from latte.ops.triton_backend.launch import Chunks, launch
from latte.ops.triton_backend.states import readable

# Tokens and channels of a tile.
TILE = {"C": 64, "BE": 64}
WARPS = 8


def causal_conv1d(
    x_BTE: Tensor,
    weight_EK: Tensor,
    bias_E: Tensor | None,
    *,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See :func:`latte.ops.causal_conv1d`: y (B, T, E) and the new tail (N, P, E), for T > 0."""
    return convolution_op(x_BTE, weight_EK, bias_E, initial_state, key_mask, cu_seqlens)


class _Call:
    """The sizes of one call, and its launches."""

    def __init__(self, x: Tensor, weight: Tensor, cu_seqlens: Tensor | None) -> None:
        self.x, self.strides = x, x.stride()
        (self.B, self.T, self.E), self.K = x.shape, weight.shape[1]
        self.chunks = Chunks.of(self.B, self.T, TILE["C"], cu_seqlens)
        self.bounds = None if cu_seqlens is None else cu_seqlens.long().contiguous()
        self.tiles = -(-self.E // TILE["BE"])
        self.rows = 1 << max(0, self.K - 2).bit_length()  # of a tail, padded

    def by_chunk(self, kernel: Any, *tensors: Tensor | None, strides: tuple[int, ...]) -> None:
        sizes = (*strides, self.T, self.chunks.per_row, self.E)
        options = {**TILE, "K": self.K, "num_warps": WARPS}
        launch(self.x.device, kernel[self.chunks.M, self.tiles], *tensors, *sizes, **options)

    def by_sequence(self, kernel: Any, *tensors: Tensor | None, strides: tuple[int, ...]) -> None:
        options = {"BP": self.rows, "BE": TILE["BE"], "K": self.K, "num_warps": WARPS}
        grid = (self.chunks.N, self.tiles)
        launch(self.x.device, kernel[grid], *tensors, *strides, self.T, self.E, **options)


@torch.library.custom_op("latte::triton_convolution", mutates_args=())
@full_precision
def convolution_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """y and the new tail."""
    from latte.ops.triton_backend import convolution_kernels as kernels

    call, mask = _Call(x, weight, cu_seqlens), readable(key_mask)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    tail = x.new_empty((call.chunks.N, call.K - 1, call.E))
    earlier = None if initial_state is None else initial_state.contiguous()
    bias_E = None if bias is None else bias.contiguous()
    inputs = (x, weight.contiguous(), bias_E, mask, call.chunks.table, call.bounds, earlier)
    call.by_chunk(kernels.convolve, *inputs, out, strides=call.strides)
    if call.K > 1:
        call.by_sequence(
            kernels.final_tail, x, mask, call.bounds, earlier, tail, strides=call.strides
        )
    return out, tail


@convolution_op.register_fake
def _(x, weight, bias, initial_state, key_mask, cu_seqlens):
    N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, x.new_empty((N, weight.shape[1] - 1, x.shape[2]))


@torch.library.custom_op("latte::triton_convolution_backward", mutates_args=())
@full_precision
def convolution_backward_op(
    dout: Tensor,
    dtail: Tensor,
    x: Tensor,
    weight: Tensor,
    initial_state: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias and the initial state, the last two whether there or not."""
    from latte.ops.triton_backend import convolution_kernels as kernels

    call, mask = _Call(x, weight, cu_seqlens), readable(key_mask)
    (dx,) = empty_gradients(x)
    weight_EK, dtail = weight.contiguous(), dtail.float().contiguous()
    parts = x.new_empty((call.chunks.M, call.K, call.E), dtype=torch.float32)
    bias_parts = x.new_empty((call.chunks.M, call.E), dtype=torch.float32)
    dinitial = torch.empty_like(dtail)
    call.by_chunk(
        kernels.gradients,
        *(x, weight_EK, mask, call.chunks.table, call.bounds, dout, dtail),
        *(dx, parts, bias_parts),
        strides=(*call.strides, *dout.stride()),
    )
    dweight = parts.sum(0)
    if initial_state is not None and call.K > 1:
        parts = x.new_empty((call.chunks.N, call.K, call.E), dtype=torch.float32)
        call.by_sequence(
            kernels.tail_gradients,
            *(weight_EK, call.bounds, initial_state.contiguous(), dout, dtail, dinitial, parts),
            strides=dout.stride(),
        )
        dweight += parts.sum(0)
        dinitial = dinitial.to(initial_state.dtype)
    else:
        dinitial.zero_()
    dweight = dweight.t().contiguous().to(weight.dtype)
    return dx, dweight, bias_parts.sum(0), dinitial


@convolution_backward_op.register_fake
def _(dout, dtail, x, weight, initial_state, key_mask, cu_seqlens):
    dx, dweight = empty_gradients(x, weight)
    dbias = x.new_empty((x.shape[2],), dtype=torch.float32)
    dtype = torch.float32
    if initial_state is not None and weight.shape[1] > 1:
        dtype = initial_state.dtype
    return dx, dweight, dbias, dtail.new_empty(dtail.shape, dtype=dtype)


def _save(ctx, inputs, output):
    x, weight, bias, initial_state, key_mask, cu_seqlens = inputs
    ctx.bias = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight, initial_state, key_mask, cu_seqlens)


def _gradients(ctx, dout, dtail):
    saved = ctx.saved_tensors
    dx, dweight, dbias, dinitial = convolution_backward_op(dout, dtail, *saved)
    earlier = None if saved[2] is None else dinitial.to(saved[2].dtype)
    return dx, dweight, None if ctx.bias is None else dbias.to(ctx.bias), earlier, None, None


convolution_op.register_autograd(_gradients, setup_context=_save)
