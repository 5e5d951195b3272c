"""Registration of converted models with Transformers' Auto classes.

``import latte`` arranges for it.
"""

from __future__ import annotations

from transformers.models.auto.configuration_auto import AutoConfig

from latte.conversion.configs import CONFIGS


def register_configs() -> None:
    """``AutoConfig`` knows ``model_type: macchiato_*``. Calling it again does no harm."""
    for config in CONFIGS.values():
        AutoConfig.register(config.model_type, config, exist_ok=True)


def register_models() -> None:
    """The Auto model classes know the configurations. Calling it again does no harm."""
    from transformers.models.auto import modeling_auto as auto

    from latte.conversion.modeling import FAMILIES

    register_configs()
    for family, (decoder, language_model) in FAMILIES.items():
        auto.AutoModel.register(CONFIGS[family], decoder, exist_ok=True)
        auto.AutoModelForCausalLM.register(CONFIGS[family], language_model, exist_ok=True)
