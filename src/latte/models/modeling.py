"""Latte's models: the decoder, its language model and its classifier.

Shape suffixes: B batch, T tokens, E hidden size, P past tokens.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
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
    Context,
    LayerNorm,
    Mixer,
    MixerState,
    RMSNorm,
    Rotary,
    RotaryEmbedding,
    SinusoidalPositions,
    SwiGLU,
)
from latte.layers.native import is_hooked, linear_maps
from latte.layers.parts import add_and_norm, of_single_tokens, sink_edge
from latte.layers.plan import LayerParts, StepPlan
from latte.layers.step import StepState, run_layer, run_layers
from latte.models.cache import LatteCache
from latte.models.cache_name import CACHE_NAME, KEYWORDS, one_cache
from latte.models.config import LatteConfig
from latte.models.generation import StateGenerationMixin
from latte.models.inputs import DecoderInputs, check_tensors, prepare_inputs
from latte.models.loss import chunked_loss, labels_within, next_labels, next_token_loss
from latte.models.registry import find_mixer
from latte.models.signature import hides
from latte.ops.pointwise import fuses

MLPS: dict[str, Any] = {"gelu": GELUMLP, "swiglu": SwiGLU}  # they begin with products
LOADED = "_is_hf_initialized"  # Transformers' mark of weights that came from a checkpoint


def initialise(module: nn.Module) -> None:
    """Draw the parameters for which a module defines its own initial values.

    This uses ``transformers.initialization``, which does not change loaded weights.
    """
    draw = getattr(module, "initial_values", None)
    if draw is not None:
        for name, value in draw().items():
            init.copy_(module.get_parameter(name), value)


def make_norm(config: LatteConfig) -> nn.Module:
    norm = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}[config.norm]
    return norm(config.hidden_size, eps=config.norm_eps)


def make_mlp(config: LatteConfig) -> nn.Module:
    return MLPS[config.mlp](config.hidden_size, config.intermediate_size)


def make_mixer(config: LatteConfig, layer_idx: int = 0) -> Mixer:
    """The token mixer of a layer."""
    return find_mixer(config.mixer_of(layer_idx)).from_config(config)


class LatteBlock(GradientCheckpointingLayer):
    """``x + mixer(norm(x))``, then ``x + mlp(norm(x))`` if there is an MLP."""

    make_mixer: Any = staticmethod(make_mixer)

    def __init__(self, config: LatteConfig, layer_idx: int = 0) -> None:
        super().__init__()
        self.mixer_norm = make_norm(config)
        self.mixer: Any = self.make_mixer(config, layer_idx)
        self.mlp_norm: Any = None if config.mlp == "none" else make_norm(config)
        self.mlp: Any = None if config.mlp == "none" else make_mlp(config)
        self.dropout = nn.Dropout(config.hidden_dropout)
        for output in (getattr(self.mixer, "o_proj", None), getattr(self.mlp, "down_proj", None)):
            if output is not None:  # read when weights are initialised
                output.writes_residual = True  # type: ignore[union-attr]

    def forward(
        self,
        x_BTE: Tensor,
        context: Context,
        state: MixerState | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, MixerState | None, Tensor | None]:
        """Return hidden states (B, T, E), the mixer's state and its weights (B, H, T, P + T)."""
        fused, weights = fuses(x_BTE), None
        if fused:
            x_BTE, normed = add_and_norm(self.mixer_norm, x_BTE)
        else:
            normed = self.mixer_norm(x_BTE)
        if output_attentions:
            mixed, after, weights = self.mixer.with_weights(normed, state=state, context=context)
        else:
            mixed, after = self.mixer(normed, state=state, context=context)
        if self.dropout.training:
            mixed = self.dropout(mixed)
        return self._feed_forward(x_BTE, mixed, fused), after, weights

    def _feed_forward(self, x_BTE: Tensor, mixed_BTE: Tensor, fused: bool = True) -> Tensor:
        """``z + mlp(norm(z))`` for ``z = x + mixed``, or z if the block has no MLP.

        ``fused``: the sum and the norm may be one kernel.
        """
        if self.mlp is None:
            return x_BTE + mixed_BTE
        if fused:
            lowers = type(self.mlp) in MLPS.values() and not is_hooked(self.mlp)
            x_BTE, normed = add_and_norm(self.mlp_norm, x_BTE, mixed_BTE, lowers=lowers)
        else:
            x_BTE = x_BTE + mixed_BTE
            normed = self.mlp_norm(x_BTE)
        inner = self.mlp(normed)
        return x_BTE + (self.dropout(inner) if self.dropout.training else inner)

    @property
    def parts(self) -> LayerParts:
        """The modules of the block, for a step."""
        return LayerParts(self.mixer_norm, self.mixer, self.mlp_norm, self.mlp, block=self)

    def step(self, x_BE: Tensor, state: StepState, *, rotary: Rotary | None = None) -> Tensor:
        """Hidden states (B, E) after the block, from those of the next token of each row.

        Arguments and errors are those of :meth:`latte.layers.Mixer.step`.
        """
        return run_layer(self.parts, x_BE, state, rotary)


