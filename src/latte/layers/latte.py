"""Latte: latent attention alone (paper, eq. 6-14 and 18-19).

Shape suffixes: B batch, T tokens, E hidden size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from latte.layers.latents import LatentLogits
from latte.layers.mixer import Context, Mixer, MixerState, Projected
from latte.layers.parts import Rotary
from latte.layers.step import StepState
from latte.ops import latte_attention
from latte.ops.step import latte_step


class LatteAttention(Mixer):
    """``y_t = sum_l p(l|t) sum_{s<=t} p(s|l,t) v_s``, with q and k logits from ``latent_input``.

    Args:
        num_latents: Total number of latents over all heads. ``num_heads`` must divide it.
        latent_input: Source of the q and k logits: ``"none"`` (x itself), ``"conv"`` or
            ``"rglru"``. Values always come from x.
        latents: Other arguments of :class:`LatentLogits`, such as ``forgetting``.
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
        causal: bool = True,
        **latents: Any,
    ) -> None:
        super().__init__(hidden_size, num_heads, num_key_value_heads, head_dim, causal)
        sizes = hidden_size, num_heads, num_latents
        self.latents = LatentLogits(*sizes, latent_input, causal=causal, **latents)

    @classmethod
    def options(cls, config: Any) -> dict[str, Any]:
        return super().options(config) | LatentLogits.options(config)

    def _project(self, x_BTE: Tensor, state: MixerState, context: Context) -> Projected:
        q, k, log_decay, state = self.latents(x_BTE, state, context)
        v = self._heads(self.v_proj(x_BTE), self.num_key_value_heads)
        return Projected(v, state, q, k, log_decay=log_decay)

    def _attend(
        self, x_BTE: Tensor, projected: Projected, context: Context
    ) -> tuple[Tensor, MixerState]:
        out, latent = context.across(latte_attention)(
            projected.latent_q,
            projected.latent_k,
            projected.v,
            causal=self.causal,
            key_mask=context.key_mask,
            cu_seqlens=context.cu_seqlens,
            initial_state=projected.state.latent,
            output_final_state=context.output_final_state,
            log_decay=projected.log_decay,
        )
        return out, projected.state._replace(latent=latent)

    def _step(self, x_BE: Tensor, state: StepState, rotary: Rotary | None) -> Tensor:
        latent, real = state.latent, state.step_context.real
        assert latent is not None
        q, k, log_decay = self.latents.step(x_BE, state)
        v = state.step_context.plan.linear_maps(x_BE, self.v_proj)[0]
        v = v.view(len(x_BE), self.num_key_value_heads, -1)
        return latte_step(q, k, v, latent.log_mass, latent.mean, real, log_decay=log_decay)
