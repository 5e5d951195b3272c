"""A token mixer of one's own, in one file: moving averages of the values, at several speeds.

    h_t[n] = a_n h_{t-1}[n] + (1 - a_n) v_t        per head, with N learnt decays a_n in (0, 1)
    y_t    = sum_n p(n|t) h_t[n],                  p(n|t) = softmax_n(W x_t)

It is all that a mixer needs: what a configuration gives it, its own initial values, and two
methods. Named in a recipe's ``plugins`` it trains as any other model does, generates from a state
of constant size, and is loaded with its checkpoint (``examples/exponential_average.yaml``):

    latte train examples/exponential_average.yaml

Masked tokens neither count nor let anything decay, so that a padded sequence is the bare one; a
packed sequence starts at zero.

Shape suffixes: B batch, T tokens, E hidden size, H heads, N averages per head, D value width, C
tokens of a chunk.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from latte.layers import Context, Mixer, MixerState, Projected
from latte.layers.checks import check_positive
from latte.models.registry import register_mixer, register_preset

CHUNK = 64  # tokens whose weights on each other are held at once
HALF_LIVES = (1.0, 512.0)  # tokens; a head's first averages are spread between, log-evenly


class ExponentialAverage(Mixer):
    """Moving averages of the values, mixed by what the token asks for.

    Args:
        num_averages: N, averages per head.
    """

    carries = ("own",)
    undecayed = ("theta",)

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_averages: int = 4,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
    ) -> None:
        super().__init__(
            hidden_size,
            num_heads,
            num_key_value_heads=num_key_value_heads,
            head_dim=head_dim,
            causal=causal,
        )
        check_positive("ExponentialAverage", num_averages=num_averages)
        if not causal:
            raise ValueError("ExponentialAverage: expected causal=True, it averages the past")
        self.q_proj = nn.Linear(hidden_size, num_heads * num_averages, bias=False)
        self.theta = nn.Parameter(torch.empty(num_heads, num_averages))
        self.reset_parameters()

    @classmethod
    def options(cls, config: Any) -> dict[str, Any]:
        return super().options(config) | {"num_averages": getattr(config, "num_averages", 4)}

    def initial_values(self) -> dict[str, Tensor]:
        """theta = logit(a), where a^halflife = 1/2."""
        low, high = (math.log2(life) for life in HALF_LIVES)
        halves_N = 2.0 ** torch.linspace(low, high, self.theta.shape[1])
        return {"theta": torch.logit(0.5 ** (1.0 / halves_N)).expand_as(self.theta).clone()}

    def _project(self, x_BTE: Tensor, state: MixerState, context: Context) -> Projected:
        """The values, the averages after each token (``extra``), and the state after the last."""
        v = self._heads(self.v_proj(x_BTE), self.num_key_value_heads)
        v = v.repeat_interleave(self.num_heads // self.num_key_value_heads, 2)
        wide = v.to(torch.promote_types(v.dtype, torch.float32))
        real = context.real(x_BTE)
        if context.cu_seqlens is None:
            averages, last = self._average(wide, real, state.own)
        else:
            bounds = context.cu_seqlens.tolist()
            rows, lasts = [], []
            for n, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
                own = None if state.own is None else state.own[n : n + 1]
                row, last = self._average(wide[:, start:stop], real[:, start:stop], own)
                rows.append(row)
                lasts.append(last)
            averages, last = torch.cat(rows, 1), torch.cat(lasts)
        return Projected(v, state._replace(own=last), extra=averages)

    def _average(
        self, v_BTHD: Tensor, real_BT: Tensor, own_BHND: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The averages after each token (B, T, H, N, D), and after the last."""
        log_a_HN = nn.functional.logsigmoid(self.theta.to(v_BTHD.dtype))
        gain_HN = nn.functional.softplus(self.theta.to(v_BTHD.dtype)).neg().exp()  # 1 - a
        if own_BHND is None:
            B, _, H, D = v_BTHD.shape
            own_BHND = v_BTHD.new_zeros(B, H, log_a_HN.shape[1], D)
        found = [v_BTHD.new_zeros(v_BTHD.shape[0], 0, *own_BHND.shape[1:])]
        for v_BCHD, real_BC in zip(v_BTHD.split(CHUNK, 1), real_BT.split(CHUNK, 1), strict=True):
            count_BC = real_BC.cumsum(1).to(v_BTHD.dtype)
            gap_BCC = (count_BC[:, :, None] - count_BC[:, None]).clamp_min(0)
            seen_BCC = real_BC[:, None] & torch.ones_like(gap_BCC, dtype=torch.bool).tril()
            weights = torch.exp(log_a_HN[:, :, None, None] * gap_BCC[:, None, None])
            weights = weights * gain_HN[:, :, None, None] * seen_BCC[:, None, None]
            values_BCHD = v_BCHD.masked_fill(~real_BC[:, :, None, None], 0.0)
            kept = torch.exp(log_a_HN * count_BC[:, :, None, None])  # (B, C, H, N)
            h = torch.einsum("bhnts,bshd->bthnd", weights, values_BCHD)
            h = h + kept[..., None] * own_BHND[:, None]
            found.append(h)
            own_BHND = h[:, -1]
        return torch.cat(found, 1), own_BHND

    def _attend(
        self, x_BTE: Tensor, projected: Projected, context: Context
    ) -> tuple[Tensor, MixerState]:
        averages = projected.extra
        p_BTHN = self._heads(self.q_proj(x_BTE), self.num_heads).to(averages.dtype).softmax(-1)
        out_BTHD = torch.einsum("bthn,bthnd->bthd", p_BTHN, averages)
        return out_BTHD.to(projected.v.dtype), projected.state


register_mixer("exponential_average", ExponentialAverage)
register_preset(
    "exponential-average++",
    mixer="exponential_average",
    latent_input="none",
    position="none",  # the order of tokens is in the averages
    num_averages=4,
)
