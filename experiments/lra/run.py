"""Long Range Arena: a recipe's models on one task, a table and their curves, in one command.

    python -m experiments.lra recipes/lra/listops-cpu.yaml [key=value ...]

Every run has a folder under the recipe's `output_dir`:

    run.json            whose folder it is
    checkpoint-<step>/  everything needed to go on; the same command resumes from it
    curve.csv           training and validation loss and accuracy, written at every evaluation
    config.json, model.safetensors   the state that was best on the validation split
    result.json         the outcome with the test accuracy, which is computed once; written last

After every run `accuracy.csv`, `accuracy.md` and `curves.png` are written anew from all results.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.grids import RESULT_FILE, Sweep, claimed, command, progress_bar
from experiments.lra.recipe import LRARecipe, LRARun, load, runs
from latte.lab.compare.grid import RunStatus
from latte.lab.evaluate.tables import table
from latte.lab.machine import describe
from latte.lab.train.metrics import duration
from latte.lab.train.run_folder import checkpoints
from latte.models.atomic_files import write_json


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a recipe; returns the exit code: 0, 2 for a user's mistake, 130 when interrupted."""

    def balance(recipe: LRARecipe, quiet: bool) -> str:
        return balance_table(load_data(recipe, quiet))

    shows = {"balance": ("show the splits, train nothing", balance)}
    return command("lra", __doc__, load, LRASweep, arguments, shows=shows)


class LRASweep(Sweep):
    """Models and seeds on one task."""

    files = "accuracy.csv, accuracy.md and curves.png"
    goes_on = "from the last checkpoint"
    identity_key = "run"
    runs_of = staticmethod(runs)
    task: Any = None

    def place(self, run: LRARun) -> tuple[int, ...]:
        return run.seed, list(self.recipe.models).index(run.model)

    def sweep(self, *, report_only: bool = False) -> tuple[list[RunStatus], str]:
        if self.recipe.initial is not None and not report_only:
            self._check_initial()
        return super().sweep(report_only=report_only)

    def _check_initial(self) -> None:
        """Raise LatteError for a checkpoint that no run can begin with, and write nothing."""
        import torch

        from experiments.lra.initial import load_encoder
        from experiments.lra.training import fresh_model

        with torch.random.fork_rng():
            for status in self.statuses():
                if status.due and not checkpoints(status.run.folder):
                    load_encoder(fresh_model(status.run), self.recipe.initial)

    def prepare(self) -> None:
        self.task = load_data(self.recipe, self.quiet)
        self.say(balance_table(self.task).rstrip())

    def do(self, run: LRARun) -> None:
        import torch

        from experiments.lra.training import Training

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with claimed(run) as owner:
            with torch.random.fork_rng():
                training = Training(run, self.task, device, owner.resume)
                start = f"resuming from {owner.resume.name}" if owner.resume else "from the start"
                self.say(
                    f"  {training.parameters():,} parameters, {training.steps:,} steps, {start}"
                )
                outcome = self._finish(training)
                _export(training.model, run.folder)
            result = {
                "task": run.recipe.task,
                "model": run.model,
                "seed": run.seed,
                "run": run.identity(),
                "outcome": _plain(outcome),
                "balance": balance(self.task),
                **describe(device),
            }
            write_json(run.folder / RESULT_FILE, result)
        self.say(
            f"  {outcome.stopped}: test accuracy {outcome.test.accuracy:.4f} with the state of step"
            f" {outcome.best_step} (validation {outcome.validation.accuracy:.4f})"
        )

    def _finish(self, training: Any) -> Any:
        """Train to the end, with lines and a bar."""
        with progress_bar(self.quiet, total=training.steps, initial=training.progress.step) as bar:

            def logged(log: Any) -> None:
                bar.write(
                    f"  step {log.step}/{log.steps} | epoch {log.epoch:.2f} | loss {log.loss:.4f}"
                    f" | lr {log.learning_rate:.2e} | {log.tokens_per_second:,.0f} tok/s"
                    f" | eta {duration(log.eta_seconds)}",
                    file=sys.stdout,
                )

            def evaluated(point: dict[str, float]) -> None:
                bar.write(
                    f"  step {point['step']} | train loss {point['train_loss']:.4f} accuracy"
                    f" {point['train_accuracy']:.4f} | validation loss"
                    f" {point['validation_loss']:.4f} accuracy {point['validation_accuracy']:.4f}"
                    f" | {duration(point['seconds'])}",
                    file=sys.stdout,
                )
                sys.stdout.flush()

            if self.quiet:
                return training.finish(on_step=bar.update)
            return training.finish(logged, evaluated, bar.update)

    def report(self, found: Sequence[tuple[LRARun, dict[str, Any]]]) -> str:
        from experiments.lra.report import write_report

        return write_report(Path(self.recipe.output_dir), [result for _, result in found])


def load_data(recipe: LRARecipe, quiet: bool = False) -> Any:
    """The recipe's task, read or generated."""
    from experiments.lra.data import load_task
    from latte.lab.data.preparing import cache_folder

    cache = cache_folder(recipe.cache_dir)
    return load_task(recipe.task, recipe.data, cache, not quiet, recipe.workers)


def balance(task: Any) -> dict[str, Any]:
    """Of each split: examples of each class, the share of the most frequent one, mean length."""
    from experiments.lra.data import class_balance

    found = {}
    for name, examples in task.splits().items():
        split = class_balance(examples, len(task.options.classes))
        found[name] = {
            "counts": list(split.counts),
            "majority_class": task.options.classes[split.majority],
            "majority_rate": split.majority_rate,
            "mean_length": float(examples.lengths().mean()),
        }
    return found


def balance_table(task: Any) -> str:
    """The splits of a task as a Markdown table."""
    lines = [["split", "examples", "mean length", "most frequent", *task.options.classes]]
    for name, split in balance(task).items():
        total = sum(split["counts"])
        lines.append(
            [
                name,
                f"{total:,}",
                f"{split['mean_length']:,.0f}",
                f"{split['majority_class']}: {split['majority_rate']:.4f}",
                *(f"{count / total:.3f}" for count in split["counts"]),
            ]
        )
    return table(lines)


def _export(model: Any, folder: Path) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder)


def _plain(outcome: Any) -> dict[str, Any]:
    values = asdict(outcome)
    for split in ("validation", "test"):
        values[split]["accuracy"] = getattr(outcome, split).accuracy
    return values
