"""One layer's probabilities over one text, whatever kind of layer it is.

Shape suffixes: T tokens read, P tokens shown (P <= T, the first ones), H heads, L latents, S
states of p(l|t): the window, if there is one, and then the latents.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mixing:
    """One layer's probabilities over one text.

    Args:
        states_THS: p(l|t), fp32; None for a layer without latents.
        latent_k_THL: key logits: p(s|l,t) is their softmax over s <= t - ``delay``.
        window_HPP: the window's softmax p(s|l=0,t); of a layer without latents p(s|t) itself.
        width: keys that the window sees, self included; None is everything earlier.
        delay: tokens that pass before a latent sees one.
    """

    states_THS: Tensor | None = None
    latent_k_THL: Tensor | None = None
    window_HPP: Tensor | None = None
    width: int | None = None
    delay: int = 0

    @property
    def heads(self) -> int:
        parts = (self.states_THS, self.window_HPP)
        return next(x.shape[axis] for x, axis in zip(parts, (1, 0), strict=True) if x is not None)

    @property
    def latents(self) -> int:
        """L, 0 for a layer without latents."""
        return 0 if self.latent_k_THL is None else self.latent_k_THL.shape[2]

    @property
    def names(self) -> list[int]:
        """The number of each state: 0 is the window, 1 to L are the latents."""
        if self.states_THS is None:
            return []
        return list(range(self.latents + 1 - self.states_THS.shape[2], self.latents + 1))

    def latent_weights(self, head: int, shown: int) -> Tensor:
        """p(s|l,t) of the first tokens, (L, P, P); rows without a visible source are zero."""
        assert self.latent_k_THL is not None
        token = torch.arange(shown, device=self.latent_k_THL.device)
        seen = token[None] <= token[:, None] - self.delay
        logits = self.latent_k_THL[:shown, head].T[:, None].expand(-1, shown, -1)
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        return weights.masked_fill(~seen, 0.0)

    def source_weights(self, head: int, shown: int) -> Tensor:
        """p(s|t) of the first tokens, (P, P): the mixture of the window and the latents."""
        if self.states_THS is None:
            assert self.window_HPP is not None
            return self.window_HPP[head, :shown, :shown]
        p_PS = self.states_THS[:shown, head]
        parts = self.latent_weights(head, shown)
        if self.window_HPP is not None:
            parts = torch.cat([self.window_HPP[None, head, :shown, :shown], parts])
        return torch.einsum("ts,stu->tu", p_PS, parts)
