"""Tokenisers: bytes, a trained byte-level BPE, or any Hugging Face tokeniser.

All of them are Hugging Face fast tokenisers. ``save_pretrained`` writes them, and
``AutoTokenizer.from_pretrained`` loads them unchanged.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from latte.conversion.gguf import gguf_at, gguf_tokenizer, open_gguf
from latte.errors import LatteError
from latte.lab.progress import progress as show_progress
from latte.models.hub import check_files, hub_options, reason, unreachable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

REPLACEMENT = "\ufffd"  # what decoding gives in place of bytes that are no character
EOS, BOS, PAD = "<|endoftext|>", "<|startoftext|>", "<|pad|>"


@cache
def byte_alphabet() -> tuple[str, ...]:
    """GPT-2's printable stand-in for each byte: ``byte_alphabet()[b]`` is one character."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return tuple(character for _, character in sorted(bytes_to_unicode().items()))


def _backend(use_regex: bool, **model: Any) -> Any:
    """A byte-level BPE; with `use_regex` GPT-2's pre-tokeniser."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    backend = Tokenizer(models.BPE(**model))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    backend.decoder = decoders.ByteLevel()
    return backend


def _wrapped(backend: Any) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS,
        bos_token=BOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        # "<|endoftext|>" within a text is encoded as text, so it cannot end a document.
        split_special_tokens=True,
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokeniser of bytes: id b is byte b, then eos = 256, bos = 257, pad = 258. Lossless."""
    vocabulary = {character: byte for byte, character in enumerate(byte_alphabet())}
    backend = _backend(use_regex=False, vocab=vocabulary, merges=[])
    backend.add_special_tokens([EOS, BOS, PAD])
    return _wrapped(backend)


