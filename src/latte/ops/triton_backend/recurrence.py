"""The RG-LRU on kernels, fused from the gates on: one scan forward, two scans backward.

    r, i = sigmoid(recurrence gate), sigmoid(input gate)
    log a_t = -8 r_t softplus(theta),  h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t x_t
    g_t = dh_t + a_{t+1} g_{t+1}       the gradient that reaches h_t
    dlog a_t = g_t (a_t h_{t-1} - i_t x_t a_t^2 / sqrt(1 - a_t^2))

A range of tokens is an affine map of the state, h -> A h + B. If sequences and channels fill the
GPU, one program processes a whole sequence (``lru_walk``, ``lru_walk_back``). Otherwise every chunk
has a program: ``ends`` and ``ends_back`` find each chunk's map, ``carry`` composes the maps,
``apply`` and ``apply_back`` write the results. With ``DOWN`` the forward pass goes from the end of
a sequence to its beginning, and gradients go the other way. At the token where a sequence starts
a = 0 and the factor is 1 (:func:`beginnings`).

Saved for the backward pass: the inputs and one state per chunk.

Shape suffixes: B batch, T tokens, E channels (of a tile), N sequences, M chunks of all sequences,
C tokens of a chunk, U chunks of a round.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from latte.ops.custom_ops import differentiable_op, empty_gradients
from latte.ops.tensors import Sequences, count_sequences, sequence_bounds
from latte.ops.triton_backend.launch import (
    LRU_BACK, LRU_BY_CHUNK, LRU_CARRY, LRU_CHUNK, LRU_STAGES, LRU_WALK, LRU_WALKS_FROM, contiguous,
    launch, readable,
)  # fmt: skip
from latte.ops.triton_backend.segments import Parts, count_parts
from latte.ops.triton_backend.tiles import (
    SIZES, at_most, compose, load_steps, log1p_of_share, parts_of, place, power, reciprocal,
    store_steps,
)  # fmt: skip

# As in the other backends: Griffin's constant c, and an upper limit of log a that is not quite 0.
GATE_STRENGTH = tl.constexpr(8.0)
LEAST_DECAY = tl.constexpr(-1.1754943508222875e-38)


def one_walk(B: int, T: int, E: int, packed: bool) -> bool:
    """Whether each program walks over a whole sequence. Packed ones differ too much in length."""
    return not packed and (T <= LRU_CHUNK or B * -(-E // LRU_WALK["BE"]) >= LRU_WALKS_FROM)


def _launch(
    kernel: Any, programs: int, tile: dict[str, int], E: int, *args: Any, **options: Any
) -> None:
    """The grid for this number of chunks or sequences: one program for each tile of channels."""
    grid = (programs, -(-E // tile["BE"]))
    launch(args[0].device, kernel[grid], *args, **options, **tile)


def beginnings(
    x_BTE: Tensor, sequences: Sequences, initial_state: Tensor | None, reverse: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Where sequences start, as the kernels' ``begins`` and ``goes_on`` (N,).

    ``begins``, int64, has the first valid token, in order of the walk, of every sequence; None: the
    walk's first. A sequence without a valid token may get any number, because it has no token to
    compare it with. ``goes_on`` says which sequences continue from a state; None: none does.
    """
    (key_mask, cu_seqlens, _), T, first = sequences, x_BTE.shape[1], None
    if cu_seqlens is not None:
        bounds = sequence_bounds(cu_seqlens)
        first = bounds[1:] - 1 if reverse else bounds[:-1]
        if key_mask is not None:
            count = key_mask[0].long().cumsum(0)
            if reverse:  # the first token by which all tokens of the sequence have been counted
                wanted = count[first.clamp(min=0)]
            else:
                wanted = torch.where(first == 0, 0, count[(first - 1).clamp(min=0)]) + 1
            first = torch.searchsorted(count, wanted)
    elif key_mask is not None:
        seen = key_mask.flip(1) if reverse else key_mask
        first = seen.to(torch.uint8).argmax(1)
        first = T - 1 - first if reverse else first
    return first, None if initial_state is None else initial_state.any(-1)


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(s for x in tensors for s in x.stride())


