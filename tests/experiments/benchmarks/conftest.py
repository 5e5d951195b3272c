import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.benchmarks import records


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """quick(script) runs a benchmark's module as its command does, quickly, into tmp_path.

    Unless ``apart``, what belongs into a fresh process is only sent there and back.
    """

    def here(function, *arguments):
        function, arguments = pickle.loads(pickle.dumps((function, arguments)))
        return pickle.loads(pickle.dumps(function(*arguments)))

    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(script, apart=False):
        if not apart:
            monkeypatch.setattr(records, "in_fresh_process", here)
        monkeypatch.setattr(sys, "argv", [script.__file__, "--quick", "--out", str(tmp_path)])
        script.main()

    return run


@pytest.fixture
def command(tmp_path):
    """command(name, *more, **variables) runs a benchmark's command quickly into tmp_path.

    It has one thread. Returns what it printed.
    """

    def run(name, *more, **variables):
        line = [
            sys.executable,
            "-m",
            f"experiments.benchmarks.{name}",
            "--quick",
            "--out",
            str(tmp_path),
        ]
        done = subprocess.run(
            [*line, *more],
            cwd=Path(__file__).parents[3],
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
