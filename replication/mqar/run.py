"""Multi-query associative recall: a recipe's grid of runs, a table and figures, in one command.

    python -m replication.mqar recipes/mqar/cpu.yaml [key=value ...]

Every run has a folder under the recipe's `output_dir` with its `result.json`; a run that has one
is not done again, so an interrupted grid goes on where it stopped. After every run `accuracy.csv`
(a row per run and tested cell), `accuracy.md` (the best learning rate of each model) and the
figures `accuracy.png` and `latents.png` are written anew from all results there are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from latte.compare.grid import Failures, command_line, exit_code, left_out, progress_bar
from latte.errors import LatteError
from latte.train.run_folder import writable_folder
from replication.mqar.recipe import Cell, MQARRecipe, Run, load, runs, tasks

RESULT_FILE = "result.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a recipe; returns the exit code: 0, 2 for a user's mistake, 130 when interrupted."""
    parser = command_line("mqar", __doc__)
    options = parser.parse_intermixed_args(arguments)

    def work() -> None:
        recipe = load(options.recipe, options.overrides)
        if options.dry_run:
            _list(recipe)
        else:
            print(sweep(recipe, quiet=options.quiet, report_only=options.report), end="")
            print(f"written: accuracy.csv, accuracy.md and figures in {recipe.output_dir}")

    return exit_code("mqar", work, "run again, it goes on after the last finished run")


def sweep(recipe: MQARRecipe, *, quiet: bool = False, report_only: bool = False) -> str:
    """Do all runs that have no result yet, write the report, return its table.

    With `report_only` the report is about the results that are there already. It is about all
    models of the recipe, also those that `select` leaves out.

    Raises:
        LatteError: sizes that do not fit, a folder that cannot be written, or one that holds the
            result of another recipe; before anything is trained. At the end, if runs failed by
            themselves, such as for want of memory.
    """
    grid = runs(recipe)
    results = {run: stored for run in grid if (stored := stored_result(run, recipe)) is not None}
    folder = Path(recipe.output_dir)
    writable_folder(folder)
    from replication.mqar.report import write_report

    cells, models = list(tasks(recipe)), list(recipe.models)
    others = dict(left_out(recipe, runs, lambda run: stored_result(run, recipe)))

    def report() -> str:
        together = results | others
        order = sorted(together, key=lambda run: (cells.index(run.task), models.index(run.model)))
        return write_report(folder, {run: together[run] for run in order})

    failures = Failures()
    tables: dict[tuple[Cell, str], Any] = {}
    for number, run in enumerate([] if report_only else grid, 1):
        if run in results or (recipe.training.skip_solved and _solved(run, results, recipe)):
            continue
        _say(f"[{number}/{len(grid)}] {run.label}", quiet)
        with failures.kept(run.label):
            results[run] = _do(run, recipe, tables, quiet)
        report()
    text = report()
    failures.check(folder)
    return text


def stored_result(run: Run, recipe: MQARRecipe) -> dict[str, Any] | None:
    """The result in a run's folder, None if there is none.

    Raises:
        LatteError: it is damaged, or of a run with other settings.
    """
    from latte.train.run_folder import first_difference

    file = run.folder / RESULT_FILE
    if not file.exists():
        return None
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        identity, _ = stored["identity"], stored["outcome"]["cells"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise LatteError(f"{file} is damaged ({error}); delete it to do the run again") from None
    wanted = json.loads(json.dumps(run.identity(recipe)))
    difference = first_difference(identity, wanted)
    if difference:
        key, there, here = difference
        raise LatteError(
            f"{run.folder} holds another run: {key} is {there!r} there and {here!r} here; choose"
            " another output_dir"
        )
    return stored


def _do(run: Run, recipe: MQARRecipe, tables: dict[tuple[Cell, str], Any], quiet: bool) -> Any:
    """Train one run and keep its result."""
    import torch

    from latte.machine import describe
    from latte.train.run_folder import write_json
    from replication.mqar.training import make_table, train_run

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for split, cells in (("train", run.train), ("test", run.tests)):
        for cell in cells:
            if (cell, split) not in tables:
                tables[cell, split] = make_table(cell, recipe.data, split)
    with progress_bar(quiet) as bar:

        def evaluated(point: dict[str, float]) -> None:
            accuracies = " ".join(f"{k} {v:.4f}" for k, v in point.items() if "x" in k)
            text = f"  epoch {point['epoch']:.2f} | loss {point['loss']:.4f} | {accuracies}"
            bar.write(f"{text} | {point['seconds']:.0f} s", file=sys.stdout)

        outcome = train_run(
            run,
            recipe,
            {cell.name: tables[cell, "train"] for cell in run.train},
            {cell.name: tables[cell, "test"] for cell in run.tests},
            device,
            None if quiet else evaluated,
            bar.update,
        )

    result = {
        "identity": run.identity(recipe),
        "outcome": asdict(outcome),
        **describe(device),
    }
    writable_folder(run.folder)
    write_json(run.folder / RESULT_FILE, result)
    return result


def _solved(run: Run, results: dict[Run, Any], recipe: MQARRecipe) -> bool:
    """Whether an earlier learning rate solved this very task, model and seed."""
    return any(
        other.key == run.key
        and other.seed == run.seed
        and min(cell["accuracy"] for cell in result["outcome"]["cells"]) >= recipe.training.stop_at
        for other, result in results.items()
    )


def _list(recipe: MQARRecipe) -> None:
    grid = runs(recipe)
    for run in grid:
        done = " (done)" if stored_result(run, recipe) is not None else ""
        print(f"{run.label}: {run.folder}{done}")
    print(f"{len(grid)} runs")


def _say(line: str, quiet: bool) -> None:
    if not quiet:
        print(line, flush=True)
