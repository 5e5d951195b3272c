"""The recurrences of Mamba, Mamba-2 and Griffin, in place of Transformers' own code for them.

Transformers computes one token after the other (Mamba without the `mamba_ssm` kernels, Griffin
always). For every token, the backward pass writes zeros or copies of the length of the whole
sequence. So at 128 tokens a tiny Mamba reads about a hundred tokens a second on a CPU, and on a GPU
every token is a launch. Both recurrences are diagonal, and our scan computes them. Mamba's takes
states x channels of memory for each token, so it serves CPUs alone.

Mamba-2 is computed in chunks there too, but with the scores of every head, where all heads of a
group have the same. Some releases even make the products inside them one by one.

Nothing is changed if the kernels of `mamba_ssm` are there.

Shape suffixes: B batch, T tokens, C channels, N states per channel. Of Mamba-2: S chunks, Q tokens
of a chunk, G groups of heads, R heads of a group, P channels of a head.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.ops.torch_backend.recurrence import linear_recurrence


def install(model_type: str) -> None:
    """Let Transformers' Mamba, Mamba-2 or Griffin (`recurrent_gemma`) use this module's code.

    Other types, and further calls, have no effect.
    """
    without_kernels = importlib.util.find_spec("mamba_ssm") is None
    if model_type == "mamba" and without_kernels:
        _replace(_library(model_type), "mamba_selective_scan", _mamba)
    elif model_type == "mamba2" and without_kernels:
        _replace(_library(model_type), "mamba2_chunk_scan", _mamba2)
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


def chunked_scan(
    x_BTGRP: Tensor,
    log_decay_BTGR: Tensor,
    b_BTGN: Tensor,
    c_BTGN: Tensor,
    initial_BGRPN: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """``h_t = exp(log_decay_t) h_{t-1} + x_t b_t^T``, ``y_t = h_t c_t``, in chunks.

    Mamba-2 (arXiv 2405.21060), section 6. Inside a chunk it is a masked product of scores and
    inputs, and between chunks a recurrence of their states.

    Returns:
        y, (B, T, G, R, P), and the last state, (B, G, R, P, N).
    """
    B, T, G, R, P = x_BTGRP.shape

    def cut(x: Tensor) -> Tensor:
        """(B, T, ...) to (B, S, Q, ...); zeros at the end add nothing and decay nothing."""
        return F.pad(x, (0, 0) * (x.ndim - 2) + (0, -T % chunk)).unflatten(1, (-1, chunk))

    x = cut(x_BTGRP).permute(0, 1, 3, 4, 2, 5)  # B S G R Q P
    decay = cut(log_decay_BTGR).permute(0, 1, 3, 4, 2).cumsum(-1)  # B S G R Q
    b, c = (cut(z).permute(0, 1, 3, 2, 4)[:, :, :, None] for z in (b_BTGN, c_BTGN))  # B S G 1 Q N

    def masked(sums: Tensor) -> Tensor:
        """exp(sums[t] - sums[s]) for s <= t, else 0."""
        later = torch.ones(2 * sums.shape[-1:], dtype=torch.bool, device=x.device).triu(1)
        return (sums[..., :, None] - sums[..., None, :]).masked_fill(later, -math.inf).exp()

    y = (c @ b.mT * masked(decay)) @ x
    whole = decay[..., -1]
    states = (x * (whole[..., None] - decay).exp()[..., None]).mT @ b  # B S G R P N
    first = torch.zeros_like(states[:, :1]) if initial_BGRPN is None else initial_BGRPN[:, None]
    states = torch.cat([first.to(states.dtype), states], 1).permute(0, 2, 3, 1, 4, 5)
    between = masked(F.pad(whole.permute(0, 2, 3, 1).cumsum(-1), (1, 0)))  # B G R S+1 S+1
    states = (between @ states.flatten(-2)).view_as(states)
    before = states[:, :, :, :-1].permute(0, 3, 1, 2, 4, 5)
    y = y + (c @ before.mT) * decay.exp()[..., None]
    return y.permute(0, 1, 4, 2, 3, 5).flatten(1, 2)[:, :T], states[:, :, :, -1]


def _mamba2(_chunks: Any) -> Any:
    """The scan of `chunked_scan` with the arguments of the library's."""

    def scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        return_final_states: bool = False,
        **options: Any,
    ) -> Any:
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit).float()
        x, groups = hidden_states.float(), (B.shape[2], -1)
        y, last = chunked_scan(
            (x * dt[..., None]).unflatten(2, groups),
            (dt * A.float()).unflatten(2, groups),
            B.float(),
            C.float(),
            None if initial_states is None else initial_states.unflatten(1, groups),
            chunk_size,
        )
        y = y.flatten(2, 3)
        y = y if D is None else y + D[:, None] * x
        return (y, last.flatten(1, 2)) if return_final_states else y

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
        if hidden_states.shape[1] == 1:
            inputs = hidden_states, recurrent_gate, reset, recurrent_states, acc_dtype
            return looping(block, *inputs)
        inputs_BTC = hidden_states.to(acc_dtype)
        initial_BC = recurrent_states
        if initial_BC is None:
            initial_BC = torch.zeros_like(inputs_BTC[:, 0])
        states = linear_recurrence((recurrent_gate * ~reset).to(acc_dtype), inputs_BTC, initial_BC)
        return states.to(hidden_states.dtype), states[:, -1]

    return scan
