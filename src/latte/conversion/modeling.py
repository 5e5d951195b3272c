"""Converted models: a pretrained decoder's own classes, with Latte-Macchiato as the attention.

Parameter names are the base's. Only ``layers.*.self_attn.latents.*`` is new. So a base is converted
by ``from_pretrained(base, config=...)``. Shape suffixes: B batch, T tokens, P past tokens, N packed
sequences.
"""

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from latte.conversion import step
from latte.conversion.attention import MacchiatoAttention
from latte.conversion.bases import BASES
from latte.conversion.config import CONFIGS
from latte.conversion.long_texts import Given, check_packed, in_parts, turning_places
from latte.conversion.step import Table
from latte.errors import LatteError
from latte.layers import RMSNorm
from latte.layers.kept_range import KeptRange
from latte.layers.plan import StepPlan
from latte.layers.step import run_layers
from latte.models.cache import LatteCache
from latte.models.cache_name import CACHE_NAME, one_cache
from latte.models.generation import StateGenerationMixin
from latte.models.inputs import (
    DecoderInputs,
    check_positions,
    check_tensors,
    packed_bounds,
    prepare_inputs,
    unread_in_graph,
)
from latte.models.loss import labels_within, next_token_loss
from latte.models.modeling import OwnAttention, initialise
from latte.ops.widened import widened

NEW_WEIGHTS = ".latents."  # in the name of every parameter that a base does not have
FARTHEST = 2**31 - 1  # a position that no token has


class MacchiatoPreTrained(OwnAttention):
    """The parts that decoder and language model share: initial values and dtype of new weights."""

    # New weights are a tenth of a percent of all weights, and the mixture depends on all digits.
    _keep_in_fp32_modules_strict: Any = {"latents"}
    _supports_flash_attn = False
    _supports_flex_attn = False
    _can_compile_fullgraph = False
    _supports_context_parallel = False  # Transformers' own does not pass states between processes

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[misc]
        initialise(module)
        if isinstance(module, RMSNorm):
            init.ones_(module.weight)  # Gemma's norms multiply by 1 + weight, and start at 0


