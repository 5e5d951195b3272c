"""The keyword of the cache in Transformers: ``cache`` since 5.24, ``past_key_values`` before.

Latte's models take both keywords, whatever the version. ``generate``, the models of Transformers
and models' outputs get the version's own.
"""

from __future__ import annotations

import inspect
from typing import Any

from transformers.generation import GenerationMixin

KEYWORDS = ("past_key_values", "cache")
_TAKEN = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE_NAME = "cache" if "cache" in _TAKEN else "past_key_values"


def one_cache(past_key_values: Any, cache: Any) -> Any:
    """The cache that a caller gave by one of the two keywords, or None.

    Raises:
        ValueError: Both keywords were given, with different caches.
    """
    if past_key_values is None or past_key_values is cache:
        return cache
    if cache is not None:
        raise ValueError("expected one cache, got different ones as past_key_values and as cache")
    return past_key_values
