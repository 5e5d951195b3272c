"""The RG-LRU's and the convolution's Triton kernels against the reference, and their laws.

Most tests shrink the tiles: three chunks in 37 tokens.

Shapes: B batch, T tokens, E channels, K taps.
"""

from __future__ import annotations

import pytest
import torch
from helpers import F64, assert_same, boundaries, key_mask, randn, values_and_gradients
from kernel_helpers import DEVICE, Fences, judged, same_when_compiled

from latte.ops import causal_conv1d, rg_lru
from latte.ops.tensors import Sequences
from latte.ops.triton_backend import launch
from latte.ops.triton_backend import recurrence as lru_module
from latte.ops.triton_backend.convolution import convolution_op
from latte.ops.triton_backend.recurrence import beginnings, rg_lru_op

CHUNKS, WALK = 10**9, 1  # from how many programs on one walk each
CASES = [  # masked, packed, carried, reverse
    (False, False, False, False),
    (True, False, True, True),
    (False, True, True, False),
    (True, True, True, True),
    (True, True, False, True),
]


@pytest.fixture
def small(monkeypatch):
    """Tiles of 16 tokens and 4 channels."""
    monkeypatch.setattr(lru_module, "LRU_CHUNK", 16)
    for options in (launch.LRU_BY_CHUNK, launch.LRU_WALK, launch.LRU_BACK, launch.LRU_CARRY):
        monkeypatch.setitem(options, "BE", 4)
    monkeypatch.setitem(launch.LRU_CARRY, "U", 2)
    for name, size in {"C": 16, "BE": 4}.items():
        monkeypatch.setitem(launch.CONVOLUTION, name, size)
    monkeypatch.setattr(lru_module, "LRU_WALKS_FROM", CHUNKS)


def lru_inputs(B, T, E, cu=None, carried=False, scale=1.0):
    """x, both gates, theta, and an initial state of which one row is empty."""
    N = B if cu is None else len(cu) - 1
    inputs = [randn(B, T, E), *(randn(B, T, E, seed=s, scale=scale) for s in (1, 2))]
    inputs.append(randn(E, seed=3))
    if carried:
        h0 = randn(N, E, seed=4)
        h0[-1] = 0.0
        inputs.append(h0)
    return [x.float() for x in inputs]


def lru(backend, x, r, i, theta, h0=None, **options):
    options = {"output_final_state": True, "backend": backend, **options}
    return rg_lru(x, r, i, theta, initial_state=h0, **options)


def conv(backend, x, weight, bias=None, tail=None, **options):
    options = {"output_final_state": True, "backend": backend, **options}
    return causal_conv1d(x, weight, bias, initial_state=tail, **options)


def conv_inputs(B, T, E, K, cu=None, carried=False):
    N = B if cu is None else len(cu) - 1
    inputs = [randn(B, T, E), randn(E, K, seed=1), randn(E, seed=2)]
    inputs += [randn(N, K - 1, E, seed=3)] if carried else []
    return [x.float() for x in inputs]


def surroundings(B, T, masked, packed):
    """Batch size, mask and bounds."""
    B = 1 if packed else B
    mask = key_mask(B, T).to(DEVICE) if masked else None
    return B, mask, boundaries(T).to(DEVICE) if packed else None


@pytest.mark.parametrize(
    ("masked", "packed", "carried", "reverse", "walks_from"),
    [(*case, CHUNKS) for case in CASES] + [(*case, WALK) for case in CASES if not case[1]],
)
def test_rg_lru_agrees(small, monkeypatch, masked, packed, carried, reverse, walks_from):
    monkeypatch.setattr(lru_module, "LRU_WALKS_FROM", walks_from)
    B, mask, cu = surroundings(2, 37, masked, packed)
    inputs = lru_inputs(B, 37, 5, cu, carried)
    judged(inputs, lru, key_mask=mask, cu_seqlens=cu, reverse=reverse)


@pytest.mark.parametrize("T", [1, 16, 65])
def test_rg_lru_lengths(T):
    """With the tiles that a GPU gets."""
    judged(lru_inputs(1, T, 3, carried=True), lru)


def gates(kind):
    x, r, i, theta = lru_inputs(1, 20, 3)
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
def test_extreme_gates(small, kind):
    got = judged(gates(kind), lru)
    assert all(torch.isfinite(x).all() for x in got)


