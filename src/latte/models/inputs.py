"""Checks and slices of what a model is called with. B batch, T tokens, P past tokens."""

from typing import Any

import torch
from torch import Tensor

from latte.models.cache import LatteCache


def check_cache(cache: Any) -> None:
    """Raise ValueError for a cache of another kind."""
    if cache is not None and not isinstance(cache, LatteCache):
        raise ValueError(
            f"past_key_values must be a LatteCache, got {type(cache).__name__}: the states of "
            "Latte do not fit into other caches"
        )


def new_key_mask(
    x_BTE: Tensor, attention_mask: Tensor | None, cache: LatteCache | None
) -> Tensor | None:
    """The new tokens' part of an attention mask (B, P + T), as bool (B, T)."""
    if attention_mask is None:
        return None
    B, T = x_BTE.shape[:2]
    past = 0 if cache is None else cache.get_seq_length()
    if attention_mask.shape != (B, past + T):
        raise ValueError(
            f"attention_mask must be (B={B}, past + T={past} + {T}), "
            f"got {tuple(attention_mask.shape)}"
        )
    return attention_mask[:, past:].bool()


def packed_bounds(position_ids: Tensor | None) -> Tensor | None:
    """Bounds (N + 1,) int32 of the sequences in a row whose positions start anew, else None.

    Transformers' collators mark packed sequences in this way. Reads the positions on the host.
    """
    if position_ids is None or position_ids.shape[0] != 1 or position_ids.shape[1] < 2:
        return None
    row = position_ids[0]
    starts = torch.nonzero(row[1:] != row[:-1] + 1)[:, 0] + 1
    if not len(starts):
        return None
    ends = starts.new_tensor([0]), starts, starts.new_tensor([len(row)])
    return torch.cat(ends).to(torch.int32)
