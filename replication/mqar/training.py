"""One MQAR run: train a small model until it answers, and count its answers.

The loop is its own, not `LatteTrainer`: only the queries are asked, so the vocabulary's logits are
needed at N of T positions, which no `labels=` of a causal model allows for and which saves most of
the time at width 64; a run is minutes long, has no text, tokenizer or perplexity, ends when it
succeeds, and a grid has hundreds of them, for which checkpoints and TensorBoard are mere overhead.
What could be shared is: the schedule, the models and the figures.

B: examples of a batch, T: tokens, N: queries of an example, E: hidden size, V: vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.train.steps import adamw, autocast, take_step
from latte.train.trainer import learning_rate_factor
from replication.mqar.data import MQAR, MQARTable
from replication.mqar.recipe import Cell, MQARData, MQARRecipe, Run

Tables = dict[str, MQARTable]


@dataclass(frozen=True)
class Outcome:
    """How a run ended, as plain values. `stopped`: "accuracy", "epochs", "minutes", "diverged"."""

    parameters: int
    cells: list[dict[str, Any]]  # length, pairs, correct, queries, accuracy
    stopped: str
    epochs: float
    steps: int
    seconds: float  # of training and of scoring on the way
    curve: list[dict[str, float]]


def make_table(cell: Cell, data: MQARData, split: Any) -> MQARTable:
    """All examples of a cell."""
    return MQAR(
        cell.length,
        cell.pairs,
        examples=cell.examples,
        vocab_size=data.vocab_size,
        power_a=data.power_a,
        random_non_queries=data.random_non_queries,
        seed=data.seed,
        split=split,
    ).table()


def query_logits(model: Any, tokens_BT: Tensor, queries_BN: Tensor) -> Tensor:
    """The logits at the queries alone, (B, N, V)."""
    hidden_BTE = model.base_model(input_ids=tokens_BT, use_cache=False).last_hidden_state
    index = queries_BN[..., None].expand(-1, -1, hidden_BTE.shape[-1])
    return model.get_output_embeddings()(hidden_BTE.gather(1, index))


def count_correct(
    model: Any, table: MQARTable, batch_size: int, *, bf16: bool = False
) -> tuple[int, int]:
    """(queries answered with the right token of the whole vocabulary, queries)."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    correct = torch.zeros((), dtype=torch.int64, device=device)
    with torch.no_grad(), autocast(device, bf16):
        for start in range(0, len(table), batch_size):
            tokens, queries, answers = _batch(table, slice(start, start + batch_size), device)
            correct += (query_logits(model, tokens, queries).argmax(-1) == answers).sum()
    model.train(was_training)
    return int(correct), table.answers_MN.numel()


