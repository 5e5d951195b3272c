"""The format of 8-bit rows: what it holds, what it rounds, and its corners."""

from __future__ import annotations

import pytest
import torch

from latte.ops.mxint8 import pack, packed_width, rounded, unpack
from tests.ops.helpers import randn

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64]
)


@DTYPES
@pytest.mark.parametrize("width", [1, 16, 31, 32, 33, 64, 80])
def test_packing_again_changes_nothing(dtype, width):
    x = (randn(5, 3, width) * randn(5, 3, 1, seed=1).mul(3).exp()).to(dtype)
    rows = pack(x)
    assert rows.dtype == torch.uint8 and rows.shape == (5, 3, packed_width(width))
    near = unpack(rows, dtype)
    assert near.dtype == dtype and torch.equal(pack(near), rows)
    # Each number is one of bf16.
    assert torch.equal(unpack(rows, torch.bfloat16).double(), unpack(rows, torch.float64))


def test_numbers_are_the_nearest_of_127_steps():
    """Against the definition: 2^(e - 6) for the exponent e of the largest of 32 numbers."""
    x = randn(7, 64) * 5
    for row, near in zip(x, unpack(pack(x), torch.float64), strict=True):
        for block, found in zip(row.split(32), near.split(32), strict=True):
            step = 2.0 ** (block.abs().max().log2().floor() - 6)
            assert torch.equal(found, (block / step).round().clamp(-127, 127) * step)


def test_corners():
    inf, nan = torch.inf, torch.nan
    for bad in (inf, -inf, nan):
        x = torch.ones(2, 64)
        x[0, 3] = bad
        near = unpack(pack(x), torch.float32)
        assert near[0, :32].isnan().all() and torch.equal(near[0, 32:], x[0, 32:])
        assert torch.equal(near[1], x[1])
    zeros = torch.zeros(2, 40)
    assert torch.equal(unpack(pack(zeros), torch.float32), zeros)
    assert not pack(zeros).any()  # an empty slot
    largest = torch.tensor([torch.finfo(torch.float16).max])
    assert unpack(pack(largest), torch.float16).isfinite()
    assert pack(torch.zeros(0, 64)).shape == (0, 66)
    small = torch.tensor([2.0**-119 * 1.5, 2.0**-125, 2.0**-140])
    assert torch.equal(unpack(pack(small), torch.float32), torch.tensor([small[0], small[1], 0.0]))


@DTYPES
def test_the_gradient_is_that_of_the_number(dtype):
    x, weight = randn(4, 40).to(dtype).requires_grad_(), randn(4, 40, seed=1).to(dtype)
    near = rounded(x)
    assert torch.equal(near, unpack(pack(x), dtype))
    (near * weight).sum().backward()
    assert torch.equal(x.grad, weight)
