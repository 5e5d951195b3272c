"""Latte-Macchiato inside a pretrained decoder: the base's projections, plus latents.

One module works for every family. It takes the base attention's sub-modules, by name, so that the
base's weights load without changes. It calls the base's own rotary function.

Shape suffixes: B batch, T tokens, E hidden size, H query heads, G key/value heads, K head width,
L latents per head, W window.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from latte.conversion.config import MacchiatoFields
from latte.conversion.sources import late_latents, sink_keys
from latte.conversion.step import Rotations, Table
from latte.layers import MixerState, MixingLogits
from latte.layers.latent_input import LatentInputs, LatentLogits
from latte.layers.mixer import remembered
from latte.layers.parts import token_positions
from latte.layers.state import PastKeys, Piece, rollback
from latte.layers.step import StepState
from latte.models.cache_name import one_cache
from latte.ops import (
    Sinks,
    WindowState,
    macchiato_attention,
    sliding_window_attention,
    window_log_mass,
)
from latte.ops.step import in_dtype


class Tokens(NamedTuple):
    """The tokens of a forward pass, besides their hidden states: mask, bounds, sinks and past."""

    key_mask: Tensor | None
    cu_seqlens: Tensor | None
    sink_embeddings: dict[Table, tuple[Tensor, Tensor]] | None = None
    earlier: MixerState = MixerState()  # the state before the tokens, if there is no cache


class Projections(NamedTuple):
    """Local queries (B, T, H, K), keys (B, T, G, K) and values (B, T, G, K), rotated."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink_q: Tensor | None = None


def with_mass(latent_q: Tensor, mass_BTH: Tensor) -> Tensor:
    """Mixture logits (B, T, H, L+1) plus the window's log-mass in column 0, in the wider dtype."""
    return F.pad(mass_BTH[..., None], (0, latent_q.shape[-1] - 1)) + latent_q


