"""Run the kernels' tests of this folder under Triton's interpreter, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
RUNS_ALREADY = os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available()


@pytest.mark.timeout(0)  # minutes, more beside other work: each test within has its own limit
@pytest.mark.skipif(RUNS_ALREADY, reason="the kernels' tests run in this process")
@pytest.mark.parametrize("part", ["laws", "kernels"])
def test_under_the_interpreter(part, request):
    """The cases that this run selects, slow ones or not: in two processes, as there are workers."""
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    selected = request.config.getoption("markexpr")
    files = sorted(str(path) for path in HERE.glob("test_kernels_*.py"))
    if part == "laws":
        files = [str(HERE.parent / name) for name in ("test_laws.py", "test_kept.py")]
    done = subprocess.run(
        [*command, "-p", "no:xdist", "-m", selected, *files],
        env=environment,
        capture_output=True,
        text=True,
    )
    print(done.stdout[-6000:], done.stderr[-2000:])
    assert done.returncode == 0, done.stdout[-3000:]
    assert " skipped" not in done.stdout.splitlines()[-1]
