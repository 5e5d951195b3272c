"""Labelled token sequences of different lengths, batches of them, and tasks made of them.

Generated tasks are made once, by several processes if wanted, and kept in a folder.

B: examples of a batch, T: tokens of its longest one, N: examples, S: tokens of all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import zipfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from latte.errors import LatteError

CHUNK = 32  # Number of results that a process computes at once.
AHEAD = 4  # Number of chunks a process that are asked for before they are used.
SPLITS = ("train", "validation", "test")
Tell = Callable[[int], object]
R = TypeVar("R")


@dataclass(frozen=True)
class Examples:
    """N examples of `towers` sequences each, one after another in ``tokens_S``.

    Sequence j of example i is ``tokens_S[bounds[i * towers + j] : bounds[i * towers + j + 1]]``.
    """

    tokens_S: np.ndarray  # unsigned integers
    bounds: np.ndarray  # (N * towers + 1,) int64
    labels_N: np.ndarray  # int64
    towers: int = 1

    @staticmethod
    def pack(sequences: Iterable[np.ndarray], labels: Sequence[int], towers: int = 1) -> Examples:
        """Examples from their sequences, uint8, in order."""
        pieces = list(sequences)
        bounds = np.zeros(len(pieces) + 1, dtype=np.int64)
        np.cumsum([len(piece) for piece in pieces], out=bounds[1:])
        tokens = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.uint8)
        return Examples(tokens, bounds, np.asarray(labels, dtype=np.int64), towers)

    def __len__(self) -> int:
        return len(self.labels_N)

    def sequence(self, index: int, tower: int = 0) -> np.ndarray:
        """The tokens of one sequence of an example."""
        at = index * self.towers + tower
        return self.tokens_S[self.bounds[at] : self.bounds[at + 1]]

    def lengths(self) -> np.ndarray:
        """(N,) tokens of each example's longest sequence."""
        return np.diff(self.bounds).reshape(-1, self.towers).max(1)

    def batch(self, rows: Sequence[int] | np.ndarray) -> dict[str, Tensor]:
        """`input_ids` (B, T), or (B, 2, T) for two towers, `labels` (B,), and `attention_mask`
        of the ids' shape, True = a real token, unless all sequences have the same length.
        """
        pieces = [self.sequence(int(row), j) for row in rows for j in range(self.towers)]
        lengths = np.array([len(piece) for piece in pieces])
        longest = max(1, int(lengths.max()))
        ids = np.zeros((len(pieces), longest), dtype=np.int64)
        for place, piece in enumerate(pieces):
            ids[place, : len(piece)] = piece
        shape = (len(rows), longest) if self.towers == 1 else (len(rows), self.towers, longest)
        batch = {
            "input_ids": torch.from_numpy(ids.reshape(shape)),
            "labels": torch.from_numpy(self.labels_N[np.asarray(rows)]),
        }
        if (lengths < longest).any():
            mask = np.arange(longest) < lengths[:, None]
            batch["attention_mask"] = torch.from_numpy(mask.reshape(shape))
        return batch


def check_counts(options: object, *keys: str) -> None:
    """Raise LatteError for a count below 1; None stands for all there are."""
    for key in keys:
        value = getattr(options, key)
        if value is not None and value < 1:
            raise LatteError(f"data.{key}: expected at least 1, got {value}")


def check_share(share: float) -> None:
    """Raise LatteError for a validation split that would be empty or everything."""
    if not 0 < share < 1:
        raise LatteError(f"data.validation_share: expected between 0 and 1, got {share}")


