"""The text to inspect: read, cut into tokens, and the tokens' labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from latte.data.files import read_documents, without_lone_surrogates
from latte.data.tokenizers import byte_alphabet, document_ends
from latte.errors import LatteError

# No tokeniser makes tokens of so many characters on average; longer texts are cut before.
CHARACTERS_PER_TOKEN = 64


def read_text(text: str | None, file: str | None) -> str:
    """The text given, or the first document of a file that is not blank.

    Raises:
        LatteError: neither or both are given, the file cannot be read, or there is no text.
    """
    if (text is None) == (file is None):
        raise LatteError(f"expected --text or --file, got {'neither' if text is None else 'both'}")
    if text is not None:
        if not text.strip():
            raise LatteError("--text: expected some text, got none")
        return without_lone_surrogates(text)  # bytes of the command line that are no UTF-8
    assert file is not None
    for document in read_documents(Path(file).expanduser()):
        if document.strip():
            return document
    raise LatteError(f"{file}: expected some text, found none")


def tokenize(tokenizer: Any, text: str, limit: int) -> list[int]:
    """The start token, as in training, and the text's first tokens: at most ``limit`` in all."""
    start, _ = document_ends(tokenizer)
    text = text[: CHARACTERS_PER_TOKEN * limit]
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return [start, *ids][:limit]


def labels(tokenizer: Any, ids: list[int]) -> list[str]:
    """What each token says; a token that is part of a character is shown by its bytes."""
    byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}
    found = []
    for number in ids:
        label = tokenizer.decode([number], clean_up_tokenization_spaces=False)
        if "\ufffd" in label:
            piece = tokenizer.convert_ids_to_tokens(number)
            if all(character in byte_of for character in piece):
                label = "".join(f"<{byte_of[character]:02X}>" for character in piece)
            else:
                label = piece
        found.append(label)
    return found
