"""Which backend serves a call.

Where a caller names none (``backend=None``), the default does: ``LATTE_BACKEND`` from the
environment, else ``"cpu"``, the native kernels, on CPU tensors if the library is there and has the
op, else ``"torch"``. Models and layers name no backend, so this is the one place that
decides for all of them; a recipe sets it by ``training.backend``. Ops that the default does not
have (full softmax attention has no Triton kernels, say) take ``"torch"``; an op that has it uses
it, or raises ``ValueError`` where it cannot serve the inputs.
On a GPU ``"torch"`` takes the place of a default ``"triton"`` that cannot serve the card or the
widths, with one warning. Nothing switches by size, but for one token at a time:

A *step* of decoding is a call with one token per row (T = 1) that is causal, not packed, and of
which nobody wants a gradient.

| ``backend``, or the default that somebody named | a step |
|---|---|
| ``"triton"`` | the step's kernel: on CUDA tensors, or anywhere under Triton's interpreter |
| neither | on CUDA tensors the step's kernel if Triton, dtype and widths allow it; else ``torch`` |
| another | that one |

The native kernels are no default inside a transform of ``torch.func`` and for inputs with
forward-mode tangents, which custom ops do not have: ``torch`` serves these. Gradients of gradients
come from PyTorch's operations, whichever served the first. ``backend="cpu"`` without the library,
or for tensors elsewhere, raises ``ValueError``, forward mode ``NotImplementedError``; the steps of
decoding in place (:mod:`latte.ops.step`) are native kernels unless another backend is named. Where
the library is not there but could be, the first op that it would serve warns, once.

What the kernel cannot serve when a call asked for it raises ``ValueError``. The RG-LRU and the
convolution follow the same rule with their own kernels. ``LATTE_BACKEND=torch`` or ``with
use_backend("torch"):`` keeps steps off the kernels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from latte.ops import cpp_backend
from latte.ops.notices import warn_once
from latte.ops.tensors import Sequences

BACKENDS = ("reference", "torch", "cpu", "triton")

# None: nobody has named one. A plain value, so that torch.compile can guard on it.
_default: str | None = os.environ.get("LATTE_BACKEND")
_watched: set[str] | None = None  # see `watch_choices`


def default_backend(device: torch.device | str = "cpu") -> str:
    """The backend of ops whose caller names none.

    Of ops that have it: ``"torch"`` serves the others. On a CPU that is ``"cpu"`` where the native
    kernels are there. On a GPU a step of decoding is Triton's where Triton can serve it.

    Args:
        device: of the inputs.

    Raises:
        ValueError: ``LATTE_BACKEND`` names no backend.
    """
    native = torch.device(device).type == "cpu" and cpp_backend.ABSENT is None
    return named_backend() or ("cpu" if native else "torch")


def named_backend() -> str | None:
    """The default backend if somebody has named it, else None.

    Raises:
        ValueError: ``LATTE_BACKEND`` names no backend.
    """
    if _default is not None and _default not in BACKENDS:
        raise ValueError(f"LATTE_BACKEND must be one of {BACKENDS}, got {_default!r}")
    return _default


def set_default_backend(backend: str) -> None:
    """Let ops whose caller names no backend take this one from now on.

    Raises:
        ValueError: there is no such backend.
    """
    global _default
    if backend not in BACKENDS:
        raise ValueError(f"the default backend must be one of {BACKENDS}, got {backend!r}")
    _default = backend


@contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """``set_default_backend`` for the time of a ``with`` block.

    Raises:
        ValueError: there is no such backend.
    """
    global _default
    before = _default
    set_default_backend(backend)
    try:
        yield
    finally:
        _default = before


@contextmanager
def watch_choices() -> Iterator[set[str]]:
    """Within it, the backends that ops run on are collected, for telling which they were."""
    global _watched
    before, _watched = _watched, set()
    try:
        yield _watched
    finally:
        _watched = before


def choose(op: str, backend: str | None, *given: Any, **named: Any) -> str:
    """As :func:`_choose`, seen by :func:`watch_choices`."""
    chosen = _choose(op, backend, *given, **named)
    if _watched is not None:
        _watched.add(chosen)
    return chosen


def _choose(
    op: str,
    backend: str | None,
    serves: Collection[str],
    device: torch.device,
    refusal: Callable[[], str | None],
    *,
    step: bool = False,
    inputs: tuple[Any, ...] = (),
) -> str:
    """The backend of one call: exactly the one asked for, which None leaves open.

    Args:
        serves: the backends that have this op.
        device: of the inputs.
        refusal: why the Triton kernels cannot serve the inputs, or None if they can; asked only
            where it matters.
        step: this is a step of decoding, and ``op`` has a kernel for it.
        inputs: of the op, where the native CPU kernels serve it.

    Raises:
        ValueError: the op has no such backend, or that one cannot serve the inputs; on a GPU a
            default ``"triton"`` warns instead, once, and ``"torch"`` serves them.
    """
    exactly = backend is not None
    if backend is None:
        named = named_backend()
        if named is None and step and device.type == "cuda" and refusal() is None:
            return "triton"
        if named is None and "cpu" in serves and cpp_backend.serves(*inputs):
            return "cpu"
        backend = named if named is not None and named in serves else "torch"
    elif backend not in BACKENDS:
        raise ValueError(f"{op}: backend must be None or one of {tuple(serves)}, got {backend!r}")
    elif backend not in serves:
        raise ValueError(
            f"{op}: backend {backend!r} is not available for this op, "
            f"expected one of {tuple(serves)}"
        )
    if backend == "triton" and (reason := refusal()) is not None:
        message = f"{op}: backend 'triton' is not available {reason}"
        if exactly or device.type != "cuda":
            raise ValueError(message)
        warn_once(f"{message}; the default gives way to 'torch'")
        return "torch"
    if backend == "cpu" and (reason := cpp_backend.unavailable(inputs[0])) is not None:
        raise ValueError(f"{op}: backend 'cpu' is not available {reason}")
    return backend


def steps_in_place(device_type: str, compiled: bool) -> bool:
    """Whether models decode by :mod:`latte.ops.step`, on states that are written in place.

    Not where another backend than PyTorch's was named, and on a GPU not without a compiler, since
    there a step's kernel makes fewer launches.
    """
    named = named_backend()
    if named is None:
        return compiled or device_type != "cuda"
    return named not in ("reference", "triton")


def is_step(inputs: tuple[Any, ...], sequences: Sequences) -> bool:
    """One token per row of ``inputs[0]`` (B, T, ...), causal, not packed, no gradient wanted."""
    B, T = inputs[0].shape[:2]
    if T != 1 or B == 0 or not sequences.causal or sequences.cu_seqlens is not None:
        return False
    return not torch.is_grad_enabled() or not _requires_grad(inputs)


def _requires_grad(tree: Any) -> bool:
    if isinstance(tree, tuple):
        return any(_requires_grad(x) for x in tree)
    return isinstance(tree, Tensor) and tree.requires_grad
