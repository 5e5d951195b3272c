"""Kept tokens on a GPU, in Triton: what the interface calls, with inputs that it has checked.

The layout of tokens is that of the PyTorch backend (torch_backend/kept.py), which waits for no GPU.
Its choice and its op are replaced by kernels. This file loads without Triton.

Shape suffixes: B batch, T tokens, H query heads, G key/value heads, K key width, D value width.
"""

from __future__ import annotations

from torch import Tensor

from latte.ops.kept import Kept, KeptLatents, KeptState
from latte.ops.state import Sinks
from latte.ops.tensors import Local, Sequences
from latte.ops.torch_backend import kept as torch_kept
from latte.ops.torch_backend.kept import state_after

__all__ = ["Plan", "attention", "state_after"]


class Plan:
    """Which sources each block of queries reads, and what is held after the call."""

    @staticmethod
    def of(
        kept: Kept,
        window: int,
        sequences: Sequences,
        state: KeptState | None,
        sinks: Sinks | None,
    ) -> torch_kept.Plan:
        """See :meth:`latte.ops.torch_backend.kept.Plan.of`."""
        from latte.ops.triton_backend.kept_choice import choose

        return torch_kept.Plan.of(kept, window, sequences, state, sinks, choose)


def attention(
    plan: torch_kept.Plan,
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGD: Tensor,
    local: Local,
    state: KeptState | None,
    sinks: Sinks | None,
    latents: KeptLatents | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The output, and with latents their log-mass and mean after the call."""
    from latte.ops.triton_backend.kept_attention import kept_op

    if local.scale <= 0:  # the kernels take the largest logit before they scale it
        sign = -1.0 if local.scale < 0 else 0.0
        q_BTHK, sinks = q_BTHK * sign, sinks and sinks._replace(q=sinks.q * sign)
        local = local._replace(scale=abs(local.scale) or 1.0)
    call = (plan, q_BTHK, k_BTGK, v_BTGD, local, state, sinks, latents)
    return torch_kept.attention(*call, kept_op)
