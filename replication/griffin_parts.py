"""What of Griffin makes the difference: its parts as mixers of this family, alone and together.

A plug-in for recipes, which adds presets at the sizes of all others:

    latte compare recipes/ablation/forgetting.yaml plugins=[replication/griffin_parts.py] \\
        comparison.presets=[griffin-made++,gated-f++] comparison.baseline=griffin-made++

=====================  ============================================================================
``hawk++``             Griffin's recurrent block (arXiv 2402.19427, section 2.3) in every layer: a
                       convolution of 4 and an RG-LRU of the values, times a GELU of x
``griffin-made++``     Griffin: recurrent, recurrent, window, recurrent
``values-f++``         ``latte-conv-swa-f++`` with values from the convolution too
``gated-f++``          ``latte-conv-swa-f++`` with Griffin's gate on the heads' outputs
``griffin-mlp-f++``    ``latte-conv-swa-f++`` with the feed-forward layers of Transformers'
                       Griffin: GeGLU with biases, all three matrices drawn at 0.05
=====================  ============================================================================

The recurrent block keeps no state here: these models train and are scored, and do not generate.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from latte.layers import (
    LatteMacchiato,
    Mixer,
    MixerState,
    Piece,
    Projected,
    SlidingWindowAttention,
)
from latte.layers.mixer import MixingLogits
from latte.layers.parts import CausalConv1d, Drawn
from latte.layers.recurrent import RGLRU
from latte.models import modeling
from latte.models.registry import register_mixer, register_preset


class RecurrentBlock(Mixer):
    """``W_o (RG-LRU(conv(W_v x)) * gelu(W_g x))``."""

    def __init__(self, hidden_size: int, num_heads: int, **heads: Any) -> None:
        super().__init__(hidden_size, num_heads, **heads)
        width = num_heads * self.head_dim
        self.gate_proj = nn.Linear(hidden_size, width, bias=False)
        self.conv = CausalConv1d(width, 4)
        self.rglru = RGLRU(width, num_heads)

    def _project(self, piece: Piece) -> Projected:
        return Projected(self._heads(self.v_proj(piece.x), self.num_key_value_heads))

    def _attend(self, projected: Projected, piece: Piece) -> tuple[Tensor, MixerState]:
        options = (piece.key_mask, piece.cu_seqlens)
        h, _ = self.rglru(self.conv(projected.v.flatten(-2), *options)[0], *options)
        return self._heads(gated(h, self.gate_proj(piece.x)), self.num_heads), MixerState()


def gated(y: Tensor, gate: Tensor) -> Tensor:
    return y * F.gelu(gate, approximate="tanh").to(y.dtype)


class MixtureOfConvolvedValues(LatteMacchiato):
    """Latte-Macchiato whose values come from the latents' input, too."""

    def _project(self, piece: Piece) -> Projected:
        q, k, log_decay, inputs = self.latents(piece)
        v = self._heads(self.v_proj(inputs.z), self.num_key_value_heads)
        logits = MixingLogits(q, k, *self._local(piece.x, piece))
        return Projected(v, logits, log_decay, after=inputs.after, log=inputs.log)


class GatedMixture(LatteMacchiato):
    """Latte-Macchiato with a gate on its heads' outputs."""

    def __init__(self, hidden_size: int, num_heads: int, *args: Any, **options: Any) -> None:
        super().__init__(hidden_size, num_heads, *args, **options)
        self.gate_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)

    def _attend(self, projected: Projected, piece: Piece) -> tuple[Tensor, MixerState]:
        out, state = super()._attend(projected, piece)
        return gated(out, self._heads(self.gate_proj(piece.x), self.num_heads)), state


class BesideGriffinMLP(LatteMacchiato):
    """The same layer, whose name tells :func:`make_mlp` what to put beside it."""


class GriffinLinear(nn.Linear, Drawn):
    """Begins at 0.05, whether or not its block says that it writes to the residual stream."""

    writes_residual = property(lambda self: False, lambda self, value: None)

    def initial_values(self) -> dict[str, Tensor]:
        return {"weight": 0.05 * torch.randn_like(self.weight)}


class GriffinMLP(nn.Module):
    """``down(gelu(gate(x)) * up(x))`` with biases."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = GriffinLinear(hidden_size, intermediate_size)
        self.up_proj = GriffinLinear(hidden_size, intermediate_size)
        self.down_proj = GriffinLinear(intermediate_size, hidden_size)

    def forward(self, x_BTE: Tensor) -> Tensor:
        return self.down_proj(gated(self.up_proj(x_BTE), self.gate_proj(x_BTE)))


def make_mlp(config: Any, plain: Any = modeling.make_mlp) -> nn.Module:
    """The library's, which has no place for others, but for this one comparison."""
    if config.mixer == "beside-griffin-mlp":
        return GriffinMLP(config.hidden_size, config.intermediate_size)
    return plain(config)


class GriffinLayers(Mixer):
    """Recurrent, recurrent, window, recurrent: a model makes its layers in their order, and has
    four of them, or a multiple.
    """

    uses = SlidingWindowAttention.uses
    _kinds: tuple[type[Mixer], ...] = (
        *[RecurrentBlock] * 2,
        SlidingWindowAttention,
        RecurrentBlock,
    )
    _turns = itertools.cycle(_kinds)

    @classmethod
    def from_config(cls, config: Any) -> Any:
        return next(cls._turns).from_config(config)


register_mixer("recurrent-block", RecurrentBlock)
register_preset("hawk++", mixer="recurrent-block", latent_input="none", position="none")
register_mixer("griffin-made", GriffinLayers)
register_preset("griffin-made++", mixer="griffin-made", latent_input="none", position="rope")
modeling.make_mlp = make_mlp
for _name, _kind, _mixer in [
    ("values-f++", "values", MixtureOfConvolvedValues),
    ("gated-f++", "gated", GatedMixture),
    ("griffin-mlp-f++", "beside-griffin-mlp", BesideGriffinMLP),
]:
    register_mixer(_kind, _mixer)
    register_preset(_name, mixer=_kind, latent_input="conv", position="rope", forgetting="gated")
