"""Pre-tokenise a corpus once, into memory-mapped files that every run shares.

A split becomes a folder ``<cache>/<split>-<fingerprint>/``:

    tokens.bin      uint16 (uint32 beyond 65,536 ids), all documents one after another,
                    each as ``bos, text..., eos``
    offsets.npy     int64 (documents + 1,): where each document starts in tokens.bin
    bytes.npy       int64 (documents,): UTF-8 bytes of each document's text
    lengths.npy     int32 (vocabulary,): text bytes behind each id (byte-level tokenisers)
    index.json      counts, sizes, checksums, what it was made of; written last

The fingerprint covers the documents, the tokeniser and the layout: a folder is found again only
by a request for exactly what it holds. It is written under another name and renamed when whole,
under a lock that dies with its process: no half-made cache is ever seen, and of several ranks
one writes while the others wait.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from latte.data.corpora import Corpus, Split
from latte.errors import LatteError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 1
# Files up to this size are checksummed whole, larger ones by 256 samples of 64 KiB.
FULL_CHECK_BYTES = 128 << 20
BATCH_CHARACTERS = 2 << 20
# A document beyond this is encoded in pieces: the tokeniser's working memory is ~100 B a token.
PIECE_CHARACTERS = 4 << 20


def _checksum(path: Path) -> int:
    size = path.stat().st_size
    value = 0
    with open(path, "rb") as file:
        if size <= FULL_CHECK_BYTES:
            while piece := file.read(1 << 20):
                value = zlib.crc32(piece, value)
        else:
            for i in range(256):
                file.seek((size - (1 << 16)) * i // 255)
                value = zlib.crc32(file.read(1 << 16), value)
    return value


class TokenFile:
    """Tokenised documents on disk, memory-mapped: opened in a moment, whatever their size.

    Attributes:
        tokens: (N,) uint16 or uint32, all documents in a row (read-only).
        offsets: (documents + 1,) int64. Document d is ``tokens[offsets[d]:offsets[d + 1]]``.
        document_bytes: (documents,) int64, UTF-8 bytes of each document's text.
        byte_lengths: (vocabulary,) int32 text bytes behind each id, or None if the tokeniser is
            not byte-level.
        bos, eos: the ids that open and close a document.
        vocab_size: the number of ids that the tokeniser has.
        index: everything in index.json.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.index = _checked_index(self.path)
        self._map()

    def _map(self) -> None:
        # Plain views of the maps: slicing an np.memmap itself costs ten times as much.
        tokens = np.memmap(self.path / "tokens.bin", self.index["dtype"], mode="r")
        self.tokens = np.asarray(tokens)
        self.offsets = np.asarray(np.load(self.path / "offsets.npy", mmap_mode="r"))
        self.document_bytes = np.asarray(np.load(self.path / "bytes.npy", mmap_mode="r"))
        lengths = self.path / "lengths.npy"
        self.byte_lengths = np.load(lengths) if lengths.exists() else None
        self.bos: int = self.index["bos"]
        self.eos: int = self.index["eos"]
        self.vocab_size: int = self.index["vocab_size"]

    # Worker processes map the files again, instead of being sent their contents.
    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "index": self.index}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path, self.index = state["path"], state["index"]
        self._map()

    def __len__(self) -> int:
        """The number of tokens."""
        return int(self.index["tokens"])

    @property
    def num_documents(self) -> int:
        return int(self.index["documents"])

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of all the text."""
        return int(self.index["bytes"])

    def document(self, number: int) -> np.ndarray:
        """One document's ids, with its bos and eos."""
        return self.tokens[self.offsets[number] : self.offsets[number + 1]]

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise LatteError if a model with ``vocab_size`` embeddings cannot read these tokens."""
        largest = int(self.index["largest_id"])
        if largest >= vocab_size:
            raise LatteError(
                f"{self.path}: vocabulary mismatch: these tokens go up to {largest} (a tokenizer "
                f"of {self.vocab_size} ids), the model has only {vocab_size}"
            )

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise LatteError if these tokens were made by another tokeniser."""
        from latte.data.tokenizers import tokenizer_fingerprint

        if tokenizer_fingerprint(tokenizer) != self.index["tokenizer"]:
            raise LatteError(
                f"{self.path}: vocabulary mismatch: made by another tokenizer (of "
                f"{self.vocab_size} ids) than the one given ({len(tokenizer)} ids)"
            )


def _checked_index(path: Path) -> dict[str, Any]:
    try:
        index = json.loads((path / "index.json").read_text("utf-8"))
        if index["format"] != FORMAT:
            raise LatteError(
                f"{path}: token cache of format {index['format']}, expected {FORMAT}; delete it"
            )
        for name, (size, checksum) in index["files"].items():
            found = (path / name).stat().st_size
            if found != size:
                raise LatteError(
                    f"{path / name}: truncated or edited token cache: expected {size} bytes, found "
                    f"{found}; delete the folder to make it again"
                )
            if _checksum(path / name) != checksum:
                raise LatteError(
                    f"{path / name}: edited token cache: its checksum does not match; delete the "
                    "folder to make it again"
                )
    except FileNotFoundError as error:
        missing = Path(error.filename).name
        raise LatteError(
            f"{path}: not a token cache, or an incomplete one: no {missing}"
        ) from error
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise LatteError(f"{path}: token cache cannot be read ({error})") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise LatteError(f"{path}/index.json: edited token cache: bad entry {error}") from error
    return index


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


