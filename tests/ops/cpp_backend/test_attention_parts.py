"""Attention in parts of long sequences: what it gives, on how many threads, and who does how much.

A call is split if its longest sequence has more than 1,024 tokens and more than a thread's share of
all tokens of all heads. Timings are not asserted: the plan is, which says who computes what.
"""

from __future__ import annotations

import math
import random
import subprocess
from collections.abc import Iterable

import pytest
import torch

from latte.ops.cpp_backend import build
from tests.ops.cpp_backend import calls
from tests.ops.helpers import assert_same, threads
from tests.ops.opdb import EXTREMES, F64, OPS, Bench, judge

MANY = 32  # threads, more than there are heads of sequences in any test here


ATTENTION = pytest.mark.parametrize("op", ["macchiato", "latte", "window"])


def bench(op, dtype=torch.float32, **sizes):
    return Bench(OPS[op], "cpu", dtype).sized(W=16, **sizes)


def on(count, bench, inputs):
    with threads(count):
        return bench.results(inputs, output_final_state=True)


def same_bits(found, wanted):
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("masked", "packed", "carried"),
    [(False, False, False), (True, False, True), (True, True, False), (False, True, True)],
)
@ATTENTION
def test_parts_agree_with_the_reference(op, masked, packed, carried):
    native = bench(op, F64, H=2, G=1, L=2)
    with threads(MANY):
        native.agrees(2100, masked=masked, packed=packed, carried=carried, softcap=2.0)


