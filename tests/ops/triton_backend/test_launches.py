"""What the ops launch compiles for sm_90 as it is launched, within its stack and shared memory.

The ops run on CPU tensors up to the launch; Triton then binds and specialises the arguments, and
compiles, for a stand-in of a driver: neither a GPU nor a driver is needed. Nothing is executed, so
that results are whatever memory held.

    python tests/ops/triton_backend/test_launches.py [PART OF A NAME]   # what each kernel takes

Shapes: B batch, T tokens, H query heads, G key/value heads, L latents, K, D widths, N sequences.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from latte.ops import (  # noqa: E402
    LatteState,
    WindowState,
    causal_conv1d,
    latte_attention,
    macchiato_attention,
    rg_lru,
    sliding_window_attention,
)
from latte.ops.triton_backend import launch, recurrence, segments  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)
BF16, FP16, FP32 = DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_GRID = (2**31 - 1, 65535, 65535)
SHARED_LIMIT = 232448  # bytes that one block may use on sm_90
LATENTS = tuple(launch.BY_CHUNK[FP32])
# (L, D) that reach every configuration of the walks.
REACHED = [(16, 64), (16, 128), (32, 64), (32, 128), (64, 64), (128, 64), (256, 64)]

SCANS = ("scan", "scan_back", "add_up")
BY_CHUNK = ("mixtures", "queries_ask", "mixture_gradients")
WALKS = ("walk", "query_walk", "source_walk")
WINDOW = ("window_outputs", "window_query_gradients", "window_source_gradients")
EARLIER = "window_source_gradients_earlier"
LRU_CHUNKS = ("ends", "carry", "apply", "ends_back", "apply_back")
LRU_WALKS = ("lru_walk", "lru_walk_back")
CONVOLUTION = ("convolve", "final_tail", "convolve_back", "tail_gradients")
# Bytes of stack per thread that are let pass in the walks, most of them for tokens beyond reach, by
# dtype and latents up to. Both of Triton's supported versions stay below.
MOST = {
    BF16: {32: 320, 128: 416, 256: 832},
    FP16: {64: 128, 128: 704, 256: 1408},
    FP32: {64: 576, 128: 1280, 256: 2816},
}
MOST_UNEVEN = 1408


def most_stack(kernel: str, dtype: torch.dtype, L: int, D: int, beside: bool) -> int:
    """Bytes of stack per thread that are let pass: most kernels need none.

    ``beside``: the latents beside a window, or the window beside latents. Sizes that are multiples
    of nothing take more.
    """
    single, common = dtype == FP32, dtype == BF16 and L <= 32 and D <= 64
    uneven = bool(L % 16 and L > 1 or D % 16 and D > 1)
    if kernel in SCANS:
        return 32
    if kernel in BY_CHUNK and beside:
        return 640 if single else 96
    if kernel in BY_CHUNK:
        return (32 if L <= 32 else 256 if L <= 128 else 640) if single else 0 if L <= 64 else 96
    if kernel == "segment_sums":
        return 160 if uneven else 0
    if kernel in WALKS:
        if uneven:
            return max(MOST_UNEVEN, MOST[dtype][256])
        most = next(most for latents, most in MOST[dtype].items() if L <= latents)
        return 128 if beside and common else most
    if kernel == "macchiato_walk":
        return 128 if common and not uneven else 1024 if dtype == BF16 else 4096
    if kernel in (*WINDOW, EARLIER):
        if dtype != BF16:
            return 640
        if uneven and beside:
            return 320
        least = 16 if beside or kernel == EARLIER else 0
        return 96 if D > 64 or L > 32 else 64 if uneven else least
    assert kernel in (*LRU_CHUNKS, *LRU_WALKS, *CONVOLUTION, "step"), kernel
    return 0


class Resources(NamedTuple):
    """What one program of a launch takes."""

    kernel: str
    registers: int  # per thread
    stack: int  # bytes per thread
    shared: int  # bytes
    warps: int


class Hopper:
    """A driver of a GPU that is not there."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


COMPILED: dict[str, tuple[int, int]] = {}  # by hash of the compiled kernel: registers, stack


def resources(name: str, kernel: Any) -> Resources:
    """As the assembler reports them, once for each compiled kernel."""
    if kernel.hash not in COMPILED:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        assert found, usage
        COMPILED[kernel.hash] = int(found[1]), int(found[2])
    return Resources(
        name, *COMPILED[kernel.hash], kernel.metadata.shared, kernel.metadata.num_warps
    )


