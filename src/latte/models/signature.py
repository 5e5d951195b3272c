"""Parameters of a model's ``forward`` that its signature does not show.

Transformers' Trainer reads signatures: every parameter with "label" in its name is for it one that
each batch of an evaluation has. If one is missing, there is no ``eval_loss``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def hides(*names: str) -> Callable[[F], F]:
    """Leave parameters out of a function's signature. They can be passed as before."""

    def hide(fn: F) -> F:
        whole = inspect.signature(fn)
        shown = [x for name, x in whole.parameters.items() if name not in names]
        fn.__signature__ = whole.replace(parameters=shown)  # type: ignore[attr-defined]
        return fn

    return hide
