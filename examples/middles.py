"""The middle of every long text of some files, as training text of many kinds.

    python -m examples.middles OUT.jsonl FILE... [--characters 100000]

A conversion is trained on a few million tokens. A piece of each of many books is then better than a
few whole books. A piece begins after the first blank line of a text's middle. Texts of less than
twice as many characters, or without such a line, are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from latte.errors import LatteError
from latte.lab.command_line import OneLineParser, exit_code
from latte.lab.data.files import FileSource, find_files

BLANK_LINE = "\n\n"


def main(arguments: list[str] | None = None) -> int:
    """Write the file; returns the exit code: 0, 2 for a mistake, 130 interrupted."""
    parser = OneLineParser(
        prog="python -m examples.middles",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("output", help="a new file of JSON lines")
    parser.add_argument("files", nargs="+", help="texts, as for data.corpus of a recipe")
    parser.add_argument("--characters", type=int, default=100_000, help="of a piece; 100000")
    options = parser.parse_args(arguments)

    def work() -> None:
        output = Path(options.output)
        if output.exists():
            raise LatteError(f"{output} exists already; expected a new file")
        if options.characters < 1:
            raise LatteError(f"--characters: expected at least 1, got {options.characters}")
        paths = [path for spec in options.files for path in find_files(spec)]
        texts = FileSource(paths, "text").documents()
        pieces = list(middles(texts, options.characters))
        lines = (json.dumps({"text": piece}, ensure_ascii=False) + "\n" for piece in pieces)
        output.write_text("".join(lines), encoding="utf-8")
        size = sum(map(len, pieces))
        print(f"{output}: {len(pieces):,} pieces, {size:,} characters", file=sys.stderr)

    return exit_code("middles", work, "nothing was written")


def middles(texts: Iterable[str], characters: int) -> Iterator[str]:
    """A piece of at most so many characters from the middle of every text that is long enough."""
    for text in texts:
        start = text.find(BLANK_LINE, (len(text) - characters) // 2)
        if len(text) >= 2 * characters and start >= 0:
            yield text[start : start + characters].strip()


if __name__ == "__main__":
    raise SystemExit(main())
