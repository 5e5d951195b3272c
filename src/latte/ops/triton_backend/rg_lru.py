"""``rg_lru`` on Triton kernels: a custom op with closed gradients, fused from the gates on.

Saved for the backward pass: the inputs and one state per chunk.

Shape suffixes: B batch, T tokens, E channels, N states, M chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from latte.ops.buffers import empty_gradients
from latte.ops.precision import full_precision
from latte.ops.triton_backend.launch import Chunks, launch
from latte.ops.triton_backend.states import readable

C = 64  # tokens of a chunk
# Channels of a tile and warps: one program per chunk, one per row, and backward.
CHUNK = {"BE": 64, "num_warps": 8}
WALK = {"BE": 32, "num_warps": 4}
BACK = {"BE": 32, "num_warps": 8}
CARRY = {"U": 32, "BE": 32, "num_warps": 4}  # U chunks of a round of the scan over chunks
# Programs from which one walk each fills a GPU of some 130 processors.
WALKS_FROM = 512


def tiles(E: int, options: dict[str, int]) -> int:
    return -(-E // options["BE"])


def one_walk(B: int, T: int, E: int, packed: bool) -> bool:
    """Whether each program walks over a whole row; packed sequences are of uneven length."""
    return not packed and (T <= C or B * tiles(E, WALK) >= WALKS_FROM)


def rg_lru(
    x_BTE: Tensor,
    recurrence_gate: Tensor,
    input_gate: Tensor,
    theta_E: Tensor,
    *,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """See :func:`latte.ops.rg_lru`: h (B, T, E) and the last state (N, E), for T > 0."""
    begins = beginnings(x_BTE, key_mask, cu_seqlens, initial_state, reverse)
    return rg_lru_op(
        *(x_BTE, recurrence_gate, input_gate, theta_E, initial_state),
        *(key_mask, cu_seqlens, begins, reverse),
    )[:2]


def beginnings(
    x_BTE: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    reverse: bool,
) -> Tensor:
    """(N,) int64: the first real token, in order of the walk, of every sequence that starts anew.

    -1 for a sequence that carries a state on. A sequence without a real token may get any number:
    it has no token to compare it with.
    """
    B, T = x_BTE.shape[:2]
    if cu_seqlens is None:
        first = torch.zeros(B, dtype=torch.long, device=x_BTE.device)
        if key_mask is not None:
            seen = key_mask.flip(1) if reverse else key_mask
            first = seen.to(torch.uint8).argmax(1)
        first = T - 1 - first if reverse else first
    else:
        bounds = cu_seqlens.long()
        first = bounds[1:] - 1 if reverse else bounds[:-1]
        if key_mask is not None:
            count = key_mask[0].long().cumsum(0)
            if reverse:  # the first token at which all of the sequence's have been counted
                wanted = count[first.clamp(min=0)]
            else:
                wanted = torch.where(first == 0, 0, count[(first - 1).clamp(min=0)]) + 1
            first = torch.searchsorted(count, wanted)
    if initial_state is None:
        return first
    return torch.where((initial_state == 0).all(-1), first, -1)


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(s for x in tensors for s in x.stride())


def _chunks(x: Tensor, cu_seqlens: Tensor | None) -> Chunks:
    return Chunks.of(x.shape[0], x.shape[1], C, cu_seqlens)


@torch.library.custom_op("latte::triton_rg_lru", mutates_args=())
@full_precision
def rg_lru_op(
    x: Tensor,
    recurrence_gate: Tensor,
    input_gate: Tensor,
    theta: Tensor,
    initial_state: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    begins: Tensor,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """h, the last state, and the states before each chunk."""
    from latte.ops.triton_backend import recurrence

    (B, T, E), chunks, mask = x.shape, _chunks(x, cu_seqlens), readable(key_mask)
    inputs = (x, recurrence_gate, input_gate, theta.contiguous(), mask)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    before = x.new_empty((chunks.M, E), dtype=torch.float32)
    final = x.new_empty((chunks.N, E), dtype=torch.float32)
    earlier = None if initial_state is None else initial_state.contiguous()
    strides = (*_strides(*inputs[:3]), T, chunks.per_row, E)
    fixed = {"C": C, "DOWN": reverse}
    if one_walk(B, T, E, cu_seqlens is not None):
        states = (earlier, before, out, final)
        kernel = recurrence.walk[B, tiles(E, WALK)]
        launch(x.device, kernel, *inputs, begins, *states, *strides, **fixed, **WALK)
        return out, final, before
    decay, added = torch.empty_like(before), torch.empty_like(before)
    packed = (*inputs, chunks.table, begins)
    grid = (chunks.M, tiles(E, CHUNK))
    fixed |= CHUNK
    launch(x.device, recurrence.ends[grid], *packed, decay, added, *strides, **fixed)
    _carry(chunks, decay, added, earlier, before, final, reverse)
    launch(x.device, recurrence.apply[grid], *packed, before, out, *strides, **fixed)
    return out, final, before


def _carry(
    chunks: Chunks,
    decay: Tensor,
    added: Tensor,
    initial: Tensor | None,
    before: Tensor,
    final: Tensor,
    down: bool,
) -> None:
    from latte.ops.triton_backend import recurrence

    E = decay.shape[1]
    kernel = recurrence.carry[chunks.N, tiles(E, CARRY)]
    tensors = (decay, added, chunks.first, initial, before, final)
    launch(decay.device, kernel, *tensors, chunks.per_row, E, DOWN=down, **CARRY)


@rg_lru_op.register_fake
def _(x, recurrence_gate, input_gate, theta, initial_state, key_mask, cu_seqlens, begins, reverse):
    B, T, E = x.shape
    M = B * -(-T // C) if cu_seqlens is None else T // C + cu_seqlens.shape[0] - 1
    final = x.new_empty((begins.shape[0], E), dtype=torch.float32)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, final, final.new_empty((M, E))


@torch.library.custom_op("latte::triton_rg_lru_backward", mutates_args=())
@full_precision
def rg_lru_backward_op(
    dout: Tensor,
    dfinal: Tensor,
    x: Tensor,
    recurrence_gate: Tensor,
    input_gate: Tensor,
    theta: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    begins: Tensor,
    before: Tensor,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, both gates, theta and the initial state."""
    from latte.ops.triton_backend import recurrence_back

    (B, T, E), chunks, mask = x.shape, _chunks(x, cu_seqlens), readable(key_mask)
    gates = (recurrence_gate, input_gate)
    dx, dr, di = empty_gradients(x, *gates)
    theta_E, dfinal = theta.contiguous(), dfinal.contiguous()
    dinitial = torch.empty_like(dfinal)
    strides = (*_strides(x, *gates, dout), T, chunks.per_row, E)
    fixed = {"C": C, "DOWN": reverse, **BACK}
    if one_walk(B, T, E, cu_seqlens is not None):
        parts = x.new_empty((B, E), dtype=torch.float32)
        tensors = (x, *gates, theta_E, mask, begins, before, dfinal, dout)
        outputs = (dx, dr, di, parts, dinitial)
        kernel = recurrence_back.walk_back[B, tiles(E, BACK)]
        launch(x.device, kernel, *tensors, *outputs, *strides, **fixed)
        return dx, dr, di, parts.sum(0).to(theta.dtype), dinitial
    decay, added, after = (torch.empty_like(before) for _ in range(3))
    parts = torch.empty_like(before)
    grid = (chunks.M, tiles(E, BACK))
    shared = (theta_E, mask, chunks.table, begins)
    few = (*_strides(recurrence_gate, dout), T, chunks.per_row, E)
    launch(
        x.device,
        recurrence_back.ends_back[grid],
        *(recurrence_gate, *shared, dout, decay, added, *few),
        **fixed,
    )
    _carry(chunks, decay, added, dfinal, after, dinitial, not reverse)
    chunked = (x, *gates, *shared, before, after, dout)
    launch(
        x.device,
        recurrence_back.apply_back[grid],
        *(*chunked, dx, dr, di, parts, *strides),
        **fixed,
    )
    return dx, dr, di, parts.sum(0).to(theta.dtype), dinitial


@rg_lru_backward_op.register_fake
def _(dout, dfinal, x, recurrence_gate, input_gate, theta, *_):
    dx, dr, di, dtheta = empty_gradients(x, recurrence_gate, input_gate, theta)
    return dx, dr, di, dtheta, torch.empty_like(dfinal, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output):
    x, recurrence_gate, input_gate, theta, initial_state, key_mask, cu_seqlens, begins, _ = inputs
    ctx.carried, ctx.reverse = initial_state is not None, inputs[-1]
    ctx.save_for_backward(
        *(x, recurrence_gate, input_gate, theta, key_mask, cu_seqlens, begins, output[2])
    )
    ctx.mark_non_differentiable(output[2])


def _gradients(ctx, dout, dfinal, _):
    dx, dr, di, dtheta, dinitial = rg_lru_backward_op(dout, dfinal, *ctx.saved_tensors, ctx.reverse)
    return dx, dr, di, dtheta, dinitial if ctx.carried else None, None, None, None, None


rg_lru_op.register_autograd(_gradients, setup_context=_save)
