"""The kernel of a decoding step compiles for sm_90, from its smallest tiles to its largest.

Nothing runs here: neither a GPU nor a driver is needed.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from ahead_of_time import SHARED_LIMIT  # noqa: E402
from ahead_of_time_step import DTYPES, SHAPES, compiled  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)


def check(shape, dtype, **options):
    r = compiled(*shape, dtype, **options)
    assert r.spilled == 0, f"{r.spilled} bytes of stack"
    assert r.shared <= SHARED_LIMIT, f"{r.shared} bytes of shared memory"


@pytest.mark.parametrize("window", [True, False])
def test_common_shapes(window):
    check((32, 96, 96), torch.bfloat16, window=window)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [True, False])
def test_all_shapes(shape, dtype, window):
    check(shape, dtype, window=window)


@pytest.mark.parametrize("window", [True, False])
def test_sizes_of_one_without_mask(window):
    check((1, 1, 1), torch.float32, window=window, plain=True)
