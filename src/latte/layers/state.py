"""A piece of a batch of sequences, the state between pieces, and how to remove tokens from it.

Shape suffixes: B batch (or N packed sequences), S logged tokens, H query heads, G key/value
heads, L latents per head, K key width, D value width, F feature width, E hidden size, W window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from latte.layers.context_parallel import ShardedOps, across
from latte.ops import LatteState
from latte.ops.state import LinearState, MacchiatoState, WindowState

T = TypeVar("T")


def map_tensors(fn: Callable[[Tensor], Tensor], state: T) -> T:
    """Apply ``fn`` to every tensor of a (nested, named) tuple; None stays None."""
    if isinstance(state, Tensor):
        return fn(state)  # type: ignore[return-value]
    if isinstance(state, tuple):
        items = (map_tensors(fn, item) for item in state)
        return type(state)(*items) if hasattr(state, "_fields") else tuple(items)  # type: ignore
    return state


def real_tokens(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """The mask (B, T) bool of the real tokens of ``x`` (B, T, ...)."""
    return x.new_ones(x.shape[:2], dtype=torch.bool) if key_mask is None else key_mask


class PastKeys(NamedTuple):
    """The keys of all tokens so far, for weights over the past.

    A field is None if the mixer has no such keys.

    Attributes:
        mask: Mask, (B, S) bool, True = a real token; None before the first token.
        k: Latent key logits (B, S, H, L), or features phi(k) (B, S, H, F) for linear attention.
        local_k: Keys of the window, after the position encoding, (B, S, G, K).
        log_decay: Log-decay of the latents, (B, S, H, L).
    """

    mask: Tensor | None = None
    k: Tensor | None = None
    local_k: Tensor | None = None
    log_decay: Tensor | None = None

    @property
    def length(self) -> int:
        """S, the number of tokens."""
        return 0 if self.mask is None else self.mask.shape[1]


class Recorded(NamedTuple):
    """The state before the first recorded token, and what the layer was given for each token.

    A token cannot be subtracted from a state. To take tokens back, the layer reads the others
    again from the earlier state (:func:`rollback`).

    Attributes:
        before: State before the first recorded token.
        x: Inputs of the layer, (B, S, E); None before the first token.
        mask: Mask, (B, S) bool, True = a real token.
        rotary: Rotary tables, (B, S, ...) each; None if the layer computes its own or has none.
    """

    before: Any
    x: Tensor | None = None
    mask: Tensor | None = None
    rotary: tuple[Tensor, ...] | None = None

    @property
    def length(self) -> int:
        """S, the number of recorded tokens."""
        return 0 if self.mask is None else self.mask.shape[1]


def joined(before: T, after: T) -> T:
    """The same (nested) tuple over the tokens of both, (B, S1 + S2, ...)."""
    if before is None or after is None:
        return after
    if isinstance(before, Tensor):
        return torch.cat([before, after], 1)  # type: ignore[return-value, list-item]
    pairs: Any = zip(before, after, strict=True)  # type: ignore[call-overload]
    parts = [joined(*pair) for pair in pairs]
    return type(before)(*parts) if hasattr(before, "_fields") else tuple(parts)  # type: ignore


class MixerState(NamedTuple):
    """The state of one layer: constant in size, except for full softmax attention.

    The first dimension of every tensor is the batch. Parts that a mixer does not use are None.
    Before the first token all parts are None: ``MixerState()`` is the empty state.

    Attributes:
        position: Number of real tokens seen, (B,) int64.
        latent: Log-mass and mean of each latent.
        linear: Sums of undirected linear attention.
        window: Last W-1 local keys and values (all of them for full softmax attention).
        rglru: State of the RG-LRU, (B, E) fp32.
        conv: Last inputs of the convolution, (B, K-1, E).
        short_conv: Last inputs of the convolution of q, k and v, (B, K-1, C).
        own: State of a mixer of another kind, (B, ...).
        pending: Latent keys (B, W, H, L) of the last W tokens, if the latents read a token only
            when it leaves the window; and those tokens' values, (B, 1, G, D) where the window holds
            all but the oldest.
        sinks: Local keys and values of a sequence's first tokens, if those stay visible.
        sources: Keys of all tokens so far, if set, for weights over the past: O(T) memory.
        recorded: Tokens that can be taken back, if set.
        shards: Processes that hold the tokens before, if set. All parts but ``position`` then come
            from them, op by op.
    """

    position: Tensor | None = None
    latent: LatteState | None = None
    linear: LinearState | None = None
    window: WindowState | None = None
    rglru: Tensor | None = None
    conv: Tensor | None = None
    short_conv: Tensor | None = None
    own: Tensor | None = None
    pending: WindowState | None = None
    sinks: WindowState | None = None
    sources: PastKeys | None = None
    recorded: Recorded | None = None
    shards: ShardedOps | None = None

    def macchiato(self, delay: bool = False) -> MacchiatoState | None:
        """The state of :func:`latte.ops.macchiato_attention`; None before the first token."""
        if self.latent is None or self.window is None:
            return None
        unread = self.unread if delay else None
        if unread is None:
            return self.latent, self.window
        return self.latent, self.window, unread

    @property
    def unread(self) -> WindowState | None:
        """The pending sources with all their values, (B, W, G, D), those of the window too."""
        pending, window = self.pending, self.window
        if pending is None or window is None:
            return pending
        if pending.values.shape[1] == pending.keys.shape[1]:  # as in older files
            return pending
        return pending._replace(values=torch.cat([pending.values, window.values], 1))

    @classmethod
    def of_macchiato(cls, state: MacchiatoState | None) -> MixerState:
        """The parts that :func:`latte.ops.macchiato_attention` changes, from its final state."""
        latent, window, pending = (*(state or (None, None)), None)[:3]
        return cls(latent=latent, window=window, pending=beside_window(pending))

    def record(self) -> MixerState:
        """This state, which records the tokens that are read from here on."""
        return self._replace(recorded=Recorded(self._replace(recorded=None)))


class Piece(NamedTuple):
    """The next tokens of a batch of sequences: all that a mixer's methods are given.

    Attributes:
        x: Inputs of the tokens, (B, T, E).
        key_mask: Mask, (B, T) bool, True = a real token.
        cu_seqlens: Bounds of N sequences packed into one row (B = 1), (N+1,) int32.
        state: State after the piece before.
        output_final_state: Whether to return the state after this piece.
        rotary: Rotary tables of these tokens, if the model shares them among its layers.
    """

    x: Tensor
    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    state: MixerState = MixerState()
    output_final_state: bool = False
    rotary: Any = None

    @property
    def real(self) -> Tensor:
        """The mask of real tokens, (B, T) bool."""
        return real_tokens(self.x, self.key_mask)

    @property
    def sequences(self) -> dict[str, Any]:
        """The keywords that describe the sequences to every op."""
        return {
            "key_mask": self.key_mask,
            "cu_seqlens": self.cu_seqlens,
            "output_final_state": self.output_final_state,
        }

    def across(self, op: Callable[..., Any]) -> Callable[..., Any]:
        """The op, wrapped so that the tokens before this piece may be in other processes."""
        return across(op, self.state.shards)

    def end(self, after: MixerState, keys: PastKeys) -> MixerState | None:
        """The whole state after these tokens, from the parts they changed; None if not wanted.

        Args:
            after: Changed parts, without position, sources and recorded tokens.
            keys: Keys of these tokens, without the mask. They are kept if weights are wanted.
        """
        if not self.output_final_state:
            return None
        state, sources, recorded = self.state, self.state.sources, self.state.recorded
        if sources is not None:
            sources = joined(sources, keys._replace(mask=self.real))
        if recorded is not None:
            B = self.x.shape[0]
            rotary = None
            if self.rotary is not None:
                rotary = tuple(x.expand(B, *x.shape[1:]) for x in self.rotary)
            before, given = recorded.before, Recorded(None, self.x, self.real, rotary)
            recorded = joined(recorded._replace(before=None), given)._replace(before=before)
        position = advance_position(state.position, self.key_mask, self.cu_seqlens, self.x)
        latent = _without_decay(after.latent)
        parts: Any = {"position": position, "latent": latent, "sources": sources}
        return after._replace(recorded=recorded, **parts)


def beside_window(pending: WindowState | None) -> WindowState | None:
    """Pending sources with the oldest token's value alone: the window holds the others."""
    if pending is None:
        return None
    # A copy, because a view would keep all values alive.
    return pending._replace(values=pending.values[:, :1].clone())


