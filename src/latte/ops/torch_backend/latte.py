"""Latte in linear time: the driver over batches and segments, as custom ops.

The passes take p(l|t) in the place of the query logits, and return p times its gradient. Therefore
Macchiato (``macchiato``), whose distribution includes the window, uses the same passes.

Saved activations are the inputs and one state per segment of time: O(T / 2048) states, never
O(T L D). A segment is one run in the linear domain (``linear_domain``) if one running maximum is
enough for all of it. Otherwise it is cut into such runs and pairwise runs (``pairwise``). On a GPU
all runs are pairwise, because the check of a maximum would wait for the device.

Shape suffixes: B batch, T tokens, n sequences computed together, X = n H rows, S tokens of a
segment, t of them not padding, H heads, L latents, D value width, N states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.ops.arguments import LATTE_GRADIENTS, Earlier, Latte, Three
from latte.ops.custom_ops import differentiable_op, empty_gradients
from latte.ops.state import final_buffers
from latte.ops.tensors import computation_dtype, without_masked
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

LONGEST_SEGMENT = 2048
# Tokens given to the pairwise kernel where the linear-domain kernel's runs are short.
SAFE_RUN = 256


def latte_attention(x: Latte, causal: bool) -> tuple[Tensor, ...]:
    """See :func:`latte.ops.latte_attention`: the output, log-mass and mean."""
    return (causal_op if causal else bidirectional_op)(*x)[:3]


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


def initial_carry(earlier: Earlier, rows: Rows) -> Carry | None:
    """The rows' states before their first token, heads first, if they have any."""
    A, mu = earlier
    if A is None or mu is None:
        return None
    return Carry.of(A[rows.ids].flatten(0, 1), widened(mu[rows.ids].flatten(0, 1)))


def heads_first(x_ntHD: Tensor, S: int, dtype: torch.dtype, fill: float = 0.0) -> Tensor:
    """(n, t, H, D) -> contiguous (n H, S, D), padded from t to S tokens."""
    n, t, H, D = x_ntHD.shape
    out = torch.empty((n, H, S, D), dtype=dtype, device=x_ntHD.device)
    if t == S:
        out.copy_(x_ntHD.transpose(1, 2))
    else:
        out[:, :, :t] = x_ntHD.transpose(1, 2)
        out[:, :, t:] = fill
    return out.view(n * H, S, D)


