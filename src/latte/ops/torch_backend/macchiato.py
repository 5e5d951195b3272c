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

from typing import Any

import torch
from torch import Tensor

from latte.ops.arguments import MACCHIATO_GRADIENTS, WINDOW_GRADIENTS, Latte, Macchiato, Mixture
from latte.ops.custom_ops import differentiable_op
from latte.ops.state import final_buffers
from latte.ops.torch_backend import latte, window


def macchiato_attention(x: Macchiato, causal: bool) -> tuple[Tensor, ...]:
    """See :func:`latte.ops.macchiato_attention`: the output, then the latents' state."""
    op = causal_op if causal else bidirectional_op
    return op(*Mixture.of(x, causal))[:3]


class Branches:
    """What the two branches take of the op's arguments."""

    def __init__(self, x: Mixture) -> None:
        self.near, self.late, self.R = x.near(), x.late_v is not None, x.q.shape[2] // x.v.shape[2]
        self.p = latte.probabilities(x.latent_q)
        self.share = self.p[..., :1]  # p(0|t), (B, T, H, 1)
        if x.begun is not None:  # without latent mass all of the distribution is the window's
            self.p.masked_fill_(~x.begun[..., None, None], 0.0)
            self.share.masked_fill_(~x.begun[..., None, None], 1.0)
        v, mask = (x.v, x.key_mask) if x.late_v is None else (x.late_v, x.late_mask)
        # Every query head has values of its own.
        v = v.repeat_interleave(self.R, 2) if self.R > 1 else v
        latents = (self.p[..., 1:], x.latent_k, v, mask, x.cu_seqlens)
        self.latents = Latte(*latents, x.log_mass, x.mean, x.log_decay)


def macchiato_op(name: str, passes: latte.Passes) -> Any:
    """The op of both branches, from the passes of the latents."""

    def run(x: Mixture) -> tuple[Tensor, ...]:
        call = Branches(x)
        out = window.forward(call.near, call.share)
        _, *after = passes.forward(call.latents, out)
        return out.to(x.v.dtype), *after

    def run_back(x: Mixture, *given: Tensor) -> dict[str, Tensor]:
        call, grads, saved = Branches(x), given[:3], given[3:]
        near = window.backward(call.near, grads[0], call.share)
        apart = call.late or call.R > 1
        pulled, dlatent_k, far_dv, *state = passes.backward(
            call.latents, grads, *saved, dv_near=None if apart else near.dv
        )
        if call.R > 1:
            far_dv = far_dv.to(near.dv.dtype).unflatten(2, (-1, call.R)).sum(3)
        assert near.dshare is not None
        pulled = torch.cat([near.dshare, pulled], -1)
        found = dict(zip(WINDOW_GRADIENTS, near[:-1], strict=True))
        if apart and not call.late:
            found["v"] = near.dv + far_dv
        found |= dict(zip(("log_mass", "mean", "log_decay"), state, strict=False))
        dlatent_q = latte.through_softmax(pulled, call.p)
        return found | {"latent_q": dlatent_q, "latent_k": dlatent_k, "late_v": far_dv}

    def fake(x: Mixture) -> tuple[Tensor, ...]:
        out = x.v.new_empty((*x.q.shape[:3], x.v.shape[-1]))
        state = (x.latent_k, x.v, x.cu_seqlens)
        return out, *final_buffers(*state), *passes.buffers(*state)

    return differentiable_op(
        name,
        Mixture,
        fake,
        run,
        run_back,
        returns=["out", "log_mass", "mean"],
        gradients=(*MACCHIATO_GRADIENTS, "late_v"),
        saves=passes.saves,
    )


causal_op = macchiato_op("macchiato", latte.CAUSAL)
bidirectional_op = macchiato_op("macchiato_bidirectional", latte.BIDIRECTIONAL)
