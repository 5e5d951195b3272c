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

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from latte.ops.arguments import (
    LATTE_GRADIENTS,
    MACCHIATO_GRADIENTS,
    NO_SINKS,
    NO_STATE,
    NO_WINDOW,
    WINDOW_GRADIENTS,
    Convolution,
    Latte,
    Window,
)
from latte.ops.cpp_backend import library, schemas
from latte.ops.custom_ops import differentiable_op, empty_gradients
from latte.ops.notices import warn_once
from latte.ops.state import SeenSinks, WindowState, final_buffers
from latte.ops.tensors import Local, Sequences, computation_dtype, count_sequences, sequence_bounds

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


def serves(*tensors: Tensor | None) -> bool:
    """Whether the kernels are the default for these inputs.

    They are not in forward mode or in a transform of ``torch.func``. Custom ops do not support
    these, so PyTorch's own operations are used.
    """
    for x in tensors:
        if x is not None and not x.is_cpu:
            return False
    if torch.compiler.is_compiling():
        return ready()
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if forward_ad._current_level >= 0:
        for x in tensors:
            if x is not None and forward_ad.unpack_dual(x).tangent is not None:
                return False
    return ABSENT is None or ready()


class RGLRU(NamedTuple):
    """The arguments of ``cpu_rg_lru``, contiguous but for the first three."""

    x: Tensor
    recurrence_gate: Tensor
    input_gate: Tensor
    theta: Tensor
    initial_state: Tensor | None
    key_mask: Tensor | None
    cu_seqlens: Tensor | None
    reverse: bool


class NativeMacchiato(NamedTuple):
    """The arguments of ``cpu_macchiato``. All but the first five and the decay are contiguous."""

    latent_q: Tensor
    latent_k: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    cu_seqlens: Tensor | None
    log_mass: Tensor | None
    mean: Tensor | None
    log_decay: Tensor | None
    tail_k: Tensor | None
    tail_v: Tensor | None
    tail_mask: Tensor | None
    sink_q: Tensor | None
    sink_k: Tensor | None
    sink_v: Tensor | None
    sink_mask: Tensor | None
    sinks_seen: Tensor | None
    pending_k: Tensor | None
    pending_v: Tensor | None
    pending_mask: Tensor | None
    window: int
    scale: float
    softcap: float
    delay: bool
    joint: bool


def rg_lru(
    x_BTE: Tensor,
    recurrence_gate: Tensor,
    input_gate: Tensor,
    theta_E: Tensor,
    sequences: Sequences,
    initial_state: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """See :func:`latte.ops.rg_lru`: h (B, T, E) and the last state (N, E)."""
    inputs = (x_BTE, recurrence_gate, input_gate, theta_E.to(computation_dtype(x_BTE.dtype)))
    state = None if initial_state is None else initial_state.contiguous()
    return rg_lru_op(*inputs, state, *_readable(sequences), reverse)


def causal_conv1d(
    x_BTE: Tensor,
    weight_EK: Tensor,
    bias_E: Tensor | None,
    sequences: Sequences,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See :func:`latte.ops.causal_conv1d`: y (B, T, E) and the new tail (N, K-1, E)."""
    dtype = computation_dtype(x_BTE.dtype)
    bias_E = None if bias_E is None else bias_E.to(dtype)
    tail = None if initial_state is None else initial_state.to(x_BTE.dtype).contiguous()
    return convolution_op(x_BTE, weight_EK.to(dtype), bias_E, tail, *_readable(sequences))


def latte_attention(
    q_BTHL: Tensor,
    k_BTHL: Tensor,
    v_BTHD: Tensor,
    sequences: Sequences,
    earlier: tuple[Tensor, Tensor] | None,
    log_decay: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """See :func:`latte.ops.latte_attention`, if causal."""
    state = NO_STATE if earlier is None else _contiguous(earlier)
    out, A, mu, *_ = latte_op(q_BTHL, k_BTHL, v_BTHD, *_readable(sequences), *state, log_decay)
    return out, (A, mu)


def macchiato_attention(
    latent_q_BTHL: Tensor,
    latent_k_BTHL: Tensor,
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGD: Tensor,
    local: Local,
    sequences: Sequences,
    earlier: tuple[Tensor, Tensor] | None,
    tail: WindowState | None,
    log_decay: Tensor | None = None,
    sinks: SeenSinks | None = None,
    delay: bool = False,
    pending: WindowState | None = None,
    joint: bool = False,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """See :func:`latte.ops.macchiato_attention`, if causal; ``latent_q`` has L + 1 columns."""
    inputs = (latent_q_BTHL, latent_k_BTHL, q_BTHK, k_BTGK, v_BTGD)
    state = NO_STATE if earlier is None else _contiguous(earlier)
    near = NO_WINDOW if tail is None else _contiguous(tail)
    far = NO_SINKS if sinks is None else _contiguous(sinks)
    late = NO_WINDOW if pending is None else _contiguous(pending)
    around = (*_readable(sequences), *state, log_decay, *near, *far, *late)
    out, A, mu, *_ = macchiato_op(*inputs, *around, *local, delay, joint)
    return out, (A, mu)


def sliding_window_attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGD: Tensor,
    local: Local,
    sequences: Sequences,
    tail: WindowState | None,
    sinks: SeenSinks | None = None,
) -> Tensor:
    """See :func:`latte.ops.sliding_window_attention`, if causal and with a window."""
    near = NO_WINDOW if tail is None else _contiguous(tail)
    far = NO_SINKS if sinks is None else _contiguous(sinks)
    around = (*_readable(sequences), *near, *far, *local, sequences.causal)
    return window_op(q_BTHK, k_BTGK, v_BTGD, *around)


def _contiguous(state: tuple[Tensor, ...]) -> list[Tensor]:
    """The tensors of a state, contiguous."""
    return [x.contiguous() for x in state]


def _readable(sequences: Sequences) -> tuple[Tensor | None, Tensor | None]:
    """Mask and bounds as the kernels read them: contiguous, and int64."""
    key_mask, cu_seqlens, _ = sequences
    mask = None if key_mask is None else key_mask.contiguous()
    return mask, None if cu_seqlens is None else sequence_bounds(cu_seqlens)


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
        NativeMacchiato,
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