class OwnAttention:
    """The answer to Transformers' choice of an attention function: the layers have their own."""

    _supports_sdpa = True

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    def _check_and_adjust_attn_implementation(
        self,
        attn_implementation: str | None,
        is_init_check: bool = False,
        allow_all_kernels: bool = False,
    ) -> str:
        """The name in the configuration. Raises LatteError for one that promises other kernels."""
        if attn_implementation not in (None, "eager", "sdpa"):
            raise LatteError(
                "attn_implementation: the layers compute Latte's attention; expected 'eager' or"
                f" 'sdpa', which choose nothing, got {attn_implementation!r}: leave it out"
            )
        return "eager"  # with 'sdpa' Transformers would refuse output_attentions


class LattePreTrainedModel(OwnAttention, PreTrainedModel):
    """Loading, saving and initialisation that all Latte models share."""

    config: LatteConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LatteBlock"]
    _skip_keys_device_placement = list(KEYWORDS)
    # Transformers' own context parallelism would divide rows without passing the states on.
    _supports_context_parallel = False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Linear) and getattr(module, "writes_residual", False):
            # As in GPT-2: the scale of the residual stream does not depend on the depth.
            std = self.config.initializer_range / math.sqrt(2 * self.config.num_hidden_layers)
            init.normal_(module.weight, std=std)
        elif isinstance(module, nn.Embedding) and self.config.embedding_initializer_range:
            init.normal_(module.weight, std=self.config.embedding_initializer_range)
            if module.padding_idx is not None and not getattr(module.weight, LOADED, False):
                # A slice does not have the mark of loaded weights, hence the check above.
                init.zeros_(module.weight[module.padding_idx])
        else:
            initialise(module)


@dataclass
class DecoderOutput(BaseModelOutputWithPast):
    """Transformers' own, and the bounds (N + 1,) of packed sequences, as given or as found."""

    cu_seq_lens_q: Tensor | None = None


