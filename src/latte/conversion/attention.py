"""Latte-Macchiato inside a pretrained decoder: the base's projections, plus latents.

The module is :class:`latte.layers.LatteMacchiato`. Its queries, keys and values come from the base:
it takes the base attention's sub-modules, by name, so that the base's weights load without changes,
and calls the base's own rotary function. So one module works for every family.

Shape suffixes: B batch, T tokens, E hidden size, H query heads, G key/value heads, K head width,
L latents per head, W window.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from latte.conversion.config import MacchiatoFields
from latte.conversion.controls import latents_alone
from latte.conversion.step import Table
from latte.layers import Context, LatteMacchiato, MixerState, Projected
from latte.layers.latents import LatentLogits
from latte.layers.mixer import EMPTY
from latte.layers.parts import Rotary
from latte.layers.projections import project
from latte.models.cache_name import one_cache


class MacchiatoAttention(LatteMacchiato):
    """``y_t = p(0|t) SWA_t + sum_{l>=1} p(l|t) mu_t[l]`` with the base's q, k, v and output.

    In a layer that is not converted (``config.converted_layers``) it is the base's own attention,
    without latents. A kept layer with ``config.kept_window`` has that window and sinks.

    Args:
        base: Attention module of a decoder layer. Its sub-modules move here.
        config: Configuration of the converted model.
        softcap: Cap of the local logits, if the base has one.
    """

    begins, splits = True, LatteMacchiato.splits  # a class says both itself
    # Sub-modules of the base, under the same names.
    q_norm: nn.Module
    k_norm: nn.Module

    def __init__(self, base: Any, config: Any, softcap: float | None = None) -> None:
        nn.Module.__init__(self)
        for name, child in base.named_children():
            self.add_module(name, child)
        fields: MacchiatoFields = config
        heads = config.num_attention_heads, config.num_key_value_heads
        self._set_heads(config.hidden_size, *heads, base.head_dim)
        self.layer_idx: int = base.layer_idx
        kinds = getattr(config, "layer_types", None)
        self.layer_kind: str | None = None if kinds is None else kinds[self.layer_idx]
        self.scale, self.softcap = base.scaling, softcap
        self.window = fields.window_of(self.layer_idx)
        self.base_window = fields.base_window(self.layer_idx)
        self.converted = fields.is_converted(self.layer_idx)
        # In training also "hidden": the latents alone, but the window for a sequence's first W
        # tokens, for which delayed latents have nothing.
        self.mixing: str = fields.mixing_of(self.layer_idx)
        kept = fields.kept_block, fields.kept_dtype, fields.kept_half_life
        self._share_past(
            fields.num_sinks if fields.has_window(self.layer_idx) else 0,
            fields.delay_latents and self.converted,
            fields.joint_softmax and self.converted,
            (fields.kept_of(self.layer_idx), *kept),
        )
        self._apply_rotary = sys.modules[type(base).__module__].apply_rotary_pos_emb
        if not self.converted:
            return
        self.latents = LatentLogits(
            config.hidden_size,
            self.num_heads,
            window_logit=True,
            rms_norm_eps=config.rms_norm_eps,
            kept_groups=self.num_key_value_heads if self.kept_tokens else 0,
            **fields.latent_options(),
        )
        # In a half-precision base the default dtype is half precision too. New weights will be
        # trained, so they are at least fp32.
        self.latents.to(torch.promote_types(torch.get_default_dtype(), torch.float32))

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        *,
        context: Context,
        teacher: Any = None,
        cache: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """The base's forward, with a ``context`` instead of its mask, and with a LatteCache.

        With a ``teacher`` the output is that of the base's own attention. If this layer is
        converted, the teacher gives it (:func:`latte.conversion.attention_distillation.watch`).
        """
        cache, x_BTE = one_cache(past_key_values, cache), hidden_states
        context = self.turned(context, position_embeddings)
        if teacher is not None:
            near = self.near(x_BTE, EMPTY, context)._replace(scores=self.scores(x_BTE, context))
            if self.converted:
                return teacher(self, x_BTE, near, context), None
            return self.o_proj(self.full_attention(near, context)[0].flatten(-2)), None
        state = EMPTY if cache is None else cache.state(self.layer_idx)
        projected = self._project(x_BTE, state, context)
        out_BTHK, after = self._attend(x_BTE, projected, context)
        if cache is not None:
            ended = self._end(x_BTE, projected, after, context)
            cache.update(ended, x_BTE.shape[1], self.layer_idx)
        return self.o_proj(out_BTHK.flatten(-2)), None

    @property
    def table(self) -> Table:
        """The rotary table by which queries look at the sinks: its key."""
        return self.layer_kind, self.sink_edge

    @property
    def grows(self) -> bool:  # type: ignore[override]
        """Whether the state keeps every token, as that of the base's full attention does."""
        return self.mixing == "base" and self.base_window is None

    @property
    def steps(self) -> bool:  # type: ignore[override]
        """Whether a token can be decoded in place. This needs the window."""
        return self.mixing not in ("latents", "hidden")

    # --- the base's projections -----------------------------------------------------------------

    def turned(self, context: Context, embeddings: tuple[Tensor, Tensor]) -> Context:
        """The context with the rotary tables of this layer, in the base's format."""
        sinks = context.rotary[self.table] if self.num_sinks else None
        return context._replace(rotary=Rotary(*embeddings, sinks))

    def heads(self, x_BTE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The base's queries (B, T, H, K), keys and values (B, T, G, K), not yet rotated."""
        maps: Any = self.q_proj, self.k_proj, self.v_proj
        K = self.head_dim
        q, k, v = (y.unflatten(-1, (y.shape[-1] // K, K)) for y in project(x_BTE, *maps))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def near(self, x_BTE: Tensor, state: MixerState, context: Context) -> Projected:
        """The base's queries, keys and values: normalised if the base does so, then rotated."""
        q, k, v = self.heads(x_BTE)
        cos, sin, sinks = context.rotary
        # Autocast lowers the projections but not the rotation, so the results are cast to the
        # values' dtype.
        turned = self._apply_rotary(q, k, cos, sin, unsqueeze_dim=2)
        sink_q = None
        if sinks is not None:
            sink_q = self._apply_rotary(q, k, *sinks, unsqueeze_dim=2)[0].to(v.dtype)
        rotated_q, rotated_k = (x.to(v.dtype) for x in turned)
        return Projected(v, state, q=rotated_q, k=rotated_k, sink_q=sink_q)

    def with_logits(self, x_BTE: Tensor, near: Projected, context: Context) -> Projected:
        """The same with the latents' logits, whose weights may stay fp32."""
        projected = super().with_logits(x_BTE.to(self.latents.dtype), near, context)
        q, k = projected.latent_q.to(near.v.dtype), projected.latent_k.to(near.v.dtype)
        return projected._replace(latent_q=q, latent_k=k)

    # --- mixing, and its controls ---------------------------------------------------------------

    @property
    def reads_latents(self) -> bool:  # type: ignore[override]
        """Whether the mixture has latents, or exact keys alone."""
        return self.mixing not in ("base", "window")

    def _project(self, x_BTE: Tensor, state: MixerState, context: Context) -> Projected:
        if self.mixing == "base":
            return self.near(x_BTE, state, context)
        found = super()._project(x_BTE, state, context)
        if self.mixing == "latents":
            found = found._replace(latent_q=found.latent_q[..., 1:], q=None, k=None)
        return found

    def _attend(
        self, x_BTE: Tensor, projected: Projected, context: Context
    ) -> tuple[Tensor, MixerState | None]:
        """The mixture of the branches that ``mixing`` has, (B, T, H, K), and the state after it."""
        if self.mixing in ("latents", "hidden"):
            return latents_alone(self, projected, context)
        return super()._attend(x_BTE, projected, context)

    def full_attention(self, near: Projected, context: Context) -> tuple[Tensor, MixerState | None]:
        """The base's own attention: full, or in the window that the layer has in the base."""
        return self._softmax(self.base_window, near, context)

    def window_branch(self, near: Projected, context: Context) -> tuple[Tensor, MixerState | None]:
        """The window with its sinks; the base's own attention where the layer mixes so."""
        if self.mixing == "base":
            return self.full_attention(near, context)
        return super().window_branch(near, context)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mixing={self.mixing!r}, base_window={self.base_window}"
