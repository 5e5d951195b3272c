"""Packed sequences: every op and backend reads bounds of any dtype and any strides alike."""

from __future__ import annotations

import inspect

import pytest
import torch
from packed import BOUNDS, all_bounds, packed_ops, run

import latte.ops
from latte.ops import cpp_backend
from latte.ops.tensors import sequence_bounds


def test_every_op_that_packs_is_here():
    ops = {getattr(latte.ops, name) for name in latte.ops.__all__}
    packing = {
        op
        for op in ops
        if inspect.isfunction(op) and "cu_seqlens" in inspect.signature(op).parameters
    }
    assert packing == {op for op, _, _ in packed_ops().values()}


@pytest.mark.parametrize("backend", ["reference", "torch", "cpu"])
@pytest.mark.parametrize("name", packed_ops())
def test_bounds_are_read_as_they_come(name, backend):
    only = {"bidirectional latte", "bidirectional macchiato", "full", "linear"}
    if backend == "cpu" and (name in only or cpp_backend.ABSENT is not None):
        pytest.skip("no native kernel")
    bounds = all_bounds(BOUNDS)
    expected = run(name, backend, bounds.pop("int32"))
    for kind, cu in bounds.items():
        for a, b in zip(run(name, backend, cu), expected, strict=True):
            assert torch.equal(a, b), kind


def test_one_function_makes_them():
    for cu in all_bounds(BOUNDS).values():
        bounds = sequence_bounds(cu)
        assert bounds.tolist() == BOUNDS
        assert bounds.dtype == torch.int64 and bounds.is_contiguous()
