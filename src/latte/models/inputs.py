"""The preparation of a decoder's inputs: embeddings, mask, bounds, positions and cache.

Latte's own decoder and converted ones share it. B batch, T tokens, P past tokens, E hidden size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import logging

from latte.errors import LatteError
from latte.layers import Context
from latte.layers.step import StepState
from latte.models.cache import LatteCache
from latte.ops.tensors import token_positions

logger = logging.get_logger(__name__)

MOST_IN_GRAPH = 256  # packed sequences of a row whose bounds a compiled graph finds


class DecoderInputs(NamedTuple):
    """The inputs of one forward of a decoder.

    Args:
        x_BTE: Embeddings of the new tokens, (B, T, E), as the table has them.
        key_mask: Mask of the valid tokens among them, (B, T) bool; None if all are real.
        position_ids: Positions, (B, T), as given or as the cache counts them in a step; else None.
        cu_seq_lens: Bounds of packed sequences, (N + 1,) int32, as given or as found; else None.
        cache: Cache to read and to fill; None without one.
        shards: Processes that hold the tokens before these, if there is no cache.
        buffers: The layers' states, if this is a step: a single token per row, read in place.
    """

    x_BTE: Tensor
    key_mask: Tensor | None
    position_ids: Tensor | None
    cu_seq_lens: Tensor | None
    cache: LatteCache | None
    shards: Any
    buffers: list[StepState] | None = None

    def positions(self) -> Tensor:
        """The positions, (B, T). If there are none, the valid tokens are counted."""
        if self.position_ids is not None:
            return self.position_ids
        return token_positions(self.x_BTE, self.key_mask, self.cu_seq_lens, self.start)

    @property
    def start(self) -> Tensor | None:
        """Number of valid tokens before these, (B or N,) int64; None is 0."""
        if self.cache is not None:
            return self.cache.position
        return None if self.shards is None else self.shards.position

    def context(self, rotary: Any = None) -> Context:
        """What the layers share about these tokens, with their rotary tables."""
        tokens = self.x_BTE, self.key_mask, self.cu_seq_lens
        return Context.of(*tokens, self.cache is not None, self.start, rotary, self.shards)


def prepare_inputs(
    decoder: Any,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    past_key_values: Any,
    use_cache: bool | None,
    cu_seq_lens: Tensor | None,
    seq_idx: Tensor | None = None,
    *,
    steps: bool,
    causal: bool = True,
) -> DecoderInputs:
    """The inputs of a decoder's layers, from the arguments of its ``forward``.

    If the forward is a step of decoding that can be done in place, the cache begins it
    (:meth:`LatteCache.begin`).

    Args:
        decoder: The decoder, with ``embed_tokens`` and ``shards``.
        causal: Whether its layers are causal. Others take no cache.
        steps: Whether a step in place would give all that is wanted.

    Raises:
        ValueError: The arguments do not fit together, or a token id is not in the vocabulary.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("expected exactly one of input_ids and inputs_embeds")
    check_tensors(
        input_ids=input_ids,
        inputs_embeds=inputs_embeds,
        attention_mask=attention_mask,
        cu_seq_lens_q=cu_seq_lens,
        seq_idx=seq_idx,
    )
    tokens: Any = input_ids if inputs_embeds is None else inputs_embeds
    check_positions(tokens, position_ids=position_ids, seq_idx=seq_idx)
    if cu_seq_lens is None:
        wanted = past_key_values is None and wants_cache(decoder, use_cache)
        known = None if unread_in_graph(tokens, wanted) else position_ids
        cu_seq_lens = packed_bounds(known, attention_mask, past_key_values, seq_idx)
    cache = choose_cache(decoder, past_key_values, use_cache, cu_seq_lens, causal=causal)
    x_BTE = embed(decoder.embed_tokens, input_ids) if inputs_embeds is None else inputs_embeds
    if x_BTE.ndim != 3:
        raise ValueError(
            f"expected input_ids (B, T) or inputs_embeds (B, T, E), got a batch whose "
            f"embeddings are {tuple(x_BTE.shape)}"
        )
    if cache is not None and cache.batch_size not in (-1, x_BTE.shape[0]):
        raise ValueError(
            f"the cache holds a batch of {cache.batch_size}, got a batch of {x_BTE.shape[0]}"
        )
    key_mask = new_key_mask(x_BTE, attention_mask, cache)
    if cache is not None and key_mask is not None and attention_mask is not None:
        check_padding(attention_mask, key_mask, cache)
    buffers = None
    if cache is not None:
        buffers = cache.begin(x_BTE, key_mask, decoder if steps else None)
    if buffers is not None and position_ids is None:
        position_ids = buffers[0].step_context.position[:, None]
    return DecoderInputs(x_BTE, key_mask, position_ids, cu_seq_lens, cache, decoder.shards, buffers)