class LatteModel(LattePreTrainedModel):
    """Embeddings, decoder blocks and the final norm."""

    block_class: type[nn.Module] = LatteBlock
    shards: Any = None  # the processes that hold the tokens before, set by latte.parallel

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
        self.sink_edge = sink_edge(config.sliding_window, config.num_sinks)
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(
            self.block_class(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = make_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    @property
    def steps(self) -> bool:
        """Whether all layers can decode a token in place."""
        return StepPlan.of(self).able

    def make_step_plan(self) -> StepPlan:
        """The modules that a step of the present layers calls, and the weights that it reads."""
        layers: Any = self.layers
        own = {type(x) for x in layers if type(x).forward is LatteBlock.forward}
        return StepPlan([layer.parts for layer in layers], [self.norm], own)

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
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        seq_idx: Tensor | None = None,
        cache: LatteCache | None = None,
    ) -> DecoderOutput:
        """Compute the hidden states of a batch, of its next tokens, or of packed sequences.

        Args:
            input_ids: Token ids, (B, T).
            attention_mask: Mask, (B, P + T), 1 = a valid token. It covers the cached tokens too.
                Padding may be on either side; with a cache, pad on the left of the first call.
                Masked tokens between real ones keep their places in windows and convolutions. So
                padding after a row's cached tokens is refused, where a call has several new tokens
                and a layer has a window or a convolution.
            position_ids: Positions, (B, T). By default the valid tokens of each sequence are
                counted.
            past_key_values: :class:`LatteCache`, read and updated.
            inputs_embeds: Embeddings, (B, T, E), instead of ``input_ids``.
            use_cache: Whether to return the cache. By default ``config.use_cache``; not in
                training.
            output_attentions: Whether to return the weights p(s|t) too, (B, H, T, P + T) per
                layer. This takes O(T^2) memory, and a cache then keeps the keys of every token.
                If gradients are recorded, they flow through these weights.
            output_hidden_states: Whether to return the hidden states before each layer and at the
                end.
            cu_seq_lens_q: Bounds of N sequences packed into one row (B = 1), (N + 1,) int32. The
                sequences do not see each other. Without it, a single row without mask and cache
                is split where its positions start again. A graph of ``torch.compile`` does this
                if it makes no cache, for at most 256 sequences.
            cu_seq_lens_k, max_length_q, max_length_k: Arguments that packing collators send. They
                are ignored; ``cu_seq_lens_q`` is enough.
            seq_idx: Number of each token's sequence, (1, T), which some collators send instead of
                bounds. It is read if there is no ``cu_seq_lens_q``.
            cache: The same as ``past_key_values``, by its name since Transformers 5.24.

        Raises:
            ValueError: The arguments do not fit together, or a token id is not in the vocabulary
                (see :func:`latte.models.inputs.embed`).
        """
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        inputs = prepare_inputs(
            self,
            input_ids,
            inputs_embeds,
            attention_mask,
            position_ids,
            one_cache(past_key_values, cache),
            use_cache,
            cu_seq_lens_q,
            seq_idx,
            causal=self.config.is_causal,
            steps=not output_attentions,
        )
        cache = inputs.cache
        if output_attentions and cache is not None:
            cache.keep_sources()
        hidden_states: list[Tensor] = []
        attentions = []
        if inputs.buffers is not None:
            seen = hidden_states if output_hidden_states else None
            hidden = self.step(inputs, seen)[:, None]
        else:
            hidden, rotary = self._embed(inputs)
            context = inputs.context(rotary)
            for index, layer in enumerate(self._layers()):
                hidden_states.append(hidden)
                state = None if cache is None else cache.state(index)
                hidden, after, weights = layer(hidden, context, state, output_attentions)
                attentions.append(weights)
                if cache is not None:
                    cache.update(after, hidden.shape[1], index)
            hidden = self.norm(hidden)
        if cache is not None:
            cache.end()
        hidden_states.append(hidden)
        return DecoderOutput(
            last_hidden_state=hidden,
            hidden_states=tuple(hidden_states) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None,
            cu_seq_lens_q=inputs.cu_seq_lens,
            **{CACHE_NAME: cache},
        )

    def step(self, inputs: DecoderInputs, hidden_states: list[Tensor] | None = None) -> Tensor:
        """The last hidden states, (B, E), of one token per row. :meth:`forward` calls this.

        Args:
            inputs: Prepared inputs with ``buffers``, which are overwritten.
            hidden_states: List that gets the input of each layer, (B, 1, E).

        Raises:
            ValueError: The inputs are not a step.
        """
        if inputs.buffers is None:
            raise ValueError("step: expected inputs with the buffers of a step, got none")
        x_BTE, rotary = self._embed(inputs)
        plan = inputs.buffers[0].step_context.plan
        layers = plan.layers or self.make_step_plan().layers
        layers = layers[: self.config.num_hidden_layers]  # fewer in drafts by early exit
        x_BE = run_layers(layers, x_BTE[:, 0], inputs.buffers, rotary, hidden_states)
        return plan.norm(self.norm, x_BE)

    @property
    def mixers(self) -> list[Any]:
        """The layers' mixers."""
        return [layer.mixer for layer in self.layers]

    def _layers(self) -> Iterator[Any]:
        """The layers to run. ``generate`` lowers their number for drafts by early exit."""
        return islice(self.layers, self.config.num_hidden_layers)

    def _embed(self, inputs: DecoderInputs) -> tuple[Tensor, Rotary | None]:
        """The embeddings with positions added, and the rotary table that all layers share."""
        x_BTE, rotary = inputs.x_BTE, None
        if (scale := self.config.embedding_scale) != 1:
            x_BTE = x_BTE * scale
        if self.positions is not None or self.rotary is not None:
            position_ids = inputs.positions()
            if self.rotary is not None:
                rotary = self.rotary(position_ids, x_BTE.dtype, self.sink_edge)
                if inputs.buffers is not None:
                    rotary = of_single_tokens(rotary)
            if self.positions is not None:
                x_BTE = x_BTE + self.positions(position_ids, x_BTE.dtype)
        return self.dropout(x_BTE), rotary


class LatteForCausalLM(StateGenerationMixin, LattePreTrainedModel):
    """A decoder with a language-modelling head, tied to the embeddings by default."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    # forward() divides by num_items_in_batch itself, which Trainer would otherwise not know.
    accepts_loss_kwargs = True
    # In training, compute the loss in chunks and return no logits (see latte.lab.train.speed).
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

    @hides("shift_labels")
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
        seq_idx: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        cache: LatteCache | None = None,
    ) -> CausalLMOutputWithPast:
        """Compute logits (B, T, vocabulary), and the loss if there are labels.

        Args:
            labels: Labels, (B, T), which are shifted here. A label of -100 is not predicted. The
                first token of a packed sequence is not predicted either, because the token before
                it belongs to another text.
            logits_to_keep: Number of last tokens whose logits are computed (0: all), or their
                positions as a 1-D tensor.
            shift_labels: Labels, (B, T), that are shifted already: the label of the token after
                each. They replace ``labels``; some collators and sequence parallelism send them.
            num_items_in_batch: Number by which the summed loss is divided, instead of this batch's
                number of targets.

        The other arguments are those of :class:`LatteModel`.

        Raises:
            ValueError: The arguments do not fit together.
        """
        check_tensors(labels=labels, shift_labels=shift_labels)
        scored = labels if shift_labels is None else shift_labels
        cache = one_cache(past_key_values, cache)
        if scored is not None and use_cache is None and cache is None:
            use_cache = False  # a loss needs no states
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            cu_seq_lens_q=cu_seq_lens_q,
            seq_idx=seq_idx,
        )
        hidden = outputs.last_hidden_state
        if isinstance(logits_to_keep, Tensor):
            hidden = hidden[:, logits_to_keep]
        elif logits_to_keep:
            hidden = hidden[:, -logits_to_keep:]
        loss = logits = None
        in_chunks = self.chunked_loss and self.training and scored is not None
        # The loss in chunks reads the head's weight, which is all of a plain linear map.
        in_chunks = in_chunks and type(self.lm_head) is nn.Linear and not is_hooked(self.lm_head)
        if not in_chunks:
            logits = linear_maps(hidden, self.lm_head)[0]
        if scored is not None:
            if hidden.shape[:2] != scored.shape:
                raise ValueError(
                    f"labels must be {tuple(hidden.shape[:2])}, one per logit (labels and "
                    f"logits_to_keep do not go together), got {tuple(scored.shape)}"
                )
            if labels is not None and outputs.cu_seq_lens_q is not None:
                labels = labels_within(labels, outputs.cu_seq_lens_q)
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
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE_NAME: getattr(outputs, CACHE_NAME)},
        )


def language_model(config: Any) -> Any:
    """A freshly initialised language model of any causal config, ours or a library's."""
    plain = type(config) is LatteConfig
    model = LatteForCausalLM(config) if plain else AutoModelForCausalLM.from_config(config)
    # Transformers' own, which would start the states of many libraries' models anew on every part.
    model._supports_context_parallel = False
    return model


class LatteForSequenceClassification(LattePreTrainedModel):
    """A classifier over the mean of the valid tokens' hidden states.

    With ``is_causal=False`` in the configuration the layers are bidirectional. That is better for
    a classifier trained from scratch. A pretrained language model keeps its causal layers.
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
        """Compute logits (B, labels), and the loss if there are labels.

        Args:
            labels: Classes (B,), targets of a regression (B,) or (B, labels), or several classes
                at once (B, labels). ``config.problem_type`` decides, as in Hugging Face.

        The other arguments are those of :class:`LatteModel`.
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
    """The mean over the valid tokens of each row, (B, E); zero for a row without any."""
    if attention_mask is None:
        return hidden_BTE.mean(1)
    real_BT1 = attention_mask.bool().unsqueeze(-1)
    # where, not a product: padding must not matter, even if its values are not finite.
    total_BE = hidden_BTE.where(real_BT1, 0.0).sum(1)
    return total_BE / real_BT1.sum(1).clamp_min(1)
