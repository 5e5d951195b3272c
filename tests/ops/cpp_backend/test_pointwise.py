"""SwiGLU, RMSNorm and the rotation in training: the native kernels beside PyTorch's operations."""

from __future__ import annotations

import torch
from torch import nn

from latte.layers import RMSNorm, RotaryEmbedding, SwiGLU
from latte.layers.parts import apply_rotary
from tests.ops.helpers import randn


class Rotated(nn.Module):
    """Heads turned, all of them by their own rows' angles."""

    def __init__(self, width):
        super().__init__()
        self.rotary = RotaryEmbedding(width, 100.0)

    def forward(self, x):
        heads = x.view(*x.shape[:2], 3, -1)
        positions = torch.arange(x.shape[1])[None] + torch.tensor([[0], [4]])
        return apply_rotary(heads, self.rotary(positions, x.dtype)).view(x.shape)


def layers(width):
    norm = RMSNorm(3 * width, eps=1e-3)
    nn.init.normal_(norm.weight)
    return SwiGLU(3 * width, 5 * width - 1), norm, Rotated(width)


def gradients(layer, x):
    x = x.clone().requires_grad_()
    out = layer(x)
    return [out, *torch.autograd.grad(out, [x, *layer.parameters()], x.detach().sin())]


def test_threads_strides_and_other_rows_change_nothing():
    x, before = randn(2, 300, 66).float(), torch.get_num_threads()
    turned = x.mT.contiguous().mT
    for layer in layers(22):
        try:
            results = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results.append(gradients(layer, x))
        finally:
            torch.set_num_threads(before)
        if not isinstance(layer, Rotated):
            results.append(gradients(layer, turned))
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
        assert torch.equal(layer(x[:, :9]), layer(x)[:, :9])


def test_the_product_of_a_swiglu_is_not_kept():
    """Gates and inputs alone live until the backward pass: it makes the product again."""
    layer, x = SwiGLU(8, 32), randn(1, 512, 8).float().requires_grad_()
    with torch.profiler.profile(profile_memory=True) as profile:
        out = layer(x)
    events = profile.profiler.kineto_results.events()
    held = sum(event.nbytes() for event in events if event.name() == "[memory]")
    assert held == 4 * 512 * (2 * 32 + 8)  # gate, up and the output
    out.sum().backward()
