"""Kept tokens on the kernels, beyond the laws: blocks, widths and numbers of several tiles.

Shape suffixes: B batch, T tokens, H query heads, G key/value heads, L latents, K key width, D value
width, W window, n sinks; ``count`` kept tokens, ``block`` tokens from one update to the next.
"""

from __future__ import annotations

import pytest
import torch

from latte.ops import Kept, Partition, macchiato_attention
from latte.ops.tensors import Sequences
from latte.ops.torch_backend.kept import KeptCall
from latte.ops.torch_backend.kept_plan import Plan
from latte.ops.triton_backend import kept_attention, kept_choice
from tests.ops.helpers import check_plans_are_equal, macchiato_inputs, randn
from tests.ops.triton_backend.kernel_helpers import DEVICE, kernels

SMALL = {"W": 6, "L": 2, "K": 3, "D": 2, "n": 1}


@pytest.mark.parametrize(
    ("T", "sizes"),
    [
        pytest.param(1, {}, id="one token"),
        pytest.param(5, {"W": 2, "count": 1, "block": 1}, id="an update at each token"),
        pytest.param(80, {"count": 70, "block": 70}, id="two tiles of a block and of kept tokens"),
        pytest.param(
            10, {"H": 4, "G": 2, "n": 19, "block": 8}, id="groups of heads, sinks of two tiles"
        ),
        pytest.param(10, {"W": 100, "count": 20, "block": 8}, id="nothing leaves the window"),
    ],
)
def test_blocks_and_tiles(T, sizes):
    kernels("kept", **SMALL | sizes).agrees(T, B=1, softcap=2.0)


@pytest.mark.parametrize(
    ("L", "K", "D"), [(35, 5, 16), pytest.param(3, 130, 70, marks=pytest.mark.slow)]
)
def test_widths(L, K, D):
    kernels("kept", W=4, L=L, K=K, D=D).agrees(9, B=1)


@pytest.mark.parametrize("op", ["kept", "kept-window"])
@pytest.mark.parametrize(("packed", "carried"), [(False, True), (True, False)])
def test_masks_states_and_packed_sequences(op, packed, carried):
    kernels(op, **SMALL).agrees(12, True, packed, carried, B=1)


def test_large_logits():
    kernels("kept", **SMALL).agrees(12, B=1, masked=True, scale=100.0)


def test_a_negative_scale_turns_the_sinks_queries_too():
    bench = kernels("kept", **SMALL)
    bench.judged(bench.inputs(1, 12), scale=-0.3)


def test_no_sequence_reaches_another_in_a_tile():
    """Of packed sequences that share tiles of slots, one holds NaN: gradients too stay apart."""
    bench, cu = kernels("kept", **SMALL | {"n": 0}), torch.tensor([0, 5, 12, 18], device=DEVICE)
    inputs = bench.inputs(1, 18, 3)
    sound = bench.results(inputs, cu_seqlens=cu)
    name = list(bench.op.inputs).index("q")
    inputs[name][:, 7] = torch.nan
    found = bench.results(inputs, cu_seqlens=cu)
    for (_, shape, _), a, b in zip(bench.shaped(inputs), found[1:], sound[1:], strict=True):
        if shape[:2] == "BT":
            for tokens in (slice(0, 5), slice(12, 18)):
                assert torch.equal(a[:, tokens], b[:, tokens])


def test_gradients_are_summed_in_one_order():
    """Those of a token that many blocks kept: the same bits in every run."""
    bench = kernels("kept-window", **SMALL)
    inputs = bench.inputs(1, 24)
    first, again = (bench.results(inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("packed", [False, True])
def test_the_choice_in_segments_is_that_of_sorting(packed, monkeypatch):
    """Many equal scores, some of -inf; sequences that begin within a segment of two blocks."""
    monkeypatch.setattr(kept_choice, "SHORTEST_CHOICE", 2)
    scores = randn(1, 26, 1, seed=5).mul(2).round().float().to(DEVICE)
    scores[:, 3::7] = -torch.inf
    cu = torch.tensor([0, 0, 8, 9, 26], device=DEVICE) if packed else None
    mask = torch.arange(26, device=DEVICE)[None] % 5 != 2
    call = (Kept(scores, 3, 2), 3, Sequences(mask, cu), None, None)
    check_plans_are_equal(Plan.of(*call), Plan.of(*call, choose=kept_choice.choose))


@pytest.mark.slow
def test_custom_op_keeps_its_contract():
    q, k, v = (x.float().to(DEVICE) for x in macchiato_inputs(1, 8)[2:])
    scores = randn(1, 8, 2, seed=3).float().to(DEVICE)
    plan = Plan.of(Kept(scores, 2, 4), 3, Sequences(None, None), None, None)
    k, v = (plan.layout.laid(x) for x in (k, v))
    given = dict.fromkeys(KeptCall._fields)
    given |= {x: getattr(plan, x) for x in ("real", "kept", "kept_there", "late", "late_there")}
    given |= {x: y.requires_grad_() for x, y in {"q": q, "k": k, "v": v}.items()}
    given |= {"begun": plan.begun, "window": 3, "block": 4, "scale": 0.4, "softcap": 0.0}
    kinds = ["test_schema", "test_faketensor", "test_autograd_registration"]
    op = kept_attention.kept_op
    checks = torch.library.opcheck(op, tuple(given.values()), test_utils=kinds)
    assert set(checks.values()) == {"SUCCESS"}


def test_what_cannot_be_served_is_told():
    inputs = [x.to(DEVICE) for x in macchiato_inputs(1, 4)]
    partition = Partition(None, True, True, Kept(torch.zeros(1, 4, 2, device=DEVICE), 2, 4))
    with pytest.raises(ValueError, match=r"with kept tokens: backend 'triton' .* torch.float64"):
        macchiato_attention(*inputs, window=3, partition=partition, backend="triton")
