"""Measurements as a CSV file that grows by a part at a time, so that a run can go on where it was.

Every row names its model, the weights, the machine, the versions and the command. A part that was
measured twice counts as the later row says.
"""

from __future__ import annotations

import csv
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from latte.errors import LatteError
from latte.lab import machine
from latte.lab.evaluate.sides import Side
from latte.lab.evaluate.tables import csv_text
from latte.models.atomic_files import writable_folder

IDENTITY = ("model", "seed", "overrides", "weights")
MACHINE = ("cpu", "cores", "device", "threads", "torch", "transformers", "latte", "date")

Row = dict[str, Any]


class ResultsFile:
    """A file of rows.

    Args:
        path: of the CSV file; it need not be there.
        key: columns that say which measurement a row is, beside model and seed.
        settings: columns that say how it was measured, alike in rows that are compared.
        values: the other columns.
    """

    def __init__(
        self, path: Path, key: Sequence[str], settings: Sequence[str], values: Sequence[str]
    ) -> None:
        self.path, self.settings = path, tuple(settings)
        self.key = ("model", "seed", *key)
        own = (*IDENTITY, *key, *values, *settings)
        self.columns = (*own, *MACHINE, "command")
        self.rows = read_rows(path) if path.exists() else []
        for name in self.columns:
            if self.rows and name not in self.rows[0]:
                raise LatteError(f"{path} is no table of this command: it has no column {name!r}")

    def begin(
        self, side: Side, settings: Mapping[str, Any], within: Mapping[str, str] | None = None
    ) -> Row:
        """The columns of a side's rows that are the same in all of them.

        Args:
            within: columns and values; the settings are those of such rows.

        Raises:
            LatteError: the file has rows of this name by other weights or in another way.
        """
        fixed = {**side.identity(), **{name: str(settings[name]) for name in self.settings}}
        for row in self.of(side, **(within or {})):
            for name, value in fixed.items():
                if row[name] != value:
                    raise LatteError(
                        f"{self.path} has rows of {side.name!r} with {name}={row[name] or 'none'},"
                        f" and this is {value or 'none'}: give it another name, choose another"
                        " --output, or delete those rows"
                    )
        return fixed

    def of(self, side: Side, **key: Any) -> list[Row]:
        """A side's rows with these values."""
        wanted = {"model": side.name, "seed": side.seed, **{k: str(v) for k, v in key.items()}}
        return [row for row in self.rows if all(row[k] == v for k, v in wanted.items())]

    def add(self, rows: Iterable[Mapping[str, Any]], fixed: Row, device: torch.device) -> None:
        """Append rows to the file, with the columns that `begin` gave and the machine's."""
        more = fixed | machine.describe(device, MACHINE) | {"command": command()}
        new = [{name: text_of({**row, **more}.get(name)) for name in self.columns} for row in rows]
        writable_folder(self.path.parent)
        with self.path.open("a", encoding="utf-8", newline="") as file:
            lines = csv_text(self.columns, new, end="\r\n")  # whose letters in a text are quoted
            file.write(lines if file.tell() == 0 else lines.split("\r\n", 1)[1])
        self.rows += new

    def latest(self) -> list[Row]:
        """The rows, each measurement once."""
        return list({tuple(row[name] for name in self.key): row for row in self.rows}.values())


def text_of(value: Any) -> str:
    """A value as the file has it; numbers with all the digits that tables need."""
    if value is None:
        return ""
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, every value as text."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def command() -> str:
    """The command line of this process."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return shlex.join(["python", "-m", f"experiments.{program.parent.name}", *sys.argv[1:]])
    return shlex.join([program.name, *sys.argv[1:]])


def by_model(rows: Iterable[Row], order: Sequence[str] = ()) -> dict[str, list[Row]]:
    """Rows by model: those of `order` first, as it has them, then the others."""
    found: dict[str, list[Row]] = {name: [] for name in order}
    for row in rows:
        found.setdefault(row["model"], []).append(row)
    return {name: own for name, own in found.items() if own}
