"""Ingredients of a mixer, each alone and together, beside its rivals at equal parameters.

    python -m experiments.ingredients recipes/ingredients/shakespeare.yaml [key=value ...]

Each run has a folder under the recipe's `output_dir`. A run that is finished is not done again, and
one that was cut off continues from its checkpoint. Two processes may share the work: start the
command twice. After every run `runs.csv` and `runs.md` are written from all runs in `output_dir`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from experiments.grids import command
from experiments.ingredients.recipe import (
    IngredientsRecipe,
    IngredientsRun,
    kept,
    load,
    planned,
)
from experiments.ingredients.report import COMMIT_FILE, write_report
from latte.errors import LatteError
from latte.lab.compare.compare import stored_measurement, train_and_measure
from latte.lab.compare.grid import Grid, RunStatus, unfinished
from latte.lab.data.preparing import prepare_text
from latte.lab.train.run_folder import check_same_recipe
from latte.models.atomic_files import write_json


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a recipe; returns the exit code: 0, 2 for a user's mistake, 130 when interrupted."""
    return command("ingredients", __doc__, load, IngredientsGrid, arguments)


class IngredientsGrid(Grid):
    """The runs of a plan, each in a process of its own."""

    apart = True
    files = "runs.csv, runs.md"
    goes_on = "where it stopped"

    def __init__(self, recipe: IngredientsRecipe, *, quiet: bool = False) -> None:
        super().__init__(recipe, planned(recipe), quiet=quiet)

    def look(self, run: IngredientsRun) -> RunStatus:
        check_same_recipe(run.recipe)
        measured = stored_measurement(run, run.recipe.comparison)
        if measured is not None:
            return RunStatus(run, measured)
        return RunStatus(run, None, unfinished(run))

    def prepare(self) -> None:
        prepare_text(self.recipe.data, progress=self.first and not self.quiet)

    def do(self, run: IngredientsRun) -> None:
        train_and_measure(run, run.recipe.comparison, self.quiet)
        write_json(run.folder / COMMIT_FILE, {"commit": commit()})

    def write(self, statuses: Sequence[RunStatus]) -> str:
        """Report the runs of the plan and those that another plan has left."""
        found = {status.run.folder: status for status in statuses}
        for run in kept(self.recipe):
            if run.folder not in found:
                with suppress(LatteError):  # a run of other settings by the same name
                    found[run.folder] = self.look(run)
        return write_report(self.recipe, list(found.values()))


def commit() -> str:
    """The commit of the code, with a + if tracked files differ from it; "" outside a clone."""
    root = Path(__file__).parents[2]

    def git(*arguments: str) -> str:
        options: dict[str, Any] = {"cwd": root, "capture_output": True, "text": True}
        return subprocess.run(["git", *arguments], check=True, **options).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""