def test_gates_are_as_exact_as_fp32_holds_them(small):
    """Relative to each element, not to the largest: sqrt(1 - a^2) and the gates' slopes."""
    x, r, i, theta = gates("griffin")
    r = torch.linspace(-20.0, 20.0, 60).view(1, 20, 3)
    inputs = [torch.ones_like(x), r, -r, theta]
    exact = values_and_gradients(lambda *x: lru("reference", *x)[0], [x.to(F64) for x in inputs])
    inputs = [x.to(DEVICE) for x in inputs]
    got = values_and_gradients(lambda *x: lru("triton", *x)[0], inputs)
    for a, e in zip(got, exact, strict=True):
        assert ((a.cpu().to(F64) - e).abs() <= 2e-5 * e.abs()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["rg_lru", "conv"])
def test_low_precision_errs_at_most_twice_the_reference(small, dtype, op):
    if op == "rg_lru":
        judged([x.to(dtype) for x in lru_inputs(1, 37, 5)], lru)
    else:
        judged([x.to(dtype) for x in conv_inputs(1, 37, 5, 3)], conv)


@pytest.mark.parametrize(
    ("T", "K", "case"),
    [(37, 4, case) for case in CASES] + [(2, 4, CASES[1]), (2, 4, CASES[3]), (20, 1, CASES[3])],
)
def test_convolution_agrees(small, T, K, case):
    masked, packed, carried, without_bias = case
    B, mask, cu = surroundings(2, T, masked, packed)
    inputs = conv_inputs(B, T, 5, K, cu, carried)
    judged(inputs, conv, key_mask=mask, cu_seqlens=cu)
    if without_bias:
        judged(inputs[:2], conv, key_mask=mask, cu_seqlens=cu)


OPS = {"rg_lru": (lru, lru_inputs), "conv": (conv, lambda *a: conv_inputs(*a, 3))}


def on_device(name, *shape):
    op, make = OPS[name]
    return op, [x.to(DEVICE) for x in make(*shape)]


@pytest.mark.parametrize("cut", [1, 16, 20])
@pytest.mark.parametrize("name", OPS)
def test_split_equals_whole(small, name, cut):
    op, (x, *rest) = on_device(name, 1, 37, 5)

    def parts(s):
        return [z[:, s] if z.ndim == 3 else z for z in (x, *rest)]

    whole, last = op("triton", *parts(slice(None)))
    first, state = op("triton", *parts(slice(None, cut)))
    second, state = op("triton", *parts(slice(cut, None)), state)
    assert_same([torch.cat([first, second], 1), state], [whole, last], 1e-6)


@pytest.mark.parametrize("walks_from", [CHUNKS, WALK])
@pytest.mark.parametrize("name", OPS)
def test_the_future_cannot_change_the_past(small, monkeypatch, name, walks_from):
    monkeypatch.setattr(lru_module, "LRU_WALKS_FROM", walks_from)
    op, inputs = on_device(name, 1, 37, 5)
    before, _ = op("triton", *inputs)
    for t in (3, 16, 21):
        changed = [x.clone() for x in inputs]
        for x in changed[: 3 if name == "rg_lru" else 1]:
            x[:, t:] = 1e4 - x[:, t:]
        after, _ = op("triton", *changed)
        assert torch.equal(before[:, :t], after[:, :t])
        assert not torch.equal(before[:, t:], after[:, t:])


@pytest.mark.parametrize("name", OPS)
def test_packed_equals_separate(small, name):
    op, (x, *rest) = on_device(name, 1, 37, 5)
    bounds = [0, 0, 17, 18, 37]
    cu = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    packed, state = op("triton", x, *rest, cu_seqlens=cu)
    for n, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False)):
        part = [z[:, a:b] if z.ndim == 3 else z for z in (x, *rest)]
        apart, last = op("triton", *part)
        assert_same([packed[:, a:b], state[n : n + 1]], [apart, last], 0.0)


