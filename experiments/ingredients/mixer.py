"""Gated Latte-Macchiato with parts left out, and with parts that other recurrent mixers have.

The weights of window and latents stay one normalised distribution, whatever parts are added, and
the state stays of constant size.

Shape suffixes: B batch, T tokens, E hidden size, H query heads, G key/value heads, K key width, D
value width, L latents per head, C channels of the short convolution.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.ingredients.memory import KEPT_BY, content_logits, surprise
from latte.layers import (
    CausalConv1d,
    Context,
    GatedMacchiato,
    LatteMacchiato,
    MixerState,
    Projected,
    RMSNorm,
)
from latte.layers.checks import check_choice
from latte.layers.mixer import EMPTY
from latte.layers.weights import window_mass
from latte.ops import LatteState

SHORT_CONVS = ("none", "v", "qkv")
# The key logit of a token at a latent that it does not write. Beside any other logit its weight is
# exactly 0, in fp32 too. A latent that nothing has written yet averages over all tokens.
NOT_WRITTEN = -1e4


class TrialMixer(GatedMacchiato):
    """:class:`GatedMacchiato` whose parts are options.

    Args:
        hidden_size, num_heads, num_latents: Arguments of :class:`LatteMacchiato`.
        output_gate: Whether the output is multiplied by ``silu(W x_t)``.
        value_skip: Whether a token's own value is added to the mixture, with a learnt factor per
            channel, which begins at 1.
        short_conv: Which of the window's q and k and the common v go through a causal convolution
            per channel and silu: ``"none"``, ``"v"`` or ``"qkv"``.
        output_norm: Whether the mixture is normed, per head and before the gate.
        written_latents: Number of latents of each head that a token writes, those with its largest
            key logits. None: all of them.
        write_noise: Scale of the Gumbel noise that is added to the key logits in training, for the
            choice of the written latents alone.
        qk_norm: Whether the window's q and k are normed, per head and before the rotation.
        one_softmax: Whether one softmax is taken over the window's keys and over all pairs of a
            latent and a token: ``p(s|t)`` is in proportion to ``sum_l exp(q_t[l] + k_s[l])``, the
            decay aside, plus ``exp(q_t[0] + local logit)`` in the window. What latents hold then
            decides how much they are read.
        kept_by: How the ``kept_tokens`` are chosen, one of :data:`memory.KEPT_BY`. "none": by the
            library's scores. "surprise" and "write" need whole sequences, one a row or packed, and
            as many key/value heads as query heads.
        content_width: Width of a content key. Above 0, each latent has one, the mean of its
            tokens' keys, and its product with a content query is added to the logit of p(l|t).
            It needs whole sequences, one a row or packed.
        options: Other arguments of :class:`GatedMacchiato`.
    """

    carries = LatteMacchiato.carries  # short_conv too, if there is one

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_latents: int,
        *,
        output_gate: bool = False,
        value_skip: bool = False,
        short_conv: str = "none",
        output_norm: bool = False,
        written_latents: int | None = None,
        write_noise: float = 0.0,
        qk_norm: bool = False,
        one_softmax: bool = False,
        kept_by: str = "none",
        content_width: int = 0,
        rms_norm_eps: float = 1e-6,
        **options: Any,
    ) -> None:
        super().__init__(hidden_size, num_heads, num_latents, rms_norm_eps=rms_norm_eps, **options)
        name = type(self).__name__
        check_choice(name, "short_conv", short_conv, SHORT_CONVS)
        latents = num_latents // num_heads
        if written_latents is not None and not 1 <= written_latents <= latents:
            raise ValueError(
                f"{name}: written_latents must be from 1 to {latents}, the latents of a head,"
                f" got {written_latents}"
            )
        self.written_latents, self.write_noise = written_latents, write_noise
        self.one_softmax, self.convolved = one_softmax, short_conv
        wanted = {
            "gate_proj": output_gate,
            "skip": value_skip,
            "output_norm": output_norm,
            "short_conv": short_conv != "none",
        }
        for part in wanted:
            if not wanted[part]:
                delattr(self, part)
                setattr(self, part, None)
        if short_conv == "v":
            self.short_conv = CausalConv1d(
                self.v_proj.out_features, self.short_conv.weight.shape[1]
            )
        self.q_norm = RMSNorm(self.head_dim, eps=rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, eps=rms_norm_eps) if qk_norm else None
        check_choice(name, "kept_by", kept_by, KEPT_BY)
        self.kept_by, self.content_width = kept_by, content_width
        if kept_by != "none":
            del self.latents.kept_scores
            self.scale = self.head_dim**-0.5
        if kept_by == "map":
            self.score_proj = nn.Linear(hidden_size, self.num_key_value_heads, bias=False)
        if content_width:
            width = 2 * num_heads * content_width
            self.content_proj = nn.Linear(hidden_size, width, bias=False)

    def initial_values(self) -> dict[str, Tensor]:
        return {} if self.skip is None else super().initial_values()

    @classmethod
    def options(cls, config: Any) -> dict[str, Any]:
        own = {name: getattr(config, name) for name in OPTIONS}
        own["value_dim"] = config.value_dim or config.width_per_head
        return super().options(config) | own

    def _project(self, x_BTE: Tensor, state: MixerState, context: Context) -> Projected:
        projected = super()._project(x_BTE, state, context)
        latent_k = self._written(projected.latent_k)
        projected = projected._replace(latent_k=latent_k)
        if self.content_width:
            projected = self._with_content(x_BTE, projected, context)
        if not self.one_softmax:
            return projected
        latents = log_mass(latent_k, projected.log_decay, state.latent, context)
        mass = torch.cat([window_mass(self, projected, context)[..., None], latents], -1)
        return projected._replace(latent_q=projected.latent_q + mass.to(projected.latent_q.dtype))

    def _with_content(self, x_BTE: Tensor, projected: Projected, context: Context) -> Projected:
        """The latents' query logits, with those of their content keys added."""
        _check_whole(projected, context)
        z, _ = self.latents.input(x_BTE, EMPTY, context)
        q, k = self._heads(self.content_proj(z), self.num_heads).chunk(2, -1)
        wide = torch.promote_types(q.dtype, torch.float32)
        q, k, latent_k = q.to(wide), k.to(wide), projected.latent_k.to(wide)
        log_decay = projected.log_decay
        log_decay = torch.zeros_like(latent_k) if log_decay is None else log_decay
        mass = log_mass(latent_k, log_decay, None, context)
        given = q / self.content_width**0.5, k, latent_k, log_decay, mass
        parts = zip(*(x.split(_lengths(x, context), 1) for x in given), strict=True)
        logits = torch.cat([content_logits(*part) for part in parts], 1)
        own = projected.latent_q
        return projected._replace(latent_q=own + F.pad(logits, (1, 0)).to(own.dtype))

    def with_logits(self, x_BTE: Tensor, near: Projected, context: Context) -> Projected:
        """With the scores of :data:`memory.KEPT_BY`."""
        projected = super().with_logits(x_BTE, near, context)
        if self.kept_by in ("surprise", "write"):
            _check_whole(near, context)
            given = projected.latent_k, projected.v, projected.log_decay
            scores = surprise(*given, context.cu_seqlens)
            if self.kept_by == "write":  # the logarithm of the product
                scores = scores.log() + projected.latent_k.detach().float().logsumexp(-1)
            return projected._replace(scores=scores)
        return projected

    def scores(self, x_BTE: Tensor, context: Context) -> Tensor | None:
        shape = (*x_BTE.shape[:2], self.num_key_value_heads)
        if self.kept_by == "map":
            return self.score_proj(x_BTE)
        if self.kept_by == "random":
            return torch.rand(shape, device=x_BTE.device)
        if self.kept_by == "none":
            return super().scores(x_BTE, context)
        return x_BTE.new_zeros(shape)

    def near(self, x_BTE: Tensor, state: MixerState, context: Context) -> Projected:
        """The window's queries and keys, normed and rotated, and the values."""
        q, k, v = (project(x_BTE) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.convolved != "none":
            maps = (q, k, v) if self.convolved == "qkv" else (v,)
            mixed, state = self._convolved(maps, state, context)
            q, k, v = (q, k, v)[: 3 - len(maps)] + tuple(mixed)
        G = self.num_key_value_heads
        q_BTHK, k_BTGK = self._heads(q, self.num_heads), self._heads(k, G)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHK, k_BTGK = self.q_norm(q_BTHK), self.k_norm(k_BTGK)
        near = self._rotated(q_BTHK, k_BTGK, self._heads(v, G), state, context)
        if self.kept_by != "map":
            return near
        # One more dimension of the keys is the score, and of the queries what the scale undoes.
        one = torch.full_like(near.q[..., :1], self.head_dim**0.5)
        k = torch.cat([near.k, self.score_proj(x_BTE)[..., None]], -1)
        return near._replace(q=torch.cat([near.q, one], -1), k=k)

    def _written(self, latent_k_BTHL: Tensor) -> Tensor:
        """The key logits, with NOT_WRITTEN but at a token's largest ones."""
        if self.written_latents is None:
            return latent_k_BTHL
        score_BTHL = latent_k_BTHL.detach()
        if self.training and self.write_noise:
            uniform = torch.rand_like(score_BTHL, dtype=torch.float32).clamp(1e-6, 1 - 1e-6)
            score_BTHL = score_BTHL - self.write_noise * torch.log(-torch.log(uniform))
        chosen = score_BTHL.topk(self.written_latents, -1).indices
        lost = torch.ones_like(latent_k_BTHL, dtype=torch.bool).scatter(-1, chosen, False)
        return latent_k_BTHL.masked_fill(lost, NOT_WRITTEN)

    def _output(self, mixture: Tensor, v: Tensor, x: Tensor) -> Tensor:
        if self.skip is not None:
            heads = self.num_heads // self.num_key_value_heads
            mixture = mixture + self.skip * v.repeat_interleave(heads, -2)
        if self.output_norm is not None:
            mixture = self.output_norm(mixture)
        if self.gate_proj is not None:
            mixture = mixture * F.silu(self._heads(self.gate_proj(x), self.num_heads))
        return mixture


def _check_whole(projected: Projected, context: Context) -> None:
    """Raise ValueError for the part of a sequence, and for masked ones."""
    tokens = projected.state.position, context.position, context.key_mask
    if any(each is not None for each in tokens):
        raise ValueError(
            "TrialMixer: kept_by='surprise' or 'write', and content_width, need whole sequences,"
            " got a state or a mask"
        )


def _lengths(x_BT: Tensor, context: Context) -> list[int]:
    """The lengths of the sequences that lie one after another in each row."""
    bounds = context.cu_seqlens
    return [x_BT.shape[1]] if bounds is None else bounds.diff().tolist()


def log_mass(
    k_BTHL: Tensor, log_decay_BTHL: Tensor | None, earlier: LatteState | None, context: Context
) -> Tensor:
    """The log-mass of each latent after each token, (B, T, H, L), at least fp32."""
    k_BTHL = k_BTHL.to(torch.promote_types(k_BTHL.dtype, torch.float32))
    decay = torch.zeros_like(k_BTHL) if log_decay_BTHL is None else log_decay_BTHL
    unreal = ~context.real(k_BTHL)[..., None, None]
    k_BTHL, decay = k_BTHL.masked_fill(unreal, NOT_WRITTEN), decay.masked_fill(unreal, 0.0)
    lengths, found = _lengths(k_BTHL, context), []
    for k, g in zip(k_BTHL.split(lengths, 1), decay.split(lengths, 1), strict=True):
        total = g.cumsum(1)
        found.append(total + (k - total).logcumsumexp(1))
        if earlier is not None:
            found[-1] = torch.logaddexp(found[-1], earlier.log_mass[:, None] + total)
    return torch.cat(found, 1)


# The options beside those of GatedMacchiato, by their names in a configuration.
OPTIONS = (
    *("output_gate", "value_skip", "short_conv", "output_norm"),
    *("written_latents", "write_noise", "qk_norm", "one_softmax", "kept_by", "content_width"),
)
