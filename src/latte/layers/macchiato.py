"""The Latte-Macchiato layer: latent attention with a sliding window inside (paper, eq. 15-19).

Shape suffixes: B batch, T tokens, E hidden size, H query heads, G key/value heads, K key width,
L latents per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from latte.layers.latent_input import LatentLogits, input_options
from latte.layers.mixer import Mixer, MixingLogits, local_options
from latte.layers.positions import Rotary, RotaryEmbedding
from latte.layers.recurrent import DECAY_RANGE
from latte.layers.state import MixerState, TokenLog, real_tokens
from latte.layers.validation import check_positive
from latte.ops import attention_weights, macchiato_attention


class LatteMacchiato(Mixer):
    """``y_t = p(0|t) SWA_t + sum_{l>=1} p(l|t) mu_t[l]``: one distribution over the past.

    The window's q and k have their own projections, from x, rotated and scaled by 1/sqrt(K);
    values and the output projection are shared by both branches; the latent logits come from
    ``latent_input``.

    Args:
        num_latents: over all heads, the window's state not counted.
        window: keys seen, self included; ``|s - t| <= window // 2`` if not causal.
        window_probability: what p(l=0) starts at, by a bias per head on the window's query
            logit; None adds no bias, and p(l=0) starts near 1 / (L + 1).
        rope_theta: base of the rotary encoding; None leaves positions out.
        softcap: local logits become ``softcap * tanh(logit / softcap)``.
    """

    carries = ("latent", "window")
    uses = ("num_latents", "latent_input", "sliding_window", "rope_theta", "window_probability")

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_latents: int,
        *,
        window: int = 128,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        latent_input: str = "none",
        window_probability: float | None = None,
        conv_kernel_size: int = 3,
        rglru_decay_range: Sequence[float] = DECAY_RANGE,
        rope_theta: float | None = 10000.0,
        softcap: float | None = None,
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
        check_positive("LatteMacchiato", window=window)
        self.window, self.softcap = window, softcap
        if rope_theta is not None:
            self.rotary = RotaryEmbedding(self.head_dim, rope_theta)
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.num_key_value_heads * self.head_dim, bias=False)
        self.latents = LatentLogits(
            hidden_size,
            num_heads,
            num_latents,
            latent_input,
            window_logit=True,
            window_probability=window_probability,
            conv_kernel_size=conv_kernel_size,
            rglru_decay_range=rglru_decay_range,
            rms_norm_eps=rms_norm_eps,
            causal=causal,
        )

    @classmethod
    def options(cls, config: Any) -> dict[str, Any]:
        own = {
            "num_latents": config.num_latents,
            "latent_input": config.latent_input,
            "window": config.sliding_window,
            "window_probability": config.window_probability,
        }
        return super().options(config) | own | local_options(config) | input_options(config)

    def _local(
        self,
        x_BTE: Tensor,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        state: MixerState,
        rotary: Rotary | None,
    ) -> tuple[Tensor, Tensor]:
        """Queries (B, T, H, K) and keys (B, T, G, K) of the window, rotated."""
        q = self._heads(self.q_proj(x_BTE), self.num_heads)
        k = self._heads(self.k_proj(x_BTE), self.num_key_value_heads)
        return self._rotate(q, k, x_BTE, key_mask, cu_seqlens, state, rotary)

    def _mix(
        self,
        x_BTE: Tensor,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        state: MixerState,
        output_final_state: bool,
        rotary: Rotary | None,
    ) -> tuple[Tensor, MixerState, TokenLog | None]:
        latent_q, latent_k, inputs = self.latents(
            x_BTE, key_mask, cu_seqlens, state, output_final_state
        )
        q, k = self._local(x_BTE, key_mask, cu_seqlens, state, rotary)
        v = self._heads(self.v_proj(x_BTE), self.num_key_value_heads)
        initial = None
        if state.latent is not None and state.window is not None:
            initial = (state.latent, state.window)
        out, carried = macchiato_attention(
            latent_q,
            latent_k,
            q,
            k,
            v,
            window=self.window,
            softcap=self.softcap,
            causal=self.causal,
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
            initial_state=initial,
            output_final_state=output_final_state,
        )
        latent, window = (None, None) if carried is None else carried
        after = MixerState(latent=latent, window=window, rglru=inputs.rglru, conv=inputs.conv)
        if not state.recording:
            return out, after, None
        mask = real_tokens(x_BTE, key_mask)
        return out, after, TokenLog(mask, latent_k, v, k, inputs.rglru_log, inputs.conv_log)

    def mixing_logits(
        self,
        x_BTE: Tensor,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        rotary: Rotary | None = None,
    ) -> MixingLogits:
        """Latent logits, column 0 of the queries being the window's, and local q and k."""
        latent_q, latent_k, _ = self.latents(x_BTE, key_mask, cu_seqlens)
        q, k = self._local(x_BTE, key_mask, cu_seqlens, MixerState(), rotary)
        return MixingLogits(latent_q, latent_k, q, k)

    def attention_weights(
        self,
        x_BTE: Tensor,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        rotary: Rotary | None = None,
    ) -> Tensor:
        """The probabilities p(s|t) of these tokens among themselves, (B, H, T, T)."""
        latent_q, latent_k, _ = self.latents(x_BTE, key_mask, cu_seqlens)
        q, k = self._local(x_BTE, key_mask, cu_seqlens, MixerState(), rotary)
        return attention_weights(
            latent_q,
            latent_k,
            q,
            k,
            window=self.window,
            softcap=self.softcap,
            causal=self.causal,
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, window={self.window}"
