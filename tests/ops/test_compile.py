"""``torch.compile(fullgraph=True)`` on every op, and the custom ops' contracts."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_same, boundaries, flat, key_mask, latte_inputs, macchiato_inputs, randn

from latte.ops import (
    causal_conv1d,
    latte_attention,
    linear_attention,
    macchiato_attention,
    rg_lru,
    sliding_window_attention,
)
from latte.ops.torch_backend.latte import bidirectional_op, causal_op
from latte.ops.torch_backend.recurrence import linear_recurrence
from latte.ops.torch_backend.window import window_op

OPS = {
    "latte": (latte_attention, lambda B: latte_inputs(B, 20), {}),
    "bidirectional": (latte_attention, lambda B: latte_inputs(B, 20), {"causal": False}),
    "macchiato": (macchiato_attention, lambda B: macchiato_inputs(B, 20), {"window": 8}),
    "window": (sliding_window_attention, lambda B: macchiato_inputs(B, 20)[2:], {"window": 8}),
    "full": (sliding_window_attention, lambda B: macchiato_inputs(B, 20)[2:], {"window": None}),
    "linear": (linear_attention, lambda B: latte_inputs(B, 20), {"feature_map": "elu"}),
    "rg_lru": (rg_lru, lambda B: (*(randn(B, 20, 4, seed=s) for s in range(3)), randn(4)), {}),
    "conv": (causal_conv1d, lambda B: (randn(B, 20, 4), randn(4, 3)), {}),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", OPS)
def test_compiles_in_one_graph(name, packed):
    """Forward and backward; ``aot_eager`` traces all of it, and leaves out only the C++ step."""
    torch._dynamo.reset()
    op, make, options = OPS[name]
    stateless = name in ("bidirectional", "full")
    mask = None if name == "full" else key_mask(1 if packed else 2, 20)
    options = options | {
        "key_mask": mask,
        "cu_seqlens": boundaries(20) if packed else None,
        "output_final_state": not stateless,
    }

    def fn(*inputs):
        return op(*inputs, **options)

    inputs = [x.requires_grad_() for x in make(1 if packed else 2)]
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    results = []
    for run in (compiled, fn):
        outputs = flat(run(*inputs))
        total = sum((torch.where(x.isfinite(), x, 0.0) ** 2).sum() for x in outputs)
        grads = torch.autograd.grad(total, inputs, allow_unused=True)
        results.append([x.detach() for x in outputs] + [g for g in grads if g is not None])
    assert_same(*results)


@pytest.mark.parametrize("op", [causal_op, bidirectional_op])
def test_gradients_are_laid_out_as_promised_whatever_comes_in(op):
    q, k, v = latte_inputs(2, 6, 2, 3, 4)
    start = [randn(2, 2, 3).requires_grad_(), randn(2, 2, 3, 4).requires_grad_()]
    _, *state = op(q, k, v, None, None, *start)[:3]
    slopes = randn(3, 2, 2).permute(1, 2, 0), randn(4, 2, 2, 3).permute(1, 2, 3, 0)
    found = torch.autograd.grad(state, start, slopes)
    assert all(x.is_contiguous() for x in found)  # the compiler is told so


@pytest.mark.parametrize(("masked", "packed"), [(False, False), (True, True)])
def test_custom_ops_keep_their_contracts(packed, masked):
    """Schema, fake tensors, autograd registration and dynamic shapes (torch.library.opcheck)."""
    B = 1 if packed else 2
    q, k, v = (x.requires_grad_() for x in latte_inputs(B, 20))
    mask = key_mask(B, 20) if masked else None
    cu = boundaries(20) if packed else None
    checks = {}
    for op in (causal_op, bidirectional_op):
        checks |= torch.library.opcheck(op, (q, k, v, mask, cu, None, None))
    g = (-k.detach().abs()).requires_grad_()
    checks |= torch.library.opcheck(causal_op, (q, k, v, mask, cu, None, None, g))
    local = [x.requires_grad_() for x in macchiato_inputs(B, 20)[2:]]
    args = (*local, mask, cu, *[None] * 8, 8, 0.4, 0.0, True)
    checks |= torch.library.opcheck(window_op, args)
    assert set(checks.values()) == {"SUCCESS"}


def test_the_recurrence_keeps_its_contract():
    a, b, h0 = (randn(*shape).requires_grad_() for shape in ((2, 9, 3), (2, 9, 3), (2, 3)))
    checks = torch.library.opcheck(linear_recurrence, (a, b, h0))
    a, b = (randn(3, 9, 2).transpose(0, 2).requires_grad_() for _ in range(2))  # strides kept
    checks |= torch.library.opcheck(linear_recurrence, (a, b, h0))
    assert set(checks.values()) == {"SUCCESS"}
