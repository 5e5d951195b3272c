"""The decoder without a head. Shape suffixes: B batch, T tokens, E hidden size, P past tokens."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import can_return_tuple

from latte.layers import Rotary, RotaryEmbedding, SinusoidalPositions
from latte.layers.parts import token_positions
from latte.models.block import LatteBlock, make_norm
from latte.models.cache import LatteCache
from latte.models.config import LatteConfig
from latte.models.initialisation import initialise
from latte.models.inputs import choose_cache, new_key_mask, packed_bounds


class LattePreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation that all Latte models share."""

    config: LatteConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LatteBlock"]
    _skip_keys_device_placement = ["past_key_values"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Linear) and getattr(module, "writes_residual", False):
            # As in GPT-2: the residual stream keeps its scale, whatever the depth.
            std = self.config.initializer_range / math.sqrt(2 * self.config.num_hidden_layers)
            init.normal_(module.weight, std=std)
        else:
            initialise(module)


class LatteModel(LattePreTrainedModel):
    """Embeddings, decoder blocks and the final norm."""

    block_class: type[nn.Module] = LatteBlock

    def __init__(self, config: LatteConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.positions = (
            SinusoidalPositions(config.hidden_size) if config.position == "sinusoidal" else None
        )
        self.rotary = (
            RotaryEmbedding(config.width_per_head, config.rope_theta)
            if config.position == "rope"
            else None
        )
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(
            self.block_class(config) for _ in range(config.num_hidden_layers)
        )
        self.norm = make_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: LatteCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
    ) -> BaseModelOutputWithPast:
        """Hidden states of a batch, of one more piece of it, or of packed sequences.

        Args:
            input_ids: (B, T); or ``inputs_embeds`` (B, T, E).
            attention_mask: (B, P + T), 1 = a real token, over the cached tokens too. Padding may
                stand on either side; what is to be carried on in a cache is padded on the left.
            position_ids: (B, T); by default real tokens are counted, in each sequence.
            past_key_values: a :class:`LatteCache`, read and updated.
            use_cache: return the cache; by default the config's choice, and not in training.
            output_attentions: also return p(s|t), (B, H, T, T) per layer: O(T^2) memory.
            cu_seq_lens_q: (N + 1,) int32 bounds of N sequences packed into one row (B = 1), which
                see nothing of each other. Without it, positions that start anew in a row of its
                own, without a mask or a cache, are such bounds, outside ``torch.compile``.

        Raises:
            ValueError: the arguments do not fit together.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("expected exactly one of input_ids and inputs_embeds")
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if cu_seq_lens_q is None:
            cu_seq_lens_q = packed_bounds(position_ids, attention_mask, past_key_values)
        cache = choose_cache(
            self, past_key_values, use_cache, cu_seq_lens_q, causal=self.config.is_causal
        )
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        self._check(inputs_embeds, cache, output_attentions)
        key_mask = new_key_mask(inputs_embeds, attention_mask, cache)

        hidden, rotary = self._embed(inputs_embeds, key_mask, position_ids, cache, cu_seq_lens_q)
        hidden_states, attentions = [], []
        # As many as the configuration says: a draft of ``generate`` that exits early lowers it.
        for index, layer in enumerate(self.layers[: self.config.num_hidden_layers]):
            hidden_states.append(hidden)
            state = None if cache is None else cache.state(index)
            hidden, after, weights = layer(
                hidden, key_mask, cu_seq_lens_q, rotary, state, cache is not None, output_attentions
            )
            attentions.append(weights)
            if cache is not None:
                cache.update(after, hidden.shape[1], index)
        hidden = self.norm(hidden)
        hidden_states.append(hidden)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=cache,
            hidden_states=tuple(hidden_states) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None,
        )

    def _check(self, x_BTE: Tensor, cache: LatteCache | None, output_attentions: bool) -> None:
        if x_BTE.ndim != 3:
            raise ValueError(
                f"expected input_ids (B, T) or inputs_embeds (B, T, E), got a batch whose "
                f"embeddings are {tuple(x_BTE.shape)}"
            )
        if cache is None:
            return
        if cache.batch_size not in (-1, x_BTE.shape[0]):
            raise ValueError(
                f"the cache holds a batch of {cache.batch_size}, got a batch of {x_BTE.shape[0]}"
            )
        if output_attentions and cache.get_seq_length():
            raise ValueError(
                "output_attentions needs the whole sequence at once, since a state does not tell "
                "its tokens apart: pass use_cache=False"
            )

    def _embed(
        self,
        x_BTE: Tensor,
        key_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: LatteCache | None,
        cu_seq_lens: Tensor | None,
    ) -> tuple[Tensor, Rotary | None]:
        """Embeddings with their positions in, and the rotary table that all layers share."""
        rotary = None
        if (scale := self.config.embedding_scale) != 1:
            x_BTE = x_BTE * scale
        if self.positions is not None or self.rotary is not None:
            if position_ids is None:
                start = None if cache is None else cache.position
                position_ids = token_positions(x_BTE, key_mask, cu_seq_lens, start)
            if self.rotary is not None:
                rotary = self.rotary(position_ids, x_BTE.dtype)
            if self.positions is not None:
                x_BTE = x_BTE + self.positions(position_ids, x_BTE.dtype)
        return self.dropout(x_BTE), rotary

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def set_input_embeddings(self, value: Any) -> None:
        self.embed_tokens = value
