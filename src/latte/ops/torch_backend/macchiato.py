"""Macchiato in linear time: the window and the latents as one op, with one distribution for both.

p = softmax over the L+1 query logits is computed once forward and once backward. Column 0 is the
window's share of a token. The other columns are Latte's p(l|t). Both branches add to the same
output and to the same gradient of the values. Each branch returns p times its gradient, and the
gradient of the logits follows from that. The inputs and the states between segments are saved, but
not the output of either branch.

Shape suffixes: B batch, T tokens, H query heads, G key/value heads, L latents, K key width, D value
width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from latte.ops.custom_ops import (
    MACCHIATO,
    Earlier,
    connect_gradients,
    custom_op,
    final_buffers,
    maybe_sinks,
)
from latte.ops.state import LateSources, LatteState, SeenSinks, WindowState
from latte.ops.tensors import Local, Sequences
from latte.ops.torch_backend import latte, window

SCHEMA = f"{MACCHIATO}, int window, float scale, float softcap"
TENSORS = SCHEMA.count("Tensor")
Passes = tuple[Callable[..., tuple[Tensor, ...]], Callable[..., tuple[Tensor, ...]]]


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
) -> tuple[Tensor, LatteState]:
    """See :func:`latte.ops.macchiato_attention`; ``latent_q`` has L + 1 columns."""
    op = causal_op if sequences.causal else bidirectional_op
    late: Sequence[Tensor | None] = (None, None, None)
    if delay:
        assert local.window is not None
        log_mass = None if earlier is None else earlier[0]
        around = (local.window, sequences, pending, log_mass)
        latent_k_BTHL, *late = LateSources.of(latent_k_BTHL, v_BTGD, *around)
    out, A, mu = op(
        *(latent_q_BTHL, latent_k_BTHL, q_BTHK, k_BTGK, v_BTGD, *sequences[:2]),
        *(earlier or (None, None)),
        *(tail or (None, None, None)),
        *(log_decay, *(sinks or (None,) * len(SeenSinks._fields)), *late, *local),
    )[:3]
    return out, LatteState(A, mu)


class Call:
    """The arguments of a pass, as the two branches take them."""

    def __init__(self, five: tuple[Tensor, ...], rest: tuple[Any, ...], causal: bool) -> None:
        latent_q, self.latent_k, q, k, v = five
        key_mask, cu_seqlens, log_mass, mean, *tail, log_decay = rest[:8]
        *sinks, self.late_v, late_mask, begun = rest[8:-3]
        self.qkv = (q, k, v)
        sequences = Sequences(key_mask, cu_seqlens, causal)
        self.sequences = sequences if begun is None else sequences._replace(key_mask=late_mask)
        self.earlier: Earlier = (log_mass, mean)
        self.near = (Local(*rest[-3:]), sequences, tuple(tail), maybe_sinks(sinks))
        self.forgetting = {"log_decay": log_decay} if causal else {}
        self.p = latte.probabilities(latent_q)
        if begun is not None:  # without latent mass all of the distribution is the window's
            self.p.masked_fill_(~begun[..., None, None], 0.0)
            self.share.masked_fill_(~begun[..., None, None], 1.0)
        self.R = self.qkv[0].shape[2] // self.qkv[2].shape[2]

    @property
    def share(self) -> Tensor:
        """p(0|t), (B, T, H, 1)."""
        return self.p[..., :1]

    @property
    def pkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the latents' passes take: every query head has values of its own."""
        v = self.qkv[2] if self.late_v is None else self.late_v
        return self.p[..., 1:], self.latent_k, v.repeat_interleave(self.R, 2) if self.R > 1 else v


def macchiato_op(name: str, passes: Passes, saved: Any, saved_from: int, causal: bool) -> Any:
    """The op of both branches.

    Args:
        passes: Forward and backward pass of the latents.
        saved: Function that makes empty buffers for what the forward pass saves besides the final
            state.
        saved_from: 2 if the backward pass needs the final mean too, else 3.
    """
    forward, backward = passes

    def run(*inputs: Any) -> tuple[Tensor, ...]:
        call = Call(inputs[:5], inputs[5:], causal)
        out = window.forward(call.qkv, *call.near, call.share)
        _, *after = forward(call.pkv, call.sequences, call.earlier, out, **call.forgetting)
        return out.to(inputs[4].dtype), *after

    def run_back(dout: Tensor, dlog_mass: Tensor, dmean: Tensor, *inputs: Any) -> Any:
        kept = inputs[TENSORS:-3]
        call = Call(inputs[:5], (*inputs[5:TENSORS], *inputs[-3:]), causal)
        near = window.backward(dout, call.qkv, *call.near, call.share)
        late = call.late_v is not None
        dlatent_q, dlatent_k, dv, dA, dmu, *dlog_decay = backward(
            *((dout, dlog_mass, dmean), call.pkv, call.sequences, call.earlier, *kept),
            dv_near=near.dv if call.R == 1 and not late else None,
            **call.forgetting,
        )
        if call.R > 1:
            dv = dv.to(near.dv.dtype).unflatten(2, (-1, call.R)).sum(3)
        dlate_v = dv.to(inputs[4].dtype) if late else dv.new_empty(0)
        if late:
            dv = near.dv
        elif call.R > 1:
            dv = near.dv + dv
        assert near.dshare is not None
        pulled = torch.cat([near.dshare, dlatent_q], -1)
        latent_q, _, q, k, v = inputs[:5]
        if call.earlier[1] is None:
            dA, dmu = q.new_empty(0), q.new_empty(0)
        return (
            *(latte.through_softmax(pulled, call.p).to(latent_q.dtype), dlatent_k, near.dq),
            *(near.dk.to(k.dtype), dv.to(v.dtype), dA, dmu),
            *(near.dtail_k.to(k.dtype), near.dtail_v.to(v.dtype)),
            *(dlog_decay or (q.new_empty(0),)),
            *(near.dsink_q, near.dsink_k.to(k.dtype), near.dsink_v.to(k.dtype), dlate_v),
        )

    def fake(latent_q, latent_k, q, k, v, _, cu_seqlens, *__):
        A, mu = final_buffers(latent_k, v, cu_seqlens)
        return v.new_empty((*q.shape[:3], v.shape[-1])), A, mu, *saved(latent_k, v, A)

    count = 3 if causal else 2
    op = custom_op(name, run, SCHEMA, 3 + count)
    op.register_fake(fake)
    kept = ", ".join(f"Tensor saved_{i}" for i in range(3 + count - saved_from))
    given = SCHEMA.replace(", int window", f", {kept}, int window")
    backward_op = custom_op(
        f"{name}_backward", run_back, f"Tensor dout, Tensor dlog_mass, Tensor dmean, {given}", 14
    )
    wanted = (0, 1, 2, 3, 4, 7, 8, 9, 10, 12, 13, 14, 15, 18)
    connect_gradients(op, backward_op, wanted, outputs=3, saved_from=saved_from)
    return op


causal_op = macchiato_op(
    "macchiato",
    (latte.causal, latte.causal_backward),
    lambda latent_k, v, _: latte.Checkpoints.allocate(latent_k, v),
    saved_from=3,
    causal=True,
)
bidirectional_op = macchiato_op(
    "macchiato_bidirectional",
    (latte.bidirectional, latte.bidirectional_backward),
    lambda latent_k, v, A: (torch.empty_like(A), torch.empty_like(A)),
    saved_from=2,
    causal=False,
)