class RGLRU(NamedTuple):
    """The arguments of ``triton_rg_lru``. For ``begins`` and ``goes_on`` see :func:`beginnings`."""

    x: Tensor
    recurrence_gate: Tensor
    input_gate: Tensor
    theta: Tensor
    initial_state: Tensor | None
    key_mask: Tensor | None
    cu_seqlens: Tensor | None
    begins: Tensor | None
    goes_on: Tensor | None
    reverse: bool

    @property
    def starts(self) -> tuple[Tensor | None, Tensor | None]:
        """Where sequences start, as the kernels take it."""
        return self.begins, readable(self.goes_on)

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.x, self.recurrence_gate, self.input_gate


def forward(x: RGLRU) -> tuple[Tensor, Tensor, Tensor]:
    """h, the last state, and the states before each chunk."""
    (B, T, E), mask = x.x.shape, readable(x.key_mask)
    chunks = Parts.of(B, T, LRU_CHUNK, x.cu_seqlens)
    inputs = (*x.inputs, x.theta.contiguous(), mask)
    (out,) = empty_gradients(x.x)
    before = x.x.new_empty((chunks.M, E), dtype=torch.float32)
    final = before.new_empty((chunks.N, E))
    (earlier,) = contiguous(x.initial_state)
    strides = (*_strides(*x.inputs), T, chunks.per_row, E)
    fixed: dict[str, Any] = {"C": LRU_CHUNK, "DOWN": x.reverse}
    if one_walk(B, T, E, x.cu_seqlens is not None):
        states = (*x.starts, earlier, before, out, final)
        fixed["STAGES"] = LRU_STAGES
        _launch(lru_walk, B, LRU_WALK, E, *inputs, *states, *strides, **fixed)
        return out, final, before
    decay, added = torch.empty_like(before), torch.empty_like(before)
    at = (chunks.M, LRU_BY_CHUNK, E)
    found = (*inputs, chunks.table, *x.starts)
    _launch(ends, *at, *found, decay, added, *strides, **fixed)
    _carry(chunks, decay, added, earlier, before, final, x.reverse)
    _launch(apply, *at, *found, before, out, *strides, **fixed)
    return out, final, before


def _carry(
    chunks: Parts,
    decay: Tensor,
    added: Tensor,
    initial: Tensor | None,
    before: Tensor,
    final: Tensor,
    down: bool,
) -> None:
    """The states ``before`` the chunks (backward: the gradients of those after), and ``final``."""
    E = decay.shape[1]
    tensors = (decay, added, chunks.first, initial, before, final)
    _launch(carry, chunks.N, LRU_CARRY, E, *tensors, chunks.per_row, E, DOWN=down)


def fake(x: RGLRU) -> tuple[Tensor, ...]:
    B, T, E = x.x.shape
    M = count_parts(B, T, LRU_CHUNK, x.cu_seqlens)
    final = x.x.new_empty((count_sequences(B, x.cu_seqlens), E), dtype=torch.float32)
    return *empty_gradients(x.x), final, final.new_empty((M, E))


