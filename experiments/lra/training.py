"""One Long Range Arena run: train a classifier, keep its best state, score the test split once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.grids import model_config
from experiments.loop import Log, Loop, autocast
from experiments.lra.data import Examples, Task
from experiments.lra.initial import load_encoder
from experiments.lra.pairs import LatteForPairClassification
from experiments.lra.recipe import LRARun, LRATraining
from latte.errors import LatteError
from latte.lab.evaluate.tables import csv_text
from latte.models.atomic_files import write_text

CURVE_FILE = "curve.csv"
CURVE_COLUMNS = (
    "step", "epoch", "seconds", "train_loss", "train_accuracy", "validation_loss",
    "validation_accuracy",
)  # fmt: skip


@dataclass(frozen=True)
class LRAScore:
    """Mean loss, and how many of how many examples were right."""

    loss: float
    correct: int
    examples: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.examples


@dataclass(frozen=True)
class LRAOutcome:
    """How a run ended. `stopped`: "steps", "minutes" or "diverged"."""

    parameters: int
    steps: int
    epochs: float
    seconds: float
    stopped: str
    best_step: int
    validation: LRAScore
    test: LRAScore
    curve: list[dict[str, float]]


def steps_of(training: LRATraining, examples: int) -> tuple[int, int]:
    """(steps of an epoch, steps of a run)."""
    per_epoch = -(-examples // training.batch_size)
    if training.max_steps is not None:
        return per_epoch, training.max_steps
    assert training.max_epochs is not None  # the recipe's check saw to it
    return per_epoch, max(1, round(training.max_epochs * per_epoch))


def batches(
    examples: Examples, training: LRATraining, seed: int, start: int = 0
) -> Iterator[np.ndarray]:
    """The rows of batch `start`, `start` + 1, ...: every example once an epoch, without end.

    An epoch's order is a function of (seed, epoch). Of `bucket_batches` batches at a time the
    examples are sorted by length; the batches of an epoch come in random order.
    """
    size, lengths = training.batch_size, examples.lengths()
    epoch, skip = divmod(start, -(-len(examples) // size))
    while True:
        rng = np.random.default_rng((seed, epoch))
        order = rng.permutation(len(examples))
        found: list[np.ndarray] = []
        for at in range(0, len(order), size * training.bucket_batches):
            bucket = order[at : at + size * training.bucket_batches]
            if training.bucket_batches > 1:
                bucket = bucket[np.argsort(lengths[bucket], kind="stable")]
            found += [bucket[i : i + size] for i in range(0, len(bucket), size)]
        for index in rng.permutation(len(found))[skip:]:
            yield found[index]
        epoch, skip = epoch + 1, 0


def to_device(batch: dict[str, Tensor], device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
    """(the model's arguments, labels)."""
    moved = {key: value.to(device, non_blocking=True) for key, value in batch.items()}
    labels = moved.pop("labels")
    return moved, labels


def score(
    model: Any, examples: Examples, training: LRATraining, limit: int | None = None
) -> LRAScore:
    """Score a split, or always the same `limit` examples of it, in evaluation mode."""
    device = next(model.parameters()).device
    rows = np.arange(len(examples))
    if limit is not None:  # not the first ones: a file may be sorted by label
        rows = np.random.default_rng(0).permutation(rows)[:limit]
    count = len(rows)
    order = rows[np.argsort(examples.lengths()[rows], kind="stable")]
    was_training = model.training
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)
    with torch.no_grad(), autocast(device, training.bf16):
        for at in range(0, count, training.batch_size):
            inputs, labels = to_device(examples.batch(order[at : at + training.batch_size]), device)
            logits = model(**inputs).logits.float()
            total[0] += F.cross_entropy(logits, labels, reduction="sum").double()
            total[1] += (logits.argmax(-1) == labels).sum()
    model.train(was_training)
    loss, correct = total.tolist()
    return LRAScore(loss / count, round(correct), count)


