"""PyTorch's custom ops: a backend's two passes as one op that ``torch.compile`` does not split.

An op takes tensors (some may be None), then numbers. ``latte::NAME_backward`` takes the gradients
of its outputs, its tensors, what it has saved, and its numbers. The ops of Latte and of the window
have the same signature for every backend: :func:`latte_op` and :func:`window_op` make them from
two functions.

Shape suffixes: B batch, T tokens, H query heads, G key/value heads, L latents, K key width, D value
width, N states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from latte.ops.state import LatteState, SeenSinks, WindowState
from latte.ops.tensors import Local, Sequences, computation_dtype, count_sequences, full_precision

Three = tuple[Tensor, Tensor, Tensor]
# An earlier state as ops take it: all of its tensors, or as many times None.
Earlier = tuple[Tensor | None, ...]

SEQUENCES = "Tensor? key_mask, Tensor? cu_seqlens"
LATTE = f"Tensor q, Tensor k, Tensor v, {SEQUENCES}, Tensor? log_mass, Tensor? mean"
TAIL = "Tensor? tail_k, Tensor? tail_v, Tensor? tail_mask"
SINKS = "Tensor? sink_q, Tensor? sink_k, Tensor? sink_v, Tensor? sink_mask, Tensor? sinks_seen"
# Delayed latents take the delayed keys instead of latent_k, and these.
LATE = "Tensor? late_v, Tensor? late_mask, Tensor? begun"
MACCHIATO = LATTE.replace(
    "Tensor q, Tensor k", "Tensor latent_q, Tensor latent_k, Tensor q, Tensor k"
)
MACCHIATO = f"{MACCHIATO}, {TAIL}, Tensor? log_decay, {SINKS}, {LATE}"
WINDOW = f"Tensor q, Tensor k, Tensor v, {SEQUENCES}, {TAIL}"
LOCAL = "int window, float scale, float softcap, bool causal"


def empty_gradients(*inputs: Tensor | None) -> tuple[Tensor, ...]:
    """Contiguous buffers of the inputs' shapes and dtypes, not written yet.

    Empty for inputs that are None: an op cannot return that.
    """
    like = next(x for x in inputs if x is not None)
    return tuple(
        like.new_empty(0)
        if x is None
        else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in inputs
    )


def connect_gradients(
    op: Any,
    backward_op: Any,
    wanted: tuple[int, ...],
    *,
    outputs: int,
    saved_from: int,
    again: Callable[..., tuple[Tensor, ...]] | None = None,
) -> None:
    """Register the custom op ``backward_op`` as the gradient of ``op``.

    Args:
        wanted: Indices of the inputs whose gradients ``backward_op`` returns, in its order. The
            gradient of an input that is None is an empty tensor.
        outputs: Number of leading outputs that have gradients. The other outputs are only saved.
        saved_from: Index of the first output that the backward pass needs.
        again: Function that computes the outputs with gradients from the same inputs, by
            operations that can be differentiated twice. None: the gradients cannot be
            differentiated.
    """

    def fake(*args):
        return empty_gradients(*(args[outputs + i] for i in wanted))

    def save(ctx, inputs, output):
        output = (output,) if isinstance(output, Tensor) else output
        ctx.tensors = sum(x is None or isinstance(x, Tensor) for x in inputs)
        ctx.numbers = inputs[ctx.tensors :]
        ctx.save_for_backward(*inputs[: ctx.tensors], *output[saved_from:])
        ctx.mark_non_differentiable(*output[outputs:])

    def gradients(ctx, *grads):
        saved = ctx.saved_tensors
        if again is not None and torch.is_grad_enabled():  # they are to be differentiated
            return _differentiable(
                again, wanted, grads[:outputs], saved[: ctx.tensors], ctx.numbers
            )
        found = backward_op(*grads[:outputs], *saved, *ctx.numbers)
        every: list[Tensor | None] = [None] * (ctx.tensors + len(ctx.numbers))
        for i, dx in zip(wanted, found, strict=True):
            every[i] = None if saved[i] is None else dx
        return tuple(every)

    torch.library.register_fake(backward_op, fake)
    torch.library.register_autograd(op, gradients, setup_context=save)


def _differentiable(
    again: Callable[..., tuple[Tensor, ...]],
    wanted: tuple[int, ...],
    grads: tuple[Tensor, ...],
    inputs: tuple[Tensor | None, ...],
    numbers: tuple[Any, ...],
) -> tuple[Tensor | None, ...]:
    """The gradients of all inputs, as functions of the inputs and of ``grads``."""
    # Views, because the same tensor may be two of the inputs.
    inputs = tuple(None if x is None else x.view_as(x) for x in inputs)
    places = {i: x for i in wanted if (x := inputs[i]) is not None and x.requires_grad}
    outputs = again(*inputs, *numbers)
    pairs = [(y, dy) for y, dy in zip(outputs, grads, strict=True) if y.requires_grad]
    found = torch.autograd.grad(
        [y for y, _ in pairs],
        list(places.values()),
        [dy for _, dy in pairs],
        create_graph=True,
        allow_unused=True,
    )
    every: list[Tensor | None] = [None] * (len(inputs) + len(numbers))
    for i, dx in zip(places, found, strict=True):
        every[i] = dx
    return tuple(every)


def custom_op(name: str, function: Callable[..., Any], inputs: str, outputs: int) -> Any:
    """The op ``latte::NAME`` with these inputs and this number of outputs, all tensors."""
    results = ", ".join(["Tensor"] * outputs)
    schema = f"({inputs}) -> {results if outputs == 1 else f'({results})'}"
    return torch.library.custom_op(
        f"latte::{name}", full_precision(function), mutates_args=(), schema=schema
    )


def final_buffers(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Empty buffers for a state, (N, H, L) and (N, H, L, D)."""
    N = count_sequences(q.shape[0], cu_seqlens)
    A = q.new_empty((N, *q.shape[2:]), dtype=computation_dtype(q.dtype))
    return A, A.new_empty((*A.shape, v.shape[-1]))


