"""The loss of distillation, with no tensors of logits beyond the two models' own.

The two models' logits are the largest tensors of a step: 1 GB each for 2,048 tokens of Gemma in
bf16. Autograd would keep two more in fp32. Here the gradient is computed together with the loss, in
pieces of some rows, and takes the place of the teacher's logits.

Shape suffixes: N rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

PIECE = 2**24  # elements of the two distributions that are compared at a time


def divergence(logits_NV: Tensor, teacher_NV: Tensor, wanted_N: Tensor) -> Tensor:
    """Sum over the wanted rows of KL(softmax(teacher) || softmax(logits)), in fp32.

    Args:
        logits_NV: Logits that are trained.
        teacher_NV: Logits of the teacher, in the same dtype. **They are overwritten.**
        wanted_N: Whether a row counts.
    """
    total: Tensor = _Divergence.apply(logits_NV, teacher_NV, wanted_N)
    return total


class _Divergence(torch.autograd.Function):
    """The gradient of a row's logits is softmax(logits) - softmax(teacher)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, teacher: Tensor, wanted: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        rows = max(1, PIECE // logits.shape[-1])
        for start in range(0, len(logits), rows):
            piece = slice(start, start + rows)
            log_p = F.log_softmax(teacher[piece].float(), -1)
            log_q = F.log_softmax(logits[piece].float(), -1)
            kl = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
            total += torch.where(wanted[piece], kl, 0.0).sum()
            gradient = log_q.exp_().sub_(log_p.exp_())
            teacher[piece] = gradient.masked_fill_(~wanted[piece, None], 0.0)
        ctx.save_for_backward(teacher)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream, None, None
