"""What holds of every op on every backend: the laws over the table of ops (``opdb.py``).

First agreement with the equations, then laws that need no judge. In a process with Triton's
interpreter (``TRITON_INTERPRET=1``) they run on Triton's kernels, with few and short cases: of what
hypothesis draws elsewhere, the examples that are written down.
"""

from __future__ import annotations

import inspect
import itertools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

import latte.ops
from latte.ops import attention_weights, cpp_backend
from tests.ops.gpu_correctness import EXTREME_ULPS
from tests.ops.helpers import assert_same, boundaries, key_mask, threads
from tests.ops.opdb import (
    BF16,
    EXTREMES,
    F16,
    F32,
    F64,
    OPS,
    QUERIES,
    SIZES,
    VALUES,
    Bench,
    Op,
    judge,
    leaves,
    lift,
    map_state,
    with_leaves,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available()
HERE = ["triton"] if INTERPRETED else ["reference", "torch", "cpu"] + ["triton"] * GPU
NATIVE = pytest.mark.skipif(cpp_backend.ABSENT is not None, reason=str(cpp_backend.ABSENT))
NAMES = {F64: "fp64", F32: "fp32", BF16: "bf16", F16: "fp16"}
# The same examples in every run; in the interpreter only those that are written down.
drawn = settings(
    max_examples=8,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit] if INTERPRETED else [Phase.explicit, Phase.generate, Phase.shrink],
)
# By backend, what a law that needs no judge runs in, and what one runs in that compares bits.
EXACT = {"reference": [F64], "torch": [F64], "cpu": [F64], "triton": [F32]}
BITS = {"reference": [F64], "torch": [F64, F32], "cpu": [F64, F32, BF16], "triton": [F32]}
FAST = {"torch": [F64], "cpu": [F64], "triton": [F32]}
# Rows that the interpreter runs each time; the others are among its slow tests.
QUICK = {"latte", "bidirectional", "forgetting", "macchiato", "macchiato-bidirectional", "window"}
QUICK |= {"converted", "rg_lru", "conv"}
FEW = {"H": 2, "G": 1}
# In bf16: several vectors of numbers, or of pairs of them, and a part of one.
WIDE = {"L": 18, "K": 33, "D": 40, "W": 24, "E": 21}


@pytest.fixture(autouse=True)
def some_chunks(request):
    """Of Triton's recurrences too."""
    if INTERPRETED or GPU:
        request.getfixturevalue("small_tiles")


def over(
    dtypes: dict[str, list[torch.dtype]], only: Callable[[Op], Any] = lambda op: True
) -> Callable[[Any], Any]:
    """The ops that ``only`` lets through, on the backends of this process that have them.

    A law without any is no test here.
    """
    params = []
    for name, op in OPS.items():
        for backend in HERE if only(op) else ():
            marks = [NATIVE] if backend == "cpu" else []
            marks += [pytest.mark.slow] if INTERPRETED and name not in QUICK else []
            for dtype in dtypes.get(backend, []) if backend in op.backends else []:
                device = torch.device("cuda" if backend == "triton" and GPU else "cpu")
                sizes = SIZES | FEW if INTERPRETED else SIZES | WIDE if dtype == BF16 else SIZES
                label = f"{name}-{backend}-{NAMES[dtype]}"
                bench = Bench(op, backend, dtype, sizes, device)
                params.append(pytest.param(bench, id=label, marks=marks))
    return pytest.mark.parametrize("bench", params) if params else lambda law: None


def length(bench: Bench) -> int:
    """How many tokens are several chunks and a rest."""
    return bench.op.kernel_length if bench.backend == "triton" else 70


def tolerance(bench: Bench) -> float:
    """What two ways to the same numbers may differ by, in fp64 or fp32."""
    return 1e-12 if bench.dtype == F64 else 4e-6


def same_bits(found: Any, wanted: Any) -> None:
    """Also of what is not a number."""
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=f"tensor {i}")


def on_device(bench: Bench, x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.to(bench.device)


def mask_of(bench: Bench, B: int, T: int, gaps: Any) -> torch.Tensor | None:
    """A key mask with these gaps, of (row, first token, number of tokens)."""
    if gaps is None:
        return None
    mask = torch.ones(B, T, dtype=torch.bool, device=bench.device)
    for b, first, count in gaps:
        mask[b % B, first : first + count] = False
    return mask


GAPS = st.none() | st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 69), st.integers(1, 40)), max_size=3
)
PLACES = st.sampled_from([0, 1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65, 69, 70]) | st.integers(0, 70)
SLOPES = st.sampled_from(["plain", "jump", "rising apart"])
CUTS = st.lists(PLACES, min_size=1, max_size=4).map(sorted)


def test_every_op_is_in_the_table():
    """And is called with packed sequences there: all but the weights, which have a test below."""
    ops = {name for name in latte.ops.__all__ if "cu_seqlens" in parameters(name)}
    assert ops == {op.run.__name__ for op in OPS.values()} | {"attention_weights"}


