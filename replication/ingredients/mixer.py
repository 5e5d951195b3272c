"""Latte-Macchiato with parts that other recurrent mixers have, each of which can be left out.

The weights of window and latents stay one normalised distribution, whatever parts are added, and
the state stays of constant size.

Shape suffixes: B batch, T tokens, E hidden size, H query heads, G key/value heads, K key width, D
value width, L latents per head, C channels of the short convolution, S its taps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from latte.layers import CausalConv1d, LatteMacchiato, MixerState, Piece, Projected, RMSNorm
from latte.layers.checks import check_choice, check_positive
from latte.layers.mixer import MixingLogits
from latte.ops import window_log_mass

SHORT_CONVS = ("none", "v", "qkv")
# The key logit of a token at a latent that it does not write. Beside any other logit its weight is
# exactly 0, in fp32 too. A latent that nothing has written yet averages over all tokens.
NOT_WRITTEN = -1e4


class TrialMixer(LatteMacchiato):
    """``y_t = gate_t * norm(sum_s p(s|t) v_s + skip * v_t)``, p(s|t) of :class:`LatteMacchiato`.

    Args:
        hidden_size, num_heads, num_latents: Arguments of :class:`LatteMacchiato`.
        value_dim: Width of a head's values; the width of its keys if None.
        output_gate: Whether the output is multiplied by ``silu(W x_t)``.
        value_skip: Whether a token's own value is added to the mixture, with a learnt factor per
            channel, which begins at 1.
        short_conv: Which of the window's q and k and the common v go through a causal convolution
            per channel and silu: ``"none"``, ``"v"`` or ``"qkv"``.
        short_conv_size: Number of taps of this convolution.
        written_latents: Number of latents of each head that a token writes, those with its largest
            key logits. None: all of them.
        write_noise: Scale of the Gumbel noise that is added to the key logits in training, for the
            choice of the written latents alone.
        qk_norm: Whether the window's q and k are normed, per head and before the rotation.
        output_norm: Whether the mixture is normed, per head and before the gate.
        one_softmax: Whether one softmax is taken over the window's keys and over all pairs of a
            latent and a token: ``p(s|t)`` is in proportion to ``sum_l exp(q_t[l] + k_s[l])``, the
            decay aside, plus ``exp(q_t[0] + local logit)`` in the window. What latents hold then
            decides how much they are read.
        options: Other arguments of :class:`LatteMacchiato`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_latents: int,
        *,
        value_dim: int | None = None,
        output_gate: bool = False,
        value_skip: bool = False,
        short_conv: str = "none",
        short_conv_size: int = 4,
        written_latents: int | None = None,
        write_noise: float = 0.0,
        qk_norm: bool = False,
        output_norm: bool = False,
        one_softmax: bool = False,
        rms_norm_eps: float = 1e-6,
        **options: Any,
    ) -> None:
        super().__init__(hidden_size, num_heads, num_latents, rms_norm_eps=rms_norm_eps, **options)
        name = type(self).__name__
        check_choice(name, "short_conv", short_conv, SHORT_CONVS)
        H, G, K = self.num_heads, self.num_key_value_heads, self.head_dim
        D = K if value_dim is None else value_dim
        check_positive(name, value_dim=D, short_conv_size=short_conv_size)
        latents = num_latents // num_heads
        if written_latents is not None and not 1 <= written_latents <= latents:
            raise ValueError(
                f"{name}: written_latents must be from 1 to {latents}, the latents of a head,"
                f" got {written_latents}"
            )
        self.value_dim, self.written_latents, self.write_noise = D, written_latents, write_noise
        self.one_softmax = one_softmax
        self.v_proj = nn.Linear(hidden_size, G * D, bias=False)
        self.o_proj = nn.Linear(H * D, hidden_size, bias=False)
        self.convolved = {"none": 0, "v": G * D, "qkv": H * K + G * K + G * D}[short_conv]
        if self.convolved:
            self.short_conv = CausalConv1d(self.convolved, short_conv_size)
        self.gate_proj = nn.Linear(hidden_size, H * D, bias=False) if output_gate else None
        self.skip = nn.Parameter(torch.empty(H, D)) if value_skip else None
        self.q_norm = RMSNorm(K, eps=rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(K, eps=rms_norm_eps) if qk_norm else None
        self.output_norm = RMSNorm(D, eps=rms_norm_eps) if output_norm else None
        self.undecayed = ("skip",)
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        """The skip's factors begin at 1, as in Mamba-2."""
        return {} if self.skip is None else {"skip": torch.ones_like(self.skip)}

    @classmethod
    def options(cls, config: Any) -> dict[str, Any]:
        return super().options(config) | {name: getattr(config, name) for name in OPTIONS}

    def mixing_flops(self, length: int) -> float:
        """2 * 2 * L * D per head, and 2 * (K + D) per head and key of the window."""
        seen = min(self.window, (length + 1) / 2)
        latents = 4.0 * self.latents.k_proj.out_features * self.value_dim
        return latents + 2.0 * self.num_heads * (self.head_dim + self.value_dim) * seen

    def _project(self, piece: Piece) -> Projected:
        latent_q, latent_k, log_decay, inputs = self.latents(piece)
        x_BTE = piece.x
        q, k, v = self.q_proj(x_BTE), self.k_proj(x_BTE), self.v_proj(x_BTE)
        after, log = inputs.after, inputs.log
        if self.convolved:
            parts = torch.cat([q, k, v], -1)
            kept, given = parts.tensor_split([parts.shape[-1] - self.convolved], -1)
            mixed, last, logged = self._convolve(given, piece)
            q, k, v = torch.cat([kept, mixed], -1).split([x.shape[-1] for x in (q, k, v)], -1)
            after, log = after._replace(own=last), log._replace(own=logged)
        local, latent_k = self._near(q, k, piece), self._written(latent_k)
        if self.one_softmax:
            window = self._window_log_mass(*local, piece)
            mass = torch.cat([window, log_mass(latent_k, log_decay, piece)], -1)
            latent_q = latent_q + mass.to(latent_q.dtype)
        logits = MixingLogits(latent_q, latent_k, *local)
        v_BTGD = self._heads(v, self.num_key_value_heads)
        return Projected(v_BTGD, logits, log_decay, after=after, log=log)

    def _convolve(
        self, given_BTC: Tensor, piece: Piece
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """silu(conv(given)), its last S-1 inputs (B, S-1, C), and those at each token if wanted."""
        before = piece.state.own
        packed = piece.key_mask, piece.cu_seqlens, before, piece.output_final_state
        mixed, last = self.short_conv(given_BTC, *packed)
        logged = None
        if piece.state.recording:
            B, _, C = given_BTC.shape
            taps = self.short_conv.weight.shape[1]
            start = given_BTC.new_zeros(B, taps - 1, C) if before is None else before
            inputs = torch.cat([start.to(given_BTC.dtype), given_BTC * piece.real[..., None]], 1)
            logged = inputs[:, 1:].unfold(1, taps - 1, 1).transpose(2, 3)
        return F.silu(mixed), last, logged

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

    def _attend(self, projected: Projected, piece: Piece) -> tuple[Tensor, MixerState]:
        out_BTHD, after = super()._attend(projected, piece)
        if self.skip is not None:
            v_BTHD = projected.v.repeat_interleave(self.num_heads // projected.v.shape[2], 2)
            out_BTHD = out_BTHD + self.skip * v_BTHD
        if self.output_norm is not None:
            out_BTHD = self.output_norm(out_BTHD)
        if self.gate_proj is not None:
            out_BTHD = out_BTHD * F.silu(self._heads(self.gate_proj(piece.x), self.num_heads))
        return out_BTHD, after

    def _weights(self, projected: Projected, piece: Piece) -> Tensor:
        """p(s|t), without gradients: the output is more than the weighted sum."""
        return super()._weights(projected, piece).detach()


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


# The options beside those of LatteMacchiato, by their names in a configuration.
OPTIONS = (
    *("value_dim", "output_gate", "value_skip", "short_conv", "short_conv_size"),
    *("written_latents", "write_noise", "qk_norm", "output_norm", "one_softmax"),
)
