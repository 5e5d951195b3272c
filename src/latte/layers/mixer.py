"""The base class of token mixers: heads, values, output, rotation, and the state between calls.

Shape suffixes: B batch, T tokens, E hidden size, H query heads, G key/value heads, K key width,
L latents per head, F feature width, D value width.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from latte.layers.checks import check_input, check_multiple, check_positive
from latte.layers.parts import (
    InitializedModule,
    Rotary,
    RotaryEmbedding,
    apply_rotary,
    of_single_tokens,
    token_positions,
)
from latte.layers.state import MixerState, PastKeys, Piece, rollback
from latte.layers.step import StepState
from latte.ops import attention_weights
from latte.ops.reference import visible_sources
from latte.ops.tensors import Sequences


class MixingLogits(NamedTuple):
    """The logits of a layer's probabilities, before the softmax.

    ``latent_q`` (B, T, H, L or L+1) gives p(l|t). ``latent_k`` (B, T, H, L) gives p(s|l,t). The
    rotated ``q`` (B, T, H, K) and ``k`` (B, T, G, K) are those of the window, before scale and
    softcap. A field is None if the layer has no such logits.
    """

    latent_q: Tensor | None = None
    latent_k: Tensor | None = None
    q: Tensor | None = None
    k: Tensor | None = None


def remembered(logits: MixingLogits, log_decay: Tensor | None) -> MixingLogits:
    """Logits of latents without forgetting that give the same p(s|l,t)."""
    if logits.latent_k is None or log_decay is None:
        return logits
    return logits._replace(latent_k=logits.latent_k.double() - log_decay.double().cumsum(1))


class Projected(NamedTuple):
    """The projections of a piece's tokens, before the mixer mixes them.

    Attributes:
        v: Values, (B, T, G, D).
        logits: Logits of the tokens' weights, :class:`MixingLogits`.
        log_decay: Log-decay of the latents at each token, (B, T, H, L).
        features: Features phi(q) and phi(k) of linear attention, (B, T, H, F).
        after: Parts of the next state that are already known: ``rglru``, ``conv``,
            ``short_conv``, ``own``.
        extra: What else :meth:`Mixer._attend` needs, of any type.
    """

    v: Tensor
    logits: Any = MixingLogits()  # Any: a mixer knows which of its fields are not None
    log_decay: Tensor | None = None
    features: tuple[Tensor, Tensor] | None = None
    after: MixerState = MixerState()
    extra: Any = None


class Mixer(InitializedModule):
    """Base of the layers that mix tokens: ``forward(x, ...) -> (out, state)``.

    A mixer defines :meth:`_project` and :meth:`_attend`, and sets the class attributes below. It
    may define :meth:`_step`, for decoding in fewer operations.

    Args:
        hidden_size: Width E of the input and output.
        num_heads: Number H of query heads.
        num_key_value_heads: Number G of key/value heads, dividing H; H if None.
        head_dim: Width of a head; ``hidden_size / num_heads`` if None.
        causal: Whether the layer is causal. Bidirectional layers have no state.

    Attributes:
        carries: Parts of a :class:`MixerState` that the mixer needs to continue a sequence.
        grows: Whether the state keeps every token, as that of full softmax attention does.
        uses: Fields of a model's configuration that the mixer reads, among those that not every
            mixer reads: ``num_latents``, ``sliding_window``, ``latent_input``, ``rope_theta``,
            ``window_probability``.
        splits: Whether every op that reads earlier tokens is called through :meth:`Piece.across`,
            so that a sequence can be divided among processes. A subclass that changes the
            computation does not inherit it.
        window: Number of keys that a local query sees, its own included; None is all of the past.
        softcap: Cap of the local logits, which become ``softcap * tanh(logit / softcap)``.
    """

    carries: ClassVar[tuple[str, ...]] = ()
    grows: ClassVar[bool] = False
    uses: ClassVar[tuple[str, ...]] = ()
    splits: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = vars(cls)
        if {"forward", "_project", "_attend"} & own.keys() and "splits" not in own:
            cls.splits = False
        if "step" in own and "_step" not in own:
            cls.steps = False  # a decoder calls _step

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        groups = num_heads if num_key_value_heads is None else num_key_value_heads
        check_multiple(name, num_heads=num_heads, num_key_value_heads=groups)
        if head_dim is None:
            check_multiple(name, hidden_size=hidden_size, num_heads=num_heads)
            head_dim = hidden_size // num_heads
        check_positive(name, hidden_size=hidden_size, head_dim=head_dim)
        self.hidden_size, self.num_heads, self.num_key_value_heads = hidden_size, num_heads, groups
        self.head_dim, self.causal = head_dim, causal
        self.window: int | None = None
        self.softcap: float | None = None
        self.rotary: RotaryEmbedding | None = None
        self.v_proj = nn.Linear(hidden_size, groups * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """The mixer of a model's configuration: ``latte.models.LatteConfig`` or a similar one."""
        return cls(**cls.options(config))

    @classmethod
    def options(cls, config: Any) -> dict[str, Any]:
        """The constructor's arguments from a configuration: here those of every mixer."""
        return {
            "hidden_size": config.hidden_size,
            "num_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "causal": config.is_causal,
        }

    @staticmethod
    def local_options(config: Any) -> dict[str, Any]:
        """The arguments of local attention from a configuration, without the window."""
        return {
            "rope_theta": config.rope_theta if config.position == "rope" else None,
            "softcap": config.attn_logit_softcapping,
        }

    # --- what is called -------------------------------------------------------------------------

    def forward(
        self,
        x_BTE: Tensor,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: MixerState | None = None,
        output_final_state: bool = False,
        *,
        rotary: Rotary | None = None,
    ) -> tuple[Tensor, MixerState | None]:
        """Mix the tokens of ``x``.

        Args:
            x_BTE: Input, (B, T, E).
            key_mask: Mask, (B, T) bool, True = a real token.
            cu_seqlens: Bounds of N sequences packed into one row (B = 1), (N+1,) int32.
            state: State that the call before returned.
            output_final_state: Whether to return the state after these tokens.
            rotary: Rotary table of these tokens, if the model shares one; computed if None.

        Returns:
            Output (B, T, E) and the state after these tokens (None unless
            ``output_final_state``).

        Raises:
            ValueError: Shapes, dtypes or devices do not fit.
        """
        piece = self._piece(x_BTE, key_mask, cu_seqlens, state, output_final_state, rotary)
        projected = self._project(piece)
        out_BTHD, after = self._attend(projected, piece)
        return self.o_proj(out_BTHD.flatten(-2)), self._end(projected, after, piece)

    def step(self, x_BE: Tensor, state: StepState, *, rotary: Rotary | None = None) -> Tensor:
        """Mix the next token of each row: :meth:`forward` in fewer operations, if :attr:`steps`.

        Hooks of this module are not called, nor those of the modules in :attr:`stepped`.

        Args:
            x_BE: Input, (B, E), contiguous.
            state: Buffers of the state, which are overwritten. When all layers have read the
                token, the caller advances the clock that they share.
            rotary: Rotary table, as :func:`latte.layers.parts.of_single_tokens` gives it;
                computed if None.

        Returns:
            Output, (B, E).

        Raises:
            ValueError: Gradients are recorded, or x or the state are of another kind.
            TypeError: The mixer has no step.
        """
        if torch.is_grad_enabled() or x_BE.ndim != 2 or not isinstance(state, StepState):
            raise ValueError(
                f"{type(self).__name__}.step: expected x (B, E) and a StepState, without gradients "
                f"(torch.no_grad), got x {tuple(x_BE.shape)} and {type(state).__name__}, "
                f"{'with' if torch.is_grad_enabled() else 'without'} gradients"
            )
        out_BHD = self._step(x_BE, state, rotary)
        return state.step_context.plan.linear_maps(out_BHD.view(len(x_BE), -1), self.o_proj)[0]

    def rollback(self, state: MixerState, tokens: int) -> MixerState:
        """The state ``tokens`` tokens earlier, which goes on recording.

        Args:
            state: State after tokens that were read from a state with :meth:`MixerState.record`.

        Raises:
            ValueError: Fewer tokens have been recorded than are to be taken back.
        """
        return rollback(state, tokens, self._read)

    def with_weights(
        self, x_BTE: Tensor, *given: Any, **named: Any
    ) -> tuple[Tensor, MixerState | None, Tensor]:
        """Like :meth:`forward`, and returns the weights (B, H, T, P + T) too: O(T^2) memory.

        P is the number of past tokens whose keys the state has kept (its ``sources``). If there
        is no past, gradients of the output flow through the weights.
        """
        piece = self._piece(x_BTE, *given, **named)
        projected = self._project(piece)
        sources = piece.state.sources
        if sources is not None and sources.length:
            weights = self._weights(*_with_past(projected, piece, sources))
            weights = weights[:, :, sources.length :]
        else:
            weights = self._weights(projected, piece)
        out_BTHD, after = self._attend(projected, piece)
        if weights.requires_grad and piece.state.position is None:
            v_BTHD = projected.v.repeat_interleave(self.num_heads // projected.v.shape[2], 2)
            dense = torch.einsum("bhts,bshd->bthd", weights.to(v_BTHD.dtype), v_BTHD)
            # The values are exactly the op's; the gradients are those of the weighted sum.
            out_BTHD = out_BTHD.detach() + (dense - dense.detach())
        out = self.o_proj(out_BTHD.flatten(-2))
        return out, self._end(projected, after, piece), weights

    def mixing_logits(
        self,
        x_BTE: Tensor,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        rotary: Rotary | None = None,
    ) -> MixingLogits:
        """The logits of the weights of these tokens among themselves, for inspection.

        If latents forget, the decay is folded into ``latent_k``, in fp64: latents without
        forgetting would have the same weights with these keys.
        """
        projected = self._project(Piece(x_BTE, key_mask, cu_seqlens, rotary=rotary))
        return remembered(projected.logits, projected.log_decay)

    def attention_weights(
        self,
        x_BTE: Tensor,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        rotary: Rotary | None = None,
    ) -> Tensor:
        """The weights p(s|t) of these tokens among themselves, (B, H, T, T): O(T^2) memory."""
        piece = Piece(x_BTE, key_mask, cu_seqlens, rotary=rotary)
        return self._weights(self._project(piece), piece)

    def mixing_flops(self, length: int) -> float:
        """Forward FLOPs per token of mixing at a length, without projections; 0 if unknown."""
        return 0.0

    # --- what a mixer defines -------------------------------------------------------------------

    def _project(self, piece: Piece) -> Projected:
        """The values and logits of the tokens."""
        raise TypeError(f"{type(self).__name__} must define _project: Mixer is only a base class")

    def _attend(self, projected: Projected, piece: Piece) -> tuple[Tensor, MixerState]:
        """The output of each head, (B, T, H, D), and the parts of the state that mixing changes."""
        raise TypeError(f"{type(self).__name__} must define _attend: Mixer is only a base class")

    def _step(self, x_BE: Tensor, state: StepState, rotary: Rotary | None) -> Tensor:
        """The output of each head, (B, H, D), for one token per row. Overwrites the state."""
        raise TypeError(f"{type(self).__name__} has no step")

    def _weights(self, projected: Projected, piece: Piece) -> Tensor:
        """The weights (B, H, T, T) of a piece without a past, computed from its logits."""
        latent_q, latent_k, q, k = projected.logits
        shared = self._visibility(piece)
        local: dict[str, Any] = {"window": self.window, "softcap": self.softcap}
        if latent_q is not None and latent_k is not None:
            own: dict[str, Any] = {} if q is None else dict(local)
            own["log_decay"] = projected.log_decay
            return attention_weights(latent_q, latent_k, q, k, **own, **shared)
        if q is not None and k is not None:
            return softmax_weights(q, k, **local, **shared)
        raise ValueError(f"{type(self).__name__} has no attention weights to show")

    def _visibility(self, piece: Piece) -> dict[str, Any]:
        """The keywords that say which tokens see each other."""
        return {
            "causal": self.causal,
            "key_mask": piece.key_mask,
            "cu_seqlens": piece.cu_seqlens,
        }

    def _local_flops(self, length: int) -> float:
        """:meth:`mixing_flops` of local attention: 2 * 2 * K per head and visible key."""
        seen = min(self.window or length, (length + 1) / 2)
        return 4.0 * self.num_heads * self.head_dim * seen

    # --- what they are built with ---------------------------------------------------------------

    def _piece(
        self,
        x_BTE: Tensor,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: MixerState | None = None,
        output_final_state: bool = False,
        rotary: Rotary | None = None,
    ) -> Piece:
        """The checked arguments of a call."""
        name = type(self).__name__
        check_input(name, x_BTE, self.hidden_size, getattr(self.v_proj, "weight", None))
        if state is not None and not isinstance(state, MixerState):
            raise ValueError(
                f"{name}: state must be the MixerState that came out, got {type(state).__name__}"
            )
        if not self.causal and (state is not None or output_final_state):
            raise ValueError(f"{name}: a bidirectional layer has no state to carry on")
        parts = ("latent", "linear", "window", "short_conv", "own")
        held = {part for part in parts if getattr(state, part, None) is not None}
        lacking = [part for part in self.carries if part not in held]
        if held and lacking:
            raise ValueError(f"{name}: state must hold {lacking[0]!r}, got another mixer's")
        # A subclass may have a state of its own besides, or a convolution.
        surplus = sorted(held - {*self.carries, "own", "short_conv"}) if self.carries else []
        if surplus:
            raise ValueError(f"{name}: state must not hold {surplus[0]!r}, got another mixer's")
        if state is not None and state.recorded is not None and cu_seqlens is not None:
            raise ValueError(f"{name}: packed sequences cannot be recorded for taking back")
        state = state or MixerState()
        return Piece(x_BTE, key_mask, cu_seqlens, state, output_final_state, rotary)

    def _end(self, projected: Projected, after: MixerState, piece: Piece) -> MixerState | None:
        """The state after a piece; None if it is not wanted."""
        if not piece.output_final_state:
            return None
        early = projected.after
        after = after._replace(
            rglru=early.rglru, conv=early.conv, short_conv=early.short_conv, own=early.own
        )
        k = projected.logits.latent_k if projected.features is None else projected.features[1]
        keys = PastKeys(k=k, local_k=projected.logits.k, log_decay=projected.log_decay)
        return piece.end(after, keys)

    def _read(self, piece: Piece) -> MixerState | None:
        """The state after a piece, without the output."""
        projected = self._project(piece)
        return self._end(projected, self._attend(projected, piece)[1], piece)

    def _heads(self, flat_BTE: Tensor, heads: int) -> Tensor:
        return flat_BTE.unflatten(-1, (heads, -1))

    def _add_local(
        self, window: int | None, rope_theta: float | None, softcap: float | None
    ) -> None:
        """Add what local attention needs: window, softcap, rotation, and projections of q and k."""
        if window is not None:
            check_positive(type(self).__name__, window=window)
        self.window, self.softcap = window, softcap
        if rope_theta is not None:
            self.rotary = RotaryEmbedding(self.head_dim, rope_theta)
        E, K = self.hidden_size, self.head_dim
        self.q_proj = nn.Linear(E, self.num_heads * K, bias=False)
        self.k_proj = nn.Linear(E, self.num_key_value_heads * K, bias=False)

    def _local(self, x_BTE: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
        """Local queries (B, T, H, K) and keys (B, T, G, K) of x, rotated."""
        q_BTHK = self._heads(self.q_proj(x_BTE), self.num_heads)
        k_BTGK = self._heads(self.k_proj(x_BTE), self.num_key_value_heads)
        return self._rotated(q_BTHK, k_BTGK, piece)

    def _rotated(self, q_BTHK: Tensor, k_BTGK: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
        """These queries and keys, rotated by the given table, or else by the tokens' positions."""
        if self.rotary is None:
            return q_BTHK, k_BTGK
        rotary = piece.rotary
        if rotary is None:
            start = piece.state.position
            positions = token_positions(piece.x, piece.key_mask, piece.cu_seqlens, start)
            rotary = self.rotary(positions, q_BTHK.dtype)
        return apply_rotary(q_BTHK, rotary), apply_rotary(k_BTGK, rotary)

    def _local_step(
        self, x_BE: Tensor, state: StepState, rotary: Rotary | None
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Rotary | None]:
        """q (B, H, K), k (B, G, K), v (B, G, D) of one token per row, and the table to rotate."""
        B, H, G = len(x_BE), self.num_heads, self.num_key_value_heads
        parts: Any = self._modules
        maps = parts["q_proj"], parts["k_proj"], parts["v_proj"]
        q, k, v = state.step_context.plan.linear_maps(x_BE, *maps)
        local = q.view(B, H, -1), k.view(B, G, -1), v.view(B, G, -1)
        if self.rotary is not None and rotary is None:
            rotary = of_single_tokens(self.rotary(state.step_context.position[:, None], q.dtype))
        return local, None if self.rotary is None else rotary

    def extra_repr(self) -> str:
        window = "" if self.window is None else f", window={self.window}"
        return (
            f"num_heads={self.num_heads}, num_key_value_heads={self.num_key_value_heads}, "
            f"head_dim={self.head_dim}, causal={self.causal}{window}"
        )


def _with_past(projected: Projected, piece: Piece, past: PastKeys) -> tuple[Projected, Piece]:
    """The whole row that a piece ends, with past keys; past queries are zeros."""
    P = past.length

    def blank(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        return torch.cat([x.new_zeros(x.shape[0], P, *x.shape[2:]), x], 1)

    def whole(before: Tensor | None, x: Tensor | None) -> Tensor | None:
        return None if before is None or x is None else torch.cat([before, x], 1)

    latent_q, latent_k, q, k = projected.logits
    logits = MixingLogits(
        blank(latent_q), whole(past.k, latent_k), blank(q), whole(past.local_k, k)
    )
    log_decay = whole(past.log_decay, projected.log_decay)
    features: Any = projected.features
    if features is not None:
        features = (blank(features[0]), whole(past.k, features[1]))
    real, x = whole(past.mask, piece.real), blank(piece.x)
    assert x is not None
    known = {"logits": logits, "log_decay": log_decay, "features": features}
    return projected._replace(**known), Piece(x, real)


# --- weights as dense matrices (B, H, T, T); Latte's own are in latte.ops.attention_weights -----


def softmax_weights(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    *,
    window: int | None = None,
    softcap: float | None = None,
    causal: bool = True,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The weights of softmax attention. A row that sees no key is zero."""
    k_BTHK = k_BTGK.repeat_interleave(q_BTHK.shape[2] // k_BTGK.shape[2], 2)
    logits = torch.einsum("bthk,bshk->bhts", q_BTHK, k_BTHK) / q_BTHK.shape[-1] ** 0.5
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    sequences = Sequences(key_mask, cu_seqlens, causal)
    visible = visible_sources(q_BTHK.shape[1], sequences, q_BTHK.device, window)[:, None]
    # Masked logits are finite: a row of -inf would have NaN gradients.
    weights = logits.masked_fill(~visible, torch.finfo(logits.dtype).min / 2).softmax(-1)
    return weights.masked_fill(~visible, 0.0)
