"""Causal Macchiato over segments: however sequences are cut, the kernels compute one function."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_same, macchiato_inputs, values_and_gradients
from kernel_helpers import DEVICE, Fences, judged
from window_helpers import compare, macchiato

from latte.ops.triton_backend import segments
from latte.ops.triton_backend.macchiato import macchiato_op


@pytest.fixture
def cut(monkeypatch):
    """Segments of one chunk, which else are cut from long sequences alone."""
    monkeypatch.setattr(segments, "SHORTEST", 1)


def fp32_inputs(*shape, **options):
    return [x.float().to(DEVICE) for x in macchiato_inputs(*shape, **options)]


@pytest.mark.parametrize("packed", [False, True])
def test_segments_agree_with_the_reference(cut, packed):
    """With a window that reaches into the segments before, and values shared by two heads."""
    compare(macchiato, 140, W=70, masked=True, packed=packed, carried=True)


def test_extreme_logits_across_segments(cut):
    latent_q, latent_k, q, k, v = (x.float() for x in macchiato_inputs(1, 135, 1, 1))
    latent_k[:, 70:] += 120.0
    latent_k[:, 100:] += 1e4
    got = judged([latent_q, latent_k, q, k, v], macchiato)
    assert all(torch.isfinite(x).all() for x in got)


def test_the_cut_does_not_matter(monkeypatch):
    """Nor do the tiles of D that the walks back take one after the other."""
    inputs = fp32_inputs(1, 200, 2, 1, D=70, scale=2.0)
    results = []
    for shortest in (4, 2, 1):
        monkeypatch.setattr(segments, "SHORTEST", shortest)
        results.append(values_and_gradients(lambda *x: macchiato("triton", *x), inputs))
    for other in results[1:]:
        assert_same(other, results[0], 4e-6)


@pytest.mark.parametrize(("t", "change"), [(100, 1e4), (128, 1.0)])
def test_the_future_cannot_change_the_past_across_segments(t, change, cut):
    inputs = fp32_inputs(1, 150, 1, 1, scale=2.0)
    before, _ = macchiato("triton", *inputs)
    for x in inputs:
        x[:, t:] += change
    inputs[2][:, t:] *= -1.0
    after, _ = macchiato("triton", *inputs)
    assert torch.equal(before[:, :t], after[:, :t])
    assert not torch.equal(before[:, t:], after[:, t:])


def test_rows_beyond_reach_keep_the_windows_part():
    """A jump inside a chunk: later rows take their latents token by token, and their window too."""
    latent_q, latent_k, q, k, v = fp32_inputs(1, 20, 1, 1)
    latent_k[:, 7:] += 1e4
    want = macchiato("reference", *(x.double() for x in (latent_q, latent_k, q, k, v)))[0]
    got = macchiato("triton", latent_q, latent_k, q, k, v)[0]
    assert_same([got.double()], [want], 2e-6)


def test_nothing_is_saved_between_chunks(monkeypatch):
    """One segment: the inputs and the final mean alone. Several: one state for each."""
    inputs = fp32_inputs(1, 60, 2, 1)
    options = (*[None] * 7, 16, 0.4, 0.0, True)
    assert all(x.numel() == 0 for x in macchiato_op(*inputs, *options)[4:])
    monkeypatch.setattr(segments, "SHORTEST", 2)
    between = macchiato_op(*inputs, *options)[4:]
    assert [x.shape[0] for x in between] == [2, 2, 2, 1, 1]


def test_memory_is_neither_read_nor_written_beyond(cut, monkeypatch):
    fences = Fences()
    cu = torch.tensor([0, 0, 66, 130], device=DEVICE)
    leaves = [fences.of(x).requires_grad_() for x in fp32_inputs(1, 130, 2, 1)]
    fences.guard(monkeypatch)
    out, _ = macchiato("triton", *leaves, cu_seqlens=cu, output_final_state=False)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert not any(torch.isnan(x).any() for x in (out, *grads))
    fences.check()


def test_large_logits_in_short_chunks(monkeypatch):
    """Backward the window's logits come from products of another shape, rounded otherwise."""
    walk = (16, *segments.SINGLE[16][1:])
    monkeypatch.setitem(segments.SINGLE, 16, walk)
    compare(macchiato, 66, H=1, masked=True, scale=100.0)
