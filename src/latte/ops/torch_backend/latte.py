"""Latte in linear time: the driver over pieces and segments, as custom ops with closed gradients.

Saved activations are the inputs and one state per segment of time: O(T / 2048) states, never
O(T L D). Each segment takes the linear-domain kernel (``fast``) if one reference can serve all of
it, and the pairwise one (``safe``) otherwise; on a GPU always the latter, as asking would wait
for the device.

Shape suffixes: B batch, T tokens, n rows of a piece, X = n H, S tokens of a segment, t of them
not padding, H heads, L latents, D value width, N states.
"""

from __future__ import annotations

import torch
from torch import Tensor

from latte.ops.state import LatteState
from latte.ops.torch_backend import fast, safe
from latte.ops.torch_backend.carry import Carry, divide, exp_difference
from latte.ops.torch_backend.pieces import PIECE, Rows, rows_of, spans
from latte.ops.validation import computation_dtype

LONGEST_SEGMENT = 2048


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


def segment_length(H: int, L: int, D: int) -> int:
    """Tokens computed at once: about ``PIECE`` elements, a power of two, at most 2048."""
    length = LONGEST_SEGMENT
    while length > fast.CHUNK and length * H * max(L, D, fast.CHUNK) > PIECE:
        length //= 2
    return length


