"""The choice of the backend of each call.

If a call names no backend (``backend=None``), the default is used. The default is:

1. ``LATTE_BACKEND`` from the environment, if it is set;
2. else ``"cpu"``, the native kernels, on CPU tensors if the library is installed and has the op;
3. else ``"triton"`` on a GPU, for calls like those that were checked on such a card
   (:mod:`latte.ops.triton_backend.checked`);
4. else ``"torch"``. On a GPU one warning says which condition of 3. failed.

Models and layers name no backend, so the rule here holds for all of them. A recipe sets the
default by ``training.backend``. If the default does not have an op, the op uses ``"torch"``; full
softmax attention, for example, has no Triton kernels. If it has the op but cannot serve the
inputs, the op raises ``ValueError``. There is one exception: on a GPU, if a default ``"triton"``
cannot serve the card or the widths, ``"torch"`` is used, with one warning. The backend never
depends on the size of the inputs, except for one token at a time:

A *step* of decoding is a call with one token per row (T = 1) that is causal, not packed, and
needs no gradient.

| ``backend``, or the default that was named | backend of a step |
|---|---|
| ``"triton"`` | the step's kernel: on CUDA tensors, or anywhere under Triton's interpreter |
| none named | on CUDA tensors the step's kernel if it was checked on such a card; else 2. or 4. |
| another | that one |

Kernels are not the default inside a transform of ``torch.func``, nor for inputs with
forward-mode tangents, because custom ops do not support these. ``"torch"`` is used there. It has
``vmap``. Forward mode and gradients by ``torch.func`` need ``"reference"``, and an error says so.
The kernels have no second derivatives; ``"reference"`` has them, and an error says so.
``backend="cpu"`` raises ``ValueError`` without the library and for tensors on another device, and
``NotImplementedError`` in forward mode. The in-place steps of decoding (:mod:`latte.ops.step`) use
native kernels unless another backend is named. If the library is not installed but could be, the
first op that would use it warns, once.

A call that names a kernel that cannot serve its inputs raises ``ValueError``. The RG-LRU and the
convolution follow the same rule with their own kernels. To decode without Triton's step kernels,
set ``LATTE_BACKEND=torch`` or use ``with use_backend("torch"):``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from latte.ops import cpp_backend
from latte.ops.notices import warn_once
from latte.ops.tensors import Sequences
from latte.ops.triton_backend import checked

BACKENDS = ("reference", "torch", "cpu", "triton")


class _Named(threading.local):
    """The default of a thread. Plain values, which torch.compile can guard on."""

    backend: str | None = None


# None: no default was named.
default: str | None = os.environ.get("LATTE_BACKEND")  # of the process
here = _Named()
_watched: set[str] | None = None  # see `watch_choices`


def default_backend(device: torch.device | str = "cpu") -> str:
    """The backend of ops whose caller names none.

    Ops that this backend does not have use ``"torch"``. On a CPU the default is ``"cpu"`` if the
    native kernels are installed. On a GPU it is ``"triton"`` if the kernels were checked on such a
    card; calls unlike those that were checked there use ``"torch"``.

    Args:
        device: Device of the inputs.

    Raises:
        ValueError: ``LATTE_BACKEND`` is not the name of a backend.
    """
    device = torch.device(device)
    if (named := named_backend()) is not None:
        return named
    if device.type == "cuda" and checked.refused_card(device) is None:
        return "triton"
    return "cpu" if device.type == "cpu" and cpp_backend.ABSENT is None else "torch"


def named_backend() -> str | None:
    """The default backend if it was named, else None.

    Raises:
        ValueError: ``LATTE_BACKEND`` is not the name of a backend.
    """
    if here.backend is not None:
        return here.backend
    if default is not None and default not in BACKENDS:
        raise ValueError(f"LATTE_BACKEND must be one of {BACKENDS}, got {default!r}")
    return default


def set_default_backend(backend: str) -> None:
    """Set the backend of ops whose caller names none, in all threads of the process.

    Raises:
        ValueError: There is no such backend.
    """
    global default
    default = _known(backend)


@contextmanager
def use_backend(backend: str, *, everywhere: bool = False) -> Iterator[None]:
    """Set the default backend within a ``with`` block, of this thread alone.

    Args:
        everywhere: Set the default of all threads, but for threads within a block of their own. On
            a GPU PyTorch computes checkpointed activations again in a thread of its own.

    Raises:
        ValueError: There is no such backend.
    """
    global default
    before = here.backend, default
    here.backend = _known(backend)
    if everywhere:
        default = backend
    try:
        yield
    finally:
        here.backend = before[0]
        if everywhere:
            default = before[1]


def _known(backend: str) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"the default backend must be one of {BACKENDS}, got {backend!r}")
    return backend


@contextmanager
def watch_choices() -> Iterator[set[str]]:
    """Collect the backends that ops run on within a ``with`` block, to report them."""
    global _watched
    before, _watched = _watched, set()
    try:
        yield _watched
    finally:
        _watched = before


def choose(
    op: str,
    backend: str | None,
    serves: Collection[str],
    device: torch.device,
    refusal: Callable[[], str | None],
    *,
    step: bool = False,
    inputs: tuple[Any, ...] = (),
    form: tuple[Any, ...] | None = None,
) -> str:
    """The backend of one call: the one it names, or the default's choice for None.

    :func:`watch_choices` records it.

    Args:
        serves: Backends that have this op.
        device: Device of the inputs.
        refusal: Function that returns why the Triton kernels cannot serve the inputs, or None if
            they can. It is called only if that matters.
        step: Whether this is a step of decoding for which ``op`` has a kernel.
        inputs: Inputs of the op, if the native CPU kernels have it.
        form: Whether the call is causal, its decays or None, and whether its past is divided:
            :class:`latte.ops.triton_backend.checked.Form`. None is a form that was never checked.

    Raises:
        ValueError: The op has no such backend, or that one cannot serve the inputs. On a GPU a
            default ``"triton"`` warns once instead, and ``"torch"`` is used.
    """
    chosen, can_serve = backend, False
    if chosen is None:
        named = named_backend()
        chosen = "torch" if named is None or named not in serves else named
        if named is None and device.type == checked.GPU:
            if "triton" in serves and form is not None and not checked.differentiated_forward():
                reason = checked.refused_call(op, form, step, device, inputs)
                if reason is None:
                    chosen, can_serve = "triton", True
                else:
                    checked.warn(reason)
        elif named is None and "cpu" in serves and cpp_backend.serves(*inputs):
            chosen, can_serve = "cpu", True
    elif chosen not in BACKENDS:
        raise ValueError(f"{op}: backend must be None or one of {tuple(serves)}, got {backend!r}")
    elif chosen not in serves:
        raise ValueError(
            f"{op}: backend {backend!r} is not available for this op, "
            f"expected one of {tuple(serves)}"
        )
    if chosen == "triton" and not can_serve and (reason := refusal()) is not None:
        message = f"{op}: backend 'triton' is not available {reason}"
        if backend is not None or device.type != "cuda":
            raise ValueError(message)
        warn_once(f"{message}; the default gives way to 'torch'")
        chosen = "torch"
    if chosen == "cpu" and not can_serve:
        reason = cpp_backend.unavailable(inputs[0])
        if reason is not None:
            raise ValueError(f"{op}: backend 'cpu' is not available {reason}")
    if _watched is not None:
        _watched.add(chosen)
    return chosen


def steps_in_place(device_type: str, compiled: bool) -> bool:
    """Whether models decode by :mod:`latte.ops.step`, on states that are written in place.

    They do not if the reference or Triton backend was named. Where Triton's step kernels are the
    default they do only if the step is compiled; if not, these kernels need fewer launches.
    """
    named = named_backend()
    if named is None:
        device = torch.device(device_type)
        return compiled or device_type != "cuda" or checked.refused_card(device, False) is not None
    return named not in ("reference", "triton")


def is_step(inputs: tuple[Any, ...], sequences: Sequences) -> bool:
    """Whether ``inputs[0]`` (B, T, ...) has one token per row, causal, not packed, no gradient."""
    B, T = inputs[0].shape[:2]
    if T != 1 or B == 0 or not sequences.causal or sequences.cu_seqlens is not None:
        return False
    return not torch.is_grad_enabled() or not _requires_grad(inputs)


def _requires_grad(tree: Any) -> bool:
    if isinstance(tree, tuple):
        return any(_requires_grad(x) for x in tree)
    return isinstance(tree, Tensor) and tree.requires_grad
