"""Latte on a GPU, in Triton: what the interface calls, with inputs that it has checked.

Each op is a file with its kernels and the custom op that launches them. The file is loaded at its
first use, and nothing imports Triton before that. ``launch`` defines which inputs the kernels
accept, and holds the tuned numbers. The steps of decoding are in ``step``. The code that chooses
them calls them directly.

Shape suffixes: B batch, T tokens, H query heads, G key/value heads, L latents, K key width, D value
width, E channels, N sequences.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor

from latte.ops.arguments import RGLRU, Convolution, Latte, Macchiato, Mixture, Window
from latte.ops.state import LatteState, SeenSinks, Sinks, WindowState
from latte.ops.tensors import Local, Sequences, without_masked

AnySinks = TypeVar("AnySinks", SeenSinks, Sinks)


def latte_attention(x: Latte, causal: bool) -> tuple[Tensor, ...]:
    """See :func:`latte.ops.latte_attention`: the output, log-mass and mean."""
    from latte.ops.triton_backend.latte_bidirectional import bidirectional_op
    from latte.ops.triton_backend.latte_causal import causal_op, forgetting_op

    op = causal_op if causal else bidirectional_op
    if x.log_decay is not None:
        op = forgetting_op
    return op(*x._replace(v=without_masked(x.key_mask, x.v)))[:3]


def macchiato_attention(x: Macchiato, causal: bool) -> tuple[Tensor, ...]:
    """See :func:`latte.ops.macchiato_attention`: the output, log-mass and mean."""
    from latte.ops.triton_backend.macchiato import macchiato_op

    if x.pending_k is not None and x.pending_v is not None:
        keys, values = (without_masked(x.pending_mask, y) for y in (x.pending_k, x.pending_v))
        x = x._replace(pending_k=keys, pending_v=values)
    return macchiato_op(*Mixture.of(_readable(x), causal))[:3]


def sliding_window_attention(x: Window) -> tuple[Tensor]:
    """See :func:`latte.ops.sliding_window_attention`."""
    from latte.ops.triton_backend.window import window_op

    return (window_op(*_readable(x)),)


def _readable(x: Any) -> Any:
    """The window's arguments without what is masked, and with a scale above 0."""
    near = x if isinstance(x, Window) else x.near()
    q, sinks, local = rising(x.q, near.sinks, near.local)
    x = x._replace(q=q, sink_q=sinks and sinks.q, scale=local.scale)
    x = x._replace(k=without_masked(x.key_mask, x.k), v=without_masked(x.key_mask, x.v))
    if x.tail_k is None:
        return x
    keys, values = (without_masked(x.tail_mask, y) for y in (x.tail_k, x.tail_v))
    return x._replace(tail_k=keys, tail_v=values)


def rising(
    q_BTHK: Tensor, sinks: AnySinks | None, local: Local
) -> tuple[Tensor, AnySinks | None, Local]:
    """With a scale above 0, as the kernels take the largest logit before they scale it."""
    if local.scale > 0:
        return q_BTHK, sinks, local
    sign = -1.0 if local.scale < 0 else 0.0
    sinks = None if sinks is None else sinks._replace(q=sinks.q * sign)
    return q_BTHK * sign, sinks, local._replace(scale=abs(local.scale) or 1.0)


def latte_step(x: Latte) -> tuple[Tensor, Tensor, Tensor]:
    """One token by one kernel: output, log-mass and mean after it. Values may be (B, 1, G, D)."""
    from latte.ops.triton_backend.step import latte_step_op

    return latte_step_op(*_with_latents(x, x.k, x.v))


def macchiato_step(
    x: Macchiato,
) -> tuple[Tensor, Tensor, Tensor, WindowState, WindowState | None]:
    """One token by one kernel: output, log-mass, mean, tail and pending sources after it."""
    from latte.ops.triton_backend.step import macchiato_step_op

    x = _with_latents(x, x.latent_k, x.v)
    if x.tail_k is None:
        keys, values, mask = WindowState.empty(x.k, x.v, x.window)
        x = x._replace(tail_k=keys, tail_v=values, tail_mask=mask)
    if x.delay and x.pending_k is None:
        keys, values, mask = WindowState.empty(x.latent_k, x.v, x.window + 1)
        x = x._replace(pending_k=keys, pending_v=values, pending_mask=mask)
    out, log_mass, mean, *held = macchiato_step_op(*x)
    pending = WindowState(*held[3:]) if x.delay else None
    return out, log_mass, mean, WindowState(*held[:3]), pending


def _with_latents(x: Any, k: Tensor, v: Tensor) -> Any:
    """The arguments, with the state before any token if there is none."""
    if x.log_mass is not None:
        return x
    log_mass, mean = LatteState.empty_for(k, k.shape[0], *k.shape[2:], v.shape[3])
    return x._replace(log_mass=log_mass, mean=mean)


def rg_lru(x: RGLRU) -> tuple[Tensor, Tensor]:
    """See :func:`latte.ops.rg_lru`: h (B, T, E) and the last state (N, E), for T > 0."""
    from latte.ops.triton_backend.recurrence import beginnings, rg_lru_op

    sequences = Sequences(x.key_mask, x.cu_seqlens)
    begins = beginnings(x.x, sequences, x.initial_state, x.reverse)
    return rg_lru_op(*x[:-1], *begins, x.reverse)[:2]


def causal_conv1d(x: Convolution) -> tuple[Tensor, Tensor]:
    """See :func:`latte.ops.causal_conv1d`: y (B, T, E) and the new tail (N, K-1, E), for T > 0."""
    from latte.ops.triton_backend.convolution import convolution_op

    return convolution_op(*x)


def rotate(cos: Tensor, sin: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
    """See :func:`latte.ops.pointwise.rotate_both`: one tensor or two, in one launch."""
    from latte.ops.triton_backend import pointwise

    return pointwise.rotate(cos, sin, *xs)


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """See :func:`latte.ops.pointwise.silu_product`."""
    from latte.ops.triton_backend import pointwise

    return pointwise.silu_product(gate, up)  # type: ignore[no-any-return]


def add_rms_norm(*given: Any) -> tuple[Tensor, Tensor]:
    """See :func:`latte.ops.pointwise.add_rms_norm`: with the norm's dtype, or None."""
    from latte.ops.triton_backend import pointwise

    return pointwise.add_rms_norm(*given)  # type: ignore[no-any-return]
