"""Sliding-window softmax attention in chunks: linear in time and memory, with its own backward.

A chunk of Q queries reads whole chunks of keys: its own, and as many neighbours as the window
reaches. Nothing but the inputs is saved; the backward pass computes the weights again. Full
attention (``window=None``) goes through PyTorch's own kernels.

Shape suffixes: B batch, T tokens, n sequences computed together, t tokens of a segment, H query
heads, G key/value heads, R = H / G, N chunks of Q queries, M keys read by a chunk, P keys of the
earlier state, K key width, D value width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.ops import custom_ops, reference
from latte.ops.custom_ops import Earlier, Three, run_window
from latte.ops.state import WindowState
from latte.ops.tensors import Local, Sequences, computation_dtype, without_masked
from latte.ops.torch_backend.batching import AT_ONCE, Rows, rows_of, spans


def sliding_window_attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGD: Tensor,
    local: Local,
    sequences: Sequences,
    tail: WindowState | None,
) -> Tensor:
    """See :func:`latte.ops.sliding_window_attention`."""
    inputs = (q_BTHK, k_BTGK, v_BTGD)
    if local.window is not None:
        return run_window(window_op, *inputs, local, sequences, tail)
    if local.softcap:
        # No kernel of PyTorch's takes a soft cap on the CPU: the weights are formed.
        return reference.sliding_window_attention(*inputs, local, sequences, tail)
    scale, (key_mask, cu_seqlens, causal) = local.scale, sequences
    if cu_seqlens is None:
        return _full(*inputs, scale, causal, key_mask, tail)
    T = q_BTHK.shape[1]
    if torch.compiler.is_compiling():
        seen = reference.visible_sources(T, sequences, q_BTHK.device)
        k_BTGK, v_BTGD = without_masked(key_mask, k_BTGK), without_masked(key_mask, v_BTGD)
        return _sdpa(q_BTHK, k_BTGK, v_BTGD, scale, seen[:, None], False)
    out = v_BTGD.new_zeros(*q_BTHK.shape[:3], v_BTGD.shape[-1])
    everything = slice(0, T)
    for rows in rows_of(q_BTHK, q_BTHK[0, 0].numel(), T, cu_seqlens):
        q, k, v = (rows.take(x, everything) for x in inputs)
        y = _full(q, k, v, scale, causal, rows.visible(key_mask, everything), None)
        out = rows.scattered(out, y.to(out.dtype))
    return out


def _full(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    key_mask: Tensor | None,
    earlier: WindowState | None,
) -> Tensor:
    """Softmax attention over all (visible) keys of rows that are not packed, in O(T^2)."""
    T, P = q.shape[1], 0
    k, v = without_masked(key_mask, k), without_masked(key_mask, v)
    if earlier is not None:
        P = earlier.keys.shape[1]
        k, v = torch.cat([earlier.keys, k], 1), torch.cat([earlier.values, v], 1)
        own = k.new_ones(k.shape[0], T, dtype=torch.bool) if key_mask is None else key_mask
        key_mask = torch.cat([earlier.mask, own], 1)
    if key_mask is None:
        return _sdpa(q, k, v, scale, None, causal)
    seen = key_mask[:, None, None, :]
    if causal:
        gap = torch.arange(T, device=q.device)[:, None] + P
        seen = seen & (gap >= torch.arange(T + P, device=q.device)[None])
    else:
        seen = seen.expand(-1, 1, T, -1)
    return _sdpa(q, k, v, scale, seen, False)


def _sdpa(
    q_BTHK: Tensor, k_BSGK: Tensor, v_BSGD: Tensor, scale: float, seen: Tensor | None, causal: bool
) -> Tensor:
    repeats = q_BTHK.shape[2] // k_BSGK.shape[2]
    if repeats > 1:
        k_BSGK = k_BSGK.repeat_interleave(repeats, 2)
        v_BSGD = v_BSGD.repeat_interleave(repeats, 2)
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGD))
    if seen is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale).transpose(
            1, 2
        )
    # A query without a visible key would be NaN, or an average: let it look at all, then zero it.
    alive = seen.any(-1, keepdim=True)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen | ~alive, scale=scale)
    return (out * alive).transpose(1, 2)


class Chunks(NamedTuple):
    """How queries and keys are chunked: Q queries see ``before + 1 + after`` chunks of keys."""

    Q: int
    before: int
    after: int
    window: int
    causal: bool

    @classmethod
    def of(cls, window: int, causal: bool, T: int) -> Chunks:
        """Chunks of about half a window: three chunks of keys then cover it."""
        reach = min(window - 1 if causal else window // 2, max(T - 1, 0))
        Q = min(128, max(16, 1 << (max(reach, 1).bit_length() - 1)))
        before = -(-reach // Q)
        return cls(Q, before, 0 if causal else before, window, causal)

    @property
    def M(self) -> int:
        """Keys that a chunk of queries reads."""
        return (self.before + 1 + self.after) * self.Q

    def band(self, device: torch.device) -> Tensor:
        """(Q, M) bool: the key is inside the query's window."""
        query = torch.arange(self.Q, device=device)[:, None]
        gap = query + self.before * self.Q - torch.arange(self.M, device=device)[None]
        if self.causal:
            return (gap >= 0) & (gap < self.window)
        return gap.abs() <= self.window // 2

    def gather(self, x_nGSK: Tensor, N: int) -> Tensor:
        """Chunks of keys for every chunk of queries: (n G N, M, K)."""
        x = x_nGSK.unflatten(2, (-1, self.Q))
        parts = [x[:, :, j : j + N] for j in range(self.before + 1 + self.after)]
        return torch.cat(parts, 3).flatten(0, 2)

    def scatter(self, dx_ZMK: Tensor, n: int, G: int, N: int) -> Tensor:
        """The adjoint of :meth:`gather`: overlapping chunks are added, (n, G, S, K)."""
        dx = dx_ZMK.view(n, G, N, -1, self.Q, dx_ZMK.shape[-1])
        out = dx.new_zeros(n, G, N + self.before + self.after, self.Q, dx.shape[-1])
        for j in range(self.before + 1 + self.after):
            out[:, :, j : j + N] += dx[:, :, :, j]
        return out.flatten(2, 3)


