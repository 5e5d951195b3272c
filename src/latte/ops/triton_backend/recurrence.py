"""The RG-LRU with its gates fused: one scan forward, two scans backward.

    r, i = sigmoid(recurrence gate), sigmoid(input gate)
    log a_t = -8 r_t softplus(theta),  h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t x_t
    g_t = dh_t + a_{t+1} g_{t+1}       the gradient that reaches h_t
    dlog a_t = g_t (a_t h_{t-1} - i_t x_t a_t^2 / sqrt(1 - a_t^2))

A stretch of time is an affine map of the state, h -> A h + B, and stretches compose. Where rows and
channels fill the GPU one program walks over a sequence (``walk``, ``walk_back``: each input is read
once); where they do not, every chunk has a program: ``ends`` and ``ends_back`` find each chunk's
map, ``carry`` composes them, ``apply`` and ``apply_back`` write the results.

``DOWN`` walks from the end of a sequence to its beginning. A masked token is the identity.
``begins`` (N,) is the token at which a sequence starts anew (a = 0, factor 1), -1 if it carries on.

Shape suffixes: M chunks of all sequences, C tokens of a chunk, U chunks of a round, N sequences,
E channels (of a tile).
"""

from __future__ import annotations

import triton
import triton.language as tl

from latte.ops.triton_backend.tiles import chunks_of, compose, place

# As in latte.ops.recurrence: Griffin's constant c, and a log a that is never quite 0.
GATE_STRENGTH = tl.constexpr(8.0)
LEAST_DECAY = tl.constexpr(-1.1754943508222875e-38)


@triton.jit
def log1p_of_share(e):
    """log(1 + e) for 0 <= e <= 1, as 2 artanh(e / (2 + e)): full precision also for small e."""
    z = e / (2.0 + e)
    s = z * z
    p = 1.0 / 15.0
    p = p * s + 1.0 / 13.0
    p = p * s + 1.0 / 11.0
    p = p * s + 1.0 / 9.0
    p = p * s + 1.0 / 7.0
    p = p * s + 1.0 / 5.0
    p = p * s + 1.0 / 3.0
    return 2.0 * z * (p * s + 1.0)


@triton.jit
def one_minus_square(a, u):
    """1 - a^2 for a^2 = exp(-u), u >= 0, without cancellation for small u."""
    p = 1.0 - u * (1.0 / 9.0)
    p = 1.0 - u * (1.0 / 8.0) * p
    p = 1.0 - u * (1.0 / 7.0) * p
    p = 1.0 - u * (1.0 / 6.0) * p
    p = 1.0 - u * (1.0 / 5.0) * p
    p = 1.0 - u * (1.0 / 4.0) * p
    p = 1.0 - u * (1.0 / 3.0) * p
    p = 1.0 - u * (1.0 / 2.0) * p
    return tl.where(u < 0.5, u * p, 1.0 - a * a)


@triton.jit
def softplus(theta):
    """log(1 + e^theta)."""
    return tl.maximum(theta, 0.0) + log1p_of_share(tl.exp(-tl.abs(theta)))


@triton.jit
def sigmoids(logit):
    """sigmoid(logit) and 1 - sigmoid(logit), each without cancellation or overflow."""
    e = tl.exp(-tl.abs(logit))
    larger = 1.0 / (1.0 + e)
    smaller = e * larger
    return tl.where(logit >= 0, larger, smaller), tl.where(logit >= 0, smaller, larger)


@triton.jit
def compose_before(a1, b1, pa1, pb1, a2, b2, pa2, pb2):
    """:func:`compose`, and beside it the map of all but the last element (1, 0 for one alone)."""
    return a1 * a2, a2 * b1 + b2, a1 * pa2, pa2 * b1 + pb2


@triton.jit
def maps_before(a, b):
    """Of each row of (C, E) maps: those up to it, and those before it."""
    return tl.associative_scan(
        (a, b, tl.full(a.shape, 1.0, tl.float32), b * 0.0), 0, compose_before
    )


