"""``latte_attention`` on Triton kernels: custom ops with closed gradients.

Saved for the backward pass: the inputs and one state per chunk, O(T / C) of them.

Shape suffixes: B batch, T tokens, H heads, L latents, D value width, N states, M chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from latte.ops.buffers import empty_gradients
from latte.ops.precision import full_precision
from latte.ops.state import LatteState
from latte.ops.triton_backend.launch import Launcher, configuration


def latte_attention(
    q_BTHL: Tensor,
    k_BTHL: Tensor,
    v_BTHD: Tensor,
    *,
    causal: bool,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: LatteState | None,
    output_final_state: bool,
) -> tuple[Tensor, LatteState | None]:
    """See :func:`latte.ops.latte_attention`."""
    earlier = (None, None) if initial_state is None else tuple(initial_state)
    op = causal_op if causal else bidirectional_op
    out, log_mass, mean = op(q_BTHL, k_BTHL, v_BTHD, key_mask, cu_seqlens, *earlier)[:3]
    return out, LatteState(log_mass, mean) if output_final_state else None


def readable(key_mask: Tensor | None) -> Tensor | None:
    """The mask as contiguous bytes."""
    return None if key_mask is None else key_mask.contiguous().view(torch.uint8)


def contiguous_state(*state: Tensor | None) -> tuple[Tensor | None, ...]:
    """Contiguous tensors of a state that may be missing."""
    return tuple(None if x is None else x.contiguous() for x in state)


def state_gradients(
    log_mass: Tensor | None, mean: Tensor | None, dmean: Tensor, lost: Tensor
) -> tuple[Tensor, Tensor]:
    """(dlog_mass, dmean) of the initial state, from ``lost`` = <dmean, mean> - dlog_mass.

    An empty state has no mass to move and a mean that nobody reads: no gradient.
    """
    if log_mass is None or mean is None:
        return lost, dmean
    empty = torch.isneginf(log_mass)
    dA = ((dmean * mean).sum(-1) - lost).masked_fill_(empty, 0.0)
    return dA, dmean.masked_fill(empty[..., None], 0.0)


def walk(
    run: Launcher,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    log_mass: Tensor | None,
    mean: Tensor | None,
    before: tuple[Tensor, ...] | None,
    R: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Top, mass, log-mass and mean of every sequence; the states between chunks into ``before``.

    ``R`` query heads share one head of the values.
    """
    from latte.ops.triton_backend import forward

    chunks = run.chunks
    of_chunks = run.states(k, chunks.M)
    strides = (*k.stride(), *v.stride())
    inputs = (k, v, mask, chunks.table, *of_chunks, *strides)
    run.by_chunk(forward.sums, *inputs, products=("WIDE",), R=R)
    top, mass, final_mu = run.states(k, chunks.N)
    final_A = torch.empty_like(top)
    run.by_sequence(
        forward.scan,
        *(*of_chunks, chunks.first, *contiguous_state(log_mass, mean)),
        *(before or (None, None, None)),
        *(top, mass, final_A, final_mu),
    )
    return top, mass, final_A, final_mu


