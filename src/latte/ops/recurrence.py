"""The RG-LRU and the causal depthwise convolution: where query and key logits may come from.

Shape suffixes: B batch, T tokens, E channels, K taps, N states (B, or the packed sequences).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.ops import reference, triton_backend
from latte.ops.buffers import nothing_out, without_masked
from latte.ops.decoding import choose_for_step
from latte.ops.packing import sequence_ids, sequence_starts
from latte.ops.precision import full_precision
from latte.ops.torch_backend.scan import linear_recurrence
from latte.ops.triton_backend.launch import unavailable_for
from latte.ops.validation import (
    BACKENDS,
    check_floats,
    check_parameters,
    check_sequences,
    check_shape,
    check_state,
    check_tangents,
    choose_backend,
    computation_dtype,
)

# Griffin's constant c: log a_t = -c r_t softplus(theta).
GATE_STRENGTH = 8.0


@full_precision
def rg_lru(
    x: Tensor,
    recurrence_gate: Tensor,
    input_gate: Tensor,
    theta: Tensor,
    *,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Real-gated linear recurrent unit (Griffin, arXiv 2402.19427; paper, eq. 18-19).

    ``r, i = sigmoid(recurrence_gate), sigmoid(input_gate)``, ``log a_t = -8 r_t softplus(theta)``
    and ``h_t = a_t h_{t-1} + sqrt(1 - a_t^2) (i_t x_t)``. At the start of a sequence a = 0 and
    the factor is 1. A masked token leaves the state as it is.

    Args:
        x: input, (B, T, E).
        recurrence_gate: logits of r, (B, T, E).
        input_gate: logits of i, (B, T, E).
        theta: (E,).
        initial_state: (B or N, E). A row of zeros is the empty state, the one before a sequence:
            the sequence then starts at its first real token.
        reverse: run from the end of every sequence to its beginning.

    Returns:
        h (B, T, E) in the dtype of x, and the last state (B or N, E) in fp32 (fp64 for fp64
        inputs; None unless ``output_final_state``).

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the backend is not available.
    """
    op = "rg_lru"
    check_floats(op, {"x": x, "recurrence_gate": recurrence_gate, "input_gate": input_gate})
    sizes: dict[str, int] = {}
    check_shape(op, "x", x, "BTE", sizes)
    check_shape(op, "recurrence_gate", recurrence_gate, "BTE", sizes)
    check_shape(op, "input_gate", input_gate, "BTE", sizes)
    check_shape(op, "theta", theta, "E", sizes)
    check_parameters(op, x.device, {"theta": theta})
    B, T, E = (sizes[c] for c in "BTE")
    every = (x, recurrence_gate, input_gate, theta, initial_state)
    chosen = choose_backend(choose_for_step(backend, every, cu_seqlens), op, BACKENDS)
    if chosen == "triton" and (reason := unavailable_for(x)):
        raise ValueError(f"{op}: backend 'triton' is not available {reason}")
    N = check_sequences(op, B, T, x.device, key_mask, cu_seqlens)
    dtype = computation_dtype(x.dtype)
    if initial_state is not None:
        check_state(op, (initial_state,), ("state",), ((N, E),), x.device)
        initial_state = initial_state.to(dtype)
    if chosen != "reference":
        check_tangents(op, x, recurrence_gate, input_gate, theta, initial_state)
    h0_NE = x.new_zeros(N, E, dtype=dtype) if initial_state is None else initial_state
    if x.numel() == 0:
        out = nothing_out(x, recurrence_gate, input_gate, theta)
        return out, h0_NE if output_final_state else None
    if chosen == "triton":
        out, last = triton_backend.rg_lru(
            *(x, recurrence_gate, input_gate, theta),
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
            initial_state=initial_state,
            reverse=reverse,
        )
        return out, _begun(last, key_mask, cu_seqlens) if output_final_state else None
    if reverse:
        x, recurrence_gate, input_gate = (z.flip(1) for z in (x, recurrence_gate, input_gate))
        key_mask = None if key_mask is None else key_mask.flip(1)
        cu_seqlens = None if cu_seqlens is None else T - cu_seqlens.flip(0)
        h0_NE = h0_NE if cu_seqlens is None else h0_NE.flip(0)

    if key_mask is not None:
        x, recurrence_gate, input_gate = (
            without_masked(key_mask, z) for z in (x, recurrence_gate, input_gate)
        )
    log_a = -GATE_STRENGTH * torch.sigmoid(recurrence_gate.to(dtype)) * F.softplus(theta.to(dtype))
    # The factor's slope is infinite at a = 1, where a closed gate underflows.
    log_a = log_a.clamp(max=-torch.finfo(dtype).tiny)
    a, factor = torch.exp(log_a), torch.sqrt(-torch.expm1(2.0 * log_a))
    starts = _first_tokens(B, T, h0_NE, key_mask, cu_seqlens)[..., None]
    a = torch.where(starts, 0.0, a)
    b = torch.where(starts, 1.0, factor) * torch.sigmoid(input_gate.to(dtype)) * x.to(dtype)
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
    recurrence = reference.linear_recurrence if chosen == "reference" else linear_recurrence
    h = recurrence(a, b, first_BE)
    state = None
    if output_final_state:
        state = h[:, -1]
        if cu_seqlens is not None:
            end = (cu_seqlens[1:] - 1).clamp(min=0).long()
            empty = (cu_seqlens[1:] == cu_seqlens[:-1])[:, None]
            state = torch.where(empty, h0_NE, h[0, end])
        state = _begun(state, key_mask, cu_seqlens)
        if cu_seqlens is not None and reverse:
            state = state.flip(0)
    out = h.flip(1) if reverse else h
    return out.to(x.dtype), state


