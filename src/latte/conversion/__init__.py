"""Pretrained decoders as Latte-Macchiato: linear time, constant memory, longer contexts.

Names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from examples.llama2c import import_llama2c
    from latte.conversion.pretrained import convert

_HOMES = {"convert": "pretrained", "import_llama2c": "llama2c"}
__all__ = ["convert", "import_llama2c"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
