"""The backend that an op takes where its caller names none (``backend=None``).

It starts as ``LATTE_BACKEND`` from the environment, else ``"torch"``. Models and layers name no
backend, so this is the one place that decides for all of them; a recipe sets it by
``training.backend``. Ops that the chosen backend does not have (full softmax attention has no
Triton kernels, say) take ``"torch"``; an op that has it uses it, or raises ``ValueError`` where it
cannot serve the inputs. Nothing switches by size, but for one token at a time: where nobody has
named a backend, steps of decoding on a GPU have their own rule (:mod:`latte.ops.decoding`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

BACKENDS = ("reference", "torch", "triton")

# None: nobody has named one. A plain value, so that torch.compile can guard on it.
_default: str | None = os.environ.get("LATTE_BACKEND")


def default_backend() -> str:
    """The backend of ops whose caller names none.

    Raises:
        ValueError: ``LATTE_BACKEND`` names no backend.
    """
    return named_backend() or "torch"


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
