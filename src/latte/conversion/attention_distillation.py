"""Attention transfer: each layer learns its base's own attention, given the base's inputs.

A layer can learn more than the output, because its weights are probabilities. Full attention is
itself a mixture of the window and the rest:

    y_t = m_t SWA_t + (1 - m_t) REST_t,
    m_t = sum_{s in window} a_ts = exp(LSE_window - LSE_full),

So p(l=0|t) should be m_t, and the latents should give REST_t. A forward pass with a
:class:`Teacher` runs the base (its full attention, of quadratic cost) and compares every layer with
it. This needs no second model, and no gradient through more than one layer's attention.

Shape suffixes: B batch, T tokens, E hidden size, S sources, C queries of a chunk, H query
heads, G key/value heads, R = H / G, K head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.conversion.attention import MacchiatoAttention
from latte.layers.latents import window_odds
from latte.layers.mixer import Context, Projected
from latte.layers.parts import token_positions
from latte.layers.rollback import map_tensors
from latte.ops.reference_kept import Places

CHUNK_ELEMENTS = 2**25  # number of attention weights in memory at a time, per layer
SAMPLE_EVERY = 4  # the mass of every fourth query is computed


class Teacher:
    """Runs the base's attention in every layer, and collects the errors of the mixture.

    Give it to a forward pass as ``teacher=``, then call :meth:`loss`. A teacher is for one pass.
    """

    def __init__(self) -> None:
        self.output: list[Tensor] = []
        self.mass: list[Tensor] = []

    def __call__(
        self, layer: MacchiatoAttention, x_BTE: Tensor, near: Projected, context: Context
    ) -> Tensor:
        """The base's output of a layer (B, T, E); records the layer's two errors."""
        with torch.no_grad():
            target_BTHK, mass_BTH = base_attention(layer, near, context)
            target_BTE = layer.o_proj(target_BTHK.to(near.v.dtype).flatten(-2))
        fixed = map_tensors(Tensor.detach, near)
        projected = layer.with_logits(x_BTE.detach(), fixed, context)
        out_BTHK, _ = layer.combine(projected, context)
        out_BTE, real = layer.o_proj(out_BTHK.flatten(-2)), context.real(x_BTE)
        output = relative_error(out_BTE, target_BTE, real)
        mass = mass_divergence(layer.mixture(projected, context), mass_BTH, real)
        # If more are recorded already, gradient checkpointing computes this layer again.
        if layer.converted_before == len(self.output):
            self.output.append(output)
            self.mass.append(mass)
        return target_BTE

    def errors(self) -> tuple[Tensor, Tensor]:
        """Means over the layers: the output's relative squared error, the mass's divergence."""
        return torch.stack(self.output).mean(), torch.stack(self.mass).mean()

    def loss(self, mass_weight: float = 1.0) -> Tensor:
        """``output error + mass_weight * KL(m || p(l=0))``, a mean over layers."""
        output, mass = self.errors()
        return output + mass_weight * mass


def relative_error(out_BTE: Tensor, target_BTE: Tensor, real_BT: Tensor) -> Tensor:
    """``sum |out - target|^2 / sum |target|^2`` over real tokens, at least fp32."""
    out, target = _wide(out_BTE), _wide(target_BTE)
    real = real_BT[..., None].to(out.dtype)
    size = (target.square() * real).sum()
    return ((out - target).square() * real).sum() / size.clamp_min(torch.finfo(size.dtype).tiny)


def mass_divergence(latent_q: Tensor, mass_BTH: Tensor, real_BT: Tensor) -> Tensor:
    """KL of Bernoulli(m) from Bernoulli(p(l=0)), a mean over real tokens and heads."""
    odds = window_odds(latent_q)
    mass = mass_BTH.to(odds.dtype).clamp(0.0, 1.0)
    cross = F.binary_cross_entropy_with_logits(odds, mass, reduction="none")
    entropy = -(torch.xlogy(mass, mass) + torch.xlogy(1 - mass, 1 - mass))
    real = real_BT[..., None].to(odds.dtype)
    return ((cross - entropy) * real).sum() / (real.sum() * mass.shape[-1]).clamp_min(1.0)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def base_attention(
    layer: MacchiatoAttention, near: Projected, context: Context
) -> tuple[Tensor, Tensor]:
    """The base's own attention, and the mass of it that the converted layer's window sees.

    Returns:
        Output (B, T, H, K) and m_t (B, T, H), both at least fp32.
    """
    q, k, v = (_wide(x) for x in (near.q, near.k, near.v))
    if context.cu_seqlens is None:
        return _attention(layer, q, k, v, context.key_mask)
    parts = []
    bounds = context.cu_seqlens.tolist()
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        own = slice(start, stop)
        mask = None if context.key_mask is None else context.key_mask[:, own]
        parts.append(_attention(layer, q[:, own], k[:, own], v[:, own], mask))
    outs, masses = zip(*parts, strict=True)
    return torch.cat(outs, 1), torch.cat(masses, 1)


def _attention(
    layer: MacchiatoAttention, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    B, T, H, _ = q.shape
    q_BTGRK = q.unflatten(2, (k.shape[2], -1))
    place = torch.arange(T, device=q.device)
    sinks = None
    if layer.num_sinks:
        sinks = token_positions(q[..., 0], key_mask).expand(B, T) < layer.num_sinks
    rows = max(1, CHUNK_ELEMENTS // max(1, B * H * T))
    outs, masses = [], []
    for start in range(0, T, rows):
        stop = min(start + rows, T)
        logits = torch.einsum("btgrk,bsgk->bgrts", q_BTGRK[:, start:stop], k[:, :stop])
        logits = logits * layer.scale
        if layer.softcap is not None:
            logits = layer.softcap * torch.tanh(logits / layer.softcap)
        gap = place[start:stop, None] - place[None, :stop]
        seen = gap >= 0
        if layer.base_window is not None:
            seen = seen & (gap < layer.base_window)
        seen = seen[None] if key_mask is None else seen & key_mask[:, None, :stop]
        seen = seen[:, None, None]  # (B or 1, 1, 1, C, S)
        weights = logits.masked_fill(~seen, torch.finfo(logits.dtype).min / 2).softmax(-1)
        weights = weights * (seen & seen.any(-1, keepdim=True))
        outs.append(torch.einsum("bgrts,bsgk->btgrk", weights, v[:, :stop]).flatten(2, 3))
        near = (gap < layer.window)[None]
        if sinks is not None:
            near = near | sinks[:, None, :stop]
        mass = (weights * near[:, None, None]).sum(-1)
        masses.append(mass.flatten(1, 2).transpose(1, 2))
    return torch.cat(outs, 1), torch.cat(masses, 1)


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
    if (kept := layer.kept(near)) is not None:
        places = Places.of(kept, layer.window, None, None, layer.sinks(near, context))
        held_BGST = (places.window | places.kept)[:, :, places_S]
        exact = exact | held_BGST.transpose(1, 2)[:, :, :, None]
    log_near, full = (
        logits.masked_fill(~mask, -torch.inf).logsumexp(-1).flatten(2)
        for mask in (exact, seen_ST[None, :, None, None])
    )
    return torch.exp(log_near - full), log_near


def watch(model: Any, teacher: Any, **inputs: Tensor) -> None:
    """Run the base inside a converted model, and show each converted layer to ``teacher``.

    ``teacher`` is called as a :class:`Teacher` is, and returns :func:`base_output`. The inputs may
    be on another device.
    """
    inputs = {name: x.to(model.device) for name, x in inputs.items()}
    with torch.no_grad():
        model.model(**inputs, teacher=teacher, use_cache=False)


def run_teacher(model: Any, **inputs: Any) -> Teacher:
    """One forward pass of a converted model with its base as the teacher."""
    teacher = Teacher()
    model(**inputs, teacher=teacher, use_cache=False, logits_to_keep=1)
    return teacher
