"""Kept tokens by the native CPU kernels (``kept.cpp``, ``kept_choice.cpp``).

The plan but for the choice, and the state, are the PyTorch backend's. The kernel reads tokens and
what the state holds where they are: nothing is laid out in blocks.

Shape suffixes: B batch, T tokens, N states, M slots of a state, S slots of the layout, Z blocks of
C queries, X segments, n sinks, J kept keys, H query heads, G key/value heads, L latents, K key
width, D value width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from latte.ops.arguments import KeptInputs
from latte.ops.cpp_backend import ABSENT, SEGMENT
from latte.ops.custom_ops import custom_op, differentiable_op
from latte.ops.tensors import computation_dtype, without_masked
from latte.ops.torch_backend.kept import state_after
from latte.ops.torch_backend.kept_plan import Choice, ChoiceCall, Layout, Plan

__all__ = ["attention", "plan_of", "state_after"]


class NativeKept(NamedTuple):
    """The arguments of ``cpu_kept``. The state of the latents and the plan are contiguous."""

    q: Tensor
    k: Tensor
    v: Tensor
    latent_q: Tensor | None
    latent_k: Tensor | None
    log_mass: Tensor | None
    mean: Tensor | None
    old_k: Tensor | None  # (B, M, G, K)
    old_v: Tensor | None
    old_latent_k: Tensor | None
    sink_q: Tensor | None
    sink_k: Tensor | None  # (N, n, G, K)
    sink_v: Tensor | None
    log_decay: Tensor | None
    old_log_decay: Tensor | None
    sinks_seen: Tensor | None  # (B, Z, n) bool
    source: Tensor | None  # (B, S)
    kept: Tensor  # (B, G, Z, J)
    kept_there: Tensor
    late: Tensor  # (B, G, Z, C)
    late_there: Tensor
    begun: Tensor  # (B, G, Z) bool
    age: Tensor | None  # (Z,)
    owner: Tensor | None  # (Z,) packed sequence of each block
    ends: Tensor | None  # (N,)
    window: int
    block: int
    front: int
    scale: float
    softcap: float


def _fake(x: NativeKept) -> tuple[Tensor, ...]:
    """Output, final state, and the states that are saved: references, masses, sums."""
    (B, _, H, _), D, Z = x.q.shape, x.v.shape[3], x.kept.shape[2]
    out, dtype = x.v.new_empty(*x.q.shape[:3], D), computation_dtype(x.v.dtype)
    N, L, X = B if x.ends is None else x.ends.shape[0], 0, -(-Z // max(1, SEGMENT // x.block))
    if x.latent_k is not None:
        L = x.latent_k.shape[3]
    shapes = ((N, H, L), (N, H, L, D), (B, X, H, L), (B, X, H, L), (B, X, H, L, D))
    kinds = (dtype, dtype, torch.float64, dtype, dtype)
    found = (x.v.new_empty(s if L else 0, dtype=k) for s, k in zip(shapes, kinds, strict=True))
    return out, *found


if ABSENT is None:
    kept_op = differentiable_op(
        "cpu_kept",
        NativeKept,
        _fake,
        returns=["out", "log_mass", "mean"],
        gradients=NativeKept._fields[:15],
        saves=["saved_top", "saved_mass", "saved_sum"],
    )
    choice_op = custom_op("cpu_kept_choice", ChoiceCall, 4, ChoiceCall.buffers)


def choose(keys_BGS: Tensor, layout: Layout, window: int, count: int) -> Choice:
    """See :func:`latte.ops.torch_backend.kept_plan.choose`."""
    return Choice(*choice_op(*ChoiceCall.of(keys_BGS, layout, window, count)))


def plan_of(x: KeptInputs) -> Plan:
    """See :func:`latte.ops.torch_backend.kept_plan.plan_of`."""
    return Plan.of(x.kept, x.window, x.sequences, x.state, x.sinks, choose)


def attention(plan: Plan, x: KeptInputs) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The output, and with latents their log-mass and mean after the call."""
    layout, source = plan.layout, plan.layout.source
    local, state, sinks, latents = x.local, x.state, x.sinks, x.latents
    given: dict[str, Any] = dict.fromkeys(NativeKept._fields)
    given |= {"q": x.q, "k": x.k, "v": x.v}
    if latents is not None:
        given |= {"latent_q": latents.q, "latent_k": latents.k}
        given |= {"log_mass": latents.log_mass, "mean": latents.mean}
        given["log_decay"] = latents.log_decay
    if state is not None:
        given |= {"old_k": state.keys, "old_v": state.values}
        given |= {"old_latent_k": state.latent_keys, "old_log_decay": state.log_decay}
    if sinks is not None:
        far = (without_masked(sinks.mask, each) for each in (sinks.keys, sinks.values))
        given |= dict(zip(("sink_k", "sink_v"), far, strict=True))
        given |= {"sink_q": sinks.q, "sinks_seen": plan.sinks_seen}
    for name in ("kept", "kept_there", "late", "late_there"):
        given[name] = getattr(plan, name)
    given["source"] = None if source is None else torch.where(plan.real, source, -1)
    given |= {"begun": plan.heard(latents), "ends": layout.ends}
    given |= {"age": layout.age, "owner": layout.block_ids}
    for name in (*NativeKept._fields[5:7], *NativeKept._fields[15:25]):  # read in one piece
        if given[name] is not None:
            given[name] = given[name].contiguous()
    given |= {"window": local.window, "block": layout.C, "front": layout.front}
    given |= {"scale": local.scale, "softcap": local.softcap}
    out, A, mean, *_ = kept_op(*NativeKept(**given))
    if latents is None:
        return out, None, None
    return out, A, mean
