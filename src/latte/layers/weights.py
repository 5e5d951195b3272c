"""A mixer's weights p(s|t) as dense matrices (B, H, T, T), and their logits, for inspection.

Shape suffixes: B batch, T tokens, E hidden size, H query heads, G key/value heads, K key width, D
value width, L latents.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.layers.rollback import PastKeys
from latte.ops import use_backend, window_log_mass


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


def with_weights(
    layer: Any, x_BTE: Tensor, *given: Any, **named: Any
) -> tuple[Tensor, Any, Tensor]:
    """Like :meth:`Mixer.forward`, and returns the weights (B, H, T, P + T) too: O(T^2) memory.

    P is the number of past tokens whose keys the state has kept (its ``sources``). If there is no
    past, gradients of the output flow through the weights.
    """
    projected, context = layer._begin(x_BTE, *given, **named)
    state, sources = projected.state, projected.state.sources
    if sources is not None and sources.length:
        weights = layer._weights(*_with_past(x_BTE, projected, context, sources))
        weights = weights[:, :, sources.length :]
    else:
        weights = layer._weights(projected, context)
    out_BTHD, after = layer._attend(x_BTE, projected, context)
    if weights.requires_grad and state.position is None:
        v_BTHD = projected.v.repeat_interleave(layer.num_heads // projected.v.shape[2], 2)
        dense = torch.einsum("bhts,bshd->bthd", weights.to(v_BTHD.dtype), v_BTHD)
        # The values are exactly the op's; the gradients are those of the weighted sum.
        out_BTHD = out_BTHD.detach() + (dense - dense.detach())
    out = layer.o_proj(layer._output(out_BTHD, projected.v, x_BTE).flatten(-2))
    return out, layer._end(x_BTE, projected, after, context), weights


def attention_weights(layer: Any, x_BTE: Tensor, *given: Any, **named: Any) -> Tensor:
    """The weights p(s|t) of these tokens among themselves, (B, H, T, T): O(T^2) memory.

    The arguments are those of :meth:`Mixer.forward`.
    """
    weights: Tensor = layer._weights(*layer._begin(x_BTE, *given, **named))
    return weights


def mixing_logits(layer: Any, x_BTE: Tensor, *given: Any, **named: Any) -> MixingLogits:
    """The logits of the weights of these tokens among themselves, for inspection.

    A decay of the latents is folded into ``latent_k``, in fp64: latents without forgetting would
    have the same weights with these keys. With a joint softmax the window's logit includes the
    logsumexp of its keys. The arguments are those of :meth:`Mixer.forward`.
    """
    projected, context = layer._begin(x_BTE, *given, **named)
    latent_k, decay = projected.latent_k, projected.log_decay
    if latent_k is not None and decay is not None:
        if getattr(layer, "delay_latents", False):
            # A source decays from the token at which the latents read it.
            T, W = decay.shape[1], layer.window
            decay = F.pad(decay[:, W:], (0, 0, 0, 0, 0, W))[:, :T]
        latent_k = latent_k.double() - decay.double().cumsum(1)
    return MixingLogits(mixture(layer, projected, context), latent_k, projected.q, projected.k)


def mixture(layer: Any, projected: Any, context: Any) -> Tensor | None:
    """The logits (B, T, H, L+1) of p(l|t), at least fp32 with a joint softmax."""
    latent_q: Tensor | None = projected.latent_q
    if latent_q is None or projected.q is None or not getattr(layer, "joint_softmax", False):
        return latent_q
    return with_mass(latent_q, window_mass(layer, projected, context))


def dense_weights(layer: Any, projected: Any, context: Any) -> Tensor:
    """The weights (B, H, T, T) of tokens without a past: the mixture of an identity matrix.

    So soft caps, sinks, kept tokens and whatever else a layer does are those of the model.
    """
    keys = projected.latent_k if projected.k is None else projected.k
    if keys is None and projected.features is not None:
        keys = projected.features[1]
    if keys is None:
        raise ValueError(f"{type(layer).__name__} has no attention weights to show")
    without_past = type(projected.state)()
    given = projected._replace(v=_identity(projected.v, keys.shape[1]), state=without_past)
    with _any_width(given.v):
        out, _ = layer._attend(given.v, given, context._replace(output_final_state=False))
    weights: Tensor = out.transpose(1, 2)
    return weights


def window_weights(layer: Any, near: Any, first: int, context: Any) -> Tensor:
    """The weights of the first tokens' exact keys among themselves, (B, H, first, first)."""
    sink_q = None if near.sink_q is None else near.sink_q[:, :first]
    near = near._replace(q=near.q[:, :first], k=near.k[:, :first], sink_q=sink_q)
    near = near._replace(v=_identity(near.v, near.k.shape[1]))
    with _any_width(near.v):
        out, _ = layer.window_branch(near, context._replace(key_mask=None))
    weights: Tensor = out.transpose(1, 2)
    return weights


def window_mass(layer: Any, projected: Any, context: Any) -> Tensor:
    """The logsumexp of the logits of all exact keys: window, sinks, kept tokens; (B, T, H)."""
    partition, state = layer.divide(projected, context, latents=False)
    mass: Tensor = context.across(window_log_mass)(
        projected.q,
        projected.k,
        window=layer.window,
        scale=layer.scale,
        softcap=layer.softcap,
        key_mask=context.key_mask,
        cu_seqlens=context.cu_seqlens,
        initial_state=state.window,
        partition=partition,
    )
    return mass


def _any_width(v_BTGD: Tensor) -> AbstractContextManager[None]:
    """Where values may be of any width: a GPU's kernels are compiled for each width anew."""
    return nullcontext() if v_BTGD.is_cpu else use_backend("torch")


def _identity(v_BTGD: Tensor, T: int) -> Tensor:
    """Values (B, T, G, T) for which the output of attention is its weights."""
    eye = torch.eye(T, dtype=v_BTGD.dtype, device=v_BTGD.device)
    return eye[None, :, None].expand(len(v_BTGD), -1, v_BTGD.shape[2], -1)


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
