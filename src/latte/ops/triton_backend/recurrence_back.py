"""The RG-LRU, backward: the state is computed anew from the one before each chunk.

Here ``DOWN`` is the direction of the forward pass; gradients run against it. See
:mod:`latte.ops.triton_backend.recurrence` for the equations and the shape suffixes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from latte.ops.triton_backend.recurrence import (
    GATE_STRENGTH,
    LEAST_DECAY,
    compose_before,
    decays,
    load_steps,
    maps_before,
    sigmoids,
    softplus,
    steps,
    store_steps,
)
from latte.ops.triton_backend.tiles import compose, place


@triton.jit
def first_row(x, C: tl.constexpr):
    """Row 0 of (C, E)."""
    return tl.sum(tl.where((tl.arange(0, C) == 0)[:, None], x, 0.0), 0)


@triton.jit
def load_gradients(dy_ptr, dy_t, dy_e, t, stop, e, E):
    """dh of every token, masked ones too: their output is the state that passes them by."""
    return load_steps(dy_ptr, dy_t, dy_e, t, t < stop, e, E)


@triton.jit
def ends_back(
    r_ptr, theta_ptr, mask_ptr, table_ptr, begins_ptr, dy_ptr,
    decay_ptr, input_ptr,
    r_b, r_t, r_e, dy_b, dy_t, dy_e,
    T, chunks, E, C: tl.constexpr, BE: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
    """(M, E) twice: what each chunk does to the gradient of the state after it."""
    m = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    row, start, stop, n = place(m, table_ptr, T, chunks, C)
    if start >= stop:
        return
    if mask_ptr is not None:
        mask_ptr += row * T
    t, real = steps(mask_ptr, start, stop, C, DOWN)
    theta = tl.load(theta_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    r, _ = sigmoids(load_steps(r_ptr + row * r_b, r_t, r_e, t, real, e, E))
    fresh = t == tl.load(begins_ptr + n)
    a, _ = decays(r, softplus(theta) * GATE_STRENGTH, real, fresh)
    dh = load_gradients(dy_ptr + row * dy_b, dy_t, dy_e, t, stop, e, E)
    A, B = tl.associative_scan((a, a * dh), 0, compose, reverse=True)
    tl.store(decay_ptr + m * E + e, first_row(A, C), mask=e < E)
    tl.store(input_ptr + m * E + e, first_row(B, C), mask=e < E)


@triton.jit
def retreat(
    x_ptr, r_ptr, i_ptr, dy_ptr, dx_ptr, dr_ptr, di_ptr,
    x_t, x_e, r_t, r_e, i_t, i_e, dy_t, dy_e,
    t, real, fresh, strength, h0, g1, stop, e, E, C: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk, from the state before it and the gradient of the state after it.

    Returns the gradient of the state before it, and sum_t dlog a_t r_t: what theta needs.
    """
    x = load_steps(x_ptr, x_t, x_e, t, real, e, E)
    r, not_r = sigmoids(load_steps(r_ptr, r_t, r_e, t, real, e, E))
    i, not_i = sigmoids(load_steps(i_ptr, i_t, i_e, t, real, e, E))
    dh = load_gradients(dy_ptr, dy_t, dy_e, t, stop, e, E)
    a, factor = decays(r, strength, real, fresh)
    _, _, A, B = maps_before(a, factor * i * x)
    before = A * h0[None, :] + B
    ones = tl.full(a.shape, 1.0, tl.float32)
    A, B, later_A, later_B = tl.associative_scan(
        (a, a * dh, ones, a * 0.0), 0, compose_before, reverse=True
    )
    g = dh + later_A * g1[None, :] + later_B
    gated = g * factor
    # Where log a is cut off, where a sequence starts anew and where nothing is real, a is fixed.
    free = real & (fresh == 0)
    moves = free[:, None] & (-r * strength[None, :] <= LEAST_DECAY)
    ratio = a * a / tl.where(factor == 0.0, 1.0, factor)
    dlog_a = tl.where(moves, g * (a * before - i * x * ratio), 0.0)
    store_steps(dx_ptr, t, stop, e, E, gated * i)
    store_steps(di_ptr, t, stop, e, E, gated * x * i * not_i)
    store_steps(dr_ptr, t, stop, e, E, -strength[None, :] * dlog_a * r * not_r)
    return first_row(A, C) * g1 + first_row(B, C), tl.sum(dlog_a * r, 0)


