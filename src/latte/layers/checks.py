"""Checks of the layers' arguments: one line that says what was expected and what came."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def check_positive(layer: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{layer}: {name} must be a positive integer, got {size!r}")


def check_multiple(layer: str, **sizes: int) -> None:
    """Two positive integers, of which the first is a multiple of the second."""
    check_positive(layer, **sizes)
    (multiple, large), (divisor, small) = sizes.items()
    if large % small:
        raise ValueError(
            f"{layer}: {multiple} must be a multiple of {divisor}, "
            f"got {multiple}={large} and {divisor}={small}"
        )


def check_choice(layer: str, name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{layer}: {name} must be one of {choices}, got {value!r}")


def check_input(layer: str, x: Tensor, hidden_size: int, weight: Any = None) -> None:
    """Check the shape of a layer's input; with one of the layer's weights, also dtype and device.

    Under autocast a layer casts for itself. Quantised weights have a dtype of their own, or are no
    tensors. Weights that are loaded when they are needed are on the device "meta" until then.
    """
    if x.ndim != 3 or x.shape[-1] != hidden_size:
        raise ValueError(
            f"{layer}: x must have shape (B, T, hidden_size={hidden_size}), got {tuple(x.shape)}"
        )
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(
            f"{layer}: x must have the dtype of the layer's weights, {weight.dtype}, got {x.dtype}"
        )
    if x.device != weight.device and weight.device.type != "meta":
        raise ValueError(
            f"{layer}: x must be on the device of the layer's weights, {weight.device}, got"
            f" {x.device}"
        )


def check_state(layer: str, state: Any, kind: Any, carries: tuple[str, ...], packed: bool) -> None:
    """A mixer that carries these parts can continue from the state, a MixerState (``kind``)."""
    if not isinstance(state, kind):
        raise ValueError(
            f"{layer}: state must be the {kind.__name__} that came out, got {type(state).__name__}"
        )
    parts = ("latent", "linear", "window", "kept", "short_conv", "own")
    held = {part for part in parts if getattr(state, part) is not None}
    lacking = [part for part in carries if part not in held]
    if held and lacking:
        raise ValueError(f"{layer}: state must hold {lacking[0]!r}, got another mixer's")
    # A subclass may also have a state of its own, or a convolution.
    surplus = sorted(held - {*carries, "own", "short_conv"}) if carries else []
    if surplus:
        raise ValueError(f"{layer}: state must not hold {surplus[0]!r}, got another mixer's")
    if state.recorded is not None and packed:
        raise ValueError(f"{layer}: packed sequences cannot be recorded for taking back")
