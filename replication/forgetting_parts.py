"""Latents that forget: variants of their gates and queries, to find what gives the gain.

A plug-in for recipes, which adds presets at the sizes of all others:

    latte compare recipes/ablation/forgetting.yaml plugins=[replication/forgetting_parts.py] \\
        comparison.presets=[x-gated-f++,asking-f++] comparison.baseline=x-gated-f++

=====================  ============================================================================
``x-gated-f++``        ``latte-conv-swa-f++`` with gates read from x, not from the convolution of x
``x-gated-r-f++``      ``latte-r-swa-f++`` with gates read from x, not from the RG-LRU's output
``weight-decay-f++``   ``latte-conv-swa-f++`` with weight decay on the gates' weights too
``asking-f++``         ``latte-conv-swa-f++`` that asks by content too: to a latent's query logit is
                       added the product of the window's query with the latent's mean key
=====================  ============================================================================

These models train and are scored, and do not generate: a step of decoding is the library's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from latte.layers import LatteMacchiato, Piece, Projected
from latte.models.registry import register_mixer, register_preset
from latte.ops import latte_attention


class GatesFromX(LatteMacchiato):
    """Latents that forget by ``-softplus(b + w x)``, whatever their logits are made from."""

    def _project(self, piece: Piece) -> Projected:
        projected = super()._project(piece)
        gate_BTL = self.latents.decay_proj(piece.x)
        log_decay = self.latents._log_decay(gate_BTL, gate_BTL.shape[:-1])
        return projected._replace(log_decay=log_decay)


class WeightDecayOnGates(LatteMacchiato):
    """The same layer; the optimizer spares what ``undecayed`` names."""

    def __init__(self, hidden_size: int, num_heads: int, *args: Any, **options: Any) -> None:
        super().__init__(hidden_size, num_heads, *args, **options)
        self.latents.undecayed = ()


class AskingByContent(LatteMacchiato):
    """q_t[l] and, beside it, q_t . (the mean of the keys that latent l has seen) / sqrt(K)."""

    def _project(self, piece: Piece) -> Projected:
        projected = super()._project(piece)
        logits = projected.logits
        assert logits.latent_k is not None and logits.latent_q is not None
        q_BTHK = self._heads(self.q_proj(piece.x), self.num_heads)
        k_BTGK = self._heads(self.k_proj(piece.x), self.num_key_value_heads)
        mean_BTHLK = self._mean_keys(logits.latent_k, k_BTGK, projected.log_decay, piece)
        asked_BTHL = torch.einsum("bthk,bthlk->bthl", q_BTHK, mean_BTHLK) * self.head_dim**-0.5
        odds, asking = logits.latent_q.split([1, asked_BTHL.shape[-1]], -1)
        latent_q = torch.cat([odds, asking + asked_BTHL], -1)
        return projected._replace(logits=logits._replace(latent_q=latent_q))

    def _mean_keys(
        self, k_BTHL: Tensor, keys_BTGK: Tensor, log_decay_BTHL: Tensor | None, piece: Piece
    ) -> Tensor:
        """Each latent as a head that has it alone: its mean is then the output, (B, T, H, L, K)."""
        assert log_decay_BTHL is not None
        k, log_decay = (x.flatten(2)[..., None] for x in (k_BTHL, log_decay_BTHL))
        packing: Any = {"key_mask": piece.key_mask, "cu_seqlens": piece.cu_seqlens}
        q = torch.zeros_like(k)
        mean_BTXK, _ = latte_attention(q, k, keys_BTGK, log_decay=log_decay, **packing)
        return mean_BTXK.unflatten(2, k_BTHL.shape[2:])


for _name, _mixer, _input in [
    ("x-gated-f++", GatesFromX, "conv"),
    ("x-gated-r-f++", GatesFromX, "rglru"),
    ("weight-decay-f++", WeightDecayOnGates, "conv"),
    ("asking-f++", AskingByContent, "conv"),
]:
    _kind = _name.removesuffix("-f++")
    register_mixer(_kind, _mixer)
    register_preset(_name, mixer=_kind, latent_input=_input, position="rope", forgetting="gated")
