"""Raven: gated slot attention in which a token writes a few slots alone.

A router chooses k of a head's M slots for each token, and gives each a share r of the token, which
sum to 1. The other slots keep what they hold:

    a_t = exp(-r_t exp(A) softplus(W x_t + b))      per slot, with A and b per head
    K_t, V_t, o_t as in gated slot attention (``gsa.py``)

The layer is that of flash-linear-attention (``fla.layers.Raven``, version of 2026-08-22).

Shape suffixes: B batch, T tokens, E hidden size, H query heads, G key/value heads, M slots per
head, K key width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.ingredients.gsa import GatedSlotAttention
from latte.layers import RMSNorm

STRONGEST = 16.0  # the initial exp(A) are uniform up to this
STEPS = (1e-3, 1e-1)  # range of the initial softplus(b), on a logarithmic scale


class Raven(GatedSlotAttention):
    """Slots of which each token writes a few.

    It follows the defaults of flash-linear-attention: the router's scores are sigmoids, shares are
    the scores of the chosen slots over their sum, Gumbel noise is added to the router's logits in
    training, and queries and keys are normed after silu. The number of slots is another: there 64 a
    head, here what is given.

    Args:
        hidden_size, num_heads, num_slots: Arguments of :class:`GatedSlotAttention`.
        written_slots: Number k of slots of a head that a token writes; half of them if None, as
            published.
        options: Other arguments of :class:`GatedSlotAttention`.

    Raises:
        ValueError: ``written_slots`` is not from 1 to the number of slots of a head.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_slots: int,
        *,
        written_slots: int | None = None,
        rms_norm_eps: float = 1e-6,
        **options: Any,
    ) -> None:
        super().__init__(hidden_size, num_heads, num_slots, rms_norm_eps=rms_norm_eps, **options)
        M, G = num_slots // num_heads, self.num_key_value_heads
        self.written_slots = max(1, M // 2) if written_slots is None else written_slots
        if not 1 <= self.written_slots <= M:
            raise ValueError(
                f"Raven: written_slots must be from 1 to {M}, the slots of a head,"
                f" got {written_slots}"
            )
        self.router_proj = nn.Linear(hidden_size, G * M, bias=False)
        self.decay_proj = nn.Linear(hidden_size, G, bias=False)
        self.strength, self.decay_bias = (nn.Parameter(torch.empty(G)) for _ in range(2))
        self.q_norm = RMSNorm(self.head_dim, eps=rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, eps=rms_norm_eps)
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        """``strength`` is A, ``decay_bias`` is b."""
        strength, steps = (torch.empty_like(self.strength, dtype=torch.float32) for _ in range(2))
        strength.uniform_(1e-4, STRONGEST)
        steps.uniform_(math.log(STEPS[0]), math.log(STEPS[1])).exp_()
        # The inverse of softplus.
        return {"strength": strength.log(), "decay_bias": steps + torch.log(-torch.expm1(-steps))}

    def _features(self, q_BTHK: Tensor, k_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        q_BTHK, k_BTGK = super()._features(q_BTHK, k_BTGK)
        return self.q_norm(q_BTHK), self.k_norm(k_BTGK)

    def _log_decay(self, x_BTE: Tensor, wide: torch.dtype) -> Tensor:
        step_BTG = F.softplus(self.decay_proj(x_BTE).to(wide) + self.decay_bias)
        strength_BTG = self.strength.to(wide).exp() * step_BTG
        router_BTGM = self._heads(self.router_proj(x_BTE).to(wide), self.num_key_value_heads)
        return -strength_BTG[..., None] * self.shares(router_BTGM)

    def shares(self, router_BTGM: Tensor) -> Tensor:
        """The share of a token that each slot writes, (B, T, G, M): 0 if it is not chosen."""
        if self.training:
            router_BTGM = router_BTGM - torch.empty_like(router_BTGM).exponential_().log()
        scores_BTGM = router_BTGM.sigmoid()
        scores, chosen = scores_BTGM.topk(self.written_slots, -1)
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-9)
        return torch.zeros_like(scores_BTGM).scatter(-1, chosen, scores)
