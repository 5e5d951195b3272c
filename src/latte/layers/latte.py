"""Latte and Latte-Macchiato: latent attention, alone or with a sliding window inside.

Paper, eq. 6-14 and 15-19. Shape suffixes: B batch, T tokens, E hidden size, H query heads, G
key/value heads, K key width, L latents per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from latte.layers.checks import check_positive
from latte.layers.latent_input import HALF_LIFE_RANGE, LatentLogits
from latte.layers.mixer import Mixer, MixingLogits, Projected
from latte.layers.parts import Rotary
from latte.layers.recurrent import DECAY_RANGE
from latte.layers.state import MixerState, Piece
from latte.layers.step import StepState
from latte.ops import latte_attention, macchiato_attention
from latte.ops.step import latte_step


class LatteAttention(Mixer):
    """``y_t = sum_l p(l|t) sum_{s<=t} p(s|l,t) v_s``, with q and k logits from ``latent_input``.

    Args:
        num_latents: Total number of latents over all heads. ``num_heads`` must divide it.
        latent_input: Source of the q and k logits: ``"none"`` (x itself), ``"conv"`` or
            ``"rglru"``. Values always come from x.
        forgetting: Kind of forgetting, ``"none"``, ``"static"`` or ``"gated"``
            (:class:`LatentLogits`; beyond the paper).
    """

    carries = ("latent",)
    splits = True
    stepped = ("latents",)
    uses = ("num_latents", "latent_input", "forgetting")

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
        forgetting: str = "none",
        half_life_range: Sequence[float] = HALF_LIFE_RANGE,
        causal: bool = True,
    ) -> None:
        super().__init__(hidden_size, num_heads, num_key_value_heads, head_dim, causal)
        self.latents = LatentLogits(
            hidden_size,
            num_heads,
            num_latents,
            latent_input,
            conv_kernel_size=conv_kernel_size,
            rglru_decay_range=rglru_decay_range,
            rms_norm_eps=rms_norm_eps,
            forgetting=forgetting,
            half_life_range=half_life_range,
            causal=causal,
        )

    @classmethod
    def options(cls, config: Any) -> dict[str, Any]:
        return super().options(config) | LatentLogits.options(config)

    def mixing_flops(self, length: int) -> float:
        """2 * 2 * L * D per head."""
        return 4.0 * self.latents.k_proj.out_features * self.head_dim

    def _project(self, piece: Piece) -> Projected:
        q, k, log_decay, inputs = self.latents(piece)
        v = self._heads(self.v_proj(piece.x), self.num_key_value_heads)
        return Projected(v, MixingLogits(q, k), log_decay, after=inputs.after)

    def _attend(self, projected: Projected, piece: Piece) -> tuple[Tensor, MixerState]:
        out, latent = piece.across(latte_attention)(
            projected.logits.latent_q,
            projected.logits.latent_k,
            projected.v,
            causal=self.causal,
            initial_state=piece.state.latent,
            log_decay=projected.log_decay,
            **piece.sequences,
        )
        return out, MixerState(latent=latent)

    def _step(self, x_BE: Tensor, state: StepState, rotary: Rotary | None) -> Tensor:
        latent, real = state.latent, state.step_context.real
        assert latent is not None
        q, k, log_decay = self.latents.step(x_BE, state)
        v = state.step_context.plan.linear_maps(x_BE, self.v_proj)[0]
        v = v.view(len(x_BE), self.num_key_value_heads, -1)
        return latte_step(q, k, v, latent.log_mass, latent.mean, real, log_decay=log_decay)


class LatteMacchiato(Mixer):
    """``y_t = p(0|t) SWA_t + sum_{l>=1} p(l|t) mu_t[l]``: one distribution over the past.

    The window's q and k have their own projections, from x. They are rotated, and their logits are
    scaled by 1/sqrt(K). Both branches share the values and the output projection. The latent
    logits come from ``latent_input``.

    Args:
        num_latents: Total number of latents over all heads, without the window.
        window: Number of keys a query sees, its own included; ``|s - t| <= window // 2`` if not
            causal.
        window_probability: Initial value of p(l=0), set by a bias per head on the window's query
            logit. None adds no bias; p(l=0) then starts near 1 / (L + 1).
        rope_theta: Base of the rotary encoding; None uses no positions.
        softcap: Cap of the local logits, which become ``softcap * tanh(logit / softcap)``.
        forgetting: Kind of forgetting, as for :class:`LatteAttention`. The window does not forget.
    """

    window: int
    carries: ClassVar[tuple[str, ...]] = ("latent", "window")
    splits = True
    stepped: ClassVar[tuple[str, ...]] = ("latents",)
    uses: ClassVar[tuple[str, ...]] = (
        *("num_latents", "latent_input", "forgetting"),
        *("sliding_window", "rope_theta", "window_probability"),
    )

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
        forgetting: str = "none",
        half_life_range: Sequence[float] = HALF_LIFE_RANGE,
        causal: bool = True,
    ) -> None:
        super().__init__(hidden_size, num_heads, num_key_value_heads, head_dim, causal)
        check_positive("LatteMacchiato", window=window)
        self._add_local(window, rope_theta, softcap)
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
            forgetting=forgetting,
            half_life_range=half_life_range,
            causal=causal,
        )

    @classmethod
    def options(cls, config: Any) -> dict[str, Any]:
        own = {"window_probability": config.window_probability, "window": config.sliding_window}
        local = cls.local_options(config)
        return super().options(config) | LatentLogits.options(config) | own | local

    def mixing_flops(self, length: int) -> float:
        """2 * 2 * L * D per head, plus the window's."""
        latents = 4.0 * self.latents.k_proj.out_features * self.head_dim
        return latents + self._local_flops(length)

    def _project(self, piece: Piece) -> Projected:
        latent_q, latent_k, log_decay, inputs = self.latents(piece)
        logits = MixingLogits(latent_q, latent_k, *self._local(piece.x, piece))
        v = self._heads(self.v_proj(piece.x), self.num_key_value_heads)
        return Projected(v, logits, log_decay, after=inputs.after)

    def _attend(self, projected: Projected, piece: Piece) -> tuple[Tensor, MixerState]:
        out, carried = piece.across(macchiato_attention)(
            *projected.logits,
            projected.v,
            window=self.window,
            softcap=self.softcap,
            causal=self.causal,
            initial_state=piece.state.macchiato(),
            log_decay=projected.log_decay,
            **piece.sequences,
        )
        return out, MixerState.of_macchiato(carried)

    def _step(self, x_BE: Tensor, state: StepState, rotary: Rotary | None) -> Tensor:
        parts: Any = self._modules
        latents = parts["latents"].step(x_BE, state)
        local, rotary = self._local_step(x_BE, state, rotary)
        return state.attend(local, self.head_dim**-0.5, self.softcap, rotary, latents=latents)
