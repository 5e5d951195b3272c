"""Mamba's selective scan on a CPU, in the place of Transformers' loop over time.

Without the `mamba_ssm` kernels, Transformers runs one step of the recurrence after the other, and
the backward pass of each slice writes zeros as long as the whole sequence: at 128 tokens a tiny
model reads about a hundred tokens a second. The recurrence is diagonal, and our scan computes it.
On a GPU, and where the kernels are there, nothing is changed.

Shape suffixes: B batch, T tokens, C channels, N states per channel.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.ops.torch_backend.recurrence import linear_recurrence

LIBRARY = "transformers.models.mamba.modeling_mamba"
FUNCTION = "mamba_selective_scan"


def selective_scan(
    u_BCT: Tensor,
    step_BCT: Tensor,
    a_CN: Tensor,
    b_BNT: Tensor,
    c_BNT: Tensor,
    skip_C: Tensor | None,
    gate_BCT: Tensor | None,
) -> Tensor:
    """``x_t = exp(dt_t A) x_{t-1} + dt_t B_t u_t``, ``y_t = (C_t x_t + D u_t) * silu(gate)``.

    Mamba (arXiv 2312.00752), section 3.2 and algorithm 2; computed in fp32.
    """
    B, C, T = u_BCT.shape
    u, step, b, c = (x.float().mT for x in (u_BCT, step_BCT, b_BNT, c_BNT))
    decay_BTE = torch.exp(step[..., None] * a_CN.float()).flatten(2)
    inputs_BTE = ((step * u)[..., None] * b[:, :, None]).flatten(2)
    states = linear_recurrence(decay_BTE, inputs_BTE, torch.zeros_like(inputs_BTE[:, 0]))
    y_BTC = torch.einsum("btcn,btn->btc", states.unflatten(2, (C, -1)), c)
    y_BCT = y_BTC.mT if skip_C is None else y_BTC.mT + u_BCT * skip_C[:, None]
    return y_BCT if gate_BCT is None else y_BCT * F.silu(gate_BCT)


def install() -> None:
    """Let Transformers' Mamba use the scan where it would loop. Calling it again does no harm."""
    module = importlib.import_module(LIBRARY)
    looping = getattr(module, FUNCTION, None)
    if looping is None or hasattr(looping, "looping") or importlib.util.find_spec("mamba_ssm"):
        return

    @functools.wraps(looping)
    def scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **options: Any,
    ) -> Any:
        if return_last_state or hidden_states.device.type != "cpu":
            rest = D, z, delta_bias, delta_softplus, return_last_state
            return looping(hidden_states, dt, A, B, C, *rest, **options)
        if delta_bias is not None:
            dt = dt + delta_bias.to(dt.dtype)[..., None]
        dt = F.softplus(dt) if delta_softplus else dt
        return selective_scan(hidden_states, dt, A, B, C, D, z)

    scan.looping = looping  # type: ignore[attr-defined]
    setattr(module, FUNCTION, scan)
