"""Sliding-window softmax attention in chunks: linear in time and memory, with its own backward.

A chunk of Q queries reads whole chunks of keys: its own, and as many neighbours as the window
reaches. Nothing but the inputs is saved; the backward pass computes the weights again. Full
attention (``window=None``) goes through PyTorch's own kernels. Sinks are S more columns of the
logits, of keys that all chunks of a row share.

Shape suffixes: B batch, T tokens, n sequences computed together, t tokens of a segment, H query
heads, G key/value heads, R = H / G, N chunks of Q queries, M keys read by a chunk, P keys of the
earlier state, S sinks, K key width, D value width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.ops import reference
from latte.ops.arguments import WINDOW_GRADIENTS, Window
from latte.ops.custom_ops import differentiable_op
from latte.ops.state import SeenSinks
from latte.ops.tensors import Local, computation_dtype, without_masked
from latte.ops.torch_backend.batching import AT_ONCE, Rows, rows_of, spans

# Logits that are formed together, 2 MB in fp32.
SCORES_AT_ONCE = 1 << 19


def sliding_window_attention(x: Window) -> tuple[Tensor]:
    """See :func:`latte.ops.sliding_window_attention`."""
    if x.window is not None:
        return (window_op(*x),)
    if x.softcap:
        # No kernel of PyTorch's takes a soft cap on the CPU: the weights are formed.
        return reference.sliding_window_attention(x)
    if x.cu_seqlens is None:
        return (_full(x),)
    T = x.q.shape[1]
    if torch.compiler.is_compiling():
        seen = reference.visible_sources(T, x.sequences, x.q.device)
        k, v = without_masked(x.key_mask, x.k), without_masked(x.key_mask, x.v)
        return (_sdpa(x.q, k, v, x.scale, seen[:, None], False),)
    out = x.v.new_zeros(*x.q.shape[:3], x.v.shape[-1])
    everything = slice(0, T)
    for rows in rows_of(x.q, x.q[0, 0].numel(), T, x.cu_seqlens):
        q, k, v = (rows.gather(y, everything) for y in x.qkv)
        own = x._replace(q=q, k=k, v=v, key_mask=rows.visible(x.key_mask, everything))
        out = rows.scattered(out, _full(own).to(out.dtype))
    return (out,)


def _full(x: Window) -> Tensor:
    """Softmax attention over all (visible) keys of rows that are not packed, in O(T^2)."""
    q, key_mask, scale, causal, (T, P) = x.q, x.key_mask, x.scale, x.causal, (x.q.shape[1], 0)
    k, v = without_masked(key_mask, x.k), without_masked(key_mask, x.v)
    if x.tail_k is not None and x.tail_v is not None and x.tail_mask is not None:
        P = x.tail_k.shape[1]
        k, v = torch.cat([x.tail_k, k], 1), torch.cat([x.tail_v, v], 1)
        own = k.new_ones(k.shape[0], T, dtype=torch.bool) if key_mask is None else key_mask
        key_mask = torch.cat([x.tail_mask, own], 1)
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
    if scale <= 0.0:  # PyTorch's kernel multiplies the causal mask by it too
        q_BTHK, scale = q_BTHK * scale, 1.0
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGD))
    if seen is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale).transpose(
            1, 2
        )
    # A query without a visible key would give NaN, or an average: it reads all keys, and its output
    # is then set to zero.
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

    def keys(self, device: torch.device) -> Tensor:
        """(M,) places of the keys that a chunk reads; its first query's is 0."""
        return torch.arange(self.M, device=device) - self.before * self.Q

    def band(self, device: torch.device) -> Tensor:
        """(Q, M) bool: the key is inside the query's window."""
        gap = torch.arange(self.Q, device=device)[:, None] - self.keys(device)
        if self.causal:
            return (gap >= 0) & (gap < self.window)
        return gap.abs() <= self.window // 2


def put_tokens(line_nHSK: Tensor, x_ntHK: Tensor, start: int) -> None:
    """Write tokens to a line from ``start`` on, and zeros around them."""
    S, t = line_nHSK.shape[2], x_ntHK.shape[1]
    line_nHSK.narrow(2, start, t).copy_(x_ntHK.transpose(1, 2))
    if start:
        line_nHSK.narrow(2, 0, start).zero_()
    if start + t < S:
        line_nHSK.narrow(2, start + t, S - start - t).zero_()


