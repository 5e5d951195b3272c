"""Softmax attention, over a sliding window or over everything: the baselines' mixers.

Shape suffixes: B batch, T tokens, E hidden size, H query heads, G key/value heads, K key width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from latte.layers.latent_input import LatentInput, LatentInputs, input_options
from latte.layers.mixer import Mixer, MixingLogits, local_options
from latte.layers.positions import Rotary, RotaryEmbedding
from latte.layers.recurrent import DECAY_RANGE
from latte.layers.state import MixerState, TokenLog, real_tokens
from latte.layers.validation import check_positive
from latte.layers.weights import softmax_weights
from latte.ops import sliding_window_attention


class SlidingWindowAttention(Mixer):
    """Softmax attention over the last ``window`` tokens, self included (paper, eq. 17).

    Args:
        window: None is full softmax attention, whose state grows with the sequence.
        input_mixing: ``"none"``, or ``"conv"`` or ``"rglru"`` to let queries, keys and values
            come from a convolution or RG-LRU of x: the control without latents.
        rope_theta, softcap: as for :class:`LatteMacchiato`.
    """

    carries = ("window",)
    uses: ClassVar[tuple[str, ...]] = ("latent_input", "sliding_window", "rope_theta")

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        window: int | None = 128,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        input_mixing: str = "none",
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
        if window is not None:
            check_positive(type(self).__name__, window=window)
        self.window, self.softcap = window, softcap
        if rope_theta is not None:
            self.rotary = RotaryEmbedding(self.head_dim, rope_theta)
        self.input = LatentInput(
            hidden_size,
            input_mixing,
            num_blocks=num_heads,
            conv_kernel_size=conv_kernel_size,
            rglru_decay_range=rglru_decay_range,
            rms_norm_eps=rms_norm_eps,
            causal=causal,
        )
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.num_key_value_heads * self.head_dim, bias=False)

    @classmethod
    def options(cls, config: Any) -> dict[str, Any]:
        own = {"window": config.sliding_window, "input_mixing": config.latent_input}
        return super().options(config) | own | local_options(config) | input_options(config)

    def _local(
        self,
        x_BTE: Tensor,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        state: MixerState,
        output_final_state: bool,
        rotary: Rotary | None,
    ) -> tuple[Tensor, Tensor, LatentInputs]:
        inputs = self.input(x_BTE, key_mask, cu_seqlens, state, output_final_state)
        q = self._heads(self.q_proj(inputs.z), self.num_heads)
        k = self._heads(self.k_proj(inputs.z), self.num_key_value_heads)
        q, k = self._rotate(q, k, x_BTE, key_mask, cu_seqlens, state, rotary)
        return q, k, inputs

    def _mix(
        self,
        x_BTE: Tensor,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        state: MixerState,
        output_final_state: bool,
        rotary: Rotary | None,
    ) -> tuple[Tensor, MixerState, TokenLog | None]:
        q, k, inputs = self._local(x_BTE, key_mask, cu_seqlens, state, output_final_state, rotary)
        v = self._heads(self.v_proj(inputs.z), self.num_key_value_heads)
        out, window = sliding_window_attention(
            q,
            k,
            v,
            window=self.window,
            softcap=self.softcap,
            causal=self.causal,
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
            initial_state=state.window,
            output_final_state=output_final_state,
        )
        after = MixerState(window=window, rglru=inputs.rglru, conv=inputs.conv)
        if not state.recording:
            return out, after, None
        mask = real_tokens(x_BTE, key_mask)
        return out, after, TokenLog(mask, None, v, k, inputs.rglru_log, inputs.conv_log)

    def mixing_logits(
        self,
        x_BTE: Tensor,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        rotary: Rotary | None = None,
    ) -> MixingLogits:
        """Queries and keys of these tokens, rotated; there are no latents."""
        q, k, _ = self._local(x_BTE, key_mask, cu_seqlens, MixerState(), False, rotary)
        return MixingLogits(q=q, k=k)

    def attention_weights(
        self,
        x_BTE: Tensor,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        rotary: Rotary | None = None,
    ) -> Tensor:
        """The weights of these tokens among themselves, (B, H, T, T)."""
        q, k, _ = self._local(x_BTE, key_mask, cu_seqlens, MixerState(), False, rotary)
        return softmax_weights(
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


class SoftmaxAttention(SlidingWindowAttention):
    """Full softmax attention: every earlier token is seen, and the state keeps them all."""

    grows = True
    uses = ("rope_theta",)

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        rope_theta: float | None = 10000.0,
        softcap: float | None = None,
        causal: bool = True,
    ) -> None:
        super().__init__(
            hidden_size,
            num_heads,
            window=None,
            num_key_value_heads=num_key_value_heads,
            head_dim=head_dim,
            rope_theta=rope_theta,
            softcap=softcap,
            causal=causal,
        )

    @classmethod
    def options(cls, config: Any) -> dict[str, Any]:
        return Mixer.options(config) | local_options(config)
