"""The native kernels' tests are skipped where no C++ compiler exists, and nowhere else."""

import os
import subprocess
import sys

import pytest
import torch

from latte.ops.cpp_backend import ABSENT
from latte.ops.cpp_backend.build import BuildError, find_compiler, native_mode


@pytest.fixture(autouse=True)
def native_kernels(request):
    """The library, or a skip with the reason why it cannot be built."""
    if ABSENT is None or "absent" in request.keywords:
        return
    if native_mode() == "skip":
        pytest.skip(ABSENT)
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(f"no native CPU kernels: {error}")
    pytest.fail(ABSENT)


@pytest.fixture
def with_instructions(tmp_path):
    """Runs Python code in a process of its own that is limited to an instruction set.

    Called with the set (ATEN_CPU_CAPABILITY) and the code, which saves its result by torch.save to
    sys.argv[1]; returns the result.
    """

    def run(instructions, code):
        result = tmp_path / "result.pt"
        environment = os.environ | {"ATEN_CPU_CAPABILITY": instructions}
        environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", code, str(result)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return torch.load(result)

    return run
