"""Pretrained decoders as Latte-Macchiato: linear time, constant memory, longer contexts.

Names are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from latte.conversion.pretrained import convert

__all__ = ["convert"]


def __getattr__(name: str) -> Any:
    if name == "convert":
        from latte.conversion.pretrained import convert

        return convert
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
