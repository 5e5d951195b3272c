"""What the backward pass makes again: the same gradients to the last bit, and less that is kept."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.autograd.graph import save_on_cpu

from latte.layers import LatteAttention
from latte.layers.recomputation import recomputed
from latte.layers.recurrent import BlockDiagonalLinear


def gradients(layer, x, **autocast):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, **autocast):
        out, _ = layer(x)
    (out.float() ** 2).sum().backward()
    return [x.grad, *(p.grad.clone() for p in layer.parameters())]


@pytest.mark.parametrize("enabled", [False, True])
def test_gradients_are_the_same_and_gates_are_not_kept(enabled, monkeypatch):
    torch.manual_seed(0)
    layer, x = LatteAttention(24, 4, 8, latent_input="rglru"), torch.randn(2, 37, 24)
    kept = []

    def watched(forward):
        def run(module, x):
            y = forward(module, x)
            kept.append(weakref.ref(y))
            return y

        return run

    with monkeypatch.context() as patch:
        patch.setattr(BlockDiagonalLinear, "forward", watched(BlockDiagonalLinear.forward))
        out, _ = layer(x)
        assert len(kept) == 2 and all(ref() is None for ref in kept)
        out.sum().backward()
        assert len(kept) == 4  # both once more
    found = gradients(layer, x, enabled=enabled)
    with save_on_cpu():  # somebody else decides what is saved
        expected = gradients(layer, x, enabled=enabled)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_hooks_see_every_module_once():
    torch.manual_seed(0)
    layer, seen = LatteAttention(24, 4, 8, latent_input="rglru"), []
    source = layer.latents.input
    for module in (source.rglru.input_gate, source.norm):
        module.register_forward_hook(lambda *_: seen.append(1) and None)
    layer(torch.randn(1, 9, 24))[0].sum().backward()
    assert len(seen) == 2


def test_only_what_is_named_is_made_again_and_others_hooks_go_first():
    x, made, seen = torch.randn(3, requires_grad=True), [], []

    def double():
        made.append(torch.is_grad_enabled())
        return 2 * x

    def run():
        y = double()
        with recomputed((y, double)):
            z = y.exp() * y.view(3, 1).sin().view(3) * y.tanh().cos()
        return torch.autograd.grad(z.sum(), x)[0]

    expected = run()
    assert made == [True, False]  # sin alone has saved it, as a view
    with torch.autograd.graph.saved_tensors_hooks(lambda y: seen.append(y) or y, lambda y: y):
        assert torch.equal(run(), expected)
    assert len(made) == 3 and seen
