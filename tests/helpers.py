"""What tests of many rooms do with files and processes."""

import csv
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def read_csv(path):
    """The rows of a CSV file, by column."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def python(*arguments, code=0, timeout=500, **environment):
    """Run Python on the sources of this clone, in one thread; returns what came of it.

    Args:
        code: Exit code that is expected; None is any.
        environment: Further variables.
    """
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    given = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **given},
    )
    assert code in (None, done.returncode), done.stdout[-3000:] + done.stderr[-3000:]
    return done
