"""Texts beyond the base's range of positions, with kept tokens: read in parts.

Kept keys are turned between two calls (:mod:`latte.layers.kept_range`). So a call whose tokens pass
a place for it becomes several calls, which a cache connects. B batch, T tokens.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from latte.errors import LatteError
from latte.layers.kept_range import KeptRange
from latte.models.cache import LatteCache
from latte.models.inputs import new_key_mask, packed_bounds, wants_cache
from latte.ops.tensors import token_positions


class Given(NamedTuple):
    """The inputs of a decoder's forward that have a value for each token."""

    input_ids: Tensor | None
    inputs_embeds: Tensor | None
    attention_mask: Tensor | None
    position_ids: Tensor | None

    @property
    def tokens(self) -> Any:
        """Token ids or embeddings, (B, T, ...)."""
        return self.input_ids if self.inputs_embeds is None else self.inputs_embeds


def turning_places(decoder: Any, given: Given, cache: Any) -> list[int]:
    """The numbers of the tokens, without the first, before which kept keys are turned."""
    tokens, span = given.tokens, decoder.kept_range
    if not isinstance(tokens, Tensor) or tokens.ndim < 2 or tokens.shape[1] == 1:
        return []
    held = cache if isinstance(cache, LatteCache) else None
    if torch.compiler.is_compiling():
        # A graph reads no text in parts: beyond the range the parts become graphs.
        seen = 0 if held is None else held.get_seq_length()
        if seen + tokens.shape[1] <= span.limit:
            return []
        torch._dynamo.graph_break("a text beyond the range of positions, for kept tokens")
    start = None if held is None else held.position
    past = 0 if start is None else int(start.max())
    if past + tokens.shape[1] <= span.limit:
        return []
    if packed_bounds(given.position_ids, given.attention_mask, cache) is not None:
        return []
    mask = new_key_mask(tokens, given.attention_mask, cache)
    due = span.due(token_positions(tokens, mask, None, start), mask)
    return [place for place in due.any(0).nonzero().flatten().tolist() if place]


def in_parts(
    decoder: Any,
    starts: list[int],
    given: Given,
    cache: LatteCache | None,
    use_cache: bool | None,
    **kwargs: Any,
) -> Any:
    """The decoder's forward, in calls that begin at these tokens.

    Raises:
        LatteError: Gradient checkpointing is on, which keeps no cache.
    """
    tokens, mask = given.tokens, given.attention_mask
    if decoder.gradient_checkpointing and decoder.training:
        raise LatteError(
            f"kept tokens: expected at most {decoder.kept_range.limit:,} tokens with gradient"
            f" checkpointing, the range of positions, got {tokens.shape[1]:,}"
        )
    wanted = cache is not None or wants_cache(decoder, use_cache)
    cache = LatteCache(decoder.config) if cache is None else cache
    past, T = cache.get_seq_length(), tokens.shape[1]
    # A static cache's mask may cover the new tokens alone.
    before = 0 if mask is None or mask.shape[1] == T else past
    names = kwargs.pop("return_dict", None)
    found = []
    for start, stop in pairwise([0, *starts, T]):
        part = {name: x[:, start:stop] for name, x in given._asdict().items() if x is not None}
        if mask is not None:
            first = start if cache.is_static and before == 0 else 0
            part["attention_mask"] = mask[:, first : before + stop]
        part |= {"past_key_values": cache, "use_cache": True, "return_dict": True}
        found.append(decoder.forward(**part, **kwargs))
    layers = None
    if found[0].hidden_states is not None:
        each = zip(*(x.hidden_states for x in found), strict=True)
        layers = tuple(torch.cat(parts, 1) for parts in each)
    hidden = torch.cat([x.last_hidden_state for x in found], 1)
    outputs = BaseModelOutputWithPast(hidden, cache if wanted else None, layers)
    by_name = decoder.config.return_dict if names is None else names
    return outputs if by_name else outputs.to_tuple()


def check_packed(span: KeptRange, bounds: Tensor | None) -> None:
    """Raise LatteError for a packed sequence that is longer than the range."""
    if bounds is None:
        return
    longest = (bounds[1:] - bounds[:-1]).max()
    expected = (
        f"kept tokens: expected packed sequences of at most {span.limit:,} tokens, the range of"
        " positions, got "
    )
    if torch.compiler.is_compiling():
        torch._assert_async(longest <= span.limit, f"{expected}a longer one")
    elif longest > span.limit:
        raise LatteError(f"{expected}one of {int(longest):,}: pass it alone")
