"""The parts of Latte's models that Transformers' ``generate`` calls: they give it the cache."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from transformers.generation import GenerationMixin

from latte.errors import LatteError
from latte.models import captured
from latte.models.cache import LatteCache
from latte.models.cache_name import CACHE_NAME, one_cache
from latte.models.inputs import check_mask_shape


class StateGenerationMixin(GenerationMixin):
    """Gives ``generate`` a :class:`LatteCache`. It must be the first base class of a model."""

    config: Any
    model: Any
    _most_tokens = 0  # the largest room of any static cache so far

    def _prepare_cache_for_generation(  # type: ignore[override]
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Make the cache for ``generate``, unless the user passed one."""
        kind = generation_config.cache_implementation
        if model_kwargs.get(CACHE_NAME) is not None or generation_config.use_cache is False:
            super()._prepare_cache_for_generation(  # type: ignore[misc]
                generation_config, model_kwargs, mode, batch_size, max_cache_length
            )
            return
        if kind not in (None, "dynamic", "offloaded", "static"):
            raise LatteError(
                "cache_implementation must be None, 'dynamic', 'offloaded' or 'static', "
                f"got {kind!r}: Latte has one cache, of constant size"
            )
        room = None
        if kind == "static":
            if not self.model.steps:
                raise LatteError(
                    "cache_implementation='static' needs layers with a step of decoding, "
                    "and without hooks: leave it out"
                )
            # At least the room of all earlier texts, so that the compiled step is used again.
            self._most_tokens = max(
                max_cache_length,
                getattr(generation_config, "max_cache_len", None) or 0,
                self._most_tokens,
            )
            room = self._most_tokens
        step = self._captured_step(generation_config, mode, max_cache_length)
        if step is not None:
            room = max_cache_length
        cache = LatteCache(self.config, offloading=kind == "offloaded", max_cache_len=room)
        cache.captured = step
        if generation_config.is_assistant:
            cache.activate_past_recording()
        model_kwargs[CACHE_NAME] = cache

    def _captured_step(self, settings: Any, mode: Any, length: int) -> captured.CapturedStep | None:
        """The capture of the steps of ``generate``; None if they are not captured."""
        new = settings.max_new_tokens or length
        reason = captured.why_not(self, settings, str(getattr(mode, "value", mode)), new)
        if reason:
            captured.refuse(reason)
        return captured.CapturedStep() if reason is None else None

    def _valid_auto_compile_criteria(self, model_kwargs: dict[str, Any], settings: Any) -> bool:
        """Whether ``generate`` asks :meth:`get_compiled_call` for its steps."""
        if not settings.disable_compile and _captured(model_kwargs) is not None:
            return True
        return super()._valid_auto_compile_criteria(model_kwargs, settings)  # type: ignore[misc, no-any-return]

    def get_compiled_call(self, compile_config: Any) -> Any:
        """The step that is captured, where the cache has one; else the compiled forward."""
        compiled = super().get_compiled_call  # type: ignore[misc]
        compiled = functools.cache(functools.partial(compiled, compile_config))

        def call(**inputs: Any) -> Any:
            step = _captured(inputs)
            return compiled()(**inputs) if step is None else step(self, inputs)

        return call

    def _sample(self, *args: Any, **model_kwargs: Any) -> Any:
        """Search or sample. A cache whose steps were captured is a dynamic one afterwards."""
        try:
            return super()._sample(*args, **model_kwargs)  # type: ignore[misc]
        finally:
            if _captured(model_kwargs) is not None:
                model_kwargs[CACHE_NAME].become_dynamic()

    def prepare_inputs_for_generation(  # type: ignore[override]
        self,
        input_ids: Any,
        *args: Any,
        inputs_embeds: Any = None,
        tokenizer: Any = None,
        assistant_tokenizer: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Drop the tokenizers of stop strings and drafts, which ``forward`` does not take.

        ``generate`` looks for ``inputs_embeds`` in this signature.
        """
        prepare: Any = super().prepare_inputs_for_generation  # type: ignore[misc]
        return prepare(input_ids, *args, inputs_embeds=inputs_embeds, **kwargs)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Raise LatteError: paged attention would treat the layers as full attention."""
        raise LatteError(
            "continuous batching pages keys and values, and a state of Latte has no pages: use "
            "generate, with a batch"
        )

    def _prefill(self, input_ids: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Compile only steps: prompts have too many different lengths."""
        wanted = generation_config.disable_compile
        generation_config.disable_compile = True
        try:
            return super()._prefill(input_ids, generation_config, *args, **kwargs)  # type: ignore[misc]
        finally:
            generation_config.disable_compile = wanted

    @staticmethod
    def create_masks_for_generate(
        config: Any,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        past_key_values: Any = None,
        cache: Any = None,
        **_: Any,
    ) -> Tensor | None:
        """The mask of the new tokens, (B, T), for a static cache: its shape does not grow.

        Raises:
            ValueError: A prompt's mask does not have a place for each token. That of a single token
                is not checked, because a GPU would have to be waited for.
        """
        if attention_mask is None:
            return None
        B, T = inputs_embeds.shape[:2]
        if T > 1:
            cache = one_cache(past_key_values, cache)
            past = 0 if cache is None else cache.get_seq_length()
            check_mask_shape(attention_mask, B, past, T)
        return attention_mask[:, -T:]


def _captured(model_kwargs: dict[str, Any]) -> captured.CapturedStep | None:
    return getattr(model_kwargs.get(CACHE_NAME), "captured", None)
