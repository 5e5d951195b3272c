"""Tensors in, tensors out: everything that Latte computes, with exact gradients.

See ``docs/mathematics.md`` for the equations and :mod:`latte.ops.api` for the shared keywords.
"""

from latte.ops.api import (
    latte_attention,
    linear_attention,
    macchiato_attention,
    sliding_window_attention,
)
from latte.ops.default import default_backend, set_default_backend, use_backend
from latte.ops.recurrence import causal_conv1d, rg_lru
from latte.ops.state import LatteState, LinearState, WindowState
from latte.ops.weights import attention_weights

__all__ = [
    "LatteState",
    "LinearState",
    "WindowState",
    "attention_weights",
    "causal_conv1d",
    "default_backend",
    "latte_attention",
    "linear_attention",
    "macchiato_attention",
    "rg_lru",
    "set_default_backend",
    "sliding_window_attention",
    "use_backend",
]
