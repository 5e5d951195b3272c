"""Walks over segments: however sequences are cut, the kernels compute the same function."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from helpers import assert_same, latte_inputs, values_and_gradients
from kernel_helpers import DEVICE, call, compare, judged
from test_kernels import extreme

from latte.ops.triton_backend import segments
from latte.ops.triton_backend.latte import causal_op
from latte.ops.triton_backend.segments import segment_length
from latte.ops.triton_backend.walk_tiles import counted


@pytest.fixture(params=[1, 2], ids=["a chunk each", "two chunks each"])
def cut(request, monkeypatch):
    """Segments of one or two chunks, which else are cut from long sequences alone."""
    monkeypatch.setattr(segments, "SHORTEST", request.param)
    return request.param


@pytest.mark.parametrize(
    ("masked", "packed", "carried"), [(False, False, True), (True, True, True)]
)
def test_segments_agree_with_the_reference(cut, masked, packed, carried):
    compare(150, masked=masked, packed=packed, carried=carried)


@pytest.mark.parametrize("kind", ["jump", "creeping", "dominant"])
def test_extreme_logits_across_segments(kind, monkeypatch):
    monkeypatch.setattr(segments, "SHORTEST", 1)
    got = judged(extreme(kind, 135, 1, 3))
    assert all(torch.isfinite(x).all() for x in got)


@pytest.mark.parametrize("latents", [3, 130])
def test_the_cut_does_not_matter(latents, monkeypatch):
    inputs = [x.float().to(DEVICE) for x in latte_inputs(1, 200, 1, latents, 5, scale=2.0)]
    results = []
    for shortest in (4, 2, 1):
        monkeypatch.setattr(segments, "SHORTEST", shortest)
        results.append(values_and_gradients(lambda *x: call("triton", *x), inputs))
    for other in results[1:]:
        assert_same(other, results[0], 2e-6)


@pytest.mark.parametrize("change", [1.0, 1e4])
@pytest.mark.parametrize("t", [100, 128])
def test_the_future_cannot_change_the_past_across_segments(t, change, cut):
    q, k, v = (x.float().to(DEVICE) for x in latte_inputs(1, 150, 1, 3, 5, scale=2.0))
    before, _ = call("triton", q, k, v)
    k[:, t:] += change
    v[:, t:] += 7.0
    after, _ = call("triton", q, k, v)
    assert torch.equal(before[:, :t], after[:, :t])
    assert not torch.equal(before[:, t:], after[:, t:])


@pytest.mark.parametrize("shortest", [4, 1], ids=["whole", "cut"])
def test_gradients_of_outputs_that_nothing_has_reached(shortest, monkeypatch):
    """Masked tokens come first. Their outputs are 0 whatever follows, so nobody feels them."""
    monkeypatch.setattr(segments, "SHORTEST", shortest)
    inputs = [x.float().to(DEVICE).requires_grad_() for x in latte_inputs(1, 200, 1, 3, 5)]
    mask = (torch.arange(200, device=DEVICE) >= 150)[None]
    out, _ = call("triton", *inputs, key_mask=mask)
    ones = torch.ones_like(out)
    want = torch.autograd.grad(out, inputs, ones, retain_graph=True)
    ones[:, :150] = 1e12
    got = torch.autograd.grad(out, inputs, ones)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_nothing_is_saved_between_chunks(monkeypatch):
    """One segment: the inputs and the final mean alone. Several: one state for each."""
    inputs = [x.float().to(DEVICE) for x in latte_inputs(1, 60, 1, 3, 5)]
    between = causal_op(*inputs, None, None, None, None)[3:]
    assert all(x.numel() == 0 for x in between)
    monkeypatch.setattr(segments, "SHORTEST", 2)
    between = causal_op(*inputs, None, None, None, None)[3:]
    assert [x.shape[0] for x in between] == [2, 2, 2, 1, 1]


@pytest.mark.parametrize(
    ("B", "T", "heads", "packed", "count"),
    [
        (32, 2048, 8, False, 1),  # B x H programs are enough
        (64, 1 << 20, 4, False, 1),
        (1, 65536, 8, False, 64),  # 66 wanted, of whole chunks
        (1, 65536, 8, True, 64),
        (16, 4096, 8, False, 5),
        (1, 256, 8, False, 1),  # too short to be worth a pass
        (1, 512, 8, False, 2),
        (1, 0, 8, False, 1),
    ],
)
def test_segments_fill_the_gpu(B, T, heads, packed, count):
    length = segment_length(B, T, heads, 64, packed)
    assert length % 64 == 0 and max(1, -(-T // length)) == count


@triton.jit
def prefix_sums(x_ptr, out_ptr, C: tl.constexpr, BL: tl.constexpr):
    rows = tl.arange(0, C)
    at = rows[:, None] * BL + tl.arange(0, BL)[None, :]
    past = (rows[:, None] >= rows[None, :]).to(tl.float32)
    tl.store(out_ptr + at, counted(past, tl.load(x_ptr + at), "tf32x3"))


def test_counting_in_two_products_loses_nothing():
    """Beside a factor of zeros and ones, two parts of ten bits hold fp32's sums."""
    x = torch.rand(16, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    out = torch.empty_like(x)
    prefix_sums[(1,)](x, out, 16, 32)
    torch.testing.assert_close(out.double(), x.double().cumsum(0), rtol=2e-6, atol=0.0)
