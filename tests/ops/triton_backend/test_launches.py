"""What the ops launch compiles for sm_90 as it is launched, within its stack and shared memory.

    python -m tests.ops.triton_backend.test_launches [PART OF A NAME]   # what each kernel takes

Shapes: B batch, T tokens, H query heads, G key/value heads, L latents, K, D widths, N sequences.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from latte.ops import (  # noqa: E402
    LatteState,
    Partition,
    Sinks,
    WindowState,
    latte_attention,
    macchiato_attention,
    notices,
)
from latte.ops.triton_backend import launch  # noqa: E402
from tests.ops.triton_backend.descriptors import unproven  # noqa: E402
from tests.ops.triton_backend.launches import (  # noqa: E402
    BF16,
    COMMON,
    COMPILE,
    DTYPES,
    FP16,
    FP32,
    LATENTS,
    RARE,
    REACHED,
    Case,
    launching,
    name,
    run,
)
from tests.ops.triton_backend.machine_code import (  # noqa: E402
    CARDS,
    WALKS,
    Resources,
    carried_sums,
    disassembled,
    resources,
)

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)

SCANS = ("scan", "scan_back", "add_up")
BY_CHUNK = ("mixtures", "queries_ask", "mixture_gradients")
LATTE_WALKS = ("walk", "query_walk", "source_walk")
WINDOW = ("window_outputs", "window_query_gradients", "window_source_gradients")
EARLIER = "window_source_gradients_earlier"
SINKS = ("sink_gradients", "add_sinks")
KEPT = ("kept_outputs", "kept_query_gradients", "kept_source_gradients")
KEPT += ("kept_source_gradients_kept", "add_kept")
CHOICE = ("walk_choice", "join_choices")
LATE = ("late_sums", "late_gradients")
LRU_CHUNKS = ("ends", "carry", "apply", "ends_back", "apply_back")
LRU_WALKS = ("lru_walk", "lru_walk_back")
CONVOLUTION = ("convolve", "final_tail", "convolve_back", "tail_gradients")
ROWWISE = ("rotate_heads", "gated_product", "gated_product_back", "add_norm", "add_norm_back")
# Bytes of stack per thread that are let pass in the walks, most of them for tokens beyond reach, by
# dtype and latents up to, for Triton 3.7.1 and 3.8. `query_walk` takes the most in bf16 over few
# latents, 768 and 704 bytes, for latents that forget beside a window of wide heads: 13 to 15% of
# its instructions. With eight warps it would take 512, and all warps issue 1.8 times as many.
MOST = {
    BF16: {32: 336, 128: 416, 256: 832},
    FP16: {64: 128, 128: 704, 256: 1408},
    FP32: {64: 576, 128: 1280, 256: 2816},
}
MOST_UNEVEN = 1408
FORGETTING = 312  # more in each kernel, for latents that forget
FORGETTING_WIDE = 432  # the same for heads wider than 64
# In bf16, if 16 does not divide the width: 17% of the walk's instructions reach the stack.
FORGETTING_UNEVEN = 760
FAR = 128  # more in each kernel, for sinks, late latents and the joint softmax together


def most_stack(
    kernel: str, dtype: torch.dtype, L: int, D: int, beside: bool, cut: bool = False
) -> int:
    """Bytes of stack per thread that are let pass: most kernels need none.

    ``beside``: the latents beside a window, or the window beside latents. ``cut``: into segments,
    where ``query_walk`` sums what each asks of the state before it; 89 of its 1,754 instructions
    then reach the stack. Sizes that are multiples of nothing take more.
    """
    single, common = dtype == FP32, dtype == BF16 and L <= 32 and D <= 64
    uneven = bool(L % 16 and L > 1 or D % 16 and D > 1)
    if kernel in SCANS:
        return 32
    if kernel in BY_CHUNK and uneven and L > 128:
        # Each of the 32 elements that a thread loads of a state has an address of 64 bits.
        return 1120 if single else 360
    if kernel in BY_CHUNK and beside:
        return 640 if single else 96
    if kernel in BY_CHUNK and uneven and not single:
        return 160
    if kernel in BY_CHUNK:
        return (32 if L <= 32 else 256 if L <= 128 else 640) if single else 0 if L <= 64 else 96
    if kernel == "segment_sums":
        return 160 if uneven else 0
    if kernel in LATTE_WALKS:
        if uneven:
            return max(MOST_UNEVEN, MOST[dtype][256])
        most = next(most for latents, most in MOST[dtype].items() if L <= latents)
        return 128 if beside and common and not cut else most
    if kernel == "macchiato_walk":
        return 128 if common and not uneven else 1024 if dtype == BF16 else 4096
    if kernel in ("add_sinks", "add_kept", *CHOICE, *LATE):
        return 0
    if kernel in KEPT:
        return most_stack_of_kept(kernel, dtype, L, D)
    if kernel in (*WINDOW, EARLIER, SINKS[0]):
        if dtype != BF16:
            return 1600 if kernel == WINDOW[0] and D > 128 else 656
        if uneven and beside:
            return 392
        # Four warps and two blocks at a time: half the instructions, for a little stack.
        least = 104 if kernel in (WINDOW[2], EARLIER) else 16 if beside else 0
        return 200 if D > 64 else 112 if L > 32 else 64 if uneven else least
    if kernel == "step":
        return 8
    assert kernel in (*LRU_CHUNKS, *LRU_WALKS, *CONVOLUTION, *ROWWISE), kernel
    return 16 if kernel == ROWWISE[0] and uneven else 8 if kernel == LRU_WALKS[0] else 0


def most_stack_of_kept(kernel: str, dtype: torch.dtype, L: int, D: int) -> int:
    """:func:`most_stack` of the kernels of kept tokens."""
    single, sources = dtype == FP32, kernel.startswith("kept_source")
    if L > 128:
        return 1536  # means in tf32, which few threads share
    if kernel == "kept_outputs":
        return (192 if D > 128 else 128) if single else 0  # wide heads: 176 with Triton 3.7.1
    if L % 16 and L > 1 or D % 16 and D > 1:
        # In fp16 with Triton 3.8 8% of the instructions reach the stack.
        return 640 if single else 808 if dtype == FP16 else 376
    if single:
        return 640
    if D > 64 and dtype == FP16:  # Triton 3.8: at most 5% of them
        return 488 if D > 128 else 224
    return 160 if D > 64 else 104 if sources else 0


def compiling(launched: list[Resources], card: int) -> Any:
    """What to do instead of a launch: compile it, and add what it takes to ``launched``."""

    def compile_only(name: str, kernel: Any, args: Any, options: dict[str, Any]) -> None:
        compiled = COMPILE(kernel, *args, warmup=True, **options)
        launched.append(resources(name, compiled))
        assert name not in WALKS or carried_sums(compiled) == 0, name
        if card == launch.HOPPER and "wgmma" in compiled.asm["ptx"]:
            assert not (found := unproven(disassembled(compiled, "-c"))), f"{name}: {found}"

    return compile_only


def report(case: Case, card: int = launch.HOPPER) -> list[Resources]:
    """What the case launches."""
    launched: list[Resources] = []
    run(case, compiling(launched, card), card)
    return launched


def expected(case: Case) -> set[str]:
    """Kernels that the case is there for."""
    if case.op == "recurrent":
        return {*(LRU_CHUNKS if case.cut else LRU_WALKS)}
    if case.op == "rowwise":
        return {*ROWWISE}
    if case.op == "convolved":
        state = ("final_tail",) if case.taps > 1 else ()
        state += ("tail_gradients",) if state and case.kind != "plain" else ()
        return {"convolve", "convolve_back", *state}
    if case.kept:
        latents = {*LATE, "scan", "scan_back"} if case.op == "macchiato" else set()
        cut = case.sizes[1] > launch.SHORTEST_CHOICE * case.block
        return {*KEPT, *CHOICE[: 1 + cut]} | latents
    goes_on = case.kind != "plain" and not (case.joint and case.kind == "packed")
    earlier = {EARLIER} if case.causal and goes_on and not case.one else set()
    earlier |= {*SINKS} if case.sinks else set()
    if case.op == "window":
        return {*WINDOW} | earlier
    if not case.causal:
        back = (*WINDOW, *BY_CHUNK[1:]) if case.op == "macchiato" else BY_CHUNK
        return {"segment_sums", "scan", "add_up", *back}
    both = {"macchiato_walk", *WINDOW[1:]} | earlier
    forward = both if case.op == "macchiato" else {"walk"}
    return (
        forward
        | {*LATTE_WALKS[1:]}
        | ({"segment_sums", "scan", "scan_back"} if case.cut else set())
    )


SHAPES = [(16, 64, 64), (32, 96, 96), (256, 128, 128), (32, 256, 256), (16, 512, 512), (1, 5, 3)]
SHAPES += [(256, 512, 16), (256, 16, 512), (64, 64, 128), (128, 128, 64)]  # L, K, D of a step
CASES = [*COMMON, *(pytest.param(case, marks=pytest.mark.slow) for case in RARE)]


@pytest.mark.parametrize("case", CASES, ids=name)
def test_kernels_stay_within_their_bounds(case):
    """The ones that the case is there for, and no others."""
    launched = report(case)
    wide = FORGETTING_UNEVEN if case.D % 16 and case.dtype == BF16 else FORGETTING_WIDE
    more = (FORGETTING if case.D <= 64 else wide) if case.forgets else 0
    more += FAR if case.sinks or case.delay or case.joint else 0
    check(launched, case.dtype, case.L, case.D, case.op == "macchiato", case.cut, more)
    assert {r.kernel for r in launched} == expected(case)


def check(
    launched: list[Resources],
    dtype: torch.dtype,
    L: int,
    D: int,
    beside: bool,
    cut: bool = False,
    more: int = 0,
) -> None:
    for r in launched:
        most = most_stack(r.kernel, dtype, L, D, beside, cut) + more
        assert r.stack <= most, f"{r.kernel}: {r.stack} bytes of stack, {most} are let pass"
        assert r.shared <= launch.shared_memory(launch.HOPPER), (
            f"{r.kernel}: {r.shared} bytes of shared memory"
        )


# Elsewhere than on Hopper: default configurations, and those that took more than there was.
ELSEWHERE = [
    Case("latte", BF16),
    Case("latte", BF16, L=64, D=128),
    Case("latte", BF16, L=16, cut=True, forgets=True),
    Case("latte", BF16, L=64, causal=False),
    Case("latte", BF16, L=128, causal=False),
    Case("latte", BF16, L=256, causal=False),
    Case("latte", FP32, L=256, causal=False),
    Case("latte", FP32, L=256),
    Case("macchiato", BF16, softcap=20.0),
    Case("macchiato", FP32, L=16, D=256, causal=False),
    Case("window", BF16, D=128),
    Case("window", BF16, "state", D=256),
    Case("window", FP32, "state", D=256),
    Case("recurrent", BF16, "plain", D=48),
    Case("convolved", BF16, "plain", D=48),
    Case("rowwise", BF16, D=768),
]


@pytest.mark.parametrize("card", [card for card in CARDS if card != launch.HOPPER])
@pytest.mark.parametrize("case", ELSEWHERE, ids=name)
@pytest.mark.slow
def test_other_cards_have_room(case, card):
    """Shared memory as their makers say; of stack what rare tokens, and two blocks, may cost."""
    for r in report(case, card):
        assert r.shared <= launch.shared_memory(card) <= CARDS[card].shared_block, r
        single = 2400 if "walk" in r.kernel else 1600 if r.kernel == WINDOW[0] else 672
        assert r.stack <= (single if case.dtype == FP32 else 480), r


@pytest.mark.parametrize(
    "case",
    [
        Case("latte", BF16, forgets=True),
        Case("macchiato", BF16),
        Case("recurrent", BF16, "plain", D=48),
        Case("recurrent", BF16, "plain", D=48, cut=True),
    ],
    ids=name,
)
def test_what_is_no_number_stays_none(case):
    """A card's minimum drops a NaN, and a source or gate that is one would leave finite outputs."""
    kept: dict[str, bool] = {}
    run(case, keeping(kept), launch.HOPPER)
    bounded = {*LATTE_WALKS, "macchiato_walk", *LRU_CHUNKS, *LRU_WALKS} - {"carry"}
    assert kept.keys() & bounded == {kernel for kernel, has in kept.items() if has}


