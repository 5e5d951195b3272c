"""Ops decide on their own precision: autocast, which would round their sums, stays outside."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def full_precision(fn: Callable[P, R]) -> Callable[P, R]:
    """Run ``fn``, whose first argument is a tensor, with autocast off."""

    @functools.wraps(fn)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0] if args else None
        kind = first.device.type if isinstance(first, Tensor) else "cpu"
        if not torch.amp.is_autocast_available(kind):
            return fn(*args, **kwargs)
        with torch.autocast(kind, enabled=False):
            return fn(*args, **kwargs)

    return wrapped
