"""The RG-LRU's and the convolution's kernels compile for sm_90, within their registers.

Nothing runs here: neither a GPU nor a driver is needed.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from ahead_of_time import SHARED_LIMIT  # noqa: E402
from ahead_of_time_recurrence import CONVOLUTION, DTYPES, LRU, compiled  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)


def check(names, dtype, **options):
    for name in names:
        r = compiled(name, dtype, **options)
        assert r.spilled == 0, f"{name}: {r.spilled} bytes of stack"
        assert r.shared <= SHARED_LIMIT, f"{name}: {r.shared} bytes of shared memory"


def test_half_precision():
    check((*LRU, *CONVOLUTION), torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_other_dtypes(dtype):
    check((*LRU, *CONVOLUTION), dtype)


@pytest.mark.slow
def test_against_time():
    check(LRU, torch.bfloat16, down=True)


def test_without_mask_packing_and_state():
    check(("walk", "walk_back", "carry", *CONVOLUTION), torch.float32, plain=True)


def test_sizes_of_one():
    """As in decoding: one token."""
    check(("walk", "convolve", "final_tail"), torch.bfloat16, plain=True, ones=True)


@pytest.mark.slow
@pytest.mark.parametrize("plain", [False, True])
def test_sizes_of_one_elsewhere(plain):
    check((*LRU, *CONVOLUTION), torch.float32, plain=plain, ones=True, down=True)


@pytest.mark.slow
@pytest.mark.parametrize("taps", [1, 2, 3, 9])
def test_any_number_of_taps(taps):
    check(("convolve", "gradients"), torch.bfloat16, taps=taps)
