"""``latte_attention`` on Triton kernels; the causal form as custom ops with closed gradients.

Saved for the backward pass: the inputs, the final mean and, where sequences are cut into segments,
one state per segment.

Shape suffixes: B batch, T tokens, H heads, L latents, D value width, N states, M chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from latte.ops.buffers import empty_gradients
from latte.ops.gradients import connect_gradients
from latte.ops.precision import full_precision
from latte.ops.state import LatteState
from latte.ops.triton_backend.bidirectional import bidirectional_op
from latte.ops.triton_backend.segments import Walker, segment_length, walking
from latte.ops.triton_backend.states import (
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
    out, log_mass, mean = op(q_BTHL, k_BTHL, v_BTHD, key_mask, cu_seqlens, *earlier)[:3]
    return out, LatteState(log_mass, mean) if output_final_state else None


def between_segments(run: Walker, q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Empty fp32 buffers: (top, mass, mean) before each segment, final (top, mass).

    Without entries where no sequence is cut: nobody needs them.
    """
    cut = run.segments.cut
    top, mass, mean = run.states(q, run.chunks.M if cut else 0)
    final = top.new_empty((run.chunks.N if cut else 0, run.H, run.L))
    return top, mass, mean, final, torch.empty_like(final)


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
    between = between_segments(run, q)
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
    (B, T, H, L), D = q.shape, v.shape[-1]
    config = walking(L, D, q.dtype)
    length = segment_length(B, T, H * -(-D // config.BD), config.C, cu_seqlens is not None)
    final_A, final_mu = final_buffers(q, v, cu_seqlens)
    N, M = final_A.shape[0], 0
    if length < T:
        M = B * -(-T // length) if cu_seqlens is None else T // length + N
    top = final_A.new_empty((M, H, L))
    final = final_A.new_empty((N if length < T else 0, H, L))
    between = (top, torch.empty_like(top), top.new_empty((M, H, L, D)), final)
    return out, final_A, final_mu, *between, torch.empty_like(final)


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
    run = Walker(q, v.shape[-1], cu_seqlens)
    tiles, mask = run.tiles(), readable(key_mask)
    dq, dk, dv = empty_gradients(q, k, v)
    dmean_0 = torch.empty_like(dmean, memory_format=torch.contiguous_format)
    sums: list[Tensor] = []
    for tile in tiles:
        # One tile writes the results, several write parts in fp32.
        parts: tuple[Tensor, ...] = (dq, dk)
        if len(tiles) > 1:
            parts = tuple(x.new_empty(x.shape, dtype=torch.float32) for x in (dq, dk))
        lost_0 = _tile_gradients(
            run,
            (q, k, v[..., tile], mask, dout[..., tile]),
            (log_mass, None if mean is None else mean[..., tile]),
            (top_M, mass_M, mean_M[..., tile], top, mass),
            (dmean[..., tile], final_mu[..., tile], None if sums else dlog_mass),
            (*parts, dv[..., tile], dmean_0[..., tile]),
        )
        new = [*parts, lost_0] if len(tiles) > 1 else [lost_0]
        sums = [x + y for x, y in zip(sums, new, strict=True)] if sums else new
    if len(tiles) > 1:
        dq.copy_(sums[0])
        dk.copy_(sums[1])
    return dq, dk, dv, *state_gradients(log_mass, mean, dmean_0, sums[-1])


def _tile_gradients(
    run: Walker,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor],
    earlier: tuple[Tensor | None, Tensor | None],
    between: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    later: tuple[Tensor, Tensor, Tensor | None],
    results: tuple[Tensor, ...],
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
    )
    dmean_0.copy_(dmean_start)
    return lost_0


connect_gradients(causal_op, causal_backward_op, saved_from=2)
