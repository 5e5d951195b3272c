"""The causal depthwise convolution, forward and backward.

    y_t = bias + sum_i w_i x_{t-K+1+i}           i = 0..K-1
    dx_s = sum_i w_i dy_{s+K-1-i}                dw_i = sum_s x_s dy_{s+K-1-i}

The initial state is the tokens at positions -P..-1 of its sequence, P = K - 1, and the final state
the last P of all of them. Every program takes a chunk of one sequence: taps reach into its
neighbours (from the cache), never into another sequence. Masked inputs are 0.

Shape suffixes: M chunks of all sequences, C tokens of a chunk, N sequences, E channels (of a tile),
K taps, P = K - 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from latte.ops.triton_backend.recurrence import store_steps
from latte.ops.triton_backend.tiles import place


@triton.jit
def bounds_of(n, row, bounds_ptr, T):
    """First token of a sequence, and the one after its last."""
    if bounds_ptr is None:
        return row * 0, tl.cast(T, tl.int64)
    else:
        return tl.load(bounds_ptr + n).to(tl.int64), tl.load(bounds_ptr + n + 1).to(tl.int64)


@triton.jit
def load_inputs(
    x_ptr, mask_ptr, tail_ptr, x_t, x_e, t, begin, stop, e, E, P
):  # fmt: skip
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


@triton.jit
def convolve(
    x_ptr, w_ptr, bias_ptr, mask_ptr, table_ptr, bounds_ptr, tail_ptr, out_ptr,
    x_b, x_t, x_e,
    T, chunks, E, C: tl.constexpr, BE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """y, contiguous (B, T, E)."""
    m = tl.program_id(0)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    row, start, stop, n = place(m, table_ptr, T, chunks, C)
    if start >= stop:
        return
    begin, stop = bounds_of(n, row, bounds_ptr, T)
    if mask_ptr is not None:
        mask_ptr += row * T
    if tail_ptr is not None:
        tail_ptr += n * (K - 1) * E
    t = start + tl.arange(0, C)
    y = tl.zeros((C, BE), tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)[None, :]
    for i in range(0, K):
        back = K - 1 - i
        x = load_inputs(
            x_ptr + row * x_b, mask_ptr, tail_ptr, x_t, x_e, t - back, begin, stop, e, E, K - 1
        )
        y += load_taps(w_ptr, i, e, E, K)[None, :] * x
    store_steps(out_ptr + row * T * E, t, stop, e, E, y)


@triton.jit
def final_tail(
    x_ptr, mask_ptr, bounds_ptr, tail_ptr, out_ptr,
    x_b, x_t, x_e,
    T, E, BP: tl.constexpr, BE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The last P inputs of every sequence, (N, P, E)."""
    n = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    row = n
    if bounds_ptr is not None:
        row = n * 0
    begin, stop = bounds_of(n, row, bounds_ptr, T)
    if mask_ptr is not None:
        mask_ptr += row * T
    if tail_ptr is not None:
        tail_ptr += n * (K - 1) * E
    j = tl.arange(0, BP)
    t = tl.where(j < K - 1, stop - (K - 1) + j, stop)
    x = load_inputs(x_ptr + row * x_b, mask_ptr, tail_ptr, x_t, x_e, t, begin, stop, e, E, K - 1)
    store_steps(out_ptr + n * (K - 1) * E, j, K - 1, e, E, x)


@triton.jit
def pull_back(
    x, w_ptr, dy_ptr, dtail_ptr, dw_ptr, dy_t, dy_e, s, begin, stop, e, E, K: tl.constexpr
):
    """dx (C, E) of the tokens ``s``, and their part of dw, written as (K, E).

    ``dy_ptr`` is at its row, ``dtail_ptr`` (P, E) the final state's gradient, or None.
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


@triton.jit
def gradients(
    x_ptr, w_ptr, mask_ptr, table_ptr, bounds_ptr, dy_ptr, dtail_ptr,
    dx_ptr, dw_ptr, dbias_ptr,
    x_b, x_t, x_e, dy_b, dy_t, dy_e,
    T, chunks, E, C: tl.constexpr, BE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """dx, contiguous (B, T, E); each chunk's part of dw, (M, K, E), and of dbias, (M, E)."""
    m = tl.program_id(0)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    row, start, stop, n = place(m, table_ptr, T, chunks, C)
    i = m.to(tl.int64)
    dw_ptr += i * K * E
    if start >= stop:
        for k in range(0, K):
            tl.store(dw_ptr + k * E + e, tl.zeros((BE,), tl.float32), mask=e < E)
        tl.store(dbias_ptr + i * E + e, tl.zeros((BE,), tl.float32), mask=e < E)
        return
    begin, stop = bounds_of(n, row, bounds_ptr, T)
    if mask_ptr is not None:
        mask_ptr += row * T
    if dtail_ptr is not None:
        dtail_ptr += n * (K - 1) * E
    dy_ptr += row * dy_b
    c = tl.arange(0, C)
    s = start + c
    x = load_inputs(x_ptr + row * x_b, mask_ptr, None, x_t, x_e, s, begin, stop, e, E, K - 1)
    dx = pull_back(x, w_ptr, dy_ptr, dtail_ptr, dw_ptr, dy_t, dy_e, s, begin, stop, e, E, K)
    if mask_ptr is not None:
        real = tl.load(mask_ptr + s, mask=s < stop, other=0) != 0
        dx = tl.where(real[:, None], dx, 0.0)
    store_steps(dx_ptr + row * T * E, s, stop, e, E, dx)
    at = dy_ptr + s[:, None] * dy_t + e[None, :].to(tl.int64) * dy_e
    dy = tl.load(at, mask=(s < stop)[:, None] & (e < E)[None, :], other=0.0).to(tl.float32)
    tl.store(dbias_ptr + i * E + e, tl.sum(dy, 0), mask=e < E)


@triton.jit
def tail_gradients(
    w_ptr, bounds_ptr, tail_ptr, dy_ptr, dtail_ptr, dinitial_ptr, dw_ptr,
    dy_b, dy_t, dy_e,
    T, E, BP: tl.constexpr, BE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The initial state's gradient, (N, P, E) in fp32, and its part of dw, (N, K, E)."""
    n = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    row = n
    if bounds_ptr is not None:
        row = n * 0
    begin, stop = bounds_of(n, row, bounds_ptr, T)
    P = K - 1
    j = tl.arange(0, BP)
    s = begin - P + j
    at = n * P * E + j[:, None] * E + e[None, :]
    real = (j < P)[:, None] & (e < E)[None, :]
    x = tl.load(tail_ptr + at, mask=real, other=0.0).to(tl.float32)
    if dtail_ptr is not None:
        dtail_ptr += n * P * E
    dx = pull_back(
        x, w_ptr, dy_ptr + row * dy_b, dtail_ptr, dw_ptr + n * K * E, dy_t, dy_e, s, begin, stop,
        e, E, K,
    )  # fmt: skip
    tl.store(dinitial_ptr + at, dx, mask=real)