@over({"torch": [F64], "cpu": [F64]}, only=lambda op: op.local and "window" not in op.options)
def test_memory_follows_the_window_and_the_length(bench):
    """Whichever is shorter: no allocation is larger because a window reaches beyond the tokens.

    Twice the tokens and twice the window take four times the memory at most.
    """

    def largest(T, W):
        sized, mask = bench.sized(H=2, G=1, W=W), torch.arange(T)[None] % 9 > 0
        inputs = [x.requires_grad_() for x in sized.inputs(1, T, 1)]
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            out, _ = sized.call(inputs, key_mask=mask)
            out.sum().backward()
        return max(event.self_cpu_memory_usage for event in seen.events())

    whole = largest(400, 800)
    assert largest(400, 10**5) <= 1.1 * whole <= 5.0 * largest(200, 400)


def parameters(name: str) -> set[str]:
    found = getattr(latte.ops, name)
    return {*inspect.signature(found).parameters} if inspect.isfunction(found) else set()


# --- the equations --------------------------------------------------------------------------------

FLAGS = pytest.mark.parametrize(
    ("masked", "packed", "carried"), list(itertools.product([False, True], repeat=3))
)
# Tokens, scale of the logits, cap of the window's logits, sizes.
SHAPES = [
    (1, 1.0, None, {"W": 16}),
    (2, 1.0, None, {"W": 1, "C": 1}),
    (6, 1.0, None, {"W": 7, "C": 4}),
    (8, 1.0, 2.0, {"W": 7, "n": 1}),
    (63, 1.0, None, {"W": 1}),
    (65, 30.0, None, {"W": 65}),
    (70, 1.0, None, {"W": 100, "n": 19}),
    (130, 1.0, 2.0, {"W": 64}),
    (140, 1e4, None, {"W": 65, "H": 2, "G": 1, "L": 2}),
    (257, 1.0, None, {"W": 17, "H": 2, "G": 1, "L": 2, "E": 8}),
]


@over({"torch": [F64], "cpu": [F64]}, only=lambda op: "reference" in op.backends)
@FLAGS
def test_it_agrees_with_the_reference(bench, masked, packed, carried):
    """Values and all gradients, in fp64."""
    for T, scale, softcap, sizes in SHAPES:
        sized = bench.sized(**sizes)
        sized.agrees(T, masked, packed, carried, scale=scale, softcap=softcap)


@over({"torch": [F64], "cpu": [F64]}, only=lambda op: "reference" in op.backends)
@pytest.mark.parametrize("G", [1, 4])
def test_odd_widths_agree_with_the_reference(bench, G):
    for L, K, D, E, C in ((1, 1, 1, 1, 1), (16, 64, 32, 17, 4), (33, 17, 96, 40, 5)):
        sized = bench.sized(G=G, L=L, K=K, D=D, E=E, C=C, W=20)
        sized.agrees(70, masked=True, carried=True)


@over({"torch": [F64], "cpu": [F64]}, only=lambda op: "reference" in op.backends)
def test_tokens_by_the_thousand_agree_with_the_reference(bench):
    """Several segments, and heads that go through them together."""
    sized = bench.sized(H=2, G=1, L=2, W=70, E=5 if bench.op.averages else 523)
    sized.agrees(1100 if bench.op.averages else 300, carried=True)


@over({"triton": [F32]})
@pytest.mark.parametrize("everything", [False, True])
def test_kernels_err_at_most_twice_the_reference(bench, everything):
    """Values and all gradients: plain; then with a mask, packed sequences and states."""
    bench.agrees(length(bench), masked=everything, packed=everything, carried=everything)


@over(
    {"torch": [F32, BF16, F16], "cpu": [F32, BF16, F16], "triton": [BF16, F16]},
    only=lambda op: "reference" in op.backends,
)
def test_low_precision_errs_at_most_twice_the_reference(bench):
    """Widths that are pairs of numbers, and others. States are within an ulp of fp32."""
    kernels = bench.backend == "triton"
    widths = {"cpu": (1, 17, 64)}.get(bench.backend, (64,))
    if "sink_k" in bench.op.inputs:
        widths = widths[-2:]  # some few numbers are not enough to judge by
    for width in widths:
        sized = bench.sized(H=2, G=1, L=16 if kernels else 8, K=width, D=width, E=19, W=40)
        inputs = sized.inputs(1 if kernels else 2, 70 if kernels else 150)
        options = {"softcap": 5.0} if bench.op.local and width == 17 else {}
        options["output_final_state"] = not kernels and carries(bench.op)
        # Triton's sums of gradients of keys in bf16 are looked at in its own tests. The reference's
        # own error in decays' gradients in fp32 differs by CPU: twice of it can be below 8 ulps.
        wide = bench.dtype is F32 and "log_decay" in bench.op.inputs
        ulps, largest = (8.0, 2.0) if wide else (4.0, 0.0)
        but = "log_decay" if kernels else None
        sized.judged(inputs, ulps=ulps, largest=largest, but=but, **options)


@over({"torch": [F32], "cpu": [F32], "triton": [F32]}, only=lambda op: op.latent_keys)
@pytest.mark.parametrize("kind", [kind for kind in EXTREMES if kind != "nothing seen"])
def test_extreme_logits(bench, kind):
    check_extreme(bench, kind)


