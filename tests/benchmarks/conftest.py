import pickle
import sys
from pathlib import Path

import pytest

# The benchmarks are scripts that import each other by name; the checks on a GPU are one more.
TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS.parent / "benchmarks"), str(TESTS / "ops")]


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """quick(script) runs a benchmark's module as its command does, quickly, into tmp_path.

    Unless ``apart``, what belongs into a fresh process is only sent there and back.
    """
    import records

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
