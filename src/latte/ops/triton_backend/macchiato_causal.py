"""Causal Macchiato on kernels: a walk forward; walks back, beside the window's own kernels.

Shape suffixes: B batch, T tokens, H query heads, G key heads, L latents, K key width, D value
width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from latte.ops.triton_backend.latent_gradients import latent_gradients
from latte.ops.triton_backend.launch import launch
from latte.ops.triton_backend.segments import Walker, walking
from latte.ops.triton_backend.states import (
    Between,
    between_segments,
    contiguous_state,
    scan_segments,
)
from latte.ops.triton_backend.window_launch import Window, WindowLauncher, unit_rows

between = between_segments


class Beside(NamedTuple):
    """What is fixed when the forward walk is compiled, beside the chunk of Latte's walks."""

    BX: int  # tile of the key and value widths
    warps: int
    stages: int  # loads ahead, of the window's blocks


# Padded latents -> tile, warps, stages.
HALF = {
    16: (64, 8, 3),
    32: (64, 8, 3),
    64: (64, 8, 2),
    128: (64, 8, 2),
    256: (64, 8, 2),
}
SINGLE = {BL: (32, 8, 1) for BL in HALF}


def beside(L: int, D: int, dtype: torch.dtype) -> Beside:
    """The one configuration for these sizes."""
    return Beside(*(SINGLE if dtype == torch.float32 else HALF)[walking(L, D, dtype).BL])


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
    """Write ``finals`` and ``results``: y and the gate; return :func:`between`."""
    from latte.ops.triton_backend.macchiato_walk import macchiato_walk

    D = w.v.shape[-1]
    run = Walker(latent_k, D, cu_seqlens)
    R = q.shape[2] // w.v.shape[2]
    config, tiles = run.walk, beside(run.L, D, q.dtype)
    segments = between_segments(latent_k, D, cu_seqlens)
    state = contiguous_state(*earlier)
    before: tuple[Tensor | None, ...] = (None, None, None)
    found: tuple[Tensor | None, ...] = finals
    if run.segments.cut:
        before, found = segments[:3], (None, None)
        scan_segments(run, latent_k, w.v, w.mask, state, before, (*segments[3:], *finals), R)
    lq, q = latent_q[..., 1:], unit_rows(q)
    bounds = None if cu_seqlens is None else cu_seqlens.long()
    fixed: dict[str, Any] = {"C": config.C, "BL": config.BL, "BX": tiles.BX}
    launch(
        run.device,
        macchiato_walk[(run.chunks.M * run.H * -(-D // tiles.BX),)],
        *(lq, latent_k, q, w.k, w.v, w.mask, run.chunks.table, bounds, *w.tail),
        *(*before, *state, *results, *found, *lq.stride(), *latent_k.stride()),
        *(*q.stride()[:3], *w.k.stride()[:3], *w.v.stride()[:3]),
        *(w.scale, w.softcap, w.reach, w.P),
        *(run.T, run.segments.length, run.chunks.per_row, run.H, run.L, D),
        **fixed,
        K=w.k.shape[-1],
        R=R,
        PRODUCT=run.product,
        CAPPED=w.softcap != 0.0,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return segments


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
    """Write ``results``, gradients of the five inputs, and ``dtail``; return those of the state.

    The latents' part of dv is in memory once, for each query head: the window's kernel adds it up.
    """
    run = WindowLauncher(q, None, w, cu_seqlens)
    dlatent_q, dlatent_k, dq, dk, dv = results
    top_w, mass_w, delta = (torch.empty_like(gate) for _ in range(3))
    run.query_gradients(q, gate, top_w, mass_w, delta, dq, dy=dout)
    rows = (top_w, mass_w, gate, delta)
    latents_dv = torch.empty_like(dout, memory_format=torch.contiguous_format)
    at_start = latent_gradients(
        Walker(latent_k, run.D, cu_seqlens),
        (latent_q, latent_k, w.v, w.mask, dout),
        earlier,
        between,
        later,
        (dlatent_q, dlatent_k, latents_dv),
        delta,
        run.R,
    )
    run.source_gradients(q, dout, rows, (dk, dv), dtail, latents_dv)
    return at_start