class LatteSegment:
    """Tokens that are computed together: their inputs, heads first, in the dtype of the sums."""

    def __init__(
        self,
        rows: Rows,
        span: slice,
        pkv: tuple[Tensor, Tensor, Tensor],
        key_mask: Tensor | None,
        log_decay: Tensor | None = None,
    ) -> None:
        p, k, v = (rows.gather(x, span) for x in pkv)
        g = None if log_decay is None else rows.gather(log_decay, span)
        self.rows, self.span, self.dtype = rows, span, p.dtype
        self.n, self.t, self.H = p.shape[:3]
        self.S = padded_length(self.t)
        self.seen_XS: Tensor | None = None
        real = rows.visible(key_mask, span)
        if real is not None:
            k = k.masked_fill(~real[:, :, None, None], -torch.inf)
            v = without_masked(real, v)
            # The log-decay of masked tokens is 0 already, and `key_mask` may be that of delayed
            # tokens. So only the padding of the segment is masked here.
            g = None if g is None else without_masked(rows.visible(None, span), g)
            seen_nt = real.cumsum(1) > 0
            seen_nS = torch.cat([seen_nt, seen_nt[:, -1:].expand(-1, self.S - self.t)], 1)
            self.seen_XS = seen_nS.repeat_interleave(self.H, 0)
        self.p_XSL = heads_first(p, self.S, self.dtype)
        self.k_XSL = heads_first(k, self.S, self.dtype, -torch.inf)
        self.v_XSD = widened(heads_first(v, self.S, self.dtype))
        self.g_XSL = None if g is None else heads_first(g, self.S, self.dtype)

    def gradient(self, dout: Tensor) -> Tensor:
        """The outputs' gradient (B, T, H, D) at these tokens: (X, S, D)."""
        dy = self.rows.gather_gradient(dout, self.span)
        return widened(heads_first(dy, self.S, self.dtype))

    def put(self, target: Tensor, x_XSD: Tensor, add: bool = False) -> None:
        """Write x to the segment's tokens of the target (B, T, H, D), or add it to them."""
        x_nHSD = x_XSD.view(self.n, self.H, self.S, -1)
        if self.t < self.S or x_nHSD.shape[-1] != target.shape[-1]:
            x_nHSD = x_nHSD[:, :, : self.t, : target.shape[-1]]
        self.rows.put(target, self.span, x_nHSD.transpose(1, 2), add)

    def run_from(self, start: int, state: Carry | None, level: int) -> KernelRun:
        """The tokens from ``start`` on that one kernel can serve."""
        k, seen, g, stop = self.k_XSL, self.seen_XS, self.g_XSL, self.S
        if k.device.type != "cpu":
            # The length of a linear-domain run is read by the host, which would wait for the GPU.
            return KernelRun(self, slice(start, stop), state, g)
        if g is not None and not g[:, start].any():
            # Tokens before the first decay use the kernel without decay, so they have its bits.
            forgets_S = g[:, start:].count_nonzero((0, 2)) > 0
            if forgets_S.any():
                stop = start + int(forgets_S.to(torch.uint8).argmax())
            g = None
        careful = slice(start, min(stop, start + SAFE_RUN))
        if level == 2 or (level == 1 and g is None):
            return KernelRun(self, careful, state, g)
        if g is not None:
            span = careful if level else slice(start, stop)
            size = linear_domain.SHORT_CHUNK if level else CHUNK
            run = KernelRun(self, span, state, g)
            maxima = run.maxima(size)
            length = maxima.length()
            if length == 0:
                return KernelRun(self, careful, state, g)
            if length < run.length:
                run = KernelRun(self, slice(start, start + length), state, g)
                maxima = run.maxima(size)
            masked = seen is not None
            return run.scaled(linear_domain.forgetting_keys(run.k, maxima, state, masked), level)
        if start or stop < self.S:
            k, seen = k[:, start:stop], None if seen is None else seen[:, start:stop]
        reference, top = linear_domain.reference_logits(k, state, seen), k.amax(1)
        length = linear_domain.run_length(k, top, reference)
        if length == 0:
            return KernelRun(self, careful, state, None)
        if length < k.shape[1]:
            top = k[:, :length].amax(1)
        run = KernelRun(self, slice(start, start + length), state, None)
        return run.scaled(linear_domain.scaled_keys(run.k, top, reference, state, run.seen))

    def forward(self, state: Carry | None) -> tuple[Tensor, Carry]:
        """Outputs (X, S, D) and the state after the segment."""
        outputs: list[Tensor] = []
        run: KernelRun | None = None
        while run is None or run.span.stop < self.S:
            run = self.run_from(*((0, state, 0) if run is None else run.next(state)))
            out, state = run.forward()
            outputs.append(out)
        assert state is not None
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1), state

    def backward(
        self, state: Carry | None, dy_XSD: Tensor, dA_XL: Tensor, dmu_XLD: Tensor
    ) -> tuple[Any, ...]:
        """(p dp, dk, dv, dA, dmu), the last two of the state before, None if there is none.

        With decay its gradient follows dv.
        """
        runs = [self.run_from(0, state, 0)]
        while runs[-1].span.stop < self.S:
            runs.append(self.run_from(*runs[-1].next(runs[-1].state_after())))
        parts: list[tuple[Tensor, ...]] = []
        for run in reversed(runs):
            *part, dA_XL, dmu_XLD = run.backward(dy_XSD[:, run.span], dA_XL, dmu_XLD)
            parts.append(tuple(part))
        if len(parts) == 1:
            return *parts[0], dA_XL, dmu_XLD
        return *(torch.cat(xs[::-1], 1) for xs in zip(*parts, strict=True)), dA_XL, dmu_XLD


