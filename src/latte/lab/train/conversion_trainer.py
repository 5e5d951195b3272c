"""Training a converted model on next tokens: what is trained of it, hidden windows, distillation.

The model is the base converted, frozen but for what `conversion.trainable` names. It is its own
teacher, mixing as its base does: no second copy of the weights.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

from latte.conversion.landmarks import set_landmarks
from latte.conversion.modeling import NEW_WEIGHTS
from latte.conversion.pretrained import (
    LORA,
    begins_with_landmarks,
    converted_config,
    load_base,
    read_config,
)
from latte.errors import LatteError
from latte.lab.train.distillation import divergence
from latte.lab.train.recipe import ConversionSection
from latte.lab.train.trainer import LatteTrainer, full_state_dict
from latte.models.loss import IGNORED, next_labels


def starting_config(section: ConversionSection) -> Any:
    """The configuration of the model to train. Raises LatteError for an unsuitable base."""
    assert section.base is not None
    wanted, config = section.fields(), read_config(section.base)
    if not config.model_type.startswith("macchiato_"):
        return converted_config(section.base, wanted)
    if wanted["num_latents"] is None:
        wanted["num_latents"] = config.num_latents
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise LatteError(
                f"base {section.base} has been converted with {name}={getattr(config, name)!r};"
                f" expected that in the recipe too, got {value!r}"
            )
    return config


def starting_model(
    section: ConversionSection,
    seed: int,
    rows: Sequence[torch.Tensor],
    device: torch.device | str = "cpu",
) -> Any:
    """The converted model in training mode, with gradients only for the `trainable` weights.

    Trained weights are at least fp32, whatever the base's precision.

    Args:
        rows: Token ids, (T,) each, of the training text, to compute landmarks from.
        device: Device of the model, where the landmarks are computed too.
    """
    config = starting_config(section)
    assert section.base is not None
    model = load_base(section.base, config, seed=seed, dtype=section.dtype).to(device)
    new = not read_config(section.base).model_type.startswith("macchiato_")
    if new and begins_with_landmarks(section.initial, config):
        set_landmarks(model, [row[None] for row in rows], seed=seed)
    if section.trainable != "all":  # no gradient and no optimiser state for the base's weights
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(NEW_WEIGHTS in name)
    if section.trainable == "lora":
        add_lora(model, section, seed)
    for parameter in model.parameters():
        if parameter.requires_grad:  # small steps are lost in half precision
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    return model.train()


def check_peft() -> None:
    """Raise LatteError where peft, which adds low-rank updates, is not installed."""
    if find_spec("peft") is None:
        raise LatteError(
            "conversion.trainable=lora needs peft, which is not installed;"
            " pip install 'latte-attention[peft]'"
        )


def add_lora(model: Any, section: ConversionSection, seed: int) -> None:
    """Low-rank updates (arXiv 2106.09685) of chosen projections, by peft, in place."""
    check_peft()
    from peft import LoraConfig, inject_adapter_in_model

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


def attention_layers(model: Any) -> list[Any]:
    """The attention modules of a converted model, in the order of its layers."""
    from latte.conversion.attention import MacchiatoAttention

    return [module for module in model.modules() if isinstance(module, MacchiatoAttention)]


@contextmanager
def changed(wanted: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Within it each object's named attribute has the given value: (object, name, value)."""
    before = [getattr(each, name) for each, name, _ in wanted]
    try:
        for each, name, new in wanted:
            setattr(each, name, new)
        yield
    finally:
        for (each, name, _), old in zip(wanted, before, strict=True):
            setattr(each, name, old)


@contextmanager
def hidden_windows(model: Any, probability: float, seed: Sequence[int]) -> Iterator[None]:
    """Within it each converted layer hides its window, with this probability.

    Such a layer mixes its latents alone. With delayed latents it sees nothing of the W tokens
    before a token, so the first W tokens of a sequence keep their window.

    Args:
        seed: Numbers that decide which layers, such as the run's seed and the step.
    """
    chosen = random.Random(repr(tuple(seed)))
    layers = [layer for layer in attention_layers(model) if layer.mixing == "learned"]
    hidden = [layer for layer in layers if chosen.random() < probability]
    with changed([(layer, "mixing", "hidden") for layer in hidden]):
        yield


@contextmanager
def mixing(model: Any, value: str) -> Iterator[None]:
    """Within it the model mixes as `value` says: `learned`, `window`, `latents` or `base`.

    As `base` it is the base itself: low-rank updates are off too.
    """
    layers = attention_layers(model)
    wanted: list[tuple[Any, str, Any]] = [(model.config, "mixing", value)]
    wanted += [(x, "mixing", model.config.mixing_of(x.layer_idx, value)) for x in layers]
    if value == "base":  # an adapter's own method would change what is trained
        adapters = [m for m in model.modules() if hasattr(m, "lora_A")]
        wanted += [(adapter, "_disable_adapters", True) for adapter in adapters]
    with changed(wanted):
        yield


class ConversionTrainer(LatteTrainer):
    """The Trainer, with hidden windows, the base as a teacher, and low-rank updates."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = self.recipe.conversion

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        if not self.section.window_dropout:
            return super().training_step(model, inputs, num_items_in_batch)
        step = self.state.global_step
        probability = self.section.window_dropout * (1 - step / self.state.max_steps)
        training = self.recipe.training
        # Processes that share a sequence hide the same windows.
        seed = (training.seed, step, self.args.process_index // training.context_parallel)
        # The backward pass is inside too: gradient checkpointing computes layers again there.
        with hidden_windows(self.accelerator.unwrap_model(model), probability, seed):
            return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        if self.section.distillation:
            return self._distilled_loss(model, inputs, num_items_in_batch)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _distilled_loss(self, model: Any, inputs: dict[str, Any], items: Any) -> torch.Tensor:
        """(1 - d) NLL + d KL(base || model), both summed over tokens that are predicted."""
        given = {name: value for name, value in inputs.items() if name != "labels"}
        with torch.no_grad(), mixing(self.accelerator.unwrap_model(model), "base"):
            base = model(**given, use_cache=False).logits
        logits = model(**given, use_cache=False).logits
        d = self.section.distillation
        own, teacher = logits.flatten(0, 1), base.flatten(0, 1)
        targets = next_labels(inputs["labels"]).flatten()
        nll = torch.zeros((), device=own.device)
        if d < 1:
            nll = F.cross_entropy(own.float(), targets, reduction="sum")
        kl = divergence(own, teacher, targets != IGNORED)
        return ((1 - d) * nll + d * kl) / items * self.args.world_size

    def loss_parts(self, loss: float) -> dict[str, float]:
        """Perplexity is logged only for a plain likelihood."""
        return {} if self.section.distillation else super().loss_parts(loss)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save low-rank updates apart in checkpoints, to resume, and merged in the result."""
        if self.section.trainable != "lora" or _internal_call or output_dir is None:
            return super().save_model(output_dir, _internal_call)
        if self._sharded:
            state = full_state_dict(self.model)
        else:
            state = self.accelerator.unwrap_model(self.model).state_dict()
        if self.args.should_save:
            self.export(output_dir, merged_lora(state, self.section))