def latte_op(
    name: str,
    forward: Callable[..., tuple[Tensor, ...]],
    backward: Callable[..., tuple[Tensor, ...]],
    saved: Callable[..., tuple[Tensor, ...]] | None = None,
    *,
    count: int = 2,
    saved_from: int = 2,
    forgets: bool = False,
) -> Any:
    """The op of ``latte_attention``. It returns output, final log-mass and mean, and what is saved.

    Args:
        forward: Function of (q, k, v), the :class:`Sequences`, and the earlier log-mass and mean
            or None.
        backward: Function of the gradients of output, log-mass and mean, then the arguments of
            ``forward``, then what is saved. It returns the gradients of q, k, v and the earlier
            state.
        saved: Function of q, k, v and ``cu_seqlens`` that makes empty buffers for what is saved.
            None: (top, mass) of the final state.
        count: Number of these buffers.
        saved_from: 2 if the backward pass needs the final mean too, else 3.
        forgets: Whether there is one more input, ``log_decay``. The passes take it by that name;
            its gradient is the last.
    """

    def run(q, k, v, key_mask, cu_seqlens, *more):
        return forward((q, k, v), Sequences(key_mask, cu_seqlens), more[:2], **forgetting(more))

    def forgetting(more):
        return {"log_decay": more[2]} if forgets else {}

    def run_back(dout, dlog_mass, dmean, q, k, v, key_mask, cu_seqlens, *more):
        grads, sequences, kept = (dout, dlog_mass, dmean), Sequences(key_mask, cu_seqlens), more[2:]
        kept = kept[1:] if forgets else kept
        found = backward(grads, (q, k, v), sequences, more[:2], *kept, **forgetting(more))
        if more[1] is not None:
            return found
        return (*found[:3], q.new_empty(0), q.new_empty(0), *found[5:])

    def fake(q, k, v, key_mask, cu_seqlens, *_):
        A, mu = final_buffers(q, v, cu_seqlens)
        after = saved(q, k, v, cu_seqlens) if saved else (torch.empty_like(A), torch.empty_like(A))
        return torch.empty_like(v, memory_format=torch.contiguous_format), A, mu, *after

    inputs = f"{LATTE}, Tensor log_decay" if forgets else LATTE
    op = custom_op(name, run, inputs, 3 + count)
    op.register_fake(fake)
    kept = ", ".join(f"Tensor saved_{i}" for i in range(3 + count - saved_from))
    given = f"Tensor dout, Tensor dlog_mass, Tensor dmean, {inputs}, {kept}"
    wanted = (0, 1, 2, 5, 6, 7)[: 5 + forgets]
    backward_op = custom_op(f"{name}_backward", run_back, given, len(wanted))
    connect_gradients(op, backward_op, wanted, outputs=3, saved_from=saved_from)
    return op


