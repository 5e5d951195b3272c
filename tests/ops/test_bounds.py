"""Bounds of packed sequences, of any dtype and any strides."""

from __future__ import annotations

import torch

from latte.ops.tensors import sequence_bounds


def test_one_function_makes_them():
    whole = torch.tensor([0, 0, 3, 4, 11, 20])
    table = torch.stack([whole, torch.full_like(whole, 7)], 1)
    for cu in (whole.int(), whole, table[:, 0]):
        bounds = sequence_bounds(cu)
        assert bounds.tolist() == whole.tolist()
        assert bounds.dtype == torch.int64 and bounds.is_contiguous()