def padded_length(t: int) -> int:
    """Whole chunks, or a power of two below one chunk."""
    return -(-t // fast.CHUNK) * fast.CHUNK if t >= fast.CHUNK else 1 << (t - 1).bit_length()


def heads_first(x_ntHD: Tensor, S: int, dtype: torch.dtype, fill: float = 0.0) -> Tensor:
    """(n, t, H, D) -> contiguous (n H, S, D), padded from t to S tokens."""
    n, t, H, D = x_ntHD.shape
    out = x_ntHD.new_empty(n, H, S, D, dtype=dtype)
    out[:, :, :t] = x_ntHD.transpose(1, 2)
    out[:, :, t:] = fill
    return out.view(n * H, S, D)


class Segment:
    """One segment of one piece: its inputs, heads first and in the dtype of the sums."""

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
            seen_nt = real.cumsum(1) > 0
            seen_nS = torch.cat([seen_nt, seen_nt[:, -1:].expand(-1, self.S - self.t)], 1)
            self.seen_XS = seen_nS.repeat_interleave(self.H, 0)
        self.p_XSL = heads_first(q, self.S, self.dtype).softmax(-1)
        self.k_XSL = heads_first(k, self.S, self.dtype, -torch.inf)
        self.v_XSD = heads_first(v, self.S, self.dtype)

    def gradient(self, dout: Tensor) -> Tensor:
        """The outputs' gradient (B, T, H, D) at these tokens: (X, S, D)."""
        return heads_first(self.rows.take_gradient(dout, self.span), self.S, self.dtype)

    def put(self, target: Tensor, x_XSD: Tensor) -> None:
        """Write (X, S, D) back to these tokens of the target (B, T, H, D)."""
        x_nHSD = x_XSD.view(self.n, self.H, self.S, -1)
        self.rows.put(target, self.span, x_nHSD[:, :, : self.t].transpose(1, 2))

    def scaled(self, start: Carry) -> fast.Scaled | None:
        """The keys in the linear domain, or None where the pairwise kernel is needed."""
        if self.k_XSL.device.type != "cpu":
            return None
        return fast.scaled_keys(self.k_XSL, start, self.seen_XS)

    def forward(self, start: Carry) -> tuple[Tensor, Carry]:
        """Outputs (X, S, D) and the state after the segment."""
        keys = self.scaled(start)
        if keys is None:
            return safe.forward(self.p_XSL, self.k_XSL, self.v_XSD, start)
        return fast.forward(self.p_XSL, keys, self.v_XSD, start.mean)

    def backward(
        self, start: Carry, dy_XSD: Tensor, dA_XL: Tensor, dmu_XLD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(dq, dk, dv, dA, dmu); the last two belong to the state before the segment."""
        keys = self.scaled(start)
        grads = (dy_XSD, dA_XL, dmu_XLD)
        if keys is None:
            return safe.backward(self.p_XSL, self.k_XSL, self.v_XSD, start, *grads)
        return fast.backward(self.p_XSL, keys, self.v_XSD, start.mean, *grads)


def first_state(
    q: Tensor, v: Tensor, cu_seqlens: Tensor | None, A: Tensor | None, mu: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Fresh buffers (N, H, L), (N, H, L, D) that hold the state before the first token."""
    if A is not None and mu is not None:
        return A.clone(), mu.clone()
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = computation_dtype(q.dtype)
    A = q.new_full((N, *q.shape[2:]), -torch.inf, dtype=dtype)
    return A, q.new_zeros((*A.shape, v.shape[-1]), dtype=dtype)


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
        return top, torch.empty_like(top), top.new_empty((M, H, L, v.shape[-1]))

    def save(self, n: int, state: Carry) -> None:
        """Keep the state of n rows."""
        for kept, x in zip(self.tensors, state, strict=True):
            kept[self.next : self.next + n] = x.view(n, *kept.shape[1:])
        self.next += n

    def load(self, n: int, i: int) -> Carry:
        """The i-th state kept for the present n rows."""
        here = slice(self.next + i * n, self.next + (i + 1) * n)
        return Carry(*(x[here].flatten(0, 1) for x in self.tensors))


def empty_gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Contiguous buffers of the inputs' shapes and dtypes."""
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs)


@torch.library.custom_op("latte::causal", mutates_args=())
def causal_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    log_mass: Tensor | None,
    mean: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs, the final state, and the states between segments (for the backward pass)."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    final_A, final_mu = first_state(q, v, cu_seqlens, log_mass, mean)
    saved = Checkpoints.allocate(q, v)
    kept = Checkpoints(*saved)
    H, L, D = *q.shape[2:], v.shape[-1]
    segment = segment_length(H, L, D)
    for rows in rows_of(q, H * max(L, D, fast.CHUNK), segment, cu_seqlens):
        state = Carry.of(final_A[rows.ids].flatten(0, 1), final_mu[rows.ids].flatten(0, 1))
        for span in spans(rows.length, segment):
            part = Segment(rows, span, (q, k, v), key_mask)
            if span.start:
                kept.save(part.n, state)
            y, state = part.forward(state)
            part.put(out, y)
        final_A[rows.ids] = state.log_mass().view(-1, H, L)
        final_mu[rows.ids] = state.mean.view(-1, H, L, D)
    return out, final_A, final_mu, *saved


@causal_op.register_fake
def _(q, k, v, key_mask, cu_seqlens, log_mass, mean):
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    return out, *first_state(q, v, cu_seqlens, log_mass, mean), *Checkpoints.allocate(q, v)


@torch.library.custom_op("latte::causal_backward", mutates_args=())
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
    top_M: Tensor,
    mass_M: Tensor,
    mean_M: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and of the initial state, segment by segment in reverse."""
    dq, dk, dv = empty_gradients(q, k, v)
    dA_0, dmu_0 = dlog_mass.clone(), dmean.clone()
    A_0, mu_0 = first_state(q, v, cu_seqlens, log_mass, mean)
    kept = Checkpoints(top_M, mass_M, mean_M)
    H, L, D = *q.shape[2:], v.shape[-1]
    segment = segment_length(H, L, D)
    for rows in rows_of(q, H * max(L, D, fast.CHUNK), segment, cu_seqlens):
        dA, dmu = dA_0[rows.ids].flatten(0, 1), dmu_0[rows.ids].flatten(0, 1)
        stretches = spans(rows.length, segment)
        n = dA.shape[0] // H
        for i, span in reversed(list(enumerate(stretches))):
            part = Segment(rows, span, (q, k, v), key_mask)
            if i:
                state = kept.load(n, i - 1)
            else:
                state = Carry.of(A_0[rows.ids].flatten(0, 1), mu_0[rows.ids].flatten(0, 1))
            dq_, dk_, dv_, dA, dmu = part.backward(state, part.gradient(dout), dA, dmu)
            part.put(dq, dq_)
            part.put(dk, dk_)
            part.put(dv, dv_)
        kept.next += (len(stretches) - 1) * n
        dA_0[rows.ids], dmu_0[rows.ids] = dA.view(-1, H, L), dmu.view(-1, H, L, D)
    return dq, dk, dv, *mask_empty(A_0, dA_0, dmu_0)


@causal_backward_op.register_fake
def _(dout, dlog_mass, dmean, q, k, v, *_):
    return empty_gradients(q, k, v, dlog_mass, dmean)


def _save_causal(ctx, inputs, output):
    ctx.save_for_backward(*inputs, *output[3:])
    # Gradients flow from the outputs and the final state alone.
    ctx.mark_non_differentiable(*output[3:])


def _causal_gradients(ctx, dout, dlog_mass, dmean, *_):
    saved = ctx.saved_tensors
    dq, dk, dv, dA, dmu = causal_backward_op(dout, dlog_mass, dmean, *saved)
    earlier = (None, None) if saved[5] is None else (dA, dmu)
    return dq, dk, dv, None, None, *earlier


causal_op.register_autograd(_causal_gradients, setup_context=_save_causal)


@torch.library.custom_op("latte::bidirectional", mutates_args=())
def bidirectional_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    log_mass: Tensor | None,
    mean: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs p mu, and the state over the whole sequence (eq. 6), also as (top, mass)."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    A_N, mu_N = first_state(q, v, cu_seqlens, log_mass, mean)
    top_N, mass_N = Carry.of(A_N, mu_N)[:2]
    top_N = top_N.clone()
    H, L, D = *q.shape[2:], v.shape[-1]
    segment = segment_length(H, L, D)
    for rows in rows_of(q, H * max(L, D), segment, cu_seqlens):
        state = Carry.of(A_N[rows.ids].flatten(0, 1), mu_N[rows.ids].flatten(0, 1))
        for span in spans(rows.length, segment):
            part = Segment(rows, span, (q, k, v), key_mask)
            top = part.k_XSL.amax(1)
            e = exp_difference(part.k_XSL, top[:, None])
            mass = e.sum(1)
            state = state.merge(Carry(top, mass, divide(e, mass[:, None]).mT @ part.v_XSD))
        for span in spans(rows.length, segment):
            part = Segment(rows, span, (q, k, v), key_mask)
            part.put(out, part.p_XSL @ state.mean)
        A_N[rows.ids] = state.log_mass().view(-1, H, L)
        top_N[rows.ids], mass_N[rows.ids] = state.top.view(-1, H, L), state.mass.view(-1, H, L)
        mu_N[rows.ids] = state.mean.view(-1, H, L, D)
    return out, A_N, mu_N, top_N, mass_N


@bidirectional_op.register_fake
def _(q, k, v, key_mask, cu_seqlens, log_mass, mean):
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    A, mu = first_state(q, v, cu_seqlens, log_mass, mean)
    return out, A, mu, torch.empty_like(A), torch.empty_like(A)


@torch.library.custom_op("latte::bidirectional_backward", mutates_args=())
def bidirectional_backward_op(
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
    mu_N: Tensor,
    top_N: Tensor,
    mass_N: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """With g = dmu + sum_t p_t dy_t: dv_s = w_s g, dk_s = w_s (<g, v_s> - <g, mu> + dA)."""
    dq, dk, dv = empty_gradients(q, k, v)
    dA_0, dmu_0 = dlog_mass.clone(), dmean.clone()
    A_0, mu_0 = first_state(q, v, cu_seqlens, log_mass, mean)
    H, L, D = *q.shape[2:], v.shape[-1]
    segment = segment_length(H, L, D)
    for rows in rows_of(q, H * max(L, D), segment, cu_seqlens):
        top, mass, mu = (x[rows.ids].flatten(0, 1) for x in (top_N, mass_N, mu_N))
        dA, dmu = dA_0[rows.ids].flatten(0, 1), dmu_0[rows.ids].flatten(0, 1)
        for span in spans(rows.length, segment):
            part = Segment(rows, span, (q, k, v), key_mask)
            dmu = dmu + part.p_XSL.mT @ part.gradient(dout)
        lost_XL = (dmu * mu).sum(-1) - dA
        for span in spans(rows.length, segment):
            part = Segment(rows, span, (q, k, v), key_mask)
            pulled = part.p_XSL * (part.gradient(dout) @ mu.mT)
            part.put(dq, pulled - part.p_XSL * pulled.sum(-1, keepdim=True))
            weight = divide(exp_difference(part.k_XSL, top[:, None]), mass[:, None])
            part.put(dk, weight * (part.v_XSD @ dmu.mT - lost_XL[:, None]))
            part.put(dv, weight @ dmu)
        earlier = Carry.of(A_0[rows.ids].flatten(0, 1), mu_0[rows.ids].flatten(0, 1))
        kept = divide(earlier.mass * exp_difference(earlier.top, top), mass)
        dA_0[rows.ids] = (kept * ((dmu * earlier.mean).sum(-1) - lost_XL)).view(-1, H, L)
        dmu_0[rows.ids] = (kept[..., None] * dmu).view(-1, H, L, D)
    return dq, dk, dv, *mask_empty(A_0, dA_0, dmu_0)


@bidirectional_backward_op.register_fake
def _(dout, dlog_mass, dmean, q, k, v, *_):
    return empty_gradients(q, k, v, dlog_mass, dmean)


def _save_bidirectional(ctx, inputs, output):
    ctx.save_for_backward(*inputs, *output[2:])
    ctx.mark_non_differentiable(*output[3:])


def _bidirectional_gradients(ctx, dout, dlog_mass, dmean, *_):
    saved = ctx.saved_tensors
    dq, dk, dv, dA, dmu = bidirectional_backward_op(dout, dlog_mass, dmean, *saved)
    earlier = (None, None) if saved[5] is None else (dA, dmu)
    return dq, dk, dv, None, None, *earlier


bidirectional_op.register_autograd(_bidirectional_gradients, setup_context=_save_bidirectional)