def _write(
    folder: Path,
    corpus: Corpus,
    split: Split,
    tokenizer: PreTrainedTokenizerBase,
    made_of: dict[str, Any],
    progress: bool,
) -> None:
    from tqdm.auto import tqdm

    from latte.data.tokenizers import document_ends, model_vocab_size, token_byte_lengths

    bos, eos = document_ends(tokenizer)
    vocab_size = model_vocab_size(tokenizer)
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    encode = Encoder(tokenizer)
    offsets, sizes = array("q", [0]), array("q")
    largest = max(bos, eos)
    source = corpus.source(split)
    bar = tqdm(
        desc=f"Tokenising {split}",
        total=source.total,
        unit=source.unit,
        unit_scale=True,
        disable=not progress,
    )

    def meter(done: int) -> None:
        if bar.total is None and source.total is not None:
            bar.total = source.total
        if done - bar.n >= 1:
            bar.update(done - bar.n)

    with bar, open(folder / "tokens.bin", "wb") as file:
        batch: list[str] = []

        def flush() -> None:
            nonlocal largest
            for text, ids in zip(batch, encode(batch), strict=True):
                document = np.empty(len(ids) + 2, dtype)
                document[0], document[1:-1], document[-1] = bos, ids, eos
                largest = max(largest, int(ids.max(initial=0)))
                file.write(document.tobytes())
                offsets.append(offsets[-1] + len(document))
                sizes.append(len(text.encode()))
            batch.clear()
            bar.set_postfix_str(f"{offsets[-1] / 1e6:.1f}M tokens", refresh=False)

        waiting = 0
        for text in corpus.documents(split, meter if progress else None):
            batch.append(text)
            waiting += len(text)
            if waiting >= BATCH_CHARACTERS:
                flush()
                waiting = 0
        if batch:
            flush()
        file.flush()
        os.fsync(file.fileno())
    if not sizes:
        raise LatteError(f"{source.name}: the {split} split of the corpus is empty")
    np.save(folder / "offsets.npy", np.frombuffer(offsets, np.int64))
    np.save(folder / "bytes.npy", np.frombuffer(sizes, np.int64))
    lengths = token_byte_lengths(tokenizer)
    if lengths is not None:
        np.save(folder / "lengths.npy", np.asarray(lengths, np.int32))
    files = sorted(path for path in folder.iterdir())
    index = {
        "format": FORMAT,
        **made_of,
        "corpus_name": corpus.name,
        "split": split,
        "dtype": dtype.str,
        "tokens": offsets[-1],
        "documents": len(sizes),
        "bytes": sum(sizes),
        "vocab_size": vocab_size,
        "largest_id": largest,
        "bos": bos,
        "eos": eos,
        "files": {path.name: [path.stat().st_size, _checksum(path)] for path in files},
    }
    with open(folder / "index.json", "w", encoding="utf-8") as file:
        json.dump(index, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def tokenize_corpus(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    split: Split,
    cache: str | os.PathLike[str],
    *,
    progress: bool = True,
) -> TokenFile:
    """The tokens of a split: found in the ``cache`` folder if they are there, made otherwise.

    Call it on every rank: one writes, the others wait for it. Fast tokenisers use all cores
    (``RAYON_NUM_THREADS`` and ``TOKENIZERS_PARALLELISM`` of that library limit it).

    Raises:
        LatteError: an empty or unreadable corpus, a cache folder that cannot be written, a cached
            file that was truncated or edited, a tokeniser without eos.
    """
    from filelock import FileLock

    from latte.data.tokenizers import tokenizer_fingerprint

    made_of = {
        "corpus": corpus.fingerprint(split),
        "tokenizer": tokenizer_fingerprint(tokenizer),
    }
    key = json.dumps({"format": FORMAT, "split": split, **made_of}, sort_keys=True)
    name = f"{split}-{hashlib.sha256(key.encode()).hexdigest()[:20]}"
    root = Path(cache).expanduser()
    final = root / name
    if final.is_dir():
        return TokenFile(final)
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not root.is_dir() or not os.access(root, os.W_OK):
            raise PermissionError(13, "not writable")
        lock = FileLock(root / f".{name}.lock")
        with lock:
            if final.is_dir():  # another process made it while this one waited
                return TokenFile(final)
            # Whoever left these was killed: the lock would still be held otherwise.
            for stale in root.glob(f".{name}.tmp-*"):
                shutil.rmtree(stale)
            folder = root / f".{name}.tmp-{os.getpid()}"
            folder.mkdir()
            try:
                _write(folder, corpus, split, tokenizer, made_of, progress)
                folder.rename(final)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise LatteError(
            f"{root}: the token cache cannot be written ({error.strerror or error})"
        ) from error
    return TokenFile(final)
