"""The named models of the paper and their controls, at several sizes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from latte.errors import LatteError
from latte.models.config import LatteConfig
from latte.models.registry import (
    find_mixer,
    mixer_names,
    preset_fields,
    preset_names,
    register_preset,
)

# "++" is RMSNorm and SwiGLU, the config's defaults. Plain mixers, which look at x alone, need
# positions; the convolution and the RG-LRU make them unnecessary, and windows have rotary ones.
_PLAIN = {"latent_input": "none", "position": "sinusoidal"}

_PRESETS: dict[str, dict[str, Any]] = {
    "latte": {"mixer": "latte", **_PLAIN, "norm": "layernorm", "mlp": "gelu"},
    "latte++": {"mixer": "latte", **_PLAIN},
    "latte-conv++": {"mixer": "latte", "latent_input": "conv", "position": "none"},
    "latte-conv-swa++": {"mixer": "macchiato", "latent_input": "conv", "position": "rope"},
    "latte-r++": {"mixer": "latte", "latent_input": "rglru", "position": "none"},
    "latte-r-swa++": {"mixer": "macchiato", "latent_input": "rglru", "position": "rope"},
    "r-swa++": {"mixer": "swa", "latent_input": "rglru", "position": "rope"},
    "swa++": {"mixer": "swa", "latent_input": "none", "position": "rope"},
    "transformer++": {"mixer": "softmax", "latent_input": "none", "position": "rope"},
    "linear++": {"mixer": "linear", **_PLAIN},
}

_SIZES: dict[str, dict[str, Any]] = {
    # The demo's model: bytes, and a window well below the training length.
    "tiny": {
        "vocab_size": 260,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "num_latents": 64,
        "sliding_window": 64,
        "max_position_embeddings": 256,
    },
    # About 10M parameters with a vocabulary of about 8,000.
    "small": {
        "vocab_size": 8192,
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
        "num_latents": 64,
        "sliding_window": 128,
        "max_position_embeddings": 512,
    },
    "paper": {
        "vocab_size": 50267,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "intermediate_size": 3072,
        "num_latents": 128,
        "sliding_window": 128,
        "max_position_embeddings": 1024,
        "embedding_dropout": 0.1,
        "hidden_dropout": 0.1,
    },
    "400m": {
        "vocab_size": 50267,
        "hidden_size": 1024,
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "num_latents": 256,
        "sliding_window": 128,
        "max_position_embeddings": 2048,
    },
    "2.6b": {
        "vocab_size": 50267,
        "hidden_size": 2560,
        "num_hidden_layers": 23,
        "num_attention_heads": 20,
        "intermediate_size": 10240,
        "num_latents": 320,
        "sliding_window": 128,
        "max_position_embeddings": 4096,
    },
}

for _name, _fields in _PRESETS.items():
    register_preset(_name, **_fields)

PRESETS = tuple(_PRESETS)
SIZES = tuple(_SIZES)


def preset_config(name: str, size: str = "tiny", **overrides: Any) -> LatteConfig:
    """The configuration of a named model at a named size.

    Args:
        name: one of ``PRESETS``, e.g. ``"latte-r-swa++"``, or a registered one.
        size: one of ``SIZES``.
        overrides: any field of :class:`LatteConfig`, e.g. ``vocab_size=8192``.

    Raises:
        LatteError: an unknown name, size or field, or sizes that do not fit.
    """
    preset = preset_fields(name)
    if preset is None:
        raise LatteError(f"unknown preset {name!r}, expected one of {', '.join(preset_names())}")
    if size not in _SIZES:
        raise LatteError(f"unknown size {size!r}, expected one of {', '.join(SIZES)}")
    known = {field.name for field in fields(LatteConfig)} | {"num_labels"} | set(preset)
    for field in overrides:
        if field not in known:
            raise LatteError(f"unknown field {field!r} of LatteConfig")
    sizes = dict(_SIZES[size])
    mixer = overrides.get("mixer", preset["mixer"])
    for field in ("num_latents", "sliding_window"):
        if mixer in mixer_names() and field not in find_mixer(mixer).uses:
            sizes[field] = None
    return LatteConfig(**(sizes | preset | overrides))