def test_a_step_keeps_what_is_no_number_too():
    """Else the state that it hands on is finite, and its mean is not."""
    kept: dict[str, bool] = {}
    steps(keeping(kept), BF16, 32, 96, 96, plain=False)
    assert kept == {"step": True}


def keeping(kept: dict[str, bool]) -> Any:
    """What to do instead of a launch: compile it, and see whether its minimum keeps a NaN."""

    def compile_only(name: str, kernel: Any, args: Any, options: dict[str, Any]) -> None:
        compiled = COMPILE(kernel, *args, warmup=True, **options)
        kept[name] = kept.get(name, True) and "min.NaN.f32" in compiled.asm["ptx"]

    return compile_only


def test_bidirectional_training_fits_consumer_cards():
    """Three tiles of D under way at a time are more than these have room for."""
    case, card = Case("latte", BF16, "plain", L=64, causal=False), 89
    assert all(r.shared <= launch.shared_memory(card) for r in report(case, card))


def steps(instead: Any, dtype: torch.dtype, L: int, K: int, D: int, plain: bool) -> None:
    """One token per sequence: without a window, with one, and as a converted layer calls it."""
    case, B, P, H, G = Case("step", dtype, L=L, D=D, K=K, one=plain), 3, 127, 4, 2
    if plain:
        B, P, H, G = 1, 1, 1, 1
    latte = [case.randn(B, 1, n, m) for n, m in ((H, L), (H, L), (G, D))]
    sizes = ((H, L + 1), (H, L), (H, K), (G, K), (G, D))
    macchiato = [case.randn(B, 1, n, m) for n, m in sizes]
    options: dict[str, Any] = {"backend": "triton", "output_final_state": True}
    options["key_mask"] = None if plain else torch.rand(B, 1) < 0.8
    latents = LatteState(torch.randn(B, H, L), torch.randn(B, H, L, D))
    keys, values = case.randn(B, P, G, K), case.randn(B, P, G, D)
    both = (latents, WindowState(keys, values, torch.ones(B, P, dtype=torch.bool)))
    softcap = None if plain else 20.0
    with launching(instead), torch.no_grad():
        latte_attention(*latte, initial_state=latents, **options)
        macchiato_attention(
            *macchiato, window=P + 1, softcap=softcap, initial_state=both, **options
        )
        slots = torch.ones(B, P + 1, dtype=torch.bool)
        late = WindowState(case.randn(B, P + 1, H, L), case.randn(B, P + 1, G, D), slots)
        n = 1 if plain else 4
        kept = case.randn(B, n, G, K), case.randn(B, n, G, D), torch.ones(B, n, dtype=torch.bool)
        options["partition"] = Partition(Sinks(case.randn(B, 1, H, K), *kept), True, True)
        macchiato_attention(
            *macchiato, window=P + 1, softcap=softcap, initial_state=(*both, late), **options
        )


