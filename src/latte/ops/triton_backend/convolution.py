"""The causal depthwise convolution on kernels, forward and backward. The inputs are saved.

    y_t = bias + sum_i w_i x_{t-K+1+i}           i = 0..K-1
    dx_s = sum_i w_i dy_{s+K-1-i}                dw_i = sum_s x_s dy_{s+K-1-i}

The initial state has the tokens at positions -P..-1 of its sequence, P = K - 1. The final state has
the last P tokens. Every program processes a chunk of one sequence. Taps read tokens of neighbouring
chunks (from the cache), but never of another sequence. Masked inputs are 0.

Shape suffixes: B batch, T tokens, E channels (of a tile), K taps, P = K - 1, N sequences, M chunks
of all sequences, C tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from latte.ops.arguments import Convolution
from latte.ops.custom_ops import differentiable_op, empty_gradients
from latte.ops.tensors import count_sequences
from latte.ops.triton_backend.launch import (
    CONVOLUTION, CONVOLUTION_WARPS, contiguous, launch, readable,
)  # fmt: skip
from latte.ops.triton_backend.segments import Parts
from latte.ops.triton_backend.tiles import SIZES, bounds_of, place, store_steps


class _Call:
    """The sizes of one call, and its launches."""

    def __init__(self, x: Tensor, weight: Tensor, cu_seqlens: Tensor | None) -> None:
        self.x, self.strides = x, x.stride()
        (self.B, self.T, self.E), self.K = x.shape, weight.shape[1]
        self.chunks = Parts.of(self.B, self.T, CONVOLUTION["C"], cu_seqlens)
        self.tiles = -(-self.E // CONVOLUTION["BE"])
        self.slots = 1 << max(0, self.K - 2).bit_length()  # number of slots of a tail, padded

    def by_chunk(self, kernel: Any, *args: Any) -> None:
        sizes = (self.T, self.chunks.per_row, self.E)
        self._launch(kernel, self.chunks.M, *args, *sizes, C=CONVOLUTION["C"])

    def by_sequence(self, kernel: Any, *args: Any) -> None:
        self._launch(kernel, self.chunks.N, *args, self.T, self.E, BP=self.slots)

    def _launch(self, kernel: Any, programs: int, *args: Any, **sizes: int) -> None:
        options = {"BE": CONVOLUTION["BE"], "K": self.K, "num_warps": CONVOLUTION_WARPS}
        launch(self.x.device, kernel[programs, self.tiles], *args, **sizes, **options)


def forward(x: Convolution) -> tuple[Tensor, Tensor]:
    """y and the new tail."""
    call, mask = _Call(x.x, x.weight, x.cu_seqlens), readable(x.key_mask)
    (out,) = empty_gradients(x.x)
    tail = x.x.new_empty((call.chunks.N, call.K - 1, call.E))
    bias_E, earlier = contiguous(x.bias, x.initial_state)
    inputs = (x.x, x.weight.contiguous(), bias_E, mask, call.chunks.table, call.chunks.bounds)
    call.by_chunk(convolve, *inputs, earlier, out, *call.strides)
    if call.K > 1:
        tensors = (x.x, mask, call.chunks.bounds, earlier, tail)
        call.by_sequence(final_tail, *tensors, *call.strides)
    return out, tail


def fake(x: Convolution) -> tuple[Tensor, ...]:
    N = count_sequences(x.x.shape[0], x.cu_seqlens)
    return *empty_gradients(x.x), x.x.new_empty((N, x.weight.shape[1] - 1, x.x.shape[2]))


def backward(x: Convolution, dout: Tensor, dtail: Tensor) -> dict[str, Tensor]:
    """Gradients of x, weight, bias and the initial state."""
    call, mask = _Call(x.x, x.weight, x.cu_seqlens), readable(x.key_mask)
    (dx,) = empty_gradients(x.x)
    weight_EK, dtail = x.weight.contiguous(), dtail.float().contiguous()
    dinitial = torch.empty_like(dtail)
    parts = dtail.new_empty((call.chunks.M, call.K, call.E))
    bias_parts = dtail.new_empty((call.chunks.M, call.E))
    call.by_chunk(
        convolve_back,
        *(x.x, weight_EK, mask, call.chunks.table, call.chunks.bounds, dout, dtail),
        *(dx, parts, bias_parts),
        *(*call.strides, *dout.stride()),
    )
    dweight = parts.sum(0)
    if x.initial_state is not None and call.K > 1:
        parts = dtail.new_empty((call.chunks.N, call.K, call.E))
        call.by_sequence(
            tail_gradients,
            *(weight_EK, call.chunks.bounds, x.initial_state.contiguous()),
            *(dout, dtail, dinitial, parts, *dout.stride()),
        )
        dweight += parts.sum(0)
    found = {"x": dx, "weight": dweight.t().contiguous(), "initial_state": dinitial}
    return found if x.bias is None else found | {"bias": bias_parts.sum(0)}


convolution_op = differentiable_op(
    "triton_convolution",
    Convolution,
    fake,
    forward,
    backward,
    returns=["out", "tail"],
    gradients=["x", "weight", "bias", "initial_state"],
)


@triton.jit
def load_with_tail(x_ptr, mask_ptr, tail_ptr, x_t, x_e, t, begin, stop, e, E, P):
    """(C, E) in fp32 of the tokens ``t``, from the initial state before ``begin``; else zeros."""
    own = (t >= begin) & (t < stop)
    if mask_ptr is not None:
        own = tl.load(mask_ptr + t, mask=own, other=0) != 0
    inside = (e < E)[None, :]
    at = x_ptr + t[:, None] * x_t + e[None, :].to(tl.int64) * x_e
    x = tl.load(at, mask=own[:, None] & inside, other=0.0).to(tl.float32)
    if tail_ptr is not None:
        slot = t - begin + P
        old = ((t < begin) & (slot >= 0))[:, None] & inside
        earlier = tl.load(tail_ptr + slot[:, None] * E + e[None, :], mask=old, other=0.0)
        x += earlier.to(tl.float32)
    return x


@triton.jit
def load_taps(w_ptr, i, e, E, K: tl.constexpr):
    """w_i (E,) in fp32."""
    return tl.load(w_ptr + e * K + i, mask=e < E, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=SIZES)
def convolve(
    x_ptr, w_ptr, bias_ptr, mask_ptr, table_ptr, bounds_ptr, tail_ptr, out_ptr,
    x_b, x_t, x_e,
    T, per_row, E, C: tl.constexpr, BE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """y, contiguous (B, T, E)."""
    m = tl.program_id(0)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    batch, start, stop, n = place(m, table_ptr, T, per_row, C)
    if start >= stop:
        return
    begin, stop = bounds_of(n, batch, bounds_ptr, T)
    if mask_ptr is not None:
        mask_ptr += batch * T
    if tail_ptr is not None:
        tail_ptr += n * (K - 1) * E
    t = start + tl.arange(0, C)
    y = tl.zeros((C, BE), tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)[None, :]
    for i in range(0, K):
        back = K - 1 - i
        x = load_with_tail(
            x_ptr + batch * x_b, mask_ptr, tail_ptr, x_t, x_e, t - back, begin, stop, e, E, K - 1
        )
        y += load_taps(w_ptr, i, e, E, K)[None, :] * x
    store_steps(out_ptr + batch * T * E, t, stop, e, E, y)


@triton.jit(do_not_specialize=SIZES)
def final_tail(
    x_ptr, mask_ptr, bounds_ptr, tail_ptr, out_ptr,
    x_b, x_t, x_e,
    T, E, BP: tl.constexpr, BE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The last P inputs of every sequence, (N, P, E)."""
    n = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    batch = n
    if bounds_ptr is not None:
        batch = n * 0
    begin, stop = bounds_of(n, batch, bounds_ptr, T)
    if mask_ptr is not None:
        mask_ptr += batch * T
    if tail_ptr is not None:
        tail_ptr += n * (K - 1) * E
    j = tl.arange(0, BP)
    t = tl.where(j < K - 1, stop - (K - 1) + j, stop)
    x = load_with_tail(
        x_ptr + batch * x_b, mask_ptr, tail_ptr, x_t, x_e, t, begin, stop, e, E, K - 1
    )
    store_steps(out_ptr + n * (K - 1) * E, j, K - 1, e, E, x)


