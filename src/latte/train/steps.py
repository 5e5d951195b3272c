"""A training step outside the Trainer: AdamW, autocast, a step that cannot spoil the weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

# What libraries keep in more than one dimension and is no matrix: biases by head, Mamba's rates of
# forgetting, RWKV's rates, mixing shares and bonuses.
_RATES = re.compile(r"(bias|bonus|A_log|time_\w+)$")


def decayed_names(model: nn.Module) -> list[str]:
    """Parameters that weight decay is for: matrices.

    Not norms, biases and rates of forgetting, whichever library's, nor what a layer names in its
    ``undecayed``.
    """
    spared = {
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name in getattr(module, "undecayed", ())
    }
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2 and name not in spared and not _RATES.search(name)
    ]


def adamw(
    model: nn.Module,
    rate: Callable[[nn.Parameter], float],
    *,
    weight_decay: float,
    betas: Sequence[float],
) -> torch.optim.Optimizer:
    """AdamW over a model's parameters, each at its ``rate``."""
    decayed = set(decayed_names(model))
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        decay = weight_decay if name in decayed else 0.0
        groups.setdefault((rate(parameter), decay), []).append(parameter)
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
