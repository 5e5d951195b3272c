"""The RG-LRU in about 2 sqrt(T) steps instead of T, and the causal convolution.

Time is cut into sqrt(T) chunks that are computed together, in two passes. The first pass finds how
each chunk changes its incoming state. The second pass starts from the true incoming states and
writes the outputs.

Shape suffixes: B batch, T tokens, N chunks (of a state: sequences), C chunk length, E channels, K
taps.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.ops.arguments import RGLRU, Convolution
from latte.ops.custom_ops import differentiable_op
from latte.ops.state import last_tokens
from latte.ops.tensors import (
    computation_dtype,
    count_sequences,
    sequence_bounds,
    sequence_ids,
    sequence_starts,
    without_masked,
)
from latte.ops.torch_backend.batching import spans

# Griffin's constant c: log a_t = -c r_t softplus(theta).
GATE_STRENGTH = 8.0
# Elements of one segment of time, 16 MB in fp32.
AT_ONCE = 1 << 22


def rg_lru(call: RGLRU) -> tuple[Tensor, Tensor]:
    """See :func:`latte.ops.rg_lru`."""
    *inputs, theta_E, initial_state, key_mask, cu_seqlens, reverse = call
    (B, T, E), dtype = call.x.shape, computation_dtype(call.x.dtype)
    h0_NE = initial_state
    if h0_NE is None:
        h0_NE = call.x.new_zeros(count_sequences(B, cu_seqlens), E, dtype=dtype)
    if reverse:
        inputs = [z.flip(1) for z in inputs]
        key_mask = None if key_mask is None else key_mask.flip(1)
        cu_seqlens = None if cu_seqlens is None else T - cu_seqlens.flip(0)
        h0_NE = h0_NE if cu_seqlens is None else h0_NE.flip(0)
    x, r, i = (without_masked(key_mask, z).to(dtype) for z in inputs)
    log_a = -GATE_STRENGTH * torch.sigmoid(r) * F.softplus(theta_E.to(dtype))
    # The factor's slope is infinite at a = 1, where a closed gate underflows.
    log_a = log_a.clamp(max=-torch.finfo(dtype).tiny)
    a, factor = torch.exp(log_a), torch.sqrt(-torch.expm1(2.0 * log_a))
    starts = _first_tokens(B, T, h0_NE, key_mask, cu_seqlens)[..., None]
    a = torch.where(starts, 0.0, a)
    b = torch.where(starts, 1.0, factor) * torch.sigmoid(i) * x
    if key_mask is not None:
        a = torch.where(key_mask[..., None], a, 1.0)
    first_BE = h0_NE
    if cu_seqlens is not None:
        position = torch.arange(T, device=x.device) - sequence_starts(cu_seqlens, T)
        begins = (position == 0)[None, :, None]
        if initial_state is not None:
            b = b + torch.where(begins, a * h0_NE[sequence_ids(cu_seqlens, T)][None], 0.0)
        a = torch.where(begins, 0.0, a)
        first_BE = torch.zeros_like(b[:, 0])
    h = linear_recurrence(a, b, first_BE)
    last_NE = h[:, -1]
    if cu_seqlens is not None:
        bounds = sequence_bounds(cu_seqlens)
        end = (bounds[1:] - 1).clamp(min=0)
        empty = (bounds.diff() == 0)[:, None]
        last_NE = torch.where(empty, h0_NE, h[0, end])
        last_NE = last_NE.flip(0) if reverse else last_NE
    return (h.flip(1) if reverse else h).to(call.x.dtype), last_NE


def _first_tokens(
    B: int, T: int, h0_NE: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    """(B, T) bool: the first valid token of every sequence that has not begun before."""
    ids = None if cu_seqlens is None else sequence_ids(cu_seqlens, T)
    if key_mask is None:
        position = torch.arange(T, device=h0_NE.device)
        if cu_seqlens is not None:
            position = position - sequence_starts(cu_seqlens, T)
        first = (position == 0)[None].expand(B, T)
    else:
        count = key_mask.long().cumsum(1)
        if cu_seqlens is not None:
            before = F.pad(count[0], (1, 0))[sequence_starts(cu_seqlens, T)]
            count = count - before[None]
        first = key_mask & (count == 1)
    new_N = (h0_NE == 0).all(-1)
    return first & (new_N[:, None] if ids is None else new_N[ids][None])


def _advance(a_BTE: Tensor, b_BTE: Tensor, h_BE: Tensor, out_BTE: Tensor, back: bool) -> Tensor:
    """Scan one segment into ``out`` and return its last state; ``back``: from its end."""
    B, T, E = a_BTE.shape
    C = 1 << max(0, round(math.log2(max(T, 1)) / 2))
    N = T // C
    whole, rest = slice(0, N * C), range(N * C, T)
    if back:
        whole, rest = slice(T - N * C, T), range(T - N * C - 1, -1, -1)
    if N:
        a, b, out = (x[:, whole].unflatten(1, (N, C)) for x in (a_BTE, b_BTE, out_BTE))
        order = range(C - 1, -1, -1) if back else range(C)
        end_BNE, decay_BNE = torch.zeros_like(b[:, :, 0]), torch.ones_like(a[:, :, 0])
        for c in order:
            torch.addcmul(b[:, :, c], a[:, :, c], end_BNE, out=end_BNE)
            decay_BNE *= a[:, :, c]
        state_BNE = torch.empty_like(end_BNE)
        for n in range(N - 1, -1, -1) if back else range(N):
            state_BNE[:, n] = h_BE
            h_BE = torch.addcmul(end_BNE[:, n], decay_BNE[:, n], h_BE)
        for c in order:
            torch.addcmul(b[:, :, c], a[:, :, c], state_BNE, out=state_BNE)
            out[:, :, c] = state_BNE
    for t in rest:
        h_BE = torch.addcmul(b_BTE[:, t], a_BTE[:, t], h_BE)
        out_BTE[:, t] = h_BE
    return h_BE


def scan(a_BTE: Tensor, b_BTE: Tensor, h0_BE: Tensor, back: bool = False) -> Tensor:
    """All h_t, forward in time or backward, in segments that fit the allocator."""
    out_BTE = torch.empty_like(b_BTE, memory_format=torch.contiguous_format)
    B, T, E = a_BTE.shape
    segments = spans(T, max(256, AT_ONCE // max(1, B * E)))
    h_BE = h0_BE
    for span in reversed(segments) if back else segments:
        h_BE = _advance(a_BTE[:, span], b_BTE[:, span], h_BE, out_BTE[:, span], back)
    return out_BTE


class Recurrence(NamedTuple):
    """a, b (B, T, E) and h0 (B, E), all of one dtype."""

    a: Tensor
    b: Tensor
    h0: Tensor


def _forward(x: Recurrence) -> Tensor:
    """h_t = a_t h_{t-1} + b_t."""
    return scan(*x)


def _backward(x: Recurrence, dh: Tensor) -> dict[str, Tensor]:
    """g_t = dh_t + a_{t+1} g_{t+1}; da_t = g_t h_{t-1}, db_t = g_t, dh0 = a_1 g_1."""
    a, h, h0 = x  # h stands in for b
    following = torch.cat([a[:, 1:], torch.zeros_like(a[:, :1])], 1)
    g = scan(following, dh, torch.zeros_like(h0), back=True)
    if g.device.type == "cpu" and not g[:, 0].isfinite().all():
        # A gate of zero stops gradients that are not finite at the start of a sequence.
        bad = ~dh.isfinite()
        reached = scan(
            (following != 0).to(g.dtype), bad.to(g.dtype), torch.zeros_like(h0), back=True
        )
        g = scan(following, dh.masked_fill(bad, 0.0), torch.zeros_like(h0), back=True)
        g = g.masked_fill_(reached > 0, torch.nan)
    da = torch.empty_like(a, memory_format=torch.contiguous_format)
    torch.mul(g[:, 1:], h[:, :-1], out=da[:, 1:])
    torch.mul(g[:, 0], h0, out=da[:, 0])
    return {"a": da, "b": g, "h0": (a[:, 0] * g[:, 0]).contiguous()}


linear_recurrence = differentiable_op(
    "linear_recurrence",
    Recurrence,
    lambda x: torch.empty_like(x.b, memory_format=torch.contiguous_format),
    _forward,
    _backward,
    returns=["h"],
    gradients=["a", "b", "h0"],
    stand_ins={"b": "h"},
)


def causal_conv1d(call: Convolution) -> tuple[Tensor, Tensor]:
    """See :func:`latte.ops.causal_conv1d`."""
    x_BTE, weight_EK, bias_E, initial_state, key_mask, cu_seqlens = call
    (B, T, E), K, dtype = x_BTE.shape, weight_EK.shape[1], computation_dtype(x_BTE.dtype)
    x = without_masked(key_mask, x_BTE.to(dtype))
    tail = initial_state
    tail = x.new_zeros(count_sequences(B, cu_seqlens), K - 1, E) if tail is None else tail.to(dtype)
    if cu_seqlens is None:
        extended = torch.cat([tail, x], 1)
        taps = [extended[:, i : i + T] for i in range(K)]
        after = extended[:, T:].clone()
    else:
        position = torch.arange(T, device=x.device) - sequence_starts(cu_seqlens, T)
        ids = sequence_ids(cu_seqlens, T)
        taps = []
        for i in range(K):
            back = K - 1 - i
            shifted = F.pad(x, (0, 0, back, 0))[:, :T]
            if back:
                earlier = tail[ids, (i + position).clamp(max=K - 2)][None]
                shifted = torch.where((position >= back)[None, :, None], shifted, earlier)
            taps.append(shifted)
        after = last_tokens(x, K - 1, cu_seqlens, tail)
    weight = weight_EK.to(dtype)
    y = sum((weight[:, i] * tap for i, tap in enumerate(taps)), x.new_zeros(()))
    if bias_E is not None:
        y = y + bias_E.to(dtype)
    return y.to(x_BTE.dtype), after.to(x_BTE.dtype)
