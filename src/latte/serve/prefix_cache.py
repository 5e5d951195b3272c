"""A store of states, bounded in bytes, so that no text is read twice.

After a model of Latte has read a text, it has a state: some tensors, whose size does not depend on
the length of the text. A later request may send the same text with more text after it, as a chat
does at every turn. It then needs only that state and the new tokens.

**How a text is read.** It is read in pieces, one forward each. A piece ends at the next multiple of
``piece`` tokens, or at a place where requests branch, such as the end of a message
(:func:`pieces_of`). The last bits of a state depend on where its pieces end. So the name of a state
is a hash of all pieces before it: each piece is hashed with the name of the one before. The name
says which tokens were read, and in which pieces.

    pieces     | system prompt | the user's document, first 512 | ... | question |
    names      h1 = H(h0, piece)  h2 = H(h1, piece)              ...

**How it is found again.** The pieces of a new prompt have names too. Reading begins after the last
piece whose name is in the store. Its tokens are also compared one by one. A prompt is cut in the
same places whatever the store holds, and the state is the same to the bit. So an answer is the same
with and without the store.

The store holds copies on the CPU, and returns copies. The least recently used state is removed
first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from latte import __version__
from latte.layers.state import MixerState, map_tensors
from latte.models.cache import LatteCache, tensors_in
from latte.models.state_file import fingerprint

Ids = np.ndarray  # (T,) int32
States = tuple[MixerState, ...]
NAME = 24  # number of bytes of a name


class PromptPiece(NamedTuple):
    """Tokens of one forward, up to ``end``. ``name`` is the name of the state after them.

    ``branches`` says whether other requests are likely to continue from here.
    """

    end: int
    name: bytes
    branches: bool


def pieces_of(
    ids: Ids, root: bytes, piece: int, marks: Collection[int] = (), every: int | None = None
) -> list[PromptPiece]:
    """The places where the pieces of a text end, the text's end included.

    Args:
        ids: Ids of all tokens to be read.
        root: Identity of the model, from which the first name is made.
        piece: Largest number of tokens that one forward reads.
        marks: Places where requests branch, as numbers of tokens before them. If a client marks
            none, the last multiple of ``piece`` is one, because a longer text is cut there too.
        every: Number of tokens. Each multiple of it is such a place too.
    """
    length = len(ids)
    grid = range(piece, length + 1, piece)
    branches = {mark for mark in marks if 0 < mark < length} or set(grid[-1:])
    branches |= {length} if length else set()
    name, begin, found = root, 0, []
    for end in sorted(branches | set(grid)):
        name = hashlib.blake2b(name + ids[begin:end].tobytes(), digest_size=NAME).digest()
        found.append(
            PromptPiece(end, name, end in branches or (every is not None and end % every == 0))
        )
        begin = end
    return found


def root_of(model: Any) -> bytes:
    """A hash of all that this model's states depend on: weights, configuration, versions."""
    about = f"{fingerprint(model)} {__version__} {torch.__version__}"
    return hashlib.blake2b(about.encode(), digest_size=NAME).digest()


class Kept(NamedTuple):
    """A state on the CPU, and the tokens that it has read."""

    states: States
    ids: Ids

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + sum(x.numel() * x.element_size() for x in tensors_in(self.states))

    @classmethod
    def of(cls, cache: LatteCache, ids: Ids) -> Kept:
        """The cache's contents after these tokens.

        On a CPU its tensors are shared with the cache. No one writes to them: reading makes new
        ones, and steps of decoding have buffers of their own.
        """
        states = (map_tensors(_to_cpu, layer.state) for layer in cache.layers)
        return cls(tuple(states), ids.copy())

    def on_cpu(self, decoder: Any) -> LatteCache:
        """A cache of the decoder with these tensors, to be saved."""
        cache = LatteCache(decoder.config)
        for layer, state in zip(cache.layers, self.states, strict=True):
            layer.update(state, len(self.ids))
        cache.filled_by(decoder)  # a state file needs to know the model
        return cache

    def fill(self, cache: LatteCache, decoder: Any) -> None:
        """Put the contents into a new cache of the decoder. On a CPU the tensors are shared."""
        for layer, module, state in zip(cache.layers, decoder.layers, self.states, strict=True):
            to_device = partial(torch.Tensor.to, device=next(module.parameters()).device)
            layer.update(map_tensors(to_device, state), len(self.ids))
        cache.filled_by(decoder)


def _to_cpu(x: Tensor) -> Tensor:
    # Contiguous, so that no larger tensor, of which this is a part, stays in memory.
    own = x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes
    return x.detach().to("cpu") if own else x.detach().to("cpu", copy=True).contiguous()


class Slower(Protocol):
    """A second place where states are kept, such as a disk."""

    def get(self, name: bytes, ids: Ids) -> Kept | None: ...
    def put(self, name: bytes, kept: Kept) -> None: ...


class StateStore:
    """States by name, at most ``room`` bytes. The least recently used is removed first.

    Only one thread may use it, the one that reads texts.

    Args:
        room: Largest number of bytes of tensors and tokens. A larger state is not kept.
        slower: Second store. States that are not here are looked up in it, and all states that
            are kept here are given to it.
    """

    def __init__(self, room: int, slower: Slower | None = None) -> None:
        self.room, self.slower = room, slower
        self.nbytes = 0
        self.too_large = 0  # number of states that were not kept
        self._kept: OrderedDict[bytes, Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def longest(self, pieces: Sequence[PromptPiece], ids: Ids) -> tuple[int, Kept | None]:
        """Number of the pieces that have been read before, and the state after them."""
        for count in range(len(pieces), 0, -1):
            kept = self.get(pieces[count - 1].name, ids[: pieces[count - 1].end])
            if kept is not None:
                return count, kept
        return 0, None

    def get(self, name: bytes, ids: Ids) -> Kept | None:
        """The state of this name, if it has read these tokens."""
        kept = self._kept.get(name)
        if kept is None and self.slower is not None:
            kept = self.slower.get(name, ids)
            if kept is not None:
                self._keep(name, kept)
        if kept is None or not np.array_equal(kept.ids, ids):
            return None
        if name in self._kept:
            self._kept.move_to_end(name)
        return kept

    def put(self, name: bytes, cache: LatteCache, ids: Ids) -> None:
        """Keep a copy of the state that has read these tokens."""
        if name in self._kept:
            self._kept.move_to_end(name)
            return
        # This is checked before anything is copied, because a state that grows may be large.
        if cache.nbytes + ids.nbytes > self.room:
            self.too_large += 1
            return
        kept = Kept.of(cache, ids)
        self._keep(name, kept)
        if self.slower is not None:
            self.slower.put(name, kept)

    def _keep(self, name: bytes, kept: Kept) -> None:
        if kept.nbytes > self.room:
            return
        self._kept[name] = kept
        self.nbytes += kept.nbytes
        while self.nbytes > self.room:
            _, gone = self._kept.popitem(last=False)
            self.nbytes -= gone.nbytes
