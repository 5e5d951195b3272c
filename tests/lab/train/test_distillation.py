"""The loss of distillation, and its gradient, against autograd's of the formula."""

import pytest
import torch
import torch.nn.functional as F

from latte.lab.train import distillation
from latte.lab.train.distillation import divergence


def formula(logits, teacher, wanted):
    p, q = F.log_softmax(teacher[wanted].double(), -1), F.log_softmax(logits[wanted].double(), -1)
    return (p.exp() * (p - q)).sum()


@pytest.mark.parametrize("piece", [1, 3 * 11, 2**24], ids=["row by row", "pieces", "at once"])
def test_value_and_gradient(piece, monkeypatch):
    monkeypatch.setattr(distillation, "PIECE", piece)
    torch.manual_seed(0)
    logits, teacher = (4 * torch.randn(7, 11) for _ in range(2))
    wanted = torch.tensor([True, False, True, True, True, True, False])
    logits.requires_grad_()
    expected = formula(logits, teacher, wanted)
    (gradient,) = torch.autograd.grad(0.3 * expected, logits)
    found = divergence(logits, teacher.clone(), wanted)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0.0)
    (own,) = torch.autograd.grad(0.3 * found, logits)
    torch.testing.assert_close(own, gradient, rtol=1e-4, atol=1e-6)
    assert not own[~wanted].any()


def test_autograd_keeps_nothing_but_the_teachers_memory():
    logits = torch.randn(64, 256, dtype=torch.bfloat16).requires_grad_()
    teacher = torch.randn(64, 256, dtype=torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        divergence(logits, teacher, torch.ones(64, dtype=torch.bool))
    assert [x.data_ptr() for x in kept] == [teacher.data_ptr()]
