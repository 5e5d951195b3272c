"""What a mixer carries from one piece of a sequence to the next, and how to take tokens back.

Shape suffixes: B batch (or N packed sequences), S logged tokens, H query heads, G key/value
heads, L latents per head, K key width, D value width, F feature width, E hidden size, W window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from latte.ops import LatteState, latte_attention, linear_attention
from latte.ops.state import LinearState, WindowState
from latte.ops.window_state import final_window_state

T = TypeVar("T")


def map_tensors(fn: Callable[[Tensor], Tensor], state: T) -> T:
    """Apply ``fn`` to every tensor of a (nested, named) tuple; None stays None."""
    if isinstance(state, Tensor):
        return fn(state)  # type: ignore[return-value]
    if isinstance(state, tuple):
        return type(state)(*(map_tensors(fn, item) for item in state))
    return state


def real_tokens(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """The mask of real tokens of ``x`` (B, T, ...), (B, T) bool."""
    return x.new_ones(x.shape[:2], dtype=torch.bool) if key_mask is None else key_mask


class TokenLog(NamedTuple):
    """What each recorded token added to the state; a field is None if the mixer has no such part.

    Attributes:
        mask: (B, S) bool, True = a real token.
        k: latent key logits (B, S, H, L), or features phi(k) (B, S, H, F) for linear attention.
        v: values (B, S, G, D).
        local_k: keys of the window, after the position encoding, (B, S, G, K).
        rglru: the RG-LRU's state after each token, (B, S, E).
        conv: the convolution's inputs, (B, S, E).
    """

    mask: Tensor
    k: Tensor | None = None
    v: Tensor | None = None
    local_k: Tensor | None = None
    rglru: Tensor | None = None
    conv: Tensor | None = None


class UndoLog(NamedTuple):
    """The state before the first recorded token, and the recorded tokens themselves.

    A state cannot be un-added, but it can be rebuilt from an earlier one: the log grows over as
    many forwards as are run, and one merge over the tokens to keep gives the state back.
    """

    base: Any
    tokens: TokenLog | None = None

    def append(self, tokens: TokenLog) -> UndoLog:
        if self.tokens is None:
            return self._replace(tokens=tokens)
        old = self.tokens._asdict()
        new = {name: x for name, x in tokens._asdict().items() if x is not None}
        joined = {name: torch.cat([old[name], x], 1) for name, x in new.items()}
        return self._replace(tokens=TokenLog(**joined))


class MixerState(NamedTuple):
    """The state of one layer: constant in size, except for full softmax attention.

    Every tensor has the batch as its first dimension. Parts that a mixer does not use, and all
    parts before the first token, are None: ``MixerState()`` is the empty state.

    Attributes:
        position: (B,) int64, how many real tokens have been seen.
        latent: what the latents have seen.
        linear: the sums of undirected linear attention.
        window: the last W-1 local keys and values (all of them for full softmax attention).
        rglru: (B, E) fp32, the RG-LRU's state.
        conv: (B, K-1, E), the convolution's last inputs.
        pending: latent keys (B, W, H, L) and values of the last W tokens, where latents are fed
            only with tokens that have left the window.
        sinks: local keys and values of a sequence's first tokens, where those stay visible.
        undo: set to record tokens for :func:`rewind`.
    """

    position: Tensor | None = None
    latent: LatteState | None = None
    linear: LinearState | None = None
    window: WindowState | None = None
    rglru: Tensor | None = None
    conv: Tensor | None = None
    pending: WindowState | None = None
    sinks: WindowState | None = None
    undo: UndoLog | None = None

    @property
    def recording(self) -> bool:
        return self.undo is not None

    def record(self) -> MixerState:
        """This state, with an empty undo log that starts here."""
        return self._replace(undo=UndoLog(base=self._replace(undo=None)))


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
    """Take the last ``tokens`` tokens back; the result records on, with an empty log.

    Raises:
        ValueError: fewer tokens have been recorded than are to be removed.
    """
    undo = state.undo
    recorded = 0 if undo is None or undo.tokens is None else undo.tokens.mask.shape[1]
    if undo is None or not 0 <= tokens <= recorded:
        raise ValueError(
            f"cannot take {tokens} tokens back: {recorded} have been recorded since recording "
            "began or tokens were last taken back"
        )
    if tokens == 0:
        return state.record()
    if tokens == recorded or undo.tokens is None:
        return undo.base.record()
    kept = map_tensors(lambda x: x[:, : recorded - tokens], undo.tokens)
    return _replay(undo.base, kept, like=state).record()


def drop_newest(state: MixerState, tokens: int) -> MixerState:
    """Take the last ``tokens`` tokens of a growing state (full softmax attention) back."""
    if state.window is None or state.position is None:
        raise ValueError(f"cannot take {tokens} tokens back: the state holds none")
    held = state.window.mask.shape[1]
    if not 0 <= tokens <= held:
        raise ValueError(f"cannot take {tokens} tokens back: the state holds {held}")
    removed = state.window.mask[:, held - tokens :].sum(1)
    window = WindowState(*(x[:, : held - tokens] for x in state.window))
    return state._replace(position=state.position - removed, window=window)


def _replay(base: MixerState, log: TokenLog, like: MixerState) -> MixerState:
    """The state after ``base`` and the logged tokens; ``like`` tells which parts there are."""
    position = log.mask.sum(1) if base.position is None else base.position + log.mask.sum(1)
    window, rglru, conv = base.window, base.rglru, base.conv
    if like.window is not None and log.local_k is not None and log.v is not None:
        width = like.window.mask.shape[1] + 1
        window = final_window_state(log.local_k, log.v, width, log.mask, None, base.window)
    if log.rglru is not None:
        rglru = _last_real(log.rglru, log.mask, base.rglru)
    if like.conv is not None and log.conv is not None:
        start = torch.zeros_like(like.conv) if base.conv is None else base.conv
        inputs = torch.cat([start, log.conv * log.mask.unsqueeze(-1)], 1)
        conv = inputs[:, inputs.shape[1] - start.shape[1] :]
    latent, linear = base.latent, base.linear
    if log.k is not None and log.v is not None:
        # The queries do not matter for the state: any will do.
        if like.latent is not None:
            _, latent = latte_attention(
                torch.zeros_like(log.k),
                log.k,
                log.v,
                key_mask=log.mask,
                initial_state=base.latent,
                output_final_state=True,
            )
        if like.linear is not None:
            _, linear = linear_attention(
                torch.zeros_like(log.k),
                log.k,
                log.v,
                key_mask=log.mask,
                initial_state=base.linear,
                output_final_state=True,
            )
    return MixerState(position, latent, linear, window, rglru, conv)


def _last_real(h_BSE: Tensor, mask_BS: Tensor, base_BE: Tensor | None) -> Tensor:
    """The newest real row of ``h``, or the base where there is none."""
    h_BSE = h_BSE.float() if h_BSE.dtype in (torch.bfloat16, torch.float16) else h_BSE
    steps = torch.arange(1, mask_BS.shape[1] + 1, device=mask_BS.device)
    last_B = (mask_BS * steps).amax(1)
    rows = torch.arange(h_BSE.shape[0], device=h_BSE.device)
    newest = h_BSE[rows, (last_B - 1).clamp_min(0)]
    start = torch.zeros_like(newest) if base_BE is None else base_BE
    return torch.where((last_B > 0).unsqueeze(-1), newest, start)
