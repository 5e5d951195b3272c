"""Where a command may write, so that no command deletes other results.

One rule serves all commands. A result is replaced only by a result of the same settings. Otherwise:

- a place that the user named (``--output``, ``--save-state``) is refused in one line, and
  ``--force`` replaces what is there;
- a place that the command chose gets a number: ``evaluation``, ``evaluation-2``, ``evaluation-3``.

The settings of a result are kept next to it, in ``NAME.settings.json``. Files are written to a
temporary folder and moved when all of them are complete, so that a full disk or an interruption
does not change the old ones. Training runs and conversions have another rule
(:mod:`latte.lab.train.run_folder`): they continue in their own folder, and refuse any other. This
module does not import torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

from latte.errors import LatteError
from latte.models.atomic_files import (
    GO_ON,
    check_writable,
    staged_beside,
    writable_folder,
    write_json,
)
from latte.models.plain_files import read_object


@dataclass(frozen=True)
class Results:
    """A place for the files of one command with one set of settings. Made by :func:`results_at`.

    Attributes:
        folder: Folder of the files.
        files: Names of all files that the command may write, without a number.
        settings: Settings on which the results depend, as plain JSON.
        number: Number that is added to the files' names, from 2 on.
    """

    folder: Path
    files: tuple[str, ...]
    settings: dict[str, Any]
    number: int = 1

    def path(self, file: str) -> Path:
        """Where a file of the results is."""
        return numbered(self.folder / file, self.number)

    @property
    def record(self) -> Path:
        """The file with the settings."""
        first = self.path(self.files[0])
        return first.with_name(f"{first.stem}.settings.json")

    def problem(self) -> str | None:
        """None if writing here loses nothing, else a clause that says what is there."""
        if not self.record.exists():
            there = [self.path(file) for file in self.files if os.path.lexists(self.path(file))]
            return f"{there[0]} exists" if there else None
        try:
            stored = read_object(self.record)
        except LatteError:
            return f"{self.record} exists and cannot be read"
        difference = first_difference(stored, self.settings)
        if difference is None:
            return None
        key, old, new = difference
        other = f"{key} is {old!r} there and {new!r} here"
        return f"{self.folder} holds results of other settings: {other}"

    @contextmanager
    def writing(self) -> Iterator[Path]:
        """A folder to write the files into; they are moved into their place at the end.

        Raises:
            LatteError: The files cannot be written. Earlier files are not changed then.
        """
        writable_folder(self.folder)
        is_new = not os.path.lexists(self.record)
        try:
            with staged_beside(self.folder / Path(self.files[0]).stem) as staged:
                if is_new:
                    self.keep_settings()  # first, so that another process takes another place
                yield staged
                written = sorted(path.name for path in staged.iterdir())
                self.keep_settings()
                is_new = False
                for name in written:
                    os.replace(staged / name, self.path(name))
                for name in set(self.files) - set(written):  # of the results that were replaced
                    self.path(name).unlink(missing_ok=True)
        except OSError as error:
            raise LatteError(
                f"results cannot be written into {self.folder}: {error.strerror or error}"
            ) from None
        finally:
            if is_new:
                self.record.unlink(missing_ok=True)

    def keep_settings(self) -> None:
        """Write the file with the settings."""
        write_json(self.record, self.settings)


def results_at(
    folder: Path,
    files: Sequence[str],
    settings: Mapping[str, Any],
    *,
    named: bool,
    force: bool = False,
    number: Literal["folder", "files"] = "folder",
) -> Results:
    """Find a place for results where no other results are lost. Nothing is written yet.

    Args:
        files: Names of all files that the command may write.
        settings: Settings on which the results depend.
        named: Whether the user chose the folder. Then no other folder is used instead.
        force: Whether to replace these files, whatever they are.
        number: The part of the place that gets a number if the command chose the place.

    Raises:
        LatteError: The folder cannot be written, or the user named it and it has other results.
    """
    plain = json.loads(json.dumps(dict(settings), default=str))
    for n in count(1):
        inside = number == "files"
        place = Results(
            folder if inside else numbered(folder, n, ""), tuple(files), plain, n if inside else 1
        )
        problem = None if force else place.problem()
        if problem is None:
            check_writable(place.folder)
            return place
        if named:
            raise LatteError(f"{problem}; {GO_ON} the results")
    raise AssertionError("unreachable")


def numbered(path: Path, number: int, suffix: str | None = None) -> Path:
    """`evaluation.csv` -> `evaluation-2.csv`; number 1 is the path itself.

    suffix: what the number stands before; None: the path's own.
    """
    suffix = path.suffix if suffix is None else suffix
    stem = path.name.removesuffix(suffix)
    return path if number == 1 else path.with_name(f"{stem}-{number}{suffix}")


def own_file(path: Path, is_own: Callable[[Path], bool]) -> tuple[Path, int]:
    """The first of `NAME`, `NAME-2`, ... that is not there or is one's own, and its number."""
    for n in count(1):
        place = numbered(path, n)
        if not place.exists() or is_own(place):
            return place, n
    raise AssertionError("unreachable")


# ---- what all of them write with


def first_difference(stored: Any, wanted: Any, key: str = "") -> tuple[str, Any, Any] | None:
    """(dotted key, stored value, wanted value) of the first difference of two JSON trees."""
    if isinstance(stored, dict) and isinstance(wanted, dict):
        for name in [*stored, *(n for n in wanted if n not in stored)]:
            dotted = f"{key}.{name}" if key else name
            found = first_difference(stored.get(name), wanted.get(name), dotted)
            if found:
                return found
        return None
    return None if stored == wanted else (key.removeprefix("recipe."), stored, wanted)