@over(
    {"torch": [F32], "cpu": [F32]},
    only=lambda op: op.latent_keys and "log_decay" in op.inputs and not op.delayed,
)
def test_gradients_of_decays_with_extreme_logits(bench):
    """They err as sums over tokens of the other gradients do, in ulps of the largest of these.

    The equations in fp32 are no judge here: by the draw they err 1 to 190 such ulps.
    """
    sized = bench.sized(H=8, G=8, L=32, K=64, D=64, W=128)
    inputs = sized.inputs(1, 388, scale=1e4)
    exact = sized.judge().results([lift(x) for x in inputs])
    got = sized.results(inputs)
    judge(got, [x.float() for x in exact], exact, largest=EXTREME_ULPS[F32])


@over({"torch": [F32], "cpu": [F32], "triton": [F32]}, only=lambda op: op.latent_keys)
def test_keys_of_minus_infinity(bench):
    """A latent does not see such a source."""
    check_extreme(bench, "nothing seen")


def check_extreme(bench: Bench, kind: str) -> None:
    """fp64 as exact as ever; fp32 errs at most twice as much as the reference in fp32.

    Gradients of decays are sums of those of the keys over the tokens, and err as these sums do.
    """
    kernels = bench.backend == "triton"
    low = bench.extreme(kind, length(bench) if kernels else 130)
    got = bench.judged(low, but="log_decay")
    assert all(x.isfinite().all() for x in got)
    if not kernels:
        exact = bench._replace(dtype=F64)
        high = [lift(x) for x in low]
        assert_same(exact.results(high), exact.judge().results(high))


@over({"reference": [F64], "torch": [F64], "cpu": [F64]})
def test_gradients_by_differences(bench):
    """Of outputs and states, to all inputs and states; gradients of gradients too, or an error."""
    sized = bench.sized(H=2, G=1, L=2, K=3, D=2, E=2, W=3, n=2)
    sized = sized._replace(op=without_edges(bench.op))
    carried = bench.op.state is not None
    state = sized.state(2) if carried else None
    mine = [x.requires_grad_() for x in (*sized.inputs(2, 6), *finite(state))]
    count = len(bench.op.inputs)

    def fn(*xs):
        start = with_leaves(state, xs[count:])
        return leaves(sized.call(xs[:count], start, output_final_state=carried))

    assert torch.autograd.gradcheck(fn, mine, fast_mode=True)
    try:
        assert torch.autograd.gradgradcheck(fn, mine, fast_mode=True)
    except NotImplementedError as refusal:
        assert "has no second derivatives" in str(refusal) and bench.backend != "reference"


def finite(state: Any) -> list[torch.Tensor]:
    """A state's tensors without -inf and zeros, from where a difference steps elsewhere."""
    return [torch.where((x == 0) | x.isinf(), 0.3, x) for x in leaves(state)]


def without_edges(op: Op) -> Op:
    """Decays away from 0, above which they are refused."""

    def run(**given):
        if "log_decay" in given:
            given["log_decay"] = given["log_decay"] - 0.1
        return op.run(**given)

    return Op(run, op.inputs, op.state, **{k: getattr(op, k) for k in ("averages", "options")})


# --- through states -------------------------------------------------------------------------------


def carries(op: Op) -> bool:
    return op.past and op.state is not None


@over({**EXACT, "cpu": [F64, BF16]}, only=carries)
@drawn
@given(cuts=CUTS, gaps=GAPS, carried=st.booleans(), kind=SLOPES)
@example(cuts=[1, 20], gaps=[(0, 3, 12)], carried=False, kind="plain")
@example(cuts=[32, 32, 33], gaps=None, carried=True, kind="jump")
def test_pieces_are_the_whole(bench, cuts, gaps, carried, kind):
    """In bf16 they err at most twice what the whole by the equations in bf16 does.

    The native recurrences go on in the same bits.
    """
    T, B = length(bench), 1 if bench.backend == "triton" else 2
    cuts, mask = [min(c, T) for c in cuts], mask_of(bench, B, T, gaps)
    inputs, state = bench.extreme(kind, T, B), bench.state(B) if carried else None
    found = leaves(bench.pieces(inputs, cuts, state=state, key_mask=mask))
    options = {"key_mask": mask, "output_final_state": True}
    bits = bench.backend == "cpu" and not bench.op.averages
    if bits or bench.dtype != BF16:
        whole = leaves(bench.call(inputs, state, **options))
        assert_same(found, whole, 0.0 if bits else tolerance(bench))
        return
    exact, plain = bench.judge(), bench.judge(BF16)
    want = leaves(exact.call([lift(x) for x in inputs], map_state(lift, state), **options))
    judge(found, leaves(plain.call(inputs, state, **options)), want)