def check_tensors(**inputs: Any) -> None:
    """Raise ValueError unless each of these inputs is a tensor or None."""
    for name, x in inputs.items():
        if x is not None and not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")


def check_positions(inputs: Any, **given: Any) -> None:
    """Raise ValueError unless each of these has one number for each token, or is None.

    One row of numbers may be for all rows of the inputs.
    """
    if getattr(inputs, "ndim", 0) < 2:
        return
    B, T = inputs.shape[:2]
    for name, x in given.items():
        shape = tuple(getattr(x, "shape", ()))
        if x is not None and shape not in ((B, T), (1, T)):
            found = shape if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a tensor (B={B}, T={T}) or (1, T={T}), got {found}")


def unread_in_graph(tokens: Any, cached: bool) -> bool:
    """Whether this is a compiled graph that cannot split its rows where positions start again.

    It has several rows, or is to make a cache, which packed sequences cannot have.
    """
    return torch.compiler.is_compiling() and (tokens.shape[0] != 1 or cached)


def embed(table: nn.Module, input_ids: Any) -> Tensor:
    """The embeddings of token ids.

    Raises:
        ValueError: An id is not in the vocabulary. This is checked on a CPU only: on a GPU the
            check would wait for the device, and a compiled graph cannot check.
    """
    if torch.compiler.is_compiling():
        return table(input_ids)
    try:
        return table(input_ids)
    except (IndexError, ValueError):  # PyTorch's own message does not name the id
        entries = getattr(table, "num_embeddings", 0)
        wrong = input_ids[(input_ids < 0) | (input_ids >= entries)]
        if not wrong.numel():
            raise
        raise LatteError(
            f"input_ids: expected ids from 0 to {entries - 1} (a vocabulary of {entries:,}),"
            f" got {int(wrong[0])}"
        ) from None


def wants_cache(decoder: Any, use_cache: bool | None) -> bool:
    """Whether a forward without a cache makes one, if it can."""
    if use_cache is None:
        return bool(decoder.config.use_cache and not decoder.training)
    return use_cache


def choose_cache(
    decoder: Any,
    cache: Any,
    use_cache: bool | None,
    cu_seq_lens: Tensor | None,
    *,
    causal: bool = True,
) -> LatteCache | None:
    """The cache that a decoder's forward fills: the caller's, a new one if wanted, or None.

    Raises:
        ValueError: The cache is of another kind, or the inputs cannot use one.
    """
    if cache is not None and not isinstance(cache, LatteCache):
        raise ValueError(
            f"past_key_values must be a LatteCache, got {type(cache).__name__}: the states of "
            "Latte do not fit into other caches"
        )
    # Drafts by early exit run fewer layers than the decoder has.
    runs, has = decoder.config.num_hidden_layers, len(decoder.layers)
    if cache is not None and not runs <= len(cache.layers) <= has:
        raise ValueError(
            f"the cache is of a model with {len(cache.layers)} layers, this one has {has}:"
            " expected LatteCache(model.config)"
        )
    possible = causal and cu_seq_lens is None
    if not possible and (cache is not None or use_cache):
        why = "packed sequences" if causal else "a bidirectional model"
        raise ValueError(f"{why} cannot be carried on in a cache: leave use_cache out")
    if decoder.gradient_checkpointing and decoder.training and (use_cache or cache is not None):
        logger.warning_once("gradient checkpointing keeps no cache: use_cache is ignored")
        return None
    if cache is None and possible and wants_cache(decoder, use_cache):
        cache = LatteCache(decoder.config)
    if cache is not None and not torch.compiler.is_compiling():
        cache.filled_by(decoder)
    return cache


def new_key_mask(
    x_BTE: Tensor, attention_mask: Tensor | None, cache: LatteCache | None
) -> Tensor | None:
    """The new tokens' part of an attention mask (B, P + T), as bool (B, T).

    With a static cache the mask may cover the new tokens only, (B, T).
    """
    if attention_mask is None:
        return None
    B, T = x_BTE.shape[:2]
    if cache is not None and cache.is_static and attention_mask.shape == (B, T):
        return attention_mask.bool()
    past = 0 if cache is None else cache.get_seq_length()
    check_mask_shape(attention_mask, B, past, T)
    return attention_mask[:, past:].bool()