class TaskOptions(Protocol):
    """What a task's options say about it before its data is there."""

    name: ClassVar[str]
    vocab_size: ClassVar[int]
    classes: ClassVar[tuple[str, ...]]
    towers: ClassVar[int]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that there can be."""

    def check(self) -> None:
        """Raise LatteError for impossible values."""

    def load(self, cache: Path, progress: bool = False, workers: int = 1) -> Task:
        """The splits. What is generated, by `workers` processes, is kept in `cache`."""


@dataclass(frozen=True)
class Task:
    """A classification task, complete. Token 0 is a real token too: padding is masked."""

    options: TaskOptions
    train: Examples
    validation: Examples
    test: Examples

    def splits(self) -> dict[str, Examples]:
        return {"train": self.train, "validation": self.validation, "test": self.test}


@dataclass(frozen=True)
class Balance:
    """How often each class is right, and what answering with the most frequent one gives."""

    counts: tuple[int, ...]

    @property
    def majority(self) -> int:
        return int(np.argmax(self.counts))

    @property
    def majority_rate(self) -> float:
        return max(self.counts) / max(1, sum(self.counts))


def class_balance(examples: Examples, classes: int) -> Balance:
    """The class counts of a split."""
    counts = np.bincount(examples.labels_N, minlength=classes)
    return Balance(tuple(int(count) for count in counts))


# ---- generated tasks


def in_order(function: Callable[[int], R], workers: int = 1) -> Generator[R, None, None]:
    """function(0), function(1), ... without end, by so many processes; the same for any number.

    The function is pickled for them: a function of a module, or a partial of one.
    """
    if workers == 1:
        yield from map(function, itertools.count())
        return
    # No multiprocessing.Pool: leaving one kills its processes, and one that is killed while it
    # sends a result keeps the lock of the queue, which leaving then waits for without end.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context) as pool:
        starts = itertools.count(0, CHUNK)
        ahead = deque(pool.submit(_chunk, function, next(starts)) for _ in range(AHEAD * workers))
        try:
            while True:
                yield from ahead.popleft().result()
                ahead.append(pool.submit(_chunk, function, next(starts)))
        finally:
            pool.shutdown(cancel_futures=True)


def _chunk(function: Callable[[int], R], start: int) -> list[R]:
    return [function(index) for index in range(start, start + CHUNK)]


def generated(
    options: Any,
    made_by: int,
    make: Callable[[Any, Tell, int], dict[str, Examples]],
    cache: Path,
    progress: bool = False,
    workers: int = 1,
) -> Task:
    """A generator's task, from the file in `cache` if it is there, else made and kept.

    Args:
        options: all that decides what is made, with a number of examples for each split; the
            file's name has the task's name and their digest.
        made_by: the generator's version; part of the digest.
        make: ``make(options, tell, workers)``; it tells how many more examples are done.

    Raises:
        LatteError: a damaged file, or a folder that cannot be written (before anything is made).
    """
    key = json.dumps({"format": made_by, **asdict(options)}, sort_keys=True)
    name = options.name
    file = cache / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:20]}.npz"
    if file.exists():
        return Task(options, **_read(file))
    from tqdm import tqdm

    with _kept_in(cache):
        cache.mkdir(parents=True, exist_ok=True)
        if not os.access(cache, os.W_OK):
            raise PermissionError(13, "not writable")
    total = sum(getattr(options, f"{split}_examples") for split in SPLITS)
    bar = tqdm(total=total, desc=f"making {name}", unit="", leave=False,
               disable=not progress or None)  # fmt: skip
    with bar:
        splits = make(options, bar.update, workers)
    _write(file, splits)
    return Task(options, **splits)


def _write(file: Path, splits: dict[str, Examples]) -> None:
    arrays: dict[str, Any] = {}
    for split, examples in splits.items():
        arrays[f"{split}_tokens"] = examples.tokens_S
        arrays[f"{split}_bounds"] = examples.bounds
        arrays[f"{split}_labels"] = examples.labels_N
    temporary = file.with_name(f".{file.name}.tmp-{os.getpid()}")
    with _kept_in(file.parent):
        try:
            with open(temporary, "wb") as stream:
                np.savez(stream, **arrays)
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _kept_in(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LatteError(
            f"{cache}: generated data cannot be kept here ({error.strerror or error}); choose"
            " another cache_dir"
        ) from error


def _read(file: Path) -> dict[str, Examples]:
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return {
                split: Examples(
                    arrays[f"{split}_tokens"], arrays[f"{split}_bounds"], arrays[f"{split}_labels"]
                )
                for split in SPLITS
            }
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise LatteError(f"{file} is damaged ({error}); delete it to make it again") from error