@over({"reference": [F64], "torch": [F64], "cpu": [F64]}, only=carries)
def test_decoding_is_prefill(bench):
    inputs, mask = bench.inputs(2, 40), key_mask(2, 40)
    whole = leaves(bench.call(inputs, key_mask=mask, output_final_state=True))
    with torch.no_grad():
        found = leaves(bench.pieces(inputs, range(1, 40), key_mask=mask))
    assert_same(found, whole, 1e-12)


@over(FAST, only=carries)
def test_gradients_flow_through_pieces(bench):
    T = length(bench)
    mine = [x.requires_grad_() for x in bench.inputs(1, T)]
    whole = bench.projected(bench.call(mine)[0], mine)
    found = bench.projected(bench.pieces(mine, [5, 6, 17])[0], mine)
    assert_same(found, whole, tolerance(bench) * 10)


@over(EXACT, only=lambda op: op.state is not None and op.gaps and "window" not in op.options)
def test_masked_tokens_leave_the_state_as_it_is(bench):
    inputs, state = bench.inputs(2, 9), bench.state(2)
    nothing = torch.zeros(2, 9, dtype=torch.bool, device=bench.device)
    _, after = bench.call(inputs, state, key_mask=nothing, output_final_state=True)
    assert_same(leaves(after), leaves(state), tolerance(bench))


@over(EXACT)
def test_no_tokens(bench):
    """Outputs, gradients and states of the right shapes, from which later tokens go on."""
    inputs = [x.requires_grad_() for x in bench.inputs(2, 0)]
    out, state = bench.call(inputs, output_final_state=carries(bench.op))
    assert out.shape[:2] == (2, 0)
    grads = torch.autograd.grad(out.sum(), inputs)
    assert [g.shape for g in grads] == [x.shape for x in inputs]
    if carries(bench.op):
        later = bench.inputs(2, 5)
        assert_same([bench.call(later, state)[0]], [bench.call(later)[0]], tolerance(bench))


# --- sequences in a call --------------------------------------------------------------------------


@over({**EXACT, "cpu": [F64, F32, BF16]})
@drawn
@given(places=st.lists(PLACES, max_size=4).map(sorted), gaps=GAPS, carried=st.booleans())
@example(places=[0, 17, 18], gaps=None, carried=False)
@example(places=[9], gaps=[(0, 4, 8)], carried=True)
def test_packed_sequences_are_the_sequences_alone(bench, places, gaps, carried):
    """By the kernels to the bit, where no token is alone: that is a step, which rounds its way."""
    op, T = bench.op, length(bench)
    bounds = [0, *(min(p, T) for p in places), T]
    N, mask = len(bounds) - 1, mask_of(bench, 1, T, gaps)
    inputs = bench.inputs(1, T, N)
    goes_on = op.state is not None and op.packed_states
    state = bench.state(N) if carried and goes_on else None
    options = {"output_final_state": goes_on}
    cu = torch.tensor(bounds, dtype=torch.int32, device=bench.device)
    with torch.no_grad():
        packed, last = bench.call(inputs, state, key_mask=mask, cu_seqlens=cu, **options)
        for n in range(N):
            a, b = bounds[n : n + 2]
            part = {} if mask is None else {"key_mask": mask[:, a:b]}
            start = map_state(lambda x, n=n: x[n : n + 1], state)
            out, end = bench.call(bench.sequence(inputs, bounds, n), start, **part, **options)
            states = [x[n : n + 1] for x in leaves(last)]
            bits = bench.backend in ("cpu", "triton") and b - a > 1
            assert_same([packed[:, a:b]], [out], 0.0 if bits else tolerance(bench))
            bits = bits and "log_decay" not in op.inputs  # whose total is a sum in another order
            assert_same(states, leaves(end), 0.0 if bits else tolerance(bench))


@over(EXACT)
@drawn
@given(before=st.integers(0, 40), after=st.integers(0, 12), inside=st.none() | st.integers(0, 33))
@example(before=5, after=3, inside=None)
def test_padded_is_unpadded(bench, before, after, inside):
    """Padding at the ends of a sequence; and in its midst, where masked tokens keep no place."""
    inputs = bench.inputs(1, 33)
    alone = bench.call(inputs, output_final_state=carries(bench.op))
    counts = [(0, before), (33, after)]
    if inside is not None and bench.op.gaps:
        counts.insert(1, (inside, 9))
    mask = torch.ones(1, 0, dtype=torch.bool)
    padded, done = [x[:, :0] if s[:2] == "BT" else x for _, s, x in bench.shaped(inputs)], 0
    for place, count in [*counts, (33, 0)]:
        junk = [1e3 * x for x in bench.inputs(1, count, seed=77)]
        junk = [-x.abs() if n == "log_decay" else x for n, _, x in bench.shaped(junk)]
        for more in (bench.span(inputs, slice(done, place)), junk):
            padded = [torch.cat([x, y], 1) if s[:2] == "BT" else x
                      for (_, s, x), y in zip(bench.shaped(padded), more, strict=True)]  # fmt: skip
        mask = torch.cat([mask, torch.ones(1, place - done), torch.zeros(1, count)], 1).bool()
        done = place
    mask = mask.to(bench.device)
    options = {"key_mask": mask, "output_final_state": carries(bench.op)}
    out, state = bench.call(padded, **options)
    assert_same([out[mask]], [alone[0][0]], tolerance(bench))
    if carries(bench.op) and bench.op.gaps and "window" not in bench.op.options:
        assert_same(leaves(state), leaves(alone[1]), tolerance(bench))


