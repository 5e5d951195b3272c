"""Latte-Macchiato: latent attention with a sliding window inside (paper, eq. 15-19).

A converted model's layers are Latte-Macchiato too, with the projections
of their base (:mod:`latte.conversion.attention`). Shape suffixes: B batch, T tokens, N states (B,
or packed sequences), E hidden size, H query heads, G key/value heads, K key width, D value width, L
latents per head, n sinks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from latte.layers.checks import check_positive
from latte.layers.latent_fields import KEPT_BLOCK, check_kept
from latte.layers.latents import HALF_LIFE_RANGE, LatentLogits
from latte.layers.mixer import EMPTY, Context, Mixer, MixerState, Projected
from latte.layers.native import BEGUN
from latte.layers.parts import Rotary, sink_edge
from latte.layers.recurrent import DECAY_RANGE
from latte.layers.step import StepState
from latte.layers.weights import MixingLogits, remembered
from latte.ops import (
    Partition,
    Sinks,
    WindowState,
    macchiato_attention,
    window_log_mass,
)
from latte.ops.kept import Kept


class LatteMacchiato(Mixer):
    """``y_t = p(0|t) SWA_t + sum_{l>=1} p(l|t) mu_t[l]``: one distribution over the past.

    The window's q and k have their own projections, from x. They are rotated, and their logits are
    scaled by 1/sqrt(K). Both branches share the values and the output projection. The latent
    logits come from ``latent_input``.

    Args:
        num_latents: Total number of latents over all heads, without the window.
        window: Number of keys a query sees, its own included; ``|s - t| <= window // 2`` if not
            causal.
        window_probability: Initial value of p(l=0), set by a bias per head on the window's query
            logit. None adds no bias; p(l=0) then starts near 1 / (L + 1).
        rope_theta: Base of the rotary encoding; None uses no positions.
        softcap: Cap of the local logits, which become ``softcap * tanh(logit / softcap)``.
        forgetting: Kind of forgetting, as for :class:`latte.layers.LatteAttention`. The window
            does not forget.
        num_sinks: Number of a sequence's first tokens that stay visible to the window (arXiv
            2309.17453). Queries see them no further away than the window's edge: their rotation
            towards them is that of position ``min(t, W + n - 1)``.
        delay_latents: Whether the latents read a token only when it has left the window. Then the
            two branches share no token.
        joint_softmax: Whether the window's keys and the latents share one softmax (beyond the
            paper): the logsumexp of the window's logits is added to the logit of p(l=0).
        kept_tokens: Number of tokens of each key/value head that stay visible after they have left
            the window: those with the largest scores (:class:`latte.layers.KeptScores`). The
            latents read the others. It needs ``delay_latents`` and ``joint_softmax``.
        kept_block: Number of tokens after which it is decided anew which tokens are kept. Between
            two decisions the window has up to ``kept_block - 1`` more keys.
    """

    window: int
    carries: ClassVar[tuple[str, ...]] = ("latent", "window")
    stepped: ClassVar[tuple[str, ...]] = ("latents",)
    uses: ClassVar[tuple[str, ...]] = (
        *("num_latents", "latent_input", "forgetting"),
        *("sliding_window", "rope_theta", "window_probability"),
        *("num_sinks", "delay_latents", "joint_softmax", "kept_tokens"),
    )

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_latents: int,
        *,
        window: int = 128,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        latent_input: str = "none",
        window_probability: float | None = None,
        conv_kernel_size: int = 3,
        rglru_decay_range: Sequence[float] = DECAY_RANGE,
        rope_theta: float | None = 10000.0,
        softcap: float | None = None,
        rms_norm_eps: float = 1e-6,
        forgetting: str = "none",
        half_life_range: Sequence[float] = HALF_LIFE_RANGE,
        num_sinks: int = 0,
        delay_latents: bool = False,
        joint_softmax: bool = False,
        kept_tokens: int = 0,
        kept_block: int = KEPT_BLOCK,
        causal: bool = True,
    ) -> None:
        super().__init__(hidden_size, num_heads, num_key_value_heads, head_dim, causal)
        check_positive("LatteMacchiato", window=window)
        self._add_local(window, rope_theta, softcap)
        self._divide_past(num_sinks, delay_latents, joint_softmax, kept_tokens, kept_block)
        self.latents: Any = LatentLogits(
            hidden_size,
            num_heads,
            num_latents,
            latent_input,
            window_logit=True,
            window_probability=window_probability,
            conv_kernel_size=conv_kernel_size,
            rglru_decay_range=rglru_decay_range,
            rms_norm_eps=rms_norm_eps,
            forgetting=forgetting,
            half_life_range=half_life_range,
            kept_groups=self.num_key_value_heads if kept_tokens else 0,
            causal=causal,
        )

    def _divide_past(
        self,
        num_sinks: int,
        delay_latents: bool,
        joint_softmax: bool,
        kept_tokens: int = 0,
        kept_block: int = KEPT_BLOCK,
    ) -> None:
        """Set how window, sinks, kept tokens and latents divide the past among themselves."""
        beyond = num_sinks > 0 or delay_latents or joint_softmax or kept_tokens > 0
        if beyond and not self.causal:
            raise ValueError(
                "LatteMacchiato: num_sinks, delay_latents, joint_softmax and kept_tokens need"
                " causal=True, got causal=False"
            )
        check_kept(kept_tokens, delay_latents, joint_softmax)
        self.num_sinks, self.delay_latents = num_sinks, delay_latents
        self.joint_softmax = joint_softmax
        self.kept_tokens, self.kept_block = kept_tokens, kept_block
        if kept_tokens:
            self.carries = tuple("kept" if x == "window" else x for x in type(self).carries)  # type: ignore[misc]
        self.partition = Partition(None, delay_latents, joint_softmax) if beyond else None
        self.sink_edge = sink_edge(self.window, num_sinks)

    @property
    def splits(self) -> bool:
        """Whether a sequence can be divided among processes, which pass no sinks on."""
        return not (self.num_sinks or self.delay_latents)

    def kept(self, projected: Projected) -> Kept | None:
        """Which of these tokens stay visible; None if no more are kept."""
        scores = projected.scores
        return None if scores is None else Kept(scores, self.kept_tokens, self.kept_block)

    @classmethod
    def options(cls, config: Any) -> dict[str, Any]:
        names = "window_probability", "num_sinks", "delay_latents", "joint_softmax", "kept_tokens"
        own = {name: getattr(config, name) for name in (*names, "kept_block")}
        own["window"] = config.sliding_window
        local = cls.local_options(config)
        return super().options(config) | LatentLogits.options(config) | own | local

    def mixing_flops(self, length: int) -> float:
        """2 * 2 * L * D per head, plus the window's."""
        latents = 4.0 * self.latents.k_proj.out_features * self.head_dim
        return latents + self._local_flops(length)

    def _project(self, x_BTE: Tensor, state: MixerState, context: Context) -> Projected:
        return self.with_logits(x_BTE, self.near(x_BTE, state, context), context)

    def with_logits(self, x_BTE: Tensor, near: Projected, context: Context) -> Projected:
        """The same with the latents' logits and log-decay."""
        q, k, log_decay, state = self.latents(x_BTE, near.state, context)
        own = {"log_decay": log_decay, "state": state, "scores": self.scores(x_BTE)}
        return near._replace(latent_q=q, latent_k=k, **own)

    def scores(self, x_BTE: Tensor) -> Tensor | None:
        """The scores of the tokens, (B, T, G), if some of them are kept."""
        return self.latents.kept_scores(x_BTE) if self.kept_tokens else None

    # --- mixing ---------------------------------------------------------------------------------

    def _attend(
        self, x_BTE: Tensor, projected: Projected, context: Context
    ) -> tuple[Tensor, MixerState | None]:
        """Both branches, (B, T, H, D), and the state after the tokens if it is wanted."""
        sinks, kept, partition = self.sinks(projected, context), self.kept(projected), None
        if sinks is not None or kept is not None:
            partition = Partition(sinks, self.delay_latents, self.joint_softmax, kept)
        out, after = context.across(macchiato_attention)(
            projected.latent_q,
            projected.latent_k,
            projected.q,
            projected.k,
            projected.v,
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
            causal=self.causal,
            key_mask=context.key_mask,
            cu_seqlens=context.cu_seqlens,
            initial_state=projected.state,
            output_final_state=context.output_final_state,
            log_decay=projected.log_decay,
            partition=partition or self.partition,
        )
        return out, after if sinks is None else self._with_sinks(after, sinks)

    def window_branch(self, near: Projected, context: Context) -> tuple[Tensor, MixerState | None]:
        """The exact keys alone, (B, T, H, D): window, sinks and kept tokens; and the state."""
        sinks, kept, partition = self.sinks(near, context), self.kept(near), None
        if sinks is not None or kept is not None:
            partition = Partition(sinks, kept=kept)
        out, after = self._softmax(self.window, near, context, partition)
        return out, self._with_sinks(after, sinks)

    def sinks(self, projected: Projected, context: Context) -> Sinks | None:
        """The sinks of these tokens' sequences, as queries see them; None without sinks."""
        if not self.num_sinks:
            return None
        first = first_tokens(projected, self.num_sinks, context)
        return Sinks(projected.sink_q, *first, context.position)  # type: ignore[arg-type]

    def _with_sinks(self, after: MixerState | None, sinks: Sinks | None) -> MixerState | None:
        """The state with the sinks, for the tokens that follow."""
        if after is None or sinks is None:
            return after
        return after._replace(sinks=WindowState(sinks.keys, sinks.values, sinks.mask))

    def _step(self, x_BE: Tensor, state: StepState, rotary: Rotary | None) -> Tensor:
        local, rotary = self._local_step(x_BE, state, rotary)
        parts: Any = self._modules
        latents, scale = parts["latents"].step(x_BE, state), self.head_dim**-0.5
        score = parts["latents"].kept_scores.step(x_BE) if self.kept_tokens else None
        return state.attend(local, scale, self.softcap, rotary, latents, self.joint_softmax, score)

    def _begun_step(
        self, begun: tuple[Tensor, ...], state: StepState, rotary: Rotary | None
    ) -> Tensor:
        """As :meth:`_step`, after :func:`latte.ops.decoding.layer_begin`."""
        q, k, v, latent_q, latent_k, score = begun
        latents: Any = self._modules["latents"]
        logits, scale = (latent_q, latent_k, latents.log_decay(len(q))), self.head_dim**-0.5
        rotary, own = self._table(q, state, rotary), score if self.kept_tokens else None
        given = scale, self.softcap, rotary, logits, self.joint_softmax, own
        return state.attend((q, k, v), *given)

    # --- for inspection -------------------------------------------------------------------------

    def _weights(self, projected: Projected, context: Context) -> Tensor:
        if self.partition is None:
            return super()._weights(projected, context)
        given = projected._replace(v=identity_values(projected), state=EMPTY)
        alone = context._replace(output_final_state=False)
        out, _ = LatteMacchiato._attend(self, projected.v, given, alone)
        return out.transpose(1, 2)

    def window_weights(self, x_BTE: Tensor, first: int, context: Context) -> Tensor:
        """The window's weights of the first tokens among themselves, (B, H, first, first)."""
        near = self.near(x_BTE, EMPTY, context)
        sink_q = None if near.sink_q is None else near.sink_q[:, :first]
        near = near._replace(q=near.q[:, :first], k=near.k[:, :first], sink_q=sink_q)
        near = near._replace(v=identity_values(near))
        branch = self.window_branch(near, context._replace(key_mask=None))
        return branch[0].transpose(1, 2)

    def _logits(self, projected: Projected, context: Context) -> MixingLogits:
        """The logits of tokens without a past. That of the window has its logsumexp, if joint."""
        decay = projected.log_decay
        if decay is not None and self.delay_latents:
            # A source decays from the token at which the latents read it.
            T, W = decay.shape[1], self.window
            decay = F.pad(decay[:, W:], (0, 0, 0, 0, 0, W))[:, :T]
        logits = remembered(projected, decay)
        return logits._replace(latent_q=self.mixture(projected, context))

    def mixture(self, projected: Projected, context: Context) -> Tensor:
        """The logits (B, T, H, L+1) of p(l|t), at least fp32 with a joint softmax."""
        if not self.joint_softmax:
            return projected.latent_q
        return with_mass(projected.latent_q, self.window_mass(projected, context))

    def window_mass(self, projected: Projected, context: Context) -> Tensor:
        """The logsumexp of the logits of all exact keys: window, sinks, kept tokens; (B, T, H)."""
        sinks, kept = self.sinks(projected, context), self.kept(projected)
        return context.across(window_log_mass)(
            projected.q,
            projected.k,
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
            key_mask=context.key_mask,
            cu_seqlens=context.cu_seqlens,
            initial_state=projected.state.window if kept is None else None,
            partition=Partition(sinks, kept=kept),
        )


