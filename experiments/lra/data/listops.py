"""ListOps: the value of a nested list expression in prefix notation, one of ten digits.

    [MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]    is 5

Source: Nangia and Bowman, *ListOps*, arXiv 1804.06028, with the lengths of Long Range Arena
(Tay et al., arXiv 2011.04006). A node above the deepest level is an operator with probability
1/4 and a digit otherwise; an operator, one of MIN, MAX, MED (the median, rounded down) and SM (the
sum modulo 10), has 2 to `max_args` arguments. A tree is kept if its length, counted without the
parentheses of the published files, is **above** `min_length` and **below** `max_length`.

The published input pipeline of Long Range Arena drops all brackets in its tokeniser, so that the
nesting is lost; here, as in the later papers, the closing bracket is a token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from experiments.lra.data.examples import (
    Examples,
    Task,
    Tell,
    check_counts,
    generated,
    in_order,
)
from latte.errors import LatteError

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
TOKENS = ("<pad>", *map(str, range(10)), *OPERATORS, "]")
DIGIT, OPERATOR, END = 1, 11, 15  # ids of 0, of [MIN and of ]
OPERATOR_PROBABILITY = 0.25
FORMAT = 1  # of what the generator makes; part of the cached file's name
MAX_ATTEMPTS = 100_000  # trees tried for one expression, duplicates met in a row


@dataclass
class ListOpsOptions:
    """`data` of a ListOps recipe; the defaults are Long Range Arena's."""

    name: ClassVar[str] = "listops"
    vocab_size: ClassVar[int] = len(TOKENS)
    classes: ClassVar[tuple[str, ...]] = tuple(map(str, range(10)))
    towers: ClassVar[int] = 1

    min_length: int = 500  # exclusive
    max_length: int = 2000  # exclusive
    max_depth: int = 10
    max_args: int = 10
    train_examples: int = 96_000
    validation_examples: int = 2_000
    test_examples: int = 2_000
    seed: int = 0

    @property
    def longest(self) -> int:
        return self.max_length - 1

    def check(self) -> None:
        """Raise LatteError for what no expression can satisfy."""
        check_counts(self, "train_examples", "validation_examples", "test_examples", "max_depth")
        if self.max_args < 2:
            raise LatteError(f"data.max_args: expected at least 2, got {self.max_args}")
        if self.seed < 0:
            raise LatteError(f"data.seed: expected 0 or more, got {self.seed}")
        if self.min_length < 0 or self.max_length - self.min_length < 2:
            raise LatteError(
                "data.min_length, data.max_length: expected a length between them (both are"
                f" exclusive), got {self.min_length} and {self.max_length}"
            )
        longest = 1
        for _ in range(self.max_depth - 1):
            longest = 2 + self.max_args * longest
        if longest <= self.min_length:
            raise LatteError(
                f"data.min_length: expected below {longest}, the longest expression of max_depth"
                f" {self.max_depth} and max_args {self.max_args}, got {self.min_length}"
            )

    def load(self, cache: Path, progress: bool = False, workers: int = 1) -> Task:
        """The task; its splits are made once and kept in `cache`.

        Raises:
            LatteError: as for :func:`make_splits` and
                :func:`experiments.lra.data.examples.generated`.
        """
        return generated(self, FORMAT, make_splits, cache, progress, workers)


class _TooLong(Exception):
    """A tree has outgrown `max_length`."""


def expression(options: ListOpsOptions, index: int) -> tuple[np.ndarray, int]:
    """Token ids (T,) uint8 and the value of candidate `index`: a pure function of both.

    Trees are drawn until one has a permitted length. No global random state.

    Raises:
        LatteError: no tree of that length was met.
    """
    draw = _uniforms(np.random.default_rng((options.seed, index))).__next__
    for _ in range(MAX_ATTEMPTS):
        tokens: list[int] = []
        try:
            value = _grow(tokens, 1, draw, options)
        except _TooLong:
            continue
        if options.min_length < len(tokens) < options.max_length:
            return np.array(tokens, dtype=np.uint8), value
    raise LatteError(
        f"ListOps: none of {MAX_ATTEMPTS:,} expressions had a length between"
        f" {options.min_length} and {options.max_length}; expected a wider range, or another"
        " max_depth or max_args"
    )


def _uniforms(rng: np.random.Generator) -> Iterator[float]:
    while True:
        yield from rng.random(512).tolist()


def _grow(tokens: list[int], depth: int, draw: Callable[[], float], options: ListOpsOptions) -> int:
    """Append a node with all that is below it; returns its value."""
    if depth >= options.max_depth or draw() > OPERATOR_PROBABILITY:
        digit = int(10 * draw())
        tokens.append(DIGIT + digit)
        return digit
    operator = int(len(OPERATORS) * draw())
    tokens.append(OPERATOR + operator)
    values = [
        _grow(tokens, depth + 1, draw, options)
        for _ in range(2 + int((options.max_args - 1) * draw()))
    ]
    tokens.append(END)
    if len(tokens) >= options.max_length:
        raise _TooLong
    return _apply(operator, values)


def _apply(operator: int, values: list[int]) -> int:
    if operator == 0:
        return min(values)
    if operator == 1:
        return max(values)
    if operator == 2:
        values.sort()
        return (values[(len(values) - 1) // 2] + values[len(values) // 2]) // 2
    return sum(values) % 10


def to_text(tokens_T: np.ndarray) -> str:
    """Token ids as people write them."""
    return " ".join(TOKENS[token] for token in tokens_T)


def make_splits(
    options: ListOpsOptions, tell: Tell | None = None, workers: int = 1
) -> dict[str, Examples]:
    """The first distinct candidates: the test split, then validation, then train.

    So no expression is in two splits, and another number of training examples changes neither of
    the others. `tell` is called with 1 for every example; `workers` processes share the work.

    Raises:
        LatteError: impossible options, or fewer distinct expressions than examples.
    """
    options.check()
    wanted = {
        "test": options.test_examples,
        "validation": options.validation_examples,
        "train": options.train_examples,
    }
    seen: set[bytes] = set()
    splits = {}
    candidates = in_order(partial(expression, options), workers)
    for split, count in wanted.items():
        sequences: list[np.ndarray] = []
        values: list[int] = []
        repeated = 0
        while len(sequences) < count:
            tokens, value = next(candidates)
            key = hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()
            if key in seen:
                repeated += 1
                if repeated >= MAX_ATTEMPTS:
                    raise LatteError(
                        f"ListOps: only {len(seen):,} different expressions were found, expected"
                        f" {sum(wanted.values()):,}: ask for fewer examples or a wider range of"
                        " lengths"
                    )
                continue
            repeated = 0
            seen.add(key)
            sequences.append(tokens)
            values.append(value)
            if tell is not None:
                tell(1)
        splits[split] = Examples.pack(sequences, values)
    candidates.close()  # and the processes with it
    return splits
