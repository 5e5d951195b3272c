"""Negative log-likelihood of held-out documents at a context length, in constant memory.

Protocol. Every document is cut from its start into windows of n tokens (the last one may be
shorter). A window is scored alone: its first input is the token before it (the start token for
a document's first window), its state begins empty, so a prediction sees at most n tokens and
never another document. Every token of the text is scored exactly once, whatever n is, so all
lengths score the same tokens and only the context differs: a token at position i of its document
sees (i mod n) + 1 tokens, including the start token. Separators are not scored.

A window is read in segments, the cache carrying the state from one to the next. For a model with
a constant-size state, memory is then constant in n; softmax attention keeps all of its window.
NLLs are summed in fp64 and divided by the number of tokens at the very end: perplexity is
exp(sum / tokens), not a mean of batch means.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

LOGIT_BYTES = 256 * 2**20  # fp32 logits held at a time


@dataclass(frozen=True)
class Score:
    """Summed NLL in nats of `tokens` tokens, which spell `text_bytes` bytes of UTF-8."""

    nll: float
    tokens: int
    text_bytes: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        return self.nll / math.log(2) / self.text_bytes


@dataclass(frozen=True)
class HeldOut:
    """Held-out documents as token ids without specials, and what they weigh in bytes."""

    documents: Sequence[np.ndarray]
    start_token: int
    text_bytes: int

    @property
    def tokens(self) -> int:
        return sum(len(document) for document in self.documents)


@dataclass(frozen=True)
class Batch:
    """Windows side by side, padded on the right: inputs, targets (-100 where padded), (R, n)."""

    inputs_RT: torch.Tensor
    targets_RT: torch.Tensor


def windows(held_out: HeldOut, length: int) -> list[tuple[int, int, int]]:
    """(document, first, end) of every window, longest first (stable), so batches pad little."""
    spans = [
        (index, first, min(first + length, len(document)))
        for index, document in enumerate(held_out.documents)
        for first in range(0, len(document), length)
    ]
    return sorted(spans, key=lambda span: span[1] - span[2])


def batches(held_out: HeldOut, length: int, batch_tokens: int) -> Iterator[Batch]:
    """Batches of windows of at most `batch_tokens` inputs (one window at least)."""
    spans = windows(held_out, length)
    start = 0
    while start < len(spans):
        longest = spans[start][2] - spans[start][1]
        rows = spans[start : start + max(1, batch_tokens // longest)]
        inputs = np.full((len(rows), longest), held_out.start_token, dtype=np.int64)
        targets = np.full((len(rows), longest), -100, dtype=np.int64)
        for row, (index, first, end) in enumerate(rows):
            document = held_out.documents[index]
            targets[row, : end - first] = document[first:end]
            inputs[row, 1 : end - first] = document[first : end - 1]
            if first > 0:
                inputs[row, 0] = document[first - 1]
        yield Batch(torch.from_numpy(inputs), torch.from_numpy(targets))
        start += len(rows)


def score(
    model: nn.Module,
    held_out: HeldOut,
    length: int,
    *,
    segment: int = 1024,
    batch_tokens: int = 16384,
    bf16: bool = False,
    rank: int = 0,
    processes: int = 1,
    on_batch: Any = None,
) -> Score:
    """Score all windows of `length` tokens.

    Args:
        model: a causal language model of transformers; it is left in its mode.
        length: window length n, in tokens.
        segment: tokens read at a time; longer windows carry the cache from segment to segment.
        batch_tokens: inputs side by side in a batch.
        bf16: autocast to bfloat16; the NLL is computed in fp32 and summed in fp64.
        rank, processes: with several processes each takes every `processes`-th batch, all make
            the same number of forward passes (sharded models need that), and the sums are
            reduced.
        on_batch: called with the number of tokens scored after each batch.
    """
    device = next(model.parameters()).device
    autocast: Any = torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()
    was_training = model.training
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)
    try:
        with torch.no_grad(), autocast:
            for batch, mine in _share(batches(held_out, length, batch_tokens), rank, processes):
                counted = _score_batch(model, batch, segment, device)
                if mine:
                    total += counted
                if on_batch is not None:
                    on_batch(int((batch.targets_RT != -100).sum()))
    finally:
        model.train(was_training)
    if processes > 1:
        torch.distributed.all_reduce(total)
    nll, tokens = total.tolist()
    return Score(nll, int(tokens), held_out.text_bytes)


def _share(source: Iterator[Batch], rank: int, processes: int) -> Iterator[tuple[Batch, bool]]:
    """This process's batches; the last round repeats one (not counted) where none is left."""
    group: list[Batch] = []
    for batch in source:
        group.append(batch)
        if len(group) == processes:
            yield group[rank], True
            group = []
    if group:
        yield (group[rank], True) if rank < len(group) else (group[0], False)


def _score_batch(
    model: nn.Module, batch: Batch, segment: int, device: torch.device
) -> torch.Tensor:
    """[summed NLL, tokens] of one batch, fp64, on the device."""
    inputs_RT, targets_RT = batch.inputs_RT.to(device), batch.targets_RT.to(device)
    length = inputs_RT.shape[1]
    total = torch.zeros(2, dtype=torch.float64, device=device)
    cache = None
    for start in range(0, length, segment):
        end = min(start + segment, length)
        output = model(
            input_ids=inputs_RT[:, start:end],
            past_key_values=cache,
            use_cache=length > segment,
        )
        cache = output.past_key_values if length > segment else None
        total += _summed_nll(output.logits, targets_RT[:, start:end])
    return total


def _summed_nll(logits_RTV: torch.Tensor, targets_RT: torch.Tensor) -> torch.Tensor:
    """[sum of -log p(target), number of targets], the logarithms in fp32, chunk by chunk."""
    logits_NV, targets_N = logits_RTV.flatten(0, 1), targets_RT.flatten()
    rows = max(1, LOGIT_BYTES // (4 * logits_NV.shape[1]))
    nll = torch.zeros((), dtype=torch.float64, device=logits_NV.device)
    for start in range(0, len(targets_N), rows):
        part = slice(start, start + rows)
        losses = F.cross_entropy(
            logits_NV[part].float(), targets_N[part], ignore_index=-100, reduction="none"
        )
        nll += losses.double().sum()
    return torch.stack([nll, (targets_N != -100).sum().double()])
