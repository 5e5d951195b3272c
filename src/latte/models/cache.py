"""The cache of Latte models, how ``generate`` comes by it, and what else a forward is given.

One state per layer, of constant size, in Transformers' Cache API. The states themselves are
:class:`latte.layers.MixerState`; a cache layer holds one and moves it about. Only full softmax
attention's state grows with the sequence. B batch, T tokens, P past tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.generation import GenerationMixin
from transformers.utils import logging

from latte.errors import LatteError
from latte.layers.state import MixerState, TokenLog, drop_newest, map_tensors, rewind

logger = logging.get_logger(__name__)


class LatteCacheLayer(CacheLayerMixin):
    """One layer's state, and how many tokens (padding included) went into it.

    Args:
        grows: the state keeps every token (full softmax attention), so that tokens can be cut
            off it; otherwise cutting needs recording (:meth:`activate_past_recording`).
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, grows: bool = False) -> None:
        # Not calling the base's __init__: what it sets are read-only views of the state here.
        self.grows = grows
        self.record_past = False
        self.seen_tokens = 0
        self.device: torch.device | None = None
        self.state = MixerState()

    # --- the state, by the names of the design -------------------------------------------------

    @property
    def log_mass(self) -> Tensor | None:
        """(B, H, L), the latents' log-mass (None for mixers without latents)."""
        return None if self.state.latent is None else self.state.latent.log_mass

    @property
    def mean(self) -> Tensor | None:
        """(B, H, L, D), what each latent has seen."""
        return None if self.state.latent is None else self.state.latent.mean

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """(B, G, W-1, K), the window's keys, oldest first."""
        return None if self.state.window is None else self.state.window.keys.transpose(1, 2)

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """(B, G, W-1, D), the window's values."""
        return None if self.state.window is None else self.state.window.values.transpose(1, 2)

    @property
    def rglru(self) -> Tensor | None:
        """(B, E) fp32, the RG-LRU's state."""
        return self.state.rglru

    @property
    def conv(self) -> Tensor | None:
        """(B, K-1, E), the convolution's last inputs."""
        return self.state.conv

    # --- reading and writing -------------------------------------------------------------------

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return self.state.position is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to allocate: the state comes from the first forward."""

    def update(self, state: MixerState, num_tokens: int) -> MixerState:  # type: ignore[override]
        """Put the state after ``num_tokens`` more tokens in place of the old one."""
        if not self.record_past:
            state = state._replace(undo=None)
        assert state.position is not None, "a mixer's final state always has a position"
        self.device = state.position.device
        self.state = state
        self.seen_tokens += num_tokens
        return state

    def get_seq_length(self) -> int:
        return self.seen_tokens

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen_tokens + query_length, 0

    def reset(self) -> None:
        keeps_sources = self.state.sources is not None
        self.state = MixerState(sources=TokenLog() if keeps_sources else None)
        self.seen_tokens = 0
        if self.record_past:
            self.activate_past_recording()

    def keep_sources(self) -> None:
        """Keep what each token's keys are, for weights over the past.

        Raises:
            ValueError: tokens have gone in of which they were not kept.
        """
        if self.state.sources is None:
            if self.seen_tokens:
                raise ValueError(
                    "output_attentions needs the whole sequence at once, or from its first token "
                    "on, since a state does not tell its tokens apart: pass use_cache=False, or "
                    "ask for it with a new cache"
                )
            self.state = self.state._replace(sources=TokenLog())

    # --- the batch dimension -------------------------------------------------------------------

    def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.state = map_tensors(fn, self.state)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda x: x[indices.to(x.device)])

    def offload(self) -> None:
        self._map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        device = self.device
        if device is not None:
            self._map(lambda x: x.to(device, non_blocking=True))

    # --- taking tokens back --------------------------------------------------------------------

    def activate_past_recording(self) -> None:
        """Keep what each further token adds, so that :meth:`crop` can take it back.

        The log grows over as many forwards as are run, and is emptied by ``crop``.
        """
        self.record_past = True
        if not self.grows and not self.state.recording:
            self.state = self.state.record()

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last ``-tokens_to_remove`` tokens back; 0 empties the log of recorded tokens.

        Raises:
            ValueError: a positive number, more tokens than there are, or tokens that were not
                recorded.
        """
        count = -tokens_to_remove
        if not 0 <= count <= self.seen_tokens:
            raise ValueError(
                f"crop takes minus the number of tokens to remove, here -{self.seen_tokens} "
                f"to 0, got {tokens_to_remove}"
            )
        if count and count == self.seen_tokens:
            self.reset()
            return
        if self.grows:
            if count:
                self.state = drop_newest(self.state, count)
        elif self.state.recording:
            self.state = rewind(self.state, count)
        elif count:
            raise ValueError(
                "tokens were not recorded, so they cannot be taken back: call "
                "activate_past_recording() on the cache before they are processed"
            )
        self.seen_tokens -= count


class LatteCache(Cache):
    """The states of all layers of a model; constant in size but for ``transformer++``.

        cache = LatteCache(model.config)
        out = model(input_ids, past_key_values=cache, use_cache=True)

    Args:
        config: of the model; it gives the number of layers, and ``state_grows(layer_idx)`` says
            which of them keep every token.
        offloading: keep each layer's state on the CPU while other layers compute.
    """

    layers: list[LatteCacheLayer]  # type: ignore[assignment]

    def __init__(self, config: Any, offloading: bool = False) -> None:
        layers = range(config.num_hidden_layers)
        super().__init__(layers=[LatteCacheLayer(config.state_grows(index)) for index in layers])
        self.offload_layers = offloading

    def state(self, layer_idx: int) -> MixerState:
        """The state that layer ``layer_idx`` starts from."""
        if self.offload_layers:
            self.layers[layer_idx].prefetch()
        return self.layers[layer_idx].state

    def update(  # type: ignore[override]
        self, state: MixerState, num_tokens: int, layer_idx: int, *args: Any, **kwargs: Any
    ) -> MixerState:
        """Store the state that layer ``layer_idx`` ended in after ``num_tokens`` tokens."""
        self.layers[layer_idx].update(state, num_tokens)
        if self.offload_layers:
            self.layers[layer_idx].offload()
        return state

    def keep_sources(self) -> None:
        """Keep what weights over the past are made of, from the first token on."""
        for layer in self.layers:
            layer.keep_sources()

    @property
    def position(self) -> Tensor | None:
        """(B,) int64, real tokens seen so far (padding not counted); None before the first."""
        return self.layers[0].state.position

    @property
    def is_initialized(self) -> bool:
        """Whether tokens have gone in. The base leaves out layers that nothing allocates early."""
        return all(layer.is_initialized for layer in self.layers)

    @property
    def batch_size(self) -> int:
        return -1 if self.position is None else self.position.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes held by all layers' states."""
        total = 0

        def count(x: Tensor) -> Tensor:
            nonlocal total
            total += x.numel() * x.element_size()
            return x

        for layer in self.layers:
            map_tensors(count, layer.state)
        return total


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
