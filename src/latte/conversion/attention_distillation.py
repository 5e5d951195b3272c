"""Attention distillation: each layer learns its base's own attention, given the base's inputs.

A layer can learn more than the output, because its weights are probabilities. Full attention is
itself a mixture of the window and the rest:

    y_t = m_t SWA_t + (1 - m_t) REST_t,
    m_t = sum_{s in window} a_ts = exp(LSE_window - LSE_full),

So p(l=0|t) should be m_t, and the latents should give REST_t. :func:`watch` runs the base (its full
attention, of quadratic cost) inside the converted model, and shows what each layer reads.

Shape suffixes: B batch, T tokens, E hidden size, S queries, H query heads, G key/value heads, K
head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.conversion.attention import MacchiatoAttention
from latte.layers.mixer import Context, Projected
from latte.layers.weights import window_odds
from latte.ops.reference_kept import Places

SAMPLE_EVERY = 4  # the mass of every fourth query is computed


def relative_error(out_BTE: Tensor, target_BTE: Tensor, real_BT: Tensor) -> Tensor:
    """``sum |out - target|^2 / sum |target|^2`` over valid tokens, at least fp32."""
    out, target = _wide(out_BTE), _wide(target_BTE)
    real = real_BT[..., None].to(out.dtype)
    size = (target.square() * real).sum()
    return ((out - target).square() * real).sum() / size.clamp_min(torch.finfo(size.dtype).tiny)


def mass_divergence(latent_q: Tensor, mass_BTH: Tensor, real_BT: Tensor) -> Tensor:
    """KL of Bernoulli(m) from Bernoulli(p(l=0)), a mean over valid tokens and heads."""
    odds = window_odds(latent_q)
    mass = mass_BTH.to(odds.dtype).clamp(0.0, 1.0)
    cross = F.binary_cross_entropy_with_logits(odds, mass, reduction="none")
    entropy = -(torch.xlogy(mass, mass) + torch.xlogy(1 - mass, 1 - mass))
    real = real_BT[..., None].to(odds.dtype)
    return ((cross - entropy) * real).sum() / (real.sum() * mass.shape[-1]).clamp_min(1.0)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def base_output(layer: MacchiatoAttention, near: Projected, context: Context) -> Tensor:
    """The base's own attention of a layer, output projection included, (B, T, E)."""
    out_BTHK, _ = layer.full_attention(near, context)
    return layer.o_proj(out_BTHK.flatten(-2))


def sampled_masses(
    layer: MacchiatoAttention, near: Projected, places_S: Tensor, context: Context
) -> tuple[Tensor, Tensor]:
    """The share of the base's attention on exact keys, for some queries without padding.

    Args:
        places_S: Positions of the queries in the row, (S,) int64.

    Returns:
        The base's mass m_t on window, sinks and kept tokens, and the logsumexp of the logits
        there; both (B, S, H), at least fp32.
    """
    q, k = _wide(near.q)[:, places_S], _wide(near.k)
    logits = torch.einsum("bsgrk,btgk->bsgrt", q.unflatten(2, (k.shape[2], -1)), k) * layer.scale
    if layer.softcap is not None:
        logits = layer.softcap * torch.tanh(logits / layer.softcap)
    token_T = torch.arange(k.shape[1], device=k.device)
    gap_ST = places_S[:, None] - token_T
    seen_ST = gap_ST >= 0
    if layer.base_window is not None:
        seen_ST = seen_ST & (gap_ST < layer.base_window)
    near_ST = seen_ST & ((gap_ST < layer.window) | (token_T < layer.num_sinks))
    exact = near_ST[None, :, None, None]
    partition, _ = layer.divide(near, context)
    if partition is not None and partition.kept is not None:
        places = Places.of(partition.kept, layer.window, None, None, partition.sinks)
        held_BGST = (places.window | places.kept)[:, :, places_S]
        exact = exact | held_BGST.transpose(1, 2)[:, :, :, None]
    log_near, full = (
        logits.masked_fill(~mask, -torch.inf).logsumexp(-1).flatten(2)
        for mask in (exact, seen_ST[None, :, None, None])
    )
    return torch.exp(log_near - full), log_near


def watch(model: Any, teacher: Any, **inputs: Tensor) -> None:
    """Run the base inside a converted model, and show each converted layer to ``teacher``.

    ``teacher`` is called with the layer, its input (B, T, E), its :class:`Projected` without
    latents and its context. It returns :func:`base_output`. The inputs may be on another device.
    """
    inputs = {name: x.to(model.device) for name, x in inputs.items()}
    with torch.no_grad():
        model.model(**inputs, teacher=teacher, use_cache=False)
