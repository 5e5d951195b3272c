"""A mixer's weights p(s|t) as dense matrices (B, H, T, T), and their logits, for inspection.

Latte's own weights are those of :func:`latte.ops.attention_weights`. Shape suffixes: B batch, T
tokens, E hidden size, H query heads, G key/value heads, K key width, D value width, L latents.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.layers.rollback import PastKeys
from latte.ops import attention_weights, window_log_mass
from latte.ops.reference import visible_sources
from latte.ops.tensors import Sequences


class MixingLogits(NamedTuple):
    """The logits of a layer's probabilities, before the softmax.

    ``latent_q`` (B, T, H, L or L+1) gives p(l|t). ``latent_k`` (B, T, H, L) gives p(s|l,t). The
    rotated ``q`` (B, T, H, K) and ``k`` (B, T, G, K) are those of the window, before scale and
    softcap. A field is None if the layer has no such logits.
    """

    latent_q: Tensor | None = None
    latent_k: Tensor | None = None
    q: Tensor | None = None
    k: Tensor | None = None


class DenseWeights:
    """The methods of a :class:`latte.layers.Mixer` that give its weights."""

    def with_weights(
        self: Any, x_BTE: Tensor, *given: Any, **named: Any
    ) -> tuple[Tensor, Any, Tensor]:
        """Like :meth:`Mixer.forward`, and returns the weights (B, H, T, P + T) too: O(T^2) memory.

        P is the number of past tokens whose keys the state has kept (its ``sources``). If there
        is no past, gradients of the output flow through the weights.
        """
        projected, context = self._begin(x_BTE, *given, **named)
        state, sources = projected.state, projected.state.sources
        if sources is not None and sources.length:
            weights = self._weights(*_with_past(x_BTE, projected, context, sources))
            weights = weights[:, :, sources.length :]
        else:
            weights = self._weights(projected, context)
        out_BTHD, after = self._attend(x_BTE, projected, context)
        if weights.requires_grad and state.position is None:
            v_BTHD = projected.v.repeat_interleave(self.num_heads // projected.v.shape[2], 2)
            dense = torch.einsum("bhts,bshd->bthd", weights.to(v_BTHD.dtype), v_BTHD)
            # The values are exactly the op's; the gradients are those of the weighted sum.
            out_BTHD = out_BTHD.detach() + (dense - dense.detach())
        out = self.o_proj(self._output(out_BTHD, projected.v, x_BTE).flatten(-2))
        return out, self._end(x_BTE, projected, after, context), weights

    def mixing_logits(self: Any, x_BTE: Tensor, *given: Any, **named: Any) -> MixingLogits:
        """The logits of the weights of these tokens among themselves, for inspection.

        A decay of the latents is folded into ``latent_k``, in fp64: latents without
        forgetting would have the same weights with these keys. The arguments are those of
        :meth:`Mixer.forward`.
        """
        return self._logits(*self._begin(x_BTE, *given, **named))

    def attention_weights(self: Any, x_BTE: Tensor, *given: Any, **named: Any) -> Tensor:
        """The weights p(s|t) of these tokens among themselves, (B, H, T, T): O(T^2) memory.

        The arguments are those of :meth:`Mixer.forward`.
        """
        return self._weights(*self._begin(x_BTE, *given, **named))

    def _logits(self, projected: Any, context: Any) -> MixingLogits:
        """The logits of tokens without a past."""
        return remembered(projected, projected.log_decay)

    def _weights(self: Any, projected: Any, context: Any) -> Tensor:
        """The weights (B, H, T, T) of tokens without a past, computed from their logits."""
        _, _, latent_q, latent_k, q, k, *_ = projected
        shared = {
            "causal": self.causal,
            "key_mask": context.key_mask,
            "cu_seqlens": context.cu_seqlens,
        }
        local: dict[str, Any] = {"window": self.window, "softcap": self.softcap}
        if latent_q is not None:
            own: dict[str, Any] = {} if q is None else dict(local)
            own["log_decay"] = projected.log_decay
            return attention_weights(latent_q, latent_k, q, k, **own, **shared)
        if q is not None:
            return softmax_weights(q, k, **local, **shared)
        raise ValueError(f"{type(self).__name__} has no attention weights to show")


class MacchiatoWeights(DenseWeights):
    """The same for :class:`latte.layers.LatteMacchiato`, which divides the past in its own way."""

    def _weights(self: Any, projected: Any, context: Any) -> Tensor:
        if not (self.num_sinks or self.kept_tokens or self.delay_latents or self.joint_softmax):
            return super()._weights(projected, context)
        without_past = type(projected.state)()
        given = projected._replace(v=identity_values(projected), state=without_past)
        out, _ = self._attend(given.v, given, context._replace(output_final_state=False))
        return out.transpose(1, 2)

    def window_weights(self: Any, near: Any, first: int, context: Any) -> Tensor:
        """The window's weights of the first tokens among themselves, (B, H, first, first)."""
        sink_q = None if near.sink_q is None else near.sink_q[:, :first]
        near = near._replace(q=near.q[:, :first], k=near.k[:, :first], sink_q=sink_q)
        near = near._replace(v=identity_values(near))
        branch = self.window_branch(near, context._replace(key_mask=None))
        return branch[0].transpose(1, 2)

    def _logits(self: Any, projected: Any, context: Any) -> MixingLogits:
        """The logits of tokens without a past. That of the window has its logsumexp, if joint."""
        decay = projected.log_decay
        if decay is not None and self.delay_latents:
            # A source decays from the token at which the latents read it.
            T, W = decay.shape[1], self.window
            decay = F.pad(decay[:, W:], (0, 0, 0, 0, 0, W))[:, :T]
        logits = remembered(projected, decay)
        return logits._replace(latent_q=self.mixture(projected, context))

    def mixture(self: Any, projected: Any, context: Any) -> Tensor:
        """The logits (B, T, H, L+1) of p(l|t), at least fp32 with a joint softmax."""
        if not self.joint_softmax:
            return projected.latent_q
        return with_mass(projected.latent_q, self.window_mass(projected, context))

    def window_mass(self: Any, projected: Any, context: Any) -> Tensor:
        """The logsumexp of the logits of all exact keys: window, sinks, kept tokens; (B, T, H)."""
        partition, state = self.divide(projected, context, latents=False)
        return context.across(window_log_mass)(
            projected.q,
            projected.k,
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
            key_mask=context.key_mask,
            cu_seqlens=context.cu_seqlens,
            initial_state=state.window,
            partition=partition,
        )


