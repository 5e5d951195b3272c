"""One Long Range Arena run: train a classifier, keep its best state, score the test split once.

The loop is its own, not `LatteTrainer`, whose losses, blocks and held-out text are those of a
language model; schedule, step, run folder and checkpoints are shared with it.

A checkpoint has everything that decides what comes next (weights, optimiser, schedule, random
state, curve, and the best weights so far), and a batch is a function of (seed, step): a run that
was killed goes on to the same result.
"""

from __future__ import annotations

import csv
import io
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from latte.errors import LatteError
from latte.evaluate.checkpoint import load_encoder
from latte.train.run_folder import STAGING, rotate, seal, write_text
from latte.train.steps import adamw, autocast, take_step
from latte.train.trainer import learning_rate_factor
from replication.lra.data import Examples, Task
from replication.lra.recipe import LRARun, LRATraining

STATE_FILE = "state.pt"
CURVE_FILE = "curve.csv"
CURVE_COLUMNS = (
    "step", "epoch", "seconds", "train_loss", "train_accuracy", "validation_loss",
    "validation_accuracy",
)  # fmt: skip


@dataclass(frozen=True)
class Score:
    """Mean loss, and how many of how many examples were right."""

    loss: float
    correct: int
    examples: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.examples


@dataclass
class Progress:
    """Where a run is: all that a checkpoint keeps beside weights, optimiser and random state."""

    step: int = 0
    seconds: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)
    best_step: int = 0
    best_accuracy: float = -1.0


@dataclass(frozen=True)
class Log:
    """What a log line is about."""

    step: int
    steps: int
    epoch: float
    loss: float
    learning_rate: float
    tokens_per_second: float
    eta_seconds: float


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `stopped`: "steps", "minutes" or "diverged"."""

    parameters: int
    steps: int
    epochs: float
    seconds: float
    stopped: str
    best_step: int
    validation: Score
    test: Score
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


def score(model: Any, examples: Examples, training: LRATraining, limit: int | None = None) -> Score:
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
    return Score(loss / count, round(correct), count)


def fresh_model(run: LRARun) -> Any:
    """The run's classifier, its weights from the global random state."""
    from transformers import AutoModelForSequenceClassification

    from latte.compare.grid import model_config
    from replication.lra.pairs import LatteForPairClassification

    config = model_config(run.model, run.preset, run.config)
    if run.recipe.data.towers == 2:
        return LatteForPairClassification(config)
    return AutoModelForSequenceClassification.from_config(config)


