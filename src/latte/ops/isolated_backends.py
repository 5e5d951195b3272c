"""The reference and torch backends as the interface calls them, with isolation.

Each function takes a backend's op. It returns the same op, in which what is not finite stays in its
own sequence (:mod:`latte.ops.isolation`). The native and Triton kernels need none of this.

Shape suffixes: B batch, T tokens, H query heads, L latents per head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from latte.ops.arguments import NO_SINKS, NO_STATE
from latte.ops.isolation import View, isolated
from latte.ops.state import LatteState, LinearState, SeenSinks, WindowState
from latte.ops.tensors import Local, Sequences
from latte.ops.torch_backend import log_mass as torch_log_mass

States = tuple[Tensor, Tensor]


def latte(backend: Callable[..., tuple[Tensor, LatteState]]) -> Callable[..., Any]:
    """Isolation for :func:`latte.ops.latte_attention`."""

    def op(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequences: Sequences,
        earlier: States | None,
        log_decay: Tensor | None,
    ) -> tuple[Tensor, States]:
        def run(q: Any, k: Any, v: Any, log_decay: Any, *state: Any) -> tuple[Tensor, ...]:
            out, after = backend(q, k, v, sequences, state or None, log_decay)
            return out, *after

        given = {"q": q, "k": k, "v": v, "log_decay": log_decay}
        given |= zip(("log_mass", "mean"), earlier or (), strict=False)
        out, log_mass, mean = isolated(run, View(sequences), given)
        return out, (log_mass, mean)

    return op


def macchiato(backend: Callable[..., tuple[Tensor, LatteState]]) -> Callable[..., Any]:
    """Isolation for :func:`latte.ops.macchiato_attention`, and its joint softmax."""

    def op(
        latent_q: Tensor,
        latent_k: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        local: Local,
        sequences: Sequences,
        earlier: States | None,
        tail: WindowState | None,
        log_decay: Tensor | None,
        sinks: SeenSinks | None,
        delay: bool,
        pending: WindowState | None,
        joint: bool,
    ) -> tuple[Tensor, States]:
        def run(latent_q: Any, latent_k: Any, q: Any, k: Any, v: Any, *more: Any) -> Any:
            log_decay, log_mass, mean, tail_k, tail_v, pending_k, pending_v, *far = more
            near = tail and tail._replace(keys=tail_k, values=tail_v)
            late = pending and pending._replace(keys=pending_k, values=pending_v)
            kept = sinks and sinks._replace(q=far[0], keys=far[1], values=far[2])
            if joint:
                mass = torch_log_mass.window_log_mass(q, k, local, sequences, near, kept)
                latent_q = torch_log_mass.with_log_mass(latent_q, mass)
            state = None if earlier is None else (log_mass, mean)
            inputs = (latent_q, latent_k, q, k, v, local, sequences, state, near)
            out, after = backend(*inputs, log_decay, kept, delay, late)
            return out, *after

        view = View(
            sequences,
            tail_mask=tail and tail.mask,
            pending_mask=pending and pending.mask,
            sink_mask=sinks and sinks.mask,
            sinks_seen=sinks and sinks.seen,
        )
        given: dict[str, Any] = {"latent_q": latent_q, "latent_k": latent_k, "q": q, "k": k, "v": v}
        given["log_decay"] = log_decay
        given |= zip(("log_mass", "mean"), earlier or NO_STATE, strict=True)
        given |= zip(("tail_k", "tail_v"), tail or NO_STATE, strict=False)
        given |= zip(("pending_k", "pending_v"), pending or NO_STATE, strict=False)
        given |= zip(("sink_q", "sink_k", "sink_v"), sinks or NO_SINKS, strict=False)
        out, log_mass, mean = isolated(run, view, given)
        return out, (log_mass, mean)

    return op


def window(backend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Isolation for :func:`latte.ops.sliding_window_attention`."""

    def op(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        local: Local,
        sequences: Sequences,
        tail: WindowState | None,
        sinks: SeenSinks | None,
    ) -> Tensor:
        def run(q: Any, k: Any, v: Any, tail_k: Any, tail_v: Any, *far: Any) -> tuple[Tensor]:
            near = tail and tail._replace(keys=tail_k, values=tail_v)
            kept = sinks and sinks._replace(q=far[0], keys=far[1], values=far[2])
            return (backend(q, k, v, local, sequences, near, kept),)

        given: dict[str, Any] = {"q": q, "k": k, "v": v}
        given |= zip(("tail_k", "tail_v"), tail or NO_STATE, strict=False)
        given |= zip(("sink_q", "sink_k", "sink_v"), sinks or NO_SINKS, strict=False)
        return isolated(run, _near(local, sequences, tail, sinks), given)[0]

    return op


def window_log_mass(
    q: Tensor,
    k: Tensor,
    local: Local,
    sequences: Sequences,
    tail: WindowState | None,
    sinks: SeenSinks | None,
) -> Tensor:
    """:func:`latte.ops.window_log_mass` (B, T, H), with isolation."""

    def run(q: Any, k: Any, tail_k: Any, *far: Any) -> tuple[Tensor]:
        near = tail and tail._replace(keys=tail_k)
        kept = sinks and sinks._replace(q=far[0], keys=far[1])
        return (torch_log_mass.window_log_mass(q, k, local, sequences, near, kept),)

    given = {"q": q, "k": k, "tail_k": tail and tail.keys}
    given |= zip(("sink_q", "sink_k"), sinks or NO_SINKS, strict=False)
    return isolated(run, _near(local, sequences, tail, sinks), given)[0]


def _near(
    local: Local, sequences: Sequences, tail: WindowState | None, sinks: SeenSinks | None
) -> View:
    """What a query of a window sees."""
    masks = (tail and tail.mask, None, sinks and sinks.mask, sinks and sinks.seen)
    return View(sequences, local.window, False, *masks)


def linear(backend: Callable[..., tuple[Tensor, LinearState]]) -> Callable[..., Any]:
    """Isolation for :func:`latte.ops.linear_attention`."""

    def op(
        q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, earlier: LinearState | None
    ) -> tuple[Tensor, LinearState]:
        def run(q: Any, k: Any, v: Any, *state: Any) -> tuple[Tensor, ...]:
            out, after = backend(q, k, v, sequences, LinearState(*state) if state else None)
            return out, *after

        given = {"q": q, "k": k, "v": v}
        given |= zip(("memory", "normaliser"), earlier or (), strict=False)
        out, *after = isolated(run, View(sequences), given)
        return out, LinearState(*after)

    return op


def rg_lru(backend: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    """Isolation for :func:`latte.ops.rg_lru`."""

    def op(
        x: Tensor,
        recurrence_gate: Tensor,
        input_gate: Tensor,
        theta: Tensor,
        sequences: Sequences,
        initial_state: Tensor | None,
        reverse: bool,
    ) -> tuple[Tensor, ...]:
        def run(x: Any, recurrence_gate: Any, input_gate: Any, state: Any) -> tuple[Tensor, ...]:
            return backend(x, recurrence_gate, input_gate, theta, sequences, state, reverse)

        given = {"x": x, "recurrence_gate": recurrence_gate, "input_gate": input_gate}
        view = View(sequences, reverse=reverse)
        return isolated(run, view, given | {"state": initial_state})

    return op
