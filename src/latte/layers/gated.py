"""Gated Latte-Macchiato: the mixer of a block that has no feed-forward network.

It is beyond the paper. Its parts are those of Mamba-2 (arXiv 2405.21060). The weights of window and
latents stay one normalised distribution. Shape suffixes: B batch, T tokens, E hidden size, H query
heads, G key/value heads, K key width, D value width, C channels of the short convolution, S its
taps.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from latte.layers.attention import LatteMacchiato
from latte.layers.checks import check_positive
from latte.layers.mixer import Context, MixerState, Projected
from latte.layers.native import linear_maps
from latte.layers.parts import CausalConv1d, RMSNorm, Rotary
from latte.layers.projections import project
from latte.layers.step import StepState


class GatedMacchiato(LatteMacchiato):
    """``y_t = silu(W x_t) * norm(sum_s p(s|t) v_s + skip * v_t)``, p(s|t) of LatteMacchiato.

    The window's q and k and the common v go through a causal convolution per channel, then silu.
    The norm is that of each head, and ``skip`` (H, D) is learnt and begins at 1.

    Args:
        hidden_size, num_heads, num_latents: Arguments of :class:`LatteMacchiato`.
        value_dim: Width of a head's values; ``2 * hidden_size / num_heads`` if None.
        short_conv_size: Number of taps of the convolution.
        options: Other arguments of :class:`LatteMacchiato`.
    """

    carries: ClassVar[tuple[str, ...]] = ("latent", "window", "short_conv")
    stepped = ("latents", "short_conv")
    steps = True  # that of LatteMacchiato, which calls _output
    uses = (*LatteMacchiato.uses, "value_dim", "short_conv_size")
    undecayed: tuple[str, ...] = ("skip",)

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_latents: int,
        *,
        value_dim: int | None = None,
        short_conv_size: int = 4,
        rms_norm_eps: float = 1e-6,
        **options: Any,
    ) -> None:
        super().__init__(hidden_size, num_heads, num_latents, rms_norm_eps=rms_norm_eps, **options)
        H, G, K = self.num_heads, self.num_key_value_heads, self.head_dim
        D = 2 * hidden_size // num_heads if value_dim is None else value_dim
        check_positive(type(self).__name__, value_dim=D, short_conv_size=short_conv_size)
        self.value_dim = D
        self.v_proj = nn.Linear(hidden_size, G * D, bias=False)
        self.o_proj = nn.Linear(H * D, hidden_size, bias=False)
        self.short_conv = CausalConv1d(H * K + G * K + G * D, short_conv_size)
        self.gate_proj = nn.Linear(hidden_size, H * D, bias=False)
        self.skip = nn.Parameter(torch.empty(H, D))
        self.output_norm = RMSNorm(D, eps=rms_norm_eps)
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        return {"skip": torch.ones_like(self.skip)}

    @classmethod
    def options(cls, config: Any) -> dict[str, Any]:
        own = {"value_dim": config.value_dim, "short_conv_size": config.short_conv_size}
        return super().options(config) | own

    def near(self, x_BTE: Tensor, state: MixerState, context: Context) -> Projected:
        H, G = self.num_heads, self.num_key_value_heads
        maps = project(x_BTE, self.q_proj, self.k_proj, self.v_proj)
        (q, k, v), state = self._convolved(maps, state, context)
        heads = self._heads(q, H), self._heads(k, G), self._heads(v, G)
        return self._rotated(*heads, state, context)

    def _convolved(
        self, maps: tuple[Tensor, ...], state: MixerState, context: Context
    ) -> tuple[tuple[Tensor, ...], MixerState]:
        """silu(conv(maps)) by parts, and the state with the last S-1 inputs (B, S-1, C)."""
        mixed_BTC, tail = self.short_conv(
            torch.cat(maps, -1),
            context.key_mask,
            context.cu_seqlens,
            state.short_conv,
            context.output_final_state,
            shards=context.shards,
        )
        parts = F.silu(mixed_BTC).split([part.shape[-1] for part in maps], -1)
        return parts, state._replace(short_conv=tail)

    def _output(self, mixture: Tensor, v: Tensor, x: Tensor) -> Tensor:
        v = v.repeat_interleave(self.num_heads // self.num_key_value_heads, -2)
        gate = self._heads(linear_maps(x, self.gate_proj)[0], self.num_heads)
        return self.output_norm(mixture + self.skip * v) * F.silu(gate)

    def _local_step(
        self, x_BE: Tensor, state: StepState, rotary: Rotary | None
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Rotary | None]:
        local, rotary = super()._local_step(x_BE, state, rotary)
        assert state.short_conv is not None
        given_BC = torch.cat([part.flatten(1) for part in local], -1)
        mixed_BC = F.silu(self.short_conv.step(given_BC, state.short_conv, state.step_context.real))
        parts = mixed_BC.split([part[0].numel() for part in local], -1)
        q, k, v = (flat.reshape(part.shape) for flat, part in zip(parts, local, strict=True))
        return (q, k, v), rotary
