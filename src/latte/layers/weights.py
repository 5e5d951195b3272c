"""A mixer's weights p(s|t) as dense matrices (B, H, T, T), and their logits, for inspection.

Latte's own weights are those of :func:`latte.ops.attention_weights`. Shape suffixes: B batch, T
tokens, E hidden size, H query heads, G key/value heads, K key width, D value width, L latents.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from latte.layers.rollback import PastKeys
from latte.ops import attention_weights
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
        out = self.o_proj(out_BTHD.flatten(-2))
        return out, self._end(x_BTE, projected, after, context), weights

    def mixing_logits(self: Any, x_BTE: Tensor, *given: Any, **named: Any) -> MixingLogits:
        """The logits of the weights of these tokens among themselves, for inspection.

        If latents forget, the decay is folded into ``latent_k``, in fp64: latents without
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


def remembered(projected: Any, decay: Tensor | None) -> MixingLogits:
    """Logits of latents without forgetting that give the same p(s|l,t)."""
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
