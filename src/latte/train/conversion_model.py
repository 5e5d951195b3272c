"""The model that a conversion trains: the base converted, frozen but for what is to be trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from latte.conversion.pretrained import (
    converted_config,
    is_converted,
    load_base,
)
from latte.errors import LatteError
from latte.train.recipe import ConversionSection

LORA = ".lora_"  # in the name of every parameter that peft adds


def starting_config(section: ConversionSection) -> Any:
    """The configuration of the model to train. Raises LatteError for a base that will not do."""
    assert section.base is not None
    wanted = section.fields()
    if not is_converted(section.base):
        return converted_config(section.base, wanted)
    from transformers import AutoConfig

    from latte import conversion  # noqa: F401  registers the Auto classes

    try:
        config: Any = AutoConfig.from_pretrained(section.base)
    except (ValueError, OSError, TypeError) as error:
        line = " ".join(str(error).split())
        raise LatteError(f"base {section.base} cannot be read: {line}") from None
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise LatteError(
                f"base {section.base} has been converted with {name}={getattr(config, name)!r};"
                f" expected that in the recipe too, got {value!r}"
            )
    return config


def starting_model(section: ConversionSection, seed: int) -> Any:
    """The converted model in training mode, with gradients for what `trainable` names alone.

    What is trained is fp32 at least, whatever the base's precision.
    """
    config = starting_config(section)
    assert section.base is not None
    model = load_base(section.base, config, seed=seed, dtype=section.dtype)
    if section.trainable != "all":
        keep_trainable(model, section.trainable)
    if section.trainable == "lora":
        add_lora(model, section, seed)
    for parameter in model.parameters():
        if parameter.requires_grad:  # small steps are lost in half precision
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    return model.train()


def keep_trainable(model: Any, trainable: str) -> None:
    """Freeze all but the new weights: no gradient and no optimiser state for the base's."""
    from latte.conversion.modeling import NEW_WEIGHTS

    for name, parameter in model.named_parameters():
        parameter.requires_grad_(NEW_WEIGHTS in name)


def add_lora(model: Any, section: ConversionSection, seed: int) -> None:
    """Low-rank updates (arXiv 2106.09685) of chosen projections, by peft, in place."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise LatteError(
            "conversion.trainable=lora needs peft, which is not installed;"
            " pip install 'latte-attention[peft]'"
        ) from None
    names = {name.rsplit(".", 1)[-1] for name, m in model.named_modules() if ".latents" not in name}
    for target in section.lora_targets:
        if target not in names:
            raise LatteError(
                f"conversion.lora_targets: expected modules of the base, such as q_proj, got"
                f" {target!r}"
            )
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    config = LoraConfig(
        r=section.lora_rank,
        lora_alpha=section.lora_alpha,  # type: ignore[arg-type]
        target_modules=rf".*(?<!latents)\.({'|'.join(section.lora_targets)})",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():  # peft freezes all but its own
        parameter.requires_grad_(LORA in name or name in trained)


def merged_lora(state: dict[str, torch.Tensor], section: ConversionSection) -> dict[str, Any]:
    """A state dict with the low-rank updates added to the base's weights, under their names."""
    scale = section.lora_alpha / section.lora_rank
    merged = {}
    for name, weight in state.items():
        if LORA in name:
            continue
        plain = name.replace(".base_layer.", ".")
        if plain != name and name.endswith(".weight"):
            stem = name.removesuffix(".base_layer.weight")
            down = state[f"{stem}.lora_A.default.weight"].float()
            up = state[f"{stem}.lora_B.default.weight"].float()
            weight = (weight.float() + scale * (up @ down)).to(weight.dtype)
        merged[plain] = weight
    return merged


@contextmanager
def mixing(model: Any, value: str) -> Iterator[None]:
    """Within it the model mixes as `value` says: `learned`, `window`, `latents` or `base`.

    As `base` it is the base itself: low-rank updates are off too.
    """
    from latte.conversion.attention import MacchiatoAttention

    layers = [m for m in model.modules() if isinstance(m, MacchiatoAttention)]
    adapters = [m for m in model.modules() if hasattr(m, "lora_A")] if value == "base" else []
    before = [layer.mixing for layer in layers]
    configured = model.config.mixing
    try:
        model.config.mixing = value
        for layer in layers:
            layer.mixing = value
        for adapter in adapters:
            adapter._disable_adapters = True  # its method would change what is trained
        yield
    finally:
        model.config.mixing = configured
        for layer, old in zip(layers, before, strict=True):
            layer.mixing = old
        for adapter in adapters:
            adapter._disable_adapters = False
