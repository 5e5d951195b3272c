"""Multi-query associative recall: a recipe's grid of runs, a table and figures, in one command.

    python -m experiments.mqar recipes/mqar/cpu.yaml [key=value ...]

Every run has a folder under the recipe's `output_dir` with its `result.json`. A run that has one
is not done again, one that was interrupted goes on from its newest checkpoint, and one that another
process does is passed over. After every run `accuracy.csv` (a row per run and tested cell),
`accuracy.md` (the best learning rate of each model) and the figures `accuracy.png` and
`latents.png` are written anew from all results there are.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.grids import RESULT_FILE, Sweep, claimed, command, progress_bar
from experiments.mqar.recipe import Cell, MQARRecipe, MQARRun, load, runs, tasks
from latte.lab.compare.grid import RunStatus
from latte.lab.machine import describe
from latte.models.atomic_files import write_json


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a recipe; returns the exit code: 0, 2 for a user's mistake, 130 when interrupted."""
    return command("mqar", __doc__, load, MQARSweep, arguments)


class MQARSweep(Sweep):
    """Cells, models, sizes, seeds and learning rates."""

    files = "accuracy.csv, accuracy.md and figures"
    goes_on = "after the last finished run, from the newest checkpoint of the next"
    runs_of = staticmethod(runs)

    def __init__(self, recipe: MQARRecipe, *, quiet: bool = False) -> None:
        super().__init__(recipe, quiet=quiet)
        self.tables: dict[tuple[Cell, str], Any] = {}

    def place(self, run: MQARRun) -> tuple[int, ...]:
        return list(tasks(self.recipe)).index(run.task), list(self.recipe.models).index(run.model)

    def is_spared(self, run: MQARRun, statuses: Sequence[RunStatus]) -> bool:
        """Whether an earlier learning rate solved this very task, model and seed."""
        goal = self.recipe.training.stop_at
        return self.recipe.training.skip_solved and any(
            (other.run.key, other.run.seed) == (run.key, run.seed)
            and min(cell["accuracy"] for cell in other.result["outcome"]["cells"]) >= goal
            for other in statuses
            if other.result is not None
        )

    def do(self, run: MQARRun) -> None:
        import torch

        from experiments.mqar.training import make_table, train_run

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        for split, cells in (("train", run.train), ("test", run.tests)):
            for cell in cells:
                if (cell, split) not in self.tables:
                    self.tables[cell, split] = make_table(cell, self.recipe.data, split)
        with claimed(run) as owner, progress_bar(self.quiet) as bar:

            def evaluated(point: dict[str, float]) -> None:
                found = " ".join(f"{k} {v:.4f}" for k, v in point.items() if "x" in k)
                text = f"  epoch {point['epoch']:.2f} | loss {point['loss']:.4f} | {found}"
                bar.write(f"{text} | {point['seconds']:.0f} s", file=sys.stdout)

            outcome = train_run(
                run,
                {cell.name: self.tables[cell, "train"] for cell in run.train},
                {cell.name: self.tables[cell, "test"] for cell in run.tests},
                device,
                None if self.quiet else evaluated,
                bar.update,
                owner,
            )
            result = {"identity": run.identity(), "outcome": asdict(outcome), **describe(device)}
            write_json(run.folder / RESULT_FILE, result)

    def report(self, found: Sequence[tuple[MQARRun, dict[str, Any]]]) -> str:
        from experiments.mqar.report import write_report

        return write_report(Path(self.recipe.output_dir), dict(found))
