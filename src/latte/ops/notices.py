"""Warnings that are given once in a process."""

from __future__ import annotations

import warnings

import torch

_given: set[str] = set()


@torch.compiler.assume_constant_result
def warn_once(message: str) -> None:
    """Not again for the next layer, the next step, or a function that is compiled."""
    if message not in _given:
        _given.add(message)
        warnings.warn(message, stacklevel=4)
