"""The kernels read bounds of packed sequences as they come: any dtype, any strides."""

from __future__ import annotations

import pytest
import torch
from kernel_helpers import DEVICE
from packed import BOUNDS, all_bounds, packed_ops, run

from latte.ops import attention_weights, linear_attention, window_log_mass

# What no kernel serves: operations of PyTorch, or another backend by itself.
OTHERS = {"delayed macchiato", "sinks", "joint", "full"}
SERVED = [
    name
    for name, (op, _, _) in packed_ops().items()
    if op not in (attention_weights, linear_attention, window_log_mass) and name not in OTHERS
]


@pytest.mark.parametrize("name", SERVED)
def test_bounds_are_read_as_they_come(name):
    with torch.device(DEVICE):
        bounds = all_bounds(BOUNDS)
        expected = run(name, "triton", bounds.pop("int32"))
        for kind, cu in bounds.items():
            for a, b in zip(run(name, "triton", cu), expected, strict=True):
                assert torch.equal(a, b), kind
