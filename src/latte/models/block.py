"""The pre-norm decoder block, and the parts a configuration asks for."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from latte.layers import (
    GELUMLP,
    LayerNorm,
    Mixer,
    MixerState,
    RMSNorm,
    Rotary,
    SwiGLU,
)
from latte.models.config import LatteConfig
from latte.models.registry import find_mixer


def make_norm(config: LatteConfig) -> nn.Module:
    norm = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}[config.norm]
    return norm(config.hidden_size, eps=config.norm_eps)


def make_mlp(config: LatteConfig) -> nn.Module:
    mlp = {"gelu": GELUMLP, "swiglu": SwiGLU}[config.mlp]
    return mlp(config.hidden_size, config.intermediate_size)


def make_mixer(config: LatteConfig) -> Mixer:
    """The token mixer of a configuration."""
    return find_mixer(config.mixer).from_config(config)


class LatteBlock(GradientCheckpointingLayer):
    """``x + mixer(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, config: LatteConfig) -> None:
        super().__init__()
        self.mixer_norm = make_norm(config)
        self.mixer = make_mixer(config)
        self.mlp_norm = make_norm(config)
        self.mlp = make_mlp(config)
        self.dropout = nn.Dropout(config.hidden_dropout)
        for output in (self.mixer.o_proj, self.mlp.down_proj):
            # Read when weights are initialised.
            output.writes_residual = True  # type: ignore[union-attr]

    def forward(
        self,
        x_BTE: Tensor,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        rotary: Rotary | None = None,
        state: MixerState | None = None,
        output_final_state: bool = False,
        output_attentions: bool = False,
    ) -> tuple[Tensor, MixerState | None, Tensor | None]:
        """Hidden states (B, T, E), the mixer's final state and its weights (B, H, T, T)."""
        normed = self.mixer_norm(x_BTE)
        weights = None
        if output_attentions:
            weights = self.mixer.attention_weights(normed, key_mask, cu_seqlens, rotary=rotary)
        mixed, after = self.mixer(
            normed, key_mask, cu_seqlens, state, output_final_state, rotary=rotary
        )
        x_BTE = x_BTE + self.dropout(mixed)
        x_BTE = x_BTE + self.dropout(self.mlp(self.mlp_norm(x_BTE)))
        return x_BTE, after, weights
