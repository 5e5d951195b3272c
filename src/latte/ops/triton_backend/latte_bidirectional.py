"""Bidirectional Latte (eq. 6) on kernels: states of whole sequences, then one program per chunk.

``segment_sums`` and ``scan`` (segments.py) compute the state. ``mixtures`` mixes it by the queries.
In the backward pass, delta_t[l] = <dy_t, mu[l]>, g[l] = dmean + sum_t p_t dy_t, w_s = exp(k_s - A):

    dq_t = p_t (delta_t - sum_l p_t delta_t)
    dv_s = sum_l w_s g
    dk_s = w_s (<g, v_s> - lost),   lost = <g, mu> - dA

``queries_ask`` and ``add_up`` compute g. ``mixture_gradients`` computes the rest.

Saved for the backward pass: the inputs and one state per sequence.

Shape suffixes: B batch, T tokens, H heads, L latents, D value width, N sequences, M chunks of all
sequences, C tokens of a chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from latte.ops.arguments import LATTE_GRADIENTS, Latte
from latte.ops.custom_ops import differentiable_op, empty_gradients
from latte.ops.state import final_buffers
from latte.ops.triton_backend.launch import readable
from latte.ops.triton_backend.segments import (
    ChunkLauncher,
    Walker,
    scan_segments,
    state_gradients,
)
from latte.ops.triton_backend.tiles import (
    SIZES, finite, inverse, load_keys, load_latents, load_numbers, load_queries, load_shares,
    load_state, load_tile, mm, parts_of, place, state_tile, store_state, store_tile,
)  # fmt: skip


def forward(x: Latte) -> tuple[Tensor, ...]:
    """Outputs p mu, and the state over the whole sequence, also as (top, mass)."""
    q, k, v = x.qkv
    run = ChunkLauncher(q, v.shape[-1], x.cu_seqlens)
    (out,) = empty_gradients(v)
    final_A, final_mu = final_buffers(q, v, x.cu_seqlens)
    top, mass = torch.empty_like(final_A), torch.empty_like(final_A)
    scan_segments(
        Walker(q, v.shape[-1], x.cu_seqlens),
        *(k, v, readable(x.key_mask), x.earlier),
        *((None, None, None), (top, mass, final_A, final_mu)),
    )
    run.by_chunk(mixtures, q, run.parts.table, final_mu, out, *q.stride(), product="WIDE")
    return out, final_A, final_mu, top, mass


def backward(
    x: Latte,
    dout: Tensor,
    dlog_mass: Tensor | None,
    dmean: Tensor | None,
    mean: Tensor,
    top: Tensor,
    mass: Tensor,
) -> dict[str, Tensor]:
    """Gradients of q, k, v and of the initial state."""
    dq, dk, dv = empty_gradients(*x.qkv)
    g, lost = bidirectional_gradients(
        ChunkLauncher(x.q, x.v.shape[-1], x.cu_seqlens),
        (*x.qkv, readable(x.key_mask), dout),
        (top, mass, mean),
        (dmean, dlog_mass),
        (dq, dk, dv),
    )
    found = {"q": dq, "k": dk, "v": dv}
    if x.log_mass is None:
        return found
    # exp(A_0 - A): the weight of the initial state in the whole.
    seen = torch.where(mass == 0, 1.0, mass)
    kept = torch.exp(x.log_mass - torch.where(torch.isneginf(top), 0.0, top)) / seen
    dA, dmu = state_gradients(x.earlier, kept[..., None] * g, kept * lost)
    return found | {"log_mass": dA, "mean": dmu}


def fake(x: Latte) -> tuple[Tensor, ...]:
    A, mu = final_buffers(x.q, x.v, x.cu_seqlens)
    return *empty_gradients(x.v), A, mu, torch.empty_like(A), torch.empty_like(A)


bidirectional_op = differentiable_op(
    "triton_bidirectional",
    Latte,
    fake,
    forward,
    backward,
    returns=["out", "log_mass", "mean"],
    gradients=LATTE_GRADIENTS,
    saves=["mean", "top", "mass"],
    optional=["log_mass", "mean"],
)


def bidirectional_gradients(
    run: ChunkLauncher,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor],
    state: tuple[Tensor, Tensor, Tensor],
    later: tuple[Tensor | None, Tensor | None],
    results: tuple[Tensor, Tensor, Tensor | None],
    gate: Tensor | None = None,
    window_delta: Tensor | None = None,
    R: int = 1,
) -> tuple[Tensor, Tensor]:
    """Write ``results``, (dq, dk, dv), of which dv may be None; return g and ``lost``.

    ``inputs`` are q, k, v, the mask and dy. ``state`` are top, mass and mean of the whole
    sequences. ``later`` are the gradients of the final mean and log-mass; None for zeros.

    If there is a window, it is state 0, and ``gate`` and ``window_delta`` (B, T, H) are its share
    and delta. q and dq then begin after its logit. ``R`` heads share one head of v.
    """
    q, k, v, mask, dy = inputs
    (top, mass, mean), (dmean, dlog_mass), parts = state, later, run.parts
    asked = q.new_empty((parts.M, run.H, run.L, run.D), dtype=torch.float32)
    run.by_chunk(
        queries_ask,
        *(q, parts.table, dy, asked, *q.stride(), *dy.stride()),
        product="NARROW",
        back=True,
        GATED=gate is not None,
    )
    whole = torch.contiguous_format
    if dmean is None:
        g = torch.zeros_like(mean, memory_format=whole)
    else:
        g = dmean.clone(memory_format=whole)
    run.by_sequence(add_up, asked, parts.first, g)
    lost = (g * mean).sum(-1)
    if dlog_mass is not None:
        lost -= dlog_mass
    run.by_chunk(
        mixture_gradients,
        *(q, k, v, mask, parts.table, top, mass, mean, dy, g, lost, *results),
        *(*q.stride(), *k.stride(), *v.stride(), *dy.stride()),
        product="WIDE",
        back=True,
        gate_ptr=gate,
        window_delta_ptr=window_delta,
        R=R,
    )
    return g, lost


@triton.jit(do_not_specialize=SIZES)
def mixtures(
    q_ptr, table_ptr, mean_ptr, out_ptr,
    q_b, q_t, q_h, q_l,
    T, per_row, H, L, D,
    C: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Bidirectional: y_t = sum_l p(l|t) mu[l], with mu (N, H, L, D) over the whole sequence."""
    m, h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, start, stop, sequence = place(m, table_ptr, T, per_row, C)
    if start >= stop:
        return
    q_ptr += batch * q_b + h * q_h
    out_ptr += batch * T * H * D + h * D
    p = load_queries(q_ptr, q_t, q_l, start, stop, L, C, BL)
    for d0 in range(0, D, BD):
        y = mm(p, load_state(mean_ptr, sequence * H + h, L, D, d0, BL, BD), WIDE)
        store_tile(out_ptr, H * D, 1, start, stop, d0, D, y, C, BD)


