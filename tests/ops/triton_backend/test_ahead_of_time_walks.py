"""Every configuration of the walks compiles for sm_90, within its stack and its shared memory."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from ahead_of_time import SHARED_LIMIT  # noqa: E402
from ahead_of_time_walks import REACHED, WALKS, compiled_walk  # noqa: E402

from latte.ops.triton_backend.segments import PRODUCT, TABLES, walking  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)
COMMON = [(torch.bfloat16, 32, 64), (torch.float32, 16, 64)]
RARE = [(x, *sizes) for x in PRODUCT for sizes in REACHED if (x, *sizes) not in COMMON]


# By dtype and latents up to: bytes of stack per thread that are let pass, most of them for rows
# beyond reach. Both of Triton's supported versions stay below.
MOST = {
    torch.bfloat16: {32: 320, 128: 416, 256: 832},
    torch.float16: {64: 128, 128: 704, 256: 1408},
    torch.float32: {64: 576, 128: 1280, 256: 2816},
}
MOST_UNEVEN = 1408


def most_spilled(name: str, dtype: torch.dtype, L: int, uneven: bool) -> int:
    if name == "segment_sums":
        return 160 if uneven else 0
    if uneven:
        return MOST_UNEVEN
    return next(most for latents, most in MOST[dtype].items() if L <= latents)


def check(dtype, L, D, uneven=False, **options):
    for name in WALKS:
        r = compiled_walk(name, L, D, dtype, uneven=uneven, **options)
        most = most_spilled(name, dtype, L, uneven)
        assert r.spilled <= most, f"{name}: {r.spilled} bytes of stack"
        assert r.shared <= SHARED_LIMIT, f"{name}: {r.shared} bytes of shared memory"


@pytest.mark.parametrize(("dtype", "L", "D"), COMMON)
@pytest.mark.parametrize("cut", [False, True])
def test_common_walks(dtype, L, D, cut):
    check(dtype, L, D, cut=cut)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "L", "D"), RARE)
@pytest.mark.parametrize("cut", [False, True])
def test_rare_walks(dtype, L, D, cut):
    check(dtype, L, D, cut=cut)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "L", "D"), COMMON + RARE)
def test_walks_without_mask_packing_and_state(dtype, L, D):
    check(dtype, L, D, plain=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", PRODUCT)
def test_walks_of_uneven_sizes(dtype):
    check(dtype, 32, 64, uneven=True)


def test_sizes_of_one():
    """Triton turns arguments that are 1 into constants, which know fewer operations."""
    check(torch.bfloat16, 1, 1, ones=True)


def test_these_are_all_configurations():
    """Seven at most for each dtype, whatever the length."""
    for dtype in PRODUCT:
        reached = {walking(L, D, dtype) for L, D in REACHED}
        assert reached == {walking(L, D, dtype) for L in range(1, 257) for D in range(1, 513)}
        assert len(reached) <= 7
    assert all(set(table) == set(TABLES[torch.float32]) for table in TABLES.values())
