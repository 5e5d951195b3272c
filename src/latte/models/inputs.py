"""Checks and slices of what a model is called with. B batch, T tokens, P past tokens."""

from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from latte.models.cache import LatteCache

logger = logging.get_logger(__name__)


def choose_cache(
    model: Any,
    cache: Any,
    use_cache: bool | None,
    cu_seq_lens: Tensor | None,
    *,
    causal: bool = True,
) -> LatteCache | None:
    """The cache that a decoder's forward fills, if any: the caller's, or a new one if wanted.

    Raises:
        ValueError: a cache of another kind, or one that cannot be carried on.
    """
    if cache is not None and not isinstance(cache, LatteCache):
        raise ValueError(
            f"past_key_values must be a LatteCache, got {type(cache).__name__}: the states of "
            "Latte do not fit into other caches"
        )
    possible = causal and cu_seq_lens is None
    if not possible and (cache is not None or use_cache):
        why = "packed sequences" if causal else "a bidirectional model"
        raise ValueError(f"{why} cannot be carried on in a cache: leave use_cache out")
    if model.gradient_checkpointing and model.training and (use_cache or cache is not None):
        logger.warning_once("gradient checkpointing keeps no cache: use_cache is ignored")
        return None
    if cache is None and possible:
        wanted = use_cache
        if wanted is None:
            wanted = model.config.use_cache and not model.training
        if wanted:
            cache = LatteCache(model.config)
    return cache


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


def packed_bounds(
    position_ids: Tensor | None, attention_mask: Tensor | None, cache: Any
) -> Tensor | None:
    """Bounds (N + 1,) int32 of the sequences in a row whose positions start anew, else None.

    Transformers' collators mark packed sequences in this way: one row, with neither a mask nor a
    cache. Reads the positions on the host, which a graph of ``torch.compile`` cannot: there
    ``cu_seq_lens_q`` alone says it.

    Raises:
        ValueError: several rows, one of which has positions that start anew.
    """
    if position_ids is None or attention_mask is not None or cache is not None:
        return None
    if position_ids.shape[1] < 2 or torch.compiler.is_compiling():
        return None
    if position_ids.shape[0] != 1:
        if bool((position_ids[:, 1:] < position_ids[:, :-1]).any()):
            raise ValueError(
                "positions start anew within a row: expected packed sequences in a single row"
                f" (B = 1), got position_ids {tuple(position_ids.shape)} without an attention_mask"
            )
        return None
    row = position_ids[0]
    starts = torch.nonzero(row[1:] != row[:-1] + 1)[:, 0] + 1
    if not len(starts):
        return None
    ends = starts.new_tensor([0]), starts, starts.new_tensor([len(row)])
    return torch.cat(ends).to(torch.int32)
