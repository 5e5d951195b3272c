"""Latte's models: the decoder, its language model and its classifier.

Shape suffixes: B batch, T tokens, E hidden size, P past tokens.
"""

import math
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import can_return_tuple

from latte.errors import LatteError
from latte.layers import (
    GELUMLP,
    LayerNorm,
    Mixer,
    MixerState,
    RMSNorm,
    Rotary,
    RotaryEmbedding,
    SinusoidalPositions,
    SwiGLU,
)
from latte.layers.parts import linear_maps, norm_token, of_single_tokens, token_positions
from latte.layers.step import StepState
from latte.models.cache import (
    LatteCache,
    StateGenerationMixin,
    choose_cache,
    new_key_mask,
    packed_bounds,
)
from latte.models.config import LatteConfig
from latte.models.loss import IGNORED, chunked_loss, next_labels, next_token_loss
from latte.models.registry import find_mixer

LOADED = "_is_hf_initialized"  # Transformers' mark of weights that came from a checkpoint


def initialise(module: nn.Module) -> None:
    """Draw the parameters that a module brings its own initial values for, if it does.

    Goes through ``transformers.initialization``, which leaves loaded weights alone.
    """
    draw = getattr(module, "initial_values", None)
    if draw is not None:
        for name, value in draw().items():
            init.copy_(module.get_parameter(name), value)


def embed(table: nn.Module, input_ids: Any) -> Tensor:
    """The embeddings of token ids.

    Raises:
        ValueError: an id that the vocabulary does not have. On a CPU alone: a GPU would have to
            wait for the answer, and a compiled graph cannot.
    """
    if torch.compiler.is_compiling():
        return table(input_ids)
    try:
        return table(input_ids)
    except IndexError:  # what PyTorch's own check says does not name the id: found out here
        entries = getattr(table, "num_embeddings", 0)
        wrong = input_ids[(input_ids < 0) | (input_ids >= entries)]
        if not wrong.numel():
            raise
        raise LatteError(
            f"input_ids: expected ids from 0 to {entries - 1} (a vocabulary of {entries:,}),"
            f" got {int(wrong[0])}"
        ) from None


def make_norm(config: LatteConfig) -> nn.Module:
    norm = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}[config.norm]
    return norm(config.hidden_size, eps=config.norm_eps)


def make_mlp(config: LatteConfig) -> nn.Module:
    mlp = {"gelu": GELUMLP, "swiglu": SwiGLU}[config.mlp]
    return mlp(config.hidden_size, config.intermediate_size)


def make_mixer(config: LatteConfig) -> Mixer:
    """The token mixer of a configuration."""
    return find_mixer(config.mixer).from_config(config)


class LatteBlock(GradientCheckpointingLayer):
    """``x + mixer(norm(x))``, then ``x + mlp(norm(x))``."""

    make_mixer: Any = staticmethod(make_mixer)

    def __init__(self, config: LatteConfig) -> None:
        super().__init__()
        self.mixer_norm = make_norm(config)
        self.mixer: Any = self.make_mixer(config)
        self.mlp_norm = make_norm(config)
        self.mlp = make_mlp(config)
        self.dropout = nn.Dropout(config.hidden_dropout)
        for output in (getattr(self.mixer, "o_proj", None), self.mlp.down_proj):
            if output is not None:  # read when weights are initialised
                output.writes_residual = True  # type: ignore[union-attr]

    def forward(
        self,
        x_BTE: Tensor,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        rotary: Rotary | None = None,
        state: MixerState | StepState | None = None,
        output_final_state: bool = False,
        output_attentions: bool = False,
    ) -> tuple[Tensor, MixerState | None, Tensor | None]:
        """Hidden states (B, T, E), the mixer's final state and its weights (B, H, T, P + T)."""
        if isinstance(state, StepState):
            return self._step(x_BTE, state, rotary), None, None
        normed = self.mixer_norm(x_BTE)
        given = (normed, key_mask, cu_seqlens, state, output_final_state)
        weights = None
        if output_attentions:
            mixed, after, weights = self.mixer.with_weights(*given, rotary=rotary)
        else:
            mixed, after = self.mixer(*given, rotary=rotary)
        x_BTE = x_BTE + self._drop(mixed)
        x_BTE = x_BTE + self._drop(self.mlp(self.mlp_norm(x_BTE)))
        return x_BTE, after, weights

    def _step(self, x_BTE: Tensor, state: StepState, rotary: Rotary | None) -> Tensor:
        """The same of single tokens, the mixer's state in place."""
        native = state.clock.native
        normed = norm_token(self.mixer_norm, x_BTE, native)
        mixed, _ = self.mixer(normed, state=state, rotary=rotary)
        x_BTE = x_BTE + self._drop(mixed)
        return x_BTE + self._drop(self.mlp(norm_token(self.mlp_norm, x_BTE, native)))

    def _drop(self, x_BTE: Tensor) -> Tensor:
        """Dropout, if there is any: at one token a call that does nothing is felt."""
        return self.dropout(x_BTE) if self.dropout.training else x_BTE


class LattePreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation that all Latte models share."""

    config: LatteConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LatteBlock"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_context_parallel = False  # Transformers' own, which would cut rows and lose states

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Linear) and getattr(module, "writes_residual", False):
            # As in GPT-2: the residual stream keeps its scale, whatever the depth.
            std = self.config.initializer_range / math.sqrt(2 * self.config.num_hidden_layers)
            init.normal_(module.weight, std=std)
        elif isinstance(module, nn.Embedding) and self.config.embedding_initializer_range:
            init.normal_(module.weight, std=self.config.embedding_initializer_range)
            if module.padding_idx is not None and not getattr(module.weight, LOADED, False):
                init.zeros_(module.weight[module.padding_idx])  # a slice has lost the mark
        else:
            initialise(module)


class LatteModel(LattePreTrainedModel):
    """Embeddings, decoder blocks and the final norm."""

    block_class: type[nn.Module] = LatteBlock
    earlier: MixerState | None = None  # what is before the tokens, set by latte.parallel

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

    @property
    def steps(self) -> bool:
        """Whether all layers can decode a token in place."""
        return all(getattr(layer.mixer, "steps", False) for layer in self.layers)

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
            output_attentions: also return p(s|t), (B, H, T, P + T) per layer: O(T^2) memory, and
                a cache that keeps what every token adds. Where gradients are recorded they flow
                through these weights.
            cu_seq_lens_q: (N + 1,) int32 bounds of N sequences packed into one row (B = 1), which
                see nothing of each other. Without it, positions that start anew in a row of its
                own, without a mask or a cache, are such bounds, outside ``torch.compile``.

        Raises:
            ValueError: the arguments do not fit together, or a token id that the vocabulary does
                not have (see :func:`embed`).
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
            inputs_embeds = embed(self.embed_tokens, input_ids)
        self._check(inputs_embeds, cache, output_attentions)
        key_mask = new_key_mask(inputs_embeds, attention_mask, cache)

        if cache is not None:
            counted = cache.begin(inputs_embeds, key_mask, self.steps and not output_attentions)
            position_ids = counted if position_ids is None else position_ids

        hidden, rotary = self._embed(inputs_embeds, key_mask, position_ids, cache, cu_seq_lens_q)
        hidden_states, attentions = [], []
        # As many as the configuration says: a draft of ``generate`` that exits early lowers it.
        for index, layer in enumerate(islice(self.layers, self.config.num_hidden_layers)):
            hidden_states.append(hidden)
            state = self.earlier if cache is None else cache.state(index)
            hidden, after, weights = layer(
                hidden, key_mask, cu_seq_lens_q, rotary, state, cache is not None, output_attentions
            )
            attentions.append(weights)
            if cache is not None:
                cache.update(after, hidden.shape[1], index)
        if cache is not None:
            cache.end()
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
        if output_attentions:
            cache.keep_sources()

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
                start = (
                    cache.position if cache is not None else getattr(self.earlier, "position", None)
                )
                position_ids = token_positions(x_BTE, key_mask, cu_seq_lens, start)
            if self.rotary is not None:
                rotary = self.rotary(position_ids, x_BTE.dtype)
                if cache is not None and cache.step is not None:
                    rotary = of_single_tokens(rotary)
            if self.positions is not None:
                x_BTE = x_BTE + self.positions(position_ids, x_BTE.dtype)
        return self.dropout(x_BTE), rotary


class LatteForCausalLM(StateGenerationMixin, LattePreTrainedModel):
    """A decoder with a language-modelling head, tied to the embeddings by default."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    # forward() divides by num_items_in_batch itself, which Trainer would otherwise not know.
    accepts_loss_kwargs = True
    # In training, compute the loss in chunks and return no logits (see latte.train.speed).
    chunked_loss = False
    backbone_class = LatteModel

    def __init__(self, config: LatteConfig) -> None:
        if not config.is_causal:
            raise LatteError("LatteForCausalLM needs is_causal=True, got False")
        super().__init__(config)
        self.model = self.backbone_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.loss_function = next_token_loss
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: LatteCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        shift_labels: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits (B, T, vocabulary), and the loss if there are labels.

        Args:
            labels: (B, T), shifted here; -100 is not predicted. The first token of a packed
                sequence is not predicted either: its past belongs to another text.
            logits_to_keep: compute logits of the last so many tokens only (0: of all), or of the
                positions in a 1-D tensor.
            shift_labels: (B, T), the label of the token after each, in the place of ``labels``; as
                some collators and sequence parallelism send them. They are taken as they are.
            num_items_in_batch: divide the summed loss by this, not by this batch's own count.
            cu_seq_lens_k, max_length_q, max_length_k: what Hugging Face's packing collator sends
                along; ``cu_seq_lens_q`` says it all.

        The rest is as for :class:`LatteModel`.

        Raises:
            ValueError: the arguments do not fit together.
        """
        scored = labels if shift_labels is None else shift_labels
        if scored is not None and use_cache is None and past_key_values is None:
            use_cache = False  # a loss is no reason to compute states
        if labels is not None and cu_seq_lens_q is None:  # the loss needs the bounds too
            cu_seq_lens_q = packed_bounds(position_ids, attention_mask, past_key_values)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            cu_seq_lens_q=cu_seq_lens_q,
        )
        hidden = outputs.last_hidden_state
        if isinstance(logits_to_keep, Tensor):
            hidden = hidden[:, logits_to_keep]
        elif logits_to_keep:
            hidden = hidden[:, -logits_to_keep:]
        loss = logits = None
        in_chunks = self.chunked_loss and self.training and scored is not None
        if not in_chunks:
            logits = linear_maps(hidden, self.lm_head)[0]
        if scored is not None:
            if hidden.shape[:2] != scored.shape:
                raise ValueError(
                    f"labels must be {tuple(hidden.shape[:2])}, one per logit (labels and "
                    f"logits_to_keep do not go together), got {tuple(scored.shape)}"
                )
            if labels is not None and cu_seq_lens_q is not None:
                # index_fill, not assignment: the caller's labels stay as they are. The last
                # bound is T, where no sequence starts; 0 is never predicted anyway.
                starts = cu_seq_lens_q[:-1].long()
                labels = labels.index_fill(1, starts.clamp_max(labels.shape[1] - 1), IGNORED)
            if in_chunks:
                targets = next_labels(labels) if shift_labels is None else shift_labels
                loss = chunked_loss(hidden, self.lm_head.weight, targets, num_items_in_batch)
            else:
                shifted = {} if shift_labels is None else {"shift_labels": shift_labels}
                loss = self.loss_function(
                    logits=logits,
                    labels=labels,
                    vocab_size=self.config.vocab_size,
                    num_items_in_batch=num_items_in_batch,
                    **shifted,
                )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def count_parameters(config: LatteConfig) -> int:
    """Parameters of the language model (tied ones once), without allocating any."""
    with torch.device("meta"):
        model = LatteForCausalLM(config)
    return sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())


class LatteForSequenceClassification(LattePreTrainedModel):
    """A classifier over the mean of the real tokens' hidden states.

    With ``is_causal=False`` in the configuration the layers are bidirectional, which is what a
    classifier trained from scratch wants; a pretrained language model keeps its causal ones.
    """

    accepts_loss_kwargs = False  # the loss is a mean over the batch; Trainer scales it
    backbone_class = LatteModel

    def __init__(self, config: LatteConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels or 2
        self.model = self.backbone_class(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> SequenceClassifierOutputWithPast:
        """Logits (B, labels), and the loss if there are labels.

        Args:
            labels: (B,) classes, (B,) or (B, labels) targets of a regression, or (B, labels) for
                several classes at once; ``config.problem_type`` decides, as in Hugging Face.

        The rest is as for :class:`LatteModel`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=False,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        pooled = mean_over_tokens(outputs.last_hidden_state, attention_mask)
        logits = self.score(self.dropout(pooled))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def mean_over_tokens(hidden_BTE: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The mean over real tokens, (B, E); zero for a row without any."""
    if attention_mask is None:
        return hidden_BTE.mean(1)
    real_BT1 = attention_mask.bool().unsqueeze(-1)
    # where, not a product: what stands at padding must not matter, even if it is not finite.
    total_BE = hidden_BTE.where(real_BT1, 0.0).sum(1)
    return total_BE / real_BT1.sum(1).clamp_min(1)