class MacchiatoDecoder(MacchiatoPreTrained):
    """The decoder. It comes before the base's class in the bases, and replaces its attention."""

    softcap_field: str | None = None  # the field of the config with the attention's soft cap
    masks_by_kind = False  # whether the base takes a dict of masks, one per kind of layer
    rotary_by_kind = False  # whether it has one rotary embedding per kind of layer
    shards: Any = None  # the processes that hold the tokens before, set by latte.parallel

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        softcap = None if self.softcap_field is None else getattr(config, self.softcap_field)
        for layer in self.layers:  # type: ignore[attr-defined]
            layer.self_attn = MacchiatoAttention(layer.self_attn, config, softcap)
        # A conversion can be loaded as a hybrid, with fewer converted layers than it has, and
        # without kept tokens.
        unused = [
            rf"layers\.{i}\.self_attn\.latents\.{'kept_scores' if config.is_converted(i) else ''}"
            for i in range(config.num_hidden_layers)
            if not config.kept_of(i)
        ]
        self._keys_to_ignore_on_load_unexpected = unused
        kept = [layer for layer in range(config.num_hidden_layers) if config.kept_of(layer)]
        self._kept_range: KeptRange | None = None
        if config.kept_range and self.frequencies_by_length:
            raise LatteError(
                "kept_range: expected None for a base whose rotary frequencies change with the"
                f" length of a text, got {config.kept_range}"
            )
        if kept and not self.frequencies_by_length:
            positions = config.kept_range or config.max_position_embeddings
            self._kept_range = KeptRange.of(positions, config.local_window, config.kept_block)
        if config.far_sinks and config.num_sinks:
            edge = FARTHEST if self._kept_range is None else self._kept_range.limit - 1
            for index in kept:
                self.layers[index].self_attn.sink_edge = edge  # type: ignore[attr-defined]
        self.post_init()  # type: ignore[attr-defined]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: LatteCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cache: LatteCache | None = None,
        **kwargs: Any,
    ) -> Any:
        """The base's forward.

        Args:
            input_ids: Token ids, (B, T).
            attention_mask: Mask, (B, P + T), 1 = a valid token. It includes the cached tokens. With
                a cache, pad on the left of the first call: see :class:`latte.models.LatteModel`.
            position_ids: Positions, (B, T). By default the valid tokens of each sequence are
                counted.
            past_key_values: :class:`latte.models.LatteCache`, read and updated.
            inputs_embeds: Embeddings, (B, T, E), instead of ``input_ids``.
            use_cache: Whether to return the cache.
            cu_seq_lens_q: Bounds of N sequences packed into one row (B = 1), (N + 1,) int32.
                Without it, a single row without a mask is split where its positions start again.
            seq_idx: Number of each token's sequence, (1, T), instead of bounds.
            cache: The same as ``past_key_values``, by its name since Transformers 5.24.

        Raises:
            ValueError: The arguments do not fit together, or ``output_attentions`` is set.
        """
        if kwargs.get("output_attentions") or self.config.output_attentions:  # type: ignore[attr-defined]
            raise LatteError(
                "output_attentions: a converted model returns no weights; expected False. Latte's"
                " own models do, and latte inspect shows those of both"
            )
        cache = one_cache(past_key_values, cache)
        packed = cu_seq_lens_q is not None or seq_idx is not None
        # A teacher runs the base, which keeps no tokens.
        turned = None if kwargs.get("teacher") is not None else self.kept_range
        if turned is not None and not packed:
            given = Given(input_ids, inputs_embeds, attention_mask, position_ids)
            if starts := turning_places(self, given, cache):
                return in_parts(self, starts, given, cache, use_cache, **kwargs)
        inputs = prepare_inputs(
            self,
            *(input_ids, inputs_embeds, attention_mask, position_ids),
            *(cache, use_cache, cu_seq_lens_q, seq_idx),
            steps=not self._asks_base(kwargs),
        )
        x_BTE, cache, position_ids = inputs.x_BTE, inputs.cache, inputs.positions()
        if turned is not None:
            check_packed(turned, inputs.cu_seq_lens)
            if cache is not None:
                key_mask = inputs.key_mask
                cache.turn_kept(self, None if key_mask is None else key_mask[:, 0])
        if cache is not None and inputs.buffers is not None:
            hidden = self.step(inputs)[:, None]
            cache.end()
            return BaseModelOutputWithPast(hidden, cache)
        sinks = self._sink_embeddings(x_BTE, position_ids)
        # The base accepts this as a finished mask, so it builds none of T x T.
        mask: Any = x_BTE.new_zeros(1, 1, 1, 1)
        if self.masks_by_kind:
            mask = {"full_attention": None, "sliding_attention": None}
        with widened(x_BTE):
            outputs = super().forward(  # type: ignore[misc]
                inputs_embeds=x_BTE,
                attention_mask=mask,
                position_ids=position_ids,
                use_cache=cache is not None,
                context=inputs.context(sinks),
                **{CACHE_NAME: cache},
                **kwargs,
            )
        if cache is not None:
            cache.end()
        return outputs

    # --- kept tokens, beyond the base's range of positions ----------------------------------------

    @property
    def kept_range(self) -> KeptRange | None:
        """When far kept keys are turned; None if there are none."""
        mixing = self.config.mixing  # type: ignore[attr-defined]
        return self._kept_range if mixing in ("learned", "window") else None

    def kept_turns(self, device: torch.device) -> dict[str | None, tuple[Tensor, Tensor]]:
        """Cosines and sines by which far kept keys are turned, for each kind of layer."""
        assert self._kept_range is not None
        return step.turns_of(self, self._kept_range.every, device)

    @property
    def steps(self) -> bool:
        """Whether all layers can decode a token in place."""
        return StepPlan.of(self).able

    def make_step_plan(self) -> StepPlan:
        """The modules that a step of the present layers calls, and the weights that it reads."""
        model: Any = self
        parts = [step.parts_of(layer) for layer in model.layers]
        return StepPlan(parts, [model.norm], step.LAYERS)

    @property
    def mixers(self) -> list[Any]:
        """The layers' attention modules."""
        return [layer.self_attn for layer in self.layers]  # type: ignore[attr-defined]

    @property
    def frequencies_by_length(self) -> bool:
        """Whether rotary frequencies depend on the largest position of a call, of all its rows."""
        kinds = self.rotary_emb.rope_type  # type: ignore[attr-defined]
        each = kinds.values() if isinstance(kinds, dict) else [kinds]
        return any("dynamic" in kind or kind == "longrope" for kind in each)

    def _asks_base(self, asked: dict[str, Any]) -> bool:
        """Whether more is asked for than last hidden states: only the base's forward gives it."""
        config: Any = self.config  # type: ignore[attr-defined]
        if config.output_hidden_states or not config.return_dict:
            return True
        given = {name: x for name, x in asked.items() if x is not None}
        return "return_dict" in given or any(isinstance(x, Tensor) or x for x in given.values())

    def step(self, inputs: DecoderInputs) -> Tensor:
        """The last hidden states, as :meth:`latte.models.LatteModel.step` gives them."""
        if inputs.buffers is None:
            raise ValueError("step: expected inputs with the buffers of a step, got none")
        model: Any = self
        x_BE, context = inputs.x_BTE[:, 0], inputs.buffers[0].step_context
        rotations = step.rotations_of(model, x_BE, inputs.positions(), context)
        plan = context.plan
        layers = plan.layers or self.make_step_plan().layers
        layers = layers[: model.config.num_hidden_layers]
        return plan.norm(model.norm, run_layers(layers, x_BE, inputs.buffers, rotations))

    def _sink_embeddings(
        self, x_BTE: Tensor, position_ids: Tensor
    ) -> dict[Table, tuple[Tensor, Tensor]] | None:
        """The rotary tables by which queries look at the sinks."""
        if not self.config.num_sinks:  # type: ignore[attr-defined]
            return None
        tables = step.tables_of(self, x_BTE, position_ids)
        return {key: table[1] for key, table in tables.items() if table[1:]}


