"""Texts byte by byte: film reviews, good or bad; and whether one paper cites the other.

Reviews. Source: the IMDB reviews of Maas et al. (ACL 2011), at byte level as in Long Range Arena
(Tay et al., arXiv 2011.04006), cut to the first 4,096 bytes. The published task has no validation
split and selects on the test split; here a part of the training reviews is held out for that.

Retrieval: two texts, read by the same encoder. Source: pairs from the ACL Anthology Network (Radev
et al., 2013), as in Long Range Arena: the released files `new_aan_pairs.{train,eval,test}.tsv`,
without a header, with five fields between tabs: label (0 or 1), id1, id2, text1, text2. No quoting.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from experiments.lra.data.examples import Examples, Task, check_counts, check_share
from latte.errors import LatteError
from latte.lab.data.files import (
    JSON_SUFFIXES,
    find_files,
    json_rows,
    kind_of,
    numbered_lines,
    text_field,
)
from latte.lab.data.hub_datasets import PREFIX, load_split, require_columns


@dataclass
class TextOptions:
    """`data` of a text recipe: two files or folders of JSON lines, or a dataset of the Hub."""

    name: ClassVar[str] = "text"
    vocab_size: ClassVar[int] = 256
    classes: ClassVar[tuple[str, ...]] = ("negative", "positive")
    towers: ClassVar[int] = 1

    train: str = f"{PREFIX}stanfordnlp/imdb"  # a path, or hub:NAME (its split `train`)
    test: str = f"{PREFIX}stanfordnlp/imdb"  # a path, or hub:NAME (its split `test`)
    text_field: str = "text"
    label_field: str = "label"  # 0 or 1
    max_length: int = 4096  # bytes of a review, from its beginning
    validation_share: float = 0.1  # of the training reviews, chosen by their hashes
    max_train_examples: int | None = None  # before the split, chosen by hash too; None: all
    max_test_examples: int | None = None
    seed: int = 0  # of the validation split

    @property
    def longest(self) -> int:
        return self.max_length

    def check(self) -> None:
        check_counts(self, "max_length", "max_train_examples", "max_test_examples")
        check_share(self.validation_share)

    def load(self, cache: Path, progress: bool = False, workers: int = 1) -> Task:
        """The task in bytes.

        Raises:
            LatteError: missing or unreadable files, a wrong field, a label that is not 0 or 1, or a
                split without one of the classes.
        """
        parts: dict[bool, list[tuple[str, int]]] = {False: [], True: []}
        for text, label in _reviews(self.train, "train", self, self.max_train_examples):
            share = _hash(text, f"validation {self.seed}")
            parts[share < self.validation_share].append((text, label))
        test = _reviews(self.test, "test", self, self.max_test_examples)
        return Task(
            self,
            _examples(parts[False], self, f"{self.train}, without the validation part"),
            _examples(parts[True], self, f"{self.train}, validation part"),
            _examples(test, self, self.test),
        )


def _hash(text: str, purpose: str) -> float:
    """A number in [0, 1) that depends on the text alone.

    So equal texts are on one side of a split, and neither order nor number of the others matters.
    """
    digest = hashlib.blake2b(f"{purpose} {text}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def to_bytes(text: str, max_length: int) -> np.ndarray:
    """The first `max_length` bytes of a text in UTF-8."""
    return np.frombuffer(text.encode("utf-8")[:max_length], dtype=np.uint8)


def _examples(reviews: list[tuple[str, int]], options: TextOptions, where: str) -> Examples:
    labels = [label for _, label in reviews]
    if set(labels) != {0, 1}:
        raise LatteError(
            f"{where}: expected reviews with label 0 and with label 1, got {len(labels)} with"
            f" {sorted(set(labels)) or 'none'}"
        )
    return Examples.pack((to_bytes(text, options.max_length) for text, _ in reviews), labels)


def _reviews(
    source: str, split: str, options: TextOptions, limit: int | None
) -> list[tuple[str, int]]:
    """(text, label) of a source, without blank texts; at most `limit`, those of lowest hash."""
    rows = _hub_rows(source, split, options) if source.startswith(PREFIX) else _file_rows(source)
    found = []
    for where, row in rows:
        text = text_field(row, options.text_field, where)
        label = label_of(row, options.label_field, where)
        if text.strip():
            found.append((text, label))
    if limit is not None and limit < len(found):
        found = sorted(found, key=lambda review: _hash(review[0], "limit"))[:limit]
    return found


def label_of(row: object, field: str, where: str) -> int:
    """A label 0 or 1 of a row; anything else is refused, with where it stands."""
    assert isinstance(row, dict)  # text_field saw to it
    if field not in row:
        there = ", ".join(map(repr, list(row)[:12])) or "nothing"
        raise LatteError(f"{where}: no field {field!r}; there is {there}")
    value = row[field]
    if isinstance(value, bool) or value not in (0, 1):
        raise LatteError(f"{where}: field {field!r} must be 0 or 1, got {value!r}")
    return int(value)


def _file_rows(source: str) -> Iterator[tuple[str, object]]:
    for path in find_files(Path(source)):
        if kind_of(path)[0] not in JSON_SUFFIXES:
            raise LatteError(f"{path}: expected JSON lines ({', '.join(JSON_SUFFIXES)})")
        yield from json_rows(path)


def _hub_rows(source: str, split: str, options: TextOptions) -> Iterator[tuple[str, object]]:
    name = f"{source} [{split}]"
    dataset = load_split(source.removeprefix(PREFIX), None, name, split=split)
    require_columns(dataset, [options.text_field, options.label_field], name)
    for number, row in enumerate(dataset, 1):
        yield f"{name}, row {number}", row


# ---- retrieval

FIELDS = ("label", "id1", "id2", "text1", "text2")
LABELS = {"0": 0, "0.0": 0, "1": 1, "1.0": 1}


@dataclass
class RetrievalOptions:
    """`data` of a retrieval recipe: three files of pairs, plain or compressed."""

    name: ClassVar[str] = "retrieval"
    vocab_size: ClassVar[int] = 256
    classes: ClassVar[tuple[str, ...]] = ("unrelated", "citing")
    towers: ClassVar[int] = 2

    train: str = "data/lra/new_aan_pairs.train.tsv"
    validation: str = "data/lra/new_aan_pairs.eval.tsv"
    test: str = "data/lra/new_aan_pairs.test.tsv"
    max_length: int = 4000  # bytes of each text, from its beginning
    max_examples: int | None = None  # of each split, the first ones; None: all

    @property
    def longest(self) -> int:
        return self.max_length

    def check(self) -> None:
        check_counts(self, "max_length", "max_examples")

    def load(self, cache: Path, progress: bool = False, workers: int = 1) -> Task:
        """The task in bytes.

        Raises:
            LatteError: a missing or unreadable file, or a line that is no pair, with its number.
        """
        files = (self.train, self.validation, self.test)
        return Task(self, *(_split(Path(file), self) for file in files))


def _split(path: Path, options: RetrievalOptions) -> Examples:
    pieces: list[np.ndarray] = []
    labels: list[int] = []
    for label, first, second in pairs(path.expanduser()):
        pieces += [to_bytes(first, options.max_length), to_bytes(second, options.max_length)]
        labels.append(label)
        if len(labels) == options.max_examples:
            break
    if not labels:
        raise LatteError(f"{path}: expected pairs, found no line")
    return Examples.pack(pieces, labels, towers=2)


def pairs(path: Path) -> Iterator[tuple[int, str, str]]:
    """(label, text, text) of each line of a file of pairs."""
    for where, line in numbered_lines(path):
        fields = line.rstrip("\r\n").split("\t")
        if len(fields) != len(FIELDS):
            raise LatteError(
                f"{where}: expected {len(FIELDS)} fields between tabs ({', '.join(FIELDS)}), found"
                f" {len(fields)}"
            )
        if fields[0] not in LABELS:
            shown = fields[0] if len(fields[0]) <= 40 else fields[0][:37] + "..."
            raise LatteError(f"{where}: expected label 0 or 1 in the first field, found {shown!r}")
        yield LABELS[fields[0]], fields[3], fields[4]
