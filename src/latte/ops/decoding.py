"""Native CPU kernels for decoding: linear maps, SwiGLU, RMSNorm and RG-LRU of a few tokens.

The time of a decoding step is spent on reading the weights and, in small models, on Python calls.
So each function is one call of a kernel. The functions have no gradients, and :func:`serves` says
whether they can be called. Sums are in fp32 (fp64 for fp64). Outputs have the dtype of ``x``.

Shape suffixes: B batch, E width, M outputs, N blocks, P channels per block.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from latte.ops import backend, cpp_backend

MOST_ROWS = 8  # of x: with more, matrix products pay
PLAIN = (Tensor, nn.Parameter)  # not quantised, sharded, or whatever else a tensor may stand for
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def serves(x: Tensor, most_rows: int = MOST_ROWS) -> bool:
    """The kernels take x (..., E): few rows, on a CPU, without gradients and autocast."""
    # A step asks this for each of its kernels, so the checks are cheap. The number of rows is
    # checked last: on a GPU a graph for any length would be compiled once for each answer.
    in_graph = torch.compiler.is_compiling()
    if torch.is_grad_enabled() or not (in_graph or x.numel() <= most_rows * x.size(-1)):
        return False
    if not takes(x) or torch.is_autocast_enabled("cpu"):
        return False
    return not in_graph or x.numel() <= most_rows * x.size(-1)


def takes(x: Tensor, compiled: bool = True) -> bool:
    """The kernels take tensors like x, and no other backend was named.

    They are not for forward mode and the transforms of ``torch.func``.

    Args:
        compiled: Whether ``torch.compile`` keeps them. It fuses PyTorch's pointwise operations.
    """
    if (backend.here.backend or backend.default) not in (None, "cpu"):
        return False
    if x.dtype not in DTYPES or type(x) is not Tensor or not x.is_cpu:
        return False
    if torch.compiler.is_compiling():
        return compiled and cpp_backend.ready()
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return False
    return cpp_backend.ABSENT is None or cpp_backend.ready()


def fits(x: Tensor, *weights: Any) -> bool:
    """The kernels take these weights with x: ordinary tensors, like x, and contiguous."""
    dtype = x.dtype
    for weight in weights:
        plain = type(weight) in PLAIN and weight.dtype == dtype and weight.is_cpu
        if not plain or not weight.is_contiguous():
            return False
    return True


def linear_maps(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """``x W^T`` for up to three weights (M, E): (..., M) each."""
    ops: Any = torch.ops.latte
    if len(weights) == 1:
        return (ops.cpu_linear(x, *weights),)
    return ops.cpu_linear2(x, *weights) if len(weights) == 2 else ops.cpu_linear3(x, *weights)


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """``silu(x gate^T) * (x up^T)``, (..., M), of two weights (M, E)."""
    return torch.ops.latte.cpu_swiglu(x, gate, up)


def geglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """``gelu(x gate^T) * (x up^T)``, by tanh, (..., M), of two weights (M, E)."""
    return torch.ops.latte.cpu_geglu(x, gate, up)


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) up`` of contiguous tensors."""
    return torch.ops.latte.cpu_glu(gate, up)


def gelu_product(gate: Tensor, up: Tensor) -> Tensor:
    """``gelu(gate) up``, by tanh."""
    return nn.functional.gelu(gate, approximate="tanh").mul_(up)


# What the kernels of gated networks do after the two maps.
PRODUCTS: dict[Any, Any] = {swiglu: silu_product, geglu: gelu_product}


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """``residual + x W^T``, of a weight (M, E) and a contiguous residual (..., M)."""
    return torch.ops.latte.cpu_linear_add(x, weight, residual)


def quantised_maps(x: Tensor, *integers: Tensor) -> tuple[Tensor, ...]:
    """``x W^T`` for up to three quantised weights, (..., M) each.

    Args:
        integers: Integers in panels and scales (:mod:`latte.ops.quantised`), one after the other.
    """
    ops: Any = torch.ops.latte
    if len(integers) == 2:
        return (ops.cpu_quantised(x, *integers),)
    return (ops.cpu_quantised2 if len(integers) == 4 else ops.cpu_quantised3)(x, *integers)


