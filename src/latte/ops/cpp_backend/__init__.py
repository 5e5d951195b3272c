"""Native CPU kernels in C++, which are faster than PyTorch's operations.

Each op is a file, ``rg_lru.cpp`` and so on. When the package is installed, :mod:`.build` compiles
them into one library, which registers the kernels of the ops ``latte::cpu_*``. :mod:`.library`
finds it. This module defines the rest of each op: schema, shapes of the results, gradients. Ops
without gradients are in :mod:`.tokens`. The package works without the library. :data:`ABSENT` says
why it is not there.

Shape suffixes: B batch, T tokens, E channels, K taps or key width, N sequences (B, or the packed
ones), H query heads, G key/value heads, L latents, D value width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from latte.ops import double_backward, reference
from latte.ops.arguments import (
    LATTE_GRADIENTS,
    MACCHIATO_GRADIENTS,
    NO_SINKS,
    NO_STATE,
    NO_WINDOW,
    WINDOW_GRADIENTS,
    Convolution,
    Earlier,
    Latte,
    Window,
    sinks_of,
)
from latte.ops.cpp_backend import library, schemas
from latte.ops.custom_ops import differentiable_op, empty_gradients
from latte.ops.notices import warn_once
from latte.ops.state import LatteState, SeenSinks, WindowState, final_buffers
from latte.ops.tensors import Local, Sequences, computation_dtype, count_sequences, sequence_bounds
from latte.ops.torch_backend import log_mass as log_mass_of
from latte.ops.torch_backend import recurrence

# Number of tokens between two states that are kept for the backward pass (SEGMENT in
# attention.cpp).
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
    if any(x is not None and x.device.type != "cpu" for x in tensors):
        return False
    if torch.compiler.is_compiling():
        return ready()
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        return False
    return ready()


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
) -> tuple[Tensor, LatteState]:
    """See :func:`latte.ops.latte_attention`, if causal."""
    around = (*_readable(sequences), *_contiguous(earlier, NO_STATE), log_decay)
    out, A, mu, *_ = latte_op(q_BTHL, k_BTHL, v_BTHD, *around)
    return out, LatteState(A, mu)


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
) -> tuple[Tensor, LatteState]:
    """See :func:`latte.ops.macchiato_attention`, if causal; ``latent_q`` has L + 1 columns."""
    inputs = (latent_q_BTHL, latent_k_BTHL, q_BTHK, k_BTGK, v_BTGD)
    around = (*_readable(sequences), *_contiguous(earlier, NO_STATE), log_decay)
    near = (*_contiguous(tail, NO_WINDOW), *_contiguous(sinks, NO_SINKS))
    late = _contiguous(pending, NO_WINDOW)
    out, A, mu, *_ = macchiato_op(*inputs, *around, *near, *late, *local, delay, joint)
    return out, LatteState(A, mu)


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
    near = (*_contiguous(tail, NO_WINDOW), *_contiguous(sinks, NO_SINKS))
    around = (*_readable(sequences), *near, *local, sequences.causal)
    return window_op(q_BTHK, k_BTGK, v_BTGD, *around)


def _contiguous(state: tuple[Tensor, ...] | None, absent: Earlier) -> Earlier:
    """The tensors of a state, or ``absent``."""
    return absent if state is None else tuple(x.contiguous() for x in state)


def _readable(sequences: Sequences) -> tuple[Tensor | None, Tensor | None]:
    """Mask and bounds as the kernels read them: contiguous, and int64."""
    key_mask, cu_seqlens, _ = sequences
    mask = None if key_mask is None else key_mask.contiguous()
    return mask, None if cu_seqlens is None else sequence_bounds(cu_seqlens)


def _rg_lru_fake(x: RGLRU) -> tuple[Tensor, ...]:
    N, dtype = count_sequences(x.x.shape[0], x.cu_seqlens), computation_dtype(x.x.dtype)
    return *empty_gradients(x.x), x.x.new_empty(N, x.x.shape[2], dtype=dtype)


def _rg_lru_again(x: RGLRU) -> tuple[Tensor, ...]:
    sequences = Sequences(x.key_mask, x.cu_seqlens)
    return recurrence.rg_lru(*x[:4], sequences, x.initial_state, x.reverse)


def _convolution_fake(x: Convolution) -> tuple[Tensor, ...]:
    N = count_sequences(x.x.shape[0], x.cu_seqlens)
    return *empty_gradients(x.x), x.x.new_empty(N, x.weight.shape[1] - 1, x.x.shape[2])


def _convolution_again(x: Convolution) -> tuple[Tensor, ...]:
    sequences = Sequences(x.key_mask, x.cu_seqlens)
    return recurrence.causal_conv1d(*x[:3], sequences, x.initial_state)


def _latents_fake(k: Tensor, v: Tensor, bounds: Tensor | None) -> tuple[Tensor, ...]:
    """Outputs, final state, and the states that are saved."""
    (B, T, H, L), D = k.shape, v.shape[3]
    A, mu = final_buffers(k, v, bounds)
    M = B * -(-T // SEGMENT) if bounds is None else T // SEGMENT + A.shape[0]
    kept = (A.new_empty(M, H, L), A.new_empty(M, H, L), A.new_empty(M, H, L, D))
    return v.new_empty(B, T, H, D), A, mu, *kept


def _macchiato_again(x: NativeMacchiato) -> tuple[Tensor, ...]:
    local, sequences = Local(x.window, x.scale, x.softcap), Sequences(x.key_mask, x.cu_seqlens)
    tail = double_backward.window_of(x.tail_k, x.tail_v, x.tail_mask)
    sinks = sinks_of(x.sink_q, x.sink_k, x.sink_v, x.sink_mask, x.sinks_seen)
    latent_q = x.latent_q
    if x.joint:
        mass = log_mass_of.window_log_mass(x.q, x.k, local, sequences, tail, sinks)
        latent_q = log_mass_of.with_log_mass(latent_q, mass)
    out, last = reference.macchiato_attention(
        *(latent_q, x.latent_k, x.q, x.k, x.v, local, sequences),
        None if x.log_mass is None or x.mean is None else (x.log_mass, x.mean),
        *(tail, x.log_decay, sinks, x.delay),
        double_backward.window_of(x.pending_k, x.pending_v, x.pending_mask),
    )
    return out, *last


if ABSENT is None:
    schemas.register()
    rg_lru_op = differentiable_op(
        "cpu_rg_lru",
        RGLRU,
        _rg_lru_fake,
        returns=["h", "last"],
        gradients=["x", "recurrence_gate", "input_gate", "theta", "initial_state"],
        saves=["h", "last"],
        again=_rg_lru_again,
    )
    convolution_op = differentiable_op(
        "cpu_convolution",
        Convolution,
        _convolution_fake,
        returns=["out", "tail"],
        gradients=["x", "weight", "bias", "initial_state"],
        again=_convolution_again,
    )
    latte_op = differentiable_op(
        "cpu_latte",
        Latte,
        lambda x: _latents_fake(x.k, x.v, x.cu_seqlens),
        returns=["out", "log_mass", "mean"],
        gradients=LATTE_GRADIENTS,
        saves=["top_M", "mass_M", "sum_M"],
        again=double_backward.latte,
    )
    macchiato_op = differentiable_op(
        "cpu_macchiato",
        NativeMacchiato,
        lambda x: _latents_fake(x.latent_k, x.v, x.cu_seqlens),
        returns=["out", "log_mass", "mean"],
        gradients=(*MACCHIATO_GRADIENTS, "pending_k", "pending_v"),
        saves=["top_M", "mass_M", "sum_M"],
        again=_macchiato_again,
    )
    window_op = differentiable_op(
        "cpu_window",
        Window,
        lambda x: x.v.new_empty(*x.q.shape[:3], x.v.shape[3]),
        returns=["out"],
        gradients=WINDOW_GRADIENTS,
        again=double_backward.window,
    )