def backward(x: RGLRU, dout: Tensor, dfinal: Tensor | None, before: Tensor) -> dict[str, Tensor]:
    """Gradients of x, both gates, theta and the initial state."""
    (B, T, E), mask = x.x.shape, readable(x.key_mask)
    chunks = Parts.of(B, T, LRU_CHUNK, x.cu_seqlens)
    dx, dr, di = empty_gradients(*x.inputs)
    theta_E, (dfinal,) = x.theta.contiguous(), contiguous(dfinal)
    dinitial = before.new_empty((chunks.N, E))
    found = {"x": dx, "recurrence_gate": dr, "input_gate": di, "initial_state": dinitial}
    strides = (*_strides(*x.inputs, dout), T, chunks.per_row, E)
    fixed: dict[str, Any] = {"C": LRU_CHUNK, "DOWN": x.reverse}
    if one_walk(B, T, E, x.cu_seqlens is not None):
        parts = before.new_empty((B, E))
        tensors = (*x.inputs, theta_E, mask, *x.starts, before, dfinal, dout)
        outputs = (dx, dr, di, parts, dinitial)
        fixed["STAGES"] = LRU_STAGES
        _launch(lru_walk_back, B, LRU_BACK, E, *tensors, *outputs, *strides, **fixed)
        return found | {"theta": parts.sum(0)}
    decay, added, after, parts = (torch.empty_like(before) for _ in range(4))
    at, shared = (chunks.M, LRU_BACK, E), (theta_E, mask, chunks.table, *x.starts)
    gate = x.recurrence_gate
    few = (*_strides(gate, dout), T, chunks.per_row, E)
    _launch(ends_back, *at, gate, *shared, dout, decay, added, *few, **fixed)
    _carry(chunks, decay, added, dfinal, after, dinitial, not x.reverse)
    given = (*x.inputs, *shared, before, after, dout)
    _launch(apply_back, *at, *given, dx, dr, di, parts, *strides, **fixed)
    return found | {"theta": parts.sum(0)}


rg_lru_op = differentiable_op(
    "triton_rg_lru",
    RGLRU,
    fake,
    forward,
    backward,
    returns=["h", "last"],
    gradients=["x", "recurrence_gate", "input_gate", "theta", "initial_state"],
    saves=["before"],
    optional=["last"],
)


@triton.jit
def one_minus_square(a, u):
    """1 - a^2 for a^2 = exp(-u), u >= 0, without cancellation for small u."""
    p = 1.0 / 5040.0 - u * (1.0 / 40320.0)
    p = 1.0 / 720.0 - u * p
    p = 1.0 / 120.0 - u * p
    p = 1.0 / 24.0 - u * p
    p = 1.0 / 6.0 - u * p
    p = 1.0 / 2.0 - u * p
    p = 1.0 - u * p
    return tl.where(u < 0.5, u * p, 1.0 - a * a)


@triton.jit
def softplus(theta):
    """log(1 + e^theta)."""
    return tl.maximum(theta, 0.0) + log1p_of_share(tl.exp(-tl.abs(theta)))


@triton.jit
def sigmoids(logit):
    """sigmoid(logit) and 1 - sigmoid(logit), each without cancellation or overflow."""
    e = power(-tl.abs(logit))
    larger = reciprocal(1.0 + e)
    smaller = e * larger
    return tl.where(logit >= 0, larger, smaller), tl.where(logit >= 0, smaller, larger)


@triton.jit
def compose_before(a1, b1, pa1, pb1, a2, b2, pa2, pb2):
    """:func:`compose`, and the map of all elements but the last (1, 0 if there is only one)."""
    return a1 * a2, a2 * b1 + b2, a1 * pa2, pa2 * b1 + pb2


@triton.jit
def maps_before(a, b):
    """For each of C maps, (C, E): the composed maps up to it, and before it."""
    return tl.associative_scan(
        (a, b, tl.full(a.shape, 1.0, tl.float32), b * 0.0), 0, compose_before
    )


@triton.jit
def first_step(x, C: tl.constexpr):
    """The first of C, (E,)."""
    return tl.sum(tl.where((tl.arange(0, C) == 0)[:, None], x, 0.0), 0)


@triton.jit
def last_step(x, C: tl.constexpr):
    """The last of C, (E,)."""
    return tl.sum(tl.where((tl.arange(0, C) == C - 1)[:, None], x, 0.0), 0)