@pytest.mark.parametrize(
    ("dtype", "L", "K", "D", "plain"),
    [(BF16, 32, 96, 96, False), (FP32, 1, 1, 1, True)]
    + [
        pytest.param(dtype, *shape, False, marks=pytest.mark.slow)
        for dtype in DTYPES
        for shape in SHAPES
        if (dtype, shape) != (BF16, (32, 96, 96))
    ],
)
def test_a_step_of_decoding(dtype, L, K, D, plain):
    """From its smallest tiles to its largest."""
    launched: list[Resources] = []
    steps(compiling(launched, launch.HOPPER), dtype, L, K, D, plain)
    check(launched[:2], dtype, L, D, True)
    check(launched[2:], dtype, L, D, True, more=24)
    assert [r.kernel for r in launched] == ["step"] * 3


def test_few_configurations_whatever_the_length():
    """Ten by chunk, for two sizes of element; eight walks at most for each dtype."""
    every = range(1, launch.MOST_LATENTS + 1)
    chosen = {launch.by_chunk(L, dtype) for L in every for dtype in DTYPES}
    assert len(chosen) == len(DTYPES) * len(LATENTS)
    assert all(c.C & (c.C - 1) == 0 and c.BL >= 16 for c in chosen)
    for dtype in DTYPES:
        reached = {launch.walking(L, D, dtype) for L, D in REACHED}
        widths = (1, 5, 72, 200, *range(16, launch.WIDEST_VALUE + 1, 16))
        assert reached == {launch.walking(L, D, dtype) for L in every for D in widths}
        assert len(reached) <= 8
        for table in (launch.BY_CHUNK, launch.WALKS, launch.MACCHIATO):
            assert tuple(table[dtype]) == LATENTS
        assert all(tuple(table) == LATENTS for table in launch.WINDOW[dtype])
    widths = (1, 64, 65, 256, 512)
    chosen = {
        (L, dtype == FP32, launch.window_tiles(L, X, X, dtype))
        for L in LATENTS
        for X in widths
        for dtype in DTYPES
    }
    assert len(chosen) == 27  # twelve of them for widths that are no multiple of 16