def final_buffers(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Empty fp32 buffers (N, H, L) and (N, H, L, D)."""
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    A = q.new_empty((N, *q.shape[2:]), dtype=torch.float32)
    return A, A.new_empty((*A.shape, v.shape[-1]))


@torch.library.custom_op("latte::triton_causal", mutates_args=())
@full_precision
def causal_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    log_mass: Tensor | None,
    mean: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs, final state; then for the backward pass: its (top, mass), states before chunks."""
    from latte.ops.triton_backend import forward

    run = Launcher(q, v.shape[-1], cu_seqlens)
    mask = readable(key_mask)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    before = run.states(q, run.chunks.M)
    top, mass, final_A, final_mu = walk(run, k, v, mask, log_mass, mean, before)
    run.by_chunk(
        forward.outputs,
        *(q, k, v, mask, run.chunks.table, *before, out),
        *(*q.stride(), *k.stride(), *v.stride()),
        products=("WIDE", "NARROW"),
    )
    return out, final_A, final_mu, top, mass, *before


@causal_op.register_fake
def _(q, k, v, key_mask, cu_seqlens, log_mass, mean):
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    final_A, final_mu = final_buffers(q, v, cu_seqlens)
    (B, T, H, L), D = q.shape, v.shape[-1]
    C = configuration(L, q.dtype).C
    M = B * -(-T // C) if cu_seqlens is None else T // C + cu_seqlens.shape[0] - 1
    top = final_A.new_empty((M, H, L))
    before = (top, torch.empty_like(top), top.new_empty((M, H, L, D)))
    return out, final_A, final_mu, torch.empty_like(final_A), torch.empty_like(final_A), *before


@torch.library.custom_op("latte::triton_causal_backward", mutates_args=())
@full_precision
def causal_backward_op(
    dout: Tensor,
    dlog_mass: Tensor,
    dmean: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    log_mass: Tensor | None,
    mean: Tensor | None,
    final_mu: Tensor,
    top: Tensor,
    mass: Tensor,
    top_M: Tensor,
    mass_M: Tensor,
    mean_M: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and of the initial state."""
    from latte.ops.triton_backend import backward

    run = Launcher(q, v.shape[-1], cu_seqlens)
    chunks, mask = run.chunks, readable(key_mask)
    dq, dk, dv = empty_gradients(q, k, v)
    asked, after = run.means(q, chunks.M), run.means(q, chunks.M)
    lost, after_lost = torch.empty_like(top_M), torch.empty_like(top_M)
    inputs = (q, k, v, mask, chunks.table, top_M, mass_M, mean_M, dout)
    strides = (*q.stride(), *k.stride(), *v.stride(), *dout.stride())
    run.by_chunk(
        backward.query_gradients,
        *inputs,
        *(dq, asked, lost),
        *strides,
        products=("WIDE", "NARROW"),
        back=True,
    )
    dmean = dmean.contiguous()
    lost_1 = (dmean * final_mu).sum(-1) - dlog_mass
    dmean_0, lost_0 = torch.empty_like(dmean), torch.empty_like(lost_1)
    run.by_sequence(
        backward.scan_back,
        *(top_M, mass_M, asked, lost, chunks.first, top, mass, dmean, lost_1),
        *(after, after_lost, dmean_0, lost_0),
    )
    run.by_chunk(
        backward.source_gradients,
        *inputs,
        *(after, after_lost, dk, dv),
        *strides,
        products=("WIDE", "NARROW"),
        back=True,
    )
    return dq, dk, dv, *state_gradients(log_mass, mean, dmean_0, lost_0)


@causal_backward_op.register_fake
def _(dout, dlog_mass, dmean, q, k, v, *_):
    return empty_gradients(q, k, v, dlog_mass, dmean)


def _save_causal(ctx, inputs, output):
    ctx.save_for_backward(*inputs, *output[2:])
    # Gradients flow from the outputs and the final state alone.
    ctx.mark_non_differentiable(*output[3:])


def _causal_gradients(ctx, dout, dlog_mass, dmean, *_):
    saved = ctx.saved_tensors
    dq, dk, dv, dA, dmu = causal_backward_op(dout, dlog_mass, dmean, *saved)
    earlier = (None, None) if saved[5] is None else (dA, dmu)
    return dq, dk, dv, None, None, *earlier


causal_op.register_autograd(_causal_gradients, setup_context=_save_causal)


@torch.library.custom_op("latte::triton_bidirectional", mutates_args=())
@full_precision
def bidirectional_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    log_mass: Tensor | None,
    mean: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs p mu, and the state over the whole sequence (eq. 6), also as (top, mass)."""
    from latte.ops.triton_backend import forward

    run = Launcher(q, v.shape[-1], cu_seqlens)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    top, mass, final_A, final_mu = walk(run, k, v, readable(key_mask), log_mass, mean, None)
    run.by_chunk(
        forward.mixtures, q, run.chunks.table, final_mu, out, *q.stride(), products=("WIDE",)
    )
    return out, final_A, final_mu, top, mass


@bidirectional_op.register_fake
def _(q, k, v, key_mask, cu_seqlens, log_mass, mean):
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    A, mu = final_buffers(q, v, cu_seqlens)
    return out, A, mu, torch.empty_like(A), torch.empty_like(A)


@torch.library.custom_op("latte::triton_bidirectional_backward", mutates_args=())
@full_precision
def bidirectional_backward_op(
    dout: Tensor,
    dlog_mass: Tensor,
    dmean: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    log_mass: Tensor | None,
    mean: Tensor | None,
    final_mu: Tensor,
    top: Tensor,
    mass: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """With g = dmean + sum_t p_t dy_t: dv_s = w_s g, dk_s = w_s (<g, v_s> - <g, mu> + dA)."""
    from latte.ops.triton_backend import backward

    run = Launcher(q, v.shape[-1], cu_seqlens)
    chunks = run.chunks
    dq, dk, dv = empty_gradients(q, k, v)
    asked = run.means(q, chunks.M)
    run.by_chunk(
        backward.queries_ask,
        *(q, chunks.table, dout, asked, *q.stride(), *dout.stride()),
        products=("NARROW",),
        back=True,
    )
    g = dmean.clone(memory_format=torch.contiguous_format)
    run.by_sequence(backward.add_up, asked, chunks.first, g)
    lost = (g * final_mu).sum(-1) - dlog_mass
    run.by_chunk(
        backward.mixture_gradients,
        *(q, k, v, readable(key_mask), chunks.table, top, mass, final_mu, dout, g, lost),
        *(dq, dk, dv),
        *(*q.stride(), *k.stride(), *v.stride(), *dout.stride()),
        products=("WIDE",),
        back=True,
    )
    if log_mass is None or mean is None:
        return dq, dk, dv, lost, g
    # exp(A_0 - A): what the initial state is worth to the whole.
    seen = torch.where(mass == 0, 1.0, mass)
    kept = torch.exp(log_mass - torch.where(torch.isneginf(top), 0.0, top)) / seen
    return dq, dk, dv, *state_gradients(log_mass, mean, kept[..., None] * g, kept * lost)


@bidirectional_backward_op.register_fake
def _(dout, dlog_mass, dmean, q, k, v, *_):
    return empty_gradients(q, k, v, dlog_mass, dmean)


def _save_bidirectional(ctx, inputs, output):
    ctx.save_for_backward(*inputs, *output[2:])
    ctx.mark_non_differentiable(*output[3:])


def _bidirectional_gradients(ctx, dout, dlog_mass, dmean, *_):
    saved = ctx.saved_tensors
    dq, dk, dv, dA, dmu = bidirectional_backward_op(dout, dlog_mass, dmean, *saved)
    earlier = (None, None) if saved[5] is None else (dA, dmu)
    return dq, dk, dv, None, None, *earlier


bidirectional_op.register_autograd(_bidirectional_gradients, setup_context=_save_bidirectional)