@triton.jit
def pull_back(
    x, w_ptr, dy_ptr, dtail_ptr, dw_ptr, dy_t, dy_e, s, begin, stop, e, E, K: tl.constexpr
):
    """dx (C, E) of the tokens ``s``, and their part of dw, written as (K, E).

    ``dy_ptr`` points to the batch entry. ``dtail_ptr`` (P, E) is the final state's gradient, or
    None.
    """
    dx = tl.zeros(x.shape, tl.float32)
    inside = (e < E)[None, :]
    if dtail_ptr is not None:
        slot = s - stop + (K - 1)
        kept = ((slot >= 0) & (s < stop))[:, None] & inside
        dx += tl.load(dtail_ptr + slot[:, None] * E + e[None, :], mask=kept, other=0.0)
    for i in range(0, K):
        t = s + (K - 1 - i)
        reached = ((t >= begin) & (t < stop))[:, None] & inside
        at = dy_ptr + t[:, None] * dy_t + e[None, :].to(tl.int64) * dy_e
        dy = tl.load(at, mask=reached, other=0.0).to(tl.float32)
        dx += load_taps(w_ptr, i, e, E, K)[None, :] * dy
        tl.store(dw_ptr + i * E + e, tl.sum(x * dy, 0), mask=e < E)
    return dx


