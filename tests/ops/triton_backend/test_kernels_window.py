"""The sliding window's kernels against the reference: values, gradients, laws, memory manners."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    F64,
    assert_same,
    boundaries,
    key_mask,
    macchiato_inputs,
    relative_error,
    values_and_gradients,
    window_state,
)
from kernel_helpers import DEVICE, Fences, compare_window, judged, same_when_compiled, window

from latte.ops import sliding_window_attention
from latte.ops.triton_backend.window import window_op


def fp32_inputs(*shape, **options):
    return [x.float().to(DEVICE) for x in macchiato_inputs(*shape, **options)[2:]]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_agrees_with_the_reference(causal, masked, packed):
    H = 1 if packed else 2
    compare_window(window, 66, H=H, causal=causal, masked=masked, packed=packed, W=40)


@pytest.mark.parametrize(("T", "W"), [(1, 1), (64, 2), (65, 66), (130, 128)])
def test_lengths_and_windows(T, W):
    compare_window(window, T, W=W, H=1)
    if T < 130:
        compare_window(window, T, W=W, H=1, causal=False)


@pytest.mark.parametrize(("T", "W", "packed"), [(1, 16, False), (70, 100, False), (30, 9, True)])
def test_continues_from_a_state(T, W, packed):
    compare_window(window, T, W=W, masked=True, packed=packed, carried=True)


@pytest.mark.parametrize(
    ("K", "D", "T"), [(1, 1, 10), (64, 5, 10), (130, 70, 40), (5, 512, 10), (256, 16, 10)]
)
def test_widths(K, D, T):
    """Wide keys have chunks of 32 in fp32: two of them once."""
    compare_window(window, T, H=1, K=K, D=D, carried=True)


def test_groups_of_heads_and_batches():
    compare_window(window, 33, B=2, H=6, G=2)


@pytest.mark.parametrize(
    ("softcap", "scale"), [(0.5, 3.0), (30.0, 3.0), (None, -0.7), (None, 0.0), (2.0, -1.0)]
)
def test_soft_cap_and_scale(softcap, scale):
    """The kernels take the largest logit before they scale it: no sign may matter."""
    options = {"scale": scale} | ({} if softcap is None else {"softcap": softcap})
    compare_window(window, 33, **options)


@pytest.mark.parametrize("causal", [True, False])
def test_large_logits(causal):
    """Up to 3e4: one key takes nearly all of the weight."""
    compare_window(window, 66, causal=causal, masked=True, scale=100.0)


@pytest.mark.parametrize("causal", [True, False])
def test_ties_at_large_logits(causal):
    """Equal logits of 15,000 are exact: a log-sum-exp in fp32 would lose the sum's digits."""
    _, _, q, k, v = (x.float() for x in macchiato_inputs(1, 66, 1, 1, 1, 4, 5))
    q, k = torch.full_like(q, 122.5), torch.full_like(k, 61.25)
    judged([q, k, v], window, window=40, causal=causal)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_errs_at_most_twice_the_reference(dtype):
    low = [x.to(DEVICE, dtype) for x in macchiato_inputs(1, 90, 2, 1, 1, 64, 64)[2:]]

    def run(backend, inputs):
        return values_and_gradients(
            lambda *x: window(backend, *x, window=40, output_final_state=False), inputs
        )

    want = run("reference", [x.to(F64) for x in low])
    for a, b, e in zip(run("triton", low), run("reference", low), want, strict=True):
        assert a.dtype == dtype
        assert relative_error(a, e) <= 2 * relative_error(b, e)


@pytest.mark.parametrize("cut", [1, 64])
def test_split_equals_whole(cut):
    inputs = fp32_inputs(1, 70, 2, 1)
    whole, last = window("triton", *inputs)
    first, state = window("triton", *(x[:, :cut] for x in inputs))
    second, state = window(
        "triton", *(x[:, cut:] for x in inputs), *state[:2], tail_mask=state.mask
    )
    assert_same([torch.cat([first, second], 1), *state[:2]], [whole, *last[:2]], 1e-6)