@triton.jit
def last_row(x, C: tl.constexpr):
    """Row C - 1 of (C, E)."""
    return tl.sum(tl.where((tl.arange(0, C) == C - 1)[:, None], x, 0.0), 0)


@triton.jit
def steps(mask_ptr, start, stop, C: tl.constexpr, DOWN: tl.constexpr):
    """Of a chunk's tokens, in the order of the walk: where they are, and which of them are real."""
    c = tl.arange(0, C)
    if DOWN:
        t = start + (C - 1) - c
    else:
        t = start + c
    real = t < stop
    if mask_ptr is not None:
        real = tl.load(mask_ptr + t, mask=real, other=0) != 0
    return t, real


@triton.jit
def load_steps(ptr, stride_t, stride_e, t, real, e, E):
    """(C, E) in fp32; zeros where nothing real is."""
    at = ptr + t[:, None] * stride_t + e[None, :].to(tl.int64) * stride_e
    return tl.load(at, mask=real[:, None] & (e < E)[None, :], other=0.0).to(tl.float32)


@triton.jit
def store_steps(ptr, t, stop, e, E, value):
    """Write (C, E) into a row of contiguous (T, E)."""
    at = ptr + t[:, None] * E + e[None, :]
    tl.store(at, value.to(ptr.dtype.element_ty), mask=(t < stop)[:, None] & (e < E)[None, :])


@triton.jit
def decays(r, strength, real, fresh):
    """a and sqrt(1 - a^2): 1 and 0 for what is not real, 0 and 1 where a sequence starts anew."""
    log_a = tl.minimum(-r * strength[None, :], LEAST_DECAY)
    a = tl.exp(log_a)
    factor = tl.sqrt(one_minus_square(a, -2.0 * log_a))
    a = tl.where(fresh[:, None], 0.0, a)
    factor = tl.where(fresh[:, None], 1.0, factor)
    return tl.where(real[:, None], a, 1.0), tl.where(real[:, None], factor, 0.0)


@triton.jit
def advance(
    x_ptr, r_ptr, i_ptr, x_t, x_e, r_t, r_e, i_t, i_e,
    t, real, fresh, strength, e, E,
):  # fmt: skip
    """The maps of a chunk's tokens up to each of them: (A, B), (C, E) each."""
    r, _ = sigmoids(load_steps(r_ptr, r_t, r_e, t, real, e, E))
    i, _ = sigmoids(load_steps(i_ptr, i_t, i_e, t, real, e, E))
    a, factor = decays(r, strength, real, fresh)
    return tl.associative_scan(
        (a, factor * i * load_steps(x_ptr, x_t, x_e, t, real, e, E)), 0, compose
    )


