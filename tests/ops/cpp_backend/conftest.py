"""The native kernels' tests are skipped where no C++ compiler exists, and nowhere else."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

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
