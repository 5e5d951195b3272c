"""Gates that train scores end to end: their sum, their gradient, and what they become."""

import pytest
import torch
from torch import nn

from experiments.kept.attention import kept_attention
from experiments.kept.gates import gated_attention, log_gates, train_gates
from latte.conversion.kept_rows import AskedRow
from latte.layers.kept_scores import KeptScores
from tests.conversion.bases import tokens
from tests.experiments.kept.test_kept import BLOCK, LENGTH, layers_of, model

__all__ = ["model"]


@pytest.mark.parametrize("tau", [1.0, 0.1])
def test_gates_sum_to_the_count_and_so_do_their_changes(tau):
    r = torch.randn(2, 30, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    gates = log_gates(r, 7, tau).exp()
    torch.testing.assert_close(gates.sum(1), torch.full((2,), 7.0).double())
    (change,) = torch.autograd.grad(gates.sum(), r)
    torch.testing.assert_close(change, torch.zeros_like(r))
    torch.autograd.gradcheck(lambda r: log_gates(r, 7, tau), r)
    assert not log_gates(r[:, :7], 7, tau).any()


def test_sharp_gates_are_the_choice_of_the_largest(model):
    layer, _, near, _ = layers_of(model, tokens(LENGTH, 1))[0]
    # A score a source, so that no two are equal.
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(1)).float()
    score = torch.stack([order, order.flip(0)])[: near.k.shape[2]]
    sharp = gated_attention(layer, near, score, 5, BLOCK, 1e-3)
    torch.testing.assert_close(sharp, kept_attention(layer, near, score, 5, BLOCK))


def test_training_lowers_the_divergence(model, capsys):
    layer = model.model.layers[0].self_attn
    groups = layer.k_proj.out_features // layer.head_dim
    rows = [AskedRow(tokens(LENGTH, 1)[0], LENGTH - 6)]
    each = {
        str(i): KeptScores(model.config.hidden_size, groups) for i in range(len(model.model.layers))
    }
    options = type("Options", (), {"kept": [4], "block": BLOCK, "steps": 30, "seed": 0})
    options.learning_rate, options.window = 3e-2, layer.window
    before = {name: x.clone() for name, x in model.state_dict().items()}
    train_gates(model, rows, nn.ModuleDict(each), options)
    losses = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 30
    assert losses[-1] < losses[0]
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(each[name].down.weight.any() for name in each)
