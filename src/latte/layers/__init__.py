"""Layers of Latte as ``torch.nn`` modules; Hugging Face is never imported here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from latte.ops.lazy import lazy_names

if TYPE_CHECKING:
    from latte.layers.baselines import LinearAttention, SlidingWindowAttention, SoftmaxAttention
    from latte.layers.gated import GatedMacchiato
    from latte.layers.latent_input import LatentInput, LatentLogits
    from latte.layers.latte import LatteAttention, LatteMacchiato
    from latte.layers.mixer import Mixer, MixingLogits, Projected
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
    from latte.layers.state import MixerState, Piece
    from latte.layers.step import StepContext, StepState

__all__ = [
    "GELUMLP",
    "RGLRU",
    "BlockDiagonalLinear",
    "CausalConv1d",
    "StepContext",
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
    "Piece",
    "Projected",
    "RMSNorm",
    "Rotary",
    "RotaryEmbedding",
    "SinusoidalPositions",
    "SlidingWindowAttention",
    "SoftmaxAttention",
    "StepState",
    "SwiGLU",
]

MODULES = (
    "baselines",
    "gated",
    "latent_input",
    "latte",
    "mixer",
    "parts",
    "recurrent",
    "state",
    "step",
)
__getattr__, __dir__ = lazy_names(__name__, __all__, MODULES)