@pytest.mark.parametrize("seed", range(8))
@ATTENTION
def test_parts_agree_with_whole_sequences(op, seed):
    """Delays, joint softmax, sinks, forgetting, pending sources, tails, masks, bounds, layouts."""
    whole, parts = (calls.call_in_parts(op, seed, n, torch.float64) for n in (1, 8))
    assert_same(parts, whole, 1e-11)
    assert same_bits(calls.call_in_parts(op, seed, 12, torch.float64), parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@ATTENTION
def test_bits_change_at_one_number_of_threads_alone(op, dtype):
    """Up to a thread for each head of each sequence the bits are the same, and so from there on."""
    native = bench(op, dtype, H=2, G=2)
    inputs = native.inputs(2, 2100)
    whole, parts = (on(count, native, inputs) for count in (1, 5))
    for count in (2, 3, 4):
        assert same_bits(on(count, native, inputs), whole)
    for count in (8, 64):
        assert same_bits(on(count, native, inputs), parts)
    if dtype != torch.bfloat16:  # which hides them
        assert not same_bits(parts, whole)  # or nothing was split


@ATTENTION
def test_sequences_of_one_part_are_never_split(op):
    native = bench(op, H=1, G=1)
    inputs = native.inputs(1, 1024)
    whole, many = (on(count, native, inputs) for count in (1, MANY))
    assert same_bits(many, whole)


@pytest.mark.parametrize("kind", EXTREMES)
@pytest.mark.parametrize("op", ["macchiato", "latte"])
def test_extreme_logits_in_parts(op, kind):
    """fp64 as whole sequences; fp32 errs at most twice as much as them."""
    single, double = bench(op), bench(op, F64)
    low = single.extreme(kind, 2100)
    exact = [x.double() for x in low]
    want = on(1, double, exact)
    assert_same(on(MANY, double, exact), want)
    whole, found = (on(count, single, low) for count in (1, MANY))
    judge(found, whole, want)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", ["sequence", "masked"])
@ATTENTION
def test_strange_values_reach_what_they_reach_in_whole_sequences(op, place, bad):
    native = bench(op, H=1, G=1)
    inputs = native.inputs(2, 2100)
    mask = torch.ones(2, 2100, dtype=torch.bool)
    for x in inputs[-2:]:  # a key and a value
        x[1, 1000] = bad
    mask[1, 1000] = place == "sequence"
    with torch.no_grad(), threads(1):
        whole, _ = native.call(inputs, key_mask=mask)
    with torch.no_grad(), threads(MANY):
        parts, _ = native.call(inputs, key_mask=mask)
    assert torch.equal(parts.isfinite(), whole.isfinite())
    assert parts[1].isfinite().all() == (place == "masked")


@pytest.mark.parametrize("bad", [1e3, math.nan])
@ATTENTION
def test_later_tokens_change_no_bit_of_earlier_ones_in_parts(op, bad):
    native = bench(op)
    inputs = native.extreme("rising apart", 2200)
    with torch.no_grad(), threads(MANY):
        before, _ = native.call(inputs)
        for cut in (1000, 1024, 1025, 1500, 2048, 2049):
            changed = [torch.cat([x[:, :cut], bad * x[:, cut:]], 1) for x in inputs]
            assert torch.equal(native.call(changed)[0][:, :cut], before[:, :cut])
            assert torch.equal(native.call([x[:, :cut] for x in inputs])[0], before[:, :cut])


@ATTENTION
def test_parts_of_packed_sequences_are_those_of_separate_calls(op):
    """To the bit where both are split: parts begin where their own sequence does."""
    bounds = [0, 1300, 1310, 3700]
    native = bench(op, H=1, G=1)
    inputs = native.inputs(1, bounds[-1])
    with torch.no_grad(), threads(MANY):
        packed, _ = native.call(inputs, cu_seqlens=torch.tensor(bounds))
        for a, b in zip(bounds, bounds[1:], strict=False):
            alone, _ = native.call([x[:, a:b] for x in inputs])
            assert torch.equal(packed[:, a:b], alone)


# The plan of a call: tokens of each thread; sequence, first head, heads, from, stop of each piece.
PROGRAM = """
#include "attention_plan.h"
#include <cstdio>
#include <cstdlib>
int main(int count, char** words) {
    std::vector<int64_t> lengths;
    for (int i = 4; i < count; ++i) lengths.push_back(std::atoll(words[i]));
    const long long heads = std::atoll(words[1]), window = std::atoll(words[2]);
    const long long threads = std::atoll(words[3]);
    const latte::Plan plan(lengths, heads, latte::TOGETHER, window, threads);
    std::printf("%d %lld\\n", int(plan.split), (long long)plan.part);
    for (int64_t tokens : latte::shares(plan.pieces, threads))
        std::printf("%lld ", (long long)tokens);
    for (const latte::Piece& x : plan.pieces)
        std::printf("\\n%lld %lld %lld %lld %lld %d", (long long)x.sequence, (long long)x.head,
                    (long long)x.heads, (long long)x.from, (long long)x.stop, int(x.last));
}
"""


@pytest.fixture(scope="module")
def plan_of(tmp_path_factory):
    """(lengths, heads, threads, window) -> whether it is split, its pieces, tokens of threads."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "plan.cpp").write_text(PROGRAM)
    flags = ["-std=c++17", "-O1", f"-I{build.HERE}", "-o", str(folder / "plan")]
    subprocess.run([*build.find_compiler(), *flags, str(folder / "plan.cpp")], check=True)

    def plan(lengths: Iterable[int], heads: int, threads: int, window: int = 128):
        words = [str(x) for x in (heads, window, threads, *lengths)]
        done = subprocess.run(
            [str(folder / "plan"), *words], capture_output=True, text=True, check=True
        )
        numbers = [[int(x) for x in line.split()] for line in done.stdout.splitlines()]
        return bool(numbers[0][0]), [tuple(x) for x in numbers[2:]], numbers[1]

    return plan


@pytest.mark.parametrize(
    ("T", "H", "threads"),
    [
        (32768, 8, 64),
        (16384, 8, 64),
        (8192, 8, 64),
        (65536, 1, 64),
        (16384, 1, 2),
        (131072, 4, 128),
    ],
)
def test_every_thread_has_the_same_share_of_one_long_sequence(plan_of, T, H, threads):
    split, _, tokens = plan_of([T], H, threads)
    assert split
    assert tokens == [T * H // threads] * threads
    # Without parts 8 of 64 threads have work, and T tokens each.
    assert plan_of([T], H, H)[2] == [T] * H


def test_shares_of_packed_sequences(plan_of):
    """[0, 3840, 4096] on two threads, and mixes of long and short sequences on 64."""
    for heads in (1, 2, 4, 8):
        assert plan_of([3840, 256], heads, 2)[2] == [2048 * heads] * 2
    draw = random.Random(0)
    for _ in range(20):
        lengths = [draw.choice([5, 130, 900, 2500, 9000, 40000]) for _ in range(12)] + [200000]
        heads = draw.choice([2, 4, 8])
        split, _, tokens = plan_of(lengths, heads, 64)
        assert max(tokens) <= 1.1 * sum(lengths) * heads / 64
        assert split == (64 * max(lengths) > sum(lengths) * heads)


def test_pieces_are_every_token_of_every_head_once_and_the_longest_are_first(plan_of):
    draw = random.Random(1)
    for _ in range(20):
        lengths = [draw.choice([0, 1, 256, 1024, 1025, 5000]) for _ in range(5)]
        heads, window = draw.choice([1, 3, 8]), draw.choice([1, 128, 1500])
        split, pieces, tokens = plan_of(lengths, heads, draw.choice([1, 2, 16]), window)
        seen = sorted((n, h + i, a, b, last) for n, h, m, a, b, last in pieces for i in range(m))
        for n, length in enumerate(lengths):
            for h in range(heads):
                ends = [(a, b, last) for m, i, a, b, last in seen if (m, i) == (n, h)]
                assert ends[0][0] == 0 and ends[-1][1:] == (length, 1)
                assert all(x[1] == y[0] for x, y in zip(ends, ends[1:], strict=False))
                assert [x[2] for x in ends] == [0] * (len(ends) - 1) + [1]
                # A part reads keys of the part before it alone.
                assert all(a % 256 == 0 and b - a >= window for a, b, _ in ends[:-1])
                assert split or len(ends) == 1
        costs = [m * (b - a) for _, _, m, a, b, _ in pieces]
        assert costs == sorted(costs, reverse=True) and sum(costs) == sum(tokens)


def test_a_thread_for_each_head_splits_nothing(plan_of):
    for B, H in ((1, 1), (1, 8), (3, 4)):
        assert not plan_of([5000] * B, H, B * H)[0]
        assert plan_of([5000] * B, H, B * H + 1)[0]
        assert not plan_of([1024] * B, H, 64)[0]