class KernelRun:
    """Consecutive tokens of a segment that one kernel serves.

    A linear-domain run ends before the first key that is far above its running maximum. If these
    runs are short (the logits rise in large steps), the pairwise kernel computes some tokens. If
    latents decay fast, shorter chunks are tried first (``level`` counts the short runs in a row).
    The choice depends only on the past.
    """

    def __init__(
        self, segment: LatteSegment, span: slice, state: Carry | None, g_XSL: Tensor | None
    ) -> None:
        """A run of the pairwise kernel; :meth:`scaled` makes it one of the linear-domain kernel.

        Args:
            state: State before these tokens.
            g_XSL: Log-decay of the segment's tokens; None if nothing is forgotten.
        """
        self.span, self.state = span, state
        self.length = span.stop - span.start
        self.chunk = min(CHUNK, segment.S)
        self.level = 0
        self.wants_decay = segment.g_XSL is not None
        self.p, self.k, self.v = segment.p_XSL, segment.k_XSL, segment.v_XSD
        self.g, self.seen = g_XSL, segment.seen_XS
        if self.length < segment.S:
            self.p, self.k, self.v = (
                self.padded(x[:, span], fill)
                for x, fill in ((self.p, 0.0), (self.k, -torch.inf), (self.v, 0.0))
            )
            self.g = None if g_XSL is None else self.padded(g_XSL[:, span], 0.0)
            if self.seen is not None:
                seen_Xs = self.seen[:, span]
                rest = self.p.shape[1] - self.length
                self.seen = torch.cat([seen_Xs, seen_Xs[:, -1:].expand(-1, rest)], 1)
        self.keys: linear_domain.Scaled | None = None

    def maxima(self, size: int) -> linear_domain.Maxima:
        """The running maxima of tokens with decay, in chunks of ``size``."""
        assert self.g is not None
        return linear_domain.Maxima.of(self.k, self.g, self.state, self.seen, size)

    def scaled(self, keys: linear_domain.Scaled, level: int = 0) -> KernelRun:
        """The same run, with the linear-domain kernel."""
        self.keys = keys
        self.level = level + 1 if self.length < keys.size else 0
        return self

    @property
    def mean(self) -> Tensor | None:
        """The mean of the state before these tokens, if there is one."""
        return None if self.state is None else self.state.mean

    @property
    def start(self) -> Carry:
        """The state before."""
        return Carry.empty(self.k, self.v) if self.state is None else self.state

    def next(self, state: Carry | None) -> tuple[int, Carry | None, int]:
        """The arguments of ``LatteSegment.run_from`` for the run after this one."""
        return self.span.stop, state, self.level

    def padded(self, x_XSD: Tensor, fill: float) -> Tensor:
        """Whole chunks, of the segment's size whatever the length: rounding depends on it."""
        missing = -self.length % self.chunk
        return F.pad(x_XSD, (0, 0, 0, missing), value=fill) if missing else x_XSD

    def own(self, x_XSD: Tensor) -> Tensor:
        """Without what :meth:`padded` has added."""
        return x_XSD if self.length == x_XSD.shape[1] else x_XSD[:, : self.length]

    def forward(self) -> tuple[Tensor, Carry]:
        """Outputs of these tokens and the state after them."""
        if self.keys is None:
            out, state = pairwise.forward(self.p, self.k, self.v, self.start, self.g)
        else:
            out, state = linear_domain.forward(self.p, self.keys, self.v, self.mean)
        return self.own(out), state

    def state_after(self) -> Carry:
        """Only the state after these tokens."""
        if self.keys is None:
            return pairwise.state_after(self.k, self.v, self.start, self.g)
        return linear_domain.state_after(self.keys, self.v, self.mean)

    def backward(self, dy: Tensor, dA: Tensor, dmu: Tensor) -> tuple[Any, ...]:
        """Gradients of these tokens and of the state before them."""
        dy = self.padded(dy, 0.0)
        found: tuple[Any, ...]
        if self.keys is None:
            found = pairwise.backward(self.p, self.k, self.v, self.start, dy, dA, dmu, self.g)
        else:
            found = linear_domain.backward(self.p, self.keys, self.v, self.mean, dy, dA, dmu)
        *grads, dA_0, dmu_0 = found
        if self.wants_decay:
            grads.append(linear_domain.decay_gradient(grads[1], dA_0))
        return *(self.own(x) for x in grads), dA_0, dmu_0


