"""``latte_attention`` on Triton kernels; the causal form as custom ops with closed gradients.

Saved for the backward pass: the inputs, the final mean and, where sequences are cut into segments,
one state per segment.

Shape suffixes: B batch, T tokens, H heads, L latents, D value width, N states, M chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from latte.ops.buffers import empty_gradients, without_masked
from latte.ops.gradients import connect_gradients
from latte.ops.precision import full_precision
from latte.ops.state import LatteState
from latte.ops.triton_backend.bidirectional import bidirectional_op
from latte.ops.triton_backend.latent_gradients import latent_gradients
from latte.ops.triton_backend.segments import Walker
from latte.ops.triton_backend.states import (
    between_segments,
    contiguous_state,
    final_buffers,
    readable,
    scan_segments,
    state_gradients,
)


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
    v_BTHD = without_masked(key_mask, v_BTHD)
    out, log_mass, mean = op(q_BTHL, k_BTHL, v_BTHD, key_mask, cu_seqlens, *earlier)[:3]
    return out, LatteState(log_mass, mean) if output_final_state else None


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
    """Outputs, final state; then for the backward pass: :func:`between_segments`."""
    from latte.ops.triton_backend import walk

    run = Walker(q, v.shape[-1], cu_seqlens)
    mask = readable(key_mask)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    final_A, final_mu = final_buffers(q, v, cu_seqlens)
    between = between_segments(k, v.shape[-1], cu_seqlens)
    earlier = contiguous_state(log_mass, mean)
    before: tuple[Tensor | None, ...] = (None, None, None)
    found: tuple[Tensor | None, ...] = (final_A, final_mu)
    if run.segments.cut:
        before, found = between[:3], (None, None)
        scan_segments(run, k, v, mask, earlier, before, (*between[3:], final_A, final_mu))
    run.forward(
        walk.walk,
        *(q, k, v, mask, run.chunks.table, *before, *earlier, out, *found),
        *(*q.stride(), *k.stride(), *v.stride()),
    )
    return out, final_A, final_mu, *between


@causal_op.register_fake
def _(q, k, v, key_mask, cu_seqlens, log_mass, mean):
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    return out, *final_buffers(q, v, cu_seqlens), *between_segments(k, v.shape[-1], cu_seqlens)


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
    top_M: Tensor,
    mass_M: Tensor,
    mean_M: Tensor,
    top: Tensor,
    mass: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and of the initial state, one tile of D after the other."""
    dq, dk, dv = empty_gradients(q, k, v)
    dmean_0, lost_0 = latent_gradients(
        Walker(q, v.shape[-1], cu_seqlens),
        (q, k, v, readable(key_mask), dout),
        (log_mass, mean),
        (top_M, mass_M, mean_M, top, mass),
        (dmean, final_mu, dlog_mass),
        (dq, dk, dv),
    )
    return dq, dk, dv, *state_gradients(log_mass, mean, dmean_0, lost_0)


connect_gradients(causal_op, causal_backward_op, saved_from=2)
