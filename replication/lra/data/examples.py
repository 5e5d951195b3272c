"""Labelled token sequences of different lengths, in one array, and batches of them.

B: examples of a batch, T: tokens of its longest one, N: examples, S: tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from latte.errors import LatteError


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
