"""Sinks, late latents and the joint softmax on the kernels, beyond the laws.

Shape suffixes: B batch, T tokens, H query heads, G key/value heads, L latents, K key width, D value
width, W window, n sinks.
"""

from __future__ import annotations

import pytest
import torch

from latte.ops import Partition, Sinks
from latte.ops.triton_backend import launch
from latte.ops.triton_backend.macchiato import macchiato_op
from tests.ops.helpers import assert_same, key_mask, macchiato_inputs, randn
from tests.ops.opdb import leaves, lift
from tests.ops.triton_backend.kernel_helpers import DEVICE, kernels

ROWS = pytest.mark.parametrize("op", ["sinks", "delayed", "joint", "converted"])


def test_more_sinks_than_are_taken_at_once_and_groups_of_heads():
    kernels("converted", H=2, W=4, n=19).agrees(24, B=1, softcap=2.0)


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("carried", [False, True])
@ROWS
def test_all_that_there_is(op, carried, packed, masked):
    for T, W in ((1, 3), (17, 1), (66, 16), (50, 100)):
        kernels(op, H=2, W=W).agrees(T, masked, packed, carried, B=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("L", "K", "D"), [(1, 1, 1), (16, 64, 70), (35, 5, 16), (3, 130, 5), (256, 3, 40)]
)
def test_widths(L, K, D):
    kernels("converted", L=L, K=K, D=D).agrees(40, B=1)


def test_large_logits():
    kernels("converted").agrees(37, B=1, masked=True, scale=100.0)


def test_many_tiles_of_values_have_one_delta():
    """Backward the latents take one tile of D after the other: the mixture's delta is their sum."""
    kernels("converted", W=5, D=70).agrees(20, B=1)


def test_the_first_window_is_the_window_alone():
    """No source has left it yet: late latents and sinks add nothing."""
    far, near = kernels("converted", W=20), kernels("window", W=20)
    inputs = far.inputs(1, 30)
    latent_k = inputs[1].requires_grad_()
    out, _ = far.call(inputs)
    assert_same([out[:, :20]], [near.call(inputs[2:5])[0][:, :20]], 1e-6)
    (dk,) = torch.autograd.grad(out[:, :20].sum(), latent_k)
    assert not dk.any()


def test_without_any_of_them_nothing_is_another():
    """No sinks, no delay and two softmaxes: the bits are those of the kernels without these."""
    bench = kernels("macchiato", H=2, W=6)
    inputs = bench.inputs(1, 30)
    kept = (x[:, :0] for x in inputs[3:])
    none = Sinks(inputs[2], *kept, torch.ones(1, 0, dtype=torch.bool, device=DEVICE))
    plain, again = bench.call(inputs)[0], bench.call(inputs, partition=Partition(none))
    assert torch.equal(plain, again[0])


@pytest.mark.slow
def test_custom_op_keeps_its_contract():
    late = [randn(1, 5, 2, 5), key_mask(1, 5), torch.arange(5)[None] > 1]
    sinks = [randn(1, 5, 2, 6), randn(1, 2, 2, 6), randn(1, 2, 2, 5)]
    own = macchiato_inputs(1, 5, 2, 2)
    inputs = [x.float().requires_grad_() for x in (*own, *sinks, late[0])]
    flags = (torch.ones(1, 2, dtype=torch.bool), torch.arange(5)[None] - 2)
    around = (*[None] * 8, *inputs[5:8], *flags, inputs[8], *late[1:])
    numbers = (3, 0.4, 0.0, True, True)
    found = (x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in (*inputs[:5], *around))
    checks = torch.library.opcheck(macchiato_op, (*found, *numbers))
    assert set(checks.values()) == {"SUCCESS"}


def test_a_negative_scale_turns_the_sinks_queries_too():
    bench = kernels("converted", W=5)
    bench.judged(bench.inputs(1, 20), scale=-0.3)


@pytest.mark.parametrize(
    ("op", "prompt", "new"),
    [
        ("converted", 6, 5),
        pytest.param("converted", 0, 12, marks=pytest.mark.slow),
        pytest.param("sinks", 5, 4, marks=pytest.mark.slow),
        pytest.param("delayed", 0, 8, marks=pytest.mark.slow),
        ("joint", 0, 3),
    ],
)
def test_decoding_is_prefilling(op, prompt, new, monkeypatch):
    """Token by token from a prompt, or from nothing, until sinks and sources have left the window.

    The first row's prompt is padding but for its last token; a later token of the last is masked.
    """
    monkeypatch.setattr(launch, "STEP_ELEMENTS", 64)
    T, bench = prompt + new, kernels(op, H=4, G=2, W=4)
    mask = torch.ones(2, T, dtype=torch.bool, device=DEVICE)
    mask[0, : max(prompt - 1, 0)] = False
    mask[-1, prompt + 1] = False
    inputs, options = bench.inputs(2, T), {"output_final_state": True}
    want = bench.judge().call([lift(x) for x in inputs], key_mask=mask, **options)
    with torch.no_grad():
        first, state = inputs[0].new_zeros(2, 0, 4, 5), None
        if prompt:
            part = bench.span(inputs, slice(0, prompt))
            torchs = bench._replace(backend="torch")
            first, state = torchs.call(part, key_mask=mask[:, :prompt], **options)
        rest = bench.span(inputs, slice(prompt, T))
        out, state = bench.pieces(rest, range(1, new), state=state, key_mask=mask[:, prompt:])
    assert_same([torch.cat([first, out], 1), *leaves(state)], leaves(want), 3e-6)
    flags = [[x.mask for x in (s[0] if "sink_q" in bench.op.inputs else s)[1:]]
             for s in (state, want[1])]  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(*flags, strict=True))
