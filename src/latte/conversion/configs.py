"""The configurations of converted models: the base's own, with ours added.

Imports by full path: this is loaded while Transformers' Auto classes are.
"""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.models.gemma.configuration_gemma import GemmaConfig
from transformers.models.gemma2.configuration_gemma2 import Gemma2Config
from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.mistral.configuration_mistral import MistralConfig
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from latte.conversion.config import MacchiatoFields
from latte.models.config import one_line_errors


@strict
class MacchiatoGemmaConfig(MacchiatoFields, GemmaConfig):
    model_type = "macchiato_gemma"


@strict
class MacchiatoGemma2Config(MacchiatoFields, Gemma2Config):
    model_type = "macchiato_gemma2"


@strict
class MacchiatoGemma3TextConfig(MacchiatoFields, Gemma3TextConfig):
    model_type = "macchiato_gemma3_text"


@strict
class MacchiatoLlamaConfig(MacchiatoFields, LlamaConfig):
    model_type = "macchiato_llama"


@strict
class MacchiatoMistralConfig(MacchiatoFields, MistralConfig):
    model_type = "macchiato_mistral"


@strict
class MacchiatoQwen2Config(MacchiatoFields, Qwen2Config):
    model_type = "macchiato_qwen2"


@strict
class MacchiatoQwen3Config(MacchiatoFields, Qwen3Config):
    model_type = "macchiato_qwen3"


CONFIGS: dict[str, Any] = {
    "gemma": MacchiatoGemmaConfig,
    "gemma2": MacchiatoGemma2Config,
    "gemma3_text": MacchiatoGemma3TextConfig,
    "llama": MacchiatoLlamaConfig,
    "mistral": MacchiatoMistralConfig,
    "qwen2": MacchiatoQwen2Config,
    "qwen3": MacchiatoQwen3Config,
}
for _config in CONFIGS.values():
    one_line_errors(_config)