@triton.jit(do_not_specialize=SIZES)
def convolve_back(
    x_ptr, w_ptr, mask_ptr, table_ptr, bounds_ptr, dy_ptr, dtail_ptr,
    dx_ptr, dw_ptr, dbias_ptr,
    x_b, x_t, x_e, dy_b, dy_t, dy_e,
    T, per_row, E, C: tl.constexpr, BE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """dx, contiguous (B, T, E); each chunk's part of dw, (M, K, E), and of dbias, (M, E)."""
    m = tl.program_id(0)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    batch, start, stop, n = place(m, table_ptr, T, per_row, C)
    i = m.to(tl.int64)
    dw_ptr += i * K * E
    if start >= stop:
        for k in range(0, K):
            tl.store(dw_ptr + k * E + e, tl.zeros((BE,), tl.float32), mask=e < E)
        tl.store(dbias_ptr + i * E + e, tl.zeros((BE,), tl.float32), mask=e < E)
        return
    begin, stop = bounds_of(n, batch, bounds_ptr, T)
    if mask_ptr is not None:
        mask_ptr += batch * T
    if dtail_ptr is not None:
        dtail_ptr += n * (K - 1) * E
    dy_ptr += batch * dy_b
    c = tl.arange(0, C)
    s = start + c
    x = load_with_tail(x_ptr + batch * x_b, mask_ptr, None, x_t, x_e, s, begin, stop, e, E, K - 1)
    dx = pull_back(x, w_ptr, dy_ptr, dtail_ptr, dw_ptr, dy_t, dy_e, s, begin, stop, e, E, K)
    if mask_ptr is not None:
        real = tl.load(mask_ptr + s, mask=s < stop, other=0) != 0
        dx = tl.where(real[:, None], dx, 0.0)
    store_steps(dx_ptr + batch * T * E, s, stop, e, E, dx)
    at = dy_ptr + s[:, None] * dy_t + e[None, :].to(tl.int64) * dy_e
    dy = tl.load(at, mask=(s < stop)[:, None] & (e < E)[None, :], other=0.0).to(tl.float32)
    tl.store(dbias_ptr + i * E + e, tl.sum(dy, 0), mask=e < E)


@triton.jit(do_not_specialize=SIZES)
def tail_gradients(
    w_ptr, bounds_ptr, tail_ptr, dy_ptr, dtail_ptr, dinitial_ptr, dw_ptr,
    dy_b, dy_t, dy_e,
    T, E, BP: tl.constexpr, BE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The initial state's gradient, (N, P, E) in fp32, and its part of dw, (N, K, E)."""
    n = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    batch = n
    if bounds_ptr is not None:
        batch = n * 0
    begin, stop = bounds_of(n, batch, bounds_ptr, T)
    P = K - 1
    j = tl.arange(0, BP)
    s = begin - P + j
    at = n * P * E + j[:, None] * E + e[None, :]
    real = (j < P)[:, None] & (e < E)[None, :]
    x = tl.load(tail_ptr + at, mask=real, other=0.0).to(tl.float32)
    if dtail_ptr is not None:
        dtail_ptr += n * P * E
    dx = pull_back(
        x, w_ptr, dy_ptr + batch * dy_b, dtail_ptr, dw_ptr + n * K * E, dy_t, dy_e, s, begin, stop,
        e, E, K,
    )  # fmt: skip
    tl.store(dinitial_ptr + at, dx, mask=real)
