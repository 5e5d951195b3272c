"""The Latte layer: causal or bidirectional latent attention (paper, eq. 6-14 and 18).

Shape suffixes: B batch, T tokens, E hidden size, H query heads, L latents per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from latte.layers.latent_input import LatentLogits, input_options
from latte.layers.mixer import Mixer, MixingLogits
from latte.layers.positions import Rotary
from latte.layers.recurrent import DECAY_RANGE
from latte.layers.state import MixerState, TokenLog, real_tokens
from latte.ops import attention_weights, latte_attention


class LatteAttention(Mixer):
    """``y_t = sum_l p(l|t) sum_{s<=t} p(s|l,t) v_s``, with q and k logits from ``latent_input``.

    Args:
        num_latents: over all heads; ``num_heads`` must divide it.
        latent_input: where q and k logits come from: ``"none"`` (x itself), ``"conv"`` or
            ``"rglru"``. Values always come from x.
    """

    carries = ("latent",)
    uses = ("num_latents", "latent_input")

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_latents: int,
        *,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        latent_input: str = "none",
        conv_kernel_size: int = 3,
        rglru_decay_range: Sequence[float] = DECAY_RANGE,
        rms_norm_eps: float = 1e-6,
        causal: bool = True,
    ) -> None:
        super().__init__(
            hidden_size,
            num_heads,
            num_key_value_heads=num_key_value_heads,
            head_dim=head_dim,
            causal=causal,
        )
        self.latents = LatentLogits(
            hidden_size,
            num_heads,
            num_latents,
            latent_input,
            conv_kernel_size=conv_kernel_size,
            rglru_decay_range=rglru_decay_range,
            rms_norm_eps=rms_norm_eps,
            causal=causal,
        )

    @classmethod
    def options(cls, config: Any) -> dict[str, Any]:
        latents = {"num_latents": config.num_latents, "latent_input": config.latent_input}
        return super().options(config) | latents | input_options(config)

    def _mix(
        self,
        x_BTE: Tensor,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        state: MixerState,
        output_final_state: bool,
        rotary: Rotary | None,
    ) -> tuple[Tensor, MixerState, TokenLog | None]:
        q, k, inputs = self.latents(x_BTE, key_mask, cu_seqlens, state, output_final_state)
        v = self._heads(self.v_proj(x_BTE), self.num_key_value_heads)
        out, latent = latte_attention(
            q,
            k,
            v,
            causal=self.causal,
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
            initial_state=state.latent,
            output_final_state=output_final_state,
        )
        after = MixerState(latent=latent, rglru=inputs.rglru, conv=inputs.conv)
        if not state.recording:
            return out, after, None
        mask = real_tokens(x_BTE, key_mask)
        return out, after, TokenLog(mask, k, v, None, inputs.rglru_log, inputs.conv_log)

    def mixing_logits(
        self,
        x_BTE: Tensor,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        rotary: Rotary | None = None,
    ) -> MixingLogits:
        """Latent logits q and k of these tokens, (B, T, H, L) each."""
        latent_q, latent_k, _ = self.latents(x_BTE, key_mask, cu_seqlens)
        return MixingLogits(latent_q, latent_k)

    def attention_weights(
        self,
        x_BTE: Tensor,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        rotary: Rotary | None = None,
    ) -> Tensor:
        """The probabilities p(s|t) of these tokens among themselves, (B, H, T, T)."""
        q, k, _ = self.latents(x_BTE, key_mask, cu_seqlens)
        return attention_weights(q, k, causal=self.causal, key_mask=key_mask, cu_seqlens=cu_seqlens)
