"""Undirected linear attention, the other reading of the factorisation (paper, eq. 4-5).

Shape suffixes: B batch, T tokens, E hidden size, H heads, F features per head, D value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from latte.layers.mixer import Mixer
from latte.layers.positions import Rotary
from latte.layers.state import MixerState, TokenLog, real_tokens
from latte.layers.validation import check_choice, check_divides
from latte.layers.weights import linear_weights
from latte.ops import linear_attention
from latte.ops.api import FEATURE_MAPS


class LinearAttention(Mixer):
    """``y_t = S_t phi(q_t) / (phi(q_t) z_t)``, with F = num_features / num_heads per head.

    Args:
        num_features: over all heads, as ``num_latents`` of Latte: the parameters are the same.
        feature_map: phi: ``"elu"`` (elu + 1), ``"exp"``, ``"softplus"`` or ``"relu"``.
    """

    carries = ("linear",)
    uses = ("num_latents",)

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_features: int,
        *,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        feature_map: str = "elu",
        causal: bool = True,
    ) -> None:
        super().__init__(
            hidden_size,
            num_heads,
            num_key_value_heads=num_key_value_heads,
            head_dim=head_dim,
            causal=causal,
        )
        check_divides(
            "LinearAttention",
            "num_heads",
            "num_features",
            num_features=num_features,
            num_heads=num_heads,
        )
        check_choice("LinearAttention", "feature_map", feature_map, tuple(FEATURE_MAPS))
        self.feature_map = feature_map
        self.q_proj = nn.Linear(hidden_size, num_features, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_features, bias=False)

    @classmethod
    def options(cls, config: Any) -> dict[str, Any]:
        own = {"num_features": config.num_latents, "feature_map": config.feature_map}
        return super().options(config) | own

    def _features(self, x_BTE: Tensor) -> tuple[Tensor, Tensor]:
        """phi(q) and phi(k), (B, T, H, F), at least fp32: they are summed over the sequence."""
        phi = FEATURE_MAPS[self.feature_map]
        flat = (self.q_proj(x_BTE), self.k_proj(x_BTE))
        wide = torch.promote_types(flat[0].dtype, torch.float32)
        q, k = (phi(self._heads(x.to(wide), self.num_heads)) for x in flat)
        return q, k

    def _mix(
        self,
        x_BTE: Tensor,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        state: MixerState,
        output_final_state: bool,
        rotary: Rotary | None,
    ) -> tuple[Tensor, MixerState, TokenLog | None]:
        q, k = self._features(x_BTE)
        v = self._heads(self.v_proj(x_BTE), self.num_key_value_heads)
        out_dtype = v.dtype
        v = v.repeat_interleave(self.num_heads // self.num_key_value_heads, 2).to(k.dtype)
        out, linear = linear_attention(
            q,
            k,
            v,
            causal=self.causal,
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
            initial_state=state.linear,
            output_final_state=output_final_state,
        )
        after = MixerState(linear=linear)
        log = TokenLog(real_tokens(x_BTE, key_mask), k, v) if state.recording else None
        return out.to(out_dtype), after, log

    def attention_weights(
        self,
        x_BTE: Tensor,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        rotary: Rotary | None = None,
    ) -> Tensor:
        """The weights of these tokens among themselves, (B, H, T, T)."""
        q, k = self._features(x_BTE)
        return linear_weights(q, k, causal=self.causal, key_mask=key_mask, cu_seqlens=cu_seqlens)
