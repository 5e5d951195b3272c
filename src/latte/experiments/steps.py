"""A training step outside the Trainer: AdamW, autocast, a step that cannot spoil the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn


def adamw(
    rated: Iterable[tuple[nn.Parameter, float]], *, weight_decay: float, betas: Sequence[float]
) -> torch.optim.Optimizer:
    """AdamW over (parameter, learning rate) pairs; weight decay is for matrices alone."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter, rate in rated:
        decay = weight_decay if parameter.ndim >= 2 else 0.0
        groups.setdefault((rate, decay), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": parameters, "lr": rate, "weight_decay": decay}
            for (rate, decay), parameters in groups.items()
        ],
        betas=(betas[0], betas[1]),
        fused=True,
    )


def take_step(
    model: nn.Module, loss: Tensor, optimizer: Any, scheduler: Any, max_grad_norm: float
) -> bool:
    """Backward, clip, step. False, and no weight is changed, if anything is not finite.

    `max_grad_norm` 0: no clipping.
    """
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or math.inf)
    if not bool(torch.isfinite(loss) & torch.isfinite(norm)):
        return False
    optimizer.step()
    scheduler.step()
    return True


def autocast(device: torch.device, bf16: bool) -> Any:
    """bf16 autocast, or nothing."""
    return torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()
