"""A piece of a batch of sequences, the state between pieces, and how to remove tokens from it.

Shape suffixes: B batch (or N packed sequences), S logged tokens, H query heads, G key/value
heads, L latents per head, K key width, D value width, F feature width, E hidden size, W window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from latte.layers.across import ShardedOps, across
from latte.layers.parts import Rotary
from latte.ops import LatteState, latte_attention, linear_attention
from latte.ops.state import LinearState, MacchiatoState, WindowState, final_window_state

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


class TokenLog(NamedTuple):
    """The contribution of each recorded token to the state.

    A field is None if the mixer has no such part.

    Attributes:
        mask: Mask, (B, S) bool, True = a real token; None before the first token.
        k: Latent key logits (B, S, H, L), or features phi(k) (B, S, H, F) for linear attention.
        v: Values, (B, S, G, D).
        local_k: Keys of the window, after the position encoding, (B, S, G, K).
        rglru: State of the RG-LRU after each token, (B, S, E).
        conv: Inputs of the convolution, (B, S, E).
        short_conv: Inputs of the convolution of q, k and v, (B, S, C).
        own: State of a mixer of another kind after each token, (B, S, ...).
        log_decay: Log-decay of the latents, (B, S, H, L).
    """

    mask: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    local_k: Tensor | None = None
    rglru: Tensor | None = None
    conv: Tensor | None = None
    short_conv: Tensor | None = None
    own: Tensor | None = None
    log_decay: Tensor | None = None

    @property
    def length(self) -> int:
        """S, the number of tokens."""
        return 0 if self.mask is None else self.mask.shape[1]

    def append(self, tokens: TokenLog) -> TokenLog:
        """The log of these tokens followed by ``tokens``."""
        if self.mask is None:
            return tokens
        pairs: Any = zip(self, tokens, strict=True)
        return TokenLog(*(None if x is None else torch.cat([old, x], 1) for old, x in pairs))

    def first(self, tokens: int) -> TokenLog:
        """The log of the first ``tokens`` tokens."""
        return map_tensors(lambda x: x[:, :tokens], self)


class UndoLog(NamedTuple):
    """The state before the first recorded token, and the recorded tokens themselves.

    A token cannot be subtracted from a state. Instead the state is rebuilt from the earlier one:
    the log holds the tokens of all calls since, and the tokens to keep are read again, at once.
    """

    base: Any
    tokens: TokenLog = TokenLog()

    def append(self, tokens: TokenLog) -> UndoLog:
        return self._replace(tokens=self.tokens.append(tokens))


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
        undo: Log of recorded tokens for :func:`rewind`, if set.
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
    sources: TokenLog | None = None
    undo: UndoLog | None = None
    shards: ShardedOps | None = None

    @property
    def recording(self) -> bool:
        return self.undo is not None

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
        """This state, with an empty undo log that starts here."""
        return self._replace(undo=UndoLog(base=self._replace(undo=None)))


class Piece(NamedTuple):
    """The next tokens of a batch of sequences: all that a mixer's methods are given.

    Attributes:
        x: Inputs of the tokens, (B, T, E).
        key_mask: Mask, (B, T) bool, True = a real token.
        cu_seqlens: Bounds of N sequences packed into one row (B = 1), (N+1,) int32.
        state: State after the piece before.
        output_final_state: Whether to return the state after this piece.
        rotary: Rotary table of these tokens, if the model shares one among its layers.
    """

    x: Tensor
    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    state: MixerState = MixerState()
    output_final_state: bool = False
    rotary: Rotary | None = None

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

    def end(self, after: MixerState, log: TokenLog) -> MixerState | None:
        """The whole state after these tokens, from the parts they changed; None if not wanted.

        Args:
            after: Changed parts, without position and undo log.
            log: Contribution of each token, without the mask. It is kept if tokens are recorded.
        """
        if not self.output_final_state:
            return None
        state, sources, undo = self.state, self.state.sources, self.state.undo
        if sources is not None:
            parts = {"k": log.k, "local_k": log.local_k, "log_decay": log.log_decay}
            sources = sources.append(TokenLog(self.real, **parts))
        if undo is not None:
            undo = undo.append(log._replace(mask=self.real))
        position = advance_position(state.position, self.key_mask, self.cu_seqlens, self.x)
        latent = _without_decay(after.latent)
        return after._replace(position=position, latent=latent, sources=sources, undo=undo)


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


def rewind(state: MixerState, tokens: int) -> MixerState:
    """Remove the last ``tokens`` tokens. The result keeps recording, with an empty log.

    Raises:
        ValueError: Fewer tokens have been recorded than are to be removed.
    """
    undo = state.undo
    recorded = 0 if undo is None else undo.tokens.length
    if undo is None or not 0 <= tokens <= recorded:
        raise ValueError(
            f"cannot take {tokens} tokens back: {recorded} have been recorded since recording "
            "began or tokens were last taken back"
        )
    if tokens == 0:
        return state.record()
    if tokens == recorded:
        return undo.base.record()
    earlier = _replay(undo.base, undo.tokens.first(recorded - tokens), like=state)
    return earlier._replace(sources=_without_last(state.sources, tokens)).record()


def drop_newest(state: MixerState, tokens: int) -> MixerState:
    """Remove the last ``tokens`` tokens from a growing state (full softmax attention)."""
    if state.window is None or state.position is None:
        raise ValueError(f"cannot take {tokens} tokens back: the state holds none")
    held = state.window.mask.shape[1]
    if not 0 <= tokens <= held:
        raise ValueError(f"cannot take {tokens} tokens back: the state holds {held}")
    removed = state.window.mask[:, held - tokens :].sum(1)
    window = WindowState(*(x[:, : held - tokens] for x in state.window))
    sources = _without_last(state.sources, tokens)
    return state._replace(position=state.position - removed, window=window, sources=sources)


def _without_last(log: TokenLog | None, tokens: int) -> TokenLog | None:
    return None if log is None else log.first(log.length - tokens)


def _replay(base: MixerState, log: TokenLog, like: MixerState) -> MixerState:
    """The state after ``base`` and the logged tokens, with the parts that ``like`` has."""
    mask = log.mask
    assert mask is not None
    position = mask.sum(1) if base.position is None else base.position + mask.sum(1)
    latent, linear, window = base.latent, base.linear, base.window
    if like.window is not None and log.local_k is not None and log.v is not None:
        width = like.window.mask.shape[1] + 1
        window = final_window_state(log.local_k, log.v, width, mask, None, base.window)
    conv, short_conv = (
        before if after is None or inputs is None else _last_inputs(inputs, mask, before, after)
        for inputs, before, after in (
            (log.conv, base.conv, like.conv),
            (log.short_conv, base.short_conv, like.short_conv),
        )
    )
    if log.k is not None and log.v is not None:
        # The state does not depend on the queries, so they can be zeros.
        q, k, v = torch.zeros_like(log.k), log.k, log.v
        options: dict[str, Any] = {"key_mask": mask, "output_final_state": True}
        if like.latent is not None:
            before: dict[str, Any] = {"initial_state": base.latent, "log_decay": log.log_decay}
            latent = _without_decay(latte_attention(q, k, v, **before, **options)[1])
        if like.linear is not None:
            _, linear = linear_attention(q, k, v.to(k.dtype), initial_state=base.linear, **options)
    rglru, own = (
        before if after is None else _last_real(after, mask, before)
        for after, before in ((log.rglru, base.rglru), (log.own, base.own))
    )
    return MixerState(position, latent, linear, window, rglru, conv, short_conv, own)


def _last_inputs(inputs: Tensor, mask: Tensor, base: Tensor | None, like: Tensor) -> Tensor:
    """The last inputs of a convolution (B, K-1, C), as many as ``like`` has, after the base's."""
    start = torch.zeros_like(like) if base is None else base
    inputs = torch.cat([start, inputs * mask.unsqueeze(-1)], 1)
    return inputs[:, inputs.shape[1] - start.shape[1] :]


def _last_real(h_BS: Tensor, mask_BS: Tensor, base_B: Tensor | None) -> Tensor:
    """The last real entry of ``h`` (B, S, ...) in each row, or the base if there is none."""
    h_BS = h_BS.float() if h_BS.dtype in (torch.bfloat16, torch.float16) else h_BS
    steps = torch.arange(1, mask_BS.shape[1] + 1, device=mask_BS.device)
    last_B = (mask_BS * steps).amax(1)
    rows = torch.arange(h_BS.shape[0], device=h_BS.device)
    newest = h_BS[rows, (last_B - 1).clamp_min(0)]
    start = torch.zeros_like(newest) if base_B is None else base_B
    some = (last_B > 0).view(-1, *[1] * (newest.ndim - 1))
    return torch.where(some, newest, start)