def train_run(
    run: Run,
    recipe: MQARRecipe,
    train_tables: Tables,
    test_tables: Tables,
    device: torch.device,
    on_evaluation: Callable[[dict[str, float]], Any] | None = None,
    on_step: Callable[[], Any] | None = None,
) -> Outcome:
    """Train one model from scratch by the recipe; tables by the cells' names.

    A step whose loss or gradient is not finite ends the run, before it can reach the weights.
    """
    section = recipe.training
    model = _fresh_model(run).to(device)
    sizes = {cell.name: _batch_size(cell, recipe) for cell in (*run.train, *run.tests)}
    per_epoch = sum(-(-len(train_tables[c.name]) // sizes[c.name]) for c in run.train)
    steps = per_epoch * section.max_epochs
    optimizer = _optimizer(model, run, recipe)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: learning_rate_factor(
            step, steps, warmup=section.warmup_steps, schedule="cosine"
        ),
    )
    due = {
        epoch * per_epoch + math.ceil(per_epoch * part / section.evaluations_per_epoch)
        for epoch in range(section.max_epochs)
        for part in range(1, section.evaluations_per_epoch + 1)
    }
    began, curve, stopped, step = time.perf_counter(), [], "epochs", 0
    scored: list[dict[str, Any]] | None = None
    summed, counted = torch.zeros((), dtype=torch.float64, device=device), 0
    model.train()
    for name, rows in _batches(run, train_tables, sizes, section.max_epochs):
        tokens, queries, answers = _batch(train_tables[name], rows, device)
        with autocast(device, section.bf16):
            logits = query_logits(model, tokens, queries)
        loss = F.cross_entropy(logits.float().flatten(0, 1), answers.flatten())
        if not take_step(model, loss, optimizer, scheduler, section.max_grad_norm):
            stopped = "diverged"
            break
        step += 1
        summed += loss.detach().double()
        counted += 1
        if on_step is not None:
            on_step()
        late = section.max_minutes is not None and (
            time.perf_counter() - began > 60 * section.max_minutes
        )
        if step in due or late:
            scored, complete = _score(model, run, recipe, test_tables, sizes)
            worst = min(cell["accuracy"] for cell in scored)
            point = {
                "step": step,
                "epoch": step / per_epoch,
                "seconds": round(time.perf_counter() - began, 2),
                "loss": float(summed) / counted,
                **{f"{c['length']}x{c['pairs']}": c["accuracy"] for c in scored},
            }
            curve.append(point)
            summed.zero_()
            counted = 0
            if on_evaluation is not None:
                on_evaluation(point)
            if complete and worst >= section.stop_at:
                stopped = "accuracy"
                break
            if late:
                stopped = "minutes"
                break
    seconds = time.perf_counter() - began
    if stopped != "accuracy":
        scored, _ = _score(model, run, recipe, test_tables, sizes, everything=True)
    assert scored is not None
    parameters = sum(p.numel() for p in model.parameters())
    return Outcome(parameters, scored, stopped, step / per_epoch, step, round(seconds, 2), curve)


def _score(
    model: Any,
    run: Run,
    recipe: MQARRecipe,
    tables: Tables,
    sizes: dict[str, int],
    everything: bool = False,
) -> tuple[list[dict[str, Any]], bool]:
    """Accuracies by cell, and whether all test examples were scored.

    On the way only `quick_examples` are, unless they pass: then the rest has to confirm it.
    """
    section = recipe.training
    quick = section.quick_examples

    def over(limit: int | None) -> list[dict[str, Any]]:
        cells = []
        for cell in run.tests:
            table = tables[cell.name]
            if limit is not None:
                table = MQARTable(*(t[:limit] for t in vars(table).values()))
            correct, queries = count_correct(model, table, sizes[cell.name], bf16=section.bf16)
            cells.append(
                {
                    "length": cell.length,
                    "pairs": cell.pairs,
                    "correct": correct,
                    "queries": queries,
                    "accuracy": correct / queries,
                }
            )
        return cells

    if not everything and quick is not None:
        found = over(quick)
        if min(cell["accuracy"] for cell in found) < section.stop_at:
            return found, all(len(tables[cell.name]) <= quick for cell in run.tests)
    return over(None), True


def _fresh_model(run: Run) -> Any:
    """The run's model from its seed; the global random state is left as it was."""
    from latte.compare.grid import model_config
    from latte.models.registry import language_model

    config = model_config(run.model, run.preset, run.config)
    with torch.random.fork_rng():
        torch.manual_seed(run.seed)
        return language_model(config)


def _optimizer(model: Any, run: Run, recipe: MQARRecipe) -> torch.optim.Optimizer:
    section = recipe.training
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    embeddings = {id(end.weight) for end in ends}

    def rate(parameter: torch.nn.Parameter) -> float:
        share = section.embedding_rate if id(parameter) in embeddings else 1.0
        return run.learning_rate * share

    return adamw(model, rate, weight_decay=section.weight_decay, betas=section.betas)


def _batch_size(cell: Cell, recipe: MQARRecipe) -> int:
    section = recipe.training
    return max(1, min(section.batch_size, section.batch_tokens // cell.length))


def _batches(
    run: Run, tables: Tables, sizes: dict[str, int], epochs: int
) -> Iterator[tuple[str, Tensor]]:
    """(cell, rows of its table): every example once an epoch; a batch is of one cell.

    The order is a function of the run's seed and the epoch.
    """
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(1_000_003 * run.seed + epoch)
        batches = []
        for cell in run.train:
            order = torch.randperm(len(tables[cell.name]), generator=generator)
            batches += [(cell.name, rows) for rows in order.split(sizes[cell.name])]
        for index in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[index]


def _batch(
    table: MQARTable, rows: Tensor | slice, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, queries, answers = (
        t[rows].to(device, torch.int64)
        for t in (table.tokens_MT, table.queries_MN, table.answers_MN)
    )
    return tokens, queries, answers