def _begun(state_NE: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """The state, never a row of zeros where a real token was read: that would be the empty state.

    A token may be 0 itself, as the embedding of padding is. What is added is below the last digit
    of any state but 0.
    """
    dtype = state_NE.dtype
    tiny = torch.finfo(dtype).tiny
    if cu_seqlens is not None:
        bounds = cu_seqlens.long()
        if key_mask is not None:
            bounds = F.pad(key_mask[0].long().cumsum(0), (1, 0))[bounds]
        read_N = bounds.diff() > 0
    elif key_mask is not None:
        read_N = key_mask.any(1)
    else:
        return state_NE + tiny
    return state_NE + tiny * read_N[:, None].to(dtype)


def _first_tokens(
    B: int, T: int, h0_NE: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    """(B, T) bool: the first real token of every sequence that has not begun before."""
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


@full_precision
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Causal depthwise convolution, ``y_t = bias + sum_i weight[:, i] x_{t-K+1+i}``, i = 0..K-1.

    No activation. Masked inputs count as 0; taps do not cross the bounds of packed sequences.

    Args:
        x: (B, T, E).
        weight: (E, K), the last tap is the present token's.
        bias: (E,) or None.
        initial_state: the last K-1 inputs, oldest first, (B or N, K-1, E).

    Returns:
        y (B, T, E) in the dtype of x, and the new tail (B or N, K-1, E), or None.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the backend is not available.
    """
    op = "causal_conv1d"
    check_floats(op, {"x": x})
    sizes: dict[str, int] = {}
    check_shape(op, "x", x, "BTE", sizes)
    check_shape(op, "weight", weight, "EK", sizes)
    if bias is not None:
        check_shape(op, "bias", bias, "E", sizes)
    check_parameters(op, x.device, {"weight": weight} | ({} if bias is None else {"bias": bias}))
    B, T, E, K = (sizes[c] for c in "BTEK")
    if K < 1:
        raise ValueError(f"{op}: weight must have at least one tap, got {tuple(weight.shape)}")
    every = (x, weight, bias, initial_state)
    chosen = choose_backend(choose_for_step(backend, every, cu_seqlens), op, BACKENDS)
    if chosen == "triton" and (reason := unavailable_for(x)):
        raise ValueError(f"{op}: backend 'triton' is not available {reason}")
    N = check_sequences(op, B, T, x.device, key_mask, cu_seqlens)
    if initial_state is not None:
        check_state(op, (initial_state,), ("state",), ((N, K - 1, E),), x.device)
    if chosen == "triton" and x.numel():
        check_tangents(op, x, weight, bias, initial_state)
        out, last = triton_backend.causal_conv1d(
            *(x, weight, bias),
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
            initial_state=initial_state,
        )
        return out, last if output_final_state else None
    dtype = computation_dtype(x.dtype)
    inputs = without_masked(key_mask, x.to(dtype))
    tail = x.new_zeros(N, K - 1, E, dtype=dtype)
    if initial_state is not None:
        tail = initial_state.to(dtype)
    if cu_seqlens is None:
        extended = torch.cat([tail, inputs], 1)
        taps = [extended[:, i : i + T] for i in range(K)]
        new_tail = extended[:, T:]
    else:
        position = torch.arange(T, device=x.device) - sequence_starts(cu_seqlens, T)
        ids = sequence_ids(cu_seqlens, T)
        taps = []
        for i in range(K):
            back = K - 1 - i
            shifted = F.pad(inputs, (0, 0, back, 0))[:, :T]
            if back:
                earlier = tail[ids, (i + position).clamp(max=K - 2)][None]
                shifted = torch.where((position >= back)[None, :, None], shifted, earlier)
            taps.append(shifted)
        new_tail = _packed_tail(inputs, tail, cu_seqlens)
    weight = weight.to(dtype)
    y = sum((weight[:, i] * tap for i, tap in enumerate(taps)), inputs.new_zeros(()))
    if bias is not None:
        y = y + bias.to(dtype)
    state = new_tail.to(x.dtype).clone() if output_final_state else None
    return y.to(x.dtype), state


def _packed_tail(x_1TE: Tensor, tail_NPE: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The last P inputs of every sequence, from its own tokens or from its earlier tail."""
    P, T = tail_NPE.shape[1], x_1TE.shape[1]
    if P == 0 or T == 0:
        return tail_NPE
    start_N1, end_N1 = cu_seqlens[:-1, None].long(), cu_seqlens[1:, None].long()
    token_NP = end_N1 - P + torch.arange(P, device=x_1TE.device)
    rows = torch.arange(tail_NPE.shape[0], device=x_1TE.device)[:, None]
    old = tail_NPE[rows, (token_NP - start_N1 + P).clamp(0, P - 1)]
    new = x_1TE[0, token_NP.clamp(min=0)]
    return torch.where((token_NP >= start_N1)[..., None], new, old)
