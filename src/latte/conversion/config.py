"""The configurations of converted models: the base's fields, Latte's fields, and their checks.

The package's table for Transformers' Auto classes has their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import transformers
from huggingface_hub.dataclasses import strict

from latte.conversion.bases import BASES
from latte.layers.checks import check_decay_range, check_half_lives, check_probability
from latte.layers.latent_input import FORGETTING, HALF_LIFE_RANGE, LATENT_INPUTS
from latte.layers.recurrent import DECAY_RANGE
from latte.models.config import one_line_errors

Mixing = Literal["learned", "window", "latents", "base"]
MIXINGS = ("learned", "window", "latents", "base")


@dataclass(kw_only=True)
class MacchiatoFields:
    """Fields that every ``macchiato_*`` configuration adds to its base's.

    Args:
        num_latents: Total number of latents over all query heads. Each head has ``num_latents /
            heads``.
        local_window: Number of keys that the window of converted layers sees, the current token
            included. ``sliding_window`` is still the base's own window. It holds for layers that
            are not converted, and for the teacher of those that are.
        converted_layers: Layers with a window and latents, by number from 0. The other layers have
            the base's own attention. They either have a window of their own, or are kept layers of
            full attention (:attr:`keep_layers`), whose state grows with the text. None means all
            layers.
        latent_input: Source of the latent logits: ``none`` (the layer's input x), ``conv`` or
            ``rglru`` (eq. 18-19).
        window_probability: Initial value of p(l=0), the window's share, set by a bias on the
            window's query logit.
        rglru_decay_range: Lowest and highest initial decay of the RG-LRU (Griffin's by default).
        forgetting, half_life_range: Forgetting of the latents, as in ``LatteConfig``. With delayed
            latents the decay is computed from the query's token.
        num_sinks: Number of first tokens of a sequence that stay visible to the window's softmax
            (arXiv 2309.17453). Their distance is at most that of the window's edge.
        delay_latents: Whether the latents read a token only when it has left the window, so that
            the two branches share no token. While none has left the window, p(l=0) is 1.
        joint_softmax: Whether the window's keys and the latents share one softmax. The log-mass of
            the window's logits is then added to the learned logit of p(l=0).
        mixing: Choice of the model or a control. ``learned`` is the model. The controls are
            ``window`` (p(l=0) = 1), ``latents`` (p(l=0) = 0) and ``base``, the base's own
            attention, of quadratic cost.
        converted_from: GGUF file of the base's weights, and its quantisation.
    """

    num_latents: int = 128
    local_window: int = 128
    latent_input: Literal["none", "conv", "rglru"] = "rglru"
    window_probability: float = 0.95
    rglru_decay_range: Sequence[float] = DECAY_RANGE
    forgetting: Literal["none", "static", "gated"] = "none"
    half_life_range: Sequence[float] = HALF_LIFE_RANGE
    num_sinks: int = 0
    delay_latents: bool = False
    joint_softmax: bool = False
    mixing: Mixing = "learned"
    converted_layers: Sequence[int] | None = None
    converted_from: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for name in ("rglru_decay_range", "half_life_range", "converted_layers"):
            if isinstance(getattr(self, name), list):  # as read from JSON
                setattr(self, name, tuple(getattr(self, name)))
        super().__post_init__(**kwargs)  # type: ignore[misc]

    def validate_macchiato(self) -> None:
        """Part of ``@strict``: called whenever a configuration is made or changed."""
        heads: int = self.num_attention_heads  # type: ignore[attr-defined]
        for name in ("local_window", "num_latents", "num_sinks"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{name} must be a whole number, got {value!r}")
        for name, choices in (
            *(("mixing", MIXINGS), ("latent_input", LATENT_INPUTS)),
            ("forgetting", FORGETTING),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {getattr(self, name)!r}")
        if self.local_window < 1:
            raise ValueError(f"local_window must be at least 1 key, got {self.local_window}")
        if self.num_latents < 1 or self.num_latents % heads:
            raise ValueError(
                f"num_latents must be a multiple of num_attention_heads, got num_latents="
                f"{self.num_latents} and num_attention_heads={heads}"
            )
        check_probability("window_probability", self.window_probability)
        check_decay_range("rglru_decay_range", self.rglru_decay_range)
        check_half_lives("half_life_range", self.half_life_range)
        if self.num_sinks < 0:
            raise ValueError(f"num_sinks must be 0 or more, got {self.num_sinks}")
        layers = range(self.num_hidden_layers)  # type: ignore[attr-defined]
        chosen = self.converted_layers
        if chosen is not None and (not chosen or sorted(set(chosen) & set(layers)) != [*chosen]):
            raise ValueError(
                f"converted_layers must be rising numbers of some of {len(layers)} layers, got "
                f"{chosen!r}"
            )
        hidden: int = self.hidden_size  # type: ignore[attr-defined]
        if self.latent_input == "rglru" and hidden % heads:
            raise ValueError(
                f"latent_input='rglru' needs a hidden_size that num_attention_heads divides, got "
                f"hidden_size={hidden} and num_attention_heads={heads}; use 'none' or 'conv'"
            )

    def base_window(self, layer_idx: int) -> int | None:
        """The window of the base's own attention in a layer; None is full attention."""
        kinds = getattr(self, "layer_types", None)
        if kinds is not None and kinds[layer_idx] != "sliding_attention":
            return None
        return getattr(self, "sliding_window", None)

    def is_converted(self, layer_idx: int) -> bool:
        """Whether a layer has a window and latents in the place of the base's own attention."""
        return self.converted_layers is None or layer_idx in self.converted_layers

    @property
    def full_layers(self) -> tuple[int, ...]:
        """The layers in which the base has full attention: those that can be converted."""
        layers = range(self.num_hidden_layers)  # type: ignore[attr-defined]
        return tuple(layer for layer in layers if self.base_window(layer) is None)

    @property
    def keep_layers(self) -> tuple[int, ...]:
        """The layers that keep the base's full attention."""
        return tuple(layer for layer in self.full_layers if not self.is_converted(layer))

    def state_grows(self, layer_idx: int) -> bool:
        """Whether a layer's state keeps every token. Only the base's full attention does."""
        own = self.mixing == "base" or not self.is_converted(layer_idx)
        return own and self.base_window(layer_idx) is None


OWN_FIELDS = tuple(MacchiatoFields.__dataclass_fields__)


def _converted(base: Any) -> Any:
    """The configuration class of a base's converted models, ``@strict`` like the base's."""
    fields = {"model_type": f"macchiato_{base.model_type}", "__module__": __name__}
    config: Any = strict(type(f"Macchiato{base.__name__}", (MacchiatoFields, base), fields))
    one_line_errors(config)
    globals()[config.__name__] = config  # pickle looks for it there
    return config


CONFIGS: dict[str, Any] = {
    family: _converted(getattr(transformers, f"{prefix}Config")) for family, prefix in BASES.items()
}
