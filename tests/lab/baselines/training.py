"""A few steps of training, for tests of the comparators."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def losses(
    model: torch.nn.Module, loss_of: Callable[[], Tensor], steps: int, rate: float
) -> list[float]:
    """The loss before each step of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    found = []
    for _ in range(steps):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean over the tokens that have a next one."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