def train_bpe(
    documents: Iterable[str],
    vocab_size: int,
    *,
    min_frequency: int = 2,
    total_bytes: int | None = None,
    progress: bool = True,
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE (GPT-2's pre-tokeniser) of exactly ``vocab_size`` entries.

    Ids 0, 1, 2 are eos, bos, pad. All 256 bytes are entries, so any text round-trips. The same
    documents give the same tokeniser. ``total_bytes`` only scales the progress bar.
    """
    from tokenizers import trainers

    if vocab_size < 256 + 3:
        raise LatteError(f"vocab_size must be at least 259 (256 bytes, 3 specials): {vocab_size}")
    backend = _backend(use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[EOS, BOS, PAD],
        initial_alphabet=list(byte_alphabet()),
        show_progress=False,
    )
    with show_progress(total_bytes or 0, "byte", shown=progress) as state:
        state.describe("Training BPE: counting words")

        def counted() -> Iterator[str]:
            for text in documents:
                state.update(len(text.encode()))
                yield text
            state.describe("Training BPE: merging")

        backend.train_from_iterator(counted(), trainer)
        state.describe("Training BPE: done")
    size = backend.get_vocab_size()
    if size != vocab_size:
        raise LatteError(
            f"the text is too small for a vocabulary of {vocab_size}: only {size} entries occur at "
            f"least {min_frequency} times in {state.done:,} bytes"
        )
    return _wrapped(backend)


def load_tokenizer(spec: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Load ``"byte"``, a folder with a tokeniser, a GGUF file, or a name on the Hub ("gpt2").

    Raises:
        LatteError: The tokeniser cannot be loaded, or has no end-of-text token, which documents
            need.
    """
    name = os.fspath(spec)
    if name == "byte":
        return byte_tokenizer()
    from transformers import AutoTokenizer

    path = Path(name).expanduser()
    if name.startswith((".", "/", "~")) and not path.exists():
        raise LatteError(f"tokenizer {name}: no such folder")
    file = gguf_at(path)
    if file is not None:
        tokenizer = gguf_tokenizer(open_gguf(file))
        document_ends(tokenizer)
        return tokenizer
    try:
        place = str(path) if path.is_dir() else name
        if path.is_dir():
            check_files(path)
        tokenizer = AutoTokenizer.from_pretrained(place, **hub_options(place))
    except LatteError as error:
        raise LatteError(f"tokenizer {name}: {error}") from None
    # The hub, the network and every tokeniser class raise their own errors. All mean a failure.
    except Exception as error:
        why = unreachable(place) or reason(error)
        raise LatteError(
            f"tokenizer {name}: expected 'byte', a folder or a Hugging Face name: {why}"
        ) from error
    document_ends(tokenizer)
    return tokenizer


def document_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """The ids that open and close a document. Without a bos, the eos opens it too."""
    eos = tokenizer.eos_token_id
    if eos is None:
        raise LatteError(
            f"the tokenizer {tokenizer.name_or_path or type(tokenizer).__name__} has no eos token, "
            "which documents end with: set tokenizer.eos_token"
        )
    bos = tokenizer.bos_token_id
    return (eos if bos is None else bos), eos


def model_vocab_size(
    tokenizer: PreTrainedTokenizerBase, *, multiple_of: int = 1, at_least: int = 0
) -> int:
    """Number of rows that a model's embedding needs: all ids, rounded up to a multiple.

    ``at_least=50267`` gives the paper's vocabulary with GPT-2's tokeniser (50257 ids).
    """
    if multiple_of < 1:
        raise LatteError(f"multiple_of must be at least 1, got {multiple_of}")
    largest = max(tokenizer.get_vocab().values(), default=-1)
    needed = max(len(tokenizer), largest + 1, at_least)
    return -(-needed // multiple_of) * multiple_of


def check_fits(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raise LatteError if a tokenizer can produce ids beyond a model's embeddings.

    Special tokens that no text produces may have larger ids. Gemma 3's text models have one, for
    images.
    """
    marks = {index for index, added in tokenizer.added_tokens_decoder.items() if added.special}
    used = [i for i in tokenizer.get_vocab().values() if i not in marks]
    used += [i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None]
    largest = max(used, default=-1)
    if largest >= vocab_size:
        raise LatteError(
            f"its tokenizer has token ids up to {largest}, but the model's vocabulary has"
            f" {vocab_size:,} entries: it is not the tokenizer that the model was trained with"
        )


def _backend_json(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    description = json.loads(backend.to_str())
    # Set by calls such as tokenizer(..., padding=True); they are not part of the tokeniser.
    description["truncation"] = description["padding"] = None
    return description


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of everything that decides the ids of a document."""
    what = _backend_json(tokenizer)
    if what is None:
        what = {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab()}
    what["document_ends"] = document_ends(tokenizer)
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def is_byte_tokenizer(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether each text is encoded as its UTF-8 bytes, id b for byte b."""
    what = _backend_json(tokenizer)
    if what is None or what["normalizer"] is not None or what["model"].get("merges") != []:
        return False
    vocabulary = what["model"]["vocab"]
    steps = what["pre_tokenizer"] or {}
    return (
        steps.get("type") == "ByteLevel"
        and not steps.get("add_prefix_space")
        and all(added["special"] for added in what["added_tokens"])
        and all(vocabulary.get(character) == b for b, character in enumerate(byte_alphabet()))
    )


def token_bytes(tokenizer: PreTrainedTokenizerBase, index: int) -> bytes | None:
    """The text of a token as bytes. A token that is part of a character has some of its bytes.

    None if the vocabulary does not tell them.
    """
    text = str(tokenizer.decode([index], clean_up_tokenization_spaces=False))
    if REPLACEMENT not in text:
        return text.encode()
    piece = str(tokenizer.convert_ids_to_tokens(index))
    fallback = re.fullmatch("<0x([0-9A-F]{2})>", piece)  # as SentencePiece writes a byte
    if fallback:
        return bytes([int(fallback[1], 16)])
    byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}
    if all(character in byte_of for character in piece):
        return bytes(byte_of[character] for character in piece)
    return None


def token_byte_lengths(tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
    """Number of text bytes of each id, 0 for special tokens; None if it is not byte-level."""
    what = _backend_json(tokenizer)
    if what is None or (what["decoder"] or {}).get("type") != "ByteLevel":
        return None
    lengths = [0] * model_vocab_size(tokenizer)
    for text, index in tokenizer.get_vocab().items():
        lengths[index] = len(text)
    for added in what["added_tokens"]:
        lengths[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    return lengths


# --- text to ids, in bulk -----------------------------------------------------------------------

# A longer document is encoded in pieces, because the tokeniser needs ~100 bytes of memory a token.
PIECE_CHARACTERS = 4 << 20


def _pieces(text: str, limit: int) -> Iterator[str]:
    """Cut a very long text before line ends that follow a letter or digit. Byte-level
    pre-tokenisers cut there too, so the ids are those of the whole text."""
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
    """text -> ids of the text alone. No special tokens are added.

    Args:
        special_tokens: Whether the text of a special token, such as a mark of a chat, becomes that
            token. Otherwise it is encoded as any other text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special_tokens: bool = False) -> None:
        self._bytes = is_byte_tokenizer(tokenizer) and not special_tokens
        self._slow = tokenizer
        self._fast: Any = None
        if not self._bytes and getattr(tokenizer, "backend_tokenizer", None) is not None:
            from tokenizers import Tokenizer

            self._fast = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
            self._fast.no_truncation()
            self._fast.no_padding()
            self._fast.encode_special_tokens = not special_tokens

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text. The library encodes a batch of texts on several cores."""
        if self._bytes:
            return [np.frombuffer(text.encode(), np.uint8) for text in texts]
        pieces = [list(_pieces(text, PIECE_CHARACTERS)) for text in texts]
        flat = [piece for document in pieces for piece in document]
        if self._fast is not None:
            encoded = self._fast.encode_batch_fast(flat, add_special_tokens=False)
            ids = iter(entry.ids for entry in encoded)
        else:
            ids = iter(self._slow.encode(piece, add_special_tokens=False) for piece in flat)
        return [
            np.concatenate([np.asarray(next(ids), np.uint32) for _ in document])
            for document in pieces
        ]
