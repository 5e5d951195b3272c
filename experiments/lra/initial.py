"""A classifier that begins with a trained checkpoint's encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from latte.errors import LatteError
from latte.lab.evaluate.checkpoint import check_weights, find_checkpoint, load_config

# Fields of a config by which weights of the same shapes compute something else. Whether both sides
# are read is left to the classifier.
DECISIVE = (
    "mixer", "latent_input", "num_attention_heads", "norm", "norm_eps", "mlp", "position",
    "rope_theta", "attn_logit_softcapping", "feature_map", "embedding_scale",
)  # fmt: skip


def load_encoder(model: Any, path: str | Path) -> list[str]:
    """Give a classifier the encoder of a checkpoint of Latte, and its head if it fits.

    The encoder's weights, those under `model.`, must all be there with the same shapes: a language
    model of bytes, or the same classifier trained on shorter sequences.

    Returns:
        the names of the weights that are the model's own, those of a head that did not fit.

    Raises:
        LatteError: no checkpoint, a damaged one, a model of another kind, weights of other
            shapes, or a field by which the same weights compute something else; the first one is
            named.
    """
    folder = find_checkpoint(path)
    config = load_config(folder)
    if config.model_type != model.config.model_type:
        raise LatteError(
            f"checkpoint {folder} holds a model of another kind: expected"
            f" {model.config.model_type!r}, found {config.model_type!r}"
        )
    windowed = "sliding_window" in getattr(config, "mixer_uses", ())
    for name in (*DECISIVE, "sliding_window") if windowed else DECISIVE:
        there, here = getattr(config, name, None), getattr(model.config, name, None)
        if there != here:
            raise LatteError(
                f"checkpoint {folder} does not fit: {name} is {there!r} there and {here!r} here"
            )
    check_weights(folder)
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    own, fresh = model.state_dict(), []
    for name, value in own.items():
        there = tuple(found[name].shape) if name in found else None
        if there == tuple(value.shape):
            own[name] = found[name]
        elif name.startswith(f"{model.base_model_prefix}."):
            raise LatteError(
                f"checkpoint {folder} does not fit: {name} is {there or 'missing'} there and"
                f" {tuple(value.shape)} here"
            )
        else:
            fresh.append(name)
    for name in found:
        if name not in own and name.startswith(f"{model.base_model_prefix}."):
            raise LatteError(f"checkpoint {folder} does not fit: {name} is there and not here")
    model.load_state_dict(own)
    return fresh
