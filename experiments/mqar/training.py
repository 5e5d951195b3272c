"""One MQAR run: train a small model until it answers, and count its answers.

Only the queries are asked, so the vocabulary's logits are needed at N of T positions.

B: examples of a batch, T: tokens, N: queries of an example, E: hidden size, V: vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.grids import model_config
from experiments.loop import Loop, autocast
from experiments.mqar.data import MQAR, MQARTable
from experiments.mqar.recipe import Cell, MQARData, MQARRecipe, MQARRun
from latte.lab.train.run_folder import Claim

Tables = dict[str, MQARTable]


@dataclass(frozen=True)
class MQAROutcome:
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


class Training(Loop):
    """A run; tables by the cells' names. `step` counts the batches of all epochs.

    Args:
        owner: The run's folder, for a checkpoint after each evaluation; it goes on from the newest.
    """

    end = "epochs"

    def __init__(
        self,
        run: MQARRun,
        train: Tables,
        test: Tables,
        device: torch.device,
        owner: Claim | None = None,
    ) -> None:
        self.run, self.train_tables, self.test_tables, self.owner = run, train, test, owner
        section = run.recipe.training
        self.sizes = {cell.name: _batch_size(cell, run.recipe) for cell in (*run.train, *run.tests)}
        per_epoch = sum(-(-len(train[c.name]) // self.sizes[c.name]) for c in run.train)
        self.due = {
            epoch * per_epoch + math.ceil(per_epoch * part / section.evaluations_per_epoch)
            for epoch in range(section.max_epochs)
            for part in range(1, section.evaluations_per_epoch + 1)
        }
        self.cells: list[dict[str, Any]] = []  # as last scored
        self.complete = False  # on all test examples
        model = _fresh_model(run).to(device)
        ends = model.get_input_embeddings(), model.get_output_embeddings()
        embeddings = {id(end.weight) for end in ends}

        def rate(parameter: torch.nn.Parameter) -> float:
            share = section.embedding_rate if id(parameter) in embeddings else 1.0
            return run.learning_rate * share

        steps = per_epoch * section.max_epochs, per_epoch
        resume = None if owner is None else owner.resume
        super().__init__(model, section, rate, steps=steps, device=device, resume=resume)

    def batches(self, start: int) -> Iterator[tuple[str, Tensor]]:
        every = _batches(self.run, self.train_tables, self.sizes, self.section.max_epochs)
        return islice(every, start, None)

    def loss(self, batch: tuple[str, Tensor]) -> tuple[Tensor, Tensor]:
        name, rows = batch
        tokens, queries, answers = _batch(self.train_tables[name], rows, self.device)
        logits = query_logits(self.model, tokens, queries)
        loss = F.cross_entropy(logits.float().flatten(0, 1), answers.flatten())
        return loss, torch.stack([loss.detach(), torch.ones_like(loss)])

    def is_due(self, step: int) -> bool:
        return step in self.due

    def evaluate(self, sums: list[float]) -> dict[str, float]:
        self.score()
        loss, batches = sums
        accuracies = {f"{c['length']}x{c['pairs']}": c["accuracy"] for c in self.cells}
        return {"loss": loss / batches, **accuracies}

    def is_solved(self) -> bool:
        return self.complete and self._worst() >= self.section.stop_at

    def keep(self) -> None:
        if self.owner is not None and not self.is_solved():
            self.save(self.owner.folder)

    def score(self, everything: bool = False) -> None:
        """Accuracies by cell.

        On the way only `quick_examples` are scored, unless they pass: then the rest has to
        confirm it.
        """
        quick = None if everything else self.section.quick_examples
        self.cells = [self._score(cell, quick) for cell in self.run.tests]
        examples = [len(self.test_tables[cell.name]) for cell in self.run.tests]
        self.complete = quick is None or max(examples) <= quick
        if not everything and quick is not None and self._worst() >= self.section.stop_at:
            self.score(everything=True)

    def _worst(self) -> float:
        return min(float(cell["accuracy"]) for cell in self.cells)

    def _score(self, cell: Cell, limit: int | None) -> dict[str, Any]:
        table, size = self.test_tables[cell.name], self.sizes[cell.name]
        if limit is not None:
            table = MQARTable(*(t[:limit] for t in vars(table).values()))
        correct, queries = count_correct(self.model, table, size, bf16=self.section.bf16)
        return {
            "length": cell.length,
            "pairs": cell.pairs,
            "correct": correct,
            "queries": queries,
            "accuracy": correct / queries,
        }


def train_run(
    run: MQARRun,
    train: Tables,
    test: Tables,
    device: torch.device,
    on_evaluation: Callable[[dict[str, float]], Any] | None = None,
    on_step: Callable[[], Any] | None = None,
    owner: Claim | None = None,
) -> MQAROutcome:
    """Train one model, and score it; the global random state is left as it was."""
    with torch.random.fork_rng():
        training = Training(run, train, test, device, owner)
        stopped = training.train(on_evaluation=on_evaluation, on_step=on_step)
        seconds = training.seconds()
        if stopped != "accuracy":
            training.score(everything=True)
    return MQAROutcome(
        parameters=training.parameters(),
        cells=training.cells,
        stopped=stopped,
        epochs=training.progress.step / training.per_epoch,
        steps=training.progress.step,
        seconds=round(seconds, 2),
        curve=training.progress.curve,
    )


def _fresh_model(run: MQARRun) -> Any:
    """The run's model from its seed."""
    from latte.models.modeling import language_model

    torch.manual_seed(run.seed)
    return language_model(model_config(run.model, run.preset, run.config))


def _batch_size(cell: Cell, recipe: MQARRecipe) -> int:
    section = recipe.training
    return max(1, min(section.batch_size, section.batch_tokens // cell.length))


def _batches(
    run: MQARRun, tables: Tables, sizes: dict[str, int], epochs: int
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