@pytest.mark.parametrize("t", [3, 63, 64, 68])
def test_the_future_cannot_change_the_past(t):
    q, k, v = fp32_inputs(1, 70, 1, 1)
    before, _ = window("triton", q, k, v)
    q[:, t:], k[:, t:], v[:, t:] = -q[:, t:], k[:, t:] + 90.0, v[:, t:] + 7.0
    after, _ = window("triton", q, k, v)
    assert torch.equal(before[:, :t], after[:, :t])
    assert not torch.equal(before[:, t:], after[:, t:])


def test_packed_equals_separate():
    cu = [0, 0, 17, 18, 70]
    inputs = fp32_inputs(1, 70, 1, 1)
    bounds = torch.tensor(cu, dtype=torch.int32, device=DEVICE)
    packed, _ = window("triton", *inputs, cu_seqlens=bounds)
    for a, b in zip(cu, cu[1:], strict=False):
        apart, _ = window("triton", *(x[:, a:b] for x in inputs))
        assert torch.equal(packed[:, a:b], apart)


def test_strided_inputs():
    inputs = fp32_inputs(2, 33, 2, 1)
    want, _ = window("triton", *inputs)
    strided = [x.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0) for x in inputs]
    assert strided[0].stride(-1) != 1
    assert torch.equal(window("triton", *strided)[0], want)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    assert torch.equal(window("triton", *heads_first)[0], want)


@pytest.mark.parametrize("causal", [True, False])
def test_what_sees_nothing_is_zero_and_has_no_gradient(causal):
    q, k, v = (x.requires_grad_() for x in fp32_inputs(1, 40, 1, 1))
    mask = torch.ones(1, 40, dtype=torch.bool, device=DEVICE)
    mask[:, 5:30] = False
    out, _ = window("triton", q, k, v, key_mask=mask, window=8, causal=causal)
    assert not out[:, 12:26].any() and out[:, :5].all()
    dq, dk, dv = torch.autograd.grad((out * torch.randn_like(out)).sum(), (q, k, v))
    assert not dq[:, 12:26].any() and not dk[:, 5:30].any() and not dv[:, 5:30].any()
    assert dq[:, 1:5].any() and dk[:, :5].any() and dv[:, :5].any()


@pytest.mark.parametrize("packed", [False, True])
def test_memory_is_neither_read_nor_written_beyond(packed, monkeypatch):
    fences = Fences()
    inputs = fp32_inputs(1, 70, 2, 1)
    cu = boundaries(70).to(DEVICE) if packed else None
    tail = window_state(1 if cu is None else len(cu) - 1, 15, 1, 6, 5)
    leaves = [fences.of(x.float().to(DEVICE)).requires_grad_() for x in (*inputs, *tail[:2])]
    fences.guard(monkeypatch)
    out, _ = window(
        *("triton", *leaves),
        tail_mask=tail.mask.to(DEVICE),
        key_mask=key_mask(1, 70).to(DEVICE),
        cu_seqlens=cu,
        output_final_state=False,
    )
    grads = torch.autograd.grad(out.sum(), leaves)
    assert not any(torch.isnan(x).any() for x in (out, *grads))
    fences.check()


def test_compiles_in_one_graph():
    mask, cu = key_mask(1, 8).to(DEVICE), torch.tensor([0, 3, 8], device=DEVICE)
    tail = window_state(2, 15, 1, 6, 5)
    inputs = [x.float().to(DEVICE) for x in (*fp32_inputs(1, 8, 2, 1), *tail[:2])]
    options = {"key_mask": mask, "cu_seqlens": cu, "tail_mask": tail.mask.to(DEVICE)}
    same_when_compiled(lambda *x: window("triton", *x, **options), inputs)


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


def test_no_tokens():
    q, k, v = (x[:, :0] for x in fp32_inputs(1, 4, 2, 1))
    out, state = window("triton", q, k, v)
    assert out.shape == (1, 0, 2, 5) and not state.mask.any()
