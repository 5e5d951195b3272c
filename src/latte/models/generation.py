"""How ``generate`` comes by a cache of states, for every causal model of the library."""

from typing import Any

from transformers.generation import GenerationMixin

from latte.errors import LatteError
from latte.models.cache import LatteCache


class StateGenerationMixin(GenerationMixin):
    """Gives ``generate`` a :class:`LatteCache`; stands first among a model's bases."""

    config: Any

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """``generate`` asks here for the cache: Latte's own, unless the user brought one."""
        kind = generation_config.cache_implementation
        if model_kwargs.get("past_key_values") is not None or generation_config.use_cache is False:
            super()._prepare_cache_for_generation(  # type: ignore[misc]
                generation_config, model_kwargs, *args, **kwargs
            )
            return
        if kind not in (None, "dynamic", "offloaded"):
            raise LatteError(
                f"cache_implementation must be None, 'dynamic' or 'offloaded', got {kind!r}: "
                "Latte has one cache, of constant size"
            )
        cache = LatteCache(self.config, offloading=kind == "offloaded")
        if generation_config.is_assistant:
            cache.activate_past_recording()
        model_kwargs["past_key_values"] = cache
