"""Negative log-likelihood of held-out documents at a context length, in constant memory.

The text comes in windows of n inputs (`latte.lab.data.blocks.EvaluationText`). A window is scored
alone: its state begins empty, so a prediction sees at most n tokens and never another document.
All lengths score the same tokens and only the context differs: the token at position i of its
document sees ((i - 1) mod n) + 1 tokens before it, counting the start token at position 0.

A window is read in segments, the cache carrying the state from one to the next. For a model with
a constant-size state, memory is then constant in n; softmax attention keeps all of its window.
NLLs are summed in fp64 and divided by the number of tokens at the very end: perplexity is
exp(sum / tokens), not a mean of batch means. Shape suffixes: R windows side by side, T tokens,
V vocabulary, N = R * T.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from latte.lab.data.blocks import IGNORE, EvaluationText, bits_per_byte, perplexity
from latte.models.cache_name import CACHE_NAME
from latte.models.registry import carries_state
from latte.parallel import context_parallel, shard_batch
from latte.parallel.batch import context_group

LOGIT_BYTES = 256 * 2**20  # fp32 logits held at a time
BATCH_LOGIT_BYTES = 2**30  # of what a model returns for a segment of a batch, counted in fp32


@dataclass(frozen=True)
class Score:
    """Summed NLL in nats of `tokens` tokens, which spell `text_bytes` bytes of UTF-8.

    `by_position` has (first position, tokens, NLL) of the positions between the given edges.
    """

    nll: float
    tokens: int
    text_bytes: float
    by_position: tuple[tuple[int, int, float], ...] = ()

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        return perplexity(self.nll, self.tokens)

    @property
    def bits_per_byte(self) -> float:
        return bits_per_byte(self.nll, self.text_bytes)


def shares_of_processes(device: torch.device, together: int) -> dict[str, Any]:
    """Options of `score` for all processes. Groups of ``together`` processes share each window."""
    processes = dist.get_world_size() if dist.is_initialized() else 1
    if processes == 1:
        return {}
    group = context_group(device, together) if together > 1 else None
    return {"rank": dist.get_rank() // together, "processes": processes // together, "group": group}


def score(
    model: nn.Module,
    text: EvaluationText,
    length: int,
    *,
    segment: int = 1024,
    batch_tokens: int = 16384,
    bf16: bool = False,
    rank: int = 0,
    processes: int = 1,
    group: Any = None,
    positions: Sequence[int] = (),
    on_batch: Callable[[int], Any] | None = None,
) -> Score:
    """Score all windows of `length` tokens.

    Args:
        model: Causal language model of Transformers. Its mode (train or eval) is not changed.
        length: Window length n in tokens.
        segment: Number of tokens read at a time. Longer windows pass the cache from segment to
            segment. Baselines keep their states in other ways, so they read a window at once.
        batch_tokens: Number of input tokens in a batch (at least one window). It is reduced if the
            logits of a segment would take more than 1 GiB.
        bf16: Whether to autocast to bfloat16. The NLL is computed in fp32 and summed in fp64.
        rank, processes: This process's rank, and the number of processes. Each process takes every
            `processes`-th batch. All make the same number of forward passes, as sharded models
            need. The sums are reduced.
        group: Processes that divide each window among them (:mod:`latte.parallel`). They read
            their parts at the same time.
        positions: Rising positions in a window that divide its scores. [64, 256] gives separate
            scores of the predictions from inputs 0 to 63, 64 to 255, and from 256 on.
        on_batch: Function that is called after each batch with its number of scored tokens.
    """
    device = next(model.parameters()).device
    if not carries_state(model):
        segment = max(segment, length)
    autocast: Any = torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()
    was_training = model.training
    model.eval()
    edges = [0, *(position for position in positions if position < length)]
    total = torch.zeros(len(edges), 3, dtype=torch.float64, device=device)  # NLL, tokens, bytes
    config: Any = model.config
    logits = 4 * min(segment, length) * config.vocab_size  # bytes of one window's
    rows = min(batch_tokens // length, BATCH_LOGIT_BYTES // logits)
    source = text.batches(length, max(1, rows))
    try:
        with torch.no_grad(), autocast:
            for batch, mine in _share(source, rank, processes):
                if group is None:
                    scored = score_batch(model, batch, segment, edges)
                else:
                    scored = _score_part(model, batch, group, edges)
                if mine:
                    total += scored
                if on_batch is not None:
                    on_batch(int((batch["targets"] != IGNORE).sum()))
    finally:
        model.train(was_training)
    if processes > 1 or group is not None:
        dist.all_reduce(total)
    nll, tokens, text_bytes = total.sum(0).tolist()
    parts = [(edge, int(n), x) for edge, (x, n, _) in zip(edges, total.tolist(), strict=True)]
    return Score(nll, int(tokens), text_bytes, tuple(parts if positions else ()))


def _share(
    source: Iterator[dict[str, torch.Tensor]], rank: int, processes: int
) -> Iterator[tuple[dict[str, torch.Tensor], bool]]:
    """This process's batches; the last round repeats one (not counted) where none is left."""
    while group := list(islice(source, processes)):
        mine = rank < len(group)
        yield group[rank if mine else 0], mine


