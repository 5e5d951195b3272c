"""The recurrences of Mamba and Griffin on a CPU, in place of Transformers' loops over time.

Transformers computes one token after the other (Mamba without the `mamba_ssm` kernels, Griffin
always). For every token, the backward pass writes zeros or copies of the length of the whole
sequence. So at 128 tokens a tiny Mamba reads about a hundred tokens a second. Both recurrences are
diagonal, and our scan computes them. Nothing is changed on a GPU, or if the kernels are there.

Shape suffixes: B batch, T tokens, C channels, N states per channel.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.ops.torch_backend.recurrence import linear_recurrence


def install(model_type: str) -> None:
    """Let Transformers' Mamba or Griffin (`recurrent_gemma`) use the scan instead of a loop.

    Other types, and further calls, have no effect.
    """
    if model_type == "mamba" and importlib.util.find_spec("mamba_ssm") is None:
        _replace(_library(model_type), "mamba_selective_scan", _mamba)
    elif model_type == "recurrent_gemma":
        _replace(_library(model_type).RecurrentGemmaRglru, "_rnn_scan", _griffin)


def _library(model_type: str) -> Any:
    return importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")


def _replace(owner: Any, name: str, make: Any) -> None:
    looping = getattr(owner, name, None)
    if looping is not None and not hasattr(looping, "looping"):
        scan: Any = functools.wraps(looping)(make(looping))
        scan.looping = looping
        setattr(owner, name, scan)


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


def _mamba(looping: Any) -> Any:
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

    return scan


def _griffin(looping: Any) -> Any:
    """Griffin (arXiv 2402.19427), eq. 4: ``h_t = a_t h_{t-1} + x_t``, from 0 where ``reset``."""

    def scan(
        block: Any,
        hidden_states: Tensor,
        recurrent_gate: Tensor,
        reset: Tensor,
        recurrent_states: Tensor | None,
        acc_dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:
        if hidden_states.shape[1] == 1 or hidden_states.device.type != "cpu":
            inputs = hidden_states, recurrent_gate, reset, recurrent_states, acc_dtype
            return looping(block, *inputs)
        inputs_BTC = hidden_states.to(acc_dtype)
        initial_BC = recurrent_states
        if initial_BC is None:
            initial_BC = torch.zeros_like(inputs_BTC[:, 0])
        states = linear_recurrence((recurrent_gate * ~reset).to(acc_dtype), inputs_BTC, initial_BC)
        return states.to(hidden_states.dtype), states[:, -1]

    return scan