def quantised_add(x: Tensor, integers: Sequence[Tensor], residual: Tensor) -> Tensor:
    """``residual + x W^T``, of a quantised weight and a contiguous residual (..., M)."""
    return torch.ops.latte.cpu_quantised_add(x, *integers, residual)


def quantised_mlp(
    x: Tensor,
    norm: tuple[Tensor, float, float],
    integers: Sequence[Tensor],
    activation: Any,
    adds: bool,
) -> Tensor:
    """``down(act(gate(n)) up(n))`` of ``n = rms_norm(x, *norm)``, of quantised weights.

    Args:
        integers: Integers and scales of gate, up and down.
        activation: :func:`swiglu` or :func:`geglu`.
        adds: Whether x is added to the result.
    """
    return torch.ops.latte.cpu_quantised_mlp(x, *norm, *integers, activation is geglu, adds)


def latents(
    x: Tensor, q: Tensor, k: Tensor, bias: Tensor | None, heads: int
) -> tuple[Tensor, Tensor]:
    """The latents' logits of x (B, E), in the dtype of the weights: (B, H, L or L+1), (B, H, L).

    Args:
        q, k: Weights (H (L or L+1), E) and (H L, E).
        bias: Bias of column 0 of the first logits, (H,).
    """
    return torch.ops.latte.cpu_latents(x, q, k, bias, heads)


def layer_begin(x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """The inputs of a layer's mixing: q, k, v, latent logits and scores of the normed x (B, E).

    Args:
        arguments: The norm's weight, epsilon and offset; q, k and v, each a weight and None, or
            integers and scales; numbers of heads H and of groups G; the latents' weights q and k
            and bias, as for :func:`latents`, or None; weight and bias of both maps of the scores,
            or None; the epsilon of the scores' norm.

    Returns:
        q (B, H, K), k (B, G, K), v (B, G, D), latent logits (B, H, L+1) and (B, H, L), and scores
        (B, G) in 11 bits. Absent results have no elements.
    """
    return torch.ops.latte.cpu_layer_begin(x, *arguments)


def layer_end(x: Tensor, residual: Tensor, *arguments: Any) -> Tensor:
    """``y + down(act(gate(n)) up(n))``, of ``y = residual + output(x)``, ``n = rms_norm(y)``.

    Args:
        x: Contiguous, (B, ...).
        residual: Contiguous, (B, E).
        arguments: The output's weight and None, or integers and scales; the norm's weight, epsilon
            and offset; gate, up and down, as the output; whether the activation is GELU (by tanh),
            not SiLU.
    """
    return torch.ops.latte.cpu_layer_end(x, residual, *arguments)


class Layers:
    """All layers of a model, each with kept tokens, in one call for each token.

    A layer calls :func:`layer_begin`, the native :func:`latte.ops.kept_step.kept_step` and
    :func:`layer_end`, each with results of those before.

    Args:
        tensors: All other tensors of these calls, in order. They are held; states are overwritten.
        numbers: All other numbers and flags, fp64.
    """

    def __init__(self, tensors: Sequence[Tensor | None], numbers: Tensor) -> None:
        ops = torch.ops.latte
        self._held = ops.cpu_layers_hold(tensors, numbers)
        weakref.finalize(self, ops.cpu_layers_drop, self._held).atexit = False

    def __call__(self, x: Tensor) -> Tensor:
        """x (B, E) after all layers."""
        return torch.ops.latte.cpu_layers(x, self._held)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """``(offset + w) x / sqrt(mean(x^2) + eps)``."""
    return torch.ops.latte.cpu_rms_norm(x, weight, eps, offset)


def rg_lru(
    x: Tensor,
    weights: Sequence[Tensor],
    eps: float,
    state: Tensor,
    real: Tensor | None = None,
) -> Tensor:
    """The RG-LRU of rows that have begun and the RMSNorm of its state after the token, (B, E).

    Args:
        x: Input, (B, E).
        weights: Weight (N, P, P) and bias (E,) of the recurrence gate, the same of the input gate
            (affine maps of blocks of x), theta (E,), and the RMSNorm's weight (E,).
        eps: Epsilon of the RMSNorm.
        state: State h, (B, E), overwritten.
        real: Whether each row's token is a real one, (B,) bool; None: all are.
    """
    return torch.ops.latte.cpu_rg_lru_step(x, *weights, eps, state, real)
