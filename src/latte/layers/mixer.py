"""What every token mixer shares: heads, values, output, rotation, and carrying its state on.

Shape suffixes: B batch, T tokens, E hidden size, H query heads, G key/value heads, K key width,
D value width.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Self

from torch import Tensor, nn

from latte.layers.positions import Rotary, RotaryEmbedding, apply_rotary, token_positions
from latte.layers.state import MixerState, TokenLog, advance_position
from latte.layers.validation import check_carried, check_divides, check_input, check_positive


class MixingLogits(NamedTuple):
    """The logits that a layer's probabilities are softmaxes of; None for what it does not have.

    ``latent_q`` (B, T, H, L or L+1) gives p(l|t), ``latent_k`` (B, T, H, L) p(s|l,t), and the
    rotated ``q`` (B, T, H, K) and ``k`` (B, T, G, K) the window's, before scale and softcap.
    """

    latent_q: Tensor | None = None
    latent_k: Tensor | None = None
    q: Tensor | None = None
    k: Tensor | None = None


def local_options(config: Any) -> dict[str, Any]:
    """The arguments of local attention that a model's configuration gives, but its window."""
    return {
        "rope_theta": config.rope_theta if config.position == "rope" else None,
        "softcap": config.attn_logit_softcapping,
    }


class Mixer(nn.Module):
    """Base of the layers that mix tokens: ``forward(x, ...) -> (out, state)``.

    Args:
        hidden_size: E.
        num_heads: H query heads.
        num_key_value_heads: G, dividing H; H if None.
        head_dim: width of a head; ``hidden_size / num_heads`` if None.
        causal: False for bidirectional layers, which carry no state.

    Attributes:
        carries: the parts of a :class:`MixerState` that the mixer cannot go on without.
        grows: the state keeps every token, as that of full softmax attention.
        uses: the fields of a model's configuration that the mixer reads, of those that not every
            mixer does: ``num_latents``, ``sliding_window``, ``latent_input``, ``rope_theta``,
            ``window_probability``.
    """

    carries: ClassVar[tuple[str, ...]] = ()
    grows: ClassVar[bool] = False
    uses: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        groups = num_heads if num_key_value_heads is None else num_key_value_heads
        check_divides(
            name,
            "num_key_value_heads",
            "num_heads",
            num_heads=num_heads,
            num_key_value_heads=groups,
        )
        if head_dim is None:
            check_divides(
                name, "num_heads", "hidden_size", hidden_size=hidden_size, num_heads=num_heads
            )
            head_dim = hidden_size // num_heads
        check_positive(name, hidden_size=hidden_size, head_dim=head_dim)
        self.hidden_size, self.num_heads, self.num_key_value_heads = hidden_size, num_heads, groups
        self.head_dim, self.causal = head_dim, causal
        self.rotary: RotaryEmbedding | None = None
        self.v_proj = nn.Linear(hidden_size, groups * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """The mixer of a model's configuration, ``latte.models.LatteConfig`` or one alike."""
        return cls(**cls.options(config))

    @classmethod
    def options(cls, config: Any) -> dict[str, Any]:
        """The arguments of the class that a configuration gives: here those of every mixer."""
        return {
            "hidden_size": config.hidden_size,
            "num_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "causal": config.is_causal,
        }

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
            x_BTE: (B, T, E).
            key_mask: (B, T) bool, True = a real token.
            cu_seqlens: (N+1,) int32, N sequences packed into one row (B = 1).
            state: as it came out of the piece before.
            rotary: the rotary table of these tokens, where a model shares one; else computed.

        Returns:
            Output (B, T, E) and the state after these tokens (None unless asked for).

        Raises:
            ValueError: shapes, dtypes or devices do not fit.
        """
        state = self._check(x_BTE, cu_seqlens, state, output_final_state)
        out_BTHD, after, log = self._mix(
            x_BTE, key_mask, cu_seqlens, state, output_final_state, rotary
        )
        out = self.o_proj(out_BTHD.flatten(-2))
        if not output_final_state:
            return out, None
        after = after._replace(
            position=advance_position(state.position, key_mask, cu_seqlens, x_BTE)
        )
        if state.undo is not None and log is not None:
            after = after._replace(undo=state.undo.append(log))
        return out, after

    def _mix(
        self,
        x_BTE: Tensor,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        state: MixerState,
        output_final_state: bool,
        rotary: Rotary | None,
    ) -> tuple[Tensor, MixerState, TokenLog | None]:
        """Heads' outputs (B, T, H, D), the state but for its position, and the tokens' log."""
        raise TypeError(f"{type(self).__name__} must define _mix: Mixer is only a base class")

    def mixing_logits(
        self,
        x_BTE: Tensor,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        rotary: Rotary | None = None,
    ) -> MixingLogits:
        """The logits behind the weights of these tokens among themselves, for looking at."""
        return MixingLogits()

    def attention_weights(
        self,
        x_BTE: Tensor,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        rotary: Rotary | None = None,
    ) -> Tensor:
        """The weights of these tokens among themselves, (B, H, T, T): O(T^2) memory."""
        raise TypeError(f"{type(self).__name__} must define attention_weights")

    def _check(
        self, x_BTE: Tensor, cu_seqlens: Tensor | None, state: MixerState | None, carry: bool
    ) -> MixerState:
        name = type(self).__name__
        check_input(name, x_BTE, self.hidden_size)
        if state is not None and not isinstance(state, MixerState):
            raise ValueError(
                f"{name}: state must be the MixerState that came out, got {type(state).__name__}"
            )
        check_carried(name, self.causal, state is not None, carry)
        held = {p for p in ("latent", "linear", "window") if getattr(state, p, None) is not None}
        lacking = [part for part in self.carries if part not in held]
        if held and lacking:
            raise ValueError(f"{name}: state must hold {lacking[0]!r}, got another mixer's")
        if state is not None and state.recording and cu_seqlens is not None:
            raise ValueError(f"{name}: packed sequences cannot be recorded for taking back")
        return state or MixerState()

    def _heads(self, flat_BTE: Tensor, heads: int) -> Tensor:
        return flat_BTE.unflatten(-1, (heads, -1))

    def _rotate(
        self,
        q_BTHK: Tensor,
        k_BTGK: Tensor,
        x_BTE: Tensor,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        state: MixerState,
        rotary: Rotary | None,
    ) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys, by the table given or by the tokens' own positions."""
        if self.rotary is None:
            return q_BTHK, k_BTGK
        if rotary is None:
            positions = token_positions(x_BTE, key_mask, cu_seqlens, state.position)
            rotary = self.rotary(positions, q_BTHK.dtype)
        return apply_rotary(q_BTHK, rotary), apply_rotary(k_BTGK, rotary)

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, num_key_value_heads={self.num_key_value_heads}, "
            f"head_dim={self.head_dim}, causal={self.causal}"
        )
