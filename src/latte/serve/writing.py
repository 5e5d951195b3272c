"""The text of an answer, from its tokens: piece by piece, without the stop string, and its end.

A stream and a whole answer are made by the same :class:`Writer`, so they have the same text.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from latte.lab.data.tokenizers import REPLACEMENT, token_bytes
from latte.serve.sampling import TokenScore

WINDOW = 16  # number of tokens that are decoded together
NAMES = 2**16  # largest number of tokens whose names are remembered


class Words:
    """The tokens of a tokenizer, each as a text.

    Attributes:
        special: Texts of the special tokens, by their ids. They are no part of an answer's text.
    """

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.added_tokens_decoder.items()
        self.special = {index: token.content for index, token in added if token.special}
        self._decode = tokenizer.backend_tokenizer.decode
        self.bytes = lru_cache(NAMES)(partial(token_bytes, tokenizer))
        self.name = lru_cache(NAMES)(self._name)

    def text(self, ids: Sequence[int]) -> str:
        """The text of these tokens, without special ones."""
        return self._decode(ids, skip_special_tokens=True)

    def _name(self, token: int) -> str:
        r"""A token's text. Where that is part of a character, ``bytes:\xe2\x82``, as in the API."""
        text = self._decode([token], skip_special_tokens=False)
        raw = self.bytes(token) if REPLACEMENT in text else None
        return text if raw is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class Spelling:
    """Tokens as text, one after the other.

    A token can be a part of a character. Text is given when its characters are whole. All texts
    together are what the tokenizer makes of all tokens.
    """

    def __init__(self, words: Words) -> None:
        self._words = words
        self._ids: list[int] = []  # the last tokens: what a token says can depend on those before
        self._text = ""  # their text
        self._told = 0  # number of its characters that were given
        self._read = 0  # number of these tokens when a text was last given
        self._before = 0  # number of characters before this text
        self._part = b""  # beginning of a character that is not whole
        self._begin = 0  # number of characters before that one

    def add(self, token: int) -> tuple[str, int]:
        """Text that is whole with this token, and the number of characters before the token."""
        offset = self._begin if self._part else self._before + len(self._text)
        if token in self._words.special:
            return "", offset
        self._ids.append(token)
        text = self._words.text(self._ids)
        if self._part or text.endswith(REPLACEMENT):
            raw = self._words.bytes(token) or b""
            if not 0x80 <= (raw or b"\0")[0] < 0xC0:  # it does not go on with a character
                offset = self._before + len(self._text)
            self._part = _unfinished(self._part + raw)
            if self._part.endswith(raw):
                self._begin = offset
            else:
                self._begin = self._before + len(text) - 1
        self._text = text
        if self._part and len(self._ids) - self._read < WINDOW:
            return "", offset
        return self.rest(), offset

    def rest(self) -> str:
        """Text that was not given yet, such as a replacement of half a character."""
        text = self._text[self._told :]
        if len(self._ids) >= WINDOW:
            self._ids = self._ids[self._read or -1 :]
            shorter = self._words.text(self._ids)
            self._before += len(self._text) - len(shorter)
            self._text = shorter
        self._read, self._told = len(self._ids), len(self._text)
        return text


def _unfinished(raw: bytes) -> bytes:
    """The last bytes that are the beginning of a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(raw)
    return decoder.getstate()[0]


class Scored(NamedTuple):
    """A token with its probability, and the number of characters of the text before it."""

    offset: int
    score: TokenScore


class Piece(NamedTuple):
    """Text that follows in an answer, and the tokens that begin in it, if these are wanted."""

    text: str
    scored: list[Scored]


class Writer:
    """Makes the text of one answer.

    Text that may be the beginning of a stop string is held back. A stop string may have special
    tokens in it, such as the mark at the end of a message.

    Args:
        words: Tokens as texts.
        most: Largest number of tokens.
        ends: Tokens that end an answer.
        stops: Strings that end an answer. They are no part of it.

    Attributes:
        most: Largest number of tokens.
        reason: "stop" for the end by an end token or a stop string, "length" for the end by the
            number of tokens, None while the answer goes on.
        length: Number of characters that were given so far.
        tokens: Number of tokens so far, with the end token and those of the stop string.
        logprob: Sum of the logarithms of their probabilities, of tokens that have a score.
    """

    def __init__(
        self, words: Words, most: int, ends: Collection[int] = (), stops: Sequence[str] = ()
    ) -> None:
        self._words, self.most, self._ends, self._stops = words, most, ends, stops
        self._spelling = Spelling(words)
        # Characters that are held back. Those of special tokens are not shown.
        self._held: list[tuple[str, bool]] = []
        self._scored: list[Scored] = []
        self._longest = max(map(len, stops), default=0)
        self.reason = "length" if most == 0 else None
        self.length, self.tokens, self.logprob = 0, 0, 0.0

    def put(self, token: int, score: TokenScore | None = None) -> Piece:
        """Add a token. Gives what can be told now."""
        self.tokens += 1
        ends = token in self._ends
        if score is not None and score.logprob is not None:
            self.logprob += score.logprob
        if not ends:
            text, offset = self._spelling.add(token)
            special = self._words.special.get(token)
            self._hold(text if special is None else special, special is None)
            if score is not None:
                self._scored.append(Scored(offset, score))
        if self._stopped():
            return self._give(len(self._held), cut=True)
        if ends or self.tokens >= self.most:
            self._hold(self._spelling.rest(), True)
            stopped = self._stopped()
            self.reason = "stop" if ends or stopped else "length"
            return self._give(len(self._held), cut=stopped)
        return self._give(len(self._held) - self._overlap())

    def _hold(self, text: str, shown: bool) -> None:
        self._held += [(character, shown) for character in text]

    def _stopped(self) -> bool:
        """Whether a stop string is in the held text. It and the text after it are then removed.

        The one that ends first counts, so it does not matter how the text is cut into tokens.
        """
        if not self._stops or not self._held:
            return False
        text = "".join(character for character, _ in self._held)
        found = [(text.find(stop), len(stop)) for stop in self._stops]
        places = [(begin + length, begin) for begin, length in found if begin >= 0]
        if not places:
            return False
        del self._held[min(places)[1] :]
        self.reason = "stop"
        return True

    def _overlap(self) -> int:
        """Number of characters at the end that may be the beginning of a stop string."""
        longest = min(self._longest - 1, len(self._held))
        if longest <= 0:
            return 0
        text = "".join(character for character, _ in self._held[-longest:])
        for begin in range(longest):
            if any(stop.startswith(text[begin:]) for stop in self._stops):
                return longest - begin
        return 0

    def _give(self, count: int, cut: bool = False) -> Piece:
        """The first ``count`` characters of the held text, with the tokens that begin in them.

        At the end of an answer all tokens are given, but not those of a stop string.
        """
        text = "".join(character for character, shown in self._held[:count] if shown)
        del self._held[:count]
        self.length += len(text)
        if self.reason is not None and not cut:
            ready = len(self._scored)
        else:
            later = (i for i, one in enumerate(self._scored) if one.offset >= self.length)
            ready = next(later, len(self._scored))
        scored, self._scored = self._scored[:ready], self._scored[ready:]
        return Piece(text, scored)
