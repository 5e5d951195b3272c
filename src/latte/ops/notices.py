"""Warnings that are given once in a process, and answers that compiled graphs keep."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

_given: set[str] = set()


Answer = TypeVar("Answer", bound=Callable[..., Any])


def constant_in_graphs(fn: Answer) -> Answer:
    """As ``torch.compiler.assume_constant_result``, which would load the whole compiler: 170 MB."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


@constant_in_graphs
def warn_once(message: str) -> None:
    """Not again for the next layer, the next step, or a function that is compiled."""
    if message not in _given:
        _given.add(message)
        warnings.warn(message, stacklevel=4)
