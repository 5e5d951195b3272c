"""Rows of results: the machine they came from, the CSV files, and the goals."""

from __future__ import annotations

import csv
import datetime
import functools
import importlib.metadata
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from common import Row


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def cpu_name() -> str:
    """The processor's name, as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


@functools.cache
def _machine() -> Row:
    import latte

    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "jax": version("jax"),
        "python": platform.python_version(),
        "latte": version("latte-attention") or getattr(latte, "__version__", ""),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def machine() -> Row:
    """Processor, threads, versions and date: the last columns of every row."""
    return {"threads": torch.get_num_threads(), **_machine()}


class Table:
    """A CSV file that is written row by row, so that an interrupted run leaves what it has.

    ``extra`` gives columns to stand before the machine's.
    """

    def __init__(self, path: Path, extra: Callable[[], Row] = dict) -> None:
        self.path, self.extra = path, extra
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        """Append the row, with the machine's columns, to the file; the first one starts it."""
        row = row | self.extra() | machine()
        with self.path.open("a" if self.rows else "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(row))
            if not self.rows:
                writer.writeheader()
            writer.writerow(row)
        self.rows.append(row)


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file, every value as text."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


class Goal(NamedTuple):
    """A target and what came out; ``at_least`` says which side of the target is good."""

    name: str
    target: float
    measured: float
    at_least: bool
    note: str = ""

    @property
    def met(self) -> bool:
        return self.measured >= self.target if self.at_least else self.measured <= self.target


def write_goals(
    path: Path, script: str, goals: Sequence[Goal], extra: Callable[[], Row] = dict
) -> list[Row]:
    """Put this script's goals into a file beside the other scripts'; all of them."""
    kept = [row for row in read_rows(path) if row["script"] != script] if path.exists() else []
    new = []
    for goal in goals:
        sign, verdict = ">=" if goal.at_least else "<=", "pass" if goal.met else "miss"
        new.append(
            {
                "script": script,
                "goal": goal.name,
                "target": f"{sign} {goal.target:g}",
                "measured": f"{goal.measured:.3f}",
                "verdict": verdict,
                "note": goal.note,
                **extra(),
                **machine(),
            }
        )
    rows = sorted([*kept, *new], key=lambda row: row["script"])
    if rows:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return rows


def report_goals(out: Path, script: str, goals: Sequence[Goal]) -> None:
    """Put this script's goals into goals.csv and print the whole table."""
    rows = write_goals(out / "goals.csv", script, goals)
    if rows:
        print_goals(rows)


def print_goals(rows: Sequence[Row]) -> None:
    """The table of goals, targets and verdicts."""
    columns = ("goal", "target", "measured", "verdict", "note")
    widths = [max(len(c), *(len(str(row[c])) for row in rows)) for c in columns]
    print()
    for row in ({c: c for c in columns}, *rows):
        cells = (str(row[c]).ljust(w) for c, w in zip(columns, widths, strict=True))
        print("  ".join(cells).rstrip())
