"""Pre-tokenise a corpus once, into memory-mapped files that every run shares.

A split becomes a folder ``<cache>/<split>-<fingerprint>/``:

    tokens.bin      uint16 (uint32 beyond 65,536 ids), all documents one after another,
                    each as ``bos, text..., eos``
    offsets.npy     int64 (documents + 1,): where each document starts in tokens.bin
    bytes.npy       int64 (documents,): UTF-8 bytes of each document's text
    lengths.npy     int32 (vocabulary,): number of text bytes of each id (byte-level tokenisers)
    index.json      counts, sizes, checksums and inputs; written last

The fingerprint is that of the documents, the tokeniser and the layout. So a folder is used again
only if all of these are the same. A folder is written under another name and renamed when it is
complete, under a lock that ends with its process. So no process reads an incomplete cache. With
several ranks, one writes while the others wait.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from latte.errors import LatteError
from latte.lab.data.corpora import Corpus, Split, corpus_bar
from latte.lab.data.tokenizers import (
    Encoder,
    document_ends,
    model_vocab_size,
    token_byte_lengths,
    tokenizer_fingerprint,
)
from latte.models.plain_files import check_plain, read_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

FORMAT = 1
# Entries of index.json that count or number something.
COUNTS = ("tokens", "documents", "bytes", "vocab_size", "largest_id", "bos", "eos")
# Files up to this size are checksummed whole, larger ones by 256 samples of 64 KiB.
FULL_CHECK_BYTES = 128 << 20
BATCH_CHARACTERS = 2 << 20
SMALL_FILE = 16 << 20  # bytes of a file that is read whole to tell it from others


def checksum(path: Path, whole: float = math.inf) -> int:
    """CRC-32 of a file, or of 256 samples of a file with more bytes than ``whole``."""
    size = path.stat().st_size
    value = 0
    with open(path, "rb") as file:
        if size <= whole:
            while piece := file.read(1 << 20):
                value = zlib.crc32(piece, value)
        else:
            for i in range(256):
                file.seek((size - (1 << 16)) * i // 255)
                value = zlib.crc32(file.read(1 << 16), value)
    return value


def contents_of(files: Iterable[str | Path]) -> str | None:
    """A short digest of files, by name and content, on which their results depend.

    Large files are read in samples. None if there are no files.
    """
    paths = [Path(file).expanduser() for file in files]
    found = [(path.name, path.stat().st_size, checksum(path, SMALL_FILE)) for path in paths]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:12] if found else None


class TokenFile:
    """Tokenised documents on disk, memory-mapped. They open without delay, whatever their size.

    Attributes:
        tokens: Ids of all documents in a row, (N,) uint16 or uint32 (read-only).
        offsets: Starts of the documents, (documents + 1,) int64. Document d is
            ``tokens[offsets[d]:offsets[d + 1]]``.
        document_bytes: Number of UTF-8 bytes of each document's text, (documents,) int64.
        byte_lengths: Number of text bytes of each id, (vocabulary,) int32; None if the tokeniser
            is not byte-level.
        bos, eos: Ids that open and close a document.
        vocab_size: Number of ids that the tokeniser has.
        index: Contents of index.json.
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

    # Worker processes map the files again; the contents are not sent to them.
    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "index": self.index}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path, self.index = state["path"], state["index"]
        self._map()

    def __len__(self) -> int:
        """The number of tokens."""
        return int(self.index["tokens"])

    @cached_property
    def digest(self) -> str:
        """A digest of all tokens. Other text has another, whatever its file's name and date."""
        stored = self.index.get("digest")  # older caches have none
        return str(stored or _digest(self.tokens).hexdigest())

    @property
    def num_documents(self) -> int:
        return int(self.index["documents"])

    @property
    def num_bytes(self) -> int:
        """Number of UTF-8 bytes of all texts."""
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


def _checked_index(path: Path) -> dict[str, Any]:
    """The index of a token cache, once its entries and the files that it names are as they were.

    Raises:
        LatteError: They are not.
    """
    file, again = path / "index.json", "delete the folder to make it again"
    if not file.exists():
        raise LatteError(f"{path}: not a token cache, or an incomplete one: no index.json")
    index = read_object(file, "format", then=again)
    if index["format"] != FORMAT:
        raise LatteError(
            f"{path}: token cache of format {index['format']}, expected {FORMAT}; delete it"
        )
    try:
        entries = [(name, int(size), int(crc)) for name, (size, crc) in index["files"].items()]
        width = np.dtype(index["dtype"]).itemsize
        counts = {name: index[name] for name in COUNTS}
        wrong = [name for name, count in counts.items() if type(count) is not int or count < 0]
        if wrong or width * index["tokens"] != dict(index["files"])["tokens.bin"][0]:
            raise ValueError(wrong[0] if wrong else "tokens")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise LatteError(f"{file}: edited token cache: bad entry {error}; {again}") from None
    for name, size, wanted in entries:
        if not (path / name).exists():
            raise LatteError(f"{path}: not a token cache, or an incomplete one: no {name}")
        found = check_plain(path / name).stat().st_size
        if found != size:
            raise LatteError(
                f"{path / name}: truncated or edited token cache: expected {size} bytes, found "
                f"{found}; {again}"
            )
        if checksum(path / name, FULL_CHECK_BYTES) != wanted:
            raise LatteError(
                f"{path / name}: edited token cache: its checksum does not match; {again}"
            )
    return index