class MacchiatoLanguageModel(MacchiatoPreTrained, StateGenerationMixin):
    """The language model. It comes before the base's class in the bases, for another decoder."""

    backbone_class: type
    accepts_loss_kwargs = True  # the base's loss divides by num_items_in_batch

    def __init__(self, config: Any) -> None:
        # The base's __init__ is not called: it would make (and initialise) its own decoder first.
        PreTrainedModel.__init__(self, config)  # type: ignore[arg-type]
        self.model = self.backbone_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = step.Head(config.hidden_size, config.vocab_size, bias=False)
        self.loss_function = next_token_loss
        self.post_init()  # type: ignore[attr-defined]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: LatteCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seq_lens_q: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cache: LatteCache | None = None,
        **kwargs: Any,
    ) -> Any:
        """The base's forward, with the losses of :class:`latte.models.LatteForCausalLM`.

        The first token of a packed sequence is not predicted, because the token before it belongs
        to another text. The arguments are those of the base and of :class:`MacchiatoDecoder`.
        """
        cache = one_cache(past_key_values, cache)
        if labels is not None:
            if use_cache is None and cache is None:
                use_cache = False  # a loss needs no states
            tokens = input_ids if inputs_embeds is None else inputs_embeds
            check_tensors(labels=labels, seq_idx=seq_idx)
            check_positions(tokens, position_ids=position_ids, seq_idx=seq_idx)
            if cu_seq_lens_q is None and not unread_in_graph(tokens, bool(use_cache)):
                cu_seq_lens_q = packed_bounds(position_ids, attention_mask, cache, seq_idx)
            if cu_seq_lens_q is not None:
                labels = labels_within(labels, cu_seq_lens_q)
        given = {CACHE_NAME: cache, "labels": labels, "logits_to_keep": logits_to_keep}
        return super().forward(  # type: ignore[misc]
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cu_seq_lens_q=cu_seq_lens_q,
            seq_idx=seq_idx,
            **given,
            **kwargs,
        )


def _family(family: str, prefix: str, **traits: Any) -> tuple[Any, Any]:
    """The converted classes of a base's decoder and language model, with the decoder's traits."""
    shared = {"__module__": __name__, "__annotations__": {"config": CONFIGS[family]}}

    def derived(own: type, base: str, *more: type, **attributes: Any) -> Any:
        bases = (own, getattr(transformers, base), *more)
        made = type(f"Macchiato{base}", bases, {**shared, **attributes})
        globals()[made.__name__] = made  # where pickle looks for it
        return made

    model = derived(MacchiatoDecoder, f"{prefix}Model", **traits)
    causal = f"{prefix.removesuffix('Text')}ForCausalLM"
    # The second is a subclass of the last. Transformers' tests look for it among the direct bases.
    bases = MacchiatoLanguageModel, causal, GenerationMixin
    return model, derived(*bases, backbone_class=model)


_TRAITS: dict[str, dict[str, Any]] = {
    "gemma2": {"softcap_field": "attn_logit_softcapping", "masks_by_kind": True},
    # Its configuration has a soft cap, which its attention ignores.
    "gemma3_text": {"masks_by_kind": True, "rotary_by_kind": True},
    "qwen2": {"masks_by_kind": True},
    "qwen3": {"masks_by_kind": True},
}
FAMILIES: dict[str, tuple[Any, Any]] = {
    family: _family(family, prefix, **_TRAITS.get(family, {})) for family, prefix in BASES.items()
}
