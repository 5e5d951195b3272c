"""Registration with Transformers' Auto classes; ``import latte`` arranges for it."""

from __future__ import annotations

from typing import Any

from transformers.models.auto.configuration_auto import AutoConfig

from latte.models.config import LatteConfig


def register_config() -> None:
    """``AutoConfig`` knows ``model_type: latte``. Calling it again does no harm."""
    AutoConfig.register(LatteConfig.model_type, LatteConfig, exist_ok=True)


def register_models() -> None:
    """The Auto model classes know the configuration. Calling it again does no harm."""
    from latte.models.modeling import (
        LatteForCausalLM,
        LatteForSequenceClassification,
        LatteModel,
    )

    register_config()
    register_family(LatteConfig, LatteModel, LatteForCausalLM, LatteForSequenceClassification)


def register_family(config: Any, *models: Any) -> None:
    """A configuration's model, language model and classifier, for the Auto classes to find."""
    from transformers.models.auto import modeling_auto as auto

    kinds = auto.AutoModel, auto.AutoModelForCausalLM, auto.AutoModelForSequenceClassification
    for kind, model in zip(kinds, models, strict=True):
        kind.register(config, model, exist_ok=True)