@contextmanager
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Resources]]:
    """The kernels that are launched, each of them compiled."""
    launches: list[Resources] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        name, sizes = self.__name__, tuple(grid)
        name += "_earlier" if options.get("EARLIER") else ""  # for the keys of the earlier state
        assert len(sizes) <= 3 and all(type(n) is int for n in sizes), (name, sizes)
        assert all(0 < n <= most for n, most in zip(sizes, LARGEST_GRID, strict=False)), sizes
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        launches.append(resources(name, kernel))

    previous = driver._active
    driver.set_active(Hopper())
    monkeypatch.setattr(JITFunction, "run", compile_only)
    served = launch.unavailable_for
    for name, module in list(sys.modules.items()):
        if name.startswith("latte.") and getattr(module, "unavailable_for", None) is served:
            monkeypatch.setattr(module, "unavailable_for", lambda x: None)
    yield launches
    driver.set_active(previous)


class Case(NamedTuple):
    """One call of an op, forward and backward."""

    op: str
    dtype: torch.dtype
    kind: str = "packed"  # with mask, bounds and state; "state": not packed; "plain": none of them
    L: int = 32
    D: int = 64
    causal: bool = True
    cut: bool = False  # into segments of one chunk; of the recurrence: a program per chunk
    softcap: float | None = None
    one: bool = False  # every size is 1, which Triton makes a constant that knows fewer operations
    strided: bool = False  # no address, size or stride of an input is a multiple of anything
    reverse: bool = False
    taps: int = 4
    K: int | None = None  # else D

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, T, H, G."""
        if self.one:
            return 1, 200 if self.cut else 1, 1, 1
        return 1 if self.kind == "packed" else 2, 200, 4, 2

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn((*shape[:-1], 2 * shape[-1] + 1) if self.strided else shape)
        x = x.to(dtype or self.dtype)
        return (x[..., 1::2] if self.strided else x).requires_grad_()

    def options(self) -> dict[str, Any]:
        """Mask, bounds, and whether a final state is wanted."""
        B, T, _, _ = self.sizes
        options: dict[str, Any] = {"backend": "triton"}
        if self.kind != "plain":
            options |= {"key_mask": torch.rand(B, T) < 0.8}
        if self.kind == "packed":
            options["cu_seqlens"] = torch.tensor([0, T // 3, T])
        return options

    def latents(self, N: int = 2) -> LatteState:
        _, _, H, _ = self.sizes
        mean = torch.randn(N, H, self.L, self.D).requires_grad_()
        return LatteState(torch.randn(N, H, self.L).requires_grad_(), mean)

    def local(self, window: int, N: int = 2) -> WindowState:
        _, _, _, G = self.sizes
        keys = self.randn(N, window - 1, G, self.K or self.D)
        values = self.randn(N, window - 1, G, self.D)
        return WindowState(keys, values, torch.ones(N, window - 1, dtype=torch.bool))


def latte(case: Case) -> tuple[Any, list[Tensor]]:
    B, T, H, G = case.sizes
    inputs = [case.randn(B, T, H, case.L) for _ in "qk"] + [case.randn(B, T, G, case.D)]
    options, state = case.options(), ()
    if case.causal and case.kind != "plain":
        options |= {"initial_state": (state := case.latents()), "output_final_state": True}
    return latte_attention(*inputs, causal=case.causal, **options), [*inputs, *state]


def macchiato(case: Case) -> tuple[Any, list[Tensor]]:
    B, T, H, G = case.sizes
    K, window = case.K or case.D, 1 if case.one else 33
    inputs = [case.randn(B, T, H, case.L + 1), case.randn(B, T, H, case.L), case.randn(B, T, H, K)]
    inputs += [case.randn(B, T, G, K), case.randn(B, T, G, case.D)]
    options, state = case.options(), ()
    if case.causal and case.kind != "plain":
        latents, local = case.latents(), case.local(window)
        options |= {"initial_state": (latents, local), "output_final_state": True}
        state = (*latents, local.keys, local.values)
    options |= {"window": window, "softcap": case.softcap, "causal": case.causal}
    return macchiato_attention(*inputs, **options), [*inputs, *state]


def window(case: Case) -> tuple[Any, list[Tensor]]:
    B, T, H, G = case.sizes
    K, window = case.K or case.D, 1 if case.one else 33
    inputs = [case.randn(B, T, H, K), case.randn(B, T, G, K), case.randn(B, T, G, case.D)]
    options, state = case.options(), ()
    if case.kind != "plain":
        options |= {"initial_state": (local := case.local(window)), "output_final_state": True}
        state = local[:2]
    options |= {"window": window, "softcap": case.softcap}
    return sliding_window_attention(*inputs, **options), [*inputs, *state]


def recurrent(case: Case) -> tuple[Any, list[Tensor]]:
    """The RG-LRU; D channels."""
    B, T, _, _ = case.sizes
    inputs = [case.randn(B, T, case.D) for _ in range(3)] + [torch.randn(case.D).requires_grad_()]
    options = case.options() | {"output_final_state": True, "reverse": case.reverse}
    if case.kind != "plain":
        options["initial_state"] = torch.randn(2, case.D).requires_grad_()
        inputs.append(options["initial_state"])
    return rg_lru(*inputs[:4], **options), inputs


def convolved(case: Case) -> tuple[Any, list[Tensor]]:
    """The convolution; D channels."""
    B, T, _, _ = case.sizes
    inputs = [case.randn(B, T, case.D), case.randn(case.D, case.taps), case.randn(case.D)]
    options = case.options() | {"output_final_state": True}
    if case.kind != "plain":
        options["initial_state"] = case.randn(2, case.taps - 1, case.D)
        inputs.append(options["initial_state"])
    return causal_conv1d(*inputs[:3], **options), inputs


OPS = {f.__name__: f for f in (latte, macchiato, window, recurrent, convolved)}


def differentiate(outputs: Any, inputs: list[Tensor]) -> None:
    """Through every output and every part of a state that has a gradient."""
    flat: list[Tensor] = []

    def visit(tree: Any) -> None:
        if isinstance(tree, Tensor):
            flat.extend([tree] if tree.requires_grad else [])
        else:
            for x in tree or ():
                visit(x)

    visit(outputs)
    torch.autograd.grad(flat, inputs, [torch.ones_like(x) for x in flat], allow_unused=True)


def expected(case: Case) -> set[str]:
    """Kernels that the case is there for."""
    if case.op == "recurrent":
        return {*(LRU_CHUNKS if case.cut else LRU_WALKS)}
    if case.op == "convolved":
        state = ("final_tail",) if case.taps > 1 else ()
        state += ("tail_gradients",) if state and case.kind != "plain" else ()
        return {"convolve", "convolve_back", *state}
    earlier = {EARLIER} if case.causal and case.kind != "plain" and not case.one else set()
    if case.op == "window":
        return {*WINDOW} | earlier
    if not case.causal:
        back = (*WINDOW, *BY_CHUNK[1:]) if case.op == "macchiato" else BY_CHUNK
        return {"segment_sums", "scan", "add_up", *back}
    both = {"macchiato_walk", *WINDOW[1:]} | earlier
    forward = both if case.op == "macchiato" else {"walk"}
    return forward | {*WALKS[1:]} | ({"segment_sums", "scan", "scan_back"} if case.cut else set())


def report(case: Case) -> list[Resources]:
    """What the case launches."""
    with pytest.MonkeyPatch.context() as patch, compiling(patch) as launched:
        patch.setattr(segments, "SHORTEST", 1 if case.cut else 10**6)
        patch.setattr(recurrence, "one_walk", lambda *_: not case.cut)
        differentiate(*OPS[case.op](case))
    return launched


def name(case: Case) -> str:
    """The op, and what differs from the defaults."""
    defaults = Case._field_defaults
    parts = [f"{k}={v}" for k, v in case._asdict().items() if k in defaults and v != defaults[k]]
    return "-".join([case.op, str(case.dtype).removeprefix("torch."), *parts])


COMMON = [
    Case("latte", BF16),
    Case("latte", BF16, cut=True),
    Case("latte", BF16, "plain", L=1, D=1, one=True),
    Case("latte", BF16, causal=False),
    Case("latte", BF16, "plain", L=1, D=1, causal=False, one=True),
    Case("latte", FP32, L=16, cut=True),
    Case("latte", FP32, L=16, causal=False),
    Case("macchiato", BF16, softcap=20.0),
    Case("macchiato", BF16, "plain", cut=True),
    Case("macchiato", BF16, softcap=20.0, causal=False),
    Case("window", BF16, softcap=20.0),
    Case("window", BF16, "plain", L=1, D=64, one=True),
    Case("recurrent", BF16, D=48, cut=True),
    Case("recurrent", FP32, "plain", D=48),
    Case("recurrent", BF16, "plain", D=1, one=True),
    Case("convolved", BF16, D=48),
    Case("convolved", FP32, "plain", D=48),
    Case("convolved", BF16, "plain", D=1, one=True),
]
SHAPES = [(16, 64, 64), (32, 96, 96), (256, 128, 128), (32, 256, 256), (16, 512, 512), (1, 5, 3)]
SHAPES += [(256, 512, 16), (256, 16, 512), (64, 64, 128), (128, 128, 64)]  # L, K, D of a step


def rare() -> Iterator[Case]:
    """Every configuration; launches without mask, packing and state; odd and strided inputs."""
    for dtype in DTYPES:
        for L, D in REACHED:
            yield Case("latte", dtype, L=L, D=D)
            yield Case("latte", dtype, L=L, D=D, cut=True)
            yield Case("latte", dtype, "plain", L=L, D=D)
        for L in LATENTS:
            yield Case("latte", dtype, L=L, causal=False)
            yield Case("macchiato", dtype, L=L, softcap=20.0, causal=False)
            for D in (64, 128):
                yield Case("macchiato", dtype, L=L, D=D, softcap=20.0)
        for kind in ("plain", "state", "packed"):
            for L, D in [(16, 96), (3, 5), (200, 300)]:
                yield Case("latte", dtype, kind, L, D, cut=True)
                yield Case("latte", dtype, kind, L, D, causal=False)
            for L, D in [(16, 96), (3, 5), (130, 200)]:
                yield Case("macchiato", dtype, kind, L, D, cut=True, softcap=30.0)
                yield Case("macchiato", dtype, kind, L, D, causal=False, softcap=30.0)
            yield Case("recurrent", dtype, kind, D=48, cut=True)
            yield Case("convolved", dtype, kind, D=48)
            if kind != "packed":
                yield Case("recurrent", dtype, kind, D=48)
        yield Case("latte", dtype, L=31, D=63, strided=True)
        for D in (64, 128):
            yield Case("window", dtype, D=D, softcap=20.0)
        yield Case("window", dtype, "plain")
    yield Case("latte", BF16, "plain", cut=True)
    yield Case("latte", BF16, "plain", L=1, D=1, cut=True, one=True)
    yield Case("macchiato", BF16, cut=True, softcap=20.0)
    yield Case("macchiato", BF16, "plain", L=1, D=1, one=True)
    for D in (5, 256):
        yield Case("window", BF16, D=D, softcap=20.0)
    for cut in (False, True):
        kind = "packed" if cut else "state"
        yield Case("recurrent", BF16, kind, D=48, cut=cut, reverse=True)
        yield Case("recurrent", FP32, kind, D=48, cut=cut, strided=True)
        yield Case("recurrent", FP32, "plain", D=1, cut=cut, one=True, reverse=True)
    for taps in (1, 2, 3, 9):
        yield Case("convolved", BF16, D=48, taps=taps)


RARE = [case for case in dict.fromkeys(rare()) if case not in COMMON]
CASES = [*COMMON, *(pytest.param(case, marks=pytest.mark.slow) for case in RARE)]


@pytest.mark.parametrize("case", CASES, ids=name)
def test_kernels_stay_within_their_bounds(case):
    """The ones that the case is there for, and no others."""
    launched = report(case)
    check(launched, case.dtype, case.L, case.D, case.op == "macchiato")
    assert {r.kernel for r in launched} == expected(case)


def check(launched: list[Resources], dtype: torch.dtype, L: int, D: int, beside: bool) -> None:
    for r in launched:
        most = most_stack(r.kernel, dtype, L, D, beside)
        assert r.stack <= most, f"{r.kernel}: {r.stack} bytes of stack, {most} are let pass"
        assert r.shared <= SHARED_LIMIT, f"{r.kernel}: {r.shared} bytes of shared memory"


def steps(dtype: torch.dtype, L: int, K: int, D: int, plain: bool) -> list[Resources]:
    """One token per sequence, with and without a window."""
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
    with pytest.MonkeyPatch.context() as patch, compiling(patch) as launched, torch.no_grad():
        latte_attention(*latte, initial_state=latents, **options)
        macchiato_attention(
            *macchiato, window=P + 1, softcap=softcap, initial_state=both, **options
        )
    return launched


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
    launched = steps(dtype, L, K, D, plain)
    check(launched, dtype, L, D, True)
    assert [r.kernel for r in launched] == ["step", "step"]


def test_few_configurations_whatever_the_length():
    """Ten by chunk, for two sizes of element; seven walks at most for each dtype."""
    every = range(1, launch.MOST_LATENTS + 1)
    chosen = {launch.by_chunk(L, dtype) for L in every for dtype in DTYPES}
    assert len(chosen) == len(DTYPES) * len(LATENTS)
    assert all(c.C & (c.C - 1) == 0 and c.BL >= 16 for c in chosen)
    for dtype in DTYPES:
        reached = {launch.walking(L, D, dtype) for L, D in REACHED}
        widths = (1, 5, *range(16, launch.WIDEST_VALUE + 1, 16))
        assert reached == {launch.walking(L, D, dtype) for L in every for D in widths}
        assert len(reached) <= 7
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
    assert len(chosen) == 13


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
