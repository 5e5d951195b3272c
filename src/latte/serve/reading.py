"""Reads a prompt in pieces, and starts after the longest beginning that was read before.

    reading = reader.begin(ids, marks)
    while reading.left:
        reading.read()           # one forward over one piece
    reading.cache                # has read all tokens

During reading, states are kept where other requests are likely to branch
(:mod:`latte.serve.prefix_cache`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from latte.layers.state import map_tensors
from latte.models.cache import LatteCache
from latte.serve.prefix_cache import Ids, PromptPiece, StateStore, pieces_of, root_of
from latte.serve.sampling import TokenScore, scores_of

SCORED = 128  # number of tokens whose probabilities are computed together, each of a vocabulary
EVERY = 4096  # number of tokens of a long text after which a state is kept


class Reader:
    """Reads prompts with one model, from one thread.

    Args:
        model: Language model whose cache is a :class:`LatteCache`.
        piece: Largest number of tokens that one forward reads.
        store: Kept states, from which reading continues. By default nothing is kept.
        new_cache: Function that makes an empty cache.
    """

    def __init__(
        self,
        model: Any,
        piece: int,
        store: StateStore | None = None,
        new_cache: Callable[[], LatteCache] | None = None,
    ) -> None:
        self.model, self.piece = model, piece
        self.store = StateStore(0) if store is None else store
        self.new_cache = new_cache or (lambda: LatteCache(model.config))
        layers = range(model.config.num_hidden_layers)
        # A state that grows is large. It is kept only at ends of messages and prompts.
        grows = any(model.config.state_grows(index) for index in layers)
        self._every = None if grows else max(1, EVERY // piece) * piece
        self._root = root_of(model)

    def pieces(self, ids: Ids, marks: Collection[int]) -> list[PromptPiece]:
        return pieces_of(ids, self._root, self.piece, marks, self._every)

    def begin(
        self,
        ids: Ids,
        marks: Collection[int] = (),
        *,
        most: int | None = None,
        scored: Scoring | None = None,
    ) -> Reading:
        """Begin to read tokens (T,), after those that have been read before.

        Args:
            marks: Numbers of tokens after which other requests are likely to branch.
            most: Largest number of tokens left to read. If there are more, none are read.
            scored: Tokens whose probabilities are wanted. Then all tokens are read anew.
        """
        pieces = self.pieces(ids, marks)
        if scored is not None:
            return Reading(self, ids, pieces, self.new_cache(), 0, scored)
        done, kept = self.store.longest(pieces, ids)
        reused = pieces[done - 1].end if done else 0
        if most is not None and len(ids) - reused > most:
            return Reading(self, ids, [], LatteCache(self.model.config), 0)
        cache = self.new_cache()
        if kept is not None:
            kept.fill(cache, self.model.get_decoder())
        return Reading(self, ids, pieces[done:], cache, reused)


class Scoring(NamedTuple):
    """The probabilities of a prompt's tokens.

    Attributes:
        following: For each token that is read, the one after it, (T,).
        most_likely: Number of most likely tokens that are given with each of them.
        scores: Scores of the tokens that follow those read so far.
    """

    following: Ids
    most_likely: int
    scores: list[TokenScore]


class Reading:
    """A prompt that is being read.

    Attributes:
        cache: Cache that has read the tokens before ``at``.
        left: Pieces still to be read.
        reused: Number of tokens that had been read before.
    """

    def __init__(
        self,
        reader: Reader,
        ids: Ids,
        left: list[PromptPiece],
        cache: LatteCache,
        reused: int,
        scored: Scoring | None = None,
    ) -> None:
        self._reader, self._ids, self._scored = reader, ids, scored
        self.left, self.cache, self.reused, self.at = left, cache, reused, reused

    @torch.no_grad()
    def read(self) -> int:
        """Read the next piece; returns its number of tokens."""
        piece, model, store = self.left[0], self._reader.model, self._reader.store
        tokens = torch.from_numpy(self._ids[self.at : piece.end].astype("int64"))[None]
        reads = model.get_decoder() if self._scored is None else model
        read_BT = reads(tokens.to(model.device), past_key_values=self.cache, use_cache=True)
        if self._scored is not None:
            self._score(self._scored, read_BT.logits[0])
        read, self.at = piece.end - self.at, piece.end
        del self.left[0]
        # The memory layout is that of a kept state in any case, because the last bits depend on it.
        for layer in self.cache.layers:
            layer.state = map_tensors(_laid_out, layer.state)
        if piece.branches:
            store.put(piece.name, self.cache, self._ids[: piece.end])
        return read

    def _score(self, scored: Scoring, logits_TV: Tensor) -> None:
        for begin in range(0, len(logits_TV), SCORED):
            part_TV = logits_TV[begin : begin + SCORED]
            at = self.at + begin
            following = scored.following[at : at + len(part_TV)].tolist()
            scored.scores.extend(scores_of(part_TV, following, scored.most_likely))


def _laid_out(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)
