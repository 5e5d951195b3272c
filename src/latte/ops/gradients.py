"""Autograd of ``latte_attention``'s custom ops, which all backends and directions share."""

from __future__ import annotations

from typing import Any

from latte.ops.buffers import empty_gradients


def connect_gradients(op: Any, backward_op: Any, *, saved_from: int) -> None:
    """Let ``backward_op`` give the gradients of ``op``.

    Args:
        op: of (q, k, v, key_mask, cu_seqlens, log_mass, mean), to the output, the final log-mass
            and mean, and whatever else the backward pass needs.
        backward_op: of the three gradients, the inputs and the saved outputs, to the gradients of
            q, k, v and the initial state.
        saved_from: the first of the outputs that the backward pass needs.
    """

    def fake(dout, dlog_mass, dmean, q, k, v, *_):
        return empty_gradients(q, k, v, dlog_mass, dmean)

    def save(ctx, inputs, output):
        ctx.save_for_backward(*inputs, *output[saved_from:])
        # Gradients flow from the outputs and the final state alone.
        ctx.mark_non_differentiable(*output[3:])

    def gradients(ctx, dout, dlog_mass, dmean, *_):
        saved = ctx.saved_tensors
        dq, dk, dv, dA, dmu = backward_op(dout, dlog_mass, dmean, *saved)
        earlier = (None, None) if saved[5] is None else (dA, dmu)
        return dq, dk, dv, None, None, *earlier

    backward_op.register_fake(fake)
    op.register_autograd(gradients, setup_context=save)
