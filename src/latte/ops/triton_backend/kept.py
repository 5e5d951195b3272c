"""Kept tokens on a GPU, in Triton: what the interface calls, with inputs that it has checked.

The layout of tokens is the PyTorch backend's (torch_backend/kept_plan.py), which waits for no GPU.
Its choice and its op are replaced by kernels. This file loads without Triton.

Shape suffixes: B batch, T tokens, H query heads, G key/value heads, K key width, D value width.
"""

from __future__ import annotations

from torch import Tensor

from latte.ops.arguments import KeptInputs
from latte.ops.torch_backend import kept as torch_kept
from latte.ops.torch_backend.kept import state_after
from latte.ops.torch_backend.kept_plan import Plan

__all__ = ["attention", "plan_of", "state_after"]


def plan_of(x: KeptInputs) -> Plan:
    """See :func:`latte.ops.torch_backend.kept_plan.plan_of`."""
    from latte.ops.triton_backend.kept_choice import choose

    return Plan.of(x.kept, x.window, x.sequences, x.state, x.sinks, choose)


def attention(plan: Plan, x: KeptInputs) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The output, and with latents their log-mass and mean after the call."""
    from latte.ops.triton_backend.kept_attention import kept_op

    scale, sinks = x.local.scale, x.sinks
    if scale <= 0:  # the kernels take the largest logit before they scale it
        sign = -1.0 if scale < 0 else 0.0
        x = x._replace(q=x.q * sign, sinks=sinks and sinks._replace(q=sinks.q * sign))
        x = x._replace(local=x.local._replace(scale=abs(scale) or 1.0))
    return torch_kept.attention(plan, x, kept_op)
