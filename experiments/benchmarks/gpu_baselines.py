"""Latte and the RG-LRU through flash-linear-attention, fed with what the same function needs.

Latte is gated linear attention with q = softmax(q), keys exp(k_t - A_t) and log-gates
A_{t-1} - A_t, where A_t is the running log-sum-exp of k: ``chunk_lightnet`` makes keys and gates
itself, ``chunk_gla`` gets them from ``torch.logcumsumexp``. The library is imported inside
functions; where it is missing, one line says so.

Shape suffixes: B batch, T tokens, H heads, L latents, D value width, E channels.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.benchmarks.gpu_common import reason
from experiments.benchmarks.records import say

Op = Callable[..., Tensor]


@functools.cache
def find(module: str, name: str) -> Any:
    """A function of flash-linear-attention; None, and one line, where it cannot be had."""
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # noqa: BLE001 - missing, too old, or broken here: all the same
        say(f"  {module}.{name} is left out ({reason(error)}): pip install flash-linear-attention")
        return None


def gates(k_BTHL: Tensor) -> tuple[Tensor, Tensor]:
    """Keys exp(k_t - A_t) in k's dtype, log-gates A_{t-1} - A_t in fp32; the first gate is 0."""
    A = torch.logcumsumexp(k_BTHL.float(), 1)
    # Of an empty state nothing is left whatever the gate: 0 keeps it finite.
    before = torch.cat([A[:, :1], A[:, :-1]], 1)
    return torch.exp(k_BTHL.float() - A).to(k_BTHL.dtype), before - A


def latte_baselines() -> dict[str, Op]:
    """Functions (q, k, v) -> out that compute causal Latte."""
    lightnet = find("fla.ops.lightnet", "chunk_lightnet")
    gla = find("fla.ops.gla", "chunk_gla")

    def with_lightnet(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return lightnet(q=q.softmax(-1), k=k, v=v, scale=1.0)[0]

    def with_gla(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, g = gates(k)
        return gla(q=q.softmax(-1), k=keys, v=v, g=g, scale=1.0)[0]

    found = {"chunk_lightnet": (lightnet, with_lightnet), "chunk_gla": (gla, with_gla)}
    return {name: op for name, (kernel, op) in found.items() if kernel is not None}


def rg_lru_baselines() -> dict[str, Op]:
    """Functions (x, recurrence gate, input gate, theta) -> h; gates in PyTorch, or compiled."""
    hgrn = find("fla.ops.hgrn", "chunk_hgrn")
    if hgrn is None:
        return {}
    compiled: Any = torch.compile(rg_lru_inputs)
    return {
        "chunk_hgrn": lambda *xs: hgrn(*rg_lru_inputs(*xs))[0],
        "chunk_hgrn, compiled gates": lambda *xs: hgrn(*compiled(*xs))[0],
    }


def rg_lru_inputs(x: Tensor, r: Tensor, i: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    """What enters the state, sqrt(1 - a^2) (i x), and log a, (B, T, E) in fp32."""
    log_a = -8.0 * torch.sigmoid(r.float()) * F.softplus(theta.float())
    # At the start of a sequence the factor is 1.
    first = torch.arange(x.shape[1], device=x.device)[None, :, None] == 0
    factor = torch.where(first, 1.0, torch.sqrt(-torch.expm1(2.0 * log_a)))
    return factor * torch.sigmoid(i.float()) * x.float(), log_a