@pytest.mark.parametrize(
    ("version", "old"),
    [("12.8", True), ("12.8.93", True), ("12.9", False), ("13.1", False), (None, False)],
)
def test_an_old_assembler_is_named_once_on_hopper(monkeypatch, version, old):
    monkeypatch.setattr(launch, "assembler", lambda: version)
    monkeypatch.setattr(notices, "_given", set())
    hopper, cuda = launch.HOPPER, torch.device("cuda")
    for card, device in [(hopper, cuda), (hopper, cuda), (80, cuda), (hopper, torch.device("cpu"))]:
        monkeypatch.setattr(launch, "capability", lambda device, card=card: card)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            launch.warn_of_assembler.__wrapped__(device)
        assert [f"ptxas {version}" in str(w.message) for w in caught] == [True] * old
        old = False  # told once, and nowhere but on Hopper


def test_triton_says_which_assembler_it_uses():
    assert re.fullmatch(r"\d+\.\d+", launch.assembler())


def main(part: str = "") -> None:
    """One row for each kernel of the cases whose name holds ``part``."""
    print("| case | kernel: warps, registers / stack, bytes / shared, KB |")
    print("|---|---|")
    for case in [*COMMON, *RARE]:
        if part in name(case):
            launched = dict.fromkeys(report(case))
            cells = [
                f"`{r.kernel}` {r.warps}: {r.registers} / {r.stack} / {r.shared / 1024:.0f}"
                for r in launched
            ]
            print(f"| {name(case)} | {'; '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
