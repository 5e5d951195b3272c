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

from latte.ops.state import LatteState, merge_states
from latte.ops.torch_backend import fast, safe
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


def segment_length(T: int, H: int, L: int, D: int) -> int:
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

    def heads_first(self, x: Tensor) -> Tensor:
        """These tokens of another tensor (B, T, H, D): (X, S, D)."""
        return heads_first(self.rows.take(x, self.span), self.S, self.dtype)

    def put(self, target: Tensor, x_XSD: Tensor) -> None:
        """Write (X, S, D) back to these tokens of the target (B, T, H, D)."""
        x_nHSD = x_XSD.view(self.n, self.H, self.S, -1)
        self.rows.put(target, self.span, x_nHSD[:, :, : self.t].transpose(1, 2))

    def scaled(self, A_XL: Tensor) -> fast.Scaled | None:
        """The keys in the linear domain, or None where the pairwise kernel is needed."""
        if self.k_XSL.device.type != "cpu":
            return None
        return fast.scaled_keys(self.k_XSL, A_XL, self.seen_XS)

    def forward(self, A_XL: Tensor, mu_XLD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs (X, S, D) and the state after the segment."""
        keys = self.scaled(A_XL)
        if keys is None:
            return safe.forward(self.p_XSL, self.k_XSL, self.v_XSD, A_XL, mu_XLD)
        return fast.forward(self.p_XSL, keys, self.v_XSD, mu_XLD)

    def backward(
        self, A_XL: Tensor, mu_XLD: Tensor, dy_XSD: Tensor, dA_XL: Tensor, dmu_XLD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(dq, dk, dv, dA, dmu); the last two belong to the state before the segment."""
        keys = self.scaled(A_XL)
        grads = (dy_XSD, dA_XL, dmu_XLD)
        if keys is None:
            return safe.backward(self.p_XSL, self.k_XSL, self.v_XSD, A_XL, mu_XLD, *grads)
        return fast.backward(self.p_XSL, keys, self.v_XSD, mu_XLD, *grads)


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


def checkpoints(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Room for the states between segments: (M, H, L) and (M, H, L, D)."""
    B, T, H, L = q.shape
    segment = segment_length(T, H, L, v.shape[-1])
    M = B * ((T - 1) // segment)
    A = q.new_empty((M, H, L), dtype=computation_dtype(q.dtype))
    return A, A.new_empty((M, H, L, v.shape[-1]))


@torch.library.custom_op("latte::causal", mutates_args=())
def causal_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    log_mass: Tensor | None,
    mean: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs, the final state, and the states between segments (for the backward pass)."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    final_A, final_mu = first_state(q, v, cu_seqlens, log_mass, mean)
    saved_A, saved_mu = checkpoints(q, v, cu_seqlens)
    H, L, D = *q.shape[2:], v.shape[-1]
    segment = segment_length(q.shape[1], H, L, D)
    m = 0
    for rows in rows_of(q, H * max(L, D, fast.CHUNK), segment, cu_seqlens):
        A, mu = final_A[rows.ids].view(-1, L), final_mu[rows.ids].view(-1, L, D)
        for span in spans(rows.length, segment):
            part = Segment(rows, span, (q, k, v), key_mask)
            if span.start:
                saved_A[m : m + part.n] = A.view(part.n, H, L)
                saved_mu[m : m + part.n] = mu.view(part.n, H, L, D)
                m += part.n
            y, A, mu = part.forward(A, mu)
            part.put(out, y)
        final_A[rows.ids], final_mu[rows.ids] = A.view(-1, H, L), mu.view(-1, H, L, D)
    return out, final_A, final_mu, saved_A, saved_mu


@causal_op.register_fake
def _(q, k, v, key_mask, cu_seqlens, log_mass, mean):
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    return out, *first_state(q, v, cu_seqlens, log_mass, mean), *checkpoints(q, v, cu_seqlens)


@torch.library.custom_op("latte::causal_backward", mutates_args=())
def causal_backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    log_mass: Tensor | None,
    mean: Tensor | None,
    saved_A: Tensor,
    saved_mu: Tensor,
    dout: Tensor,
    dlog_mass: Tensor,
    dmean: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and of the initial state, segment by segment in reverse."""
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    dA_0, dmu_0 = dlog_mass.clone(), dmean.clone()
    A_0, mu_0 = first_state(q, v, cu_seqlens, log_mass, mean)
    H, L, D = *q.shape[2:], v.shape[-1]
    segment = segment_length(q.shape[1], H, L, D)
    m = 0
    for rows in rows_of(q, H * max(L, D, fast.CHUNK), segment, cu_seqlens):
        dA, dmu = dA_0[rows.ids].view(-1, L), dmu_0[rows.ids].view(-1, L, D)
        stretches = spans(rows.length, segment)
        n = dA.shape[0] // H
        for i, span in reversed(list(enumerate(stretches))):
            part = Segment(rows, span, (q, k, v), key_mask)
            if i == 0:
                A, mu = A_0[rows.ids], mu_0[rows.ids]
            else:
                here = slice(m + (i - 1) * n, m + i * n)
                A, mu = saved_A[here], saved_mu[here]
            state = (A.reshape(-1, L), mu.reshape(-1, L, D))
            dq_, dk_, dv_, dA, dmu = part.backward(*state, part.heads_first(dout), dA, dmu)
            part.put(dq, dq_)
            part.put(dk, dk_)
            part.put(dv, dv_)
        m += (len(stretches) - 1) * n
        dA_0[rows.ids], dmu_0[rows.ids] = dA.view(-1, H, L), dmu.view(-1, H, L, D)
    return dq, dk, dv, dA_0, dmu_0


@causal_backward_op.register_fake
def _(q, k, v, key_mask, cu_seqlens, log_mass, mean, saved_A, saved_mu, dout, dlog_mass, dmean):
    grads = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return *grads, torch.empty_like(dlog_mass), torch.empty_like(dmean)


def _save_causal(ctx, inputs, output):
    ctx.save_for_backward(*inputs, *output[3:])
    # Gradients flow from the outputs and the final state alone.
    ctx.mark_non_differentiable(*output[3:])


def _causal_gradients(ctx, dout, dlog_mass, dmean, *_):
    inputs = ctx.saved_tensors
    dq, dk, dv, dA, dmu = causal_backward_op(*inputs, dout, dlog_mass, dmean)
    earlier = (None, None) if inputs[5] is None else (dA, dmu)
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs p mu, and the state (A, mu) over the whole sequence (eq. 6)."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    A_N, mu_N = first_state(q, v, cu_seqlens, log_mass, mean)
    H, L, D = *q.shape[2:], v.shape[-1]
    segment = segment_length(q.shape[1], H, L, D)
    for rows in rows_of(q, H * max(L, D), segment, cu_seqlens):
        A, mu = A_N[rows.ids].view(-1, L), mu_N[rows.ids].view(-1, L, D)
        for span in spans(rows.length, segment):
            part = Segment(rows, span, (q, k, v), key_mask)
            own_A = torch.logsumexp(part.k_XSL, 1)
            own_mu = safe.exp_difference(part.k_XSL, own_A[:, None]).mT @ part.v_XSD
            A, mu = merge_states(A, mu, own_A, own_mu)
        for span in spans(rows.length, segment):
            part = Segment(rows, span, (q, k, v), key_mask)
            part.put(out, part.p_XSL @ mu)
        A_N[rows.ids], mu_N[rows.ids] = A.view(-1, H, L), mu.view(-1, H, L, D)
    return out, A_N, mu_N


@bidirectional_op.register_fake
def _(q, k, v, key_mask, cu_seqlens, log_mass, mean):
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    return out, *first_state(q, v, cu_seqlens, log_mass, mean)


@torch.library.custom_op("latte::bidirectional_backward", mutates_args=())
def bidirectional_backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    log_mass: Tensor | None,
    mean: Tensor | None,
    final_A: Tensor,
    final_mu: Tensor,
    dout: Tensor,
    dlog_mass: Tensor,
    dmean: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """With g = dmu + sum_t p_t dy_t: dv_s = w_s g, dk_s = w_s (<g, v_s> - <g, mu> + dA)."""
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    dA_0, dmu_0 = dlog_mass.clone(), dmean.clone()
    A_0, mu_0 = first_state(q, v, cu_seqlens, log_mass, mean)
    H, L, D = *q.shape[2:], v.shape[-1]
    segment = segment_length(q.shape[1], H, L, D)
    for rows in rows_of(q, H * max(L, D), segment, cu_seqlens):
        A, mu = final_A[rows.ids].view(-1, L), final_mu[rows.ids].view(-1, L, D)
        dA, dmu = dA_0[rows.ids].view(-1, L), dmu_0[rows.ids].view(-1, L, D)
        for span in spans(rows.length, segment):
            part = Segment(rows, span, (q, k, v), key_mask)
            dmu = dmu + part.p_XSL.mT @ part.heads_first(dout)
        lost_XL = (dmu * mu).sum(-1) - dA
        for span in spans(rows.length, segment):
            part = Segment(rows, span, (q, k, v), key_mask)
            pulled = part.p_XSL * (part.heads_first(dout) @ mu.mT)
            part.put(dq, pulled - part.p_XSL * pulled.sum(-1, keepdim=True))
            weight = safe.exp_difference(part.k_XSL, A[:, None])
            part.put(dk, weight * (part.v_XSD @ dmu.mT - lost_XL[:, None]))
            part.put(dv, weight @ dmu)
        kept = safe.exp_difference(A_0[rows.ids].view(-1, L), A)
        earlier_mu = mu_0[rows.ids].view(-1, L, D)
        dA_0[rows.ids] = (kept * ((dmu * earlier_mu).sum(-1) - lost_XL)).view(-1, H, L)
        dmu_0[rows.ids] = (kept[..., None] * dmu).view(-1, H, L, D)
    return dq, dk, dv, dA_0, dmu_0


@bidirectional_backward_op.register_fake
def _(q, k, v, key_mask, cu_seqlens, log_mass, mean, final_A, final_mu, dout, dlog_mass, dmean):
    grads = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return *grads, torch.empty_like(dlog_mass), torch.empty_like(dmean)


def _save_bidirectional(ctx, inputs, output):
    ctx.save_for_backward(*inputs, *output[1:])


def _bidirectional_gradients(ctx, dout, dlog_mass, dmean):
    inputs = ctx.saved_tensors
    dq, dk, dv, dA, dmu = bidirectional_backward_op(*inputs, dout, dlog_mass, dmean)
    earlier = (None, None) if inputs[5] is None else (dA, dmu)
    return dq, dk, dv, None, None, *earlier


bidirectional_op.register_autograd(_bidirectional_gradients, setup_context=_save_bidirectional)
