"""The one training loop beside the Trainer: a model, batches, a score to watch.

`LatteTrainer` is for language models: its losses, blocks and held-out text are theirs. Here are
runs that answer questions: MQAR asks at N of T positions only, which no `labels=` of a causal model
allows for and which saves most of the time; Long Range Arena classifies.

A checkpoint has everything that decides what comes next (weights, optimiser, schedule, random
state, curve, and the best weights so far), and a batch is a function of (seed, step): a run that
was killed goes on to the same result.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from latte.errors import LatteError
from latte.lab.train.run_folder import STAGING, rotate, seal
from latte.lab.train.trainer import decayed_names, learning_rate_factor

STATE_FILE = "state.pt"


@dataclass
class LoopState:
    """Where a run is: all that a checkpoint keeps beside weights, optimiser and random state."""

    step: int = 0
    seconds: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)
    best_step: int = 0
    best_accuracy: float = -1.0


@dataclass(frozen=True)
class Log:
    """What a log line is about. `loss`: its mean since the last line."""

    step: int
    steps: int
    epoch: float
    loss: float
    learning_rate: float
    tokens_per_second: float
    eta_seconds: float


class Loop:
    """A run, at its newest checkpoint or at its beginning; :meth:`train` goes on from there.

    Args:
        model: freshly initialised, on `device`.
        section: of a recipe: `betas`, `weight_decay`, `warmup_steps`, `max_grad_norm`, `bf16` and
            `max_minutes`.
        rate: the peak learning rate of each parameter.
        steps: of the whole run, and of an epoch.
        log_steps: steps between log lines; 0: none.
        resume: a checkpoint's folder.
    """

    end = "steps"  # reported reason of a run that reaches its last step

    def __init__(
        self,
        model: nn.Module,
        section: Any,
        rate: Callable[[nn.Parameter], float],
        *,
        steps: tuple[int, int],
        device: torch.device,
        schedule: str = "cosine",
        log_steps: int = 0,
        resume: Path | None = None,
    ) -> None:
        self.model, self.section, self.device = model, section, device
        self.steps, self.per_epoch = steps
        self.log_steps = log_steps
        self.optimizer = adamw(model, rate, section.weight_decay, section.betas)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: learning_rate_factor(
                step, self.steps, warmup=section.warmup_steps, schedule=schedule
            ),
        )
        self.progress = LoopState()
        self.best: dict[str, Tensor] = {}
        self._sums: Any = 0.0  # since the last evaluation
        if resume is not None:
            self._load(resume / STATE_FILE)
        self._began = time.perf_counter()

    # ---- what a kind of run says

    def batches(self, start: int) -> Iterator[Any]:
        """Batch `start`, `start` + 1, ... as many as there are steps, at least."""
        raise NotImplementedError

    def loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        """(the loss to descend, sums to report: the loss's first, and last the number of what it
        is summed over). Called under autocast.
        """
        raise NotImplementedError

    def tokens(self, batch: Any) -> int:
        """Real tokens of a batch."""
        return 0

    def is_due(self, step: int) -> bool:
        """Whether the model is evaluated after a step."""
        raise NotImplementedError

    def evaluate(self, sums: list[float]) -> dict[str, float]:
        """What a point of the curve says, beside its step, epoch and time.

        Args:
            sums: those of :meth:`loss` since the evaluation before.
        """
        raise NotImplementedError

    def is_solved(self) -> bool:
        """Whether the last evaluation ends the run."""
        return False

    def keep(self) -> None:
        """Called after each evaluation: a place to write files or a checkpoint."""

    # ---- the loop

    def train(
        self,
        on_log: Callable[[Log], Any] | None = None,
        on_evaluation: Callable[[dict[str, float]], Any] | None = None,
        on_step: Callable[[], Any] | None = None,
    ) -> str:
        """Go on to the end; returns what ended it: `end`, "accuracy", "minutes" or "diverged".

        A step whose loss or gradient is not finite ends the run, before it can reach the weights.
        """
        section, progress, pace = self.section, self.progress, _Pace()
        limit = math.inf if section.max_minutes is None else 60 * section.max_minutes
        line: Any = 0.0  # sums since the last log line
        self.model.train()
        stream = self.batches(progress.step)
        while progress.step < self.steps:
            batch = next(stream)
            pace.count(self.tokens(batch))
            with autocast(self.device, section.bf16):
                loss, sums = self.loss(batch)
            rate = self.optimizer.param_groups[0]["lr"]
            if not take_step(
                self.model, loss, self.optimizer, self.scheduler, section.max_grad_norm
            ):
                return "diverged"
            progress.step += 1
            self._sums, line = self._sums + sums.double(), line + sums.double()
            if on_step is not None:
                on_step()
            if self.log_steps and progress.step % self.log_steps == 0:
                speed, eta = pace.read(self.steps - progress.step)
                total, *_, count = line.tolist()
                line = 0.0
                if on_log is not None:
                    epoch = progress.step / self.per_epoch
                    on_log(Log(progress.step, self.steps, epoch, total / count, rate, speed, eta))
            late = self.seconds() > limit
            if self.is_due(progress.step) or late:
                pace.pause()
                point = self.add_point()
                if on_evaluation is not None:
                    on_evaluation(point)
                pace.go_on()
                if self.is_solved():
                    return "accuracy"
                if late and progress.step < self.steps:
                    return "minutes"
        return self.end

    def seconds(self) -> float:
        """Wall time of the run so far, over all resumes."""
        return self.progress.seconds + time.perf_counter() - self._began

    def add_point(self) -> dict[str, float]:
        """Evaluate, and add what was found to the curve."""
        found = self.evaluate(self._sums.tolist())
        self._sums = 0.0
        step = self.progress.step
        where = {"step": step, "epoch": step / self.per_epoch, "seconds": round(self.seconds(), 2)}
        self.progress.curve.append(where | found)
        self.keep()
        return self.progress.curve[-1]

    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    # ---- what is kept

    def keep_best(self, accuracy: float) -> None:
        """Hold on to the weights if they are better than any before."""
        if accuracy > self.progress.best_accuracy:
            self.progress.best_step, self.progress.best_accuracy = self.progress.step, accuracy
            self.best = {
                name: value.detach().cpu().clone()
                for name, value in self.model.state_dict().items()
            }

    def save(self, folder: Path) -> None:
        """A checkpoint in a run's folder; the one before it stays, older ones go."""
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
            self.progress = LoopState(**state["progress"])
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
        self.go_on()

    def count(self, tokens: int) -> None:
        self._tokens += tokens
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


def adamw(
    model: nn.Module,
    rate: Callable[[nn.Parameter], float],
    weight_decay: float,
    betas: Sequence[float],
) -> torch.optim.Optimizer:
    """AdamW over a model's parameters, each at its ``rate``."""
    decayed = set(decayed_names(model))
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        decay = weight_decay if name in decayed else 0.0
        groups.setdefault((rate(parameter), decay), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": parameters, "lr": rate, "weight_decay": decay}
            for (rate, decay), parameters in groups.items()
        ],
        betas=(betas[0], betas[1]),
        fused=True,
    )


def take_step(
    model: nn.Module, loss: Tensor, optimizer: Any, scheduler: Any, max_grad_norm: float
) -> bool:
    """Backward, clip, step. False, and no weight is changed, if anything is not finite.

    `max_grad_norm` 0: no clipping.
    """
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or math.inf)
    if not bool(torch.isfinite(loss) & torch.isfinite(norm)):
        return False
    optimizer.step()
    scheduler.step()
    return True


def autocast(device: torch.device, bf16: bool) -> AbstractContextManager[Any]:
    """bf16 autocast, or nothing."""
    return torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()
