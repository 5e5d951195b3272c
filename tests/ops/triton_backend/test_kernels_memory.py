"""Memory is neither read nor written beyond what a kernel was given, and all of it is written."""

from __future__ import annotations

import pytest
import torch

from latte.ops.triton_backend import recurrence, segments
from tests.ops.opdb import OPS, leaves, with_leaves
from tests.ops.triton_backend.kernel_helpers import Fences, kernels


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("parts", ["whole", "cut"])
@pytest.mark.parametrize("op", [op for op, row in OPS.items() if "triton" in row.backends])
def test_it_is_fenced(op, parts, packed, monkeypatch, small_tiles):
    """Inputs lie among NaN; and so do buffers, which are NaN too. Recurrences walk, or are cut."""
    bench, T = kernels(op, H=2), 40 if OPS[op].past else 70
    if parts == "cut":
        monkeypatch.setattr(segments, "SHORTEST", 1)
    else:
        monkeypatch.setattr(recurrence, "LRU_WALKS_FROM", 1)
    fences, count = Fences(), len(OPS[op].inputs)
    inputs, state, options = bench.given(T, True, packed, OPS[op].past, B=1)
    fenced = [fences.of(x).requires_grad_() for x in (*inputs, *leaves(state))]
    fences.guard(monkeypatch)
    given = with_leaves(state, fenced[count:])
    out, last = bench.call(fenced[:count], given, **options | {"output_final_state": False})
    grads = torch.autograd.grad(out.sum(), fenced, allow_unused=True)
    present = [g for g in grads if g is not None]
    assert present and not any(x.isnan().any() for x in (out, *present))
    fences.check()
