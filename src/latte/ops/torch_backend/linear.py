"""Undirected linear attention in chunks; packed sequences start on chunk boundaries.

The layout is computed from shapes alone: N sequences of together T tokens need at most
T / C + N chunks, so nothing is read on the host and ``torch.compile`` sees plain tensor code.

Shape suffixes: B batch, T tokens, J chunks, C chunk length, H heads, F feature width, D value
width, N states.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.ops.arguments import Linear, Three
from latte.ops.tensors import sequence_bounds, sequence_ids, without_masked
from latte.ops.torch_backend.recurrence import linear_recurrence

CHUNK = 64
SIZES = tuple(1 << n for n in range(CHUNK.bit_length()))  # of the chunks of short texts


class Layout(NamedTuple):
    """Which token stands where, (J, C); which sequence a chunk belongs to; where one begins."""

    token_JC: Tensor
    real_JC: Tensor
    sequence_J: Tensor
    first_J: Tensor
    slot_T: Tensor  # of every token, in the flattened (J, C)
    last_N: Tensor  # the last chunk of every sequence, -1 if it is empty


def packed_layout(cu_seqlens: Tensor, T: int, C: int) -> Layout:
    """Chunks for sequences packed into one row."""
    cu = sequence_bounds(cu_seqlens)
    N = cu.shape[0] - 1
    chunks_N = (cu[1:] - cu[:-1] + C - 1) // C
    bounds = torch.cat([chunks_N.new_zeros(1), chunks_N.cumsum(0)])
    J = (T + C - 1) // C + N
    chunk_J = torch.arange(J, device=cu.device)
    sequence_J = torch.bucketize(chunk_J, bounds[1:].contiguous(), right=True).clamp(max=N - 1)
    within_J = chunk_J - bounds[sequence_J]
    token_JC = (cu[sequence_J] + within_J * C)[:, None] + torch.arange(C, device=cu.device)
    real_JC = (token_JC < cu[sequence_J + 1][:, None]) & (chunk_J < bounds[-1])[:, None]
    ids_T = sequence_ids(cu_seqlens, T)
    place_T = torch.arange(T, device=cu.device) - cu[ids_T]
    slot_T = (bounds[ids_T] + place_T // C) * C + place_T % C
    last_N = torch.where(chunks_N > 0, bounds[1:] - 1, -1)
    token_JC = torch.where(real_JC, token_JC, 0)
    return Layout(token_JC, real_JC, sequence_J, within_J == 0, slot_T, last_N)


def linear_attention(call: Linear) -> Three:
    """See :func:`latte.ops.linear_attention`."""
    q_BTHF, k_BTHF, v_BTHD, key_mask, cu_seqlens, memory, normaliser, causal = call
    T, D = v_BTHD.shape[1], v_BTHD.shape[-1]
    k_BTHF = without_masked(key_mask, k_BTHF)
    # The normaliser is one more column of values, equal to 1.
    v_BTHD = F.pad(without_masked(key_mask, v_BTHD), (0, 1), value=1.0)
    start = None
    if memory is not None and normaliser is not None:
        start = torch.cat([memory, normaliser[..., None]], -1)
    C = next((size for size in SIZES if size >= T), CHUNK)
    layout = None
    if cu_seqlens is None:
        pad = -T % C
        parts = [
            F.pad(x, (0, 0, 0, 0, 0, pad)).unflatten(1, (-1, C)).permute(0, 1, 3, 2, 4)
            for x in (q_BTHF, k_BTHF, v_BTHD)
        ]
    else:
        layout = packed_layout(cu_seqlens, T, C)
        zero = ~layout.real_JC[None, :, :, None, None]
        parts = [
            x[:, layout.token_JC].masked_fill(zero, 0.0).permute(0, 1, 3, 2, 4)
            for x in (q_BTHF, k_BTHF, v_BTHD)
        ]
    q, k, v = parts  # (B, J, H, C, ...)
    after, before = _states(k.mT @ v, start, layout)
    if layout is None:
        final = after[:, -1]
    else:
        final = after[0, layout.last_N.clamp(min=0)]
        nothing = torch.zeros_like(final) if start is None else start
        final = torch.where((layout.last_N < 0)[:, None, None, None], nothing, final)
    if causal:
        out = (q @ k.mT).tril() @ v + q @ before
    elif layout is None:
        out = q @ final[:, None]
    else:
        out = q @ final[layout.sequence_J][None]
    # A denominator of 0 means that nothing is visible: the numerator is 0 as well.
    below = out[..., D:]
    out = out[..., :D] / torch.where(below == 0, 1.0, below)
    out = out.transpose(2, 3).flatten(1, 2)
    out = out[:, :T] if layout is None else out[:, layout.slot_T]
    # Copies: views would keep the states of all chunks alive.
    return out, final[..., :D].clone(), final[..., D].clone()


def _states(
    added_BJHFD: Tensor, start_NHFD: Tensor | None, layout: Layout | None
) -> tuple[Tensor, Tensor]:
    """States after and before every chunk."""
    if layout is None:
        after = added_BJHFD.cumsum(1)
        if start_NHFD is not None:
            after = after + start_NHFD[:, None]
        first = torch.zeros_like(after[:, :1]) if start_NHFD is None else start_NHFD[:, None]
        return after, torch.cat([first, after[:, :-1]], 1)
    # A recurrence whose gate closes where a sequence begins: sums never mix two sequences.
    shape = added_BJHFD.shape
    first = layout.first_J[:, None, None, None]
    nothing = added_BJHFD.new_zeros(())
    begin = nothing if start_NHFD is None else start_NHFD[layout.sequence_J]
    added = added_BJHFD + torch.where(first, begin, nothing)
    gate = (~layout.first_J).to(added.dtype)[None, :, None].expand(1, -1, added[0, 0].numel())
    after = linear_recurrence(gate, added.flatten(2), torch.zeros_like(added[:, 0].flatten(1)))
    after = after.view(shape)
    earlier = torch.cat([torch.zeros_like(after[:, :1]), after[:, :-1]], 1)
    return after, torch.where(first, begin, earlier)
