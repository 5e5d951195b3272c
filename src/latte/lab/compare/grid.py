"""A grid of runs: their state, their execution, and a report after each.

A comparison of presets, with one seed or several, is a grid; so is every sweep of `experiments`.
Each run has a folder of its own. A run that has a result is not done again, so that an interrupted
grid continues where it stopped. A run that another process is doing is skipped, so that two
processes can share the work. A run that fails, for example by a lack of memory, is reported, and
the others continue.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latte.errors import LatteError
from latte.lab.train.run_folder import FolderInUse, checkpoints
from latte.models.atomic_files import writable_folder, write_json
from latte.models.plain_files import read_object
from latte.ops.processes import is_first_process, number_of_processes

AGAIN = "delete it to do that again"  # of a result's file that is damaged

FAILED_FILE = "failed.json"  # why a run's folder has no result, if its last attempt failed


@dataclass(frozen=True)
class RunStatus:
    """The status of a run: its `result`, or the `problem` that prevents one."""

    run: Any
    result: Any = None
    problem: str = ""

    @property
    def due(self) -> bool:
        """Whether to start a run: not one that has a result, has diverged, or cannot run here."""
        return self.result is None and not self.problem.startswith(("diverged", "cannot run here"))

    @property
    def failed(self) -> bool:
        return self.problem.startswith(("diverged", "failed"))


class Grid:
    """The runs of a recipe. A kind of grid says what a folder holds, how a run is done and what is
    reported; this class does the rest.

    Args:
        recipe: Recipe whose `output_dir` holds the runs' folders and the report.
        runs: Runs in their order, each with a unique `label` and a `folder`.
        quiet: Whether to print no bars and no lines.
    """

    apart = False  # each run in a process of its own
    keeps_going = True  # after a run that failed; else its error is raised

    def __init__(self, recipe: Any, runs: Sequence[Any], *, quiet: bool = False) -> None:
        self.recipe, self.runs, self.quiet = recipe, runs, quiet
        self.first = is_first_process()  # the only one that prints
        self.problems: dict[str, str] = {}  # of the runs that this call has tried, by label

    # ---- what a kind of grid says

    def look(self, run: Any) -> RunStatus:
        """What a run's folder says.

        Raises:
            LatteError: A file is damaged, or the run is of another recipe.
        """
        raise NotImplementedError

    def do(self, run: Any) -> None:
        """Train and score a run, from its start or its newest checkpoint, into its folder."""
        raise NotImplementedError

    def write(self, statuses: Sequence[RunStatus]) -> str:
        """Write the report's files; returns its table."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Prepare what all runs need, before the first run that has no result."""

    def is_spared(self, run: Any, statuses: Sequence[RunStatus]) -> bool:
        """Whether a run need not be done, because of the results of others."""
        return False

    # ---- the engine

    def statuses(self) -> list[RunStatus]:
        """The status of all runs, from their folders and from this call."""
        return [self._status(run) for run in self.runs]

    def _status(self, run: Any) -> RunStatus:
        found = self.look(run)
        if found.result is not None or not found.due:
            return found
        problem, file = self.problems.get(run.label, ""), run.folder / FAILED_FILE
        if not problem and file.exists():
            problem = read_object(file, "problem", then=AGAIN)["problem"]
        return RunStatus(run, None, problem) if problem else found

    def sweep(self, *, report_only: bool = False) -> tuple[list[RunStatus], str]:
        """Do the runs that have no result yet; write the report after each. Returns its text too.

        Raises:
            LatteError: There are results of another recipe, a folder cannot be written, or
                `prepare` or `do` raises an error that would stop every run.
        """
        due = [status.run for status in self.statuses() if status.due]
        writable_folder(Path(self.recipe.output_dir))
        if report_only:
            due = []
        if due:
            self.prepare()
        began = time.perf_counter()
        for number, run in enumerate(due):
            found = self.statuses()
            if not self._status(run).due or self.is_spared(run, found):
                continue  # another process has done it in the meantime, or it is not worth it
            self._say_progress(run, found, number, len(due), time.perf_counter() - began)
            self.problems[run.label] = self._attempt(run)
            if self.first:
                self.write(self.statuses())
        found = self.statuses()
        for status in found:
            if status.result is None and not (self.keeps_going or report_only):
                raise LatteError(f"{status.run.label}: {status.problem}")
        return found, self.write(found) if self.first else ""

    def _attempt(self, run: Any) -> str:
        """Do a run. If it fails by itself, keep its error and return it."""
        import torch

        from latte.lab.machine import WorkFailed, in_fresh_process
        from latte.lab.train.trainer import Diverged

        # A lack of memory stops all processes; another error may stop only one of them.
        several = number_of_processes() > 1
        plain = torch.OutOfMemoryError if several else RuntimeError
        try:
            if self.apart:
                in_fresh_process(self.do, run)
            else:
                self.do(run)
        except (FolderInUse, Diverged, WorkFailed, plain) as error:
            if not self.keeps_going:
                raise
            if isinstance(error, FolderInUse):
                return "another process is at it"
            kind = "diverged" if isinstance(error, Diverged) else "failed"
            text = " ".join(str(error).split())[:300]
            if self.first:
                print(f"  {kind}: {run.label}: {text}", file=sys.stderr, flush=True)
            if run.folder.is_dir():
                write_json(run.folder / FAILED_FILE, {"problem": f"{kind}: {text}"})
            return f"{kind}: {text}"
        (run.folder / FAILED_FILE).unlink(missing_ok=True)
        return ""

    def _say_progress(
        self, run: Any, found: Sequence[RunStatus], number: int, due: int, spent: float
    ) -> None:
        from latte.lab.train.metrics import duration

        done = sum(status.result is not None for status in found)
        failed = sum(status.failed for status in found)
        left = f"about {duration(spent / number * (due - number))} left" if number else "first run"
        self.say(
            f"[{done + failed + 1}/{len(found)}] {run.label} | {done} finished, {failed} failed,"
            f" {left}"
        )

    def say(self, line: str) -> None:
        if self.first and not self.quiet:
            print(line, flush=True)

    def listing(self) -> str:
        """For a dry run: each run, its folder and its status."""
        lines = [
            f"{status.run.label}: {status.run.folder}"
            f" ({'finished' if status.result is not None else status.problem})"
            for status in self.statuses()
        ]
        return "\n".join([*lines, f"{len(lines)} run{'s' if len(lines) != 1 else ''}"])


def unfinished(run: Any) -> str:
    """How far a run without a result has come, by its checkpoints."""
    saved = checkpoints(run.folder)
    if saved:
        return f"stopped at step {saved[-1].name.removeprefix('checkpoint-')}"
    return "not run yet"
