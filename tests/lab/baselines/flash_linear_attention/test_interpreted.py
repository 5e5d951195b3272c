"""Run the tests of this folder under Triton's interpreter, in a process of their own."""

import importlib.util
import os
from pathlib import Path

import pytest

from tests.helpers import python

HERE = Path(__file__).parent


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="these tests run in this process"
)
def test_under_the_interpreter():
    if not all(importlib.util.find_spec(library) for library in ("triton", "fla")):
        pytest.skip("needs Triton and flash-linear-attention: pip install '.[gpu,baselines]'")
    files = [HERE / name for name in ("test_models.py", "test_layers.py")]
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = python("-m", "pytest", *options, *files, timeout=None, **environment)
    assert " skipped" not in done.stdout.splitlines()[-1]
