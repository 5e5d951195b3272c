"""Attention in bf16: with pairs of bf16 numbers it errs at most twice what the reference does."""

import pytest
import torch

from latte.ops import macchiato_attention

F64 = torch.float64
LATENTS, WINDOW = 8, 24


def outputs_and_gradients(inputs, dy, dtype, backend, **options):
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    y = macchiato_attention(*leaves, window=WINDOW, backend=backend, **options)[0]
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(dtype))]


@pytest.mark.parametrize("width", [1, 17, 64])  # pairs of an odd width have one number
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"joint": True, "delay": True}])
def test_errors(width, options):
    torch.manual_seed(width)
    tokens, heads = 150, 2
    sizes = (LATENTS + 1, LATENTS, width, width, width)
    inputs = [torch.randn(2, tokens, heads, n).bfloat16() for n in sizes]
    dy = torch.randn(2, tokens, heads, width).bfloat16()
    exact = outputs_and_gradients(inputs, dy, F64, "reference", **options)
    low = outputs_and_gradients(inputs, dy, torch.bfloat16, "reference", **options)
    found = outputs_and_gradients(inputs, dy, torch.bfloat16, "cpu", **options)
    for name, a, b, c in zip("y lq lk q k v".split(), exact, low, found, strict=True):
        error, allowed = (((x.to(F64) - a).norm() / a.norm()).item() for x in (c, b))
        assert error <= 2 * allowed, name