@over({"torch": [F64], "cpu": [F64, F32, BF16], "triton": [F32]})
@pytest.mark.parametrize("T", [1, 70])
def test_rows_of_a_batch_are_alone(bench, T):
    """By the native kernels to the bit."""
    T = min(T, length(bench))
    inputs, mask = bench.inputs(2, T), on_device(bench, key_mask(2, T))
    options = {"output_final_state": carries(bench.op)}
    with torch.no_grad():
        together = leaves(bench.call(inputs, key_mask=mask, **options))
        for b in range(2):
            own = slice(b, b + 1)
            alone = leaves(bench.call(bench.rows(inputs, own), key_mask=mask[own], **options))
            bits = bench.backend != "torch"
            assert_same(alone, [x[own] for x in together], 0.0 if bits else 1e-13)


@over({"torch": [F32], "cpu": [F32, BF16], "triton": [F32]})
@pytest.mark.filterwarnings("ignore:All-NaN", "ignore:invalid value")
def test_a_sequence_that_is_not_finite_stays_alone(bench):
    """Outputs and gradients of its neighbours; and it does not become finite."""
    T = length(bench)
    inputs = bench.inputs(3, T)

    def run(inputs):
        mine = [x.clone().requires_grad_() for x in inputs]
        out = bench.call(mine)[0][[0, 2]]
        found = bench.projected(out, mine)
        return [found[0], *bench.rows(found[1:], [0, 2])]

    sound, place = run(inputs), (torch.tensor(1), torch.tensor(T // 2))
    shapes = ["BT", *bench.op.inputs.values()]
    for bad in (math.nan,) if bench.backend == "triton" else (math.nan, math.inf):
        found = run(bench.filled(inputs, place, bad))
        pairs = [(a, b) for a, b, s in zip(found, sound, shapes, strict=True) if s[0] in "BN"]
        for a, b in pairs:  # not what all rows share
            if bench.backend == "torch":
                torch.testing.assert_close(a, b)  # an infinite key may take the batch another way
            else:
                same_bits([a], [b])
    for name, shape, x in bench.shaped(inputs):
        if shape[:2] == "BT" and name not in QUERIES | {"log_decay"}:
            x[1, T // 2] = math.nan
            assert not bench.call(inputs)[0][1].isfinite().all(), name
            x[1, T // 2] = 0.0


@over({"reference": [F64], "torch": [F64], "cpu": [F32, BF16], "triton": [F32]})
def test_a_masked_source_may_hold_anything(bench):
    """Also what is not finite: for outputs, gradients and what follows, to the bit."""
    op, T = bench.op, length(bench)
    gaps = [(0, 0, 5), (1, 9, 3), (1, 20, 1), (0, T - 2, 1)]
    mask, results = mask_of(bench, 2, T, gaps), []
    inputs, later = bench.inputs(2, T), bench.inputs(2, 4, seed=5)
    if op.state is None or not op.past:
        later = []
    for fill in (0.0, math.nan, math.inf):
        mine = [x.requires_grad_() for x in bench.filled(inputs, ~mask, fill)]
        out, state = bench.call(mine, key_mask=mask, output_final_state=bool(later))
        seen = [torch.where(mask.view(*mask.shape, *[1] * (out.ndim - 2)), out, 0.0)]
        if later:
            seen.append(bench.call(later, state)[0])
        found = bench.projected(seen, mine)
        own = zip(op.inputs.values(), found[len(seen) :], strict=True)
        results.append(found[: len(seen)] + [g[mask] if s[:2] == "BT" else g for s, g in own])
    for junk in results[1:]:
        same_bits(results[0], junk)


@over(EXACT, only=lambda op: op.averages)
def test_a_query_without_sources_gets_zeros(bench):
    """The gradients are finite, and zero where nothing was seen."""
    T = 12
    mask = mask_of(bench, 2, T, [(0, 0, T), (1, 0, 5)])
    mine = [x.requires_grad_() for x in bench.inputs(2, T)]
    out, _ = bench.call(mine, key_mask=mask)
    assert not out[0].any() and (not out[1, :5].any() or not bench.op.past)
    assert out[1, 5:].abs().sum(-1).all()
    grads = torch.autograd.grad(out.square().sum(), mine)
    assert all(g.isfinite().all() for g in grads)
    for name, shape, g in bench.shaped(grads):
        if shape[:2] == "BT":
            assert not g[0].any(), name
            assert name in QUERIES or not g[1, :5].any(), name


@over(BITS)
def test_bounds_are_read_as_they_come(bench):
    """int32, int64, and every second number of a table: outputs and gradients to the bit."""
    whole = torch.tensor([0, 0, 3, 4, 11, 20], device=bench.device)
    table = torch.stack([whole, torch.full_like(whole, 7)], 1)
    N = len(whole) - 1
    goes_on = bench.op.state is not None and bench.op.packed_states
    inputs, state = bench.inputs(1, 20, N), bench.state(N) if goes_on else None
    options = {"output_final_state": goes_on}
    wanted = bench.results(inputs, state, cu_seqlens=whole.int(), **options)
    for cu in (whole, table[:, 0]):
        same_bits(bench.results(inputs, state, cu_seqlens=cu, **options), wanted)


@over({**EXACT, "cpu": [F64, F32]})
@pytest.mark.filterwarnings("ignore:All-NaN", "ignore:invalid value")
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_not_finite_stays_in_its_sequence_from_its_token_on(bench, packed):
    """Outputs, states, and the gradients of other sequences; for each input and state in turn."""
    op, T, at = bench.op, 9 if INTERPRETED else 23, 5
    bounds = [0, T - 3, 2 * T, 3 * T] if packed else None
    cu = None if bounds is None else torch.tensor(bounds, device=bench.device)
    B, N = (1, 3) if packed else (3, 3)
    inputs = bench.inputs(B, 3 * T if packed else T, N)
    goes_on = op.state is not None and (op.packed_states or not packed)
    state = bench.state(N) if goes_on else None
    options = {"cu_seqlens": cu, "output_final_state": goes_on}
    wanted = bench.results(inputs, state, **options)

    def part(shape, x, n, tokens=slice(None)):
        """What is sequence n's of a tensor, a view."""
        if shape[:2] == "BT" and bounds is not None:
            return x[:, bounds[n] : bounds[n + 1]][:, tokens]
        return x[n : n + 1, tokens] if shape[:2] == "BT" else x[n : n + 1]

    own = [name for name, shape in op.inputs.items() if shape[0] in "BN"]
    shapes = ["BT", *["N"] * len(leaves(bench.state(N) if goes_on else None))]
    outputs = len(shapes)
    shapes += [*op.inputs.values(), *shapes[1:]]
    values = itertools.cycle(
        [math.nan, math.inf] if INTERPRETED else [math.nan, math.inf, -math.inf]
    )
    for place in [*own, *range(outputs - 1)][:: 4 if INTERPRETED else 1]:
        bad, start = [x.clone() for x in inputs], [x.clone() for x in leaves(state)]
        value, first = next(values), 0
        if isinstance(place, int):
            part("N", start[place], 1)[:] = value
        else:
            number = list(op.inputs).index(place)
            tokens = op.inputs[place][:2] == "BT"
            first = at if tokens and op.past else 0
            if place in ("sink_k", "log_decay"):  # NaN: there is no such sink
                value = math.inf if place == "sink_k" else math.nan
            part(op.inputs[place], bad[number], 1, slice(at, at + 1))[:] = value
        found = bench.results(bad, with_leaves(state, start), **options)
        for i, (shape, a, b) in enumerate(zip(shapes, found, wanted, strict=True)):
            for n in (0, 2) if shape[0] in "BN" else ():
                assert_same([part(shape, a, n)], [part(shape, b, n)], tolerance(bench))
            if i == 0 and first and bench.backend != "triton":  # which has the tokens of a chunk
                past = slice(0, first)
                assert_same([part(shape, a, 1, past)], [part(shape, b, 1, past)], tolerance(bench))


@over({"torch": [F64], "cpu": [F64]})
@pytest.mark.parametrize("packed", [False, True])
def test_a_gradient_that_is_not_finite_stays_in_its_sequence(bench, packed):
    bounds = torch.tensor([0, 20, 43, 60]) if packed else None
    mine = [x.requires_grad_() for x in bench.inputs(1 if packed else 3, 60, 3)]
    out, _ = bench.call(mine, cu_seqlens=bounds)
    slopes = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=out.dtype)
    wanted = torch.autograd.grad(out, mine, slopes, retain_graph=True)
    slopes[(0, 30) if packed else (1, 30)] = math.nan
    found = torch.autograd.grad(out, mine, slopes)
    tokens = [*range(20), *range(43, 60)]
    for (_, shape, a), b in zip(bench.shaped(found), wanted, strict=True):
        if shape[0] in "BN":  # not what all sequences share
            by_token = packed and shape[:2] == "BT"
            others = (slice(None), tokens) if by_token else ([0, 2],)
            assert_same([a[others]], [b[others]], tolerance(bench))


# --- time, latents, heads -------------------------------------------------------------------------


@over({**BITS, "cpu": [F64, F32, BF16]}, only=lambda op: op.past)
@drawn
@given(cut=st.sampled_from([1, 31, 32, 63, 64, 65, 70, 128]) | st.integers(1, 129),
       bad=st.sampled_from([1.0, 90.0, 1e4, math.nan]),
       kind=SLOPES)  # fmt: skip
@example(cut=3, bad=1e4, kind="plain")
@example(cut=32, bad=1.0, kind="plain")
@example(cut=70, bad=math.nan, kind="rising apart")
def test_the_future_cannot_change_the_past(bench, cut, bad, kind):
    """Exactly: not even the rounding of the past may depend on what follows."""
    native, kernels = bench.backend == "cpu", bench.backend == "triton"
    T = length(bench) if kernels else 130
    cut = min(cut, T - 1)
    if math.isnan(bad) and kernels:
        bad = 1e3  # in a chunk Triton's kernels multiply what is masked by zeros
    inputs = bench.extreme(kind, T)
    with torch.no_grad():
        before, _ = bench.call(inputs)
        changed = bench.filled(inputs, (slice(None), slice(cut, None)), bad, queries=True)
        after, _ = bench.call(changed)
        assert torch.equal(before[:, :cut], after[:, :cut])
        assert not torch.equal(before[:, cut:], after[:, cut:])
        if native and cut > 1:  # one token is a step, which rounds in its own way
            shorter, _ = bench.call(bench.span(inputs, slice(0, cut)))
            assert torch.equal(shorter, before[:, :cut])


@over({"reference": [F64], "torch": [F64], "cpu": [F64, F32], "triton": [F32]},
      only=lambda op: op.latent_keys)  # fmt: skip
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_key_gradients_sum_to_zero(bench, scale):
    """Adding a constant to a latent's key logits changes nothing: sum_s dk_s[l] = 0."""
    mine = [x.requires_grad_() for x in bench.inputs(2, length(bench), scale=scale)]
    named = zip(bench.op.inputs, bench.projected(bench.call(mine)[0], mine)[1:], strict=True)
    dk = dict(named)[bench.op.latent_keys]
    assert dk.any() or scale > 1.0
    # In fp32 exp(k - A) sums to 1 as closely as it holds its argument.
    allowed = {F64: 1e-13, F32: 1e-5}[bench.dtype] * max(1.0, dk.abs().sum(1).max().item())
    assert dk.sum(1).abs().max() <= allowed * (scale if bench.dtype == F32 else 1.0)


@over(EXACT, only=lambda op: op.averages)
@pytest.mark.parametrize("scale", [1.0, 1.5e4])
def test_weights_sum_to_one(bench, scale):
    large = scale if "feature_map" not in bench.op.options else 1.0
    inputs = bench.inputs(2, length(bench), scale=large)
    ones = [torch.ones_like(x) if n in VALUES else x for n, _, x in bench.shaped(inputs)]
    out, _ = bench.call(ones)
    assert (out - 1).abs().max() <= tolerance(bench)


@over(EXACT, only=lambda op: "L" in "".join(op.inputs.values()))
def test_the_order_of_the_latents_does_not_matter(bench):
    """Values and gradients."""
    sized, order = bench.sized(L=5), [3, 0, 4, 1, 2]
    orders = {"L": order, "M": [0, *(i + 1 for i in order)]}
    inputs = sized.inputs(2, length(bench))
    out, *grads = sized.results(inputs)
    shuffled, *others = sized.results(sized.taken(inputs, **orders))
    assert_same([shuffled, *others], [out, *sized.taken(grads, **orders)], 10 * tolerance(bench))


@over({"reference": [F64], "torch": [F64], "cpu": [F64, F32, BF16]},
      only=lambda op: "H" in "".join(op.inputs.values()))  # fmt: skip
def test_heads_are_alone(bench):
    """In any order, and without the others; by the native kernels to the bit.

    They go through the longest sequences together.
    """
    sized = bench.sized(H=10, G=5, W=70)
    order = [3, 0, 4]
    heads = [2 * g + i for g in order for i in (0, 1)]
    taken = {"H": heads, "G": order if "G" in "".join(bench.op.inputs.values()) else heads}
    for T in (1, 70, 1100) if bench.backend == "cpu" else (1, 70):
        inputs = sized.inputs(1, T)
        with torch.no_grad():
            out, _ = sized.call(inputs)
            some, _ = sized.sized(H=6, G=3).call(sized.taken(inputs, **taken))
        assert_same([some], [out[:, :, heads]], 0.0 if bench.backend == "cpu" else 1e-12)


# --- how it is computed ---------------------------------------------------------------------------


def layouts(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same numbers, laid out in memory in other ways."""
    dims = list(reversed(range(x.ndim)))
    yield x.permute(dims).contiguous().permute(dims)
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), torch.nan)
    wide[..., 1::2] = x
    yield wide[..., 1::2]
    yield torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


@over({"torch": [F64], "cpu": [F32, BF16], "triton": [F32]})
def test_strides_do_not_matter(bench):
    """Values and gradients, to the bit; states too."""
    T = 20 if bench.backend == "triton" else 70
    # The total of decays, which a state has, is summed in the order of memory.
    carried = carries(bench.op) and "log_decay" not in bench.op.inputs
    inputs, state = bench.inputs(2, T), bench.state(2) if carried else None
    count = len(inputs)
    tensors = [*inputs, *leaves(state)]

    def results(how):
        mine = [x.detach().requires_grad_() for x in tensors]
        laid = mine if how is None else [list(layouts(x))[how] for x in mine]
        start = with_leaves(state, laid[count:])
        return bench.projected(bench.call(laid[:count], start, output_final_state=carried), mine)

    wanted = results(None)
    for how in range(3):
        found = results(how)
        if bench.backend == "torch":
            assert_same(found, wanted, 1e-12)
        else:
            same_bits(found, wanted)


@over({"cpu": [F32, BF16]})
@pytest.mark.parametrize(("B", "T", "counts"), [(3, 150, (1, 2, 3, 5, 1)), (2, 1100, (1, 4))])
def test_threads_and_old_memory_do_not_matter(bench, B, T, counts):
    """Values and gradients, to the bit, also where other heads go together."""
    sized, mask, results = bench.sized(H=5, G=5, E=150), key_mask(B, T), []
    inputs = sized.inputs(B, T)
    for count in counts:
        with threads(count):
            results.append(sized.results(inputs, key_mask=mask))
        _ = [torch.full_like(x, math.nan) for x in results[-1]]
    for other in results[1:]:
        same_bits(other, results[0])


@over({"torch": [F64]})
def test_empty_buffers_are_written_before_they_are_read(bench, monkeypatch):
    """Buffers from torch.empty are poisoned with NaN."""
    empty, empty_like, new_empty = torch.empty, torch.empty_like, torch.Tensor.new_empty
    calls = [bench.given(130, masked=True, packed=x, carried=True) for x in (False, True)]
    wanted = [bench.results(*inputs, **options) for *inputs, options in calls]

    def poison(x):
        return x.fill_(torch.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda self, *a, **k: poison(new_empty(self, *a, **k))
    )
    for (*inputs, options), results in zip(calls, wanted, strict=True):
        assert_same(bench.results(*inputs, **options), results, 0.0)


@over({"reference": [F32], "torch": [F32], "cpu": [F32]})
def test_autocast_changes_nothing(bench):
    """Sums stay in fp32 inside an autocast region."""
    results = []
    for enabled in (False, True):
        mine = [x.requires_grad_() for x in bench.inputs(2, 40)]
        with torch.autocast("cpu", dtype=BF16, enabled=enabled):
            out, _ = bench.call(mine)
        results.append(bench.projected(out, mine))
    assert results[1][0].dtype == F32
    assert_same(results[1], results[0], 1e-6)


@over({"torch": [F64], "cpu": [F64], "triton": [F32]})
def test_it_compiles_in_one_graph(bench):
    """Forward and backward; ``aot_eager`` traces all of it, and leaves out only the C++ step."""
    torch._dynamo.reset()
    op, T = bench.op, 8 if bench.backend == "triton" else 20
    packed = op.packed_states
    B, cu = (1, boundaries(T)) if packed else (2, None)
    N = B if cu is None else len(cu) - 1
    carried = carries(op)
    state, count = bench.state(N) if carried else None, len(op.inputs)
    options = {"key_mask": on_device(bench, key_mask(B, T)), "cu_seqlens": on_device(bench, cu)}
    mine = [x.requires_grad_() for x in (*bench.inputs(B, T, N), *leaves(state))]

    def fn(*xs):
        start = with_leaves(state, xs[count:])
        return bench.call(xs[:count], start, output_final_state=carried, **options)

    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    found, wanted = (bench.projected(run(*mine), mine) for run in (compiled, fn))
    assert_same(found, wanted, 1e-10 if bench.dtype == F64 else 1e-6)


# --- the weights, for looking at ------------------------------------------------------------------


def has_weights(op: Op) -> bool:
    """Whether the weights, for looking at, are those of this op."""
    plain = "sink_q" not in op.inputs and op.options.keys() <= {"causal"}
    return plain and op.latent_keys is not None


@over({"torch": [F64], "cpu": [F64]}, only=has_weights)
@pytest.mark.parametrize("packed", [False, True])
def test_weights_times_values_are_the_output(bench, packed):
    """Of packed sequences with bounds that have strides; and large logits are weights too."""
    cu, B = (boundaries(50).repeat_interleave(2)[::2].long(), 1) if packed else (None, 2)
    sequences = {"cu_seqlens": cu, "key_mask": key_mask(B, 50)}
    softcap = {"softcap": 3.0} if bench.op.local else {}
    local = {"window": 8} | softcap if bench.op.local else {}

    def weights(inputs, **options):
        logits = {name: x for name, _, x in bench.shaped(inputs) if name != "v"}
        if not bench.op.local:
            logits = {"latent_q": logits.pop("q"), "latent_k": logits.pop("k"), **logits}
        return attention_weights(**logits, **local, **bench.op.options, **options)

    inputs = bench.inputs(B, 50)
    (v,) = (x.repeat_interleave(2, 2) for name, _, x in bench.shaped(inputs) if name == "v")
    a = weights(inputs, **sequences)
    out, _ = bench.call(inputs, **softcap, **sequences)
    assert_same([torch.einsum("bhts,bshd->bthd", a, v)], [out], 1e-12)
    for scale in (1.0, 1.5e4):
        every = weights(bench.inputs(B, 50, scale=scale))
        assert (every.sum(-1) - 1).abs().max() < 1e-12 and every.min() >= 0
        assert torch.equal(every, every.tril()) or not bench.op.past
