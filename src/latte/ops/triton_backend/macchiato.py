"""``macchiato_attention`` on Triton kernels: both branches in one forward kernel, closed gradients.

Saved for the backward pass: the inputs, the final mean, where sequences are cut into segments one
state per segment, and one fp32 number per token and head, the window's share p(0|t). Neither
branch's output is ever in memory.

Shape suffixes: B batch, T tokens, H query heads, G key heads, L latents, K key width, D value
width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from latte.ops.buffers import empty_gradients, without_masked
from latte.ops.precision import full_precision
from latte.ops.state import LatteState, WindowState
from latte.ops.triton_backend import macchiato_bidirectional, macchiato_causal
from latte.ops.triton_backend.states import final_buffers, state_gradients
from latte.ops.triton_backend.window import row_buffers, tail_buffers
from latte.ops.triton_backend.window_launch import Window, tail_of, unit_rows


def macchiato_attention(
    latent_q_BTHL: Tensor,
    latent_k_BTHL: Tensor,
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGD: Tensor,
    *,
    window: int,
    scale: float,
    softcap: float | None,
    causal: bool,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    latte_state: LatteState | None,
    window_state: WindowState | None,
) -> tuple[Tensor, LatteState]:
    """See :func:`latte.ops.macchiato_attention`; ``latent_q`` has L + 1 columns."""
    earlier = (None, None) if latte_state is None else tuple(latte_state)
    k_BTGK, v_BTGD = without_masked(key_mask, k_BTGK), without_masked(key_mask, v_BTGD)
    out, log_mass, mean = macchiato_op(
        *(latent_q_BTHL, latent_k_BTHL, q_BTHK, k_BTGK, v_BTGD, key_mask, cu_seqlens),
        *(*earlier, *tail_of(window_state), window, scale, softcap or 0.0, causal),
    )[:3]
    return out, LatteState(log_mass, mean)


@torch.library.custom_op("latte::triton_macchiato", mutates_args=())
@full_precision
def macchiato_op(
    latent_q: Tensor,
    latent_k: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    log_mass: Tensor | None,
    mean: Tensor | None,
    tail_k: Tensor | None,
    tail_v: Tensor | None,
    tail_mask: Tensor | None,
    window: int,
    scale: float,
    softcap: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs, final state; then for the backward pass: the window's share of each row, and
    :func:`between_segments` (bidirectional: the final (top, mass) alone)."""
    w = Window.of(k, v, key_mask, (tail_k, tail_v, tail_mask), window, scale, softcap, causal)
    out, (gate,) = q.new_empty((*q.shape[:3], v.shape[-1])), row_buffers(q, 1)
    finals = final_buffers(latent_k, v, cu_seqlens)
    forward = macchiato_causal.outputs if causal else macchiato_bidirectional.outputs
    between = forward(latent_q, latent_k, q, w, cu_seqlens, (log_mass, mean), finals, (out, gate))
    return out, *finals, gate, *between


@macchiato_op.register_fake
def _(
    latent_q, latent_k, q, k, v, key_mask, cu_seqlens, log_mass, mean,
    tail_k, tail_v, tail_mask, window, scale, softcap, causal,
):  # fmt: skip
    finals = final_buffers(latent_k, v, cu_seqlens)
    between = macchiato_causal.between if causal else macchiato_bidirectional.between
    out = q.new_empty((*q.shape[:3], v.shape[-1]))
    return out, *finals, *row_buffers(q, 1), *between(latent_k, v.shape[-1], cu_seqlens)


@torch.library.custom_op("latte::triton_macchiato_backward", mutates_args=())
@full_precision
def macchiato_backward_op(
    dout: Tensor,
    dlog_mass: Tensor,
    dmean: Tensor,
    latent_q: Tensor,
    latent_k: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    log_mass: Tensor | None,
    mean: Tensor | None,
    tail_k: Tensor | None,
    tail_v: Tensor | None,
    tail_mask: Tensor | None,
    final_mu: Tensor,
    gate: Tensor,
    top_M: Tensor,
    mass_M: Tensor,
    mean_M: Tensor,
    top: Tensor,
    mass: Tensor,
    window: int,
    scale: float,
    softcap: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the five inputs, of the initial state, and of the earlier keys and values."""
    w = Window.of(k, v, key_mask, (tail_k, tail_v, tail_mask), window, scale, softcap, causal)
    dlatent_q, dlatent_k, dq, dk, dv = empty_gradients(latent_q, latent_k, q, k, v)
    dtail = tail_buffers(k, v, tail_k, tail_v)
    back = macchiato_causal.gradients if causal else macchiato_bidirectional.gradients
    dmean_0, lost_0 = back(
        *(latent_q, latent_k, unit_rows(q), w, cu_seqlens, unit_rows(dout), (log_mass, mean)),
        (dmean, final_mu, dlog_mass),
        gate,
        (top_M, mass_M, mean_M, top, mass),
        (dlatent_q, dlatent_k, dq, dk, dv),
        dtail,
    )
    dstate = state_gradients(log_mass, mean, dmean_0, lost_0)
    return dlatent_q, dlatent_k, dq, dk, dv, *dstate, *dtail


@macchiato_backward_op.register_fake
def _(
    dout, dlog_mass, dmean, latent_q, latent_k, q, k, v, key_mask, cu_seqlens,
    log_mass, mean, tail_k, tail_v, *_,
):  # fmt: skip
    inputs = (latent_q, latent_k, q, k, v, dlog_mass, dmean)
    return *empty_gradients(*inputs), *tail_buffers(k, v, tail_k, tail_v)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:12], *output[2:])
    ctx.options = inputs[12:]
    # Gradients flow from the outputs and the final state alone.
    ctx.mark_non_differentiable(*output[3:])


def _gradients(ctx, dout, dlog_mass, dmean, *_):
    saved = ctx.saved_tensors
    *of_inputs, dA, dmu, dtail_k, dtail_v = macchiato_backward_op(
        dout, dlog_mass, dmean, *saved, *ctx.options
    )
    state = (None, None) if saved[7] is None else (dA, dmu)
    tail = (None, None) if saved[9] is None else (dtail_k, dtail_v)
    return *of_inputs, None, None, *state, *tail, None, None, None, None, None


macchiato_op.register_autograd(_gradients, setup_context=_save)
