"""What a state keeps of single tokens: to take them back, and for weights over the past.

Shape suffixes: B batch, S tokens, T new tokens, H query heads, G key/value heads, L latents per
head, K key width, F feature width, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from latte.ops.state import WindowState

Tree = TypeVar("Tree")


def map_tensors(fn: Callable[[Tensor], Tensor], state: Tree) -> Tree:
    """Apply ``fn`` to every tensor of a (nested, named) tuple; None stays None."""
    if isinstance(state, Tensor):
        return fn(state)  # type: ignore[return-value]
    if isinstance(state, tuple):
        items = (map_tensors(fn, item) for item in state)
        return type(state)(*items) if hasattr(state, "_fields") else tuple(items)  # type: ignore
    return state


def joined(before: Tree, after: Tree) -> Tree:
    """The same (nested) tuple over the tokens of both, (B, S1 + S2, ...)."""
    if before is None or after is None:
        return after
    if isinstance(before, Tensor):
        return torch.cat([before, after], 1)  # type: ignore[return-value, list-item]
    pairs: Any = zip(before, after, strict=True)  # type: ignore[call-overload]
    parts = [joined(*pair) for pair in pairs]
    return type(before)(*parts) if hasattr(before, "_fields") else tuple(parts)  # type: ignore


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


class PastKeys(NamedTuple):
    """The keys of all tokens so far, for weights over the past.

    A field is None if the mixer has no such keys.

    Attributes:
        mask: Mask, (B, S) bool, True = a real token; None before the first token.
        k: Latent key logits (B, S, H, L), or features phi(k) (B, S, H, F) for linear attention.
        local_k: Keys of the window, after the position encoding, (B, S, G, K).
        log_decay: Log-decay of the latents, (B, S, H, L).
        scores: Scores of the tokens, of which some stay visible, (B, S, G).
    """

    mask: Tensor | None = None
    k: Tensor | None = None
    local_k: Tensor | None = None
    log_decay: Tensor | None = None
    scores: Tensor | None = None

    @property
    def length(self) -> int:
        """S, the number of tokens."""
        return 0 if self.mask is None else self.mask.shape[1]

    def and_then(self, projected: Any, mask: Tensor) -> PastKeys:
        """These keys, followed by those of later tokens."""
        k = projected.latent_k if projected.features is None else projected.features[1]
        late = projected.log_decay, projected.scores
        return joined(self, PastKeys(mask, k, projected.k, *late))


class Recorded(NamedTuple):
    """The state before the first recorded token, and what the layer was given for each token.

    A token cannot be subtracted from a state. To take tokens back, the layer reads the others
    again from the earlier state (:func:`rollback`).

    Attributes:
        before: State before the first recorded token, a :class:`latte.layers.MixerState`.
        x: Inputs of the layer, (B, S, E); None before the first token.
        mask: Mask, (B, S) bool, True = a real token.
        rotary: Rotary tables, (B, S, ...) each; None if the layer computes its own or has none.
    """

    before: Any
    x: Tensor | None = None
    mask: Tensor | None = None
    rotary: Any = None

    @property
    def length(self) -> int:
        """S, the number of recorded tokens."""
        return 0 if self.mask is None else self.mask.shape[1]

    def and_then(self, x: Tensor, mask: Tensor, rotary: Any) -> Recorded:
        """This record, with more tokens (B, T, E)."""
        rotary = map_tensors(lambda table: table.expand(len(x), *table.shape[1:]), rotary)
        tokens = joined((self.x, self.mask, self.rotary), (x, mask, rotary))
        return Recorded(self.before, *tokens)


def rollback(mixer: Any, state: Any, tokens: int) -> Any:
    """The state without the last ``tokens`` tokens. It goes on recording from there.

    Args:
        mixer: :class:`latte.layers.Mixer` that has read these tokens.
        state: State after tokens that were read from a state with :meth:`MixerState.record`.

    Raises:
        ValueError: Fewer tokens have been recorded than are to be taken back.
    """
    recorded = state.recorded
    check_recorded(recorded, tokens)
    if tokens == 0:
        return state.record()
    if tokens == recorded.length:
        return recorded.before.record()
    before, *given = recorded
    left = recorded.length - tokens
    x, mask, rotary = map_tensors(lambda table: table[:, :left], tuple(given))
    context = mixer._context_of(x, mask, None, True, before.position, rotary)
    projected = mixer._project(x, before, context)
    after = mixer._attend(x, projected, context)[1]
    return mixer._end(x, projected, after, context).record()


def check_recorded(recorded: Recorded | None, tokens: int) -> None:
    """Raise ValueError unless so many tokens have been recorded."""
    length = 0 if recorded is None else recorded.length
    if recorded is None or not 0 <= tokens <= length:
        raise ValueError(
            f"cannot take {tokens} tokens back: {length} have been recorded since recording "
            "began or tokens were last taken back"
        )


def drop_newest(state: Any, tokens: int) -> Any:
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
