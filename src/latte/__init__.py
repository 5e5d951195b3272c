"""Latte: linear-time attention in which every weight is a probability.

``import latte`` is quick: submodules and names load when first used. From then on Transformers'
Auto classes know Latte's models.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from latte._auto_registration import install as _install
from latte.errors import LatteError
from latte.models.registry import register_provider as _register_provider

if TYPE_CHECKING:
    from latte import (
        cli,
        compare,
        conversion,
        data,
        evaluate,
        inspect,
        layers,
        models,
        ops,
        rivals,
        train,
    )
    from latte.conversion import convert
    from latte.layers import RGLRU, LatteAttention, LatteMacchiato
    from latte.models import (
        LatteCache,
        LatteConfig,
        LatteForCausalLM,
        LatteForSequenceClassification,
        LatteModel,
        preset_config,
    )
    from latte.ops import (
        LatteState,
        attention_weights,
        causal_conv1d,
        latte_attention,
        linear_attention,
        macchiato_attention,
        rg_lru,
        sliding_window_attention,
    )

__version__ = "0.1.0"

_SUBMODULES = (
    "cli",
    "compare",
    "conversion",
    "data",
    "evaluate",
    "inspect",
    "layers",
    "models",
    "ops",
    "rivals",
    "train",
)
_NAMES = {
    "ops": (
        "LatteState",
        "attention_weights",
        "causal_conv1d",
        "latte_attention",
        "linear_attention",
        "macchiato_attention",
        "rg_lru",
        "sliding_window_attention",
    ),
    "conversion": ("convert",),
    "layers": ("LatteAttention", "LatteMacchiato", "RGLRU"),
    "models": (
        "LatteCache",
        "LatteConfig",
        "LatteForCausalLM",
        "LatteForSequenceClassification",
        "LatteModel",
        "preset_config",
    ),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

__all__ = [
    "RGLRU",
    "LatteAttention",
    "LatteCache",
    "LatteConfig",
    "LatteError",
    "LatteForCausalLM",
    "LatteForSequenceClassification",
    "LatteMacchiato",
    "LatteModel",
    "LatteState",
    "__version__",
    "attention_weights",
    "causal_conv1d",
    "cli",
    "compare",
    "conversion",
    "convert",
    "data",
    "evaluate",
    "inspect",
    "latte_attention",
    "layers",
    "linear_attention",
    "macchiato_attention",
    "models",
    "ops",
    "preset_config",
    "rg_lru",
    "rivals",
    "sliding_window_attention",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"latte.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(f"latte.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'latte' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_install()
_register_provider("latte.rivals")
