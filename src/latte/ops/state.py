"""The states that carry a sequence on: what a decoder keeps instead of a growing cache.

Shape suffixes: B batch (or N packed sequences), H query heads, G key/value heads, L latents per
head, D value width, K key width, F feature width, W window.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LatteState(NamedTuple):
    """What a Latte head has seen: a log-mass and a mean for each latent.

    ``log_mass[l] = logsumexp_s k_s[l]`` over the sources seen so far and ``mean[l] = sum_s
    p(s|l) v_s``. The mean never exceeds ``max |v|``, whatever the logits or the length (paper,
    eq. 7-14). The empty state is ``(-inf, 0)``.

    Attributes:
        log_mass: (B, H, L), fp32 (fp64 for fp64 inputs).
        mean: (B, H, L, D), of the same dtype.
    """

    log_mass: Tensor
    mean: Tensor

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: int,
        latents: int,
        value_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> LatteState:
        """The state that has seen nothing, the neutral element of :meth:`merge`."""
        log_mass = torch.full((batch, heads, latents), -torch.inf, device=device, dtype=dtype)
        return cls(log_mass, log_mass.new_zeros(batch, heads, latents, value_dim))

    def merge(self, other: LatteState) -> LatteState:
        """The state of this sequence followed by the other one (associative).

        ``A = logaddexp(A1, A2)``, ``mu = e^{A1-A} mu1 + e^{A2-A} mu2``. Safe, also in its
        gradients, when one side or both are empty.
        """
        return LatteState(*merge_states(self.log_mass, self.mean, other.log_mass, other.mean))


class WindowState(NamedTuple):
    """The last W-1 local keys and values, oldest first; ``mask`` is False where there is none.

    Attributes:
        keys: (B, W-1, G, K).
        values: (B, W-1, G, D).
        mask: (B, W-1) bool.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor


class LinearState(NamedTuple):
    """Undirected linear attention: ``sum_s phi(k_s) v_s`` and ``sum_s phi(k_s)`` (eq. 4-5).

    Attributes:
        memory: (B, H, F, D), fp32 (fp64 for fp64 inputs).
        normaliser: (B, H, F), of the same dtype.
    """

    memory: Tensor
    normaliser: Tensor


def merge_states(a1: Tensor, mu1: Tensor, a2: Tensor, mu2: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two (log-mass, mean) pairs without ever forming -inf - -inf.

    The reference point is the larger log-mass, replaced by 0 where both are -inf; no term of the
    result, or of its gradient, is then NaN.
    """
    top = torch.maximum(a1, a2).detach()
    top = torch.where(torch.isneginf(top), 0.0, top)
    e1, e2 = torch.exp(a1 - top), torch.exp(a2 - top)
    mass = e1 + e2
    empty = mass == 0
    safe = torch.where(empty, 1.0, mass)
    mean = (e1 / safe).unsqueeze(-1) * mu1 + (e2 / safe).unsqueeze(-1) * mu2
    return torch.where(empty, -torch.inf, top + torch.log(safe)), mean
