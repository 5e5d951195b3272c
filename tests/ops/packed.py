"""Every op that takes packed sequences, as a function of their bounds, with T = 20 tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from helpers import macchiato_inputs, randn
from torch import Tensor

from latte.ops import (
    Sinks,
    attention_weights,
    causal_conv1d,
    latte_attention,
    linear_attention,
    macchiato_attention,
    rg_lru,
    sliding_window_attention,
    window_log_mass,
)

T = 20
BOUNDS = [0, 0, 3, 4, 11, 20]


def packed_ops(dtype: torch.dtype = torch.float32) -> dict[str, tuple[Callable, tuple, dict]]:
    """By name: an op, inputs and options."""
    latent_q, latent_k, q, k, v = (x.to(dtype) for x in macchiato_inputs(1, T, 2, 2))
    x, weight, theta = (randn(*shape).to(dtype) for shape in ((1, T, 4), (4, 3), (4,)))
    latte, window = (latent_q[..., 1:], latent_k, v), {"window": 4}
    five, gates, state = (
        (latent_q, latent_k, q, k, v),
        (x, x + 1, x - 1, theta),
        {"output_final_state": True},
    )
    N = len(BOUNDS) - 1
    sinks = Sinks(q, k[0, :N, None], v[0, :N, None], torch.ones(N, 1, dtype=torch.bool))
    return {
        "latte": (latte_attention, latte, state),
        "forgetful latte": (latte_attention, latte, state | {"log_decay": -latent_k.abs()}),
        "bidirectional latte": (latte_attention, latte, {"causal": False}),
        "macchiato": (macchiato_attention, five, state | window),
        "bidirectional macchiato": (macchiato_attention, five, window | {"causal": False}),
        "delayed macchiato": (macchiato_attention, five, state | window | {"delay": True}),
        "sinks": (macchiato_attention, five, state | window | {"sinks": sinks}),
        "joint": (macchiato_attention, five, state | window | {"joint": True}),
        "window": (sliding_window_attention, (q, k, v), state | window),
        "full": (sliding_window_attention, (q, k, v), {"window": None}),
        "log mass": (window_log_mass, (q, k), window),
        "linear": (linear_attention, latte, state | {"feature_map": "elu"}),
        "rg_lru": (rg_lru, gates, state),
        "reversed rg_lru": (rg_lru, gates, state | {"reverse": True}),
        "conv": (causal_conv1d, (x, weight), state),
        "weights": (attention_weights, (latent_q[..., 1:], latent_k), {}),
    }


def all_bounds(values: list[int]) -> dict[str, Tensor]:
    """The same bounds as they may come: int32, int64, and every second number of a table."""
    whole = torch.tensor(values)
    table = torch.stack([whole, torch.full_like(whole, 7)], 1)
    return {"int32": whole.int(), "int64": whole, "strided": table[:, 0]}


def run(name: str, backend: str | None, cu: Tensor, dtype: torch.dtype = torch.float32) -> Any:
    """Outputs and gradients."""
    op, inputs, options = packed_ops(dtype)[name]
    if backend is not None and op not in (attention_weights, window_log_mass):
        options = options | {"backend": backend}
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = [x for x in _flat(op(*leaves, cu_seqlens=cu, **options)) if x.is_floating_point()]
    ends = [x for x in outputs if x.requires_grad]
    grads = torch.autograd.grad(ends, leaves, [x.detach().cos() for x in ends], allow_unused=True)
    return outputs + [g for g in grads if g is not None]


def _flat(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [x for item in tree or () for x in _flat(item)]