@triton.jit
def steps(mask_ptr, start, stop, C: tl.constexpr, DOWN: tl.constexpr):
    """Positions of a chunk's tokens, in the order of the walk, and which of them are real."""
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
def next_steps(mask_ptr, t, stop, C: tl.constexpr, DOWN: tl.constexpr):
    """The tokens after those of :func:`steps`, and which are real; none after the chunk is."""
    if DOWN:
        t -= 1
    else:
        t += 1
    real = (tl.arange(0, C) < C - 1) & (t < stop)
    if mask_ptr is not None:
        real = tl.load(mask_ptr + t, mask=real, other=0) != 0
    return t, real


@triton.jit
def start_of(begins_ptr, goes_on_ptr, n, T, DOWN: tl.constexpr):
    """The token at which sequence ``n`` starts, or -1 if it continues from a state."""
    begins = n * 0
    if begins_ptr is not None:
        begins = tl.load(begins_ptr + n)
    elif DOWN:
        begins += T - 1
    if goes_on_ptr is not None:
        begins = tl.where(tl.load(goes_on_ptr + n) != 0, -1, begins)
    return begins


@triton.jit
def decays(r, strength, real, fresh):
    """a and sqrt(1 - a^2): 1 and 0 for tokens that are not real, 0 and 1 at a sequence's start."""
    log_a = at_most(-r * strength[None, :], LEAST_DECAY)
    a = power(log_a)
    factor = tl.sqrt(one_minus_square(a, -2.0 * log_a))
    a = tl.where(fresh[:, None], 0.0, a)
    factor = tl.where(fresh[:, None], 1.0, factor)
    return tl.where(real[:, None], a, 1.0), tl.where(real[:, None], factor, 0.0)


@triton.jit
def advance(
    x_ptr, r_ptr, i_ptr, x_t, x_e, r_t, r_e, i_t, i_e,
    t, real, fresh, strength, e, E,
):  # fmt: skip
    """The composed maps of a chunk up to each of its tokens: A and B, (C, E) each."""
    r, _ = sigmoids(load_steps(r_ptr, r_t, r_e, t, real, e, E))
    i, _ = sigmoids(load_steps(i_ptr, i_t, i_e, t, real, e, E))
    a, factor = decays(r, strength, real, fresh)
    return tl.associative_scan(
        (a, factor * i * load_steps(x_ptr, x_t, x_e, t, real, e, E)), 0, compose
    )