@pytest.mark.parametrize("name", OPS)
def test_strided_inputs(small, name):
    op, inputs = on_device(name, 2, 21, 5)
    wanted = op("triton", *inputs)
    strided = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in inputs]
    assert strided[0].stride(-1) != 1
    assert_same([*op("triton", *strided)], [*wanted], 0.0)
    one = [x[:, :, :1].expand_as(x) if x.ndim == 3 else x for x in inputs]
    assert_same([*op("triton", *one)], [*op("triton", *(x.contiguous() for x in one))], 0.0)


@pytest.mark.parametrize("walks_from", [CHUNKS, WALK])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", OPS)
def test_memory_is_neither_read_nor_written_beyond(small, monkeypatch, name, packed, walks_from):
    monkeypatch.setattr(lru_module, "LRU_WALKS_FROM", walks_from)
    fences = Fences()
    fences.guard(monkeypatch)
    B, mask, cu = surroundings(2, 21, True, packed)
    if name == "rg_lru":
        inputs = lru_inputs(B, 21, 5, cu, carried=True)
    else:
        inputs = conv_inputs(B, 21, 5, 3, cu, carried=True)
    leaves = [fences.of(x.to(DEVICE)).requires_grad_() for x in inputs]
    outputs = OPS[name][0]("triton", *leaves, key_mask=mask, cu_seqlens=cu)
    grads = torch.autograd.grad(sum(x.sum() for x in outputs), leaves)
    assert not any(torch.isnan(x).any() for x in (*outputs, *grads))
    fences.check()


@pytest.mark.parametrize("name", OPS)
def test_compiles_in_one_graph(small, name):
    op, inputs = on_device(name, 1, 20, 3)
    options = {"key_mask": key_mask(1, 20).to(DEVICE), "cu_seqlens": boundaries(20).to(DEVICE)}
    same_when_compiled(lambda *x: op("triton", *x, **options), inputs)


def test_custom_ops_keep_their_contracts(small):
    cu, mask = boundaries(20).to(DEVICE), key_mask(1, 20).to(DEVICE)
    x, r, i, theta, h0 = (z.requires_grad_() for z in lru_inputs(1, 20, 3, cu, carried=True))
    begins = beginnings(x, Sequences(mask, cu), h0.detach(), True)
    checks = torch.library.opcheck(rg_lru_op, (x, r, i, theta, h0, mask, cu, begins, True))
    tensors = [z.requires_grad_() for z in conv_inputs(1, 20, 3, 3, cu, carried=True)]
    checks |= torch.library.opcheck(convolution_op, (*tensors, mask, cu))
    assert set(checks.values()) == {"SUCCESS"}


def test_an_empty_state_is_the_one_before_the_sequence(small):
    """A row of zeros: the sequence starts at its first real token, which a = 0 leaves whole."""
    _, (x, r, i, theta) = on_device("rg_lru", 2, 9, 5)
    mask = torch.tensor([[False] * 3 + [True] * 6, [False] * 9], device=DEVICE)
    zeros = torch.zeros(2, 5, device=DEVICE)
    out, state = lru("triton", x, r, i, theta, zeros, key_mask=mask)
    assert_same([out[0, 3]], [(torch.sigmoid(i) * x)[0, 3]], 1e-6)
    assert not out[1].any() and not out[0, :3].any() and not state[1].any()


def test_a_masked_token_may_hold_anything(small):
    for name in OPS:
        op, inputs = on_device(name, 1, 20, 5)
        mask = key_mask(1, 20).to(DEVICE)
        wanted = op("triton", *inputs, key_mask=mask)
        for x in inputs[: 3 if name == "rg_lru" else 1]:
            x[~mask] = torch.nan
        assert_same([*op("triton", *inputs, key_mask=mask)], [*wanted], 0.0)


def test_no_tokens_and_what_the_kernels_cannot_serve():
    for name in OPS:
        op, (x, *rest) = on_device(name, 1, 4, 5)
        rest = [z[:, :0] if z.ndim == 3 else z for z in rest]
        out, state = op("triton", x[:, :0], *rest)
        assert out.shape == (1, 0, 5) and not state.any()
    x = randn(1, 4, 5)
    with pytest.raises(ValueError, match="rg_lru: backend 'triton' is not available for .*float64"):
        rg_lru(x, x, x, x[0, 0], backend="triton")
    with pytest.raises(ValueError, match="conv1d: backend 'triton' is not available for .*float64"):
        causal_conv1d(x, randn(5, 3), backend="triton")
