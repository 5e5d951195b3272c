"""Run the tests of this folder under Triton's interpreter, in a process of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="these tests run in this process"
)
def test_under_the_interpreter() -> None:
    if not all(importlib.util.find_spec(library) for library in ("triton", "fla")):
        pytest.skip("needs Triton and flash-linear-attention: pip install '.[gpu,baselines]'")
    environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    files = [str(HERE / name) for name in ("test_models.py", "test_layers.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-p", "no:xdist", *files],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    print(done.stdout[-6000:], done.stderr[-2000:])
    assert done.returncode == 0, done.stdout[-3000:]
    assert " skipped" not in done.stdout.splitlines()[-1]
