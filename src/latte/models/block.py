"""The pre-norm decoder block, and the parts a configuration asks for."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from latte.layers import (
    GELUMLP,
    LatteAttention,
    LatteMacchiato,
    LayerNorm,
    LinearAttention,
    Mixer,
    MixerState,
    RMSNorm,
    Rotary,
    SlidingWindowAttention,
    SoftmaxAttention,
    SwiGLU,
)
from latte.models.config import LatteConfig


def make_norm(config: LatteConfig) -> nn.Module:
    norm = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}[config.norm]
    return norm(config.hidden_size, eps=config.norm_eps)


def make_mlp(config: LatteConfig) -> nn.Module:
    mlp = {"gelu": GELUMLP, "swiglu": SwiGLU}[config.mlp]
    return mlp(config.hidden_size, config.intermediate_size)


def make_mixer(config: LatteConfig) -> Mixer:
    """The token mixer of a configuration."""
    heads: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "causal": config.is_causal,
    }
    local: dict[str, Any] = {
        "rope_theta": config.rope_theta if config.position == "rope" else None,
        "softcap": config.attn_logit_softcapping,
    }
    inputs: dict[str, Any] = {
        "conv_kernel_size": config.conv_kernel_size,
        "rglru_decay_range": config.rglru_decay_range,
        "rms_norm_eps": config.norm_eps,
    }
    latents: dict[str, Any] = {
        "num_latents": config.num_latents,
        "latent_input": config.latent_input,
    }
    match config.mixer:
        case "latte":
            return LatteAttention(**heads, **latents, **inputs)
        case "macchiato":
            return LatteMacchiato(
                **heads,
                **latents,
                **inputs,
                **local,
                window=config.sliding_window or 0,
                window_probability=config.window_probability,
            )
        case "swa":
            return SlidingWindowAttention(
                **heads,
                **inputs,
                **local,
                window=config.sliding_window,
                input_mixing=config.latent_input,
            )
        case "softmax":
            return SoftmaxAttention(**heads, **local)
        case "linear":
            return LinearAttention(
                **heads, num_features=config.num_latents or 0, feature_map=config.feature_map
            )
    raise ValueError(f"unknown mixer {config.mixer!r}")


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
