"""What all the measurements read: texts as token ids, in a base's own form, and how far."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from latte.errors import LatteError
from latte.lab.data.files import file_digest, find_files, read_documents
from latte.lab.data.tokenizers import Encoder, document_ends
from latte.lab.evaluate.sides import named_path
from latte.lab.train.scoring import LOGIT_BYTES

CHARACTERS_A_TOKEN = 8  # first guess at how much of a text has so many tokens; more is taken


@dataclass(frozen=True)
class TextFiles:
    """Files of texts under the name that tables call them by.

    Attributes:
        join: documents are read one after another, each behind a start token, as one text.
        digest: of the files' content.
    """

    name: str
    files: tuple[Path, ...]
    join: bool
    digest: str

    def texts(
        self, tokenizer: Any, start: int, most: int, *, special_tokens: bool = False
    ) -> Iterator[tuple[str, np.ndarray]]:
        """(name, ids (T,) without the first start token) of each text, T <= most.

        The ids are those of the text alone: nothing in it is read as a special token, unless
        `special_tokens`. Joined documents make texts of `most` tokens; what remains at the end
        makes a shorter one.
        """
        encode = Encoder(tokenizer, special_tokens)
        held: list[np.ndarray] = []
        number, count = 0, 0
        for document in self.documents():
            ids = first_ids(encode, document, most)
            if not self.join:
                yield str(number), ids
                number += 1
                continue
            part = np.concatenate([[start], ids]) if held else ids
            held, count = [*held, part], count + len(part)
            if count >= most:
                yield str(number), np.concatenate(held)[:most]
                held, number, count = [], number + 1, 0
        if held:
            yield str(number), np.concatenate(held)

    def documents(self) -> Iterator[str]:
        """The documents that are not blank."""
        for file in self.files:
            yield from (text for text in read_documents(file) if text.strip())


def corpus(text: str) -> TextFiles:
    """A corpus of `NAME=FILES[,join=true]`. Raises LatteError if there is none."""
    name, path, options = named_path(text)
    join = options.pop("join", False)
    if options or not isinstance(join, bool):
        raise LatteError(f"--text: expected NAME=FILES or NAME=FILES,join=true, got {text!r}")
    files = tuple(find_files(path))
    return TextFiles(name, files, join, "+".join(file_digest(file)[:12] for file in files))


def first_ids(encode: Encoder, text: str, most: int) -> np.ndarray:
    """The first ids (T,) int64 of a text, T <= most, without encoding all of a long one."""
    size = CHARACTERS_A_TOKEN * most
    while True:
        ids = encode([text[:size]])[0].astype(np.int64)
        # Where a text is cut, its last tokens are others than they would be.
        if len(text) <= size or len(ids) > most + 16:
            return ids[:most]
        size *= 2


def start_token(tokenizer: Any, named: str | None = None) -> int:
    """The id that documents begin with: of the token that is named, else the tokeniser's own."""
    if named is None:
        return document_ends(tokenizer)[0]
    index = tokenizer.get_vocab().get(named)
    if index is None:
        raise LatteError(f"--start: the tokenizer has no token {named!r}")
    return int(index)


def segment_of(model: Any, segment: int) -> int:
    """Tokens to read at a time: `segment`, or fewer where a large vocabulary's logits are many."""
    return max(1, min(segment, LOGIT_BYTES // (4 * model.config.vocab_size)))
