"""Tensors in, tensors out: everything that Latte computes, with exact gradients.

See ``docs/mathematics.md`` for the equations and :mod:`latte.ops.api` for the shared keywords.

Five words for a part, the same in all backends. A *chunk* is what one matrix product covers, a
*segment* what is computed at once, a *row* one sequence of one head: rows are cut into segments,
segments into chunks. A *tile* belongs to a kernel: what one program holds of a tensor. A *block*
is none of these but a stretch of training data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from latte.ops.lazy import lazy_names

if TYPE_CHECKING:
    from latte.ops.api import (
        attention_weights,
        causal_conv1d,
        latte_attention,
        linear_attention,
        macchiato_attention,
        rg_lru,
        sliding_window_attention,
        window_log_mass,
    )
    from latte.ops.backend import default_backend, set_default_backend, use_backend
    from latte.ops.state import LatteState, LinearState, Sinks, WindowState

__all__ = [
    "LatteState",
    "LinearState",
    "Sinks",
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
    "window_log_mass",
]

MODULES = ("api", "backend", "state")
__getattr__, __dir__ = lazy_names(__name__, __all__, MODULES)
