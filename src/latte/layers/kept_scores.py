"""Scores of tokens: which of them stay visible after they have left the window.

Shape suffixes: B batch, T tokens, E hidden size, G key/value heads.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from latte.layers.native import is_hooked
from latte.layers.parts import InitializedModule, input_dtype
from latte.ops import decoding

WIDTH = 64  # of the hidden layer
EPS = 1e-6  # of the norm


class KeptScores(InitializedModule):
    """``r = W2 gelu(W1 x / rms(x) + b1) + b2``: the score of a token, for each key/value head.

    A score depends on the token alone, not on later queries. W2 and b2 start at 0: all scores are
    then equal, and the latest tokens are kept. The choice of tokens has no gradient, so the scores
    are fitted on their own (:mod:`latte.conversion.kept_scores`).

    Args:
        hidden_size: Width E of the input.
        num_groups: Number G of key/value heads.
        width: Number of hidden units.
    """

    def __init__(self, hidden_size: int, num_groups: int, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_size, width)
        self.down = nn.Linear(width, num_groups)
        self.reset_parameters()
        self.requires_grad_(False)

    def train(self, mode: bool = True) -> Self:
        """As of any module. Loading a model turns gradients on, and this turns them off again.

        Distributed training waits for the gradient of every parameter that asks for one.
        """
        self.requires_grad_(False)
        return super().train(mode)

    def initial_values(self) -> dict[str, Tensor]:
        own = {"down.weight": self.down.weight, "down.bias": self.down.bias}
        return {name: torch.zeros_like(x) for name, x in own.items()}

    def forward(self, x: Tensor) -> Tensor:
        """Scores (B, T, G) of inputs (B, T, E), in the dtype of the weights."""
        x = F.rms_norm(x.to(input_dtype(self.up)), x.shape[-1:], eps=EPS)
        return _coarse(self.down(F.gelu(self.up(x))))

    def step(self, x_BE: Tensor) -> Tensor:
        """Scores (B, G) of one token per row."""
        parts: Any = self._modules  # ten times as fast as a module's attributes
        if any(type(each) is not nn.Linear or is_hooked(each) for each in parts.values()):
            return self(x_BE)  # type: ignore[no-any-return]
        up, down = parts["up"]._parameters, parts["down"]._parameters
        x = F.rms_norm(x_BE.to(up["weight"].dtype), x_BE.shape[-1:], eps=EPS)
        return _coarse(F.linear(F.gelu(F.linear(x, *up.values())), *down.values()))

    def native(self, x: Tensor) -> tuple[Any, ...]:
        """The weights and biases that a kernel reads with inputs x; empty if modules are called."""
        maps: Any = self.up, self.down
        if any(type(linear) is not nn.Linear or is_hooked(linear) for linear in maps):
            return ()
        held = [linear._parameters.get(name) for linear in maps for name in ("weight", "bias")]
        return tuple(held) if decoding.fits(x, *held) else ()


def _coarse(scores: Tensor) -> Tensor:
    """The scores with 11 bits.

    In a first layer the same words have the same score. The last bits, which depend on how many
    tokens a call has, must not decide which of them is kept.
    """
    return scores.half().to(scores.dtype)