def first_state(x: Latte) -> tuple[Tensor, Tensor]:
    """Fresh buffers (N, H, L), (N, H, L, D) for final states, with the earlier ones, if any, in."""
    if x.log_mass is not None and x.mean is not None:
        return x.log_mass.clone(), x.mean.clone()
    A, mu = final_buffers(x.q, x.v, x.cu_seqlens)
    if x.cu_seqlens is None:  # every row writes its own; an empty sequence has none
        return A, mu
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


def walks(x: Latte, width: int = 0) -> Iterator[tuple[Rows, list[slice]]]:
    """Groups of rows that are computed together, each with its segments of time.

    A larger ``width``, that of the largest intermediate tensor per head, makes the groups smaller.
    """
    H, L, D = *x.q.shape[2:], x.v.shape[-1]
    segment = segment_length(H, L, D)
    for rows in rows_of(x.q, H * max(L, D, width), segment, x.cu_seqlens):
        yield rows, spans(rows.length, segment)


def mask_empty(earlier: Earlier, dA: Tensor, dmu: Tensor) -> tuple[Tensor, Tensor]:
    """Zero the gradients of empty initial states: their mean has no influence."""
    if earlier[0] is None:
        return dA, dmu
    empty = torch.isneginf(earlier[0])
    return dA.masked_fill_(empty, 0.0), dmu.masked_fill_(empty[..., None], 0.0)


