"""The public ops: checks, choice of backend, dtypes; the work is done in the backends.

Shape suffixes: B batch, T tokens, H query heads, G key/value heads, L latents per head, K key
width, D value width, F feature width, E channels, N packed sequences, W window.

Keywords that every op shares:

* ``key_mask`` (B, T) bool, True = a real token. A masked source contributes nothing, wherever it
  stands; a query that sees no source gets zeros.
* ``cu_seqlens`` (N+1,) int32: N sequences packed into one row (B = 1) that never see each other.
  States then have N entries.
* ``initial_state``, ``output_final_state``: carry a sequence on; the state goes back in as it
  came out, and gradients flow through it.
* ``backend``: ``"reference"``, ``"torch"`` or ``"triton"`` is exactly that one; None takes the
  default, which is ``"torch"`` unless set (:mod:`latte.ops.default`).

Inputs are fp32, bf16, fp16 or fp64. Half precisions are computed in fp32, states are fp32 (fp64
for fp64 inputs), the output has the dtype of ``v``. Bad arguments raise ``ValueError``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.ops import reference, triton_backend
from latte.ops.buffers import nothing_out
from latte.ops.decoding import latte_step, macchiato_step, runs_as_step
from latte.ops.precision import full_precision
from latte.ops.state import LatteState, LinearState, WindowState
from latte.ops.torch_backend import latte as torch_latte
from latte.ops.torch_backend import linear as torch_linear
from latte.ops.torch_backend import window as torch_window
from latte.ops.triton_backend.launch import unavailable, window_unavailable
from latte.ops.validation import (
    BACKENDS,
    check_floats,
    check_groups,
    check_sequences,
    check_shape,
    check_softcap,
    check_state,
    check_tangents,
    check_widths,
    check_window,
    choose_backend,
    computation_dtype,
)
from latte.ops.window_state import check_window_state, final_window_state

AVAILABLE = ("reference", "torch")


@full_precision
def latte_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: LatteState | None = None,
    output_final_state: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, LatteState | None]:
    """Latte: linear-time attention whose weights are probabilities (paper, eq. 6-14).

    ``p(l|t) = softmax_l(q_t)``, ``p(s|l,t) = softmax_{s<=t}(k_s[l])`` and
    ``y_t = sum_l p(l|t) sum_{s<=t} p(s|l,t) v_s``; bidirectional (``causal=False``) with s over
    the whole sequence. The latent logits are not scaled. Exact for any finite logits.

    Args:
        q: query logits over the latents, (B, T, H, L).
        k: key logits over the sources, (B, T, H, L).
        v: values, (B, T, H, D), or (B, T, G, D) with G dividing H.
        initial_state: ``LatteState`` of (B or N, H, L) and (B or N, H, L, D).

    Returns:
        Output (B, T, H, D) and the final state (None unless ``output_final_state``).

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the backend is not available.
    """
    op = "latte_attention"
    chosen = choose_backend(backend, op, BACKENDS)
    check_floats(op, {"q": q, "k": k, "v": v})
    sizes: dict[str, int] = {}
    check_shape(op, "q", q, "BTHL", sizes)
    check_shape(op, "k", k, "BTHL", sizes)
    check_shape(op, "v", v, "BTGD", sizes)
    B, T, H, L, G, D = (sizes[c] for c in "BTHLGD")
    check_widths(op, sizes)
    check_groups(op, H, G, "v")
    if chosen == "triton" and (reason := unavailable(q, L, D)):
        raise ValueError(f"{op}: backend 'triton' is not available {reason}")
    N = check_sequences(op, B, T, q.device, key_mask, cu_seqlens)
    dtype = computation_dtype(q.dtype)
    if initial_state is not None:
        check_state(op, initial_state, LatteState._fields, ((N, H, L), (N, H, L, D)), q.device)
        initial_state = LatteState(*(x.to(dtype) for x in initial_state))
    if chosen != "reference":
        check_tangents(op, q, k, v, *(initial_state or ()))
    if runs_as_step(op, backend, (q, k, v, initial_state), (L, 1, D), causal, cu_seqlens):
        out, after = latte_step(q, k, v, key_mask, initial_state)
        return out, after if output_final_state else None
    if G != H:
        v = v.repeat_interleave(H // G, 2)
    if T == 0:
        start = initial_state or LatteState.empty(N, H, L, D, device=q.device, dtype=dtype)
        return nothing_out(v, q, k), start if output_final_state else None
    options: dict[str, Any] = {
        "causal": causal,
        "key_mask": key_mask,
        "cu_seqlens": cu_seqlens,
        "initial_state": initial_state,
        "output_final_state": output_final_state,
    }
    if chosen == "reference":
        out, state = reference.latte_attention(q.to(dtype), k.to(dtype), v.to(dtype), **options)
    elif chosen == "triton":
        out, state = triton_backend.latte_attention(q, k, v, **options)
    else:
        out, state = torch_latte.latte_attention(q, k, v, **options)
    return out.to(v.dtype), state


@full_precision
def macchiato_attention(
    latent_q: Tensor,
    latent_k: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int = 128,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = True,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: tuple[LatteState, WindowState] | None = None,
    output_final_state: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, tuple[LatteState, WindowState] | None]:
    """Latte-Macchiato: latent attention whose state 0 is a sliding window (paper, eq. 15-17).

    ``y_t = p(0|t) SWA_t + sum_{l>=1} p(l|t) mu_t[l]`` with p a softmax over L+1 logits: one
    normalised distribution over the past. ``window`` counts the keys seen, self included; if not
    causal a query sees ``|s - t| <= window // 2``.

    Args:
        latent_q: (B, T, H, L+1), column 0 is the window's logit.
        latent_k: (B, T, H, L).
        q: local queries, (B, T, H, K), after the position encoding.
        k: local keys, (B, T, G, K).
        v: values of both branches, (B, T, G, D).
        scale: of the local logits; 1 / sqrt(K) if None.
        softcap: local logits become ``softcap * tanh(logit / softcap)``.

    Returns:
        Output (B, T, H, D), and the state, a tuple ``(LatteState, WindowState)``, or None.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the backend is not available.
    """
    op = "macchiato_attention"
    chosen = choose_backend(backend, op, BACKENDS)
    check_floats(op, {"latent_q": latent_q, "latent_k": latent_k, "q": q, "k": k, "v": v})
    sizes: dict[str, int] = {}
    check_shape(op, "latent_k", latent_k, "BTHL", sizes)
    plus_one = {**sizes, "L": sizes["L"] + 1}
    if latent_q.ndim != 4 or latent_q.shape[-1] != plus_one["L"]:
        B, T, H, L = (sizes[c] for c in "BTHL")
        raise ValueError(
            f"{op}: latent_q must have shape (B={B}, T={T}, H={H}, L+1={L + 1}), one column more "
            f"than latent_k (column 0 is the window), got {tuple(latent_q.shape)}"
        )
    check_shape(op, "latent_q", latent_q, "BTHL", plus_one)
    check_shape(op, "q", q, "BTHK", sizes)
    check_shape(op, "k", k, "BTGK", sizes)
    check_shape(op, "v", v, "BTGD", sizes)
    check_widths(op, sizes)
    check_groups(op, sizes["H"], sizes["G"], "k and v")
    check_window(op, window)
    check_softcap(op, softcap)
    if initial_state is not None and (
        not isinstance(initial_state, tuple) or len(initial_state) != 2
    ):
        raise ValueError(
            f"{op}: initial_state must be the tuple (LatteState, WindowState) that came out, "
            f"got {type(initial_state).__name__}"
        )
    latte_state, window_state = (None, None) if initial_state is None else initial_state
    shared: dict[str, Any] = {
        "causal": causal,
        "key_mask": key_mask,
        "cu_seqlens": cu_seqlens,
        "output_final_state": output_final_state,
        "backend": backend,
    }
    L, K, D = (sizes[c] for c in "LKD")
    inputs = (latent_q, latent_k, q, k, v, initial_state)
    step = runs_as_step(op, backend, inputs, (L, K, D), causal, cu_seqlens)
    if step or (chosen == "triton" and sizes["T"]):
        if not step and (reason := window_unavailable(q, window, K, D, L)):
            raise ValueError(f"{op}: backend 'triton' is not available {reason}")
        return _fused_macchiato(
            *(latent_q, latent_k, q, k, v, latte_state, window_state, output_final_state, step),
            window=window,
            scale=1.0 / math.sqrt(K) if scale is None else float(scale),
            softcap=softcap,
            causal=causal,
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
        )
    local, window_state = sliding_window_attention(
        q, k, v, window=window, scale=scale, softcap=softcap, initial_state=window_state, **shared
    )
    # Softmax over the L+1 logits factors: p(l|t) = (1 - p(0|t)) softmax_{l>=1}. Both gates come
    # from the same difference, so neither suffers cancellation.
    dtype = computation_dtype(latent_q.dtype)
    logits = latent_q.to(dtype)
    odds = logits[..., 0] - torch.logsumexp(logits[..., 1:], -1)
    latent, latte_state = latte_attention(
        latent_q[..., 1:], latent_k, v, initial_state=latte_state, **shared
    )
    p_window = torch.sigmoid(odds)[..., None]
    p_latent = torch.sigmoid(-odds)[..., None]
    out = (p_window * local.to(dtype) + p_latent * latent.to(dtype)).to(v.dtype)
    if latte_state is None or window_state is None:
        return out, None
    return out, (latte_state, window_state)


def _fused_macchiato(
    latent_q: Tensor,
    latent_k: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    latte_state: LatteState | None,
    window_state: WindowState | None,
    output_final_state: bool,
    step: bool,
    **options: Any,
) -> tuple[Tensor, tuple[LatteState, WindowState] | None]:
    """Both branches in one kernel; shapes have been checked, states have not."""
    op, window = "macchiato_attention", options["window"]
    key_mask, cu_seqlens = options["key_mask"], options["cu_seqlens"]
    (B, T, H, L), D = latent_k.shape, v.shape[-1]
    N = check_sequences(op, B, T, q.device, key_mask, cu_seqlens)
    carried = latte_state is not None or window_state is not None
    if not options["causal"] and (carried or output_final_state):
        raise ValueError(f"{op}: a bidirectional window has no state to carry on")
    if latte_state is not None:
        check_state(op, latte_state, LatteState._fields, ((N, H, L), (N, H, L, D)), q.device)
        latte_state = LatteState(*(x.float() for x in latte_state))
    if window_state is not None:
        window_state = check_window_state(op, window_state, window, N, k, v)
    check_tangents(op, latent_q, latent_k, q, k, v, *(latte_state or ()), *(window_state or ()))
    if step:
        local = (window_state, window, options["scale"], options["softcap"])
        out, after = macchiato_step(latent_q, latent_k, q, k, v, key_mask, latte_state, *local)
        return out, after if output_final_state else None
    out, latte_state_1 = triton_backend.macchiato_attention(
        latent_q, latent_k, q, k, v, latte_state=latte_state, window_state=window_state, **options
    )
    if not output_final_state:
        return out, None
    tail = final_window_state(k, v, window, key_mask, cu_seqlens, window_state)
    return out, (latte_state_1, tail)


@full_precision
def sliding_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = True,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: WindowState | None = None,
    output_final_state: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, WindowState | None]:
    """Softmax attention over a sliding window, in linear time and memory (paper, eq. 17).

    ``window=w`` means w keys, s in [t-w+1, t], as in Hugging Face and FlashAttention; if not
    causal, ``|s - t| <= w // 2``. ``window=None`` is full softmax attention, whose state holds
    every key and value.

    Args:
        q: (B, T, H, K).
        k: (B, T, G, K), G dividing H.
        v: (B, T, G, D).
        scale: of the logits; 1 / sqrt(K) if None.
        softcap: logits become ``softcap * tanh(logit / softcap)``.
        initial_state: ``WindowState`` with the last W-1 keys and values (causal only).

    Returns:
        Output (B, T, H, D) and the final ``WindowState`` (None unless asked for).

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the backend is not available.
    """
    op = "sliding_window_attention"
    # Full attention has no kernels here: by default it stays with PyTorch's own.
    by_default = AVAILABLE if window is None else BACKENDS
    chosen = choose_backend(backend, op, by_default if backend is None else BACKENDS)
    check_floats(op, {"q": q, "k": k, "v": v})
    sizes: dict[str, int] = {}
    check_shape(op, "q", q, "BTHK", sizes)
    check_shape(op, "k", k, "BTGK", sizes)
    check_shape(op, "v", v, "BTGD", sizes)
    check_widths(op, sizes)
    check_groups(op, sizes["H"], sizes["G"], "k and v")
    check_window(op, window, optional=True)
    check_softcap(op, softcap)
    if chosen == "triton" and (reason := window_unavailable(q, window, sizes["K"], sizes["D"])):
        raise ValueError(f"{op}: backend 'triton' is not available {reason}")
    N = check_sequences(op, sizes["B"], sizes["T"], q.device, key_mask, cu_seqlens)
    if not causal and (initial_state is not None or output_final_state):
        raise ValueError(f"{op}: a bidirectional window has no state to carry on")
    carried = initial_state is not None or output_final_state
    if window is None and cu_seqlens is not None and carried:
        raise ValueError(f"{op}: full attention (window=None) carries no state when packed")
    if initial_state is not None:
        initial_state = check_window_state(op, initial_state, window, N, k, v)
    if chosen != "reference" and window is not None:
        check_tangents(op, q, k, v, *(initial_state or ()))
    scale = 1.0 / math.sqrt(sizes["K"]) if scale is None else float(scale)
    state = None
    if output_final_state:
        state = final_window_state(k, v, window, key_mask, cu_seqlens, initial_state)
    if sizes["T"] == 0:
        return nothing_out(v.repeat_interleave(sizes["H"] // sizes["G"], 2), q, k), state
    options: dict[str, Any] = {
        "window": window,
        "scale": scale,
        "softcap": softcap,
        "causal": causal,
        "key_mask": key_mask,
        "cu_seqlens": cu_seqlens,
        "initial_state": initial_state,
    }
    if chosen == "reference":
        dtype = computation_dtype(q.dtype)
        out = reference.sliding_window_attention(q.to(dtype), k.to(dtype), v.to(dtype), **options)
    elif chosen == "triton":
        out = triton_backend.sliding_window_attention(q, k, v, **options)
    else:
        out = torch_window.sliding_window_attention(q, k, v, **options)
    return out.to(v.dtype), state


def _elu(x: Tensor) -> Tensor:
    """elu(x) + 1, without the cancellation of e^x - 1 + 1."""
    return torch.where(x > 0, x + 1.0, torch.exp(x.clamp(max=0.0)))


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": _elu,
    "exp": torch.exp,
    "softplus": F.softplus,
    "relu": F.relu,
}


@full_precision
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str | Callable[[Tensor], Tensor] | None = None,
    causal: bool = True,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: LinearState | None = None,
    output_final_state: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, LinearState | None]:
    """Undirected linear attention, the other reading of the factorisation (paper, eq. 4-5).

    ``y_t = S_t phi(q_t) / (phi(q_t) z_t)`` with ``S_t = sum_{s<=t} phi(k_s) v_s`` and
    ``z_t = sum_{s<=t} phi(k_s)``. Latte with p(l|t) proportional to ``e^{q_l} alpha_t[l]`` is
    this model with phi = exp.

    Args:
        q: (B, T, H, F).
        k: (B, T, H, F).
        v: (B, T, H, D).
        feature_map: phi; ``"elu"`` (elu + 1), ``"exp"``, ``"softplus"``, ``"relu"`` or any
            callable that keeps the shape of the first dimensions; None: q and k are features
            already, and must not be negative.

    Returns:
        Output (B, T, H, D) and the final ``LinearState`` (None unless asked for).

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the backend is not available.
    """
    op = "linear_attention"
    chosen = choose_backend(backend, op, AVAILABLE)
    check_floats(op, {"q": q, "k": k, "v": v})
    named = isinstance(feature_map, str) and feature_map in FEATURE_MAPS
    if not (named or feature_map is None or callable(feature_map)):
        raise ValueError(
            f"{op}: feature_map must be one of {tuple(FEATURE_MAPS)}, a callable or None, "
            f"got {feature_map!r}"
        )
    dtype = computation_dtype(q.dtype)
    phi = FEATURE_MAPS[feature_map] if isinstance(feature_map, str) else feature_map
    q, k = q.to(dtype), k.to(dtype)
    if phi is not None:
        q, k = phi(q), phi(k)
    sizes: dict[str, int] = {}
    check_shape(op, "q", q, "BTHF", sizes)
    check_shape(op, "k", k, "BTHF", sizes)
    check_shape(op, "v", v, "BTHD", sizes)
    check_widths(op, sizes)
    B, T, H, F_, D = (sizes[c] for c in "BTHFD")
    N = check_sequences(op, B, T, q.device, key_mask, cu_seqlens)
    if initial_state is not None:
        check_state(op, initial_state, LinearState._fields, ((N, H, F_, D), (N, H, F_)), q.device)
        initial_state = LinearState(*(x.to(dtype) for x in initial_state))
    if chosen != "reference" and cu_seqlens is not None:
        check_tangents(op, q, k, v, *(initial_state or ()))
    if T == 0:
        zeros = q.new_zeros(N, H, F_, D)
        start = initial_state or LinearState(zeros, zeros[..., 0])
        return nothing_out(v, q, k), start if output_final_state else None
    backends = {"reference": reference.linear_attention, "torch": torch_linear.linear_attention}
    out, state = backends[chosen](
        q,
        k,
        v.to(dtype),
        causal=causal,
        key_mask=key_mask,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        output_final_state=output_final_state,
    )
    return out.to(v.dtype), state
