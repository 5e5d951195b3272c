"""What recipes with a grid of models share: the models' section, the command, the machine."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from latte.errors import LatteError, OneLineParser


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


def left_out(recipe: Any, runs: Callable[[Any], list[Any]], stored: Callable[[Any], Any]) -> Any:
    """(run, result) of the models that `select` leaves out, as far as they are done.

    A report is about all models of a recipe, whichever were trained by this call. What does not
    fit the recipe, or cannot be built here, is passed over.
    """
    for name in recipe.models:
        if recipe.select is None or name in recipe.select:
            continue
        try:
            found = runs(replace(recipe, select=[name]))
        except LatteError:
            continue
        for run in found:
            with suppress(LatteError):
                if (result := stored(run)) is not None:
                    yield run, result


class Failures:
    """Runs of a grid that failed by themselves, as for want of memory, while the rest go on."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextmanager
    def kept(self, label: str) -> Iterator[None]:
        """Within it a failure is said and kept, and raises nothing."""
        try:
            yield
        except RuntimeError as error:
            self.lines.append(f"{label}: {' '.join(str(error).split())[:300]}")
            print(f"  failed: {self.lines[-1]}", file=sys.stderr, flush=True)

    def check(self, folder: Any) -> None:
        """Raise LatteError, at the end, if there were any."""
        if self.lines:
            count = len(self.lines)
            raise LatteError(
                f"{count} run{'s' if count > 1 else ''} failed and would be tried again; the"
                f" others are reported in {folder}. The first: {self.lines[0]}"
            )


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


def command_line(program: str, description: str | None) -> argparse.ArgumentParser:
    """The options that every runner of such recipes has."""
    parser = OneLineParser(
        prog=f"python -m replication.{program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", metavar="RECIPE", help=f"a YAML recipe, see recipes/{program}")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides")
    parser.add_argument("--dry-run", action="store_true", help="list the runs and do none")
    parser.add_argument("--report", action="store_true", help="report what is done, train nothing")
    parser.add_argument("--quiet", action="store_true", help="no bars and no lines")
    return parser


def exit_code(program: str, work: Callable[[], None], how_to_go_on: str) -> int:
    """Do the work of a command: 0, 2 for a user's mistake, 130 when interrupted; one line each."""
    try:
        work()
    except LatteError as error:
        print(f"{program}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{program}: interrupted; {how_to_go_on}", file=sys.stderr)
        return 130
    return 0


def progress_bar(quiet: bool, **arguments: Any) -> Any:
    """A tqdm bar in steps; none where stderr is not a terminal."""
    from tqdm import tqdm

    return tqdm(
        unit="step", dynamic_ncols=True, leave=False, disable=True if quiet else None, **arguments
    )
