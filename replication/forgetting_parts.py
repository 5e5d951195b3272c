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
``prior-f++``          ``latte-conv-swa-f++`` whose latents have a source of their own before the
                       first token: of learnt mass, and of a learnt value for each head
=====================  ============================================================================

These models train and are scored, and do not generate: a step of decoding is the library's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from latte.layers import LatteMacchiato, MixerState, Piece, Projected
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


class WithPrior(LatteMacchiato):
    """p(s|l,t) has one source more, before the first token, which is forgotten as the others are.

    The rest of its distribution is the library's op on ``p(l|t) f``, f the tokens' share of a
    latent's mass.
    """

    def __init__(self, hidden_size: int, num_heads: int, num_latents: int, **options: Any) -> None:
        super().__init__(hidden_size, num_heads, num_latents, **options)
        self.prior_logit = nn.Parameter(torch.empty(num_heads, num_latents // num_heads))
        self.prior_value = nn.Parameter(torch.empty(num_heads, self.head_dim))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        """A token's mass, and a value of nothing."""
        parameters = {"prior_logit": self.prior_logit, "prior_value": self.prior_value}
        return {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}

    def _attend(self, projected: Projected, piece: Piece) -> tuple[Tensor, MixerState]:
        latent_q = projected.logits.latent_q
        assert latent_q is not None
        share_BTHL = F.pad(self._log_share(projected, piece), (1, 0))  # the window's is whole
        tokens = (latent_q.float().log_softmax(-1) + share_BTHL).exp().sum(-1, keepdim=True)
        latent_q = (latent_q.float() + share_BTHL).to(latent_q.dtype)
        logits = projected.logits._replace(latent_q=latent_q)
        out, after = super()._attend(projected._replace(logits=logits), piece)
        return (out * tokens + (1 - tokens) * self.prior_value).to(out.dtype), after

    def _log_share(self, projected: Projected, piece: Piece) -> Tensor:
        """The log of what of a latent's mass is tokens', (B, T, H, L)."""
        k_BTHL, log_decay = projected.logits.latent_k, projected.log_decay
        assert k_BTHL is not None and log_decay is not None
        k_BTHL = k_BTHL.float()
        if piece.key_mask is not None:
            hidden = ~piece.key_mask[..., None, None]
            k_BTHL = k_BTHL.masked_fill(hidden, -1e4)
            log_decay = log_decay.masked_fill(hidden, 0.0)
        lengths = [k_BTHL.shape[1]]
        if piece.cu_seqlens is not None:
            lengths = [n for n in piece.cu_seqlens.diff().tolist() if n]
        pairs = zip(k_BTHL.split(lengths, 1), log_decay.split(lengths, 1), strict=True)
        mass = torch.cat([(k - g.cumsum(1)).logcumsumexp(1) for k, g in pairs], 1)
        return F.logsigmoid(mass - self.prior_logit)


for _name, _mixer, _input in [
    ("x-gated-f++", GatesFromX, "conv"),
    ("x-gated-r-f++", GatesFromX, "rglru"),
    ("weight-decay-f++", WeightDecayOnGates, "conv"),
    ("asking-f++", AskingByContent, "conv"),
    ("prior-f++", WithPrior, "conv"),
]:
    _kind = _name.removesuffix("-f++")
    register_mixer(_kind, _mixer)
    register_preset(_name, mixer=_kind, latent_input=_input, position="rope", forgetting="gated")