def check_mask_shape(attention_mask: Tensor, B: int, past: int, T: int) -> None:
    """Raise ValueError if a mask does not have a place for each token of B rows."""
    if attention_mask.shape != (B, past + T):
        raise ValueError(
            f"attention_mask must be (B={B}, past + T={past} + {T}), "
            f"got {tuple(attention_mask.shape)}"
        )


def check_padding(attention_mask: Tensor, key_mask: Tensor, cache: LatteCache) -> None:
    """Raise ValueError if padding stands between a row's cached tokens and its new ones.

    Windows and convolutions would hold it in the places of valid tokens. Single tokens are not
    looked at, and neither is a compiled graph: a GPU would have to be waited for.
    """
    B, T = key_mask.shape
    if T == 1 or torch.compiler.is_compiling() or not cache.is_initialized:
        return
    past, position = cache.get_seq_length(), cache.position
    assert position is not None
    whole = attention_mask.shape[1] == past + T  # the mask has the cached tokens too
    last = attention_mask[:, past - 1 : past].bool() if whole else key_mask.new_ones(B, 1)
    resumes = key_mask & ~torch.cat([last, key_mask[:, :-1]], 1)
    wrong = resumes.any(1) & (position > 0)
    if not bool(wrong.any()) or not cache.holds_places:
        return
    raise LatteError(
        f"attention_mask: row {int(wrong.nonzero()[0, 0])} has padding between its cached tokens"
        " and its new ones, which would take the places of real tokens in its window; expected"
        " padding on the left of the first call alone: read rows of other lengths one by one"
    )


def packed_bounds(
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    cache: Any,
    seq_idx: Tensor | None = None,
) -> Tensor | None:
    """Bounds (N + 1,) int32 of the sequences that are packed into one row; None if none are.

    Collators mark them by ``seq_idx`` (1, T), the number of each token's sequence, or by positions
    that start again, in one row without mask and cache. Positions start again where one is not
    above the one before. They may leave some out.

    These are read on the host. A graph of ``torch.compile`` cannot do that. It has
    :data:`MOST_IN_GRAPH` bounds, those that are not needed at the end of the row.

    Raises:
        ValueError: There are several rows, and one of them is packed.
    """
    if seq_idx is not None:
        begins_BT, B, T = seq_idx[:, 1:] != seq_idx[:, :-1], *seq_idx.shape
    elif position_ids is None or attention_mask is not None or cache is not None:
        return None
    else:
        begins_BT, B, T = position_ids[:, 1:] <= position_ids[:, :-1], *position_ids.shape
    if T < 2:
        return None
    if torch.compiler.is_compiling():
        return None if B != 1 else _bounds_in_graph(begins_BT[0])
    if not bool(begins_BT.any()):
        return None
    if B != 1:
        what, given = "positions start again", f"position_ids {(B, T)} without an attention_mask"
        if seq_idx is not None:
            what, given = "seq_idx changes", f"seq_idx {(B, T)}"
        raise ValueError(
            f"{what} within a row: expected packed sequences in a single row (B = 1), got {given}"
        )
    starts = torch.nonzero(begins_BT[0])[:, 0] + 1
    ends = starts.new_tensor([0]), starts, starts.new_tensor([T])
    return torch.cat(ends).to(torch.int32)


def _bounds_in_graph(begins_t: Tensor) -> Tensor:
    """Bounds of a fixed number of sequences, of which the last are empty; ``begins_t`` (T - 1,)."""
    T = begins_t.shape[0] + 1
    place = torch.arange(1, T, device=begins_t.device)
    starts = torch.where(begins_t, place, T).sort().values
    if T > MOST_IN_GRAPH:
        torch._assert_async(
            starts[MOST_IN_GRAPH - 1] == T,
            f"a compiled graph finds the bounds of at most {MOST_IN_GRAPH} packed sequences in a"
            " row, got more: pass cu_seq_lens_q",
        )
        starts = starts[: MOST_IN_GRAPH - 1]
    ends = starts.new_zeros(1), starts, starts.new_full((1,), T)
    return torch.cat(ends).to(torch.int32)
