"""Models of :class:`TrialMixer`: their configuration and blocks, and the name `trial`.

The module is a plugin. A recipe that names it in `plugins` can have `model.preset: trial`, or `gsa`
or `raven`, whose blocks have gated slot attention or Raven as their mixer.
"""

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Literal, cast

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from experiments.ingredients.gsa import GatedSlotAttention
from experiments.ingredients.mixer import TrialMixer
from experiments.ingredients.raven import Raven
from latte.errors import LatteError
from latte.layers import RecurrentBlock
from latte.models import LatteConfig, preset_config
from latte.models.config import one_line_errors
from latte.models.modeling import LatteForCausalLM, LatteModel
from latte.models.registry import (
    ModelEntry,
    register_mixer,
    register_model,
    register_preset,
)

BASE = "latte-conv-swa-f++"  # the preset without any part
SIZE_FIELDS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("intermediate_size", "num_latents", "sliding_window", "max_position_embeddings"),
)


@strict
class TrialConfig(LatteConfig):
    r"""Configuration of a trial. Without its own fields it is `latte-conv-swa-f++`.

    Args:
        output_gate, value_skip, short_conv, output_norm, written_latents, write_noise, qk_norm,
            one_softmax, kept_by, content_width: Arguments of :class:`TrialMixer`.
        half_lives_by_layer: Whether the half-lives of ``half_life_range`` are short in the first
            layers and long in the last ones (:func:`layer_half_lives`).
        small_recurrence: Whether convolution and gates of recurrent blocks begin as in Griffin.
        output_range: Standard deviation of the initial output maps of mixers. None: that of every
            model, ``initializer_range / sqrt(2 * num_hidden_layers)``.
        mlp_range: Standard deviation of all initial matrices of the MLPs. None: that of every
            model, ``initializer_range``, and for the output as for those of mixers.

    Raises:
        LatteError: The errors of LatteConfig.
    """

    model_type = "latte_trial"

    mixer: str = "trial"
    latent_input: Literal["none", "conv", "rglru"] = "conv"
    forgetting: Literal["none", "static", "gated"] = "gated"
    output_gate: bool = False
    value_skip: bool = False
    short_conv: Literal["none", "v", "qkv"] = "none"
    written_latents: int | None = None
    write_noise: float | int = 0.0
    qk_norm: bool = False
    output_norm: bool = False
    one_softmax: bool = False
    kept_by: str = "none"
    content_width: int = 0
    half_lives_by_layer: bool = False
    small_recurrence: bool = False
    output_range: float | int | None = None
    mlp_range: float | int | None = None

    def check_options(self) -> None:
        super().check_options()
        if "recurrent" in self.block_types and self.half_lives_by_layer:
            raise ValueError(
                "half_lives_by_layer: expected no recurrent blocks beside it, which have no"
                f" half-lives, got block_types={list(self.block_types)}"
            )


one_line_errors(TrialConfig)


def layer_half_lives(config: TrialConfig, index: int) -> tuple[float, float]:
    """The range of initial half-lives of layer ``index``, in tokens.

    On a logarithmic scale it is half as wide as ``half_life_range``. It begins at the lower end of
    that range in the first layer, and ends at the upper end in the last.
    """
    low, high = config.half_life_range
    ratio = high / low
    start = 0.5 * index / max(1, config.num_hidden_layers - 1)
    return low * ratio**start, low * ratio ** (start + 0.5)


def initial_ranges(config: TrialConfig, layer: Any) -> Iterator[tuple[Tensor, float]]:
    """The matrices of a block that begin otherwise than in every model, and their deviation."""
    if config.output_range is not None:
        yield layer.mixer.o_proj.weight, config.output_range
    if config.mlp_range is not None and layer.mlp is not None:
        for linear in layer.mlp.children():
            yield linear.weight, config.mlp_range
    if config.small_recurrence and isinstance(layer.mixer, RecurrentBlock):
        rglru = layer.mixer.rglru
        for each in (layer.mixer.short_conv, rglru.input_gate, rglru.recurrence_gate):
            # Griffin's variance is 0.01 over the number of inputs.
            yield each.weight, 0.1 / math.sqrt(each.weight.shape[-1])


class TrialModel(LatteModel):
    """Embeddings, blocks and the final norm."""

    config: TrialConfig

    def __init__(self, config: TrialConfig) -> None:
        super().__init__(config)
        with torch.no_grad():
            for layer in self.layers:
                for weight, std in initial_ranges(config, layer):
                    weight.normal_(std=std)
        if config.half_lives_by_layer:
            for index, layer in enumerate(self.layers):
                latents = cast(Any, layer).mixer.latents
                latents.half_life_range = layer_half_lives(config, index)
                latents.reset_parameters()


class TrialForCausalLM(LatteForCausalLM):
    """A language model of the trial's blocks."""

    config: TrialConfig
    backbone_class = TrialModel  # type: ignore[assignment]


class Trial(ModelEntry):
    """The model `trial`, at the sizes of all presets."""

    def config(self, size: str, **overrides: Any) -> TrialConfig:
        """Its configuration; :class:`TrialConfig` says what can be set."""
        known = {field.name for field in fields(TrialConfig)}
        for name in overrides:
            if name not in known:
                raise LatteError(f"unknown field {name!r} of TrialConfig")
        base = preset_config(BASE, size)
        return TrialConfig(**{name: getattr(base, name) for name in SIZE_FIELDS} | overrides)


AutoConfig.register(TrialConfig.model_type, TrialConfig, exist_ok=True)
AutoModelForCausalLM.register(TrialConfig, TrialForCausalLM, exist_ok=True)
register_mixer("trial", TrialMixer)
register_model(Trial("trial", TrialConfig.model_type))
register_mixer("gsa", GatedSlotAttention)
register_preset("gsa", mixer="gsa", latent_input="none", position="none")
register_mixer("raven", Raven)
register_preset("raven", mixer="raven", latent_input="none", position="none")
