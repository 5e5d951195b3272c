"""The RG-LRU's and the convolution's Triton kernels beyond the laws: walks, taps, extreme gates.

Most tests shrink the tiles: three chunks in 37 tokens.

Shapes: B batch, T tokens, E channels, C taps.
"""

from __future__ import annotations

import pytest
import torch

from latte.ops import causal_conv1d, rg_lru
from latte.ops.tensors import Sequences
from latte.ops.triton_backend import recurrence as lru_module
from latte.ops.triton_backend.convolution import convolution_op
from latte.ops.triton_backend.recurrence import beginnings, rg_lru_op
from tests.ops.helpers import F64, assert_same, boundaries, key_mask, randn
from tests.ops.triton_backend.kernel_helpers import DEVICE, kernels

CHUNKS, WALK = 10**9, 1  # from how many programs on one walk each
CASES = [  # masked, packed, carried, reverse
    (False, False, False, False),
    (True, False, True, True),
    (False, True, True, False),
    (True, True, True, True),
    (True, True, False, True),
]


@pytest.mark.parametrize(
    ("masked", "packed", "carried", "reverse", "walks_from"),
    [(*case, CHUNKS) for case in CASES] + [(*case, WALK) for case in CASES if not case[1]],
)
def test_rg_lru_agrees(small_tiles, monkeypatch, masked, packed, carried, reverse, walks_from):
    monkeypatch.setattr(lru_module, "LRU_WALKS_FROM", walks_from)
    bench = kernels("rg_lru-reversed" if reverse else "rg_lru")
    bench.agrees(37, masked=masked, packed=packed, carried=carried)


@pytest.mark.parametrize("T", [1, 16, 65])
def test_rg_lru_lengths(T):
    """With the tiles that a GPU gets."""
    kernels("rg_lru", E=3).agrees(T, B=1, carried=True)


def gates(kind):
    x, r, i, theta = kernels("rg_lru", E=3).inputs(1, 20)
    signs = torch.sign(r)
    if kind == "frozen":  # a rounds to 1, but for what is too small for fp32
        r, theta = r - 50.0, theta - 9.0
    elif kind == "griffin":  # a in [0.9, 0.999] and higher: 1 - a^2 must not cancel
        theta = torch.tensor([-8.99, -6.6, -4.3])
    elif kind == "forgetting":  # a underflows
        r, theta = r + 50.0, theta + 40.0
    else:
        r, i = signs * float(kind), torch.sign(i) * float(kind)
    return [x, r, i, theta]


@pytest.mark.parametrize("kind", ["frozen", "griffin", "forgetting", "50", "1e4"])
def test_extreme_gates(small_tiles, kind):
    got = kernels("rg_lru").judged(gates(kind), output_final_state=True)
    assert all(x.isfinite().all() for x in got)


def test_gates_are_as_exact_as_fp32_holds_them(small_tiles):
    """Relative to each element, not to the largest: sqrt(1 - a^2) and the gates' slopes."""
    x, r, i, theta = gates("griffin")
    r = torch.linspace(-20.0, 20.0, 60).view(1, 20, 3)
    inputs = [torch.ones_like(x), r, -r, theta]
    bench = kernels("rg_lru")
    exact, got = bench.judge().results([x.to(F64) for x in inputs]), bench.results(inputs)
    for a, e in zip(got, exact, strict=True):
        assert ((a.cpu().to(F64) - e).abs() <= 2e-5 * e.abs()).all()


@pytest.mark.parametrize(
    ("T", "C", "case"),
    [(37, 4, case) for case in CASES] + [(2, 4, CASES[1]), (2, 4, CASES[3]), (20, 1, CASES[3])],
)
def test_convolution_agrees(small_tiles, T, C, case):
    *flags, without_bias = case
    for op in ["conv", "conv-plain"][: 1 + without_bias]:
        kernels(op, C=C).agrees(T, *flags)


def test_the_future_cannot_change_the_past_of_a_walk(small_tiles, monkeypatch):
    monkeypatch.setattr(lru_module, "LRU_WALKS_FROM", WALK)
    bench = kernels("rg_lru")
    inputs = bench.inputs(1, 37)
    before, _ = bench.call(inputs)
    for t in (3, 16, 21):
        after, _ = bench.call(bench.filled(inputs, (slice(None), slice(t, None)), 1e4))
        assert torch.equal(before[:, :t], after[:, :t])
        assert not torch.equal(before[:, t:], after[:, t:])


def test_custom_ops_keep_their_contracts(small_tiles):
    cu, mask = boundaries(20).to(DEVICE), key_mask(1, 20).to(DEVICE)
    rows = kernels("rg_lru", E=3), kernels("conv", E=3)
    (x, r, i, theta, h0), convolved = (
        [z.requires_grad_() for z in (*row.inputs(1, 20), row.state(len(cu) - 1))] for row in rows
    )
    starts = beginnings(x, Sequences(mask, cu), h0.detach(), True)
    checks = torch.library.opcheck(rg_lru_op, (x, r, i, theta, h0, mask, cu, *starts, True))
    checks |= torch.library.opcheck(convolution_op, (*convolved, mask, cu))
    assert set(checks.values()) == {"SUCCESS"}


def test_an_empty_state_is_the_one_before_the_sequence(small_tiles):
    """A row of zeros: the sequence starts at its first real token, which a = 0 leaves whole."""
    bench = kernels("rg_lru")
    x, r, i, theta = bench.inputs(2, 9)
    mask = torch.tensor([[False] * 3 + [True] * 6, [False] * 9], device=DEVICE)
    zeros = torch.zeros(2, 5, device=DEVICE)
    out, state = bench.call([x, r, i, theta], zeros, key_mask=mask, output_final_state=True)
    assert_same([out[0, 3]], [(torch.sigmoid(i) * x)[0, 3]], 1e-6)
    assert not out[1].any() and not out[0, :3].any() and not state[1].any()


def test_what_the_kernels_cannot_serve_is_told():
    x = randn(1, 4, 5)
    with pytest.raises(ValueError, match="rg_lru: backend 'triton' is not available for .*float64"):
        rg_lru(x, x, x, x[0, 0], backend="triton")
    with pytest.raises(ValueError, match="conv1d: backend 'triton' is not available for .*float64"):
        causal_conv1d(x, randn(5, 3), backend="triton")
