"""Controls of a converted model with kept tokens: the same weights, and other scores of tokens.

`random`: any tokens are kept; `latest`: the last ones that left the window, as by a wider window;
`keydiff`: keys far from the mean key, the best score without training (arXiv 2504.15364). Its mean
is that of the English text that landmarks are made of, since a score is wanted when its token is
read. Shape suffixes: B
batch, T tokens, E hidden size, G key groups, K head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from latte.conversion.landmarks import calibration_rows
from latte.errors import LatteError

ROWS, LENGTH = 4, 512  # of the mean key's text, in tokens


class RandomScores(nn.Module):
    """A random score for every token, in the order in which they are read."""

    def __init__(self, groups: int, seed: int) -> None:
        super().__init__()
        self.groups, self.generator = groups, torch.Generator().manual_seed(seed)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, G) of inputs (B, T, E)."""
        return torch.rand(*x.shape[:-1], self.groups, generator=self.generator).to(x)

    def step(self, x_BE: Tensor) -> Tensor:
        return self.forward(x_BE)


class LatestScores(RandomScores):
    """Equal scores: of these the later token is kept."""

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], self.groups)


class KeyDifference(nn.Module):
    """Minus the cosine between a key, before rotation, and the mean direction of keys.

    Attributes:
        mean: (G, K), the sum of directions of the keys that were seen while `learning`.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = (layer,)  # in a tuple: no part of this module
        self.mean: Tensor | float = 0.0
        self.learning = True

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, G) of inputs (B, T, E)."""
        (layer,) = self.layer
        k = normalize(layer.heads(x.to(layer.k_proj.weight.dtype))[1].float(), dim=-1)
        if self.learning:
            self.mean = self.mean + k.flatten(0, 1).sum(0)
        return -(k * normalize(torch.as_tensor(self.mean), dim=-1)).sum(-1).to(x.dtype)

    def step(self, x_BE: Tensor) -> Tensor:
        return self.forward(x_BE[:, None])[:, 0]


@torch.no_grad()
def set_scores(model: Any, tokenizer: Any, name: str) -> None:
    """Let a converted model keep tokens by other scores: `random`, `latest` or `keydiff`.

    Raises:
        LatteError: another name, or the model keeps no tokens.
    """
    layers = [x.self_attn for x in model.model.layers if getattr(x.self_attn, "kept_tokens", 0)]
    if name not in ("random", "latest", "keydiff"):
        raise LatteError(f"scores: expected random, latest or keydiff, got {name!r}")
    if not layers:
        raise LatteError("scores: expected a model with kept tokens, got one without")
    for layer in layers:
        if name == "keydiff":
            layer.latents.kept_scores = KeyDifference(layer)
            continue
        kind = RandomScores if name == "random" else LatestScores
        groups = layer.latents.kept_scores.down.out_features
        layer.latents.kept_scores = kind(groups, layer.layer_idx)
    if name == "keydiff":
        for row in calibration_rows(tokenizer, None, LENGTH)[:ROWS]:
            model.model(row.to(model.device), use_cache=False)
        for layer in layers:
            layer.latents.kept_scores.learning = False
