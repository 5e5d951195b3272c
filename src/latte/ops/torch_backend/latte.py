"""Latte in linear time: the driver over batches and segments, as custom ops; and Macchiato.

Saved activations are the inputs and one state per segment of time: O(T / 2048) states, never
O(T L D). A segment is one run in the linear domain (``linear_domain``) wherever one reference can
serve all of it; else it is cut into such runs and pairwise ones (``pairwise``). On a GPU all are
pairwise, as asking would wait for the device.

Shape suffixes: B batch, T tokens, n sequences computed together, X = n H rows, S tokens of a
segment, t of them not padding, H heads, L latents, D value width, N states.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.ops import reference
from latte.ops.custom_ops import Earlier, Three, empty_gradients, final_buffers, latte_op, run_latte
from latte.ops.state import LatteState
from latte.ops.tensors import Sequences, computation_dtype, without_masked
from latte.ops.torch_backend import linear_domain, pairwise
from latte.ops.torch_backend.batching import (
    AT_ONCE,
    CHUNK,
    Carry,
    Rows,
    divide,
    exp_difference,
    rows_of,
    spans,
)
from latte.ops.torch_backend.window import sliding_window_attention

LONGEST_SEGMENT = 2048
# Tokens given to the pairwise kernel where the linear-domain kernel's runs are short.
SAFE_RUN = 256


def latte_attention(
    q_BTHL: Tensor,
    k_BTHL: Tensor,
    v_BTHD: Tensor,
    sequences: Sequences,
    earlier: LatteState | None,
) -> tuple[Tensor, LatteState]:
    """See :func:`latte.ops.latte_attention`."""
    op = causal_op if sequences.causal else bidirectional_op
    return run_latte(op, q_BTHL, k_BTHL, v_BTHD, sequences, earlier)


# Each branch by its own op.
macchiato_attention = functools.partial(
    reference.macchiato_attention, latents=latte_attention, window=sliding_window_attention
)


def segment_length(H: int, L: int, D: int) -> int:
    """Tokens computed at once: about ``AT_ONCE`` elements, a power of two, at most 2048."""
    length = LONGEST_SEGMENT
    while length > CHUNK and length * H * max(L, D, 2 * CHUNK) > AT_ONCE:
        length //= 2
    return length


def padded_length(t: int) -> int:
    """Whole chunks, or a power of two below one chunk."""
    return -(-t // CHUNK) * CHUNK if t >= CHUNK else 1 << (t - 1).bit_length()


def aligned(D: int) -> int:
    """Whole cache lines, so that a product's rounding does not depend on where it is stored."""
    return -(-D // 16) * 16


def widened(x: Tensor) -> Tensor:
    """Zeros up to :func:`aligned` in the last dimension."""
    missing = aligned(x.shape[-1]) - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


def initial_carry(A: Tensor, mu: Tensor, rows: Rows) -> Carry:
    """The rows' states before their first token, heads first."""
    return Carry.of(A[rows.ids].flatten(0, 1), widened(mu[rows.ids].flatten(0, 1)))


def heads_first(x_ntHD: Tensor, S: int, dtype: torch.dtype, fill: float = 0.0) -> Tensor:
    """(n, t, H, D) -> contiguous (n H, S, D), padded from t to S tokens."""
    n, t, H, D = x_ntHD.shape
    out = x_ntHD.new_empty(n, H, S, D, dtype=dtype)
    out[:, :, :t] = x_ntHD.transpose(1, 2)
    out[:, :, t:] = fill
    return out.view(n * H, S, D)


class Segment:
    """What is computed at once: its inputs, heads first and in the dtype of the sums."""

    def __init__(
        self, rows: Rows, span: slice, qkv: tuple[Tensor, Tensor, Tensor], key_mask: Tensor | None
    ) -> None:
        q, k, v = (rows.take(x, span) for x in qkv)
        self.rows, self.span, self.dtype = rows, span, computation_dtype(q.dtype)
        self.n, self.t, self.H = q.shape[:3]
        self.S = padded_length(self.t)
        self.seen_XS: Tensor | None = None
        real = rows.visible(key_mask, span)
        if real is not None:
            k = k.masked_fill(~real[:, :, None, None], -torch.inf)
            v = without_masked(real, v)
            seen_nt = real.cumsum(1) > 0
            seen_nS = torch.cat([seen_nt, seen_nt[:, -1:].expand(-1, self.S - self.t)], 1)
            self.seen_XS = seen_nS.repeat_interleave(self.H, 0)
        self.p_XSL = heads_first(q, self.S, self.dtype).softmax(-1)
        self.k_XSL = heads_first(k, self.S, self.dtype, -torch.inf)
        self.v_XSD = widened(heads_first(v, self.S, self.dtype))

    def gradient(self, dout: Tensor) -> Tensor:
        """The outputs' gradient (B, T, H, D) at these tokens: (X, S, D)."""
        dy = self.rows.take_gradient(dout, self.span)
        return widened(heads_first(dy, self.S, self.dtype))

    def put(self, target: Tensor, x_XSD: Tensor) -> None:
        """Write (X, S, D) back to these tokens of the target (B, T, H, D)."""
        x_nHSD = x_XSD.view(self.n, self.H, self.S, -1)[:, :, : self.t, : target.shape[-1]]
        self.rows.put(target, self.span, x_nHSD.transpose(1, 2))

    def run(self, start: int, state: Carry, after_short: bool) -> Run:
        """The run of tokens from ``start`` on, as long as its kernel can serve; see ``Run``."""
        k = self.k_XSL[:, start:]
        seen = None if self.seen_XS is None else self.seen_XS[:, start:]
        if self.k_XSL.device.type != "cpu":
            # Asking for the reach of a reference would wait for the device.
            return Run(self, slice(start, self.S), state, None)
        if after_short:
            return Run(self, slice(start, min(self.S, start + SAFE_RUN)), state, None)
        reference = linear_domain.reference_logits(k, state, seen)
        stop = start + linear_domain.run_length(k, reference)
        return Run(self, slice(start, stop), state, reference)

    def forward(self, state: Carry) -> tuple[Tensor, Carry]:
        """Outputs (X, S, D) and the state after the segment."""
        outputs: list[Tensor] = []
        stop, short = 0, False
        while stop < self.S:
            run = self.run(stop, state, short)
            out, state = run.forward()
            outputs.append(out)
            stop, short = run.span.stop, run.short
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1), state

    def backward(
        self, state: Carry, dy_XSD: Tensor, dA_XL: Tensor, dmu_XLD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(dq, dk, dv, dA, dmu); the last two belong to the state before the segment."""
        runs: list[Run] = []
        while not runs or runs[-1].span.stop < self.S:
            if runs:
                state = runs[-1].state_after()
            stop, short = (runs[-1].span.stop, runs[-1].short) if runs else (0, False)
            runs.append(self.run(stop, state, short))
        parts: list[tuple[Tensor, ...]] = []
        for run in reversed(runs):
            *part, dA_XL, dmu_XLD = run.backward(dy_XSD[:, run.span], dA_XL, dmu_XLD)
            parts.append(tuple(part))
        if len(parts) == 1:
            dq, dk, dv = parts[0]
        else:
            dq, dk, dv = (torch.cat(xs[::-1], 1) for xs in zip(*parts, strict=True))
        return dq, dk, dv, dA_XL, dmu_XLD


class Run:
    """Consecutive tokens of a segment that one kernel serves.

    The linear-domain kernel needs a reference that no key exceeds by far; it ends where one does.
    Where such runs are short (logits that rise by leaps) the pairwise kernel takes some tokens. The
    choice depends on the past alone.
    """

    def __init__(
        self, segment: Segment, span: slice, state: Carry, reference: Tensor | None
    ) -> None:
        self.span, self.state = span, state
        self.length = span.stop - span.start
        self.chunk = min(CHUNK, segment.S)
        self.short = reference is not None and self.length < CHUNK
        whole = (segment.p_XSL, segment.k_XSL, segment.v_XSD)
        self.p, self.k, self.v = (
            self.padded(x[:, span], fill)
            for x, fill in zip(whole, (0.0, -torch.inf, 0.0), strict=True)
        )
        self.keys: linear_domain.Scaled | None = None
        if reference is not None:
            seen = None
            if segment.seen_XS is not None:
                seen = segment.seen_XS[:, span]
                rest = self.p.shape[1] - self.length
                seen = torch.cat([seen, seen[:, -1:].expand(-1, rest)], 1)
            self.keys = linear_domain.scaled_keys(self.k, reference, state, seen)

    def padded(self, x_XSD: Tensor, fill: float) -> Tensor:
        """Whole chunks, of the segment's size whatever the length: rounding depends on it."""
        missing = -self.length % self.chunk
        return F.pad(x_XSD, (0, 0, 0, missing), value=fill) if missing else x_XSD

    def forward(self) -> tuple[Tensor, Carry]:
        """Outputs of these tokens and the state after them."""
        if self.keys is None:
            out, state = pairwise.forward(self.p, self.k, self.v, self.state)
        else:
            out, state = linear_domain.forward(self.p, self.keys, self.v, self.state.mean)
        return out[:, : self.length], state

    def state_after(self) -> Carry:
        """Only the state after these tokens."""
        if self.keys is None:
            return pairwise.state_after(self.k, self.v, self.state)
        return linear_domain.state_after(self.keys, self.v, self.state.mean)

    def backward(self, dy: Tensor, dA: Tensor, dmu: Tensor) -> tuple[Tensor, ...]:
        """Gradients of these tokens and of the state before them."""
        dy = self.padded(dy, 0.0)
        if self.keys is None:
            grads = pairwise.backward(self.p, self.k, self.v, self.state, dy, dA, dmu)
        else:
            grads = linear_domain.backward(self.p, self.keys, self.v, self.state.mean, dy, dA, dmu)
        return *(x[:, : self.length] for x in grads[:3]), *grads[3:]


def first_state(
    q: Tensor, v: Tensor, sequences: Sequences, earlier: Earlier
) -> tuple[Tensor, Tensor]:
    """Fresh buffers (N, H, L), (N, H, L, D) that hold the state before the first token."""
    A, mu = earlier
    if A is not None and mu is not None:
        return A.clone(), mu.clone()
    A, mu = final_buffers(q, v, sequences.cu_seqlens)
    return A.fill_(-torch.inf), mu.zero_()


def gradient_buffers(grads: Three) -> tuple[Tensor, Tensor]:
    """Fresh copies of the final state's gradients, to be overwritten with the first state's."""
    dA, dmu = (x.clone(memory_format=torch.contiguous_format) for x in grads[1:])
    return dA, dmu


def put_state(target: tuple[Tensor, Tensor], rows: Rows, A_XL: Tensor, mu_XLD: Tensor) -> None:
    """Write the rows' (log-mass, mean), or gradients of them, to (N, H, L) and (N, H, L, D)."""
    A, mu = target
    A[rows.ids] = A_XL.view(-1, *A.shape[1:])
    mu[rows.ids] = mu_XLD[..., : mu.shape[-1]].unflatten(0, (-1, A.shape[1]))


def walks(
    q: Tensor, v: Tensor, sequences: Sequences, width: int = 0
) -> Iterator[tuple[Rows, list[slice]]]:
    """Rows computed together, with their segments of time. ``width``: of an intermediate, per head.

    It counts where it is wider than the latents and the values.
    """
    H, L, D = *q.shape[2:], v.shape[-1]
    segment = segment_length(H, L, D)
    for rows in rows_of(q, H * max(L, D, width), segment, sequences.cu_seqlens):
        yield rows, spans(rows.length, segment)


def mask_empty(A: Tensor, dA: Tensor, dmu: Tensor) -> tuple[Tensor, Tensor]:
    """An empty state has no mass to move and a mean that nobody reads: no gradient."""
    empty = torch.isneginf(A)
    return dA.masked_fill_(empty, 0.0), dmu.masked_fill_(empty[..., None], 0.0)


class Checkpoints:
    """The states between segments, (M, H, L) twice and (M, H, L, D), in the order of the walk."""

    def __init__(self, top: Tensor, mass: Tensor, mean: Tensor) -> None:
        self.tensors = (top, mass, mean)
        self.next = 0

    @staticmethod
    def allocate(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One state for every boundary between segments, packed or not."""
        B, T, H, L = q.shape
        M = B * ((T - 1) // segment_length(H, L, v.shape[-1]))
        top = q.new_empty((M, H, L), dtype=computation_dtype(q.dtype))
        return top, torch.empty_like(top), top.new_empty((M, H, L, aligned(v.shape[-1])))

    def save(self, n: int, state: Carry) -> None:
        """Keep the state of n rows."""
        for kept, x in zip(self.tensors, state, strict=True):
            kept[self.next : self.next + n] = x.view(n, *kept.shape[1:])
        self.next += n

    def load(self, n: int, i: int) -> Carry:
        """The i-th state kept for the present n rows."""
        here = slice(self.next + i * n, self.next + (i + 1) * n)
        return Carry(*(x[here].flatten(0, 1) for x in self.tensors))


def causal(qkv: Three, sequences: Sequences, earlier: Earlier) -> tuple[Tensor, ...]:
    """Outputs, the final state, and the states between segments (for the backward pass)."""
    q, _, v = qkv
    (out,), final = empty_gradients(v), first_state(q, v, sequences, earlier)
    saved = Checkpoints.allocate(q, v)
    kept = Checkpoints(*saved)
    for rows, segments in walks(q, v, sequences, 2 * CHUNK):
        state = initial_carry(*final, rows)
        for span in segments:
            part = Segment(rows, span, qkv, sequences.key_mask)
            if span.start:
                kept.save(part.n, state)
            y, state = part.forward(state)
            part.put(out, y)
        put_state(final, rows, state.log_mass(), state.mean)
    return out, *final, *saved


def causal_backward(
    grads: Three, qkv: Three, sequences: Sequences, earlier: Earlier, *states: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and of the initial state, segment by segment in reverse."""
    q, _, v = qkv
    dq, dk, dv = empty_gradients(*qkv)
    first, dfirst = first_state(q, v, sequences, earlier), gradient_buffers(grads)
    kept = Checkpoints(*states)
    for rows, segments in walks(q, v, sequences, 2 * CHUNK):
        dA, dmu = dfirst[0][rows.ids].flatten(0, 1), widened(dfirst[1][rows.ids].flatten(0, 1))
        n = dA.shape[0] // q.shape[2]
        for i, span in reversed(list(enumerate(segments))):
            part = Segment(rows, span, qkv, sequences.key_mask)
            state = kept.load(n, i - 1) if i else initial_carry(*first, rows)
            dq_, dk_, dv_, dA, dmu = part.backward(state, part.gradient(grads[0]), dA, dmu)
            part.put(dq, dq_)
            part.put(dk, dk_)
            part.put(dv, dv_)
        kept.next += (len(segments) - 1) * n
        put_state(dfirst, rows, dA, dmu)
    return dq, dk, dv, *mask_empty(first[0], *dfirst)


causal_op = latte_op(
    *("causal", causal, causal_backward, lambda q, k, v, _: Checkpoints.allocate(q, v)),
    count=3,
    saved_from=3,
)


def bidirectional(qkv: Three, sequences: Sequences, earlier: Earlier) -> tuple[Tensor, ...]:
    """Outputs p mu, and the state over the whole sequence (eq. 6), also as (top, mass)."""
    q, _, v = qkv
    (out,), final = empty_gradients(v), first_state(q, v, sequences, earlier)
    top_N, mass_N = Carry.of(*final)[:2]
    top_N = top_N.clone()
    for rows, segments in walks(q, v, sequences):
        state = initial_carry(*final, rows)
        for span in segments:
            part = Segment(rows, span, qkv, sequences.key_mask)
            top = part.k_XSL.amax(1)
            e = exp_difference(part.k_XSL, top[:, None])
            mass = e.sum(1)
            state = state.merge(Carry(top, mass, divide(e, mass[:, None]).mT @ part.v_XSD))
        for span in segments:
            part = Segment(rows, span, qkv, sequences.key_mask)
            part.put(out, part.p_XSL @ state.mean)
        put_state(final, rows, state.log_mass(), state.mean)
        for kept, x in ((top_N, state.top), (mass_N, state.mass)):
            kept[rows.ids] = x.view(-1, *kept.shape[1:])
    return out, *final, top_N, mass_N


def bidirectional_backward(
    grads: Three, qkv: Three, sequences: Sequences, earlier: Earlier, *final: Tensor
) -> tuple[Tensor, ...]:
    """With g = dmu + sum_t p_t dy_t: dv_s = w_s g, dk_s = w_s (<g, v_s> - <g, mu> + dA)."""
    q, _, v = qkv
    dq, dk, dv = empty_gradients(*qkv)
    first, dfirst = first_state(q, v, sequences, earlier), gradient_buffers(grads)
    for rows, segments in walks(q, v, sequences):
        mu, top, mass = (x[rows.ids].flatten(0, 1) for x in final)
        mu = widened(mu)
        dA, dmu = dfirst[0][rows.ids].flatten(0, 1), widened(dfirst[1][rows.ids].flatten(0, 1))
        for span in segments:
            part = Segment(rows, span, qkv, sequences.key_mask)
            dmu = dmu + part.p_XSL.mT @ part.gradient(grads[0])
        lost_XL = (dmu * mu).sum(-1) - dA
        for span in segments:
            part = Segment(rows, span, qkv, sequences.key_mask)
            pulled = part.p_XSL * (part.gradient(grads[0]) @ mu.mT)
            part.put(dq, pulled - part.p_XSL * pulled.sum(-1, keepdim=True))
            weight = divide(exp_difference(part.k_XSL, top[:, None]), mass[:, None])
            part.put(dk, weight * (part.v_XSD @ dmu.mT - lost_XL[:, None]))
            part.put(dv, weight @ dmu)
        start = initial_carry(*first, rows)
        kept = divide(start.mass * exp_difference(start.top, top), mass)
        dA = kept * ((dmu * start.mean).sum(-1) - lost_XL)
        put_state(dfirst, rows, dA, kept[..., None] * dmu)
    return dq, dk, dv, *mask_empty(first[0], *dfirst)


bidirectional_op = latte_op("bidirectional", bidirectional, bidirectional_backward)