def _digest(start: Any = b"") -> Any:
    return hashlib.blake2b(start, digest_size=16)


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Batches of documents to encode together. A batch ends when it has BATCH_CHARACTERS."""
    batch: list[str] = []
    waiting = 0
    for text in documents:
        batch.append(text)
        waiting += len(text)
        if waiting >= BATCH_CHARACTERS:
            yield batch
            batch, waiting = [], 0
    if batch:
        yield batch


def _write(
    folder: Path,
    corpus: Corpus,
    split: Split,
    tokenizer: PreTrainedTokenizerBase,
    made_of: dict[str, Any],
    progress: bool,
    special_tokens: bool,
) -> None:
    bos, eos = document_ends(tokenizer)
    vocab_size = model_vocab_size(tokenizer)
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    encode = Encoder(tokenizer, special_tokens)
    offsets, sizes, digest = array("q", [0]), array("q"), _digest()
    largest = max(bos, eos)
    source = corpus.source(split)
    shown = corpus_bar(f"Tokenising {split}", source, progress)
    with shown as (bar, meter), open(folder / "tokens.bin", "wb") as file:
        for batch in _batches(corpus.documents(split, meter)):
            for text, ids in zip(batch, encode(batch), strict=True):
                document = np.empty(len(ids) + 2, dtype)
                document[0], document[1:-1], document[-1] = bos, ids, eos
                largest = max(largest, int(ids.max(initial=0)))
                file.write(document.tobytes())
                digest.update(document)
                offsets.append(offsets[-1] + len(document))
                sizes.append(len(text.encode()))
            bar.note(f"{offsets[-1] / 1e6:.1f}M tokens")
        file.flush()
        os.fsync(file.fileno())
    if not sizes:
        wanted = ": expected more text, or data.validation" if split == "validation" else ""
        raise LatteError(f"{source.name}: the {split} split of the corpus is empty{wanted}")
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
        "digest": digest.hexdigest(),
        "files": {
            path.name: [path.stat().st_size, checksum(path, FULL_CHECK_BYTES)] for path in files
        },
    }
    with open(folder / "index.json", "w", encoding="utf-8") as index_file:
        json.dump(index, index_file, indent=2)
        index_file.flush()
        os.fsync(index_file.fileno())


def tokenize_corpus(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    split: Split,
    cache: str | os.PathLike[str],
    *,
    progress: bool = True,
    special_tokens: bool = False,
) -> TokenFile:
    """The tokens of a split, read from the ``cache`` folder, or made if they are not there.

    Call it on every rank. One rank writes, and the others wait for it. Fast tokenisers use all
    cores; ``RAYON_NUM_THREADS`` and ``TOKENIZERS_PARALLELISM`` of that library limit this.
    ``special_tokens`` is that of :class:`latte.lab.data.tokenizers.Encoder`.

    Raises:
        LatteError: The corpus is empty or unreadable, the cache folder cannot be written, a cached
            file was truncated or edited, or the tokeniser has no eos.
    """
    made_of = {
        "corpus": corpus.fingerprint(split),
        "tokenizer": tokenizer_fingerprint(tokenizer),
    }
    if special_tokens:
        made_of["special_tokens"] = "read"
    key = json.dumps({"format": FORMAT, "split": split, **made_of}, sort_keys=True)
    name = f"{split}-{hashlib.sha256(key.encode()).hexdigest()[:20]}"

    def write(folder: Path) -> None:
        _write(folder, corpus, split, tokenizer, made_of, progress, special_tokens)

    return TokenFile(made_once(cache, name, write, "token cache"))


def made_once(
    cache: str | os.PathLike[str], name: str, make: Callable[[Path], None], what: str
) -> Path:
    """The folder ``name`` of a cache. If it is not there, one process makes it while others wait.

    ``make`` is given an empty folder, which is renamed when it returns.

    Raises:
        LatteError: The cache folder cannot be written.
    """
    from filelock import FileLock, Timeout

    root = Path(cache).expanduser()
    final = root / name
    if final.is_dir():
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not root.is_dir() or not os.access(root, os.W_OK):
            raise PermissionError(13, "not writable")
        lock = FileLock(root / f".{name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            logger.info("waiting for another process that is writing %s", final)
            lock.acquire()
        with contextlib.ExitStack() as stack:
            stack.callback(lock.release)
            if final.is_dir():  # another process made it while this one waited
                return final
            # The process that left these files was killed, because it does not hold the lock.
            for stale in root.glob(f".{name}.tmp-*"):
                shutil.rmtree(stale)
            folder = root / f".{name}.tmp-{os.getpid()}"
            folder.mkdir()
            try:
                make(folder)
                folder.rename(final)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise LatteError(
            f"{root}: the {what} cannot be written ({error.strerror or error})"
        ) from error
    return final