class Segment:
    """Queries that are computed at once, with the keys around them."""

    def __init__(
        self,
        rows: Rows,
        span: slice,
        chunks: Chunks,
        qkv: tuple[Tensor, Tensor, Tensor],
        key_mask: Tensor | None,
        tail: Earlier,
    ) -> None:
        q, k, v = qkv
        self.rows, self.span, self.chunks = rows, span, chunks
        self.dtype = computation_dtype(q.dtype)
        self.t = span.stop - span.start
        self.N = -(-self.t // chunks.Q)
        # Keys [low, high) of the sequence stand at [pad, ...) of the buffers; earlier ones come
        # from the state, whose last key is token -1.
        first = span.start - chunks.before * chunks.Q
        stop = span.start + (self.N + chunks.after) * chunks.Q
        self.low, self.high = max(0, first), min(rows.length, stop)
        self.keys_span = slice(self.low, self.high)
        self.pad = self.low - first
        self.S = stop - first
        P = 0 if tail[0] is None else tail[0].shape[1]
        self.old = min(P, max(0, -first)) if self.low == 0 else 0
        self.k_nGSK, self.v_nGSD = self._keys(k, tail[0]), self._keys(v, tail[1])
        self.q_ZRQK = self.chunked(rows.take(q, span))
        self.n, self.G = self.k_nGSK.shape[:2]
        real_nS = torch.zeros(self.n, self.S, dtype=torch.bool, device=q.device)
        own = rows.visible(key_mask, self.keys_span)
        real_nS[:, self.pad : self.pad + self.high - self.low] = True if own is None else own
        if self.old and tail[2] is not None:
            real_nS[:, self.pad - self.old : self.pad] = tail[2][rows.ids][:, P - self.old :]
        if own is not None or self.old:
            # A masked key has no weight, but it may hold what is not finite.
            for x in (self.k_nGSK, self.v_nGSD):
                x.masked_fill_(~real_nS[:, None, :, None], 0.0)
        # (n, 1, N, 1, Q, M): band and mask
        near_nNM = chunks.gather(real_nS[:, None, :, None], self.N).view(self.n, self.N, -1)
        self.seen = (chunks.band(q.device) & near_nNM[:, :, None])[:, None, :, None]
        self.alive = self.seen.any(-1, keepdim=True)

    def _keys(self, x: Tensor, tail: Tensor | None) -> Tensor:
        """(n, G, S, K) around the segment, zeros where there is nothing."""
        own = self.rows.take(x, self.keys_span)
        out = own.new_zeros((own.shape[0], own.shape[2], self.S, own.shape[3]), dtype=self.dtype)
        out[:, :, self.pad : self.pad + own.shape[1]] = own.transpose(1, 2)
        if self.old and tail is not None:
            earlier = tail[self.rows.ids][:, tail.shape[1] - self.old :]
            out[:, :, self.pad - self.old : self.pad] = earlier.transpose(1, 2)
        return out

    def chunked(self, own: Tensor) -> Tensor:
        """(n, t, H, K) -> (n G N, R Q, K): the heads of a group read the same keys."""
        n, t, H, K = own.shape
        G = self.k_nGSK.shape[1]
        out = own.new_zeros((n, G, self.N, H // G, self.chunks.Q, K), dtype=self.dtype)
        flat = own.new_zeros((n, self.N * self.chunks.Q, H, K), dtype=self.dtype)
        flat[:, :t] = own
        out[:] = flat.view(n, self.N, self.chunks.Q, G, H // G, K).permute(0, 3, 1, 4, 2, 5)
        return out.view(n * G * self.N, -1, K)

    def back(self, x_ZRQK: Tensor) -> Tensor:
        """The inverse of :meth:`chunked`, (n, t, H, K)."""
        x = x_ZRQK.view(self.n, self.G, self.N, -1, self.chunks.Q, x_ZRQK.shape[-1])
        x = x.permute(0, 2, 4, 1, 3, 5).flatten(3, 4).flatten(1, 2)
        return x[:, : self.t]

    def masked(self, x_ZRQM: Tensor, mask: Tensor, fill: float) -> Tensor:
        """Fill where the mask (n, 1, N, 1, Q, M or 1) is False."""
        shape = (self.n, self.G, self.N, -1, self.chunks.Q, x_ZRQM.shape[-1])
        x_ZRQM.view(shape).masked_fill_(~mask, fill)
        return x_ZRQM

    def weights(self, local: Local) -> tuple[Tensor, Tensor | None]:
        """Attention weights (Z, R Q, M); with a softcap also tanh of the scaled logits."""
        keys = self.chunks.gather(self.k_nGSK, self.N)
        logits = torch.bmm(self.q_ZRQK, keys.mT).mul_(local.scale)
        tanh = None
        if local.softcap:
            tanh = logits.div_(local.softcap).tanh_()
            logits = tanh * local.softcap
        # A finite minimum: rows without a visible key become an average, zeroed afterwards.
        logits = self.masked(logits, self.seen, torch.finfo(logits.dtype).min / 2)
        return torch.softmax(logits, -1), tanh


def _segments(qkv: Three, local: Local, sequences: Sequences, tail: Earlier) -> Iterator[Segment]:
    """Segments whose scores stay small."""
    q, _, v = qkv
    T, H = q.shape[1:3]
    assert local.window is not None
    longest = T if tail[0] is None else T + tail[0].shape[1]
    chunks = Chunks.of(local.window, sequences.causal, longest)
    width = H * max(chunks.M, q.shape[-1], v.shape[-1])
    length = max(1, AT_ONCE // (width * chunks.Q)) * chunks.Q
    for rows in rows_of(q, width, length, sequences.cu_seqlens):
        for span in spans(rows.length, length):
            yield Segment(rows, span, chunks, qkv, sequences.key_mask, tail)


def forward(qkv: Three, local: Local, sequences: Sequences, tail: Earlier) -> Tensor:
    """Windowed softmax attention; ``softcap=0`` is none."""
    q, _, v = qkv
    out = v.new_empty((*q.shape[:3], v.shape[-1]))
    for part in _segments(qkv, local, sequences, tail):
        weights, _ = part.weights(local)
        y = torch.bmm(weights, part.chunks.gather(part.v_nGSD, part.N))
        part.rows.put(out, part.span, part.back(part.masked(y, part.alive, 0.0)))
    return out


def backward(
    dout: Tensor, qkv: Three, local: Local, sequences: Sequences, tail: Earlier
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and of the earlier keys and values (empty where there are none)."""
    q, k, v = qkv
    dtype = computation_dtype(q.dtype)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    # Keys are shared by neighbouring segments, so their gradients are added up in fp32.
    dk, dv = (x.new_zeros(x.shape, dtype=dtype) for x in (k, v))
    dtail_k, dtail_v = (k.new_zeros(0 if x is None else x.shape, dtype=dtype) for x in tail[:2])
    for part in _segments(qkv, local, sequences, tail):
        rows, span, chunks, N = part.rows, part.span, part.chunks, part.N
        weights, tanh = part.weights(local)
        dy = part.masked(part.chunked(rows.take_gradient(dout, span)), part.alive, 0.0)
        dvalues = torch.bmm(weights.mT, dy)
        dweights = torch.bmm(dy, chunks.gather(part.v_nGSD, N).mT)
        row = (weights * dweights).sum(-1, keepdim=True)
        dlogits = dweights.sub_(row).mul_(weights).mul_(local.scale)
        if tanh is not None:
            dlogits = dlogits * (1.0 - tanh.square())
        dqueries = torch.bmm(dlogits, chunks.gather(part.k_nGSK, N))
        dkeys = torch.bmm(dlogits.mT, part.q_ZRQK)
        rows.put(dq, span, part.back(dqueries))
        stop = part.pad + part.high - part.low
        for target, dtail, chunked in ((dk, dtail_k, dkeys), (dv, dtail_v, dvalues)):
            dx = chunks.scatter(chunked, part.n, part.G, N).transpose(1, 2)
            rows.add(target, part.keys_span, dx[:, part.pad : stop])
            if part.old:
                P = dtail.shape[1]
                dtail[rows.ids, P - part.old :] += dx[:, part.pad - part.old : part.pad]
    return dq, dk.to(k.dtype), dv.to(v.dtype), dtail_k.to(k.dtype), dtail_v.to(v.dtype)


window_op = custom_ops.window_op("sliding_window", forward, backward)
