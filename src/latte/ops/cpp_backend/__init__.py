"""Native CPU kernels in C++, which are faster than PyTorch's operations.

Each op is a file, ``rg_lru.cpp`` and so on. When the package is installed, :mod:`.build` compiles
them into one library, which registers the kernels of the ops ``latte::cpu_*``. :mod:`.library`
finds it. This module defines the rest of each op: schema, shapes of the results, gradients. The
package works without the library. :data:`ABSENT` says why it is not there.

Shape suffixes: B batch, T tokens, E channels, K taps or key width, N sequences (B, or the packed
ones), H query heads, G key/value heads, L latents, D value width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from latte.ops import reference
from latte.ops.cpp_backend import library
from latte.ops.custom_ops import (
    SINKS,
    connect_gradients,
    empty_gradients,
    final_buffers,
    maybe_sinks,
)
from latte.ops.notices import warn_once
from latte.ops.state import LatteState, SeenSinks, WindowState
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


def _op(
    name: str,
    inputs: str,
    outputs: int,
    wanted: tuple[int, ...],
    again: Callable[..., tuple[Tensor, ...]],
    fake: Callable[..., tuple[Tensor, ...]],
    *,
    differentiable: int,
    saved_from: int | None = None,
) -> Any:
    """The op ``latte::NAME`` and its backward op, whose kernels are in the library.

    Args:
        inputs: Inputs of the schema, tensors then numbers.
        outputs: Number of outputs. The first ``differentiable`` of them have gradients.
        saved_from: Index of the first output that the backward op takes. None means all outputs
            without gradients.
        wanted: Indices of the inputs whose gradients the backward op returns.
        again: Function that computes the differentiable outputs by PyTorch's operations, for the
            gradients of gradients.
        fake: Function that makes empty outputs.
    """
    results = ", ".join(["Tensor"] * outputs)
    schemas.define(f"{name}({inputs}) -> {results if outputs == 1 else f'({results})'}")
    tensors = inputs.split(", ")
    count = sum(x.startswith("Tensor") for x in tensors)
    grads = [f"Tensor grad_{i}" for i in range(differentiable)]
    saved_from = differentiable if saved_from is None else saved_from
    kept = [f"Tensor kept_{i}" for i in range(outputs - saved_from)]
    given = ", ".join([*grads, *tensors[:count], *kept, *tensors[count:]])
    schemas.define(f"{name}_backward({given}) -> ({', '.join(['Tensor'] * len(wanted))})")
    op, backward_op = (getattr(torch.ops.latte, x).default for x in (name, f"{name}_backward"))
    torch.library.register_fake(op, fake)
    connect_gradients(
        op, backward_op, wanted, outputs=differentiable, saved_from=saved_from, again=again
    )
    return op


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
    return rg_lru_op(*inputs, *_plain(initial_state, sequences), reverse)


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
    tail = None if initial_state is None else initial_state.to(x_BTE.dtype)
    return convolution_op(x_BTE, weight_EK.to(dtype), bias_E, *_plain(tail, sequences))


def latte_attention(
    q_BTHL: Tensor,
    k_BTHL: Tensor,
    v_BTHD: Tensor,
    sequences: Sequences,
    earlier: tuple[Tensor, Tensor] | None,
    log_decay: Tensor | None = None,
) -> tuple[Tensor, LatteState]:
    """See :func:`latte.ops.latte_attention`, if causal."""
    around = (*_plain(None, sequences)[1:], *_contiguous(earlier, 2), log_decay)
    out, A, mu = latte_op(q_BTHL, k_BTHL, v_BTHD, *around)[:3]
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
    around = (*_plain(None, sequences)[1:], *_contiguous(earlier, 2), log_decay)
    kept = (*_contiguous(tail, 3), *_contiguous(sinks, 5), *_contiguous(pending, 3))
    out, A, mu = macchiato_op(*inputs, *around, *kept, *local, delay, joint)[:3]
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
    around = (*_plain(None, sequences)[1:], *_contiguous(tail, 3), *_contiguous(sinks, 5))
    return window_op(q_BTHK, k_BTGK, v_BTGD, *around, *local)


def _contiguous(state: tuple[Tensor, ...] | None, count: int) -> tuple[Tensor | None, ...]:
    """The tensors of a state, or None for each of them."""
    return (None,) * count if state is None else tuple(x.contiguous() for x in state)


def _plain(state: Tensor | None, sequences: Sequences) -> tuple[Tensor | None, ...]:
    """State, mask and bounds as the kernels read them: contiguous, and int64."""
    key_mask, cu_seqlens, _ = sequences
    bounds = None if cu_seqlens is None else sequence_bounds(cu_seqlens)
    return *(None if x is None else x.contiguous() for x in (state, key_mask)), bounds


def _rg_lru_fake(x, recurrence_gate, input_gate, theta, initial, mask, bounds, reverse):
    N, dtype = count_sequences(x.shape[0], bounds), computation_dtype(x.dtype)
    return *empty_gradients(x), x.new_empty(N, x.shape[2], dtype=dtype)


def _rg_lru_again(x, recurrence_gate, input_gate, theta, initial, mask, bounds, reverse):
    inputs = (x, recurrence_gate, input_gate, theta)
    return recurrence.rg_lru(*inputs, Sequences(mask, bounds), initial, reverse)


def _convolution_fake(x, weight, bias, initial, mask, bounds):
    N = count_sequences(x.shape[0], bounds)
    return *empty_gradients(x), x.new_empty(N, weight.shape[1] - 1, x.shape[2])


def _convolution_again(x, weight, bias, initial, mask, bounds):
    return recurrence.causal_conv1d(x, weight, bias, Sequences(mask, bounds), initial)


def _latte_fake(q, k, v, mask, bounds, *_):
    (B, T, H, L), D = k.shape, v.shape[3]
    A, mu = final_buffers(k, v, bounds)
    M = B * -(-T // SEGMENT) if bounds is None else T // SEGMENT + A.shape[0]
    kept = (A.new_empty(M, H, L), A.new_empty(M, H, L), A.new_empty(M, H, L, D))
    return v.new_empty(B, T, H, D), A, mu, *kept


def _latte_again(q, k, v, mask, bounds, log_mass, mean, log_decay):
    state = None if log_mass is None else (log_mass, mean)
    out, last = reference.latte_attention(q, k, v, Sequences(mask, bounds), state, log_decay)
    return out, *last


def _macchiato_fake(latent_q, latent_k, q, k, v, *around):
    return _latte_fake(latent_q, latent_k, v, *around)


def _macchiato_again(latent_q, latent_k, q, k, v, mask, bounds, log_mass, mean, log_decay, *rest):
    kept, local, sequences = rest[:-5], Local(*rest[-5:-2]), Sequences(mask, bounds)
    delay, joint = rest[-2:]
    if joint:
        around = (sequences, _maybe_window(kept[:3]), maybe_sinks(kept[3:8]))
        latent_q = log_mass_of.with_log_mass(
            latent_q, log_mass_of.window_log_mass(q, k, local, *around)
        )
    out, last = reference.macchiato_attention(
        *(latent_q, latent_k, q, k, v, local, sequences),
        None if log_mass is None else (log_mass, mean),
        _maybe_window(kept[:3]),
        log_decay,
        maybe_sinks(kept[3:8]),
        delay,
        _maybe_window(kept[8:]),
    )
    return out, *last


def _window_fake(q, k, v, *_):
    return v.new_empty(*q.shape[:3], v.shape[3])


def _window_again(q, k, v, mask, bounds, *rest):
    kept, local, sequences = rest[:-3], Local(*rest[-3:]), Sequences(mask, bounds)
    earlier, sinks = _maybe_window(kept[:3]), maybe_sinks(kept[3:])
    return (reference.sliding_window_attention(q, k, v, local, sequences, earlier, sinks),)


def _maybe_window(tensors):
    return None if tensors[0] is None else WindowState(*tensors)


if ABSENT is None:
    schemas = torch.library.Library("latte", "FRAGMENT")
    rg_lru_op = _op(
        "cpu_rg_lru",
        "Tensor x, Tensor recurrence_gate, Tensor input_gate, Tensor theta, Tensor? initial, "
        "Tensor? mask, Tensor? bounds, bool reverse",
        *(2, (0, 1, 2, 3, 4), _rg_lru_again, _rg_lru_fake),
        differentiable=2,
        saved_from=0,
    )
    convolution_op = _op(
        "cpu_convolution",
        "Tensor x, Tensor weight, Tensor? bias, Tensor? initial, Tensor? mask, Tensor? bounds",
        *(2, (0, 1, 2, 3), _convolution_again, _convolution_fake),
        differentiable=2,
    )
    sequences = "Tensor? mask, Tensor? bounds"
    state = "Tensor? log_mass, Tensor? mean, Tensor? log_decay"
    tail = f"Tensor? tail_k, Tensor? tail_v, Tensor? tail_mask, {SINKS}"
    pending = "Tensor? pending_k, Tensor? pending_v, Tensor? pending_mask"
    numbers = "int window, float scale, float softcap"
    latte_op = _op(
        "cpu_latte",
        f"Tensor q, Tensor k, Tensor v, {sequences}, {state}",
        *(6, (0, 1, 2, 5, 6, 7), _latte_again, _latte_fake),
        differentiable=3,
    )
    macchiato_op = _op(
        "cpu_macchiato",
        "Tensor latent_q, Tensor latent_k, Tensor q, Tensor k, Tensor v, "
        f"{sequences}, {state}, {tail}, {pending}, {numbers}, bool delay, bool joint",
        *(6, (0, 1, 2, 3, 4, 7, 8, 9, 10, 11, 13, 14, 15, 18, 19)),
        *(_macchiato_again, _macchiato_fake),
        differentiable=3,
    )
    window_op = _op(
        "cpu_window",
        f"Tensor q, Tensor k, Tensor v, {sequences}, {tail}, {numbers}",
        *(1, (0, 1, 2, 5, 6, 8, 9, 10), _window_again, _window_fake),
        differentiable=1,
    )
    # Steps of decoding (latte.ops.step). They overwrite the states that they get.
    latents = "Tensor(a!) log_mass, Tensor(b!) mean, Tensor? log_decay"
    ring = "Tensor(c!) keys, Tensor(d!) values, Tensor(e!)? mask, Tensor slot"
    ring = f"{ring}, Tensor? cos, Tensor? sin, Tensor? real"
    local = "Tensor q, Tensor k, Tensor v"
    far = "Tensor(g!)? sink_keys, Tensor(h!)? sink_values, Tensor? position"
    far = f"{far}, Tensor? sink_cos, Tensor? sink_sin"
    for step, given, results in (
        ("latte", f"{local}, {latents}, Tensor? real", "Tensor"),
        (
            "macchiato",
            f"Tensor latent_q, Tensor latent_k, {local}, {latents}, {ring}, "
            f"float scale, float softcap, Tensor(f!)? pending, {far}, bool joint",
            "Tensor",
        ),
        ("window", f"{local}, {ring}, float scale, float softcap, int length, {far}", "Tensor"),
        (
            "rg_lru",
            "Tensor x, Tensor recurrence_weight, Tensor recurrence_bias, Tensor input_weight, "
            "Tensor input_bias, Tensor theta, Tensor norm, float eps, Tensor(a!) state, "
            "Tensor? real",
            "Tensor",
        ),
        (
            "convolution",
            "Tensor x, Tensor weight, Tensor? bias, Tensor(a!) tail, Tensor? real",
            "Tensor",
        ),
    ):
        schemas.define(f"cpu_{step}_step({given}) -> {results}")
    ops = torch.ops.latte
    torch.library.register_fake(
        ops.cpu_latte_step.default, lambda q, k, v, *_: v.new_empty(*q.shape[:2], v.shape[2])
    )
    torch.library.register_fake(
        ops.cpu_macchiato_step.default,
        lambda latent_q, latent_k, q, k, v, *_: v.new_empty(*q.shape[:2], v.shape[2]),
    )
    torch.library.register_fake(
        ops.cpu_window_step.default, lambda q, k, v, *_: v.new_empty(*q.shape[:2], v.shape[2])
    )
    for like_x in (ops.cpu_rg_lru_step, ops.cpu_convolution_step):
        torch.library.register_fake(like_x.default, lambda x, *_: x.new_empty(x.shape))
    # Pointwise ops between the matrix products of training (latte.layers.parts), not for
    # torch.compile.
    for pointwise in (
        "cpu_glu(Tensor gate, Tensor up) -> Tensor",
        "cpu_glu_backward(Tensor dy, Tensor gate, Tensor up) -> (Tensor, Tensor)",
        "cpu_norm_rows(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
        "cpu_norm_rows_backward(Tensor dy, Tensor x, Tensor weight, Tensor scale)"
        " -> (Tensor, Tensor)",
        "cpu_rotate(Tensor x, Tensor cos, Tensor sin, float sign) -> Tensor",
    ):
        schemas.define(pointwise)
    # Other operations on single tokens (latte.ops.dense).
    schemas.define("cpu_linear(Tensor x, Tensor a) -> Tensor")
    schemas.define("cpu_linear2(Tensor x, Tensor a, Tensor b) -> (Tensor, Tensor)")
    three = "Tensor a, Tensor b, Tensor c"
    schemas.define(f"cpu_linear3(Tensor x, {three}) -> (Tensor, Tensor, Tensor)")
    schemas.define("cpu_linear_add(Tensor x, Tensor weight, Tensor residual) -> Tensor")
    schemas.define("cpu_swiglu(Tensor x, Tensor gate, Tensor up) -> Tensor")
    schemas.define("cpu_geglu(Tensor x, Tensor gate, Tensor up) -> Tensor")
    schemas.define("cpu_rms_norm(Tensor x, Tensor weight, float eps, float offset) -> Tensor")

    def linear_fake(x, *weights):
        outs = tuple(x.new_empty(*x.shape[:-1], len(weight)) for weight in weights)
        return outs if len(outs) > 1 else outs[0]

    for maps in (ops.cpu_linear, ops.cpu_linear2, ops.cpu_linear3):
        torch.library.register_fake(maps.default, linear_fake)
    for one_output in (ops.cpu_linear_add, ops.cpu_swiglu, ops.cpu_geglu):
        torch.library.register_fake(one_output.default, lambda x, a, b: linear_fake(x, a))
    torch.library.register_fake(ops.cpu_rms_norm.default, lambda x, *_: x.new_empty(x.shape))
