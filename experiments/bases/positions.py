"""Perplexity by position: every text is read once, as one row of up to N tokens.

* `position`: NLL of the tokens between two edges of the row, such as 4,097 to 8,192. A part that a
  text does not fill is left out.
* `context`: NLL of the same tokens of a text with fewer or more tokens before them, such as 4k,
  16k and 64k. The row begins so many tokens before them, behind a start token.

A long row is read in segments through the model's cache: in constant memory, if the state is. A
base reads as far as it is told to. Sums are in fp64, logarithms in fp32
(`latte.lab.train.scoring`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from experiments.bases.reading import segment_of
from experiments.bases.results import Row
from latte.errors import LatteError
from latte.lab.evaluate.sides import keeps_all_tokens
from latte.lab.train.scoring import score_batch

KEY = ("corpus", "text", "kind", "first", "last", "context")
SETTINGS = ("digest", "start", "dtype", "segment")
VALUES = ("tokens", "loss", "seconds")


@dataclass(frozen=True)
class Plan:
    """What is scored of every text, in tokens.

    Attributes:
        edges: where the parts of a row end, rising.
        contexts: tokens before those that are scored with more or less context, rising.
        scored: how many those are; they follow the longest context.
        base_max: a base's rows are no longer.
    """

    edges: tuple[int, ...]
    contexts: tuple[int, ...] = ()
    scored: int = 1024
    base_max: int | None = None

    def __post_init__(self) -> None:
        for name in ("edges", "contexts"):
            values = getattr(self, name)
            if list(values) != sorted(set(values)) or any(value < 1 for value in values):
                raise LatteError(f"{name}: expected rising numbers of at least 1, got {values}")

    @property
    def most(self) -> int:
        """Tokens of a text that are read at most."""
        ends = [self.contexts[-1] + self.scored] if self.contexts else []
        return max([*self.edges[-1:], *ends])

    def rows(self, length: int, limit: int | None) -> list[Part]:
        """What to score of a text of `length` tokens, by a model that reads `limit` at most."""
        limit = length if limit is None else min(length, limit)
        edges = [edge for edge in self.edges if edge <= limit]
        found = [Part("position", 0, tuple(edges))] if edges else []
        if not self.contexts or length < self.contexts[-1] + self.scored:
            return found
        end = self.contexts[-1]
        for context in self.contexts:
            if context + self.scored <= limit:
                ends = (context, context + self.scored)
                found.append(Part("context", end - context, ends))
        # The longest context is the row by position, read on.
        if edges and found[-1].kind == "context" and found[-1].edges[0] == edges[-1]:
            found = [Part("both", 0, (*edges, edges[-1] + self.scored)), *found[1:-1]]
        return found


@dataclass(frozen=True)
class Part:
    """A row to read: tokens from `begin` to `begin + edges[-1]` of a text, behind a start token.

    `kind`: `position`: every part between edges is scored; `context`: the last one; `both`.
    """

    kind: str
    begin: int
    edges: tuple[int, ...]

    def keys(self) -> list[Row]:
        """The measurements that it gives, by the columns of `KEY` that it decides."""
        spans = list(zip((0, *self.edges), self.edges, strict=False))
        found = []
        for place, (first, last) in enumerate(spans):
            last_one = place == len(spans) - 1
            kind = "position" if self.kind == "both" and not last_one else self.kind
            kind = "context" if kind == "both" else kind
            if kind == "context" and not last_one:
                continue
            found.append(
                {
                    "kind": kind,
                    "first": self.begin + first,
                    "last": self.begin + last,
                    "context": first if kind == "context" else "",
                }
            )
        return found


@torch.no_grad()
def score_part(model: Any, ids: np.ndarray, start: int, part: Part, segment: int) -> list[Row]:
    """A row's measurements: `Part.keys` with tokens, loss (nats a token) and seconds of the row.

    Args:
        ids: (T,) of the text, without a start token.
    """
    length = part.edges[-1]
    targets = torch.from_numpy(ids[part.begin : part.begin + length])[None]
    batch = {
        "input_ids": torch.cat([torch.tensor([[start]]), targets[:, :-1]], 1),
        "targets": targets,
        "target_bytes": torch.zeros(1),
    }
    began = time.perf_counter()
    sums = score_batch(model, batch, segment, [0, *part.edges[:-1]]).tolist()
    seconds = time.perf_counter() - began
    keys = part.keys()
    return [
        {**key, "tokens": int(tokens), "loss": nll / tokens, "seconds": round(seconds, 3)}
        for key, (nll, tokens, _) in zip(keys, sums[-len(keys) :], strict=True)
    ]


def reach(model: Any, plan: Plan) -> int | None:
    """The most tokens that a model reads; None: as many as there are."""
    return plan.base_max if keeps_all_tokens(model) else None


def score_text(
    model: Any, ids: np.ndarray, start: int, parts: Sequence[Part], segment: int
) -> list[Row]:
    """All parts of a text."""
    size = segment_of(model, segment)
    return [row for part in parts for row in score_part(model, ids, start, part, size)]
