"""Steps of decoding: which calls one Triton kernel serves, decided here and nowhere else.

A *step* is a call with one token per row (T = 1) that is causal, not packed, and of which nobody
wants a gradient.

| ``backend``, or the default that somebody named | a step |
|---|---|
| ``"triton"`` | the step's kernel: on CUDA tensors, or anywhere under Triton's interpreter |
| neither | on CUDA tensors the step's kernel if Triton, dtype and widths allow it; else ``torch`` |
| another | that one |

What the kernel cannot serve when it was asked for raises ``ValueError``. The RG-LRU and the
convolution follow the same rule with their own kernels. ``LATTE_BACKEND=torch`` or ``with
use_backend("torch"):`` keeps steps off the kernels.

Shape suffixes: B rows, H query heads, G key/value heads, L latents, K key width, D value width,
W window.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from latte.ops.default import named_backend
from latte.ops.state import LatteState, WindowState
from latte.ops.triton_backend.launch import WIDEST_VALUE, unavailable, unavailable_for


def is_step(inputs: tuple[Any, ...], causal: bool, cu_seqlens: Tensor | None) -> bool:
    """One token per row of ``inputs[0]`` (B, T, ...), causal, not packed, no gradient wanted."""
    B, T = inputs[0].shape[:2]
    if T != 1 or B == 0 or not causal or cu_seqlens is not None:
        return False
    return not torch.is_grad_enabled() or not _requires_grad(inputs)


def _requires_grad(tree: Any) -> bool:
    if isinstance(tree, tuple):
        return any(_requires_grad(x) for x in tree)
    return isinstance(tree, Tensor) and tree.requires_grad


def backend_of_step(backend: str | None, x: Tensor, reason: str | None) -> str | None:
    """The backend of a step; ``reason`` says why the kernel cannot serve it, or is None."""
    wanted = named_backend() if backend is None else backend
    if wanted is None and x.device.type == "cuda" and reason is None:
        return "triton"
    return wanted


def runs_as_step(
    op: str,
    backend: str | None,
    inputs: tuple[Any, ...],
    widths: tuple[int, int, int],
    causal: bool,
    cu_seqlens: Tensor | None,
) -> bool:
    """Whether the step's kernel serves this call of ``op``.

    Args:
        inputs: queries (B, T, ...) first, then everything else that may want a gradient.
        widths: L, K, D.

    Raises:
        ValueError: it was asked for, and cannot.
    """
    if not is_step(inputs, causal, cu_seqlens):
        return False
    L, K, D = widths
    reason = unavailable(inputs[0], L, D)
    if reason is None and not 1 <= K <= WIDEST_VALUE:
        reason = f"for K={K}: expected K from 1 to {WIDEST_VALUE}"
    if backend_of_step(backend, inputs[0], reason) != "triton":
        return False
    if reason is not None:
        raise ValueError(f"{op}: backend 'triton' is not available {reason}")
    return True


def choose_for_step(
    backend: str | None, inputs: tuple[Any, ...], cu_seqlens: Tensor | None
) -> str | None:
    """``backend``, or what None means if this is a step: for ops whose kernels serve any length."""
    if backend is not None or not is_step(inputs, True, cu_seqlens):
        return backend
    return backend_of_step(None, inputs[0], unavailable_for(inputs[0]))


def latte_step(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: LatteState | None
) -> tuple[Tensor, LatteState]:
    """:func:`latte.ops.latte_attention` of one token: q, k (B, 1, H, L), v (B, 1, G, D)."""
    from latte.ops.triton_backend.step import latte_step_op

    B, _, H, L = k.shape
    state = state or LatteState.empty(B, H, L, v.shape[-1], device=q.device)
    out, *after = latte_step_op(q, k, v, key_mask, *state)
    return out, LatteState(*after)


def macchiato_step(
    latent_q: Tensor,
    latent_k: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    latents: LatteState | None,
    tail: WindowState | None,
    window: int,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, tuple[LatteState, WindowState]]:
    """:func:`latte.ops.macchiato_attention` of one token; either state may be missing."""
    from latte.ops.triton_backend.step import macchiato_step_op

    B, _, H, L = latent_k.shape
    latents = latents or LatteState.empty(B, H, L, v.shape[-1], device=q.device)
    if tail is None:
        keys, values = (x.new_zeros(B, window - 1, *x.shape[2:]) for x in (k, v))
        tail = WindowState(keys, values, k.new_zeros(B, window - 1, dtype=torch.bool))
    out, *after = macchiato_step_op(
        latent_q, latent_k, q, k, v, key_mask, *latents, *tail, scale, softcap
    )
    return out, (LatteState(*after[:2]), WindowState(*after[2:]))