def score_batch(
    model: nn.Module, batch: dict[str, torch.Tensor], segment: int, edges: list[int]
) -> torch.Tensor:
    """(edges, 3): summed NLL, tokens and, in the first row, bytes of a batch, fp64, on the device.

    Padding is on the right of causal models and has no target: it needs no mask.
    """
    device = next(model.parameters()).device
    inputs_RT, targets_RT = batch["input_ids"].to(device), batch["targets"].to(device)
    length = inputs_RT.shape[1]
    found = torch.zeros(len(edges), 3, dtype=torch.float64, device=device)
    found[0, 2] = batch["target_bytes"].sum()
    cache = None
    for start in range(0, length, segment):
        end = min(start + segment, length)
        output = model(
            input_ids=inputs_RT[:, start:end],
            use_cache=length > segment,
            **{CACHE_NAME: cache},
        )
        cache = getattr(output, CACHE_NAME) if length > segment else None
        found[:, :2] += _between(edges, start, output.logits, targets_RT[:, start:end])
    return found


def _score_part(
    model: nn.Module, batch: dict[str, torch.Tensor], group: Any, edges: list[int]
) -> torch.Tensor:
    """As `score_batch`, of this process's part of each window; bytes are the first one's."""
    device = next(model.parameters()).device
    short = (0, max(0, dist.get_world_size(group) - batch["targets"].shape[1]))
    part = shard_batch(
        {
            "input_ids": F.pad(batch["input_ids"], short).to(device),
            "shift_labels": F.pad(batch["targets"], short, value=IGNORE).to(device),
        },
        group,
    )
    targets_RT = part.pop("shift_labels")
    rank, processes = dist.get_rank(group), dist.get_world_size(group)
    first = rank * (batch["targets"].shape[1] + short[1]) // processes
    found = torch.zeros(len(edges), 3, dtype=torch.float64, device=device)
    found[0, 2] = batch["target_bytes"].sum() * (rank == 0)
    with context_parallel(model, group):
        found[:, :2] = _between(edges, first, model(**part).logits, targets_RT)
    return found


def _between(
    edges: list[int], first: int, logits_RTV: torch.Tensor, targets_RT: torch.Tensor
) -> torch.Tensor:
    """(edges, 2): summed NLL and tokens from each edge to the next; T begins at `first`."""
    length = targets_RT.shape[1]
    cuts = [min(max(edge - first, 0), length) for edge in edges] + [length]
    parts = [(logits_RTV[:, a:b], targets_RT[:, a:b]) for a, b in pairwise(cuts)]
    return torch.stack([torch.stack([_summed_nll(*x), (x[1] != IGNORE).sum()]) for x in parts])


def _summed_nll(logits_RTV: torch.Tensor, targets_RT: torch.Tensor) -> torch.Tensor:
    """Sum of -log p(target), the logarithms in fp32, chunk by chunk, the sum in fp64."""
    logits_NV, targets_N = logits_RTV.flatten(0, 1), targets_RT.flatten()
    rows = max(1, LOGIT_BYTES // (4 * logits_NV.shape[1]))
    nll = torch.zeros((), dtype=torch.float64, device=logits_NV.device)
    for start in range(0, len(targets_N), rows):
        part = slice(start, start + rows)
        losses = F.cross_entropy(
            logits_NV[part].float(), targets_N[part], ignore_index=IGNORE, reduction="none"
        )
        nll += losses.double().sum()
    return nll
