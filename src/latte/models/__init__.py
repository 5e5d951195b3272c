"""Latte's models for Transformers: configurations, presets, models and their cache.

Names are loaded when first used, so that a configuration can be read without the models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from latte.ops.lazy import lazy_names

if TYPE_CHECKING:
    from latte.models.cache import LatteCache
    from latte.models.config import PRESETS, SIZES, LatteConfig, preset_config
    from latte.models.modeling import (
        LatteForCausalLM,
        LatteForSequenceClassification,
        LatteModel,
        LattePreTrainedModel,
    )
    from latte.models.parameters import count_parameters
    from latte.models.quantizer import LatteQuantizationConfig
    from latte.models.state_file import load_state, save_state

__all__ = [
    "PRESETS",
    "SIZES",
    "LatteCache",
    "LatteConfig",
    "LatteForCausalLM",
    "LatteForSequenceClassification",
    "LatteModel",
    "LattePreTrainedModel",
    "LatteQuantizationConfig",
    "count_parameters",
    "load_state",
    "preset_config",
    "save_state",
]

MODULES = ("config", "cache", "modeling", "parameters", "registry", "state_file", "quantizer")
__getattr__, __dir__ = lazy_names(__name__, __all__, MODULES)
