"""Layers of Latte as ``torch.nn`` modules; Hugging Face is never imported here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from latte.ops.lazy import lazy_names

if TYPE_CHECKING:
    from latte.layers.attention import LatteMacchiato
    from latte.layers.baselines import LinearAttention, SlidingWindowAttention, SoftmaxAttention
    from latte.layers.gated import GatedMacchiato
    from latte.layers.latents import LatentInput, LatentLogits
    from latte.layers.latte import LatteAttention
    from latte.layers.mixer import Context, Mixer, MixerState, Projected
    from latte.layers.parts import (
        GELUMLP,
        CausalConv1d,
        LayerNorm,
        RMSNorm,
        Rotary,
        RotaryEmbedding,
        SinusoidalPositions,
        SwiGLU,
    )
    from latte.layers.recurrent import RGLRU, BlockDiagonalLinear
    from latte.layers.recurrent_block import RecurrentBlock
    from latte.layers.step import StepContext, StepState
    from latte.layers.weights import MixingLogits

__all__ = [
    "GELUMLP",
    "RGLRU",
    "BlockDiagonalLinear",
    "CausalConv1d",
    "StepContext",
    "Context",
    "GatedMacchiato",
    "LatentInput",
    "LatentLogits",
    "LatteAttention",
    "LatteMacchiato",
    "LayerNorm",
    "LinearAttention",
    "Mixer",
    "MixerState",
    "MixingLogits",
    "Projected",
    "RMSNorm",
    "RecurrentBlock",
    "Rotary",
    "RotaryEmbedding",
    "SinusoidalPositions",
    "SlidingWindowAttention",
    "SoftmaxAttention",
    "StepState",
    "SwiGLU",
]

MODULES = (
    "attention",
    "baselines",
    "gated",
    "latents",
    "latte",
    "mixer",
    "parts",
    "recurrent",
    "recurrent_block",
    "step",
    "weights",
)
__getattr__, __dir__ = lazy_names(__name__, __all__, MODULES)
