"""The sliding window's kernels beyond the laws: lengths, widths, windows, scales and ties."""

from __future__ import annotations

import pytest
import torch

from latte.ops import sliding_window_attention
from latte.ops.triton_backend.window import window_op
from tests.ops.helpers import key_mask, macchiato_inputs
from tests.ops.triton_backend.kernel_helpers import DEVICE, kernels


def fp32_inputs(*shape, **options):
    return [x.float().to(DEVICE) for x in macchiato_inputs(*shape, **options)[2:]]


@pytest.mark.parametrize(("T", "W"), [(1, 1), (64, 2), (65, 66), (130, 128)])
def test_lengths_and_windows(T, W):
    kernels("window", W=W).agrees(T, B=1)
    if T < 130:
        kernels("window-bidirectional", W=W).agrees(T, B=1)


@pytest.mark.parametrize(("T", "W", "packed"), [(1, 16, False), (70, 100, False), (30, 9, True)])
def test_continues_from_a_state(T, W, packed):
    kernels("window", H=2, W=W).agrees(T, B=1, masked=True, packed=packed, carried=True)


@pytest.mark.parametrize(
    ("K", "D", "T"), [(1, 1, 10), (64, 5, 10), (130, 70, 40), (5, 512, 10), (256, 16, 10)]
)
def test_widths(K, D, T):
    """Wide keys have chunks of 32 in fp32: two of them once."""
    kernels("window", K=K, D=D).agrees(T, B=1, carried=True)


def test_groups_of_heads_and_batches():
    kernels("window", H=6, G=2).agrees(33)


@pytest.mark.parametrize(
    ("softcap", "scale"), [(0.5, 3.0), (30.0, 3.0), (None, -0.7), (None, 0.0), (2.0, -1.0)]
)
def test_soft_cap_and_scale(softcap, scale):
    """The kernels take the largest logit before they scale it: no sign may matter."""
    bench = kernels("window", H=2)
    bench.judged(bench.inputs(1, 33), scale=scale, softcap=softcap)


@pytest.mark.parametrize("causal", [True, False])
def test_large_logits(causal):
    """Up to 3e4: one key takes nearly all of the weight."""
    bench = kernels("window" if causal else "window-bidirectional", H=2)
    bench.agrees(66, B=1, masked=True, scale=100.0)


@pytest.mark.parametrize("causal", [True, False])
def test_ties_at_large_logits(causal):
    """Equal logits of 15,000 are exact: a log-sum-exp in fp32 would lose the sum's digits."""
    bench = kernels("window" if causal else "window-bidirectional", K=4, W=40)
    q, k, v = bench.inputs(1, 66)
    bench.judged([torch.full_like(q, 122.5), torch.full_like(k, 61.25), v])


@pytest.mark.parametrize("causal", [True, False])
def test_what_sees_nothing_is_zero_and_has_no_gradient(causal):
    q, k, v = (x.requires_grad_() for x in fp32_inputs(1, 40, 1, 1))
    mask = torch.ones(1, 40, dtype=torch.bool, device=DEVICE)
    mask[:, 5:30] = False
    bench = kernels("window" if causal else "window-bidirectional", W=8)
    out, _ = bench.call([q, k, v], key_mask=mask)
    assert not out[:, 12:26].any() and out[:, :5].all()
    dq, dk, dv = torch.autograd.grad((out * torch.randn_like(out)).sum(), (q, k, v))
    assert not dq[:, 12:26].any() and not dk[:, 5:30].any() and not dv[:, 5:30].any()
    assert dq[:, 1:5].any() and dk[:, :5].any() and dv[:, :5].any()


def test_custom_op_keeps_its_contract():
    inputs = [x.requires_grad_() for x in fp32_inputs(1, 5, 1, 1)]
    options = (key_mask(1, 5).to(DEVICE), *[None] * 9, 16, 0.4, 0.0, True)
    checks = torch.library.opcheck(window_op, (*inputs, *options))
    assert set(checks.values()) == {"SUCCESS"}


def test_what_the_kernels_cannot_serve_is_told():
    q, k, v = fp32_inputs(1, 4, 1, 1)

    def refused(message, *inputs, window=4):
        with pytest.raises(ValueError, match=message):
            sliding_window_attention(*inputs, window=window, backend="triton")

    refused("not available for window=None", q, k, v, window=None)
    refused("'triton' is not available for torch.float64", *(x.double() for x in (q, k, v)))
    wide = torch.zeros(1, 4, 1, 257, device=DEVICE)
    refused("not available for K=257: expected K from 1 to 256", wide, wide, v)
