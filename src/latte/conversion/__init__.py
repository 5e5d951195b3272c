"""Pretrained decoders as Latte-Macchiato: linear time, constant memory, longer contexts.

Names are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from latte.ops.lazy import lazy_names

if TYPE_CHECKING:
    from latte.conversion.pretrained import convert
    from latte.conversion.trained import apply_latents, save_latents

__all__ = ["apply_latents", "convert", "save_latents"]

__getattr__, __dir__ = lazy_names(__name__, __all__, ("pretrained", "trained"))
