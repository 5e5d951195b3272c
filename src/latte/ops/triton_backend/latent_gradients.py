"""Gradients of the causal latents by two walks, launched for one tile of D after the other.

Shape suffixes: B batch, T tokens, H heads, L latents, D value width, N states, M segments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from latte.ops.triton_backend.segments import Walker
from latte.ops.triton_backend.states import Between, contiguous_state


def latent_gradients(
    run: Walker,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor],
    earlier: tuple[Tensor | None, Tensor | None],
    between: Between,
    later: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor, Tensor],
    window_delta: Tensor | None = None,
    R: int = 1,
) -> tuple[Tensor, Tensor]:
    """Write ``results``, (dq, dk, dv) with all heads; return dmean and ``lost`` at the start.

    ``inputs``: q, k, v, the mask, dy. ``earlier``: the initial state. ``between``: see
    :func:`between_segments`. ``later``: the gradient of the final mean, that mean, the gradient of
    the final log-mass.

    With a window as state 0, whose delta (B, T, H) is ``window_delta``, q and dq have its logit as
    column 0. ``R`` heads share one head of v.
    """
    q, k, v, mask, dy = inputs
    dmean, final_mu, dlog_mass = later
    dq, dk, dv = results
    tiles = run.tiles()
    dmean_0 = torch.empty_like(dmean, memory_format=torch.contiguous_format)
    sums: list[Tensor] = []
    for tile in tiles:
        # One tile writes the results, several write parts in fp32.
        parts: tuple[Tensor, ...] = (dq, dk)
        if len(tiles) > 1:
            parts = tuple(x.new_empty(x.shape, dtype=torch.float32) for x in (dq, dk))
        lost_0 = _tile_gradients(
            run,
            (q, k, v[..., tile], mask, dy[..., tile]),
            (earlier[0], None if earlier[1] is None else earlier[1][..., tile]),
            (between[0], between[1], between[2][..., tile], *between[3:]),
            (dmean[..., tile], final_mu[..., tile], None if sums else dlog_mass),
            (*parts, dv[..., tile], dmean_0[..., tile]),
            # What has no D belongs to the first tile.
            torch.zeros_like(window_delta) if sums and window_delta is not None else window_delta,
            R,
        )
        new = [*parts, lost_0] if len(tiles) > 1 else [lost_0]
        sums = [x + y for x, y in zip(sums, new, strict=True)] if sums else new
    if len(tiles) > 1:
        dq.copy_(sums[0])
        dk.copy_(sums[1])
    return dmean_0, sums[-1]


def _tile_gradients(
    run: Walker,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor],
    earlier: tuple[Tensor | None, Tensor | None],
    between: Between,
    later: tuple[Tensor, Tensor, Tensor | None],
    results: tuple[Tensor, ...],
    window_delta: Tensor | None,
    R: int,
) -> Tensor:
    """Write (dq, dk, dv, dmean_0) of one tile of D; return what it adds to ``lost`` at the start.

    ``later``: the gradient of the final mean, that mean, the gradient of the final log-mass.
    """
    from latte.ops.triton_backend import backward, walk_back

    q, k, v, mask, dy = inputs
    dmean, final_mu, dlog_mass = later
    dq, dk, dv, dmean_0 = results
    chunks, D, cut = run.chunks, v.shape[-1], run.segments.cut
    top_M, mass_M, mean_M, *final = contiguous_state(*between)
    dmean = dmean.contiguous()
    lost = (dmean * final_mu).sum(-1)
    if dlog_mass is not None:
        lost -= dlog_mass
    lost_0, dmean_start = torch.empty_like(lost), torch.empty_like(dmean)
    c = q.new_empty(q.shape[:3], dtype=torch.float32)
    gated = window_delta is not None
    if gated:
        # Where the first latent is.
        q, dq = q[..., 1:], dq[..., 1:]
    at_slots = [lost.new_empty((run.segments.slots, run.H, run.L)) for _ in range(2)]
    at_ends = [lost.new_empty((chunks.M, run.H, run.L)) for _ in range(2)]
    asked = []
    if cut:
        asked = [lost.new_empty((chunks.M, run.H, run.L, D)), torch.empty_like(at_ends[0])]
    after, starts = [dmean, lost], [dmean_start, lost_0]
    before = [top_M, mass_M, mean_M] if cut else [None, None, None]
    strides = (*q.stride(), *k.stride(), *v.stride(), *dy.stride())
    run.back(
        walk_back.query_walk,
        D,
        *(q, k, v, mask, chunks.table, *before, *contiguous_state(*earlier), dy),
        *(dq, c, *at_slots, *at_ends, *(asked or (None, None))),
        *strides,
        window_delta_ptr=window_delta,
        R=R,
    )
    if cut:
        after = [torch.empty_like(x) for x in asked]
        run.scan_back(
            backward.scan_back,
            D,
            *(top_M, mass_M, *asked, chunks.first, *final, dmean, lost),
            *(*after, *starts),
        )
    run.back(
        walk_back.source_walk,
        D,
        *(q, k, v, mask, chunks.table, dy, dq, c, *at_slots, *at_ends, *after, dk, dv),
        *((None, None) if cut else starts),
        *(*strides, dv.stride(1), dv.stride(2)),
        GATED=gated,
        R=R,
    )
    dmean_0.copy_(dmean_start)
    return lost_0