def fresh_model(run: LRARun) -> Any:
    """The run's classifier, its weights from the global random state."""
    from transformers import AutoModelForSequenceClassification

    config = model_config(run.model, run.preset, run.config)
    if run.recipe.data.towers == 2:
        return LatteForPairClassification(config)
    return AutoModelForSequenceClassification.from_config(config)


class Training(Loop):
    """A run in its folder, at the newest checkpoint or at its beginning. See `Training.finish`."""

    def __init__(
        self, run: LRARun, task: Task, device: torch.device, resume: Path | None = None
    ) -> None:
        self.run, self.task = run, task
        section = run.recipe.training
        torch.manual_seed(run.seed)
        model = fresh_model(run)
        if run.recipe.initial is not None and resume is None:
            load_encoder(model, run.recipe.initial)
        per_epoch, steps = steps_of(section, len(task.train))
        super().__init__(
            model.to(device),
            section,
            lambda _: section.learning_rate,
            steps=(steps, per_epoch),
            device=device,
            schedule=section.schedule,
            log_steps=section.log_steps,
            resume=resume,
        )

    def finish(
        self,
        on_log: Callable[[Log], Any] | None = None,
        on_evaluation: Callable[[dict[str, float]], Any] | None = None,
        on_step: Callable[[], Any] | None = None,
    ) -> LRAOutcome:
        """Train to the end, then score the best state: on all of validation, once on test.

        Raises:
            LatteError: the very first step is not finite.
        """
        stopped = self.train(on_log, on_evaluation, on_step)
        progress, section = self.progress, self.section
        if progress.step == 0:
            raise LatteError(
                f"{self.run.label}: loss or gradient is not finite at step 1 (peak"
                f" training.learning_rate {section.learning_rate:g}, bf16 {section.bf16}); try a"
                " lower learning rate"
            )
        if not progress.curve:
            self.add_point()
        seconds = round(self.seconds(), 2)
        self.model.load_state_dict(self.best)
        return LRAOutcome(
            parameters=self.parameters(),
            steps=progress.step,
            epochs=progress.step / self.per_epoch,
            seconds=seconds,
            stopped=stopped,
            best_step=progress.best_step,
            validation=score(self.model, self.task.validation, section),
            test=score(self.model, self.task.test, section),
            curve=progress.curve,
        )

    # ---- what the loop asks

    def batches(self, start: int) -> Iterator[dict[str, Tensor]]:
        stream = batches(self.task.train, self.section, self.run.seed, start)
        return (self.task.train.batch(rows) for rows in stream)

    def tokens(self, batch: dict[str, Tensor]) -> int:
        mask = batch.get("attention_mask")
        return batch["input_ids"].numel() if mask is None else int(mask.sum())

    def loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        inputs, labels = to_device(batch, self.device)
        logits = self.model(**inputs).logits.float()
        loss = F.cross_entropy(logits, labels)
        right = (logits.detach().argmax(-1) == labels).sum()
        sums = [loss.detach() * len(labels), right, right.new_tensor(len(labels))]
        return loss, torch.stack(sums)

    def is_due(self, step: int) -> bool:
        return step % self.section.eval_steps == 0 or step == self.steps

    def evaluate(self, sums: list[float]) -> dict[str, float]:
        loss, right, count = sums
        limit = self.section.max_eval_examples
        found = score(self.model, self.task.validation, self.section, limit)
        return {
            "train_loss": loss / count,
            "train_accuracy": right / count,
            "validation_loss": found.loss,
            "validation_accuracy": found.accuracy,
        }

    def keep(self) -> None:
        self.keep_best(self.progress.curve[-1]["validation_accuracy"])
        rows = [{k: round(v, 6) for k, v in point.items()} for point in self.progress.curve]
        write_text(self.run.folder / CURVE_FILE, csv_text(CURVE_COLUMNS, rows))
        self.save(self.run.folder)
