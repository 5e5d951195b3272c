"""Macchiato's fused kernels beyond the laws: widths, windows, shares that are 0 or 1."""

from __future__ import annotations

import pytest
import torch

from latte.ops import LatteState, WindowState, macchiato_attention
from latte.ops.triton_backend import segments
from latte.ops.triton_backend.macchiato import macchiato_op
from tests.ops.helpers import assert_same, key_mask, macchiato_inputs
from tests.ops.triton_backend.kernel_helpers import DEVICE, kernels


def fp32_inputs(*shape, **options):
    return [x.float().to(DEVICE) for x in macchiato_inputs(*shape, **options)]


@pytest.mark.parametrize(("T", "W"), [(1, 1), (64, 128), (65, 2)])
def test_lengths_and_windows(T, W):
    kernels("macchiato", W=W).agrees(T, B=1, carried=True)


@pytest.mark.parametrize(
    ("L", "K", "D"), [(1, 1, 1), (16, 64, 70), (35, 5, 16), (3, 130, 5), (256, 3, 40)]
)
def test_widths(L, K, D):
    for op in ("macchiato", "macchiato-bidirectional"):
        kernels(op, L=L, K=K, D=D).agrees(20, B=1)


def test_groups_of_heads_batches_and_soft_cap():
    kernels("macchiato", H=4, G=2).agrees(20, carried=True, softcap=2.0)


@pytest.mark.parametrize("causal", [True, False])
def test_large_logits(causal):
    bench = kernels("macchiato" if causal else "macchiato-bidirectional")
    bench.agrees(37 if causal else 66, B=1, masked=True, scale=100.0)


@pytest.mark.parametrize("op", ["macchiato", "converted"])
@pytest.mark.parametrize("share", [-1e4, 1e4])
def test_a_window_that_has_no_share_or_all(op, share):
    bench = kernels(op)
    inputs = bench.inputs(1, 40)
    inputs[0][..., 0] = share
    assert all(x.isfinite().all() for x in bench.judged(inputs))


def test_a_window_that_takes_all_is_the_window():
    both, near = kernels("macchiato", H=2), kernels("window", H=2)
    inputs = both.inputs(1, 40)
    inputs[0][..., 0] = 1e4
    assert_same([both.call(inputs)[0]], [near.call(inputs[2:])[0]], 1e-6)


def test_custom_op_keeps_its_contract():
    inputs = [x.requires_grad_() for x in fp32_inputs(1, 5, 1, 1)]
    cu = torch.tensor([0, 2, 5], device=DEVICE)
    options = (key_mask(1, 5).to(DEVICE), cu, *[None] * 14, 16, 0.4, 0.0, True, False)
    checks = torch.library.opcheck(macchiato_op, (*inputs, *options))
    assert set(checks.values()) == {"SUCCESS"}


def test_what_cannot_be_served_is_told():
    inputs = fp32_inputs(1, 4, 2, 1)

    def refused(message, *inputs, **options):
        with pytest.raises(ValueError, match=message):
            macchiato_attention(*inputs, window=4, backend="triton", **options)

    refused("'triton' is not available for torch.float64", *(x.double() for x in inputs))
    many = [torch.zeros(1, 4, 1, L, device=DEVICE) for L in (301, 300, 6, 6, 5)]
    refused("not available for L=300, D=5: expected L from 1 to 256", *many)
    refused("bidirectional window has no state", *inputs, causal=False, output_final_state=True)
    kept = WindowState.empty(inputs[3], inputs[4], 4)
    state = (LatteState.empty(2, 2, 3, 5, device=DEVICE), kept)
    refused(r"initial_state.log_mass must have shape \(1, 2, 3\)", *inputs, initial_state=state)


def test_nothing_is_saved_between_chunks(monkeypatch):
    """One segment: the inputs and the final mean, and two zeros. Several: one state for each."""
    inputs = fp32_inputs(1, 60, 2, 1)
    options = (*[None] * 16, 16, 0.4, 0.0, True, False)
    for shortest, cut in ((segments.SHORTEST, False), (2, True)):
        monkeypatch.setattr(segments, "SHORTEST", shortest)
        *between, falls = macchiato_op(*inputs, *options)[5:]
        assert [x.shape[0] for x in between] == [2, 2, 2, 1, 1] and falls.numel() == 0
        assert any(x.any() for x in between) == cut
