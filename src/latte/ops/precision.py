"""Ops decide on their own precision: autocast, which would round their sums, stays outside."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def _has_autocast(kind: str) -> bool:
    if torch.compiler.is_compiling():
        return kind != "meta"  # PyTorch 2.11 cannot trace the question
    return torch.amp.is_autocast_available(kind)


def full_precision(fn: Callable[P, R]) -> Callable[P, R]:
    """Run ``fn`` with autocast off on the device of its first tensor."""

    @functools.wraps(fn)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        first = next(tensors, None)
        kind = "cpu" if first is None else first.device.type
        if not _has_autocast(kind):
            return fn(*args, **kwargs)
        with torch.autocast(kind, enabled=False):
            return fn(*args, **kwargs)

    return wrapped