def upper_limits(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Infinity where a key is seen, else the lowest logit."""
    lowest = torch.full(seen.shape, torch.finfo(dtype).min / 2, dtype=dtype, device=seen.device)
    return lowest.masked_fill_(seen, torch.inf)


def limits(
    chunks: Chunks, edges: tuple[int, int, int] | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Upper limits of the logits where no key is masked, (1, chunks or 1, Q, M).

    Those of usual windows are kept.

    Args:
        edges: If keys before the first or after the last token are read: the number of chunks,
            their first token, and the number of tokens. Else None.
    """
    if chunks.Q * chunks.M > SCORES_AT_ONCE:
        return _limits.__wrapped__(chunks, edges, dtype, device)
    return _limits(chunks, edges, dtype, device)


@functools.lru_cache(maxsize=16)
def _limits(
    chunks: Chunks, edges: tuple[int, int, int] | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    seen = chunks.band(device)[None, None]
    if edges is not None:
        count, first, T = edges
        chunk = torch.arange(count, device=device)[:, None]
        token = first + chunks.Q * chunk + chunks.keys(device)
        seen = seen & ((token >= 0) & (token < T))[:, None]
    return upper_limits(seen, dtype)


class WindowSegment:
    """Queries that are computed at once, and the keys around them, as lines of chunks.

    A line has a row of ``width`` chunks for each of X = n G sequences and heads of keys: those
    before the segment, its own N, and those after it, as far as there are any. Every chunk of
    queries reads M consecutive keys of the line without a copy. Some of these may belong to a
    neighbouring row, or to the zeros around the line, and are masked. As many rows as
    ``rows_at_once`` are computed together, with all chunks of the line; of one row the segment's
    own are (``shown``). Rows that are ``apart`` have space between them, and are computed one at a
    time.
    """

    def __init__(
        self,
        rows: Rows,
        span: slice,
        chunks: Chunks,
        x: Window,
        apart: bool,
    ) -> None:
        Q, tail, sinks = chunks.Q, x.tail, x.sinks
        self.rows, self.span, self.chunks, self.apart = rows, span, chunks, apart
        self.dtype = computation_dtype(x.q.dtype)
        self.t = span.stop - span.start
        self.N = -(-self.t // Q)
        P = 0 if tail[0] is None else tail[0].shape[1]
        # Tokens [low, high) of the sequence are in a row from ``pad`` on, after ``old`` of the
        # state's, whose last one is token -1.
        self.before = chunks.before if span.start or P or apart else 0
        after = chunks.after if span.stop < rows.length or apart else 0
        self.width = self.before + self.N + after
        first = span.start - self.before * Q
        self.low, self.high = max(0, first), min(rows.length, first + self.width * Q)
        self.keys_span = slice(self.low, self.high)
        self.pad = self.low - first
        self.old = min(P, self.pad)
        queries = rows.gather(x.q, span)
        self.n, self.G = queries.shape[0], x.k.shape[2]
        self.X = self.n * self.G
        self.R = queries.shape[2] // self.G
        most = max(1, SCORES_AT_ONCE // (self.width * self.R * Q * chunks.M))
        self.rows_at_once = 1 if apart else -(-self.X // -(-self.X // most))
        alone = self.rows_at_once == 1
        self.shown = slice(self.before, self.before + self.N) if alone else slice(0, self.width)
        self.q_line = self.line(queries)
        self.k_line, self.v_line = self._keys(x.k, tail[0]), self._keys(x.v, tail[1])
        self.sinks = None if sinks is None else self._sinks(sinks)
        self.limit, self.alive = self._visible(x.key_mask, tail[2])

    def _sinks(self, sinks: SeenSinks) -> SeenSinks:
        """The sinks of these rows: q as a line, keys and values (X, S, K); seen (n, shown, Q, S).

        The mask is that of the sinks themselves, (n, 1, 1, S).
        """
        Q, start = self.chunks.Q, self.before * self.chunks.Q
        keys, values = (
            x[self.rows.ids].transpose(1, 2).flatten(0, 1).to(self.dtype)
            for x in (sinks.keys, sinks.values)
        )
        counts = self.rows.gather(sinks.seen, self.span)
        counts = F.pad(counts, (start, self.width * Q - start - self.t)).unflatten(1, (-1, Q))
        counts = counts[:, self.shown]
        mask = sinks.mask[self.rows.ids][:, None, None]
        seen = (torch.arange(mask.shape[-1], device=mask.device) < counts[..., None]) & mask
        return SeenSinks(self.line(self.rows.gather(sinks.q, self.span)), keys, values, mask, seen)

    def add_sinks(self, target_NSGK: Tensor, dx_XSK: Tensor) -> None:
        """Add the gradients of these rows' sinks where their keys, or values, came from."""
        dx_nGSK = dx_XSK.unflatten(0, (self.n, self.G))
        target_NSGK[self.rows.ids] += dx_nGSK.transpose(1, 2)

    def _visible(
        self, key_mask: Tensor | None, tail_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Upper limits (n or 1, shown or 1, Q, M + S) of the logits: infinity, or the lowest.

        Also whether a query sees any key, (n, shown, Q, 1); None if all do. The output of a query
        that sees none is an average, since the lowest logit is finite. It is then set to 0.
        """
        chunks, device = self.chunks, self.k_line.device
        Q, start, T = chunks.Q, self.span.start, self.rows.length
        own = self.rows.visible(key_mask, self.keys_span)
        if own is None and not self.old:
            beyond = not chunks.causal and start + (self.N + chunks.after) * Q > T
            first = start + (self.shown.start - self.before) * Q
            edges = (self.shown.stop - self.shown.start, first, T)
            inside = start >= chunks.before * Q and not beyond
            limit = limits(chunks, None if inside else edges, self.dtype, device)
            if self.sinks is not None:
                limit = self._beside(limit, upper_limits(self.sinks.seen, self.dtype))
            return limit, None
        real_nS = torch.zeros(self.n, self.width * Q, dtype=torch.bool, device=device)
        real_nS[:, self.pad : self.pad + self.high - self.low] = True if own is None else own
        if self.old and tail_mask is not None:
            earlier = tail_mask[self.rows.ids]
            real_nS[:, self.pad - self.old : self.pad] = earlier[:, -self.old :]
        for x_line in (self.k_line, self.v_line):
            # A masked key has no weight, but may hold a number that is not finite.
            self.row_tokens(x_line).masked_fill_(~real_nS[:, None, :, None], 0.0)
        around = (chunks.before * Q, chunks.after * Q)
        near = F.pad(real_nS, around).unfold(1, chunks.M, Q)[:, self.shown]
        seen = chunks.band(device) & near[:, :, None]
        if self.sinks is not None:
            seen = self._beside(seen, self.sinks.seen)
        return upper_limits(seen, self.dtype), seen.any(-1, keepdim=True)

    @staticmethod
    def _beside(near: Tensor, far: Tensor) -> Tensor:
        """Values of the window's columns, then of the sinks' columns, (n, shown, Q, M + S)."""
        return torch.cat([near.expand(*far.shape[:3], -1), far], -1)

    def row_tokens(self, x_line: Tensor) -> Tensor:
        """A line of keys as its rows' tokens, (n, G, width Q, K)."""
        first = self.chunks.before
        rows = x_line[first : first + self.X * self.width]
        return rows.view(self.n, self.G, -1, x_line.shape[-1])

    def key_line(self, K: int) -> Tensor:
        """An empty line of keys, with zeros around: (before + X width + after, Q, K)."""
        before, chunks, after = self.chunks.before, self.X * self.width, self.chunks.after
        shape = (before + chunks + after, self.chunks.Q, K)
        x_line = torch.empty(shape, dtype=self.dtype, device=self.q_line.device)
        x_line[:before].zero_()
        if after:
            x_line[-after:].zero_()
        return x_line

    def _keys(self, x: Tensor, tail: Tensor | None) -> Tensor:
        """The line of keys, zeros where there is nothing."""
        x_line = self.key_line(x.shape[-1])
        tokens = self.row_tokens(x_line)
        put_tokens(tokens, self.rows.gather(x, self.keys_span), self.pad)
        if self.old and tail is not None:
            earlier = tail[self.rows.ids][:, tail.shape[1] - self.old :]
            tokens[:, :, self.pad - self.old : self.pad] = earlier.transpose(1, 2)
        return x_line

    def line(self, own: Tensor) -> Tensor:
        """(n, t, H, K) -> (X width, R Q, K): the heads of a group read the same keys."""
        n, t, H, K = own.shape
        Q, start = self.chunks.Q, self.before * self.chunks.Q
        tokens = torch.empty((n, H, self.width * Q, K), dtype=self.dtype, device=own.device)
        put_tokens(tokens, own, start)
        chunks = tokens.view(n, self.G, self.R, self.width, Q, K).transpose(2, 3)
        return chunks.reshape(-1, self.R * Q, K)

    def back(self, x_line: Tensor) -> Tensor:
        """The inverse of :meth:`line`, (n, t, H, K)."""
        K, start = x_line.shape[-1], self.before * self.chunks.Q
        chunks = x_line.view(self.n, self.G, self.width, self.R, self.chunks.Q, K)
        tokens = chunks.transpose(2, 3).reshape(self.n, self.G * self.R, -1, K)
        return tokens.narrow(2, start, self.t).transpose(1, 2)

    def blocks(self) -> Iterator[Block]:
        """The parts of the line whose logits are formed together."""
        for x in range(0, self.X, self.rows_at_once):
            yield Block(self, x, min(self.rows_at_once, self.X - x))


class Block:
    """Rows of a segment from x on, and the chunks of theirs that are shown, from ``first`` on."""

    def __init__(self, part: WindowSegment, x: int, rows: int) -> None:
        self.part, self.x, self.rows = part, x, rows
        self.first = x * part.width + part.shown.start
        self.n = rows * (part.shown.stop - part.shown.start)
        self.own = slice(self.first, self.first + self.n)

    def keys(self, x_line: Tensor) -> Tensor:
        """The keys of a line that each chunk of queries reads, (n, M, K): a view."""
        (_, Q, K), M = x_line.shape, self.part.chunks.M
        return x_line.as_strided((self.n, M, K), (Q * K, K, 1), self.first * Q * K)

    def add_to_keys(self, x_line: Tensor, w: Tensor, y: Tensor, scale: float = 1.0) -> None:
        """The adjoint of :meth:`keys` for w^T y: a chunk of keys gets what all its readers add."""
        heard = torch.bmm(w.transpose(1, 2), y).unflatten(1, (-1, self.part.chunks.Q))
        for j in range(heard.shape[1]):
            x_line[self.first + j : self.first + j + self.n].add_(heard[:, j], alpha=scale)

    def by_row(self, x_line: Tensor) -> Tensor:
        """These queries' part of a line, (rows, n / rows R Q, K): what their sinks are read by."""
        return x_line[self.own].view(self.rows, -1, x_line.shape[-1])

    def of_sinks(self, x_XSK: Tensor) -> Tensor:
        """Keys or values of these rows' sinks, (rows, S, K)."""
        return x_XSK[self.x : self.x + self.rows]

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The columns of the window (n, R Q, M), and of the sinks (rows, n / rows R Q, S)."""
        M = self.part.chunks.M
        if self.part.sinks is None:
            return x, x.new_empty(0)
        return x[..., :M], x[..., M:].reshape(self.rows, -1, x.shape[-1] - M)

    def against(self, x_line: Tensor, values: bool, scale: float = 1.0) -> Tensor:
        """The products of these queries' x with all keys, or values, that they may see."""
        part, sinks, x = self.part, self.part.sinks, x_line[self.own]
        keys = self.keys(part.v_line if values else part.k_line).transpose(1, 2)
        if sinks is None:
            out = x.new_empty(*x.shape[:2], part.chunks.M)
            return out.baddbmm_(x, keys, beta=0, alpha=scale)
        M, S = part.chunks.M, sinks.keys.shape[1]
        out = x.new_empty(*x.shape[:2], M + S)
        out[..., :M].baddbmm_(x, keys, beta=0, alpha=scale)
        queries = x_line if values else sinks.q
        kept = self.of_sinks(sinks.values if values else sinks.keys)
        far = torch.bmm(self.by_row(queries), kept.transpose(1, 2)).mul_(scale)
        out[..., M:] = far.view(*x.shape[:2], S)
        return out

    def weights(self, local: Local) -> tuple[Tensor, Tensor | None]:
        """Attention weights (n, R Q, M + S); with a softcap also tanh of the scaled logits."""
        part = self.part
        logits, tanh = self.against(part.q_line, False, local.scale), None
        if local.softcap:
            tanh = logits.div_(local.softcap).tanh_()
            logits = tanh * local.softcap
        by_place = logits.view(self.rows, -1, part.R, part.chunks.Q, logits.shape[-1])
        torch.minimum(by_place, self._of(part.limit), out=by_place)
        weights = torch.softmax(logits, -1)
        if part.alive is not None:
            weights.view(by_place.shape).mul_(self._of(part.alive))
        return weights, tanh

    def _of(self, x: Tensor) -> Tensor:
        """What a segment knows of its chunks, (n or 1, shown or 1, Q, ...), for these rows."""
        if x.shape[0] > 1:
            x = x[[row // self.part.G for row in range(self.x, self.x + self.rows)]]
        return x[:, :, None]


def _segments(x: Window, apart: bool = False) -> Iterator[WindowSegment]:
    """Segments of equal length, as long as a row's scores stay small."""
    T, H = x.q.shape[1:3]
    longest = T if x.tail_k is None else T + x.tail_k.shape[1]
    chunks = Chunks.of(x.window, x.causal, longest)
    Q = chunks.Q
    most = max(1, AT_ONCE // (H // x.k.shape[2] * Q * chunks.M)) * Q
    for rows in rows_of(x.q, H * max(x.q.shape[-1], x.v.shape[-1]), most, x.cu_seqlens):
        length = -(-rows.length // (-(-rows.length // most) * Q)) * Q
        for span in spans(rows.length, length):
            yield WindowSegment(rows, span, chunks, x, apart)


def _mixes_rows(x: Tensor) -> bool:
    """Whether a gradient is infinite or NaN, which may have spread to rows that read each other.

    It spreads because 0 times infinity is NaN. On a GPU this is not checked, since the host would
    have to wait. There NaN may reach the other sequences of a batch.
    """
    return x.device.type == "cpu" and not math.isfinite(x.sum(dtype=computation_dtype(x.dtype)))


def forward(x: Window, share: Tensor | None = None) -> Tensor:
    """Windowed softmax attention; ``softcap=0`` is none.

    With ``share`` (B, T, H, 1) in the dtype of the sums outputs are multiplied by it, unrounded.
    """
    dtype, D = x.v.dtype if share is None else share.dtype, x.v.shape[-1]
    out = x.v.new_empty((*x.q.shape[:3], D), dtype=dtype)
    for part in _segments(x):
        y_line = part.q_line.new_empty(*part.q_line.shape[:2], D)
        for block in part.blocks():
            near, far = block.split(block.weights(x.local)[0])
            torch.bmm(near, block.keys(part.v_line), out=y_line[block.own])
            if part.sinks is not None:
                block.by_row(y_line).baddbmm_(far, block.of_sinks(part.sinks.values))
        y = part.back(y_line)
        part.rows.put(
            out, part.span, y if share is None else y * part.rows.gather(share, part.span)
        )
    return out


class Gradients(NamedTuple):
    """Gradients of the inputs of a window. ``dq`` has the dtype of q, the others that of the sums.

    ``dtail_k`` and ``dtail_v`` are empty without a tail, and ``dsink_*`` are empty without sinks.
    ``dshare`` (B, T, H, 1) is the share times its gradient, or None without a share.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dtail_k: Tensor
    dtail_v: Tensor
    dsink_q: Tensor
    dsink_k: Tensor
    dsink_v: Tensor
    dshare: Tensor | None


def backward(
    x: Window, dout: Tensor, share: Tensor | None = None, apart: bool = False
) -> Gradients:
    """The gradients of :func:`forward`."""
    (q, k, v), sinks = x.qkv, x.sinks
    dtype = computation_dtype(q.dtype)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dshare = None if share is None else torch.empty_like(share)
    dk, dv = (torch.empty(y.shape, dtype=dtype, device=y.device) for y in (k, v))
    dtail_k, dtail_v = (
        k.new_empty(0) if y is None else k.new_zeros(y.shape, dtype=dtype) for y in x.tail[:2]
    )
    dsink_q, dsink_k, dsink_v = (q.new_empty(0) for _ in range(3))
    if sinks is not None:
        dsink_q = torch.empty_like(sinks.q, memory_format=torch.contiguous_format)
        dsink_k, dsink_v = (y.new_zeros(y.shape, dtype=dtype) for y in sinks[1:3])
    # Keys are shared by neighbouring segments, so their gradients are added up in fp32.
    alone: bool | None = None
    for part in _segments(x, apart):
        rows, span = part.rows, part.span
        if alone is None:
            alone = rows.tokens is None and (part.n, part.t) == q.shape[:2]
            if not alone:
                dk.zero_()
                dv.zero_()
        dy = rows.gather_gradient(dout, span)
        dy_line = part.line(dy if share is None else dy * rows.gather(share, span))
        dq_line, dk_line, dv_line = (
            torch.empty_like(part.q_line),
            torch.zeros_like(part.k_line),
            torch.zeros_like(part.v_line),
        )
        sums_line = dq_line.new_empty(*dq_line.shape[:2], 1)
        if part.sinks is not None:  # of each row, written by its block
            dsink_line, dks, dvs = (torch.empty_like(y) for y in (part.q_line, *part.sinks[1:3]))
        for block in part.blocks():
            weights, tanh = block.weights(x.local)
            queries, dy = part.q_line[block.own], dy_line[block.own]
            pulled = block.against(dy_line, True).mul_(weights)
            near, far = block.split(weights)
            block.add_to_keys(dv_line, near, dy)
            sums = torch.sum(pulled, -1, keepdim=True, out=sums_line[block.own])
            dlogits = pulled.addcmul_(weights, sums, value=-1.0)
            if tanh is not None:
                dlogits *= 1.0 - tanh.square()
            keys = block.keys(part.k_line)
            near, dfar = block.split(dlogits)
            dq_line[block.own].baddbmm_(near, keys, beta=0, alpha=x.scale)
            block.add_to_keys(dk_line, near, queries, x.scale)
            if part.sinks is not None:
                dfar = dfar * x.scale
                kept = block.of_sinks(part.sinks.keys)
                block.by_row(dsink_line).copy_(torch.bmm(dfar, kept))
                block.of_sinks(dks).copy_(torch.bmm(dfar.mT, block.by_row(part.sinks.q)))
                block.of_sinks(dvs).copy_(torch.bmm(far.mT, block.by_row(dy_line)))
        rows.put(dq, span, part.back(dq_line))
        if part.sinks is not None:
            rows.put(dsink_q, span, part.back(dsink_line))
            part.add_sinks(dsink_k, dks)
            part.add_sinks(dsink_v, dvs)
        if dshare is not None:
            rows.put(dshare, span, part.back(sums_line))
        stop = part.pad + part.high - part.low
        for target, dtail, x_line in ((dk, dtail_k, dk_line), (dv, dtail_v, dv_line)):
            dx = part.row_tokens(x_line).transpose(1, 2)
            rows.put(target, part.keys_span, dx[:, part.pad : stop], add=not alone)
            if part.old:
                P = dtail.shape[1]
                dtail[rows.ids, P - part.old :] += dx[:, part.pad - part.old : part.pad]
    if not apart and _mixes_rows(dk):  # all numbers that are not finite pass here
        return backward(x, dout, share, apart=True)
    return Gradients(dq, dk, dv, dtail_k, dtail_v, dsink_q, dsink_k, dsink_v, dshare)


window_op = differentiable_op(
    "sliding_window",
    Window,
    lambda x: x.v.new_empty((*x.q.shape[:3], x.v.shape[-1])),
    forward,
    lambda x, dout: dict(zip(WINDOW_GRADIENTS, backward(x, dout)[:-1], strict=True)),
    returns=["out"],
    gradients=WINDOW_GRADIENTS,
)
