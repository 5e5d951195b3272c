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

from latte.ops import double_backward
from latte.ops.arguments import MACCHIATO_GRADIENTS, WINDOW_GRADIENTS, Macchiato, Three
from latte.ops.custom_ops import differentiable_op
from latte.ops.state import LateSources, LatteState, SeenSinks, WindowState, final_buffers
from latte.ops.tensors import Local, Sequences
from latte.ops.torch_backend import latte, window


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
    late = None
    if delay:
        assert local.window is not None
        log_mass = None if earlier is None else earlier[0]
        late = LateSources.of(latent_k_BTHL, v_BTGD, local.window, sequences, pending, log_mass)
    latents, qkv = (latent_q_BTHL, latent_k_BTHL), (q_BTHK, k_BTGK, v_BTGD)
    states = (earlier, tail, log_decay, sinks, late)
    out, A, mu, *_ = op(*Macchiato.of(latents, qkv, local, sequences, *states))
    return out, LatteState(A, mu)


class BranchInputs:
    """What the two branches take of the op's arguments."""

    def __init__(self, x: Macchiato) -> None:
        self.near = (x.local, x.sequences, x.tail, x.sinks)
        self.late, self.sequences = x.late_v is not None, x.sequences
        if self.late:
            self.sequences = x.sequences._replace(key_mask=x.late_mask)
        self.latent_k, self.v = x.latent_k, x.v if x.late_v is None else x.late_v
        self.p = latte.probabilities(x.latent_q)
        if x.begun is not None:  # without latent mass all of the distribution is the window's
            self.p.masked_fill_(~x.begun[..., None, None], 0.0)
            self.share.masked_fill_(~x.begun[..., None, None], 1.0)
        self.R = x.q.shape[2] // x.v.shape[2]

    @property
    def share(self) -> Tensor:
        """p(0|t), (B, T, H, 1)."""
        return self.p[..., :1]

    @property
    def pkv(self) -> Three:
        """What the latents' passes take: every query head has values of its own."""
        v = self.v.repeat_interleave(self.R, 2) if self.R > 1 else self.v
        return self.p[..., 1:], self.latent_k, v


def macchiato_op(
    name: str,
    forward: Callable[..., tuple[Tensor, ...]],
    backward: Callable[..., tuple[Tensor, ...]],
    buffers: Callable[[Macchiato], tuple[Tensor, ...]],
    saves: Sequence[str],
) -> Any:
    """The op of both branches.

    Args:
        forward, backward: Passes of the latents.
        buffers: Function of the op's arguments that makes empty outputs after output and state.
        saves: Names of what ``backward`` takes last.
    """

    def run(x: Macchiato) -> tuple[Tensor, ...]:
        call = BranchInputs(x)
        out = window.forward(x.qkv, *call.near, call.share)
        _, *after = forward(call.pkv, call.sequences, x.earlier, out, x.log_decay)
        return out.to(x.v.dtype), *after

    def run_back(x: Macchiato, *given: Tensor) -> dict[str, Tensor]:
        call, grads, saved = BranchInputs(x), given[:3], given[3:]
        near = window.backward(grads[0], x.qkv, *call.near, call.share)
        apart = call.late or call.R > 1
        pulled, dlatent_k, far_dv, *state = backward(
            *(grads, call.pkv, call.sequences, x.earlier, *saved),
            dv_near=None if apart else near.dv,
            log_decay=x.log_decay,
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

    def fake(x: Macchiato) -> tuple[Tensor, ...]:
        out = x.v.new_empty((*x.q.shape[:3], x.v.shape[-1]))
        return out, *final_buffers(x.latent_k, x.v, x.cu_seqlens), *buffers(x)

    return differentiable_op(
        name,
        Macchiato,
        fake,
        run,
        run_back,
        returns=["out", "log_mass", "mean"],
        gradients=(*MACCHIATO_GRADIENTS, "late_v"),
        saves=saves,
        again=double_backward.macchiato,
    )


causal_op = macchiato_op(
    "macchiato",
    latte.causal,
    latte.causal_backward,
    lambda x: latte.Checkpoints.allocate(x.latent_k, x.v),
    saves=["top_M", "mass_M", "mean_M"],
)
bidirectional_op = macchiato_op(
    "macchiato_bidirectional",
    latte.bidirectional,
    latte.bidirectional_backward,
    lambda x: latte.tops(x.latent_k, x.v, x.cu_seqlens),
    saves=["mean", "top", "mass"],
)
