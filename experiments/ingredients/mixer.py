"""Gated Latte-Macchiato with parts left out, and with parts that other recurrent mixers have.

The weights of window and latents stay one normalised distribution, whatever parts are added, and
the state stays of constant size.

Shape suffixes: B batch, T tokens, E hidden size, H query heads, G key/value heads, K key width, D
value width, L latents per head, C channels of the short convolution.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.layers import CausalConv1d, GatedMacchiato, LatteMacchiato, Piece, Projected, RMSNorm
from latte.layers.checks import check_choice
from latte.layers.mixer import MixingLogits
from latte.ops import window_log_mass

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

    def initial_values(self) -> dict[str, Tensor]:
        return {} if self.skip is None else super().initial_values()

    @classmethod
    def options(cls, config: Any) -> dict[str, Any]:
        own = {name: getattr(config, name) for name in OPTIONS}
        own["value_dim"] = config.value_dim or config.width_per_head
        return super().options(config) | own

    def _project(self, piece: Piece) -> Projected:
        latent_q, latent_k, log_decay, inputs = self.latents(piece)
        q, k, v = (project(piece.x) for project in (self.q_proj, self.k_proj, self.v_proj))
        after = inputs.after
        if self.convolved != "none":
            maps = [q, k, v] if self.convolved == "qkv" else [v]
            mixed, last = self._convolved(maps, piece)
            q, k, v = (q, k, v)[: 3 - len(maps)] + tuple(mixed)
            after = after._replace(short_conv=last)
        local, latent_k = self._near(q, k, piece), self._written(latent_k)
        if self.one_softmax:
            window = self._window_log_mass(*local, piece)
            mass = torch.cat([window, log_mass(latent_k, log_decay, piece)], -1)
            latent_q = latent_q + mass.to(latent_q.dtype)
        logits = MixingLogits(latent_q, latent_k, *local)
        v_BTGD = self._heads(v, self.num_key_value_heads)
        return Projected(v_BTGD, logits, log_decay, after=after)

    def _near(self, q: Tensor, k: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
        """The window's queries (B, T, H, K) and keys (B, T, G, K), normed and rotated."""
        q_BTHK = self._heads(q, self.num_heads)
        k_BTGK = self._heads(k, self.num_key_value_heads)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHK, k_BTGK = self.q_norm(q_BTHK), self.k_norm(k_BTGK)
        return self._rotated(q_BTHK, k_BTGK, piece)

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

    def _window_log_mass(self, q_BTHK: Tensor, k_BTGK: Tensor, piece: Piece) -> Tensor:
        """The logsumexp of the window's logits at each token, (B, T, H, 1)."""
        options: Any = {"window": self.window, "softcap": self.softcap}
        options |= {"key_mask": piece.key_mask, "cu_seqlens": piece.cu_seqlens}
        before = piece.state.window
        return window_log_mass(q_BTHK, k_BTGK, initial_state=before, **options)[..., None]

    def _output(self, mixture: Tensor, v: Tensor, x: Tensor) -> Tensor:
        if self.skip is not None:
            heads = self.num_heads // self.num_key_value_heads
            mixture = mixture + self.skip * v.repeat_interleave(heads, -2)
        if self.output_norm is not None:
            mixture = self.output_norm(mixture)
        if self.gate_proj is not None:
            mixture = mixture * F.silu(self._heads(self.gate_proj(x), self.num_heads))
        return mixture


def log_mass(k_BTHL: Tensor, log_decay_BTHL: Tensor | None, piece: Piece) -> Tensor:
    """The log-mass of each latent after each token, (B, T, H, L), at least fp32."""
    k_BTHL = k_BTHL.to(torch.promote_types(k_BTHL.dtype, torch.float32))
    decay = torch.zeros_like(k_BTHL) if log_decay_BTHL is None else log_decay_BTHL
    unreal = ~piece.real[..., None, None]
    k_BTHL, decay = k_BTHL.masked_fill(unreal, NOT_WRITTEN), decay.masked_fill(unreal, 0.0)
    lengths = [k_BTHL.shape[1]] if piece.cu_seqlens is None else piece.cu_seqlens.diff().tolist()
    found = []
    for k, g in zip(k_BTHL.split(lengths, 1), decay.split(lengths, 1), strict=True):
        total = g.cumsum(1)
        found.append(total + (k - total).logcumsumexp(1))
        if piece.state.latent is not None:
            found[-1] = torch.logaddexp(found[-1], piece.state.latent.log_mass[:, None] + total)
    return torch.cat(found, 1)


# The options beside those of GatedMacchiato, by their names in a configuration.
OPTIONS = (
    *("output_gate", "value_skip", "short_conv", "output_norm"),
    *("written_latents", "write_noise", "qk_norm", "one_softmax"),
)