class MacchiatoAttention(nn.Module):
    """``y_t = p(0|t) SWA_t + sum_{l>=1} p(l|t) mu_t[l]`` with the base's q, k, v and output.

    In a layer that is not converted (``config.converted_layers``) it is the base's own attention,
    without latents. A kept layer with ``config.kept_window`` has that window and sinks.

    Args:
        base: Attention module of a decoder layer. Its sub-modules move here.
        config: Configuration of the converted model.
        softcap: Cap of the local logits, if the base has one.
    """

    stepped = ("latents",)
    # Sub-modules of the base, under the same names.
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module

    def __init__(self, base: Any, config: Any, softcap: float | None = None) -> None:
        super().__init__()
        for name, child in base.named_children():
            self.add_module(name, child)
        fields: MacchiatoFields = config
        self.layer_idx: int = base.layer_idx
        kinds = getattr(config, "layer_types", None)
        self.layer_kind: str | None = None if kinds is None else kinds[self.layer_idx]
        self.head_dim: int = base.head_dim
        self.num_heads: int = config.num_attention_heads
        self.scale: float = base.scaling
        self.softcap = softcap
        self.window = fields.window_of(self.layer_idx)
        self.base_window = fields.base_window(self.layer_idx)
        self.converted = fields.is_converted(self.layer_idx)
        self.converted_before = sum(map(fields.is_converted, range(self.layer_idx)))
        # As in the configuration; in training also "hidden": the latents alone, but the window
        # for a sequence's first W tokens, for which delayed latents have nothing.
        self.mixing: str = fields.mixing_of(self.layer_idx)
        self.num_sinks = fields.num_sinks if fields.has_window(self.layer_idx) else 0
        self.delay_latents = fields.delay_latents and self.converted
        self.joint_softmax = fields.joint_softmax and self.converted
        self._apply_rotary = sys.modules[type(base).__module__].apply_rotary_pos_emb
        if not self.converted:
            return
        self.latents: Any = LatentLogits(
            config.hidden_size,
            self.num_heads,
            window_logit=True,
            rms_norm_eps=config.rms_norm_eps,
            **fields.latent_options(),
        )
        # In a half-precision base the default dtype is half precision too. New weights will be
        # trained, so they are at least fp32.
        self.latents.to(torch.promote_types(torch.get_default_dtype(), torch.float32))

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        *,
        tokens: Tokens,
        teacher: Any = None,
        cache: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """The base's forward, with ``tokens`` instead of its mask, and with a LatteCache.

        With a ``teacher`` (:class:`latte.conversion.attention_distillation.Teacher`) the output is
        that of the base's own attention. If this layer is converted, the teacher measures its
        error.
        """
        cache = one_cache(past_key_values, cache)
        carry = cache is not None and teacher is None
        state = cache.state(self.layer_idx) if carry else tokens.earlier
        rotary = self.rotary(position_embeddings, tokens)
        piece = Piece(hidden_states, tokens.key_mask, tokens.cu_seqlens, state, carry, rotary)
        local = self.rotated(hidden_states, rotary)
        if teacher is not None and self.converted:
            return teacher(self, local, piece), None
        if teacher is not None:
            out_BTHK = self.full_attention(local, piece)[0]
        else:
            out_BTHK, after, keys = self.mix(local, piece)
            if carry:
                ended = piece.end(after, keys)
                cache.update(ended, hidden_states.shape[1], self.layer_idx)
        return self.o_proj(out_BTHK.flatten(-2)), None

    @property
    def table(self) -> Table:
        """The rotary table by which queries look at the sinks: its key."""
        return self.layer_kind, self.window

    @property
    def splits(self) -> bool:
        """Whether a sequence can be divided among processes."""
        grows = self.mixing == "base" and self.base_window is None
        return not (self.num_sinks or self.delay_latents or grows)

    @property
    def steps(self) -> bool:
        """Whether a token can be decoded in place. This needs the window."""
        return self.mixing not in ("latents", "hidden")

    def _step(self, x_BE: Tensor, state: StepState, rotations: Rotations) -> Tensor:
        """The output of the heads, (B, H, K), for one token per row. Overwrites the state."""
        # For one token every Python call takes a noticeable time, and module attributes are slow.
        parts, B, plan = self._modules, x_BE.shape[0], state.step_context.plan
        maps: Any = parts["q_proj"], parts["k_proj"], parts["v_proj"]
        q, k, v = (x.view(B, -1, self.head_dim) for x in plan.linear_maps(x_BE, *maps))
        if "q_norm" in parts:
            q, k = plan.norm(parts["q_norm"], q), plan.norm(parts["k_norm"], k)
        logits = None
        if self.mixing not in ("base", "window"):
            latents: Any = parts["latents"]
            logits = latents.step(in_dtype(x_BE, latents.dtype), state)
        given: Any = (q, k, v), self.scale, self.softcap, *rotations
        return state.attend(*given, latents=logits, joint=self.joint_softmax)

    def heads(self, x_BTE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The base's queries (B, T, H, K), keys and values (B, T, G, K), not yet rotated."""
        heads = (*x_BTE.shape[:2], -1, self.head_dim)
        q, k, v = (proj(x_BTE).view(heads) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def project(
        self, x_BTE: Tensor, embeddings: tuple[Tensor, Tensor], tokens: Tokens
    ) -> Projections:
        """The base's queries, keys and values: normalised if the base does so, then rotated."""
        return self.rotated(x_BTE, self.rotary(embeddings, tokens))

    def rotary(self, embeddings: tuple[Tensor, Tensor], tokens: Tokens) -> tuple[Tensor, ...]:
        """The rotary tables of this layer: cosines and sines, and if it has sinks, theirs."""
        if self.num_sinks and tokens.sink_embeddings is not None:
            return *embeddings, *tokens.sink_embeddings[self.table]
        return embeddings

    def rotated(self, x_BTE: Tensor, rotary: tuple[Tensor, ...]) -> Projections:
        """The base's queries, keys and values, rotated by the tables of :meth:`rotary`."""
        q, k, v = self.heads(x_BTE)
        # Autocast lowers the projections but not the rotation, so the results are cast to the
        # values' dtype.
        turned = self._apply_rotary(q, k, *rotary[:2], unsqueeze_dim=2)
        rotated_q, rotated_k = (x.to(v.dtype) for x in turned)
        sink_q = None
        if rotary[2:]:
            sink_q = self._apply_rotary(q, k, *rotary[2:], unsqueeze_dim=2)[0].to(v.dtype)
        return Projections(rotated_q, rotated_k, v, sink_q)

    def rollback(self, state: MixerState, tokens: int) -> MixerState:
        """As :meth:`latte.layers.Mixer.rollback`."""
        return rollback(state, tokens, self._read)

    def _read(self, piece: Piece) -> MixerState | None:
        """The state after a piece, without the output."""
        assert piece.rotary is not None
        _, after, keys = self.mix(self.rotated(piece.x, piece.rotary), piece)
        return piece.end(after, keys)

    def mix(self, local: Projections, piece: Piece) -> tuple[Tensor, MixerState, PastKeys]:
        """The output of each head (B, T, H, K), the changed parts of the state, and the keys."""
        keys = PastKeys(local_k=local.k)
        if self.mixing == "base":
            return *self.full_attention(local, piece), keys
        if self.mixing == "window":
            return *self.window_branch(local, piece), keys
        logits, log_decay, inputs = self.logits(local, piece)
        out, after = self.combine(logits, log_decay, local, piece)
        after = after._replace(rglru=inputs.after.rglru, conv=inputs.after.conv)
        return out, after, keys._replace(k=logits.latent_k, log_decay=log_decay)

    def logits(
        self, local: Projections, piece: Piece
    ) -> tuple[MixingLogits, Tensor | None, LatentInputs]:
        """The latent and local logits, ``log_decay``, and the latent input's states."""
        wide = piece.x.to(self.latents.dtype)  # the logits' weights may stay fp32
        latent_q, latent_k, log_decay, inputs = self.latents(piece._replace(x=wide))
        latent_q, latent_k = latent_q.to(local.v.dtype), latent_k.to(local.v.dtype)
        return MixingLogits(latent_q, latent_k, local.q, local.k), log_decay, inputs

    def mixture(self, logits: MixingLogits, local: Projections, piece: Piece) -> Tensor:
        """The logits (B, T, H, L+1) of p(l|t), at least fp32 with ``joint_softmax``."""
        latent_q = logits.latent_q
        assert latent_q is not None
        if not self.joint_softmax:
            return latent_q
        return with_mass(latent_q, self.window_log_mass(local, piece))

    def window_log_mass(self, local: Projections, piece: Piece) -> Tensor:
        """The logsumexp of the window's logits, sinks included, (B, T, H)."""
        return piece.across(window_log_mass)(
            local.q,
            local.k,
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
            key_mask=piece.key_mask,
            cu_seqlens=piece.cu_seqlens,
            initial_state=piece.state.window,
            sinks=self._sinks(local, piece),
        )

    def mixing_logits(
        self, x_BTE: Tensor, position_embeddings: tuple[Tensor, Tensor], tokens: Tokens
    ) -> MixingLogits:
        """The logits of the weights of these tokens among themselves, for inspection.

        They are as for a :class:`latte.layers.Mixer`, and None for parts that a control lacks.
        """
        local = self.project(x_BTE, position_embeddings, tokens)
        if self.mixing in ("base", "window"):
            return MixingLogits(q=local.q, k=local.k)
        logits, log_decay, _ = self.logits(local, Piece(x_BTE))
        mixture = self.mixture(logits, local, Piece(x_BTE))
        if log_decay is not None and self.delay_latents:
            # A source decays from the token at which the latents read it.
            log_decay = F.pad(log_decay[:, self.window :], (0, 0, 0, 0, 0, self.window))
            log_decay = log_decay[:, : x_BTE.shape[1]]
        logits = remembered(logits._replace(latent_q=mixture), log_decay)
        if self.mixing != "latents":
            return logits
        assert logits.latent_q is not None
        return logits._replace(latent_q=logits.latent_q[..., 1:], q=None, k=None)

    def window_weights(
        self,
        x_BTE: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        tokens: Tokens,
        first: int,
    ) -> Tensor:
        """The window's weights of the first tokens among themselves, (B, H, first, first).

        They are the window branch's output for the identity matrix as values. So query and key
        norms, grouped heads, soft caps and sinks are exactly those of the model.
        """
        local = self.project(x_BTE, position_embeddings, tokens)
        identity = torch.eye(first, dtype=local.v.dtype, device=local.v.device)
        local = local._replace(
            q=local.q[:, :first],
            k=local.k[:, :first],
            v=identity[None, :, None].expand(len(x_BTE), -1, local.v.shape[2], -1),
            sink_q=None if local.sink_q is None else local.sink_q[:, :first],
        )
        piece = Piece(x_BTE[:, :first])
        if self.mixing == "base":
            weights, _ = self.full_attention(local, piece)
        else:
            weights, _ = self.window_branch(local, piece)
        return weights.transpose(1, 2)

    def combine(
        self, logits: MixingLogits, log_decay: Tensor | None, local: Projections, piece: Piece
    ) -> tuple[Tensor, MixerState]:
        """The mixture of both branches, (B, T, H, K), and their states."""
        if self.mixing in ("latents", "hidden"):
            late = self.window if self.delay_latents else None
            out, after = late_latents(logits, log_decay, local.v, piece, late)
            if self.mixing == "hidden" and late is not None:
                start = piece.state.position
                place = token_positions(piece.x, piece.key_mask, piece.cu_seqlens, start)
                window, _ = self.window_branch(local, piece)
                out = torch.where((place < late)[..., None, None], window, out)
            return out, after
        sinks = self._sinks(local, piece)
        out, carried = piece.across(macchiato_attention)(
            *logits,
            local.v,
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
            initial_state=piece.state.macchiato(self.delay_latents),
            log_decay=log_decay,
            sinks=sinks,
            delay=self.delay_latents,
            joint=self.joint_softmax,
            **piece.sequences,
        )
        return out, self._with_sinks(MixerState.of_macchiato(carried), sinks, piece)

    def full_attention(self, local: Projections, piece: Piece) -> tuple[Tensor, MixerState]:
        """The base's own attention: full, or in the window that the layer has in the base."""
        return self._softmax(self.base_window, local, piece)

    def window_branch(self, local: Projections, piece: Piece) -> tuple[Tensor, MixerState]:
        """The window branch, with its sinks if it has any."""
        sinks = self._sinks(local, piece)
        out, after = self._softmax(self.window, local, piece, sinks)
        return out, self._with_sinks(after, sinks, piece)

    def _sinks(self, local: Projections, piece: Piece) -> Sinks | None:
        """The sequences' first tokens, as the window sees them; None without sinks."""
        if not self.num_sinks:
            return None
        assert local.sink_q is not None, "sinks need their own rotation of the queries"
        kept = sink_keys(local.k, local.v, self.num_sinks, piece)
        return Sinks(local.sink_q, *kept, piece.state.position)

    def _with_sinks(self, after: MixerState, sinks: Sinks | None, piece: Piece) -> MixerState:
        """The state with the sinks added, for the tokens that follow."""
        if sinks is None or not piece.output_final_state:
            return after
        return after._replace(sinks=WindowState(sinks.keys, sinks.values, sinks.mask))

    def _softmax(
        self,
        window: int | None,
        local: Projections,
        piece: Piece,
        sinks: Sinks | None = None,
    ) -> tuple[Tensor, MixerState]:
        """Softmax attention over a window of the base's keys, or over all of them (None)."""
        out, tail = piece.across(sliding_window_attention)(
            *local[:3],
            window=window,
            scale=self.scale,
            softcap=self.softcap,
            initial_state=piece.state.window,
            sinks=sinks,
            **piece.sequences,
        )
        return out, MixerState(window=tail)

    def mixing_flops(self, length: int) -> float:
        """Forward FLOPs per token at a length, of the branches that ``mixing`` has."""
        base = self.mixing == "base"
        seen = min((self.base_window if base else self.window) or length, (length + 1) / 2)
        latents = 0 if self.mixing in ("base", "window") else self.latents.k_proj.out_features
        return 4.0 * self.head_dim * (latents + self.num_heads * seen)

    def extra_repr(self) -> str:
        if not self.converted:
            return f"the base's own, window={self.base_window}"
        return (
            f"window={self.window}, mixing={self.mixing!r}, num_sinks={self.num_sinks}, "
            f"delay_latents={self.delay_latents}"
        )
