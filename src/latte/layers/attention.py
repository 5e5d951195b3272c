"""Latte-Macchiato: latent attention with a sliding window inside (paper, eq. 15-19).

A converted model's layers are Latte-Macchiato too, with the projections of their base
(:mod:`latte.conversion.attention`). Shape suffixes: B batch, T tokens, E hidden size, H query
heads, G key/value heads, D value width, L latents per head.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from torch import Tensor

from latte.layers.checks import check_positive
from latte.layers.latent_fields import KEPT_BLOCK, check_kept
from latte.layers.latents import LatentLogits
from latte.layers.mixer import Context, Mixer, MixerState, Projected
from latte.layers.parts import Rotary, sink_edge
from latte.layers.step import StepState
from latte.ops import Partition, Sinks, macchiato_attention
from latte.ops.kept import Kept, risen
from latte.ops.state import first_tokens
from latte.ops.step import in_dtype


class LatteMacchiato(Mixer):
    """``y_t = p(0|t) SWA_t + sum_{l>=1} p(l|t) mu_t[l]``: one distribution over the past.

    The window's q and k have their own projections, from x. They are rotated, and their logits are
    scaled by 1/sqrt(K). Both branches share the values and the output projection. The latent
    logits come from ``latent_input``.

    Args:
        num_latents: Total number of latents over all heads, without the window.
        window: Number of keys a query sees, its own included; ``|s - t| <= window // 2`` if not
            causal.
        rope_theta: Base of the rotary encoding; None uses no positions.
        softcap: Cap of the local logits, which become ``softcap * tanh(logit / softcap)``.
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
        kept_half_life: Number of tokens after which a token's exp(score) has halved; None: never.
        kept_dtype: "auto", or "mxint8": the state then has 8 bits (:mod:`latte.ops.mxint8`).
        latents: Other arguments of :class:`LatentLogits`, such as ``latent_input``,
            ``window_probability`` and ``forgetting``. The window does not forget.
    """

    window: int
    reads_latents: Any = True  # whether the mixture has latents, or exact keys alone
    begins = True  # one kernel may project a step's token; a class says so itself
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
        rope_theta: float | None = 10000.0,
        softcap: float | None = None,
        num_sinks: int = 0,
        delay_latents: bool = False,
        joint_softmax: bool = False,
        kept_tokens: int = 0,
        kept_block: int = KEPT_BLOCK,
        kept_half_life: float | None = None,
        kept_dtype: str = "auto",
        causal: bool = True,
        **latents: Any,
    ) -> None:
        super().__init__(hidden_size, num_heads, num_key_value_heads, head_dim, causal)
        check_positive("LatteMacchiato", window=window)
        self._add_local(window, rope_theta, softcap)
        kept = kept_tokens, kept_block, kept_dtype, kept_half_life
        self._share_past(num_sinks, delay_latents, joint_softmax, kept)
        groups = self.num_key_value_heads if kept_tokens else 0
        latents |= {"window_logit": True, "kept_groups": groups, "causal": causal}
        self.latents: Any = LatentLogits(hidden_size, num_heads, num_latents, **latents)

    def _share_past(self, sinks: int, delay: bool, joint: bool, kept: tuple[Any, ...]) -> None:
        """Set how window, sinks, kept tokens and latents divide the past among themselves."""
        kept_tokens, self.kept_block, self.kept_dtype, half_life = kept
        # Older scores fall alike, so it is the new ones that rise.
        self.score_rise = math.log(2.0) / half_life if half_life else 0.0
        if (sinks > 0 or delay or joint or kept_tokens > 0) and not self.causal:
            raise ValueError(
                "LatteMacchiato: num_sinks, delay_latents, joint_softmax and kept_tokens need"
                " causal=True, got causal=False"
            )
        check_kept(kept_tokens, delay, joint)
        self.num_sinks, self.delay_latents, self.joint_softmax = sinks, delay, joint
        self.kept_tokens = kept_tokens
        if kept_tokens:
            self.carries = tuple("kept" if x == "window" else x for x in type(self).carries)  # type: ignore[misc]
        self.sink_edge = sink_edge(self.window, sinks)

    @property
    def splits(self) -> bool:
        """Whether a sequence can be divided among processes, which pass no sinks on."""
        return not (self.grows or self.num_sinks or self.delay_latents)

    @classmethod
    def options(cls, config: Any) -> dict[str, Any]:
        names = "window_probability", "num_sinks", "delay_latents", "joint_softmax", "kept_tokens"
        kept = "kept_block", "kept_half_life", "kept_dtype"
        own = {name: getattr(config, name) for name in (*names, *kept)}
        own |= {"window": config.sliding_window, **cls.local_options(config)}
        return super().options(config) | LatentLogits.options(config) | own

    def _project(self, x_BTE: Tensor, state: MixerState, context: Context) -> Projected:
        near = self.near(x_BTE, state, context)
        if not self.reads_latents:
            return near._replace(scores=self.scores(x_BTE, context))
        return self.with_logits(x_BTE, near, context)

    def with_logits(self, x_BTE: Tensor, near: Projected, context: Context) -> Projected:
        """The same with the latents' logits and log-decay."""
        q, k, log_decay, state = self.latents(x_BTE, near.state, context)
        scores = self.scores(x_BTE, context) if self.kept_tokens else None
        own = {"log_decay": log_decay, "state": state, "scores": scores}
        return near._replace(latent_q=q, latent_k=k, **own)

    def scores(self, x_BTE: Tensor, context: Context) -> Tensor | None:
        """The scores of the tokens, (B, T, G), if some of them are kept."""
        if not self.kept_tokens:
            return None
        scores, rise = self.latents.kept_scores(x_BTE), self.score_rise
        return risen(scores, context.positions(x_BTE), rise) if rise else scores

    def _attend(
        self, x_BTE: Tensor, projected: Projected, context: Context
    ) -> tuple[Tensor, MixerState | None]:
        """The mixture of both branches, (B, T, H, D), and the state after the tokens."""
        if projected.latent_q is None:
            return self.window_branch(projected, context)
        partition, state = self.divide(projected, context)
        given = projected.latent_q, projected.latent_k, projected.q, projected.k, projected.v
        return context.across(macchiato_attention)(
            *given,
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
            causal=self.causal,
            key_mask=context.key_mask,
            cu_seqlens=context.cu_seqlens,
            initial_state=state,
            output_final_state=context.output_final_state,
            log_decay=projected.log_decay,
            partition=partition,
        )

    def window_branch(self, near: Projected, context: Context) -> tuple[Tensor, MixerState | None]:
        """The exact keys alone, (B, T, H, D): window, sinks and kept tokens; and the state."""
        partition, state = self.divide(near, context, latents=False)
        return self._softmax(self.window, near._replace(state=state), context, partition)

    def divide(
        self, projected: Projected, context: Context, latents: bool = True
    ) -> tuple[Partition | None, MixerState]:
        """How the past of these tokens is divided, and their state with the sinks of both.

        None is the paper's division: a window, and latents that read all tokens. Without
        ``latents`` it is the division of the exact keys alone.
        """
        state, sinks, kept = projected.state, None, None
        if self.num_sinks:
            tokens = projected.k, projected.v, self.num_sinks, context.key_mask, context.cu_seqlens
            first = first_tokens(*tokens, state.sinks)
            sinks = Sinks(projected.sink_q, *first, context.position)  # type: ignore[arg-type]
            state = state._replace(sinks=first)
        if projected.scores is not None:
            packed = self.kept_dtype == "mxint8"
            kept = Kept(projected.scores, self.kept_tokens, self.kept_block, packed)
        delay, joint = latents and self.delay_latents, latents and self.joint_softmax
        if sinks is None and kept is None and not (delay or joint):
            return None, state
        return Partition(sinks, delay, joint, kept), state

    def _step(self, x_BE: Tensor, state: StepState, rotary: Rotary | None) -> Tensor:
        latents: Any = self._modules.get("latents")  # ten times as fast as a module's attribute
        local, rotary = self._local_step(x_BE, state, rotary)
        local = self._normed(local, state)
        logits = None
        if self.reads_latents:
            logits = latents.step(in_dtype(x_BE, latents.dtype), state)
        kept = None if state.kept is None else (latents.kept_scores.step(x_BE), self.score_rise)
        options = self.scale, self.softcap, rotary, logits, self.joint_softmax, kept
        return self._output(state.attend(local, *options), local[2], x_BE)

    def _begun_step(self, begun: Any, state: StepState, rotary: Rotary | None) -> Tensor:
        """As :meth:`_step`, after :func:`latte.ops.decoding.layer_begin`."""
        *local, latent_q, latent_k, score = begun
        latents: Any = self._modules["latents"]
        logits = latent_q, latent_k, latents.log_decay(len(latent_q))
        options = (
            logits,
            self.joint_softmax,
            None if state.kept is None else (score, self.score_rise),
        )
        table = self._table(local[0], state, rotary)
        return state.attend(self._normed(local, state), self.scale, self.softcap, table, *options)

    def _normed(self, local: Any, state: StepState) -> tuple[Tensor, Tensor, Tensor]:
        """A step's q, k and v. A base may norm q and k."""
        (q, k, v), parts, plan = local, self._modules, state.step_context.plan
        if "q_norm" in parts:
            q, k = plan.norm(parts["q_norm"], q), plan.norm(parts["k_norm"], k)
        return q, k, v
