"""Layers of Latte as ``torch.nn`` modules; Hugging Face is never imported here."""

from latte.layers.convolution import CausalConv1d
from latte.layers.latent_input import LatentInput, LatentLogits
from latte.layers.latte import LatteAttention
from latte.layers.linear import LinearAttention
from latte.layers.macchiato import LatteMacchiato
from latte.layers.mixer import Mixer, MixingLogits
from latte.layers.mlp import GELUMLP, SwiGLU
from latte.layers.norms import LayerNorm, RMSNorm
from latte.layers.positions import Rotary, RotaryEmbedding, SinusoidalPositions
from latte.layers.recurrent import RGLRU, BlockDiagonalLinear
from latte.layers.state import MixerState
from latte.layers.window import SlidingWindowAttention, SoftmaxAttention

__all__ = [
    "GELUMLP",
    "RGLRU",
    "BlockDiagonalLinear",
    "CausalConv1d",
    "LatentInput",
    "LatentLogits",
    "LatteAttention",
    "LatteMacchiato",
    "LayerNorm",
    "LinearAttention",
    "Mixer",
    "MixerState",
    "MixingLogits",
    "RMSNorm",
    "Rotary",
    "RotaryEmbedding",
    "SinusoidalPositions",
    "SlidingWindowAttention",
    "SoftmaxAttention",
    "SwiGLU",
]
