"""The plug-in's entry point: makes Latte's models known to vLLM, and refuses some settings.

vLLM calls :func:`register` in each of its processes. Nothing here imports vLLM before that. The
model is :mod:`latte_vllm.model`; vLLM imports it when a checkpoint needs it.
"""

from __future__ import annotations

from typing import Any

from latte.conversion.bases import BASES
from latte.errors import LatteError

ARCHITECTURES = (
    "LatteForCausalLM",
    *(f"Macchiato{prefix.removesuffix('Text')}ForCausalLM" for prefix in BASES.values()),
)
MODEL = "latte_vllm.model:LatteForVLLM"
BLOCK = 128  # tokens between two states that can be kept, if no option says another number


def register() -> None:
    """Make Latte's and converted models known to vLLM, and the checks of their settings."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    import latte  # noqa: F401  Transformers' Auto classes know the configurations from now on

    class Settings(VerifyAndUpdateConfig):
        verify_and_update_config = staticmethod(check_and_adjust)
        verify_and_update_model_config = staticmethod(check_model)

    for name in ARCHITECTURES:
        ModelRegistry.register_model(name, MODEL)
        MODELS_CONFIG_MAP[name] = Settings


def check_model(model: Any) -> None:
    """Refuse settings of a vLLM `ModelConfig` that a Latte model does not support there.

    Raises:
        LatteError: The model has a state that grows, or vLLM is set to anything but generating
            text from tokens with unchanged weights.
    """
    config = model.hf_config
    _refuse(
        {
            "a state that grows with the text (full softmax attention)": any(
                config.state_grows(index) for index in range(config.num_hidden_layers)
            ),
            f"runner {model.runner_type!r}": model.runner_type != "generate",
            f"quantization {model.quantization!r}": model.quantization is not None,
            "prompt embeddings": model.enable_prompt_embeds,
        }
    )


def check_and_adjust(vllm: Any) -> None:
    """Refuse settings that do not work, and set those that pages of states need.

    Args:
        vllm: Configuration, a `VllmConfig`.

    Raises:
        LatteError: The settings include several processes, drafts, adapters, or states that are
            sent elsewhere or have another dtype: none of these knows the content of a page. Or
            prefix caching has no chunked prefill, or two sizes of a block.
    """
    check_model(vllm.model_config)  # for a classifier, vLLM calls only this check
    cache, parallel = vllm.cache_config, vllm.parallel_config
    several = max(parallel.world_size, parallel.data_parallel_size)
    _refuse(
        {
            f"parallelism over {several} processes": several > 1,
            "speculative decoding": vllm.speculative_config is not None,
            "LoRA adapters": vllm.lora_config is not None,
            "a KV connector": vllm.kv_transfer_config is not None,
            f"a cache in {cache.cache_dtype!r}": cache.cache_dtype != "auto",
            f"states in {cache.mamba_cache_dtype!r}": cache.mamba_cache_dtype != "auto",
            "prefix caching without chunked prefill": (
                cache.enable_prefix_caching and not vllm.scheduler_config.enable_chunked_prefill
            ),
        }
    )
    if cache.enable_prefix_caching:
        asked = cache.block_size if cache.user_specified_block_size else None
        size = cache.mamba_block_size or asked or BLOCK
        _refuse({f"blocks of {asked} and of {size} tokens": asked not in (None, size)})
        cache.mamba_cache_mode = "align"
        cache.block_size = cache.mamba_block_size = size
        # Otherwise vLLM would replace the size of its blocks, and keep that of the pages.
        cache.user_specified_block_size = True
    else:
        # A page counts for the largest number of tokens, so that a sequence has one page.
        cache.mamba_cache_mode, cache.mamba_block_size = "none", vllm.model_config.max_model_len
    # A forward reads the bounds of sequences on the host, which is not possible in a graph.
    vllm.model_config.enforce_eager = True


def _refuse(asked: dict[str, bool]) -> None:
    found = [what for what, is_asked in asked.items() if is_asked]
    if found:
        raise LatteError(f"Latte's models in vLLM: {' and '.join(found)} cannot be served")
