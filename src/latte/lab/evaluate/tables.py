"""Tables of results: CSV and Markdown."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def csv_text(columns: Iterable[str], rows: Iterable[Mapping[str, Any]], end: str = "\n") -> str:
    """A head and the rows; what a row lacks is left empty. `end`: of each line."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(columns), lineterminator=end, restval="")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def write_csv(path: Path, columns: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """A CSV file, whose lines end as RFC 4180 has it."""
    path.write_text(csv_text(columns, rows, end="\r\n"), encoding="utf-8", newline="")


def table(lines: Sequence[Sequence[str]], texts: int = 1) -> str:
    """Markdown: the head, then the lines, the first `texts` columns to the left."""
    rule = ["---"] * texts + ["---:"] * (len(lines[0]) - texts)
    return "".join("| " + " | ".join(line) + " |\n" for line in [lines[0], rule, *lines[1:]])
