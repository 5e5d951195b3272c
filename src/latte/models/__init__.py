"""Latte's models for Transformers: configurations, presets, models and their cache.

Names are loaded when first used, so that a configuration can be read without the models.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from latte.models.cache import LatteCache
    from latte.models.config import LatteConfig
    from latte.models.modeling import (
        LatteForCausalLM,
        LatteForSequenceClassification,
        LatteModel,
        LattePreTrainedModel,
        count_parameters,
    )
    from latte.models.presets import PRESETS, SIZES, preset_config

_HOMES = {
    "LatteCache": "cache",
    "LatteConfig": "config",
    "LatteForCausalLM": "modeling",
    "LatteForSequenceClassification": "modeling",
    "LatteModel": "modeling",
    "LattePreTrainedModel": "modeling",
    "PRESETS": "presets",
    "SIZES": "presets",
    "count_parameters": "modeling",
    "preset_config": "presets",
}

__all__ = [
    "PRESETS",
    "SIZES",
    "LatteCache",
    "LatteConfig",
    "LatteForCausalLM",
    "LatteForSequenceClassification",
    "LatteModel",
    "LattePreTrainedModel",
    "count_parameters",
    "preset_config",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
