"""What comes before attention with kept tokens: the choice of tokens, and rows of 8 bits."""

from __future__ import annotations

import pytest
import torch

from latte.ops import Kept, KeptState, use_backend
from latte.ops.cpp_backend.kept import choice_op, choose
from latte.ops.mxint8 import pack, rounded, unpack
from latte.ops.tensors import Sequences
from latte.ops.torch_backend.kept_plan import ChoiceCall, Plan
from tests.ops.helpers import F64, check_plans_are_equal, randn

T, G, W, C = 33, 2, 5, 4


def held(scores, count):
    """A state whose kept tokens are in no order, some places empty."""
    x = randn(1, T, G, 2)
    state = KeptState.empty(x, x, Kept(scores, count, C), W, 1)
    positions = torch.full_like(state.positions, -1)
    positions[:, :count] = torch.arange(count)[:, None].clamp_max(C)
    own = torch.where(positions < 0, -torch.inf, (positions * 5 % 3).to(scores.dtype))
    return state._replace(scores=own, positions=positions, seen=torch.tensor([3 * C + 1]))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("count", [1, 7, 100])
@pytest.mark.parametrize("form", ["rows", "masked", "packed", "state"])
def test_the_choice_is_that_of_sorting(form, count, dtype):
    """Many equal scores, some of -inf."""
    packed, masked = form == "packed", form in ("masked", "packed")
    scores = randn(1 if packed or form == "state" else 2, T, G).mul(2).round().to(dtype)
    scores[:, 3::7] = -torch.inf
    cu = torch.tensor([0, 0, 8, 9, T]) if packed else None
    mask = (torch.arange(T) % 5 != 2).expand(len(scores), T) if masked else None
    state = held(scores, count) if form == "state" else None
    call = (Kept(scores, count, C), W, Sequences(mask, cu), state, None)
    check_plans_are_equal(Plan.of(*call), Plan.of(*call, choose=choose))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64])
@pytest.mark.parametrize("width", [1, 31, 40, 64, 97])
def test_rows_of_8_bits_are_those_of_pytorch(dtype, width):
    """To the bit: numbers of any size, zeros, infinities and NaN."""
    x = (randn(9, 4, width) * randn(9, 4, 1, seed=1).mul(40).exp2()).to(dtype)
    x[0] = 0
    for row, bad in enumerate((torch.inf, -torch.inf, torch.nan), start=1):
        x[row, :, ::3] = bad
    for given in (x, x.transpose(0, 1)):
        with use_backend("torch"):
            rows, near = pack(given), rounded(given)
            wide = [unpack(rows, y) for y in (dtype, F64, torch.bfloat16)]
        assert torch.equal(pack(given), rows)
        found = [rounded(given), *(unpack(rows, y.dtype) for y in wide)]
        for a, b in zip(found, (near, *wide), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_they_keep_the_contract_of_custom_ops():
    ops, x = torch.ops.latte, randn(3, 40).bfloat16()
    keys, ages = randn(1, 2, 3 + 8 + 5 * C), torch.tensor([0, 1, 0, 1, 2])
    for op, args in (
        (choice_op, ChoiceCall(keys, None, 5, C, W, 3)),
        (choice_op, ChoiceCall(keys, ages, 5, C, W, 3)),
        (ops.cpu_mx_pack.default, (x,)),
        (ops.cpu_mx_unpack.default, (pack(x), x)),
        (ops.cpu_mx_rounded.default, (x,)),
    ):
        kinds = ["test_schema", "test_faketensor"]
        checks = torch.library.opcheck(op, tuple(args), test_utils=kinds)
        assert set(checks.values()) == {"SUCCESS"}