def window_op(
    name: str,
    forward: Callable[..., Tensor],
    backward: Callable[..., tuple[Tensor, ...]],
    sinks: bool = False,
) -> Any:
    """The op of ``sliding_window_attention``. It saves only its inputs.

    Args:
        forward: Function of (q, k, v), the :class:`Local`, the :class:`Sequences`, and the tail's
            keys, values and mask or None; then of the sinks, if it takes them.
        backward: Function of the output's gradient, then the arguments of ``forward``. It returns
            the gradients of q, k, v, of the tail's keys and values, and of the sinks' queries, keys
            and values. The gradient of a missing input is empty.
        sinks: Whether the op takes sinks.
    """

    def told(q, k, v, key_mask, cu_seqlens, tail_k, tail_v, tail_mask, *rest):
        *seen, window, scale, softcap, causal = rest
        sequences = Sequences(key_mask, cu_seqlens, causal)
        call = (q, k, v), Local(window, scale, softcap), sequences, (tail_k, tail_v, tail_mask)
        return (*call, maybe_sinks(seen)) if sinks else call

    inputs = f"{WINDOW}, {SINKS}, {LOCAL}" if sinks else f"{WINDOW}, {LOCAL}"
    wanted = (0, 1, 2, 5, 6, 8, 9, 10)[: 8 if sinks else 5]
    op = custom_op(name, lambda *inputs: forward(*told(*inputs)), inputs, 1)
    op.register_fake(lambda q, k, v, *_: v.new_empty((*q.shape[:3], v.shape[-1])))
    backward_op = custom_op(
        *(f"{name}_backward", lambda dout, *inputs: backward(dout, *told(*inputs))),
        *(f"Tensor dout, {inputs}", len(wanted)),
    )
    connect_gradients(op, backward_op, wanted, outputs=1, saved_from=1)
    return op


def maybe_sinks(tensors: Sequence[Tensor | None]) -> SeenSinks | None:
    """The sinks of an op's arguments, which are all of their tensors, or all None."""
    return None if tensors[0] is None else SeenSinks(*tensors)  # type: ignore[arg-type]


def run_latte(
    op: Any,
    qkv: Three,
    sequences: Sequences,
    earlier: tuple[Tensor, Tensor] | None,
    *log_decay: Tensor,
) -> tuple[Tensor, LatteState]:
    """Output and final state from an op of :func:`latte_op`."""
    out, A, mu = op(*qkv, *sequences[:2], *(earlier or (None, None)), *log_decay)[:3]
    return out, LatteState(A, mu)


def run_window(
    op: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    local: Local,
    sequences: Sequences,
    tail: WindowState | None,
    *sinks: Tensor | None,
) -> Tensor:
    """Output from an op of :func:`window_op`, with ``sinks`` if it takes them."""
    earlier = tail or (None, None, None)
    return op(q, k, v, *sequences[:2], *earlier, *sinks, *local, sequences.causal)
