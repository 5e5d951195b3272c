"""``sliding_window_attention`` on Triton kernels: a custom op with a closed gradient.

Saved for the backward pass: the inputs, and each row's largest logit and mass, (B, T, H) in fp32.

Shape suffixes: B batch, T tokens, H query heads, G key heads, K key width, D value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from latte.ops.buffers import empty_gradients, without_masked
from latte.ops.precision import full_precision
from latte.ops.state import WindowState
from latte.ops.triton_backend.window_launch import Window, WindowLauncher, tail_of, unit_rows


def sliding_window_attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGD: Tensor,
    *,
    window: int,
    scale: float,
    softcap: float | None,
    causal: bool,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: WindowState | None,
) -> Tensor:
    """See :func:`latte.ops.sliding_window_attention`."""
    k_BTGK, v_BTGD = without_masked(key_mask, k_BTGK), without_masked(key_mask, v_BTGD)
    return window_op(
        *(q_BTHK, k_BTGK, v_BTGD, key_mask, cu_seqlens, *tail_of(initial_state)),
        *(window, scale, softcap or 0.0, causal),
    )


@torch.library.custom_op("latte::triton_window", mutates_args=())
@full_precision
def window_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    tail_k: Tensor | None,
    tail_v: Tensor | None,
    tail_mask: Tensor | None,
    window: int,
    scale: float,
    softcap: float,
    causal: bool,
) -> Tensor:
    """Outputs. ``softcap=0`` is none."""
    tail = (tail_k, tail_v, tail_mask)
    w = Window.of(k, v, key_mask, tail, window, scale, softcap, causal)
    run = WindowLauncher(q, None, w, cu_seqlens)
    out = q.new_empty((*q.shape[:3], run.D))
    run.outputs(unit_rows(q), None, None, out, None)
    return out


def row_buffers(q: Tensor, count: int) -> tuple[Tensor, ...]:
    """Empty fp32 buffers (B, T, H)."""
    return tuple(q.new_empty(tuple(q.shape[:3]), dtype=torch.float32) for _ in range(count))


@window_op.register_fake
def _(q, k, v, key_mask, cu_seqlens, tail_k, tail_v, tail_mask, window, scale, softcap, causal):
    return q.new_empty((*q.shape[:3], v.shape[-1]))


@torch.library.custom_op("latte::triton_window_backward", mutates_args=())
@full_precision
def window_backward_op(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    tail_k: Tensor | None,
    tail_v: Tensor | None,
    tail_mask: Tensor | None,
    window: int,
    scale: float,
    softcap: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and of the earlier keys and values (empty where there are none)."""
    tail = (tail_k, tail_v, tail_mask)
    w = Window.of(k, v, key_mask, tail, window, scale, softcap, causal)
    run = WindowLauncher(q, None, w, cu_seqlens)
    dq, dk, dv = empty_gradients(q, k, v)
    dtail = tail_buffers(k, v, tail_k, tail_v)
    rows = top, mass, delta = row_buffers(q, 3)
    q, dout = unit_rows(q), unit_rows(dout)
    run.query_gradients(q, None, *rows, dq, dy=dout)
    run.source_gradients(q, dout, (top, mass, None, delta), (dk, dv), dtail)
    return dq, dk, dv, *dtail


def tail_buffers(
    k: Tensor, v: Tensor, tail_k: Tensor | None, tail_v: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Empty buffers for the gradients of the earlier keys and values."""
    shapes = ((0,) if x is None else tuple(x.shape) for x in (tail_k, tail_v))
    dtail_k, dtail_v = (x.new_empty(shape) for x, shape in zip((k, v), shapes, strict=True))
    return dtail_k, dtail_v


@window_backward_op.register_fake
def _(dout, q, k, v, key_mask, cu_seqlens, tail_k, tail_v, *_):
    return *empty_gradients(q, k, v), *tail_buffers(k, v, tail_k, tail_v)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:8])
    ctx.options = inputs[8:]


def _gradients(ctx, dout):
    saved = ctx.saved_tensors
    dq, dk, dv, dtail_k, dtail_v = window_backward_op(dout, *saved, *ctx.options)
    tails = (None, None) if saved[5] is None else (dtail_k, dtail_v)
    return dq, dk, dv, None, None, *tails, None, None, None, None, None


window_op.register_autograd(_gradients, setup_context=_save)
