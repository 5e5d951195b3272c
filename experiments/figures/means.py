"""Means over seeds, with 95% intervals, of the runs in the files beside this one.

    python experiments/figures/means.py shakespeare_equal.csv loss length=64

prints the mean of a column for each group of runs that differ in nothing but the seed. Conditions
(COLUMN=VALUE) choose some of the runs.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from latte.lab.compare.intervals import Mean, mean_of

FIGURES = Path(__file__).parent
# Columns that say what was run. The others are the seed, and what was measured.
GROUPS = ("task", "model", "preset", "overrides", "fields", "parameters", "width", "window",
          "latents", "learning_rate", "rate", "length", "pairs", "first", "last")  # fmt: skip


class Group(NamedTuple):
    """Runs that differ in nothing but the seed.

    Attributes:
        about: Value of each column of GROUPS that the file has.
        values: Measured value of each seed, in the order of the seeds.
    """

    about: dict[str, str]
    values: list[float]

    @property
    def mean(self) -> Mean:
        """Mean over the seeds."""
        return mean_of(self.values)


def groups(path: Path, column: str) -> list[Group]:
    """The groups of a file's runs that have a value in a column."""
    found: dict[tuple[str, ...], dict[int, float]] = defaultdict(dict)
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.get(column) and row.get("seed")]
    names = [name for name in GROUPS if rows and name in rows[0]]
    for row in rows:
        found[tuple(row[name] for name in names)][int(row["seed"])] = float(row[column])
    return [
        Group(dict(zip(names, key, strict=True)), [values[seed] for seed in sorted(values)])
        for key, values in found.items()
    ]


def main(name: str, column: str, *conditions: str) -> None:
    """Print the means of a file's column."""
    wanted = [condition.split("=", 1) for condition in conditions]
    for group in groups(FIGURES / name, column):
        if all(group.about[key] == value for key, value in wanted):
            about = " ".join(f"{key}={value}" for key, value in group.about.items() if value)
            seeds = ", ".join(f"{value:.4f}" for value in group.values)
            print(f"{about}: {group.mean.text('.4f')} ({seeds})")


if __name__ == "__main__":
    main(*sys.argv[1:])