BEGUN[LatteMacchiato] = lambda mixer: mixer._modules["latents"]


def identity_values(near: Projected) -> Tensor:
    """Values (B, T, G, T) for which the output of attention is its weights.

    So soft caps, grouped heads, sinks and norms are exactly those of the model.
    """
    B, T, G = near.k.shape[:3]
    return torch.eye(T, dtype=near.v.dtype, device=near.v.device)[None, :, None].expand(
        B, -1, G, -1
    )


def with_mass(latent_q: Tensor, mass_BTH: Tensor) -> Tensor:
    """Mixture logits (B, T, H, L+1) plus the window's logsumexp in column 0, in the wider dtype."""
    return F.pad(mass_BTH[..., None], (0, latent_q.shape[-1] - 1)) + latent_q


def first_tokens(projected: Projected, count: int, context: Context) -> WindowState:
    """The first ``count`` tokens of every sequence, (N, n, ...), to be its sinks.

    They are those for these tokens and for the state after them. A query does not see a sink that
    comes later than the query.
    """
    k, v, n, earlier = projected.k, projected.v, count, projected.state.sinks
    B, T = k.shape[:2]
    real = context.real(k)
    if context.cu_seqlens is not None:
        start_N1 = context.cu_seqlens[:-1, None].long()
        slots_Nn = start_N1 + torch.arange(n, device=k.device)
        mask = slots_Nn < context.cu_seqlens[1:, None]
        index = slots_Nn.clamp_max(max(T - 1, 0))
        return WindowState(k[0, index], v[0, index], mask & real[0, index])
    # Without a mask all tokens are real, so only the first can be sinks.
    first = slice(None if context.key_mask is not None else n)
    parts = [(k[:, first], v[:, first], real[:, first])]
    if earlier is not None:
        parts.insert(0, tuple(earlier))  # type: ignore[arg-type]
    keys, values, mask = (torch.cat(xs, 1) for xs in zip(*parts, strict=True))
    short = n - mask.shape[1]
    if short > 0:
        keys, values = (F.pad(x, (0, 0, 0, 0, 0, short)) for x in (keys, values))
        mask = F.pad(mask, (0, short))
    # Real tokens first, in their order: a stable sort by "is padding".
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, :n]
    rows = torch.arange(B, device=order.device)[:, None]
    return WindowState(keys[rows, order], values[rows, order], mask[rows, order])