class Checkpoints:
    """The states between segments, (M, H, L) twice and (M, H, L, D), in the order of the walk."""

    def __init__(self, top: Tensor, mass: Tensor, mean: Tensor) -> None:
        self.tensors = (top, mass, mean)
        self.next = 0

    @staticmethod
    def allocate(q: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        """One state for every boundary between segments, packed or not."""
        B, T, H, L = q.shape
        M = B * ((T - 1) // segment_length(H, L, v.shape[-1]))
        shapes = ((M, H, L), (M, H, L), (M, H, L, aligned(v.shape[-1])))
        dtype = computation_dtype(q.dtype)
        top, mass, mean = (torch.empty(x, dtype=dtype, device=q.device) for x in shapes)
        return top, mass, mean

    def save(self, n: int, state: Carry) -> None:
        """Keep the state of n rows."""
        for kept, x in zip(self.tensors, state, strict=True):
            kept[self.next : self.next + n] = x.view(n, *kept.shape[1:])
        self.next += n

    def load(self, n: int, i: int) -> Carry:
        """The i-th state kept for the present n rows."""
        here = slice(self.next + i * n, self.next + (i + 1) * n)
        return Carry(*(x[here].flatten(0, 1) for x in self.tensors))


def causal(x: Latte, near: Tensor | None = None) -> tuple[Tensor, ...]:
    """Outputs, the final state, and the states between segments (for the backward pass).

    The outputs are added to ``near`` (B, T, H, D), in place, if there is one. The queries of
    ``x`` are p(l|t).
    """
    final, out = first_state(x), empty_gradients(x.v)[0] if near is None else near
    saved = Checkpoints.allocate(x.q, x.v)
    kept = Checkpoints(*saved)
    for rows, segments in walks(x, 2 * CHUNK):
        state = initial_carry(x.earlier, rows)
        for span in segments:
            part = LatteSegment(rows, span, x.qkv, x.key_mask, x.log_decay)
            if state is not None and span.start:
                kept.save(part.n, state)
            y, state = part.forward(state)
            part.put(out, y, add=near is not None)
        assert state is not None
        put_state(final, rows, state.log_mass(), state.mean)
    return out, *final, *saved


def causal_backward(
    x: Latte, grads: Three, *states: Tensor, dv_near: Tensor | None = None
) -> tuple[Tensor, ...]:
    """p times its gradient; the gradients of k, v, the initial state and ``log_decay``.

    Segment by segment in reverse. The gradient of v is added to ``dv_near`` (B, T, H, D), in place,
    if there is one.
    """
    pulled, dk, dv, dg = empty_gradients(*x.qkv, x.log_decay)
    dv = dv if dv_near is None else dv_near
    dfirst = gradient_buffers(grads)
    kept = Checkpoints(*states)
    for rows, segments in walks(x, 2 * CHUNK):
        dA, dmu = dfirst[0][rows.ids].flatten(0, 1), widened(dfirst[1][rows.ids].flatten(0, 1))
        n = dA.shape[0] // x.q.shape[2]
        for i, span in reversed(list(enumerate(segments))):
            part = LatteSegment(rows, span, x.qkv, x.key_mask, x.log_decay)
            state = kept.load(n, i - 1) if i else initial_carry(x.earlier, rows)
            found = part.backward(state, part.gradient(grads[0]), dA, dmu)
            pulled_, dk_, dv_, *forgotten, dA, dmu = found
            part.put(pulled, pulled_)
            part.put(dk, dk_)
            part.put(dv, dv_, add=dv_near is not None)
            if x.log_decay is not None:
                part.put(dg, forgotten[0])
        kept.next += (len(segments) - 1) * n
        if dA is not None:
            put_state(dfirst, rows, dA, dmu)
    found = (pulled, dk, dv, *mask_empty(x.earlier, *dfirst))
    return found if x.log_decay is None else (*found, dg)


def bidirectional(x: Latte, near: Tensor | None = None) -> tuple[Tensor, ...]:
    """Outputs p mu, and the state over the whole sequence (eq. 6), also as (top, mass).

    ``x`` and ``near`` are as for :func:`causal`. Nothing is forgotten.
    """
    final, out = first_state(x), empty_gradients(x.v)[0] if near is None else near
    top_N, mass_N = torch.full_like(final[0], -torch.inf), torch.zeros_like(final[0])
    for rows, segments in walks(x):
        state = initial_carry(x.earlier, rows)
        for span in segments:
            part = LatteSegment(rows, span, x.qkv, x.key_mask)
            top = part.k_XSL.amax(1)
            e = exp_difference(part.k_XSL, top[:, None])
            mass = e.sum(1)
            own = Carry(top, mass, divide(e, mass[:, None]).mT @ part.v_XSD)
            state = own if state is None else state.merge(own)
        assert state is not None
        for span in segments:
            part = LatteSegment(rows, span, x.qkv, x.key_mask)
            part.put(out, part.p_XSL @ state.mean, add=near is not None)
        put_state(final, rows, state.log_mass(), state.mean)
        for kept, own_X in ((top_N, state.top), (mass_N, state.mass)):
            kept[rows.ids] = own_X.view(-1, *kept.shape[1:])
    return out, *final, top_N, mass_N


def bidirectional_backward(
    x: Latte, grads: Three, *final: Tensor, dv_near: Tensor | None = None
) -> tuple[Tensor, ...]:
    """With g = dmu + sum_t p_t dy_t: dv_s = w_s g, dk_s = w_s (<g, v_s> - <g, mu> + dA).

    What it gives, and ``dv_near``, is as for :func:`causal_backward`.
    """
    pulled, dk, dv = empty_gradients(*x.qkv)
    dv = dv if dv_near is None else dv_near
    dfirst = gradient_buffers(grads)
    for rows, segments in walks(x):
        mu, top, mass = (y[rows.ids].flatten(0, 1) for y in final)
        mu = widened(mu)
        dA, dmu = dfirst[0][rows.ids].flatten(0, 1), widened(dfirst[1][rows.ids].flatten(0, 1))
        for span in segments:
            part = LatteSegment(rows, span, x.qkv, x.key_mask)
            dmu = dmu + part.p_XSL.mT @ part.gradient(grads[0])
        lost_XL = (dmu * mu).sum(-1) - dA
        for span in segments:
            part = LatteSegment(rows, span, x.qkv, x.key_mask)
            part.put(pulled, part.p_XSL * (part.gradient(grads[0]) @ mu.mT))
            weight = divide(exp_difference(part.k_XSL, top[:, None]), mass[:, None])
            part.put(dk, weight * (part.v_XSD @ dmu.mT - lost_XL[:, None]))
            part.put(dv, weight @ dmu, add=dv_near is not None)
        start = initial_carry(x.earlier, rows)
        if start is not None:
            kept = divide(start.mass * exp_difference(start.top, top), mass)
            dA = kept * ((dmu * start.mean).sum(-1) - lost_XL)
            put_state(dfirst, rows, dA, kept[..., None] * dmu)
    return pulled, dk, dv, *mask_empty(x.earlier, *dfirst)


def probabilities(q: Tensor) -> Tensor:
    """p(l|t) of the query logits, in the dtype of the sums."""
    return torch.softmax(q, -1, dtype=computation_dtype(q.dtype))


def through_softmax(pulled: Tensor, p: Tensor) -> Tensor:
    """The gradient of the logits from p times that of p, in its place."""
    return pulled.addcmul_(p, pulled.sum(-1, keepdim=True), value=-1.0)


def tops(k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Empty buffers for (top, mass) of the final state."""
    A, _ = final_buffers(k, v, cu_seqlens)
    return A, torch.empty_like(A)


class Passes(NamedTuple):
    """The two passes of latents, causal or bidirectional."""

    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor, ...]]
    buffers: Callable[..., tuple[Tensor, ...]]  # of k, v, cu_seqlens: empty outputs after the state
    saves: list[str]  # names of the last arguments of ``backward``


CAUSAL = Passes(causal, causal_backward, Checkpoints.allocate, ["top_M", "mass_M", "mean_M"])
BIDIRECTIONAL = Passes(bidirectional, bidirectional_backward, tops, ["mean", "top", "mass"])


def _latte_op(name: str, passes: Passes) -> Any:
    def run(x: Latte) -> tuple[Tensor, ...]:
        return passes.forward(x._replace(q=probabilities(x.q)))

    def run_back(x: Latte, *given: Tensor) -> dict[str, Tensor]:
        p = probabilities(x.q)
        pulled, *others = passes.backward(x._replace(q=p), given[:3], *given[3:])
        return dict(zip(LATTE_GRADIENTS, (through_softmax(pulled, p), *others), strict=False))

    def fake(x: Latte) -> tuple[Tensor, ...]:
        finals = final_buffers(x.q, x.v, x.cu_seqlens)
        return *empty_gradients(x.v), *finals, *passes.buffers(x.q, x.v, x.cu_seqlens)

    return differentiable_op(
        name,
        Latte,
        fake,
        run,
        run_back,
        returns=["out", "log_mass", "mean"],
        gradients=LATTE_GRADIENTS,
        saves=passes.saves,
    )


causal_op = _latte_op("causal", CAUSAL)
bidirectional_op = _latte_op("bidirectional", BIDIRECTIONAL)