def _without_decay(state: LatteState | None) -> LatteState | None:
    """The log-mass and mean alone: a layer never merges states, so it needs no log-decay."""
    return None if state is None else LatteState(state.log_mass, state.mean)


def advance_position(
    position: Tensor | None, key_mask: Tensor | None, cu_seqlens: Tensor | None, x: Tensor
) -> Tensor:
    """Tokens seen after ``x`` (B, T, E), per sequence; masked tokens do not count."""
    B, T = x.shape[:2]
    if cu_seqlens is not None:
        seen = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
        if key_mask is not None:
            counted = torch.nn.functional.pad(key_mask[0].long().cumsum(0), (1, 0))
            seen = counted[cu_seqlens[1:].long()] - counted[cu_seqlens[:-1].long()]
    elif key_mask is not None:
        seen = key_mask.sum(1)
    else:
        seen = torch.full((B,), T, dtype=torch.long, device=x.device)
    return seen if position is None else position + seen


def rollback(
    state: MixerState, tokens: int, read: Callable[[Piece], MixerState | None]
) -> MixerState:
    """Take the last ``tokens`` tokens back. The result goes on recording, from where it stands.

    Args:
        state: State that has recorded these tokens.
        read: The layer's function from a piece to the state after it.

    Raises:
        ValueError: Fewer tokens have been recorded than are to be taken back.
    """
    recorded = state.recorded
    length = 0 if recorded is None else recorded.length
    if recorded is None or not 0 <= tokens <= length:
        raise ValueError(
            f"cannot take {tokens} tokens back: {length} have been recorded since recording "
            "began or tokens were last taken back"
        )
    if tokens == 0:
        return state.record()
    if tokens == length:
        return recorded.before.record()
    kept = map_tensors(lambda x: x[:, : length - tokens], recorded._replace(before=None))
    assert kept.x is not None
    earlier = read(Piece(kept.x, kept.mask, None, recorded.before, True, kept.rotary))
    assert earlier is not None
    return earlier.record()


def drop_newest(state: MixerState, tokens: int) -> MixerState:
    """Remove the last ``tokens`` tokens from a growing state (full softmax attention)."""
    if state.window is None or state.position is None:
        raise ValueError(f"cannot take {tokens} tokens back: the state holds none")
    held = state.window.mask.shape[1]
    if not 0 <= tokens <= held:
        raise ValueError(f"cannot take {tokens} tokens back: the state holds {held}")
    removed = state.window.mask[:, held - tokens :].sum(1)
    window = WindowState(*(x[:, : held - tokens] for x in state.window))
    sources = map_tensors(lambda x: x[:, : held - tokens], state.sources)
    return state._replace(position=state.position - removed, window=window, sources=sources)
