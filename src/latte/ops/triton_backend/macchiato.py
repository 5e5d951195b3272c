"""``macchiato_attention`` on Triton kernels: both branches in one forward kernel, closed gradients.

Saved for the backward pass: the inputs, the state before every chunk, O(T / C) of them, and three
fp32 numbers per token and head: the window's largest logit, its mass and its share p(0|t). Neither
branch's output is ever in memory.

Shape suffixes: B batch, T tokens, H query heads, G key heads, L latents, K key width, D value
width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from latte.ops.buffers import empty_gradients
from latte.ops.precision import full_precision
from latte.ops.state import LatteState, WindowState
from latte.ops.triton_backend.launch import configuration
from latte.ops.triton_backend.states import final_buffers, state_gradients, walk
from latte.ops.triton_backend.window import row_buffers, tail_buffers
from latte.ops.triton_backend.window_launch import Window, WindowLauncher, tail_of, unit_rows


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
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    """Outputs, final state; then for the backward pass: the rows' top, mass and share of the
    window, the final (top, mass), and the states before the chunks (none if bidirectional)."""
    w = Window.of(k, v, key_mask, (tail_k, tail_v, tail_mask), window, scale, softcap, causal)
    run = WindowLauncher(q, latent_k, w, cu_seqlens)
    out = q.new_empty((*q.shape[:3], run.D))
    rows = row_buffers(q, 3)
    before = run.states(q, run.chunks.M if causal else 0)
    top, mass, final_A, final_mu = walk(
        run, latent_k, w.v, w.mask, log_mass, mean, before if causal else None, R=run.R
    )
    states = before if causal else (top, mass, final_mu)
    run.outputs(unit_rows(q), latent_q[..., 1:], latent_k, states, out, *rows)
    row_top, row_mass, gate = rows
    return out, final_A, final_mu, row_top, row_mass, gate, top, mass, *before


@macchiato_op.register_fake
def _(
    latent_q, latent_k, q, k, v, key_mask, cu_seqlens, log_mass, mean,
    tail_k, tail_v, tail_mask, window, scale, softcap, causal,
):  # fmt: skip
    (B, T, H, L), D = latent_k.shape, v.shape[-1]
    A, mu = final_buffers(latent_k, v, cu_seqlens)
    C = configuration(L, q.dtype).C
    M = B * -(-T // C) if cu_seqlens is None else T // C + cu_seqlens.shape[0] - 1
    top = A.new_empty((M if causal else 0, H, L))
    before = (top, torch.empty_like(top), top.new_empty((*top.shape, D)))
    finals = (A, mu, *row_buffers(q, 3), torch.empty_like(A), torch.empty_like(A))
    return q.new_empty((*q.shape[:3], D)), *finals, *before


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
    row_top: Tensor,
    row_mass: Tensor,
    gate: Tensor,
    top: Tensor,
    mass: Tensor,
    top_M: Tensor,
    mass_M: Tensor,
    mean_M: Tensor,
    window: int,
    scale: float,
    softcap: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the five inputs, of the initial state, and of the earlier keys and values."""
    from latte.ops.triton_backend import backward

    w = Window.of(k, v, key_mask, (tail_k, tail_v, tail_mask), window, scale, softcap, causal)
    run = WindowLauncher(q, latent_k, w, cu_seqlens)
    chunks = run.chunks
    dlatent_q, dlatent_k, dq, dk, dv = empty_gradients(latent_q, latent_k, q, k, v)
    dtail = tail_buffers(k, v, tail_k, tail_v)
    (delta,) = row_buffers(q, 1)
    q, dout, lq = unit_rows(q), unit_rows(dout), latent_q[..., 1:]
    run.query_gradients(q, row_top, row_mass, gate, delta, dq, dy=dout)
    strides = (*lq.stride(), *latent_k.stride(), *w.v.stride(), *dout.stride())
    inputs = (lq, latent_k, w.v, w.mask, chunks.table)
    asked, dmean = run.means(q, chunks.M), dmean.contiguous()
    if causal:
        lost, after_lost = torch.empty_like(top_M), torch.empty_like(top_M)
        run.by_chunk(
            backward.query_gradients,
            *(*inputs, top_M, mass_M, mean_M, dout, dlatent_q[..., 1:], asked, lost, *strides),
            products=("WIDE", "NARROW"),
            back=True,
            gate_ptr=gate,
            window_delta_ptr=delta,
            R=run.R,
        )
        after, lost_1 = torch.empty_like(asked), (dmean * final_mu).sum(-1) - dlog_mass
        dmean_0, lost_0 = torch.empty_like(dmean), torch.empty_like(lost_1)
        run.by_sequence(
            backward.scan_back,
            *(top_M, mass_M, asked, lost, chunks.first, top, mass, dmean, lost_1),
            *(after, after_lost, dmean_0, lost_0),
        )
        run.by_chunk(
            backward.source_gradients,
            *(*inputs, top_M, mass_M, mean_M, dout, after, after_lost, dlatent_k, None, *strides),
            products=("WIDE", "NARROW"),
            back=True,
            GATED=True,
            R=run.R,
        )
        states = (top_M, mass_M, after)
    else:
        run.by_chunk(
            backward.queries_ask,
            *(lq, chunks.table, dout, asked, *lq.stride(), *dout.stride()),
            products=("NARROW",),
            back=True,
            GATED=True,
        )
        # Without an initial state that could have a gradient: api refuses one.
        dmean_0 = dmean.clone()
        run.by_sequence(backward.add_up, asked, chunks.first, dmean_0)
        lost_0 = (dmean_0 * final_mu).sum(-1) - dlog_mass
        run.by_chunk(
            backward.mixture_gradients,
            *(*inputs, top, mass, final_mu, dout, dmean_0, lost_0, dlatent_q[..., 1:]),
            *(dlatent_k, None, *strides),
            products=("WIDE",),
            back=True,
            gate_ptr=gate,
            window_delta_ptr=delta,
            R=run.R,
        )
        states = (top, mass, dmean_0)
    rows = (row_top, row_mass, gate, delta)
    run.source_gradients(q, lq, latent_k, dout, rows, states, (dk, dv), dtail)
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