@triton.jit
def ends(
    x_ptr, r_ptr, i_ptr, theta_ptr, mask_ptr, table_ptr, begins_ptr,
    decay_ptr, input_ptr,
    x_b, x_t, x_e, r_b, r_t, r_e, i_b, i_t, i_e,
    T, chunks, E, C: tl.constexpr, BE: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
    """(M, E) twice: what each chunk does to the state, h -> decay h + input."""
    m = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    row, start, stop, n = place(m, table_ptr, T, chunks, C)
    if start >= stop:
        return
    if mask_ptr is not None:
        mask_ptr += row * T
    t, real = steps(mask_ptr, start, stop, C, DOWN)
    theta = tl.load(theta_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    A, B = advance(
        x_ptr + row * x_b, r_ptr + row * r_b, i_ptr + row * i_b, x_t, x_e, r_t, r_e, i_t, i_e,
        t, real, t == tl.load(begins_ptr + n), softplus(theta) * GATE_STRENGTH, e, E,
    )  # fmt: skip
    tl.store(decay_ptr + m * E + e, last_row(A, C), mask=e < E)
    tl.store(input_ptr + m * E + e, last_row(B, C), mask=e < E)


@triton.jit
def carry(
    decay_ptr, input_ptr, first_ptr, initial_ptr, before_ptr, final_ptr,
    chunks, E, U: tl.constexpr, BE: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
    """The state before each chunk of one sequence, (M, E), and after the last, (N, E).

    ``first_ptr``: (N+1,) the sequences' first chunks when packed, else None; ``initial_ptr``
    (N, E), None for zeros.
    """
    n = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    u = tl.arange(0, U)
    first, last = chunks_of(n, chunks, first_ptr)
    h = tl.zeros((BE,), tl.float32)
    if initial_ptr is not None:
        h = tl.load(initial_ptr + n * E + e, mask=e < E, other=0.0)
    for m0 in tl.range(first, last, U):
        here = m0 + u < last
        m = m0 + u
        if DOWN:
            m = last - 1 - (m0 - first) - u
        at = m[:, None] * E + e[None, :]
        inside = here[:, None] & (e < E)[None, :]
        a = tl.load(decay_ptr + at, mask=inside, other=1.0)
        b = tl.load(input_ptr + at, mask=inside, other=0.0)
        A, B, earlier_A, earlier_B = maps_before(a, b)
        tl.store(before_ptr + at, earlier_A * h[None, :] + earlier_B, mask=inside)
        h = last_row(A, U) * h + last_row(B, U)
    tl.store(final_ptr + n * E + e, h, mask=e < E)


@triton.jit
def apply(
    x_ptr, r_ptr, i_ptr, theta_ptr, mask_ptr, table_ptr, begins_ptr,
    before_ptr, out_ptr,
    x_b, x_t, x_e, r_b, r_t, r_e, i_b, i_t, i_e,
    T, chunks, E, C: tl.constexpr, BE: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
    """h, contiguous (B, T, E), from the state before each chunk."""
    m = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    row, start, stop, n = place(m, table_ptr, T, chunks, C)
    if start >= stop:
        # Packed sequences may need fewer chunks than there are: what is saved is defined there too.
        tl.store(before_ptr + m * E + e, tl.zeros((BE,), tl.float32), mask=e < E)
        return
    if mask_ptr is not None:
        mask_ptr += row * T
    t, real = steps(mask_ptr, start, stop, C, DOWN)
    theta = tl.load(theta_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    A, B = advance(
        x_ptr + row * x_b, r_ptr + row * r_b, i_ptr + row * i_b, x_t, x_e, r_t, r_e, i_t, i_e,
        t, real, t == tl.load(begins_ptr + n), softplus(theta) * GATE_STRENGTH, e, E,
    )  # fmt: skip
    h = tl.load(before_ptr + m * E + e, mask=e < E, other=0.0)
    store_steps(out_ptr + row * T * E, t, stop, e, E, A * h[None, :] + B)


@triton.jit
def walk(
    x_ptr, r_ptr, i_ptr, theta_ptr, mask_ptr, begins_ptr,
    initial_ptr, before_ptr, out_ptr, final_ptr,
    x_b, x_t, x_e, r_b, r_t, r_e, i_b, i_t, i_e,
    T, chunks, E, C: tl.constexpr, BE: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
    """``ends``, ``carry`` and ``apply`` in one: a program walks over a row's chunks."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    theta = tl.load(theta_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    strength = softplus(theta) * GATE_STRENGTH
    begins = tl.load(begins_ptr + row)
    if mask_ptr is not None:
        mask_ptr += row * T
    h = tl.zeros((BE,), tl.float32)
    if initial_ptr is not None:
        h = tl.load(initial_ptr + row * E + e, mask=e < E, other=0.0)
    for j in tl.range(0, chunks):
        chunk = tl.cast(j, tl.int64)
        if DOWN:
            chunk = chunks - 1 - chunk
        t, real = steps(mask_ptr, chunk * C, tl.cast(T, tl.int64), C, DOWN)
        A, B = advance(
            x_ptr + row * x_b, r_ptr + row * r_b, i_ptr + row * i_b, x_t, x_e, r_t, r_e, i_t, i_e,
            t, real, t == begins, strength, e, E,
        )  # fmt: skip
        tl.store(before_ptr + (row * chunks + chunk) * E + e, h, mask=e < E)
        states = A * h[None, :] + B
        store_steps(out_ptr + row * T * E, t, T, e, E, states)
        h = last_row(states, C)
    tl.store(final_ptr + row * E + e, h, mask=e < E)
