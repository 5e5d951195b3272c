"""The mixers to compare Latte with: softmax attention, windowed or full, and linear attention.

Shape suffixes: B batch, T tokens, E hidden size, H query heads, G key/value heads, K key width, F
features per head, D value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from latte.layers.checks import check_choice, check_multiple
from latte.layers.latents import LatentInput
from latte.layers.mixer import Context, Mixer, MixerState, Projected
from latte.layers.parts import Rotary
from latte.layers.projections import project
from latte.layers.recurrent import DECAY_RANGE
from latte.layers.step import StepState
from latte.ops import linear_attention
from latte.ops.api import FEATURE_MAPS
from latte.ops.step import in_dtype, linear_step


class SlidingWindowAttention(Mixer):
    """Softmax attention over the last ``window`` tokens, self included (paper, eq. 17).

    Args:
        window: Number of keys a query sees, its own included. None is full softmax attention,
            whose state grows with the sequence.
        input_mixing: Source of queries, keys and values: ``"none"`` (x itself), or ``"conv"`` or
            ``"rglru"`` for a convolution or RG-LRU of x. The latter two are controls: they differ
            from Latte in having no latents.
        conv_kernel_size, rglru_decay_range, rms_norm_eps: Options of :class:`LatentInput`.
        rope_theta, softcap: Options as for :class:`LatteMacchiato`.
        heads: Other arguments of :class:`Mixer`.
    """

    carries = ("window",)
    splits = True
    stepped = ("input",)
    uses: ClassVar[tuple[str, ...]] = ("latent_input", "sliding_window", "rope_theta")

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        window: int | None = 128,
        input_mixing: str = "none",
        conv_kernel_size: int = 3,
        rglru_decay_range: Sequence[float] = DECAY_RANGE,
        rope_theta: float | None = 10000.0,
        softcap: float | None = None,
        rms_norm_eps: float = 1e-6,
        **heads: Any,
    ) -> None:
        super().__init__(hidden_size, num_heads, **heads)
        self.input = LatentInput(
            hidden_size,
            input_mixing,
            num_blocks=num_heads,
            conv_kernel_size=conv_kernel_size,
            rglru_decay_range=rglru_decay_range,
            rms_norm_eps=rms_norm_eps,
            causal=self.causal,
        )
        self._add_local(window, rope_theta, softcap)

    @classmethod
    def options(cls, config: Any) -> dict[str, Any]:
        own = {"window": config.sliding_window, "input_mixing": config.latent_input}
        local = cls.local_options(config)
        return super().options(config) | own | local | LatentInput.options(config)

    def _project(self, x_BTE: Tensor, state: MixerState, context: Context) -> Projected:
        z_BTE, state = self.input(x_BTE, state, context)
        return self.near(z_BTE, state, context)

    def _attend(
        self, x_BTE: Tensor, projected: Projected, context: Context
    ) -> tuple[Tensor, MixerState]:
        return self._softmax(self.window, projected, context)

    def _step(self, x_BE: Tensor, state: StepState, rotary: Rotary | None) -> Tensor:
        z_BE = self.input.step(x_BE, state)
        local, rotary = self._local_step(z_BE, state, rotary)
        return state.attend(local, self.head_dim**-0.5, self.softcap, rotary)


class SoftmaxAttention(SlidingWindowAttention):
    """Full softmax attention: a query sees every earlier token, and the state keeps them all."""

    grows = True
    splits = False
    uses = ("rope_theta",)

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        rope_theta: float | None = 10000.0,
        softcap: float | None = None,
        **heads: Any,
    ) -> None:
        local: Any = {"window": None, "rope_theta": rope_theta, "softcap": softcap}
        super().__init__(hidden_size, num_heads, **local, **heads)

    @classmethod
    def options(cls, config: Any) -> dict[str, Any]:
        return Mixer.options(config) | cls.local_options(config)


class LinearAttention(Mixer):
    """``y_t = S_t phi(q_t) / (phi(q_t) z_t)``, with F = num_features / num_heads per head.

    This is the paper's undirected linear attention (eq. 4-5).

    Args:
        num_features: Total number of features over all heads. With as many features as Latte has
            latents, the layer has the same number of parameters.
        feature_map: Feature map phi: ``"elu"`` (elu + 1), ``"exp"``, ``"softplus"`` or ``"relu"``.
        heads: Other arguments of :class:`Mixer`.
    """

    carries = ("linear",)
    splits = True
    uses = ("num_latents",)

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_features: int,
        *,
        feature_map: str = "elu",
        **heads: Any,
    ) -> None:
        super().__init__(hidden_size, num_heads, **heads)
        check_multiple("LinearAttention", num_features=num_features, num_heads=num_heads)
        check_choice("LinearAttention", "feature_map", feature_map, tuple(FEATURE_MAPS))
        self.feature_map = feature_map
        self.q_proj = nn.Linear(hidden_size, num_features, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_features, bias=False)

    @classmethod
    def options(cls, config: Any) -> dict[str, Any]:
        own = {"num_features": config.num_latents, "feature_map": config.feature_map}
        return super().options(config) | own

    def mixing_flops(self, length: int) -> float:
        """2 * 2 * F * D per head."""
        return 4.0 * self.k_proj.out_features * self.head_dim

    def _project(self, x_BTE: Tensor, state: MixerState, context: Context) -> Projected:
        """The features, in at least fp32 because they are summed over the sequence."""
        phi = FEATURE_MAPS[self.feature_map]
        *flat, v = project(x_BTE, self.q_proj, self.k_proj, self.v_proj)
        wide = torch.promote_types(v.dtype, torch.float32)
        q, k = (phi(self._heads(x.to(wide), self.num_heads)) for x in flat)
        v = self._heads(v, self.num_key_value_heads)
        v = v.repeat_interleave(self.num_heads // self.num_key_value_heads, 2)
        return Projected(v, state, features=(q, k))

    def _attend(
        self, x_BTE: Tensor, projected: Projected, context: Context
    ) -> tuple[Tensor, MixerState]:
        assert projected.features is not None
        q, k = projected.features
        out, linear = context.across(linear_attention)(
            q,
            k,
            projected.v.to(k.dtype),
            causal=self.causal,
            key_mask=context.key_mask,
            cu_seqlens=context.cu_seqlens,
            initial_state=projected.state.linear,
            output_final_state=context.output_final_state,
        )
        return out.to(projected.v.dtype), projected.state._replace(linear=linear)

    def _step(self, x_BE: Tensor, state: StepState, rotary: Rotary | None) -> Tensor:
        assert state.linear is not None
        phi, wide = FEATURE_MAPS[self.feature_map], state.linear.memory.dtype
        heads = (len(x_BE), self.num_heads, -1)
        q, k, v = state.step_context.plan.linear_maps(x_BE, self.q_proj, self.k_proj, self.v_proj)
        q, k = (phi(in_dtype(x, wide).view(heads)) for x in (q, k))
        v = v.view(len(x_BE), self.num_key_value_heads, -1)
        wide_v = in_dtype(v, wide).repeat_interleave(self.num_heads // v.shape[1], 1)
        return in_dtype(linear_step(q, k, wide_v, *state.linear, state.step_context.real), v.dtype)
