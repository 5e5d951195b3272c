"""The mixers to compare Latte with: softmax attention, windowed or full, and linear attention.

Shape suffixes: B batch, T tokens, E hidden size, H query heads, G key/value heads, K key width, F
features per head, D value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from latte.layers.checks import check_choice, check_divides, check_positive
from latte.layers.latent_input import LatentInput
from latte.layers.mixer import Mixer, MixingLogits, Projected, local_options
from latte.layers.parts import RotaryEmbedding
from latte.layers.recurrent import DECAY_RANGE
from latte.layers.state import MixerState, Piece
from latte.ops import linear_attention, sliding_window_attention
from latte.ops.api import FEATURE_MAPS
from latte.ops.reference import visible_sources


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
        local = local_options(config)
        return super().options(config) | own | local | LatentInput.options(config)

    def mixing_flops(self, length: int) -> float:
        return self._local_flops(length)

    def _project(self, piece: Piece) -> Projected:
        inputs = self.input(piece)
        q = self._heads(self.q_proj(inputs.z), self.num_heads)
        k = self._heads(self.k_proj(inputs.z), self.num_key_value_heads)
        q, k = self._rotate(q, k, piece)
        v = self._heads(self.v_proj(inputs.z), self.num_key_value_heads)
        return Projected(v, MixingLogits(q=q, k=k), after=inputs.after, log=inputs.log)

    def _attend(self, projected: Projected, piece: Piece) -> tuple[Tensor, MixerState]:
        out, window = sliding_window_attention(
            projected.logits.q,
            projected.logits.k,
            projected.v,
            window=self.window,
            softcap=self.softcap,
            causal=self.causal,
            initial_state=piece.state.window,
            **piece.sequences,
        )
        return out, MixerState(window=window)


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


class LinearAttention(Mixer):
    """``y_t = S_t phi(q_t) / (phi(q_t) z_t)``, with F = num_features / num_heads per head.

    Undirected linear attention, the other reading of the factorisation (paper, eq. 4-5).

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

    def mixing_flops(self, length: int) -> float:
        """2 * 2 * F * D a head."""
        return 4.0 * self.k_proj.out_features * self.head_dim

    def _project(self, piece: Piece) -> Projected:
        """Features of at least fp32, since they are summed over the sequence."""
        phi = FEATURE_MAPS[self.feature_map]
        flat = (self.q_proj(piece.x), self.k_proj(piece.x))
        wide = torch.promote_types(flat[0].dtype, torch.float32)
        q, k = (phi(self._heads(x.to(wide), self.num_heads)) for x in flat)
        v = self._heads(self.v_proj(piece.x), self.num_key_value_heads)
        v = v.repeat_interleave(self.num_heads // self.num_key_value_heads, 2)
        return Projected(v, features=(q, k))

    def _attend(self, projected: Projected, piece: Piece) -> tuple[Tensor, MixerState]:
        assert projected.features is not None
        q, k = projected.features
        out, linear = linear_attention(
            q,
            k,
            projected.v.to(k.dtype),
            causal=self.causal,
            initial_state=piece.state.linear,
            **piece.sequences,
        )
        return out.to(projected.v.dtype), MixerState(linear=linear)

    def _weights(self, projected: Projected, piece: Piece) -> Tensor:
        """From the positive features themselves: there is no softmax."""
        assert projected.features is not None
        q, k = projected.features
        visible = visible_sources(
            q.shape[1],
            causal=self.causal,
            key_mask=piece.key_mask,
            cu_seqlens=piece.cu_seqlens,
            device=q.device,
        )
        scores = torch.einsum("bthf,bshf->bhts", q, k).masked_fill(~visible[:, None], 0.0)
        total = scores.sum(-1, keepdim=True)
        return scores / torch.where(total == 0, 1.0, total)