@triton.jit(do_not_specialize=SIZES)
def queries_ask(
    q_ptr, table_ptr, dy_ptr, asked_ptr,
    q_b, q_t, q_h, q_l, dy_b, dy_t, dy_h, dy_d,
    T, per_row, H, L, D,
    C: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr, NARROW: tl.constexpr,
    GATED: tl.constexpr = False,
):  # fmt: skip
    """Bidirectional: sum_t p_t dy_t of each chunk, (M, H, L, D)."""
    m, h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, start, stop, _ = place(m, table_ptr, T, per_row, C)
    if start >= stop:
        return
    q_ptr += batch * q_b + h * q_h
    dy_ptr += batch * dy_b + h * dy_h
    p, _ = load_shares(q_ptr, q_t, q_l, start, stop, L, C, BL, GATED)
    p = tl.trans(p)
    for d0 in range(0, D, BD):
        dy = load_tile(dy_ptr, dy_t, dy_d, start, stop, d0, D, C, BD)
        i = m.to(tl.int64) * H + h
        store_state(asked_ptr, i, L, D, d0, mm(p, dy, NARROW), BL, BD)


@triton.jit(do_not_specialize=SIZES)
def add_up(
    asked_ptr, first_ptr, dmean_ptr,
    per_row, H, L, D,
    U: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Add the gradients from each sequence's chunks, (M, H, L, D), to dmean (N, H, L, D)."""
    n, h, _, _, _, real_LD, at_LD = state_tile(H, L, D, BL, BD)
    first, last = parts_of(n, per_row, first_ptr)
    i = n * H + h
    total = tl.load(dmean_ptr + i * L * D + at_LD, mask=real_LD, other=0.0)
    for m0 in tl.range(first, last, U):
        m = m0 + tl.arange(0, U)
        at_ULD = ((m * H + h) * L * D)[:, None, None] + at_LD[None, :, :]
        real_ULD = (m < last)[:, None, None] & real_LD[None, :, :]
        total += tl.sum(tl.load(asked_ptr + at_ULD, mask=real_ULD, other=0.0), 0)
    tl.store(dmean_ptr + i * L * D + at_LD, total, mask=real_LD)


@triton.jit(do_not_specialize=SIZES)
def mixture_gradients(
    q_ptr, k_ptr, v_ptr, mask_ptr, table_ptr,
    top_ptr, mass_ptr, mean_ptr, dy_ptr, dmean_ptr, lost_ptr, dq_ptr, dk_ptr, dv_ptr,
    q_b, q_t, q_h, q_l, k_b, k_t, k_h, k_l, v_b, v_t, v_h, v_d, dy_b, dy_t, dy_h, dy_d,
    T, per_row, H, L, D,
    C: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr, WIDE: tl.constexpr,
    gate_ptr=None, window_delta_ptr=None, R: tl.constexpr = 1,
):  # fmt: skip
    """Bidirectional: dv_s = w_s g and dk_s = w_s (<g, v_s> - lost), g = dmean and w = e^{k-A}."""
    m, h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, start, stop, sequence = place(m, table_ptr, T, per_row, C)
    if start >= stop:
        return
    if mask_ptr is not None:
        mask_ptr += batch * T
    q_ptr += batch * q_b + h * q_h
    k_ptr += batch * k_b + h * k_h
    v_ptr += batch * v_b + h // R * v_h
    dy_ptr += batch * dy_b + h * dy_h
    dk_ptr += batch * T * H * L + h * L
    if dv_ptr is not None:
        dv_ptr += batch * T * H * D + h * D
    i = sequence * H + h
    k = load_keys(k_ptr, mask_ptr, k_t, k_l, start, stop, L, C, BL)
    top, mass = load_latents(top_ptr, i, L, BL), load_latents(mass_ptr, i, L, BL)
    weight = tl.exp(k - finite(top)[None, :]) * inverse(mass)[None, :]
    delta = tl.zeros((C, BL), tl.float32)
    dk = tl.zeros((C, BL), tl.float32)
    for d0 in range(0, D, BD):
        v = load_tile(v_ptr, v_t, v_d, start, stop, d0, D, C, BD)
        dy = load_tile(dy_ptr, dy_t, dy_d, start, stop, d0, D, C, BD)
        delta += mm(dy, tl.trans(load_state(mean_ptr, i, L, D, d0, BL, BD)), WIDE)
        g = load_state(dmean_ptr, i, L, D, d0, BL, BD)
        dk += mm(v, tl.trans(g), WIDE)
        if dv_ptr is not None:
            dv = mm(weight, g, WIDE)
            store_tile(dv_ptr, H * D, 1, start, stop, d0, D, dv, C, BD)
    dk = weight * (dk - load_latents(lost_ptr, i, L, BL)[None, :])
    store_tile(dk_ptr, H * L, 1, start, stop, 0, L, dk, C, BL)
    p, _ = load_shares(q_ptr, q_t, q_l, start, stop, L, C, BL, gate_ptr is not None)
    store_query_gradients(
        dq_ptr, p, delta, gate_ptr, window_delta_ptr, batch, h, start, stop, T, H, L, C, BL
    )


@triton.jit
def store_query_gradients(
    dq_ptr, p, delta, gate_ptr, window_delta_ptr, batch, h, start, stop, T, H, L,
    C: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """p_t (delta_t - sum_l p_t delta_t), contiguous. The sum includes the window if there is one.

    The window's logit is then before that of the first latent, to which ``dq_ptr`` points.
    """
    mean = tl.sum(p * delta, 1)
    width = L
    if gate_ptr is not None:
        width = L + 1
        gate = load_numbers(gate_ptr, batch, h, start, stop, T, H, C)
        own = load_numbers(window_delta_ptr, batch, h, start, stop, T, H, C)
        mean += gate * own
        t = start + tl.arange(0, C)
        at = dq_ptr + ((batch * T + t) * H + h) * width - 1
        tl.store(at, (gate * (own - mean)).to(dq_ptr.dtype.element_ty), mask=t < stop)
    dq = p * (delta - mean[:, None])
    dq_ptr += (batch * T * H + h) * width
    store_tile(dq_ptr, H * width, 1, start, stop, 0, L, dq, C, BL)