class Training:
    """A run in its folder, at the newest checkpoint or at its beginning. See `Training.finish`."""

    def __init__(
        self, run: LRARun, task: Task, device: torch.device, resume: Path | None = None
    ) -> None:
        self.run, self.task, self.device = run, task, device
        self.section = run.recipe.training
        self.per_epoch, self.steps = steps_of(self.section, len(task.train))
        torch.manual_seed(run.seed)
        self.model = fresh_model(run)
        if run.recipe.initial is not None and resume is None:
            load_encoder(self.model, run.recipe.initial)
        self.model.to(device)
        rate = self.section.learning_rate
        self.optimizer = adamw(
            self.model,
            lambda _: rate,
            weight_decay=self.section.weight_decay,
            betas=self.section.betas,
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: learning_rate_factor(
                step,
                self.steps,
                warmup=self.section.warmup_steps,
                schedule=self.section.schedule,
            ),
        )
        self.progress = Progress()
        self.best: dict[str, Tensor] = {}
        if resume is not None:
            self._load(resume / STATE_FILE)
        self._began = time.perf_counter()

    # ---- the loop

    def finish(
        self,
        on_log: Callable[[Log], Any] | None = None,
        on_evaluation: Callable[[dict[str, float]], Any] | None = None,
        on_step: Callable[[], Any] | None = None,
    ) -> Outcome:
        """Train to the end, then score the best state: on all of validation, once on test."""
        section, progress = self.section, self.progress
        limit = math.inf if section.max_minutes is None else 60 * section.max_minutes
        stopped, pace = "steps", _Pace()
        # Summed loss, right answers and examples since the last evaluation and the last log line.
        window = torch.zeros(3, dtype=torch.float64, device=self.device)
        line = torch.zeros(3, dtype=torch.float64, device=self.device)
        self.model.train()
        stream = batches(self.task.train, section, self.run.seed, progress.step)
        while progress.step < self.steps:
            batch = self.task.train.batch(next(stream))
            pace.count(batch)
            inputs, labels = to_device(batch, self.device)
            with autocast(self.device, section.bf16):
                logits = self.model(**inputs).logits.float()
                loss = F.cross_entropy(logits, labels)
            rate = self.optimizer.param_groups[0]["lr"]
            if not take_step(
                self.model, loss, self.optimizer, self.scheduler, section.max_grad_norm
            ):
                stopped = "diverged"
                break
            progress.step += 1
            right = (logits.detach().argmax(-1) == labels).sum()
            done = torch.stack([loss.detach() * len(labels), right, right.new_tensor(len(labels))])
            window += done
            line += done
            if on_step is not None:
                on_step()
            if progress.step % section.log_steps == 0:
                speed, eta = pace.read(self.steps - progress.step)
                total, _, count = line.tolist()
                line.zero_()
                if on_log is not None:
                    epoch = progress.step / self.per_epoch
                    on_log(Log(progress.step, self.steps, epoch, total / count, rate, speed, eta))
            late = self.seconds() > limit
            if progress.step % section.eval_steps == 0 or progress.step == self.steps or late:
                pace.pause()
                point = self._evaluate(window.tolist())
                window.zero_()
                if on_evaluation is not None:
                    on_evaluation(point)
                pace.go_on()
                if late and progress.step < self.steps:
                    stopped = "minutes"
                    break
        if not progress.curve:
            self._require_a_step()
            self._evaluate(window.tolist())
        return self._outcome(stopped)

    def seconds(self) -> float:
        """Wall time of the run so far, over all resumes."""
        return self.progress.seconds + time.perf_counter() - self._began

    def _evaluate(self, window: list[float]) -> dict[str, float]:
        """Add a point to the curve, keep the best state, write curve.csv and a checkpoint.

        `window`: summed loss, right answers and examples of the steps before it.
        """
        progress = self.progress
        loss, right, count = window
        found = score(
            self.model, self.task.validation, self.section, self.section.max_eval_examples
        )
        point = {
            "step": progress.step,
            "epoch": progress.step / self.per_epoch,
            "seconds": round(self.seconds(), 2),
            "train_loss": loss / count,
            "train_accuracy": right / count,
            "validation_loss": found.loss,
            "validation_accuracy": found.accuracy,
        }
        progress.curve.append(point)
        if found.accuracy > progress.best_accuracy:
            progress.best_step, progress.best_accuracy = progress.step, found.accuracy
            self.best = {
                name: value.detach().cpu().clone()
                for name, value in self.model.state_dict().items()
            }
        write_text(Path(self.run.output_dir) / CURVE_FILE, curve_csv(progress.curve))
        self._save()
        return point

    def _require_a_step(self) -> None:
        if self.progress.step == 0:
            raise LatteError(
                f"{self.run.label}: loss or gradient is not finite at step 1 (peak"
                f" training.learning_rate {self.section.learning_rate:g}, bf16"
                f" {self.section.bf16}); try a lower learning rate"
            )

    def _outcome(self, stopped: str) -> Outcome:
        self.model.load_state_dict(self.best)
        return Outcome(
            parameters=sum(p.numel() for p in self.model.parameters()),
            steps=self.progress.step,
            epochs=self.progress.step / self.per_epoch,
            seconds=round(self.seconds(), 2),
            stopped=stopped,
            best_step=self.progress.best_step,
            validation=score(self.model, self.task.validation, self.section),
            test=score(self.model, self.task.test, self.section),
            curve=self.progress.curve,
        )

    # ---- checkpoints

    def _save(self) -> None:
        folder = Path(self.run.output_dir)
        name = f"checkpoint-{self.progress.step}"
        shutil.rmtree(folder / STAGING, ignore_errors=True)
        staged = folder / STAGING / name
        staged.mkdir(parents=True)
        state = {
            "progress": vars(self.progress) | {"seconds": self.seconds()},
            "model": self.model.state_dict(),
            "best": self.best,
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }
        torch.save(state, staged / STATE_FILE)
        seal(staged, folder / name)
        (folder / STAGING).rmdir()
        rotate(folder / name, 2)

    def _load(self, file: Path) -> None:
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
            self.progress = Progress(**state["progress"])
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.scheduler.load_state_dict(state["scheduler"])
            self.best = state["best"]
            torch.set_rng_state(state["random"])
            if state["random_cuda"] and torch.cuda.is_available():
                torch.cuda.set_rng_state_all(state["random_cuda"])
        except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            line = " ".join(str(error).split())[:200]
            raise LatteError(
                f"{file} is no checkpoint of this run ({line}); delete its folder to go on from"
                " an earlier one"
            ) from None


class _Pace:
    """Real tokens per second and the time that is left; evaluations do not count."""

    def __init__(self) -> None:
        self._tokens, self._steps, self._seconds = 0, 0, 0.0
        self._since = time.perf_counter()

    def count(self, batch: dict[str, Tensor]) -> None:
        """One step of a batch that is still on the host."""
        mask = batch.get("attention_mask")
        self._tokens += batch["input_ids"].numel() if mask is None else int(mask.sum())
        self._steps += 1

    def read(self, left: int) -> tuple[float, float]:
        """(tokens per second, seconds for the `left` steps) by what came since the last reading."""
        self.pause()
        seconds = max(1e-9, self._seconds)
        found = self._tokens / seconds, left * seconds / max(1, self._steps)
        self._tokens, self._steps, self._seconds = 0, 0, 0.0
        self.go_on()
        return found

    def pause(self) -> None:
        self._seconds += time.perf_counter() - self._since

    def go_on(self) -> None:
        self._since = time.perf_counter()


def curve_csv(curve: list[dict[str, float]]) -> str:
    """The evaluations of a run, a row each."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, CURVE_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for point in curve:
        writer.writerow({key: round(value, 6) for key, value in point.items()})
    return buffer.getvalue()