@triton.jit(do_not_specialize=SIZES)
def ends(
    x_ptr, r_ptr, i_ptr, theta_ptr, mask_ptr, table_ptr, begins_ptr, goes_on_ptr,
    decay_ptr, input_ptr,
    x_b, x_t, x_e, r_b, r_t, r_e, i_b, i_t, i_e,
    T, per_row, E, C: tl.constexpr, BE: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
    """The map of each chunk, h -> decay h + input: (M, E) twice."""
    m = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    batch, start, stop, n = place(m, table_ptr, T, per_row, C)
    if start >= stop:
        return
    if mask_ptr is not None:
        mask_ptr += batch * T
    t, real = steps(mask_ptr, start, stop, C, DOWN)
    theta = tl.load(theta_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    A, B = advance(
        x_ptr + batch * x_b, r_ptr + batch * r_b, i_ptr + batch * i_b, x_t, x_e, r_t, r_e, i_t, i_e,
        t, real, t == start_of(begins_ptr, goes_on_ptr, n, T, DOWN),
        softplus(theta) * GATE_STRENGTH, e, E,
    )  # fmt: skip
    tl.store(decay_ptr + m * E + e, last_step(A, C), mask=e < E)
    tl.store(input_ptr + m * E + e, last_step(B, C), mask=e < E)


@triton.jit(do_not_specialize=SIZES)
def carry(
    decay_ptr, input_ptr, first_ptr, initial_ptr, before_ptr, final_ptr,
    per_row, E, U: tl.constexpr, BE: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
    """The state before each chunk of one sequence, (M, E), and after the last, (N, E).

    ``first_ptr`` (N+1,) has the sequences' first chunks when packed, else it is None.
    ``initial_ptr`` (N, E) is None for zeros.
    """
    n = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    u = tl.arange(0, U)
    first, last = parts_of(n, per_row, first_ptr)
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
        h = last_step(A, U) * h + last_step(B, U)
    tl.store(final_ptr + n * E + e, h, mask=e < E)


@triton.jit(do_not_specialize=SIZES)
def apply(
    x_ptr, r_ptr, i_ptr, theta_ptr, mask_ptr, table_ptr, begins_ptr, goes_on_ptr,
    before_ptr, out_ptr,
    x_b, x_t, x_e, r_b, r_t, r_e, i_b, i_t, i_e,
    T, per_row, E, C: tl.constexpr, BE: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
    """h, contiguous (B, T, E), from the state before each chunk."""
    m = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    batch, start, stop, n = place(m, table_ptr, T, per_row, C)
    if start >= stop:
        # Packed sequences may not use all chunks. The saved numbers of unused chunks are defined.
        tl.store(before_ptr + m * E + e, tl.zeros((BE,), tl.float32), mask=e < E)
        return
    if mask_ptr is not None:
        mask_ptr += batch * T
    t, real = steps(mask_ptr, start, stop, C, DOWN)
    theta = tl.load(theta_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    A, B = advance(
        x_ptr + batch * x_b, r_ptr + batch * r_b, i_ptr + batch * i_b, x_t, x_e, r_t, r_e, i_t, i_e,
        t, real, t == start_of(begins_ptr, goes_on_ptr, n, T, DOWN),
        softplus(theta) * GATE_STRENGTH, e, E,
    )  # fmt: skip
    h = tl.load(before_ptr + m * E + e, mask=e < E, other=0.0)
    store_steps(out_ptr + batch * T * E, t, stop, e, E, A * h[None, :] + B)


@triton.jit(do_not_specialize=SIZES)
def lru_walk(
    x_ptr, r_ptr, i_ptr, theta_ptr, mask_ptr, begins_ptr, goes_on_ptr,
    initial_ptr, before_ptr, out_ptr, final_ptr,
    x_b, x_t, x_e, r_b, r_t, r_e, i_b, i_t, i_e,
    T, per_row, E, C: tl.constexpr, BE: tl.constexpr, DOWN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """``ends``, ``carry`` and ``apply`` in one. A program walks over a sequence's chunks."""
    batch = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    theta = tl.load(theta_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    strength = softplus(theta) * GATE_STRENGTH
    begins = start_of(begins_ptr, goes_on_ptr, batch, T, DOWN)
    if mask_ptr is not None:
        mask_ptr += batch * T
    h = tl.zeros((BE,), tl.float32)
    if initial_ptr is not None:
        h = tl.load(initial_ptr + batch * E + e, mask=e < E, other=0.0)
    for j in tl.range(0, per_row, num_stages=STAGES):
        chunk = tl.cast(j, tl.int64)
        if DOWN:
            chunk = per_row - 1 - chunk
        t, real = steps(mask_ptr, chunk * C, tl.cast(T, tl.int64), C, DOWN)
        A, B = advance(
            x_ptr + batch * x_b, r_ptr + batch * r_b, i_ptr + batch * i_b,
            x_t, x_e, r_t, r_e, i_t, i_e, t, real, t == begins, strength, e, E,
        )  # fmt: skip
        tl.store(before_ptr + (batch * per_row + chunk) * E + e, h, mask=e < E)
        states = A * h[None, :] + B
        store_steps(out_ptr + batch * T * E, t, T, e, E, states)
        h = last_step(states, C)
    tl.store(final_ptr + batch * E + e, h, mask=e < E)


@triton.jit
def load_gradients(dy_ptr, dy_t, dy_e, t, stop, e, E):
    """dh of every token. Masked tokens have one too: their output is the unchanged state."""
    return load_steps(dy_ptr, dy_t, dy_e, t, t < stop, e, E)


@triton.jit(do_not_specialize=SIZES)
def ends_back(
    r_ptr, theta_ptr, mask_ptr, table_ptr, begins_ptr, goes_on_ptr, dy_ptr,
    decay_ptr, input_ptr,
    r_b, r_t, r_e, dy_b, dy_t, dy_e,
    T, per_row, E, C: tl.constexpr, BE: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
    """The map of each chunk for the gradient of the state after it: (M, E) twice."""
    m = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    batch, start, stop, n = place(m, table_ptr, T, per_row, C)
    if start >= stop:
        return
    if mask_ptr is not None:
        mask_ptr += batch * T
    t, real = steps(mask_ptr, start, stop, C, DOWN)
    theta = tl.load(theta_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    r, _ = sigmoids(load_steps(r_ptr + batch * r_b, r_t, r_e, t, real, e, E))
    fresh = t == start_of(begins_ptr, goes_on_ptr, n, T, DOWN)
    a, _ = decays(r, softplus(theta) * GATE_STRENGTH, real, fresh)
    dh = load_gradients(dy_ptr + batch * dy_b, dy_t, dy_e, t, stop, e, E)
    A, B = tl.associative_scan((a, a * dh), 0, compose, reverse=True)
    tl.store(decay_ptr + m * E + e, first_step(A, C), mask=e < E)
    tl.store(input_ptr + m * E + e, first_step(B, C), mask=e < E)


@triton.jit
def retreat(
    x_ptr, r_ptr, i_ptr, dy_ptr, dx_ptr, dr_ptr, di_ptr,
    x_t, x_e, r_t, r_e, i_t, i_e, dy_t, dy_e,
    mask_ptr, t, real, begins, strength, h0, g1, stop, e, E, C: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk, from the state before it and the gradient of the state after it.

    The decays of the next tokens are computed again. So a scan of g_t = dh_t + a_{t+1} g_{t+1}
    needs no second pair of maps for the tokens after each token.

    Returns the gradient of the state before it, and sum_t dlog a_t r_t, which theta needs.
    """
    x = load_steps(x_ptr, x_t, x_e, t, real, e, E)
    r, not_r = sigmoids(load_steps(r_ptr, r_t, r_e, t, real, e, E))
    i, not_i = sigmoids(load_steps(i_ptr, i_t, i_e, t, real, e, E))
    dh = load_gradients(dy_ptr, dy_t, dy_e, t, stop, e, E)
    fresh = t == begins
    a, factor = decays(r, strength, real, fresh)
    _, _, A, B = maps_before(a, factor * i * x)
    before = A * h0[None, :] + B
    following, real_then = next_steps(mask_ptr, t, stop, C, DOWN)
    r_then, _ = sigmoids(load_steps(r_ptr, r_t, r_e, following, real_then, e, E))
    a_then, _ = decays(r_then, strength, real_then, following == begins)
    A, B = tl.associative_scan((a_then, dh), 0, compose, reverse=True)
    g = A * g1[None, :] + B
    gated = g * factor
    # a is constant where log a is clamped, where a sequence starts, and for tokens that are not
    # real.
    free = real & (fresh == 0)
    moves = free[:, None] & (-r * strength[None, :] <= LEAST_DECAY)
    ratio = a * a * reciprocal(tl.where(factor == 0.0, 1.0, factor))
    dlog_a = tl.where(moves, g * (a * before - i * x * ratio), 0.0)
    store_steps(dx_ptr, t, stop, e, E, gated * i)
    store_steps(di_ptr, t, stop, e, E, gated * x * i * not_i)
    store_steps(dr_ptr, t, stop, e, E, -strength[None, :] * dlog_a * r * not_r)
    return first_step(a * g, C), tl.sum(dlog_a * r, 0)


@triton.jit
def slope(theta):
    """d(log a)/d(theta) divided by r: -8 sigmoid(theta)."""
    rises, _ = sigmoids(theta)
    return rises * -GATE_STRENGTH


@triton.jit(do_not_specialize=SIZES)
def apply_back(
    x_ptr, r_ptr, i_ptr, theta_ptr, mask_ptr, table_ptr, begins_ptr, goes_on_ptr,
    before_ptr, after_ptr, dy_ptr, dx_ptr, dr_ptr, di_ptr, dtheta_ptr,
    x_b, x_t, x_e, r_b, r_t, r_e, i_b, i_t, i_e, dy_b, dy_t, dy_e,
    T, per_row, E, C: tl.constexpr, BE: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
    """Gradients of x and both gates, contiguous, and each chunk's part of dtheta, (M, E)."""
    m = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    batch, start, stop, n = place(m, table_ptr, T, per_row, C)
    if start >= stop:
        tl.store(dtheta_ptr + m * E + e, tl.zeros((BE,), tl.float32), mask=e < E)
        return
    if mask_ptr is not None:
        mask_ptr += batch * T
    t, real = steps(mask_ptr, start, stop, C, DOWN)
    theta = tl.load(theta_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    h0 = tl.load(before_ptr + m * E + e, mask=e < E, other=0.0)
    g1 = tl.load(after_ptr + m * E + e, mask=e < E, other=0.0)
    out = batch * T * E
    _, dlog = retreat(
        x_ptr + batch * x_b, r_ptr + batch * r_b, i_ptr + batch * i_b, dy_ptr + batch * dy_b,
        dx_ptr + out, dr_ptr + out, di_ptr + out, x_t, x_e, r_t, r_e, i_t, i_e, dy_t, dy_e,
        mask_ptr, t, real, start_of(begins_ptr, goes_on_ptr, n, T, DOWN),
        softplus(theta) * GATE_STRENGTH, h0, g1, stop, e, E, C, DOWN,
    )  # fmt: skip
    tl.store(dtheta_ptr + m * E + e, slope(theta) * dlog, mask=e < E)


@triton.jit(do_not_specialize=SIZES)
def lru_walk_back(
    x_ptr, r_ptr, i_ptr, theta_ptr, mask_ptr, begins_ptr, goes_on_ptr,
    before_ptr, final_ptr, dy_ptr, dx_ptr, dr_ptr, di_ptr, dtheta_ptr, dinitial_ptr,
    x_b, x_t, x_e, r_b, r_t, r_e, i_b, i_t, i_e, dy_b, dy_t, dy_e,
    T, per_row, E, C: tl.constexpr, BE: tl.constexpr, DOWN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """All gradients in one walk. ``final`` (N, E) is the last state's gradient, None for zeros."""
    batch = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    theta = tl.load(theta_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    strength = softplus(theta) * GATE_STRENGTH
    begins = start_of(begins_ptr, goes_on_ptr, batch, T, DOWN)
    if mask_ptr is not None:
        mask_ptr += batch * T
    g = tl.zeros((BE,), tl.float32)
    if final_ptr is not None:
        g = tl.load(final_ptr + batch * E + e, mask=e < E, other=0.0)
    dlog = tl.zeros((BE,), tl.float32)
    out = batch * T * E
    stop = tl.cast(T, tl.int64)
    for j in tl.range(0, per_row, num_stages=STAGES):
        chunk = tl.cast(j, tl.int64)
        if not DOWN:
            chunk = per_row - 1 - chunk
        t, real = steps(mask_ptr, chunk * C, stop, C, DOWN)
        h0 = tl.load(before_ptr + (batch * per_row + chunk) * E + e, mask=e < E, other=0.0)
        g, part = retreat(
            x_ptr + batch * x_b, r_ptr + batch * r_b, i_ptr + batch * i_b, dy_ptr + batch * dy_b,
            dx_ptr + out, dr_ptr + out, di_ptr + out, x_t, x_e, r_t, r_e, i_t, i_e, dy_t, dy_e,
            mask_ptr, t, real, begins, strength, h0, g, stop, e, E, C, DOWN,
        )  # fmt: skip
        dlog += part
    tl.store(dtheta_ptr + batch * E + e, slope(theta) * dlog, mask=e < E)
    tl.store(dinitial_ptr + batch * E + e, g, mask=e < E)
