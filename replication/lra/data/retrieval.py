"""Retrieval: does one paper cite the other? Two texts, byte by byte, read by the same encoder.

Source: pairs from the ACL Anthology Network (Radev et al., 2013), as in Long Range Arena (Tay et
al., arXiv 2011.04006): the released files `new_aan_pairs.{train,eval,test}.tsv`, without a header,
with five fields between tabs: label (0 or 1), id1, id2, text1, text2. No quoting.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from latte.data.files import numbered_lines
from latte.errors import LatteError
from replication.lra.data.examples import Examples, Task, check_counts
from replication.lra.data.text import to_bytes

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


def load_retrieval(options: RetrievalOptions) -> Task:
    """The task in bytes.

    Raises:
        LatteError: a missing or unreadable file, or a line that is no pair, with its number.
    """
    options.check()
    return Task(
        options,
        _split(Path(options.train), options),
        _split(Path(options.validation), options),
        _split(Path(options.test), options),
    )


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
