"""What the recipes with a grid of models share: their sections, their runs, their command.

No torch at the top, so that a mistake in a recipe shows at once.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

from latte.errors import LatteError, check_seed
from latte.lab.command_line import OneLineParser, exit_code
from latte.lab.compare.grid import AGAIN, Grid, RunStatus, unfinished
from latte.lab.compare.intervals import mean_of
from latte.lab.train.run_folder import Claim, checkpoints, claim
from latte.models.plain_files import read_object

RESULT_FILE = "result.json"

# ---- sections of a recipe


def check_models(models: Mapping[str, Any], select: Sequence[str] | None) -> None:
    """Raise LatteError unless `models` are named sections with a preset, and `select` names some.

    `models`: name -> {preset: ..., any field of LatteConfig: ...}; the names become folders.
    """
    if not models:
        raise LatteError("models: expected at least one model, got none")
    for name, values in models.items():
        if not re.fullmatch(r"\w[\w+.-]*", str(name)):
            raise LatteError(
                f"models: expected names of letters, digits and + . _ - (they name folders),"
                f" got {name!r}"
            )
        if not isinstance(values, dict) or not isinstance(values.get("preset"), str):
            raise LatteError(
                f"models.{name}: expected a section with a preset, such as"
                f" {{preset: latte-r-swa++, sliding_window: 32}}, got {values!r}"
            )
    for name in select if select is not None else models:
        if name not in models:
            raise LatteError(
                f"select: no model is called {name!r}; expected some of {', '.join(models)}"
            )
    if select is not None and not select:
        raise LatteError("select: expected at least one model, got none")


def model_config(
    name: str, preset: str, values: Mapping[str, Any], *, causal: bool | None = None
) -> Any:
    """The config of a model of the registry, "tiny" but for `values`; a mistake names the model."""
    from latte.models.registry import find_model

    try:
        entry = find_model(preset)
        entry.check(causal=causal)
        return entry.config("tiny", **values)
    except (ValueError, TypeError) as error:
        raise LatteError(f"models.{name}: {' '.join(str(error).split())}") from None


def check_numbers(values: Mapping[str, Any]) -> None:
    """Raise LatteError for a value that is neither None nor a number above 0; by dotted keys."""
    for key, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise LatteError(f"{key}: expected a number above 0, got {value}")


def check_optimiser(training: Any) -> None:
    """Raise LatteError for what no AdamW can have, and for seeds that no generator takes."""
    for key in ("warmup_steps", "weight_decay", "max_grad_norm"):
        if getattr(training, key) < 0:
            raise LatteError(f"training.{key}: expected 0 or more, got {getattr(training, key)}")
    if len(training.betas) != 2 or not all(0 <= beta < 1 for beta in training.betas):
        raise LatteError(
            f"training.betas: expected two numbers from 0 up to but not 1, got {training.betas}"
        )
    for seed in training.seeds:
        check_seed("training.seeds", seed)
    check_different("training.seeds", training.seeds)


def check_different(key: str, values: Sequence[Any]) -> None:
    """Raise LatteError for an empty list, or one that says something twice."""
    if not values or len(set(values)) != len(values):
        raise LatteError(f"{key}: expected different numbers, at least one, got {values}")


# ---- runs


class ModelRun(Protocol):
    """One model trained once."""

    model: str

    @property
    def label(self) -> str: ...

    @property
    def folder(self) -> Path: ...

    def identity(self) -> dict[str, Any]:
        """What decides the outcome, as plain JSON."""


class Sweep(Grid):
    """The runs of a recipe with `models`; a run's result is one file, written last.

    Its report is about all models of the recipe, also those that `select` leaves out, as far as
    they are done. What of them does not fit the recipe, or cannot be built here, is passed over.
    """

    identity_key = "identity"  # of a result's file: what it is the result of
    files: ClassVar[str]  # of the report
    goes_on: ClassVar[str]  # from where, when run again

    def __init__(self, recipe: Any, *, quiet: bool = False) -> None:
        super().__init__(recipe, self.runs_of(recipe), quiet=quiet)
        self.left_out = list(self._left_out())

    # ---- what a kind of sweep says

    @staticmethod
    def runs_of(recipe: Any) -> list[Any]:
        """The recipe's runs. Raises LatteError for a model that cannot be built."""
        raise NotImplementedError

    def place(self, run: Any) -> tuple[int, ...]:
        """Where a run stands in the report."""
        raise NotImplementedError

    def report(self, found: Sequence[tuple[Any, dict[str, Any]]]) -> str:
        """Write the report's files about (run, result); returns its table."""
        raise NotImplementedError

    # ---- for all of them

    def stored_result(self, run: ModelRun) -> dict[str, Any] | None:
        """The result in a run's folder, None if there is none.

        Raises:
            LatteError: it is damaged, or of a run with other settings.
        """
        from latte.lab.results import first_difference

        file = run.folder / RESULT_FILE
        if not file.exists():
            return None
        stored = read_object(file, self.identity_key, "outcome", then=AGAIN)
        wanted = json.loads(json.dumps(run.identity()))
        difference = first_difference(stored[self.identity_key], wanted)
        if difference:
            key, there, here = difference
            raise LatteError(
                f"{run.folder} holds another run: {key} is {there!r} there and {here!r} here;"
                " choose another output_dir"
            )
        return stored

    def look(self, run: ModelRun) -> RunStatus:
        result = self.stored_result(run)
        return RunStatus(run, result, unfinished(run) if result is None else "")

    def _left_out(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        for name in self.recipe.models:
            if self.recipe.select is None or name in self.recipe.select:
                continue
            with suppress(LatteError):
                for run in self.runs_of(replace(self.recipe, select=[name])):
                    with suppress(LatteError):
                        if (result := self.stored_result(run)) is not None:
                            yield run, result

    def write(self, statuses: Sequence[RunStatus]) -> str:
        found = [(status.run, status.result) for status in statuses if status.result]
        return self.report(sorted([*found, *self.left_out], key=lambda pair: self.place(pair[0])))

    def sweep(self, *, report_only: bool = False) -> tuple[list[RunStatus], str]:
        """As :meth:`Grid.sweep`; at the end it also raises for runs that failed."""
        statuses, text = super().sweep(report_only=report_only)
        failed = [line for line in self.problems.items() if line[1].startswith("failed")]
        if failed:
            label, problem = failed[0]
            raise LatteError(
                f"{len(failed)} run{'s' if len(failed) > 1 else ''} failed and would be tried"
                f" again; the others are reported in {self.recipe.output_dir}. The first:"
                f" {label}: {problem.removeprefix('failed: ')}"
            )
        return statuses, text


@contextmanager
def claimed(run: Any) -> Iterator[Claim]:
    """The run's folder, locked. Its checkpoints go at the end: the run then has its result."""
    owner = claim(run)
    for problem in owner.skipped:
        print(f"passing over a damaged checkpoint: {problem}", file=sys.stderr, flush=True)
    try:
        yield owner
        for folder in checkpoints(run.folder):
            shutil.rmtree(folder)
    finally:
        if owner.lock is not None:
            owner.lock.close()


def accuracies(values: Sequence[float]) -> str:
    """The mean over seeds, with its 95% interval if there are several."""
    return mean_of(values).text(".4f")


def progress_bar(quiet: bool, **arguments: Any) -> Any:
    """A tqdm bar in steps; none where stderr is not a terminal."""
    from tqdm import tqdm

    return tqdm(
        unit="step", dynamic_ncols=True, leave=False, disable=True if quiet else None, **arguments
    )


# ---- the command


def command(
    program: str,
    description: str | None,
    load: Callable[[str, Sequence[str]], Any],
    sweep: Any,
    arguments: Sequence[str] | None,
    *,
    shows: Mapping[str, tuple[str, Callable[[Any, bool], str]]] | None = None,
) -> int:
    """Run a recipe; returns the exit code: 0, 2 for a user's mistake, 130 when interrupted.

    Args:
        load: the recipe of a file and overrides.
        sweep: the class of its grid, with ``files`` and ``goes_on`` as :class:`Sweep` has them.
        shows: option -> (help, what it prints for a recipe, quiet or not, in the place of a run).
    """
    parser = OneLineParser(
        prog=f"python -m experiments.{program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", metavar="RECIPE", help=f"a YAML recipe, see recipes/{program}")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides")
    parser.add_argument("--dry-run", action="store_true", help="list the runs and do none")
    parser.add_argument("--report", action="store_true", help="report what is done, train nothing")
    parser.add_argument("--quiet", action="store_true", help="no bars and no lines")
    for name, (text, _) in (shows or {}).items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    options = parser.parse_intermixed_args(arguments)

    def work() -> None:
        recipe = load(options.recipe, options.overrides)
        for name, (_, show) in (shows or {}).items():
            if getattr(options, name) and not options.dry_run:
                print(show(recipe, options.quiet), end="")
                return
        grid = sweep(recipe, quiet=options.quiet)
        if options.dry_run:
            print(grid.listing())
            return
        print(grid.sweep(report_only=options.report)[1], end="")
        print(f"written: {grid.files} in {recipe.output_dir}")

    return exit_code(program, work, f"run again, it goes on {sweep.goes_on}")
