"""Registration with Transformers' Auto classes; ``import latte`` arranges for it."""

from __future__ import annotations

from transformers.models.auto.configuration_auto import AutoConfig

from latte.models.config import LatteConfig


def register_config() -> None:
    """``AutoConfig`` knows ``model_type: latte``. Calling it again does no harm."""
    AutoConfig.register("latte", LatteConfig, exist_ok=True)


def register_models() -> None:
    """The Auto model classes know the configuration. Calling it again does no harm."""
    from transformers.models.auto import modeling_auto as auto

    from latte.models.backbone import LatteModel
    from latte.models.causal_lm import LatteForCausalLM
    from latte.models.classification import LatteForSequenceClassification

    register_config()
    auto.AutoModel.register(LatteConfig, LatteModel, exist_ok=True)
    auto.AutoModelForCausalLM.register(LatteConfig, LatteForCausalLM, exist_ok=True)
    auto.AutoModelForSequenceClassification.register(
        LatteConfig, LatteForSequenceClassification, exist_ok=True
    )
