"""Bidirectional Macchiato on kernels: the states of Latte's, the outputs and gradients by chunk.

Shape suffixes: B batch, T tokens, H query heads, G key heads, L latents, K key width, D value
width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from latte.ops.triton_backend.segments import Walker
from latte.ops.triton_backend.states import Between, contiguous_state, scan_segments
from latte.ops.triton_backend.window_launch import Window, WindowLauncher, unit_rows


def between(latent_k: Tensor, D: int, cu_seqlens: Tensor | None) -> Between:
    """Empty fp32 buffers, in the order of :func:`between_segments`: the final (top, mass) alone."""
    B, _, H, L = latent_k.shape
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    none = latent_k.new_empty((0, H, L), dtype=torch.float32)
    top = none.new_empty((N, H, L))
    return none, torch.empty_like(none), none.new_empty((0, H, L, D)), top, torch.empty_like(top)


def outputs(
    latent_q: Tensor,
    latent_k: Tensor,
    q: Tensor,
    w: Window,
    cu_seqlens: Tensor | None,
    earlier: tuple[Tensor | None, Tensor | None],
    finals: tuple[Tensor, Tensor],
    results: tuple[Tensor, ...],
) -> Between:
    """Write ``finals`` and ``results``: y and the gate; :func:`between`."""
    run = WindowLauncher(q, latent_k, w, cu_seqlens)
    states = between(latent_k, run.D, cu_seqlens)
    scan_segments(
        Walker(latent_k, run.D, cu_seqlens),
        *(latent_k, w.v, w.mask, contiguous_state(*earlier), (None, None, None)),
        (*states[3:], *finals),
        run.R,
    )
    run.outputs(unit_rows(q), latent_q[..., 1:], finals[1], *results)
    return states


def gradients(
    latent_q: Tensor,
    latent_k: Tensor,
    q: Tensor,
    w: Window,
    cu_seqlens: Tensor | None,
    dout: Tensor,
    earlier: tuple[Tensor | None, Tensor | None],
    later: tuple[Tensor, Tensor, Tensor],
    gate: Tensor,
    between: Between,
    results: tuple[Tensor, ...],
    dtail: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Write ``results``, the gradients of the five inputs; return those of the state.

    ``earlier`` is not looked at: the interface refuses an initial state that could have a gradient.
    """
    from latte.ops.triton_backend import backward

    run = WindowLauncher(q, latent_k, w, cu_seqlens)
    chunks, lq = run.chunks, latent_q[..., 1:]
    dlatent_q, dlatent_k, dq, dk, dv = results
    dmean, final_mu, dlog_mass = later
    *_, top, mass = between
    top_w, mass_w, delta = (torch.empty_like(gate) for _ in range(3))
    run.query_gradients(q, gate, top_w, mass_w, delta, dq, dy=dout)
    rows = (top_w, mass_w, gate, delta)
    asked = run.means(q, chunks.M)
    run.by_chunk(
        backward.queries_ask,
        *(lq, chunks.table, dout, asked, *lq.stride(), *dout.stride()),
        products=("NARROW",),
        back=True,
        GATED=True,
    )
    dmean_0 = dmean.clone(memory_format=torch.contiguous_format)
    run.by_sequence(backward.add_up, asked, chunks.first, dmean_0)
    lost_0 = (dmean_0 * final_mu).sum(-1) - dlog_mass
    run.by_chunk(
        backward.mixture_gradients,
        *(lq, latent_k, w.v, w.mask, chunks.table, top, mass, final_mu, dout, dmean_0, lost_0),
        *(dlatent_q[..., 1:], dlatent_k, None),
        *(*lq.stride(), *latent_k.stride(), *w.v.stride(), *dout.stride()),
        products=("WIDE",),
        back=True,
        gate_ptr=gate,
        window_delta_ptr=delta,
        R=run.R,
    )
    states = (latent_k, top, mass, dmean_0)
    run.source_gradients(q, dout, rows, (dk, dv), dtail, bidirectional=states)
    return dmean_0, lost_0
