"""Text to ids, in bulk: exactly the text's own ids, whatever it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A document beyond this is encoded in pieces: the tokeniser's working memory is ~100 B a token.
PIECE_CHARACTERS = 4 << 20


def _pieces(text: str, limit: int) -> Iterator[str]:
    """Cut a very long text before line ends that follow a letter or digit, where byte-level
    pre-tokenisers cut too, so that the ids are those of the whole."""
    start = 0
    while len(text) - start > limit:
        end = start + limit
        cut = text.rfind("\n", start + limit // 2, end)
        while cut > 0 and not text[cut - 1].isalnum():
            cut = text.rfind("\n", start + limit // 2, cut)
        end = cut if cut > start else end
        yield text[start:end]
        start = end
    yield text[start:]


class Encoder:
    """text -> ids, exactly the text's: no specials added, none recognised within the text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        from latte.data.tokenizers import is_byte_tokenizer

        self._bytes = is_byte_tokenizer(tokenizer)
        self._slow = tokenizer
        self._fast: Any = None
        if not self._bytes and getattr(tokenizer, "backend_tokenizer", None) is not None:
            from tokenizers import Tokenizer

            self._fast = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
            self._fast.no_truncation()
            self._fast.no_padding()
            self._fast.encode_special_tokens = True

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text; a batch of texts is spread over the cores by the library."""
        if self._bytes:
            return [np.frombuffer(text.encode(), np.uint8) for text in texts]
        pieces = [list(_pieces(text, PIECE_CHARACTERS)) for text in texts]
        flat = [piece for document in pieces for piece in document]
        if self._fast is not None:
            encoded = self._fast.encode_batch_fast(flat, add_special_tokens=False)
            ids = [np.asarray(entry.ids, np.uint32) for entry in encoded]
        else:
            ids = [
                np.asarray(self._slow.encode(piece, add_special_tokens=False), np.uint32)
                for piece in flat
            ]
        result, start = [], 0
        for document in pieces:
            result.append(np.concatenate(ids[start : start + len(document)]))
            start += len(document)
        return result
