"""Bidirectional ``latte_attention`` on Triton kernels: custom ops with closed gradients.

Saved for the backward pass: the inputs and one state per sequence.

Shape suffixes: B batch, T tokens, H heads, L latents, D value width, N states, M chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from latte.ops.buffers import empty_gradients
from latte.ops.gradients import connect_gradients
from latte.ops.precision import full_precision
from latte.ops.triton_backend.launch import Launcher
from latte.ops.triton_backend.segments import Walker
from latte.ops.triton_backend.states import (
    contiguous_state,
    final_buffers,
    readable,
    scan_segments,
    state_gradients,
)


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
    final_A, final_mu = final_buffers(q, v, cu_seqlens)
    top, mass = torch.empty_like(final_A), torch.empty_like(final_A)
    scan_segments(
        Walker(q, v.shape[-1], cu_seqlens),
        *(k, v, readable(key_mask), contiguous_state(log_mass, mean)),
        *((None, None, None), (top, mass, final_A, final_mu)),
    )
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


connect_gradients(bidirectional_op, bidirectional_backward_op, saved_from=2)
