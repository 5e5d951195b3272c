"""Every configuration compiles for sm_90, within its registers and its shared memory.

Nothing runs here: neither a GPU nor a driver is needed.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from ahead_of_time import BACKWARD, FORWARD, SCANS, SHARED_LIMIT, compiled  # noqa: E402

from latte.ops.triton_backend.launch import HALF, PRODUCTS, SINGLE, configuration  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)
COMMON = [(torch.bfloat16, 32), (torch.float32, 16)]
RARE = [(dtype, L) for dtype in PRODUCTS for L in HALF if (dtype, L) not in COMMON]


def most_spilled(dtype: torch.dtype, L: int) -> int:
    """Bytes of stack per thread that are let pass: most kernels need none."""
    if dtype != torch.float32:
        return 0 if L <= 64 else 96
    return 32 if L <= 32 else 256 if L <= 128 else 640


def check(names, dtype, L, **options):
    for name in names:
        r = compiled(name, L, dtype, **options)
        assert r.spilled <= most_spilled(dtype, L), f"{name}: {r.spilled} bytes of stack"
        assert r.shared <= SHARED_LIMIT, f"{name}: {r.shared} bytes of shared memory"


@pytest.mark.parametrize(("dtype", "L"), COMMON)
def test_common_configurations(dtype, L):
    check(FORWARD + BACKWARD, dtype, L)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "L"), RARE)
def test_rare_configurations(dtype, L):
    check(FORWARD + BACKWARD, dtype, L)


@pytest.mark.parametrize("plain", [False, True])
def test_scans(plain):
    check(SCANS, torch.float32, 16, plain=plain)


def test_sizes_of_one():
    """Triton turns arguments that are 1 into constants, which know fewer operations."""
    check(FORWARD + BACKWARD + SCANS, torch.bfloat16, 1, plain=True, ones=True)


def test_ten_configurations_whatever_the_length():
    chosen = {configuration(L, dtype) for L in range(1, 257) for dtype in PRODUCTS}
    assert len(chosen) == len(PRODUCTS) * len(HALF) and set(HALF) == set(SINGLE)
    assert all(c.C & (c.C - 1) == 0 and c.BL >= 16 for c in chosen)