def identity_values(near: Any) -> Tensor:
    """Values (B, T, G, T) for which the output of attention is its weights.

    So soft caps, grouped heads, sinks and norms are exactly those of the model.
    """
    B, T, G = near.k.shape[:3]
    eye = torch.eye(T, dtype=near.v.dtype, device=near.v.device)
    return eye[None, :, None].expand(B, -1, G, -1)


def with_mass(latent_q: Tensor, mass_BTH: Tensor) -> Tensor:
    """Mixture logits (B, T, H, L+1) plus the window's logsumexp in column 0, in the wider dtype."""
    return F.pad(mass_BTH[..., None], (0, latent_q.shape[-1] - 1)) + latent_q


def window_odds(latent_q_BTHL: Tensor) -> Tensor:
    """log p(0|t) / (1 - p(0|t)), (B, T, H), at least fp32, from query logits (B, T, H, L+1)."""
    wide = latent_q_BTHL.to(torch.promote_types(latent_q_BTHL.dtype, torch.float32))
    return wide[..., 0] - torch.logsumexp(wide[..., 1:], -1)


def window_share(latent_q_BTHL: Tensor) -> Tensor:
    """p(0|t), the window's probability, (B, T, H), from query logits (B, T, H, L+1)."""
    return torch.sigmoid(window_odds(latent_q_BTHL))


def state_probabilities(latent_q_BTHL: Tensor, window: bool) -> Tensor:
    """p(l|t), at least fp32, from query logits. If there is a window, it is column 0."""
    wide = latent_q_BTHL.to(torch.promote_types(latent_q_BTHL.dtype, torch.float32))
    if not window:
        return wide.softmax(-1)
    share = window_share(wide)[..., None]
    return torch.cat([share, (1 - share) * wide[..., 1:].softmax(-1)], -1)


def remembered(projected: Any, decay: Tensor | None) -> MixingLogits:
    """Key logits with which latents without decay have the same p(s|l,t)."""
    latent_k = projected.latent_k
    if latent_k is not None and decay is not None:
        latent_k = latent_k.double() - decay.double().cumsum(1)
    return MixingLogits(projected.latent_q, latent_k, projected.q, projected.k)


def _with_past(x: Tensor, projected: Any, context: Any, past: PastKeys) -> tuple[Any, Any]:
    """The whole row that some tokens end, with past keys; past queries are zeros."""
    P = past.length

    def blank(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        return torch.cat([x.new_zeros(x.shape[0], P, *x.shape[2:]), x], 1)

    def whole(before: Tensor | None, x: Tensor | None) -> Tensor | None:
        return None if before is None or x is None else torch.cat([before, x], 1)

    features: Any = projected.features
    if features is not None:
        features = (blank(features[0]), whole(past.k, features[1]))
    known = projected._replace(
        latent_q=blank(projected.latent_q),
        latent_k=whole(past.k, projected.latent_k),
        q=blank(projected.q),
        k=whole(past.local_k, projected.k),
        sink_q=blank(projected.sink_q),
        log_decay=whole(past.log_decay, projected.log_decay),
        scores=whole(past.scores, projected.scores),
        features=features,
    )
    mask = whole(past.mask, context.real(x))
    return known, context._replace(key_mask=mask, cu_seqlens=None, position=None)


def softmax_weights(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    *,
    window: int | None = None,
    softcap: float | None = None,
    causal: bool = True,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The weights of softmax attention. A row that sees no key is zero."""
    k_BTHK = k_BTGK.repeat_interleave(q_BTHK.shape[2] // k_BTGK.shape[2], 2)
    logits = torch.einsum("bthk,bshk->bhts", q_BTHK, k_BTHK) / q_BTHK.shape[-1] ** 0.5
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    sequences = Sequences(key_mask, cu_seqlens, causal)
    visible = visible_sources(q_BTHK.shape[1], sequences, q_BTHK.device, window)[:, None]
    # Masked logits are finite: a row of -inf would have NaN gradients.
    weights = logits.masked_fill(~visible, torch.finfo(logits.dtype).min / 2).softmax(-1)
    return weights.masked_fill(~visible, 0.0)
