"""Latte: linear-time attention in which every weight is a probability.

``import latte`` is quick: submodules and names load when first used. From then on Transformers'
Auto classes know Latte's models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from latte.conversion.bases import BASES as _BASES
from latte.errors import LatteError
from latte.models import auto as _auto
from latte.models.registry import register_provider as _register_provider
from latte.ops.lazy import lazy_names

if TYPE_CHECKING:
    from latte import (
        conversion,
        layers,
        models,
        ops,
        parallel,
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
    "conversion",
    "convert",
    "latte_attention",
    "layers",
    "linear_attention",
    "macchiato_attention",
    "models",
    "ops",
    "parallel",
    "preset_config",
    "rg_lru",
    "sliding_window_attention",
]

_MODULES = (
    *("models", "conversion", "ops", "layers"),  # whose names these are
    *("parallel", "lab", "serve", "cli"),
)
__getattr__, __dir__ = lazy_names(__name__, __all__, _MODULES)

# Comparators are looked up there, the first time that an unknown name is used.
_register_provider("latte.lab.baselines")

# Model types and the packages of their classes, for Transformers' Auto classes.
_KINDS = ("Config", "Model", "ForCausalLM", "ForSequenceClassification")
_auto.register_family("latte", "latte.models", *(f"Latte{kind}" for kind in _KINDS))
_auto.register_family(
    "latte_comparator", "latte.lab.baselines", *(f"Comparator{k}" for k in _KINDS)
)
for _base, _prefix in _BASES.items():
    _auto.register_family(
        f"macchiato_{_base}",
        "latte.conversion",
        f"Macchiato{_prefix}Config",
        f"Macchiato{_prefix}Model",
        f"Macchiato{_prefix.removesuffix('Text')}ForCausalLM",
    )
_auto.install()
