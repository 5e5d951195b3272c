"""Corpora: the sources of training and held-out documents.

>>> corpus = open_corpus("embedded")
>>> text = next(corpus.documents("validation"))
"""

from __future__ import annotations

import hashlib
import heapq
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from latte.errors import LatteError
from latte.lab.data.document_source import Meter, Source, no_meter
from latte.lab.data.embedded import EmbeddedSource
from latte.lab.data.files import TEXT_SUFFIXES, FileSource, find_files, kind_of
from latte.lab.data.hub_datasets import PREFIX, HubSource
from latte.lab.progress import Progress, progress

Split = Literal["train", "validation"]
PIECE = 16384  # number of characters of a text that are sampled together
PathSpec = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class Corpus:
    """A training source and a held-out source that share no document."""

    name: str
    train: Source
    validation: Source

    def source(self, split: Split) -> Source:
        if split not in ("train", "validation"):
            raise LatteError(f"split must be 'train' or 'validation', got {split!r}")
        return self.train if split == "train" else self.validation

    def documents(self, split: Split, meter: Meter = no_meter) -> Iterator[str]:
        """The documents of a split, in a fixed order; blank ones are left out."""
        return (text for text in self.source(split).documents(meter) if text.strip())

    def fingerprint(self, split: Split) -> str:
        """A digest that changes when the documents of the split do."""
        return self.source(split).fingerprint()

    def note(self) -> str:
        """A line about how the text is split if this is unusual, else an empty string."""
        count = self.train.cut.too_few if isinstance(self.train, SourcePart) else None
        if count is None:
            return ""
        some = "1 document" if count == 1 else f"{count:,} documents"
        return (
            f"{self.name}: {some}, too few to hold out whole ones: the last part of each is held"
            " out (data.validation names other held-out text)"
        )


def _by_hash(text: str, held_out: float) -> tuple[str, str]:
    """The side of a document, by its hash. Case and spaces do not matter, so copies share it."""
    key = " ".join(text.casefold().split()).encode()
    chance = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") / 2**64
    return ("", text) if chance < held_out else (text, "")


def _by_tail(text: str, held_out: float) -> tuple[str, str]:
    """The text in two parts, cut at a line's end. The second is about ``held_out`` of it."""
    near = int(len(text) * (1 - held_out))
    # The line's end must be near. Text without line ends is cut at the exact place.
    cut = text.rfind("\n", max(0, 2 * near - len(text)), near) + 1 or near
    return text[:cut], text[cut:]


CUTS = {"hash": (_by_hash, "held out"), "tail": (_by_tail, "last part")}


class Cut:
    """The rule that divides the documents of a source into training and held-out text.

    Args:
        kind: Way to hold text out: ``hash`` (whole documents) or ``tail`` (the last part of each).
        few: Whether to use ``tail`` if ``hash`` leaves one side without a document. This happens
            with few documents. Documents are read until each side has one.
    """

    def __init__(self, source: Source, kind: str, held_out: float, few: bool) -> None:
        self.source, self.held_out, self._wanted, self._few = source, held_out, kind, few

    @cached_property
    def kind(self) -> str:
        return "tail" if self._wanted == "tail" or self.too_few is not None else "hash"

    @cached_property
    def too_few(self) -> int | None:
        """The number of documents if they are too few for ``hash``, else None."""
        if self._wanted == "tail" or not self._few:
            return None
        count, sides = 0, set()
        for text in self.source.documents():
            if text.strip():
                count += 1
                sides.add(bool(_by_hash(text, self.held_out)[1]))
                if len(sides) == 2:
                    return None
        return count

    def part(self, text: str, validation: bool) -> str:
        """The part of a document that is on one side."""
        return CUTS[self.kind][0](text, self.held_out)[validation]


class SourcePart(Source):
    """One side of a source whose documents are cut in two: the held-out one if ``validation``."""

    def __init__(self, cut: Cut, validation: bool) -> None:
        self.cut, self._validation = cut, validation
        self.unit = cut.source.unit

    @property
    def name(self) -> str:  # type: ignore[override]
        side = CUTS[self.cut.kind][1] if self._validation else "train"
        return f"{self.cut.source.name} ({side})"

    @property
    def total(self) -> int | None:  # type: ignore[override]
        return self.cut.source.total

    def fingerprint(self) -> str:
        how = f"{self.cut.kind} {self.cut.held_out!r} {self._validation}"
        return hashlib.sha256(f"{how} {self.cut.source.fingerprint()}".encode()).hexdigest()

    def documents(self, meter: Meter = no_meter) -> Iterator[str]:
        for text in self.cut.source.documents(meter):
            if part := self.cut.part(text, self._validation):
                yield part


def _paths(spec: PathSpec) -> list[Path]:
    specs = [spec] if isinstance(spec, (str, os.PathLike)) else list(spec)
    if not specs:
        raise LatteError("a corpus needs at least one path, got an empty list")
    found: dict[Path, Path] = {}
    for entry in specs:
        if not isinstance(entry, (str, os.PathLike)):
            raise LatteError(f"a corpus path must be text, got {type(entry).__name__}")
        for path in find_files(entry):
            found.setdefault(path.resolve(), path)
    return list(found.values())


