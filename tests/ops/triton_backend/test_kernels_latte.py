"""Latte's Triton kernels beyond the laws: lengths, widths, and sequences cut into segments.

In fp32 a chunk of the walks has 16 tokens, one of the bidirectional form 64.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from latte.ops import latte_attention
from latte.ops.triton_backend import checked, segments
from latte.ops.triton_backend.latte_bidirectional import bidirectional_op
from latte.ops.triton_backend.latte_causal import causal_op
from latte.ops.triton_backend.segments import segment_length
from latte.ops.triton_backend.tiles import counted, factor
from tests.ops.helpers import key_mask, latte_inputs, relative_error
from tests.ops.triton_backend.kernel_helpers import DEVICE, kernels


def latte(causal=True, **sizes):
    return kernels("latte" if causal else "bidirectional", **sizes)


@pytest.mark.parametrize(
    ("causal", "T"),
    [(True, 1), (True, 32), (True, 63), (False, 1), (False, 63), (False, 64), (False, 130)],
)
def test_lengths(causal, T):
    latte(causal, H=1 if T > 64 else 2).agrees(T, B=1, carried=True)


@pytest.mark.parametrize(("L", "D"), [(1, 5), (3, 64), (16, 96), (32, 64), (130, 5), (256, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_odd_widths(causal, L, D):
    latte(causal, L=L, D=D).agrees(65 if L == 3 and not causal else 35, B=1)


@pytest.mark.parametrize("causal", [True, False])
def test_many_tiles(causal):
    latte(causal, D=200).agrees(20, B=1, carried=True)


@pytest.mark.parametrize("scale", [30.0, 1e4])
def test_large_logits(scale):
    latte().agrees(50, masked=True, packed=True, carried=True, scale=scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
def test_states_are_as_exact_as_the_factors_of_their_products(dtype, causal):
    low = latte(causal, L=16, D=64)._replace(dtype=dtype)
    inputs = low.inputs(1, 70, scale=2.0)
    _, state = low.call(inputs, output_final_state=True)
    _, exact = low.judge().call([x.double() for x in inputs], output_final_state=True)
    assert relative_error(state.mean, exact.mean) < torch.finfo(dtype).eps / 4


def fp32_inputs(*shape, **options):
    return [x.float().to(DEVICE) for x in latte_inputs(*shape, **options)]


@pytest.mark.parametrize(("op", "packed"), [(causal_op, True), (bidirectional_op, False)])
def test_custom_ops_keep_their_contracts(op, packed):
    """Schema, fake tensors, autograd registration and dynamic shapes (torch.library.opcheck)."""
    inputs = [x.requires_grad_() for x in fp32_inputs(1, 5, 1, 3, 5)]
    cu = torch.tensor([0, 2, 5], device=DEVICE) if packed else None
    mask = key_mask(1, 5).to(DEVICE)
    checks = torch.library.opcheck(op, (*inputs, mask, cu, None, None))
    assert set(checks.values()) == {"SUCCESS"}


def test_what_the_kernels_cannot_serve_is_told():
    q, k, v = latte_inputs(1, 4, 1, 3, 5)
    with pytest.raises(ValueError, match="'triton' is not available for torch.float64"):
        latte_attention(q, k, v, backend="triton")
    wide = torch.zeros(1, 4, 1, 600)
    with pytest.raises(ValueError, match="not available for L=3, D=600: expected L from 1 to 256"):
        latte_attention(q.float(), k.float(), wide, backend="triton")


@pytest.mark.parametrize("shortest", [4, 1], ids=["whole", "cut"])
def test_gradients_of_outputs_that_nothing_has_reached(shortest, monkeypatch):
    """Masked tokens come first. Their outputs are 0 whatever follows, so nobody feels them."""
    monkeypatch.setattr(segments, "SHORTEST", shortest)
    inputs = [x.float().to(DEVICE).requires_grad_() for x in latte_inputs(1, 60, 1, 3, 5)]
    mask = (torch.arange(60, device=DEVICE) >= 45)[None]
    out, _ = latte().call(inputs, key_mask=mask)
    ones = torch.ones_like(out)
    want = torch.autograd.grad(out, inputs, ones, retain_graph=True)
    ones[:, :45] = 1e12
    got = torch.autograd.grad(out, inputs, ones)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_nothing_is_saved_between_chunks(monkeypatch):
    """One segment: the inputs and the final mean, and two zeros. Several: one state for each."""
    inputs = [x.float().to(DEVICE) for x in latte_inputs(1, 60, 1, 3, 5)]
    between = causal_op(*inputs, None, None, None, None)[3:]
    assert [x.shape[0] for x in between] == [2, 2, 2, 1, 1]
    assert not any(x.any() for x in between)
    monkeypatch.setattr(segments, "SHORTEST", 2)
    between = causal_op(*inputs, None, None, None, None)[3:]
    assert [x.shape[0] for x in between] == [2, 2, 2, 1, 1] and between[1].any()


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


@triton.jit
def rounded_to_tf32(x_ptr, out_ptr, C: tl.constexpr):
    at = tl.arange(0, C)
    tl.store(out_ptr + at, factor(tl.load(x_ptr + at), "tf32_rounded"))


def test_rounding_to_tf32_keeps_nan_of_any_bits():
    """A card writes NaN as 0x7FFFFFFF, which rounding in integers would carry into the sign."""
    numbers = [0.0, 1.0 + 2.0**-11, -1.0 - 2.0**-11, torch.inf, -torch.inf, 0.0, 0.0, 0.0]
    x = torch.tensor(numbers)
    x.view(torch.int32)[5:] = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32)
    x = x.to(DEVICE)
    out = torch.empty_like(x)
    rounded_to_tf32[(1,)](x, out, 8)
    expected = torch.tensor([0.0, 1.0 + 2.0**-10, -1.0 - 2.0**-10, torch.inf, -torch.inf])
    assert torch.equal(out[:5].cpu(), expected) and out[5:].isnan().all()


def test_a_first_call_on_a_gpu_would_pass():
    """The small calls by which a process decides whether the kernels are its default."""
    device = torch.device(DEVICE)
    assert checked.tried_products(device) < 2.0**-7 and checked.tried_sums(device) < 2.0**-20
