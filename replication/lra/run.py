"""Long Range Arena: a recipe's models on one task, a table and their curves, in one command.

    python -m replication.lra recipes/lra/listops-cpu.yaml [key=value ...]

Every run has a folder under the recipe's `output_dir`:

    run.json            whose folder it is
    checkpoint-<step>/  everything needed to go on; the same command resumes from it
    curve.csv           training and validation loss and accuracy, written at every evaluation
    config.json, model.safetensors   the state that was best on the validation split
    result.json         the outcome with the test accuracy, which is computed once; written last

After every run `accuracy.csv`, `accuracy.md` and `curves.png` are written anew from all results.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from latte.compare.grid import Failures, command_line, exit_code, left_out, progress_bar
from latte.errors import LatteError
from latte.train.metrics import duration
from latte.train.run_folder import checkpoints, claim, writable_folder, write_json
from replication.lra.recipe import LRARecipe, LRARun, load, runs

RESULT_FILE = "result.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a recipe; returns the exit code: 0, 2 for a user's mistake, 130 when interrupted."""
    parser = command_line("lra", __doc__)
    parser.add_argument("--balance", action="store_true", help="show the splits, train nothing")
    options = parser.parse_intermixed_args(arguments)

    def work() -> None:
        recipe = load(options.recipe, options.overrides)
        if options.dry_run:
            _list(recipe)
        elif options.balance:
            print(balance_table(recipe, load_data(recipe, options.quiet)), end="")
        else:
            print(train_all(recipe, quiet=options.quiet, report_only=options.report), end="")
            print(f"written: accuracy.csv, accuracy.md and curves.png in {recipe.output_dir}")

    return exit_code("lra", work, "run again, it goes on from the last checkpoint")


def train_all(recipe: LRARecipe, *, quiet: bool = False, report_only: bool = False) -> str:
    """Do all runs that have no result yet, write the report, return its table.

    With `report_only` the report is about the results that are there already. It is about all
    models of the recipe, also those that `select` leaves out.

    Raises:
        LatteError: sizes that do not fit, missing data, a folder that cannot be written, or one
            that holds another run. At the end, if runs failed by themselves, such as for want of
            memory.
    """
    grid = runs(recipe)
    results = {run.label: found for run in grid if (found := stored_result(run)) is not None}
    if recipe.initial is not None and not report_only:
        _check_initial([run for run in grid if run.label not in results])
    folder = writable_folder(Path(recipe.output_dir))
    from replication.lra.report import write_report

    others = {run.label: found for run, found in left_out(recipe, runs, stored_result)}
    models = list(recipe.models)

    def report() -> str:
        found = [*results.values(), *others.values()]
        found.sort(key=lambda result: (result["seed"], models.index(result["model"])))
        return write_report(folder, found)

    failures, task = Failures(), None
    for number, run in enumerate([] if report_only else grid, 1):
        if run.label in results:
            continue
        if task is None:
            task = load_data(recipe, quiet)
            _say(balance_table(recipe, task).rstrip(), quiet)
        _say(f"[{number}/{len(grid)}] {run.label}", quiet)
        with failures.kept(run.label):
            results[run.label] = _do(run, task, quiet)
        report()
    text = report()
    failures.check(folder)
    return text


def load_data(recipe: LRARecipe, quiet: bool = False) -> Any:
    """The recipe's task, read or generated."""
    from latte.data.preparing import cache_folder
    from replication.lra.data import load_task

    cache = cache_folder(recipe.cache_dir)
    return load_task(recipe.task, recipe.data, cache, not quiet, recipe.workers)


def balance(task: Any) -> dict[str, Any]:
    """Of each split: examples of each class, the share of the most frequent one, mean length."""
    from replication.lra.data import class_balance

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


def balance_table(recipe: LRARecipe, task: Any) -> str:
    """The splits of a task as a Markdown table."""
    classes = task.options.classes
    lines = [["split", "examples", "mean length", "most frequent", *classes]]
    lines.append(["---"] + ["---:"] * (3 + len(classes)))
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
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def stored_result(run: LRARun) -> dict[str, Any] | None:
    """The result in a run's folder, None if there is none.

    Raises:
        LatteError: it is damaged, or of a run with other settings.
    """
    from latte.train.run_folder import first_difference

    file = Path(run.output_dir) / RESULT_FILE
    if not file.exists():
        return None
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        identity, _, _ = stored["run"], stored["outcome"]["test"], stored["balance"]["test"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise LatteError(f"{file} is damaged ({error}); delete it to do the run again") from None
    difference = first_difference(identity, json.loads(json.dumps(run.identity())))
    if difference:
        key, there, here = difference
        raise LatteError(
            f"{run.output_dir} holds another run: {key} is {there!r} there and {here!r} here;"
            " choose another output_dir"
        )
    return stored


def _check_initial(pending: Sequence[LRARun]) -> None:
    """Raise LatteError for a checkpoint that a run cannot begin with; nothing is written yet."""
    import torch

    from latte.evaluate.checkpoint import load_encoder
    from replication.lra.training import fresh_model

    with torch.random.fork_rng():
        for run in pending:
            if run.recipe.initial is not None and not checkpoints(Path(run.output_dir)):
                load_encoder(fresh_model(run), run.recipe.initial)


def _do(run: LRARun, task: Any, quiet: bool) -> dict[str, Any]:
    """Train one run, from its newest checkpoint if it has one, and keep its result."""
    import torch

    from latte.machine import describe
    from replication.lra.training import Log, Training

    owner = claim(run)
    for problem in owner.skipped:
        print(f"passing over a damaged checkpoint: {problem}", file=sys.stderr, flush=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        with torch.random.fork_rng():
            training = Training(run, task, device, owner.resume)
            parameters = sum(p.numel() for p in training.model.parameters())
            start = f"resuming from {owner.resume.name}" if owner.resume else "from the start"
            _say(f"  {parameters:,} parameters, {training.steps:,} steps, {start}", quiet)
            bar = progress_bar(quiet, total=training.steps, initial=training.progress.step)

            def logged(log: Log) -> None:
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

            with bar:
                outcome = training.finish(
                    None if quiet else logged, None if quiet else evaluated, bar.update
                )
            _export(training.model, run.output_dir)
        result = {
            "task": run.recipe.task,
            "model": run.model,
            "seed": run.seed,
            "run": run.identity(),
            "outcome": _plain(outcome),
            "balance": balance(task),
            **describe(device),
        }
        write_json(Path(run.output_dir) / RESULT_FILE, result)
        for folder in checkpoints(Path(run.output_dir)):
            shutil.rmtree(folder)
    finally:
        if owner.lock is not None:
            owner.lock.close()
    _say(
        f"  {outcome.stopped}: test accuracy {outcome.test.accuracy:.4f} with the state of step"
        f" {outcome.best_step} (validation {outcome.validation.accuracy:.4f})",
        quiet,
    )
    return result


def _export(model: Any, folder: str) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder)


def _plain(outcome: Any) -> dict[str, Any]:
    values = asdict(outcome)
    for split in ("validation", "test"):
        values[split]["accuracy"] = getattr(outcome, split).accuracy
    return values


def _list(recipe: LRARecipe) -> None:
    grid = runs(recipe)
    for run in grid:
        done = " (done)" if stored_result(run) is not None else ""
        print(f"{run.label}: {run.output_dir}{done}")
    print(f"{len(grid)} runs")


def _say(line: str, quiet: bool) -> None:
    if not quiet:
        print(line, flush=True)
