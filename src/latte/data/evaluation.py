"""Held-out text for exact scores: every token once, with its bytes, at any context length.

C: context length, B: batch. Perplexity is exp(sum of NLL / tokens scored); bits per byte is
sum of NLL / ln 2 / bytes scored. Sums only: a mean of means depends on how text was cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from latte.data.blocks import IGNORE
from latte.data.tokenfile import TokenFile
from latte.errors import LatteError


@dataclass(frozen=True)
class EvaluationWindow:
    """``targets[i]`` is the token after ``input_ids[i]``; both (n,) int64, n <= C.

    ``target_bytes`` (n,) float64: text bytes behind each target; 0 for an end-of-text token.
    ``document``, ``start``: where ``input_ids[0]`` is (start 0 is the document's bos).
    """

    input_ids: np.ndarray
    targets: np.ndarray
    target_bytes: np.ndarray
    document: int
    start: int


class EvaluationText:
    """Contiguous held-out tokens, by document or joined.

    Each document is ``bos, text..., eos``, and everything after bos is scored: all of the text's
    bytes and its end. Windows of C inputs follow one another without overlap and each predicts the
    token after its last, so that **every token is scored exactly once whatever C is**, and scores
    at several C are over the same tokens and bytes.

    Args:
        tokens: the held-out token file.
        join: treat all documents as one long one (bos and eos stay in it, as tokens; a bos is no
            target). Gives contexts longer than the documents.
        max_tokens: score about this many tokens: whole documents, spread evenly over the file,
            until they suffice; the last one may be cut. All of it by default.
    """

    def __init__(
        self, tokens: TokenFile, *, join: bool = False, max_tokens: int | None = None
    ) -> None:
        if max_tokens is not None and max_tokens < 1:
            raise LatteError(f"max_tokens must be at least 1, got {max_tokens}")
        self.tokens = tokens
        self.join = join
        self._chosen = _choose(tokens, max_tokens)
        self.num_documents = 1 if join else len(self._chosen)
        self.num_targets = sum(stop - start - 1 for start, stop, _ in self._chosen)
        self.num_bytes = sum(count for _, _, count in self._chosen)

    def documents(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Each document's ids (n,) int64 and the bytes behind each id (n,) float64."""
        parts = []
        for start, stop, count in self._chosen:
            ids = self.tokens.tokens[start:stop].astype(np.int64)
            parts.append((ids, self._bytes_of(ids, count)))
            if not self.join:
                yield parts.pop()
        if self.join:
            yield tuple(map(np.concatenate, zip(*parts, strict=True)))  # type: ignore[misc]

    def _bytes_of(self, ids: np.ndarray, count: int) -> np.ndarray:
        """Exact for byte-level tokenisers; else the document's bytes, shared out evenly."""
        lengths = self.tokens.byte_lengths
        if lengths is not None:
            return lengths[ids].astype(np.float64)
        text = np.ones(len(ids))
        text[0] = 0
        if ids[-1] == self.tokens.eos and len(ids) > 1:
            text[-1] = 0
        return text * (count / max(1.0, text.sum()))

    def windows(self, context_length: int) -> Iterator[EvaluationWindow]:
        """The windows of every document, in order; a document's last one may be shorter."""
        if context_length < 1:
            raise LatteError(f"context_length must be at least 1, got {context_length}")
        for number, (ids, sizes) in enumerate(self.documents()):
            targets = ids[1:].copy()
            if self.join:  # what opens a document is not predicted: it is the same at any C
                starts = np.cumsum([stop - start for start, stop, _ in self._chosen])[:-1]
                targets[starts - 1] = IGNORE
            for start in range(0, len(targets), context_length):
                end = start + context_length
                yield EvaluationWindow(
                    ids[:-1][start:end],
                    targets[start:end],
                    sizes[1:][start:end],
                    number,
                    start,
                )

    def batches(self, context_length: int, batch_size: int) -> Iterator[dict[str, torch.Tensor]]:
        """Windows in batches, longest first, padded on the right.

        ``input_ids``, ``attention_mask`` (B, n) int64; ``targets`` (B, n) int64, already shifted,
        -100 where there is nothing to score; ``target_bytes`` (B,) float64, each row's sum.
        """
        if batch_size < 1:
            raise LatteError(f"batch_size must be at least 1, got {batch_size}")
        windows = sorted(self.windows(context_length), key=lambda window: -len(window.targets))
        for first in range(0, len(windows), batch_size):
            rows = windows[first : first + batch_size]
            shape = (len(rows), len(rows[0].targets))
            input_ids = np.full(shape, self.tokens.eos, np.int64)
            mask = np.zeros(shape, np.int64)
            targets = np.full(shape, IGNORE, np.int64)
            for row, window in enumerate(rows):
                n = len(window.targets)
                input_ids[row, :n] = window.input_ids
                targets[row, :n] = window.targets
                mask[row, :n] = 1
            yield {
                "input_ids": torch.from_numpy(input_ids),
                "attention_mask": torch.from_numpy(mask),
                "targets": torch.from_numpy(targets),
                "target_bytes": torch.tensor(
                    [window.target_bytes.sum() for window in rows], dtype=torch.float64
                ),
            }


def _choose(tokens: TokenFile, max_tokens: int | None) -> list[tuple[int, int, int]]:
    """(first token, end, text bytes) of the documents to score, in the file's order."""
    numbers = np.arange(tokens.num_documents)
    sizes = np.diff(tokens.offsets)
    if max_tokens is None or max_tokens >= sizes.sum() - len(sizes):
        chosen = {int(number): int(sizes[number]) for number in numbers}
    else:
        # Golden-ratio steps visit the documents evenly, whatever number of them is needed.
        places = np.argsort(np.mod(numbers * 0.6180339887498949, 1.0), kind="stable")
        chosen, left = {}, max_tokens
        for number in places:
            take = min(int(sizes[number]), left + 1)
            chosen[int(number)] = take
            left -= take - 1
            if left <= 0:
                break
    result = []
    for number in sorted(chosen):
        start, take = int(tokens.offsets[number]), chosen[number]
        count = int(tokens.document_bytes[number])
        if take < sizes[number]:
            if tokens.byte_lengths is not None:
                count = int(tokens.byte_lengths[tokens.tokens[start : start + take]].sum())
            else:
                count = round(count * (take - 1) / max(1, int(sizes[number]) - 2))
        result.append((start, start + take, count))
    return result


def perplexity(nll: float, targets: int) -> float:
    """exp(nll / targets), nll the sum of negative log-likelihoods in nats."""
    if targets < 1:
        raise LatteError("perplexity needs at least one scored token, got none")
    mean = nll / targets
    return math.exp(mean) if mean < 700 else math.inf


def bits_per_byte(nll: float, num_bytes: float) -> float:
    """nll / ln 2 / bytes, nll the sum of negative log-likelihoods in nats."""
    if num_bytes <= 0:
        raise LatteError("bits per byte needs at least one scored byte, got none")
    return nll / math.log(2) / num_bytes