@triton.jit
def slope(theta):
    """d(log a)/d(theta) over r: -8 sigmoid(theta)."""
    rises, _ = sigmoids(theta)
    return rises * -GATE_STRENGTH


@triton.jit
def apply_back(
    x_ptr, r_ptr, i_ptr, theta_ptr, mask_ptr, table_ptr, begins_ptr,
    before_ptr, after_ptr, dy_ptr, dx_ptr, dr_ptr, di_ptr, dtheta_ptr,
    x_b, x_t, x_e, r_b, r_t, r_e, i_b, i_t, i_e, dy_b, dy_t, dy_e,
    T, chunks, E, C: tl.constexpr, BE: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
    """Gradients of x and both gates, contiguous, and each chunk's part of dtheta, (M, E)."""
    m = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    row, start, stop, n = place(m, table_ptr, T, chunks, C)
    if start >= stop:
        tl.store(dtheta_ptr + m * E + e, tl.zeros((BE,), tl.float32), mask=e < E)
        return
    if mask_ptr is not None:
        mask_ptr += row * T
    t, real = steps(mask_ptr, start, stop, C, DOWN)
    theta = tl.load(theta_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    h0 = tl.load(before_ptr + m * E + e, mask=e < E, other=0.0)
    g1 = tl.load(after_ptr + m * E + e, mask=e < E, other=0.0)
    out = row * T * E
    _, dlog = retreat(
        x_ptr + row * x_b, r_ptr + row * r_b, i_ptr + row * i_b, dy_ptr + row * dy_b,
        dx_ptr + out, dr_ptr + out, di_ptr + out, x_t, x_e, r_t, r_e, i_t, i_e, dy_t, dy_e,
        t, real, t == tl.load(begins_ptr + n), softplus(theta) * GATE_STRENGTH, h0, g1, stop, e, E,
        C,
    )  # fmt: skip
    tl.store(dtheta_ptr + m * E + e, slope(theta) * dlog, mask=e < E)


@triton.jit
def walk_back(
    x_ptr, r_ptr, i_ptr, theta_ptr, mask_ptr, begins_ptr,
    before_ptr, final_ptr, dy_ptr, dx_ptr, dr_ptr, di_ptr, dtheta_ptr, dinitial_ptr,
    x_b, x_t, x_e, r_b, r_t, r_e, i_b, i_t, i_e, dy_b, dy_t, dy_e,
    T, chunks, E, C: tl.constexpr, BE: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
    """All gradients in one walk; ``final`` (N, E) is that of the last state, given."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    theta = tl.load(theta_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    strength = softplus(theta) * GATE_STRENGTH
    begins = tl.load(begins_ptr + row)
    if mask_ptr is not None:
        mask_ptr += row * T
    g = tl.load(final_ptr + row * E + e, mask=e < E, other=0.0)
    dlog = tl.zeros((BE,), tl.float32)
    out = row * T * E
    stop = tl.cast(T, tl.int64)
    for j in tl.range(0, chunks):
        chunk = tl.cast(j, tl.int64)
        if not DOWN:
            chunk = chunks - 1 - chunk
        t, real = steps(mask_ptr, chunk * C, stop, C, DOWN)
        h0 = tl.load(before_ptr + (row * chunks + chunk) * E + e, mask=e < E, other=0.0)
        g, part = retreat(
            x_ptr + row * x_b, r_ptr + row * r_b, i_ptr + row * i_b, dy_ptr + row * dy_b,
            dx_ptr + out, dr_ptr + out, di_ptr + out, x_t, x_e, r_t, r_e, i_t, i_e, dy_t, dy_e,
            t, real, t == begins, strength, h0, g, stop, e, E, C,
        )  # fmt: skip
        dlog += part
    tl.store(dtheta_ptr + row * E + e, slope(theta) * dlog, mask=e < E)
    tl.store(dinitial_ptr + row * E + e, g, mask=e < E)
