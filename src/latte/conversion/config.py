"""The configurations of converted models: the base's fields, Latte's fields, and their checks.

The package's table for Transformers' Auto classes has their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import transformers
from huggingface_hub.dataclasses import strict

from latte.conversion.bases import BASES
from latte.layers.kept_range import KeptRange
from latte.layers.latent_fields import (
    ConvertedFields,
    check_kept,
    check_one,
    option,
    options_of,
    window_option,
)
from latte.models.config import one_line_errors

Mixing = Literal["learned", "window", "latents", "base"]
MIXINGS = get_args(Mixing)


@dataclass(kw_only=True, repr=False)
class MacchiatoFields(ConvertedFields):
    """Fields that every ``macchiato_*`` configuration adds to its base's."""

    # The window of converted layers. `sliding_window` is still the base's: layers that are not
    # converted use it, and so does the base's attention in converted layers, as a teacher.
    local_window: int = window_option()
    # The base's own attention, as `mixing="base"` has it, has quadratic cost.
    mixing: Mixing = option(
        "learned",
        "`learned` is the trained model; `window` (p(l=0) = 1), `latents` (p(l=0) = 0) and `base`"
        " (the base's own attention) are controls",
        partial(check_one, choices=MIXINGS),
    )
    # The others have the base's own attention. They either have a window of their own, or are kept
    # layers of full attention (`keep_layers`), whose state grows with the text, except for
    # `kept_window`.
    converted_layers: Sequence[int] | None = option(
        None, "layers with a window and latents, by number from 0", none="all"
    )
    converted_from: str | None = option(
        None, "the base: its name on the Hub, its folder, or its GGUF file and the quantisation"
    )

    def __post_init__(self, **kwargs: Any) -> None:
        self.lists_to_tuples()
        super().__post_init__(**kwargs)  # type: ignore[misc]

    def validate_macchiato(self) -> None:
        """Part of ``@strict``: called whenever a configuration is made or changed."""
        self.check_options()
        heads: int = self.num_attention_heads  # type: ignore[attr-defined]
        if self.num_latents is None or self.num_latents % heads:
            raise ValueError(
                f"num_latents must be a multiple of num_attention_heads, got num_latents="
                f"{self.num_latents} and num_attention_heads={heads}"
            )
        layers = range(self.num_hidden_layers)  # type: ignore[attr-defined]
        chosen = self.converted_layers
        if chosen is not None and (not chosen or sorted(set(chosen) & set(layers)) != [*chosen]):
            raise ValueError(
                f"converted_layers must be rising numbers of some of {len(layers)} layers, got "
                f"{chosen!r}"
            )
        if not isinstance(self.kept_tokens, int) and len(self.kept_tokens) != len(layers):
            raise ValueError(
                f"kept_tokens must be one number, or one for each of {len(layers)} layers, got"
                f" {len(self.kept_tokens)} numbers"
            )
        most = max(map(self.kept_of, layers), default=0)
        check_kept(most, self.delay_latents, self.joint_softmax)
        self._check_range()
        hidden: int = self.hidden_size  # type: ignore[attr-defined]
        if self.latent_input == "rglru" and hidden % heads:
            raise ValueError(
                f"latent_input='rglru' needs a hidden_size that num_attention_heads divides, got "
                f"hidden_size={hidden} and num_attention_heads={heads}; use 'none' or 'conv'"
            )

    def _check_range(self) -> None:
        """Check that `kept_range` is within the base's range, and wider than the window."""
        longest: int = self.max_position_embeddings  # type: ignore[attr-defined]
        if self.kept_range is None:
            return
        if self.kept_range > longest:
            raise ValueError(
                f"kept_range must be at most max_position_embeddings={longest}, got"
                f" {self.kept_range}"
            )
        if KeptRange.of(self.kept_range, self.local_window, self.kept_block) is None:
            raise ValueError(
                f"kept_range={self.kept_range} is too short for a window of {self.local_window} and"
                f" blocks of {self.kept_block} tokens"
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

    def kept_of(self, layer_idx: int) -> int:
        """The number of tokens of each key/value head that a layer keeps beside its window."""
        if not self.is_converted(layer_idx):
            return 0
        kept = self.kept_tokens
        return kept if isinstance(kept, int) else kept[layer_idx]

    @property
    def full_layers(self) -> tuple[int, ...]:
        """The layers in which the base has full attention: those that can be converted."""
        layers = range(self.num_hidden_layers)  # type: ignore[attr-defined]
        return tuple(layer for layer in layers if self.base_window(layer) is None)

    @property
    def keep_layers(self) -> tuple[int, ...]:
        """The layers that keep the base's full attention."""
        return tuple(layer for layer in self.full_layers if not self.is_converted(layer))

    def has_window(self, layer_idx: int) -> bool:
        """Whether a layer has a window, and sinks, in the place of the base's own attention."""
        kept = self.kept_window is not None and self.base_window(layer_idx) is None
        return kept or self.is_converted(layer_idx)

    def mixing_of(self, layer_idx: int, mixing: Mixing | None = None) -> Mixing:
        """The mixing of a layer in a model of this mixing (None: the model's own)."""
        mixing = mixing or self.mixing
        if self.is_converted(layer_idx):
            return mixing
        return "window" if self.has_window(layer_idx) and mixing != "base" else "base"

    def window_of(self, layer_idx: int) -> int:
        """The number of keys that a layer's window sees, where it has one."""
        kept = self.has_window(layer_idx) and not self.is_converted(layer_idx)
        return self.kept_window if kept else self.local_window  # type: ignore[return-value]

    @property
    def layer_kinds(self) -> tuple[str | None, ...]:
        """The kinds of the base's layers, each once; (None,) if it has no kinds."""
        return tuple(dict.fromkeys(getattr(self, "layer_types", None) or [None]))

    def kept_sizes(self, layer_idx: int) -> tuple[int, int, int] | None:
        """Numbers of kept tokens, of the window's keys and of a block's tokens; None if none."""
        kept = self.kept_of(layer_idx) if self.mixing_of(layer_idx) != "base" else 0
        return (kept, self.window_of(layer_idx), self.kept_block) if kept else None

    def state_grows(self, layer_idx: int) -> bool:
        """Whether a layer's state keeps every token. Only the base's full attention does."""
        return self.mixing_of(layer_idx) == "base" and self.base_window(layer_idx) is None


OWN_FIELDS = tuple(each.name for each in options_of(MacchiatoFields))


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
