"""Native CPU kernels in C++, which are faster than PyTorch's operations.

Each op is a file, ``rg_lru.cpp`` and so on. When the package is installed, :mod:`.build` compiles
them into one library, which registers the kernels of the ops ``latte::cpu_*``. :mod:`.library`
finds it. This module defines the rest of each op: schema, shapes of the results, gradients. Ops
without gradients are in :mod:`.schemas`. The package works without the library. :data:`ABSENT` says
why it is not there.

Shape suffixes: B batch, T tokens, E channels, K taps or key width, N sequences (B, or the packed
ones), H query heads, G key/value heads, L latents, D value width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from latte.ops.arguments import (
    LATTE_GRADIENTS,
    MACCHIATO_GRADIENTS,
    RGLRU,
    WINDOW_GRADIENTS,
    Convolution,
    Earlier,
    Latte,
    Macchiato,
    Three,
    Window,
)
from latte.ops.cpp_backend import library, schemas
from latte.ops.custom_ops import differentiable_op, empty_gradients
from latte.ops.notices import warn_once
from latte.ops.state import final_buffers
from latte.ops.tensors import computation_dtype, count_sequences, has_tangent

# Number of tokens between two states that are kept for the backward pass, as in attention_plan.h.
SEGMENT = 256


# The library that is loaded, or None; the reason if there is none; whether to warn about that.
LIBRARY, ABSENT = library.load()
WARNS = library.warns()


def ready() -> bool:
    """Whether the kernels are there. If they could be there but are not, the first call warns."""
    if ABSENT is None:
        return True
    if WARNS:
        warn_once(
            f"latte: PyTorch's operations do the work of the native CPU kernels: {ABSENT}"
            " (LATTE_NATIVE=skip: without them, and without this warning)"
        )
    return False


def unavailable(x: Tensor) -> str | None:
    """Why the kernels cannot serve inputs like ``x``, or None if they can."""
    if ABSENT is not None:
        return f"here: {ABSENT}"
    return None if x.device.type == "cpu" else f"for tensors on {x.device}"


def serves(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels are the default for these inputs, which are on the device of the first.

    They are not in forward mode or in a transform of ``torch.func``. Custom ops do not support
    these, so PyTorch's own operations are used.
    """
    if not x.is_cpu:
        return False
    if not torch.compiler.is_compiling():
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return False
        if forward_ad._current_level >= 0 and has_tangent((x, *others)):
            return False
    return ABSENT is None or ready()


def rg_lru(x: RGLRU) -> tuple[Tensor, Tensor]:
    """See :func:`latte.ops.rg_lru`: h (B, T, E) and the last state (N, E)."""
    theta = x.theta.to(computation_dtype(x.x.dtype))
    return rg_lru_op(*x[:3], theta, *_readable(x[4:7]), x.reverse)


def causal_conv1d(x: Convolution) -> tuple[Tensor, Tensor]:
    """See :func:`latte.ops.causal_conv1d`: y (B, T, E) and the new tail (N, K-1, E)."""
    dtype = computation_dtype(x.x.dtype)
    bias = None if x.bias is None else x.bias.to(dtype)
    tail = None if x.initial_state is None else x.initial_state.to(x.x.dtype)
    around = _readable((tail, x.key_mask, x.cu_seqlens))
    return convolution_op(x.x, x.weight.to(dtype), bias, *around)


def latte_attention(x: Latte, causal: bool = True) -> Three:
    """See :func:`latte.ops.latte_attention`, if causal: the output, log-mass and mean."""
    return latte_op(*x[:3], *_readable(x[3:7]), x.log_decay)[:3]


def macchiato_attention(x: Macchiato, causal: bool = True) -> Three:
    """See :func:`latte.ops.macchiato_attention`, if causal: the output, log-mass and mean."""
    before, near = _readable(x[5:9]), _readable(x[10:21])
    return macchiato_op(*x[:5], *before, x.log_decay, *near, *x[21:])[:3]


def sliding_window_attention(x: Window) -> tuple[Tensor]:
    """See :func:`latte.ops.sliding_window_attention`, if causal and with a window."""
    return (window_op(*x[:3], *_readable(x[3:13]), *x[13:]),)


def _readable(tensors: Earlier) -> list[Tensor | None]:
    """Tensors as the kernels read them: contiguous, and the bounds, which may be int32, int64."""
    found = []
    for x in tensors:
        if x is not None:
            x = x.long().contiguous() if x.dtype == torch.int32 else x.contiguous()
        found.append(x)
    return found


def _rg_lru_fake(x: RGLRU) -> tuple[Tensor, ...]:
    N, dtype = count_sequences(x.x.shape[0], x.cu_seqlens), computation_dtype(x.x.dtype)
    return *empty_gradients(x.x), x.x.new_empty(N, x.x.shape[2], dtype=dtype)


def _convolution_fake(x: Convolution) -> tuple[Tensor, ...]:
    N = count_sequences(x.x.shape[0], x.cu_seqlens)
    return *empty_gradients(x.x), x.x.new_empty(N, x.weight.shape[1] - 1, x.x.shape[2])


def _latents_fake(k: Tensor, v: Tensor, bounds: Tensor | None) -> tuple[Tensor, ...]:
    """Outputs, final state, and the states that are saved."""
    (B, T, H, L), D = k.shape, v.shape[3]
    A, mu = final_buffers(k, v, bounds)
    M = B * -(-T // SEGMENT) if bounds is None else T // SEGMENT + A.shape[0]
    kept = (A.new_empty(M, H, L), A.new_empty(M, H, L), A.new_empty(M, H, L, D))
    return v.new_empty(B, T, H, D), A, mu, *kept


if ABSENT is None:
    schemas.register()
    rg_lru_op = differentiable_op(
        "cpu_rg_lru",
        RGLRU,
        _rg_lru_fake,
        returns=["h", "last"],
        gradients=["x", "recurrence_gate", "input_gate", "theta", "initial_state"],
        saves=["h", "last"],
    )
    convolution_op = differentiable_op(
        "cpu_convolution",
        Convolution,
        _convolution_fake,
        returns=["out", "tail"],
        gradients=["x", "weight", "bias", "initial_state"],
    )
    latte_op = differentiable_op(
        "cpu_latte",
        Latte,
        lambda x: _latents_fake(x.k, x.v, x.cu_seqlens),
        returns=["out", "log_mass", "mean"],
        gradients=LATTE_GRADIENTS,
        saves=["top_M", "mass_M", "sum_M"],
    )
    macchiato_op = differentiable_op(
        "cpu_macchiato",
        Macchiato,
        lambda x: _latents_fake(x.latent_k, x.v, x.cu_seqlens),
        returns=["out", "log_mass", "mean"],
        gradients=(*MACCHIATO_GRADIENTS, "pending_k", "pending_v"),
        saves=["top_M", "mass_M", "sum_M"],
    )
    window_op = differentiable_op(
        "cpu_window",
        Window,
        lambda x: x.v.new_empty(*x.q.shape[:3], x.v.shape[3]),
        returns=["out"],
        gradients=WINDOW_GRADIENTS,
    )
