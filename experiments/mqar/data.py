"""Multi-query associative recall (MQAR): remember key-value pairs, answer when a key comes back.

Source: Arora et al., *Zoology: Measuring and Improving Recall in Efficient Language Models*,
arXiv 2312.04927. T: tokens of an example, N: its key-value pairs, M: examples, V: vocabulary.

    k_1 v_1 k_2 v_2 ... k_N v_N | k_3 . . . k_1 . k_7 . . . . . k_2 ...
      \\__ 2 N tokens, the pairs __/  \\__ T - 2 N tokens, (T - 2 N) / 2 slots of two tokens __/

- Keys are distinct, from 1 ... V/2 - 1; values are distinct, from V/2 ... V - 1. Token 0 is filler.
- Each key is asked once, as the first token of a slot; a slot holds one query at most. Pair by
  pair, slot g = 1, 2, ... is drawn with p(g) ~ g^(a-1) among the slots still free: with
  a = 0.01 nearly 1/g, so that most questions come soon after the pairs and some very late.
- The answer is not in the input: after the query's slot comes filler, or with
  ``random_non_queries`` tokens drawn from the whole vocabulary in every place that asks nothing
  (they may repeat a key by chance, as in the published generator).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from latte.errors import LatteError
from latte.lab.data.blocks import IGNORE

SPLITS = ("train", "test")


@dataclass(frozen=True)
class MQARTable:
    """Many examples at once: ``tokens_MT``, the places of the queries and their answers, (M, N).

    ``queries_MN[m, i]`` is where the key of pair i is asked, ``answers_MN[m, i]`` its value.
    """

    tokens_MT: Tensor
    queries_MN: Tensor
    answers_MN: Tensor

    def __len__(self) -> int:
        return self.tokens_MT.shape[0]


class MQAR(Dataset):
    """MQAR examples; item i is a pure function of the arguments and i. No global random state.

    An item has ``input_ids`` (T,) int64 and ``labels`` (T,) int64: the answer **at the query's own
    position** and -100 elsewhere, so that a model's output at position t is compared with
    ``labels[t]``, without a shift. For a model that shifts labels inside, as those of Transformers
    do, use :func:`shifted_labels`.

    Args:
        length: T, even, so that the slots come out even.
        pairs: N >= 1; 4 N <= T leaves every query its slot.
        examples: how many items there are.
        vocab_size: V, even and above T.
        power_a: a > 0; 1 makes all slots equally likely.
        random_non_queries: fill with random tokens instead of 0.
        seed: chooses the examples.
        split: ``"train"`` and ``"test"`` examples come from different streams of a seed.

    Raises:
        LatteError: sizes that do not fit, in one line.
    """

    def __init__(
        self,
        length: int,
        pairs: int,
        *,
        examples: int = 100_000,
        vocab_size: int = 8192,
        power_a: float = 0.01,
        random_non_queries: bool = False,
        seed: int = 0,
        split: Literal["train", "test"] = "train",
    ) -> None:
        check_cell(length, pairs, vocab_size)
        if examples < 1:
            raise LatteError(f"MQAR: examples must be at least 1, got {examples}")
        if not power_a > 0:
            raise LatteError(f"MQAR: power_a must be above 0, got {power_a}")
        if seed < 0:
            raise LatteError(f"MQAR: seed must be 0 or more, got {seed}")
        if split not in SPLITS:
            raise LatteError(f"MQAR: split must be 'train' or 'test', got {split!r}")
        self.length, self.pairs, self.examples = length, pairs, examples
        self.vocab_size, self.power_a = vocab_size, power_a
        self.random_non_queries = random_non_queries
        self.seed, self.split = seed, split
        slots = (length - 2 * pairs) // 2
        weights = np.arange(1, slots + 1, dtype=np.float64) ** (power_a - 1)
        self.slot_probabilities = weights / weights.sum()

    def __len__(self) -> int:
        return self.examples

    def example(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens (T,), places of the queries (N,) and their answers (N,) of example ``index``."""
        if not 0 <= index < self.examples:
            raise IndexError(f"example {index} of {self.examples}")
        rng = np.random.default_rng((self.seed, SPLITS.index(self.split), index))
        half, pairs = self.vocab_size // 2, self.pairs
        keys = 1 + rng.choice(half - 1, pairs, replace=False)
        values = half + rng.choice(half, pairs, replace=False)
        # Exponential races: the slots in the order of arrival, slot g with rate p(g), are draws
        # one after another among the free ones. No loop, and the same law.
        arrivals = rng.standard_exponential(len(self.slot_probabilities)) / self.slot_probabilities
        slots = np.argsort(arrivals, kind="stable")[:pairs]
        queries = 2 * pairs + 2 * slots
        tokens = np.zeros(self.length, dtype=np.int64)
        if self.random_non_queries:
            tokens[:] = rng.integers(self.vocab_size, size=self.length)
        tokens[0 : 2 * pairs : 2] = keys
        tokens[1 : 2 * pairs : 2] = values
        tokens[queries] = keys
        return tokens, queries, values

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens, queries, values = self.example(index + self.examples if index < 0 else index)
        labels = np.full(self.length, IGNORE, dtype=np.int64)
        labels[queries] = values
        return {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}

    def table(self, examples: int | None = None) -> MQARTable:
        """The first ``examples`` examples (all by default) as int32 tensors."""
        count = self.examples if examples is None else min(examples, self.examples)
        tokens = np.empty((count, self.length), dtype=np.int32)
        queries = np.empty((count, self.pairs), dtype=np.int32)
        answers = np.empty((count, self.pairs), dtype=np.int32)
        for index in range(count):
            tokens[index], queries[index], answers[index] = self.example(index)
        return MQARTable(*(torch.from_numpy(array) for array in (tokens, queries, answers)))


def check_cell(length: int, pairs: int, vocab_size: int) -> None:
    """Raise LatteError for a length and a number of pairs that no example can have."""
    cell = f"MQAR of length {length} with {pairs} pairs"
    if vocab_size < 4 or vocab_size % 2:
        raise LatteError(
            f"{cell}: vocab_size must be even and at least 4, half of it keys and half values,"
            f" got {vocab_size}"
        )
    if pairs < 1:
        raise LatteError(f"{cell}: expected at least 1 pair")
    if length % 2:
        raise LatteError(f"{cell}: the length must be even")
    if 4 * pairs > length:
        raise LatteError(
            f"{cell}: expected a length of at least {4 * pairs}: two tokens for each pair and a"
            " slot of two for each query"
        )
    if vocab_size <= length:  # so there are keys and values enough: 4 N <= T < V
        raise LatteError(f"{cell}: vocab_size must be above the length, got {vocab_size}")


def shifted_labels(labels_BT: Tensor) -> Tensor:
    """Labels for a model that shifts them inside: what position t is to say stands at t + 1.

    The last position is never asked (a slot has two tokens), so nothing is lost.
    """
    shifted = torch.full_like(labels_BT, IGNORE)
    shifted[..., 1:] = labels_BT[..., :-1]
    return shifted
