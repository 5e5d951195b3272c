"""Registration with Transformers' Auto classes; ``import latte`` arranges for it."""

from __future__ import annotations

from transformers.models.auto.configuration_auto import AutoConfig

from latte.models.config import LatteConfig
from latte.rivals.config import ComparatorConfig


def register_config() -> None:
    """``AutoConfig`` knows the family's model types. Calling it again does no harm."""
    for config in (LatteConfig, ComparatorConfig):
        AutoConfig.register(config.model_type, config, exist_ok=True)


def register_models() -> None:
    """The Auto model classes know the configuration. Calling it again does no harm."""
    from transformers.models.auto import modeling_auto as auto

    from latte.models.backbone import LatteModel
    from latte.models.causal_lm import LatteForCausalLM
    from latte.models.classification import LatteForSequenceClassification
    from latte.rivals import modeling as comparators

    register_config()
    for config, models in (
        (LatteConfig, (LatteModel, LatteForCausalLM, LatteForSequenceClassification)),
        (ComparatorConfig, comparators.MODELS),
    ):
        kinds = auto.AutoModel, auto.AutoModelForCausalLM, auto.AutoModelForSequenceClassification
        for kind, model in zip(kinds, models, strict=True):
            kind.register(config, model, exist_ok=True)