def open_corpus(
    spec: PathSpec,
    *,
    validation: PathSpec | None = None,
    held_out: float = 0.01,
    field: str = "text",
    config: str | None = None,
    split: str = "train",
    validation_split: str | None = None,
    revision: str | None = None,
    data_files: str | list[str] | Mapping[str, Any] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Corpus:
    """Open a corpus. Only what the checks need is read or downloaded.

    Args:
        spec: Training text: ``"embedded"``; paths, folders or globs of text, JSON lines or
            Parquet, plain or compressed; or ``"hub:NAME"``, a dataset of the Hugging Face Hub.
        validation: Held-out files (for local files), in the same forms as ``spec``.
        held_out: Fraction of the documents that is held out, by hash, if there is no
            ``validation``. A single text file is one document; its last part is held out instead.
            If there are so few documents that the hash holds out none, the last part of each is
            held out.
        field: JSON field or Parquet/dataset column that holds the text.
        config, split, validation_split, revision, data_files, cache_dir: Arguments of
            ``datasets.load_dataset``, for ``hub:`` only. Without ``validation_split``, the
            fraction ``held_out`` of the documents is held out by hash.

    Raises:
        LatteError: Files are missing or of an unknown type, options do not go together, or a file
            is on both sides. Errors inside a file are raised when it is read.
    """
    if not isinstance(held_out, (int, float)) or not 0 < held_out < 1:
        raise LatteError(f"held_out must be a fraction between 0 and 1, got {held_out!r}")
    hub: dict[str, Any] = {"config": config, "revision": revision, "data_files": data_files}
    is_hub = isinstance(spec, str) and spec.startswith(PREFIX)
    hub_only = {**hub, "validation_split": validation_split}
    given = [name for name, value in hub_only.items() if value is not None]
    if given and not is_hub:
        raise LatteError(f"{', '.join(given)}: only for a 'hub:NAME' corpus, not for {spec!r}")
    if is_hub:
        if validation is not None:
            raise LatteError("a 'hub:' corpus takes validation_split, not validation")
        dataset = str(spec)[len(PREFIX) :]
        source = partial(HubSource, dataset, column=field, cache_dir=cache_dir, **hub)
        if validation_split == split:
            raise LatteError(f"validation_split must differ from split, both are {split!r}")
        if validation_split is not None:
            return Corpus(str(spec), source(split=split), source(split=validation_split))
        return _split(str(spec), source(split=split), "hash", held_out)
    if isinstance(spec, str) and spec == "embedded":
        if validation is not None:
            raise LatteError("the embedded corpus has its own held-out part: drop validation")
        return Corpus("embedded", EmbeddedSource(False), EmbeddedSource(True))
    paths = _paths(spec)
    files = FileSource(paths, field)
    title = str(spec) if isinstance(spec, (str, os.PathLike)) else files.name
    if validation is not None:
        others = _paths(validation)
        both = {path.resolve() for path in paths} & {path.resolve() for path in others}
        if both:
            raise LatteError(f"{min(both)}: in both the training and the validation files")
        return Corpus(title, files, FileSource(others, field))
    single_text = len(paths) == 1 and kind_of(paths[0])[0] in TEXT_SUFFIXES
    return _split(title, files, "tail" if single_text else "hash", held_out, few=True)


def _split(name: str, whole: Source, kind: str, held_out: float, few: bool = False) -> Corpus:
    cut = Cut(whole, kind, held_out, few)
    return Corpus(name, SourcePart(cut, False), SourcePart(cut, True))


@contextmanager
def corpus_bar(
    description: str, source: Source, enabled: bool = True
) -> Iterator[tuple[Progress, Meter]]:
    """A progress bar of reading a source, in bytes or documents, and its update function."""
    unit = "document" if source.unit.strip() == "documents" else "byte"
    with progress(source.total or 0, unit, shown=enabled, label=description) as state:

        def meter(done: int) -> None:
            state.total = state.total or source.total or 0  # it may not have been known before
            if done > state.done:
                state.update(done - state.done)

        yield state, meter


def sample_text(
    corpus: Corpus,
    max_bytes: int,
    *,
    seed: int = 0,
    progress: bool = True,
) -> list[str]:
    """About ``max_bytes`` of the training text, drawn evenly, for training a tokeniser.

    A character counts as one byte, whatever its length in UTF-8.

    Documents are cut into pieces of 16,384 characters. The pieces with the smallest hashes (of
    seed, number and text) are kept, in the corpus' order. So the sample depends only on corpus and
    seed.
    """
    kept: list[tuple[int, int, str]] = []
    size = number = 0
    with corpus_bar("Sampling text", corpus.train, progress) as (_, meter):
        for text in corpus.documents("train", meter):
            for start in range(0, len(text), PIECE):
                part = text[start : start + PIECE]
                key = hashlib.blake2b(f"{seed} {number} ".encode() + part[:256].encode()).digest()
                heapq.heappush(kept, (-int.from_bytes(key[:8], "big"), number, part))
                number += 1
                size += len(part)
                while size > max_bytes and len(kept) > 1:
                    size -= len(heapq.heappop(kept)[2])
    return [part for _, _, part in sorted(kept, key=lambda entry: entry[1])]
