"""The ops' launches for a GPU that is not there: bound, specialised and compiled as they would be.

The ops run on CPU tensors up to the launch; Triton then binds and specialises the arguments, and
compiles, for a stand-in of a driver: neither a GPU nor a driver is needed. Nothing is executed, so
that results are whatever memory held.

Shapes: B batch, T tokens, H query heads, G key/value heads, L latents, K, D widths, N sequences.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from latte.ops import (
    Kept,
    LatteState,
    Partition,
    Sinks,
    WindowState,
    causal_conv1d,
    latte_attention,
    macchiato_attention,
    pointwise,
    rg_lru,
    sliding_window_attention,
    use_backend,
)
from latte.ops.torch_backend.kept_plan import ChoiceCall
from latte.ops.triton_backend import launch, recurrence, segments

BF16, FP16, FP32 = DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_GRID = (2**31 - 1, 65535, 65535)
LATENTS = tuple(launch.BY_CHUNK[FP32])
COMPILE = JITFunction.run  # which with warmup=True launches nothing
# (L, D) that reach every configuration of the walks.
REACHED = [
    (1, 64),
    (16, 64),
    (16, 72),
    (16, 128),
    (32, 64),
    (32, 72),
    (32, 128),
    (64, 64),
    (128, 64),
    (256, 64),
]


class Card:
    """A driver of a GPU that is not there, of this compute capability, 90 for 9.0."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps what it compiles by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


@contextmanager
def launching(instead: Callable[..., None], capability: int = 90) -> Iterator[pytest.MonkeyPatch]:
    """The ops run up to their launches, and ``instead`` gets those.

    It is called with a kernel's name, the kernel, its arguments, and its options with the grid.
    """

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        name, sizes = self.__name__, tuple(grid)
        name += "_earlier" if options.get("EARLIER") else ""  # for the keys of the earlier state
        name += "_kept" if options.get("KEPT") else ""  # for those of kept tokens
        assert len(sizes) <= 3 and all(type(n) is int for n in sizes), (name, sizes)
        assert all(0 < n <= most for n, most in zip(sizes, LARGEST_GRID, strict=False)), sizes
        instead(name, self, args, options | {"grid": grid})

    previous = driver._active
    driver.set_active(Card(capability))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        for name, module in list(sys.modules.items()):
            if name.startswith("latte.") and hasattr(module, "capability"):
                patch.setattr(module, "capability", lambda device: capability)
        served = launch.unavailable_for
        for name, module in list(sys.modules.items()):
            if name.startswith("latte.") and getattr(module, "unavailable_for", None) is served:
                patch.setattr(module, "unavailable_for", lambda x: None)
        # Slots are indices, so that they must not be what memory held.
        empty = ChoiceCall.buffers
        patch.setattr(ChoiceCall, "buffers", lambda x: tuple(y.zero_() for y in empty(x)))
        yield patch
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
    T: int = 200
    heads: tuple[int, int] = (4, 2)
    window: int = 33
    forgets: bool = False  # the latents
    sinks: int = 0
    delay: bool = False
    joint: bool = False
    kept: int = 0  # tokens
    block: int = 64  # from one update of them to the next

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, T, H, G."""
        if self.one:
            return 1, 200 if self.cut else 1, 1, 1
        return 1 if self.kind == "packed" else 2, self.T, *self.heads

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

    def decays(self, options: dict[str, Any]) -> tuple[Tensor, ...]:
        """What the latents forget, which is added to the options, if they do."""
        if not self.forgets:
            return ()
        B, T, H, _ = self.sizes
        g = -self.randn(B, T, H, self.L, dtype=torch.float32).detach().abs()
        options["log_decay"] = g.requires_grad_()
        return (g,)

    def latents(self, N: int = 2) -> LatteState:
        _, _, H, _ = self.sizes
        mean = torch.randn(N, H, self.L, self.D).requires_grad_()
        return LatteState(torch.randn(N, H, self.L).requires_grad_(), mean)

    def far(self, K: int) -> Sinks | None:
        """Sinks whose queries, keys and values have gradients."""
        if not self.sinks:
            return None
        B, T, H, G = self.sizes
        N, n = (B if self.kind != "packed" else 2), self.sinks
        keys, values = self.randn(N, n, G, K), self.randn(N, n, G, self.D)
        mask = torch.ones(N, n, dtype=torch.bool)
        return Sinks(self.randn(B, T, H, K), keys, values, mask, None)

    def chosen(self) -> Kept | None:
        """Kept tokens."""
        B, T, _, G = self.sizes
        return Kept(torch.randn(B, T, G), self.kept, self.block) if self.kept else None

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
    state = (*state, *case.decays(options))
    return latte_attention(*inputs, causal=case.causal, **options), [*inputs, *state]


def macchiato(case: Case) -> tuple[Any, list[Tensor]]:
    B, T, H, G = case.sizes
    K, window = case.K or case.D, 1 if case.one else case.window
    inputs = [case.randn(B, T, H, case.L + 1), case.randn(B, T, H, case.L), case.randn(B, T, H, K)]
    inputs += [case.randn(B, T, G, K), case.randn(B, T, G, case.D)]
    options, state = case.options(), ()
    if case.causal and case.kind != "plain":
        latents, local = case.latents(), case.local(window)
        # Packed sequences whose window's mass is wanted carry on one by one.
        if not (case.joint and case.kind == "packed" or case.kept):
            both = (latents, local)
            if case.delay:
                keys, values = case.randn(2, window, H, case.L), case.randn(2, window, G, case.D)
                pending = WindowState(keys, values, torch.ones(2, window, dtype=torch.bool))
                both = (*both, pending)
            options |= {"initial_state": both}
            state = (*latents, local.keys, local.values)
        options["output_final_state"] = True
    sinks = case.far(K)
    state = (*state, *(sinks[:3] if sinks else ()))
    options |= {"window": window, "softcap": case.softcap, "causal": case.causal}
    options["partition"] = Partition(sinks, case.delay, case.joint, case.chosen())
    state = (*state, *case.decays(options))
    return macchiato_attention(*inputs, **options), [*inputs, *state]


def window(case: Case) -> tuple[Any, list[Tensor]]:
    B, T, H, G = case.sizes
    K, window = case.K or case.D, 1 if case.one else case.window
    inputs = [case.randn(B, T, H, K), case.randn(B, T, G, K), case.randn(B, T, G, case.D)]
    options, state = case.options(), ()
    if case.kind != "plain" and not case.kept:
        options |= {"initial_state": (local := case.local(window)), "output_final_state": True}
        state = local[:2]
    sinks = case.far(K)
    state = (*state, *(sinks[:3] if sinks else ()))
    options |= {"window": window, "softcap": case.softcap}
    options["partition"] = Partition(sinks, kept=case.chosen())
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


def rowwise(case: Case) -> tuple[Any, list[Tensor]]:
    """The pointwise kernels, with D for every width, of heads up to the widest."""
    (B, T, H, G), K = case.sizes, min(case.D, launch.WIDEST_VALUE)
    shapes = [(B, T, H, K), (B, T, G, K), *[(B, T, case.D)] * 4, (case.D,)]
    q, k, gate, up, x, added, weight = inputs = [case.randn(*shape) for shape in shapes]
    table = torch.randn(1 if case.kind == "plain" else B, T, 1, K // 2)
    with use_backend("triton"):
        turned = pointwise.rotate_both(q, k, table, table)
        product = pointwise.silu_product(gate, up)
        return (turned, product, pointwise.add_rms_norm(x, added, weight, 1e-6)), inputs


OPS = {f.__name__: f for f in (latte, macchiato, window, recurrent, convolved, rowwise)}


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


def run(case: Case, instead: Callable[..., None], capability: int = 90) -> None:
    """The case, forward and backward, up to its launches: :func:`launching`."""
    with launching(instead, capability) as patch:
        patch.setattr(segments, "SHORTEST", 1 if case.cut else 10**6)
        patch.setattr(recurrence, "one_walk", lambda *_: not case.cut)
        differentiate(*OPS[case.op](case))


def name(case: Case) -> str:
    """The op, and what differs from the defaults."""
    defaults = Case._field_defaults
    parts = [f"{k}={v}" for k, v in case._asdict().items() if k in defaults and v != defaults[k]]
    return "-".join([case.op, str(case.dtype).removeprefix("torch."), *parts])


FAR: dict[str, Any] = {"sinks": 4, "delay": True, "joint": True}
KEPT = FAR | {"kept": 64}
COMMON = [
    Case("latte", BF16),
    Case("latte", BF16, cut=True),
    Case("latte", BF16, "plain", L=1, D=1, one=True),
    Case("latte", BF16, causal=False),
    Case("latte", BF16, "plain", L=1, D=1, causal=False, one=True),
    Case("latte", BF16, "plain", L=3, D=72, cut=True),  # rows that are not loaded ahead as they are
    Case("latte", FP32, L=16, cut=True),
    Case("latte", FP32, L=16, causal=False),
    Case("latte", BF16, cut=True, forgets=True),
    Case("macchiato", BF16, softcap=20.0),
    Case("macchiato", BF16, "plain", cut=True),
    Case("macchiato", BF16, softcap=20.0, causal=False),
    Case("macchiato", BF16, "state", L=16, heads=(9, 3), sinks=4, delay=True, joint=True),
    Case("macchiato", BF16, "plain", L=16, D=96, causal=False),  # products over 16 latents
    Case("macchiato", FP32, "plain", L=3, D=5, causal=False),
    Case("macchiato", BF16, "plain", D=128, forgets=True),
    Case("macchiato", BF16, "plain", L=16, heads=(9, 3), window=128, **KEPT),
    Case("window", BF16, "plain", D=256, sinks=4),  # Gemma's width of a head
    Case("window", BF16, softcap=20.0),
    Case("window", BF16, "plain", L=1, D=64, one=True),
    Case("recurrent", BF16, D=48, cut=True),
    Case("recurrent", FP32, "plain", D=48),
    Case("recurrent", BF16, "plain", D=1, one=True),
    Case("convolved", BF16, D=48),
    Case("convolved", FP32, "plain", D=48),
    Case("convolved", BF16, "plain", D=1, one=True),
    Case("rowwise", BF16, D=768),
    Case("rowwise", FP32, "plain", D=48),
    Case("rowwise", BF16, "plain", D=2, one=True),
]


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
            for L, D in [(16, 96), (3, 5), (32, 100), (200, 300)]:
                yield Case("latte", dtype, kind, L, D, cut=True)
                yield Case("latte", dtype, kind, L, D, cut=True, forgets=True)
                yield Case("latte", dtype, kind, L, D, causal=False)
            for L, D in [(16, 96), (3, 5), (130, 200)]:
                yield Case("macchiato", dtype, kind, L, D, cut=True, softcap=30.0)
                yield Case("macchiato", dtype, kind, L, D, causal=False, softcap=30.0)
            yield Case("recurrent", dtype, kind, D=48, cut=True)
            yield Case("convolved", dtype, kind, D=48)
            yield Case("rowwise", dtype, kind, D=50, strided=True)
            if kind != "packed":
                yield Case("recurrent", dtype, kind, D=48)
        for L, D in REACHED:
            yield Case("latte", dtype, L=L, D=D, cut=True, forgets=True)
        for L in LATENTS:
            for D in (64, 128):
                yield Case("macchiato", dtype, L=L, D=D, cut=True, softcap=20.0, forgets=True)
        yield Case("latte", dtype, L=31, D=63, strided=True)
        for L in LATENTS:
            for D in (64, 128, 256):
                yield Case("macchiato", dtype, L=L, D=D, softcap=20.0, **FAR)
        for L, D in [(16, 64), (64, 64), (32, 128), (256, 64), (3, 5)]:
            yield Case("macchiato", dtype, "plain", L=L, D=D, softcap=20.0, **KEPT)
        yield Case("macchiato", dtype, forgets=True, **KEPT)
        for D in (64, 256):
            yield Case("window", dtype, D=D, kept=64)
        yield Case("macchiato", dtype, "plain", L=3, D=5, cut=True, **FAR)
        yield Case("macchiato", dtype, "state", L=16, D=96, cut=True, **FAR)
        yield Case("macchiato", dtype, "plain", cut=True, forgets=True, **FAR)
        for one in FAR:
            yield Case("macchiato", dtype, "plain", **{one: FAR[one]})
        for D in (64, 128, 256):
            yield Case("window", dtype, D=D, softcap=20.0)
            yield Case("window", dtype, D=D, softcap=20.0, sinks=4)
        for D in (80, 256):
            yield Case("macchiato", dtype, "plain", L=16, D=D, causal=False)
        yield Case("window", dtype, "plain")
    yield Case("latte", BF16, "plain", cut=True)
    yield Case("latte", BF16, "plain", L=1, D=1, cut=True, one=True)
    yield Case("macchiato", BF16, cut=True, softcap=20.0)
    yield Case("macchiato", BF16, "plain", L=1, D=1, one=True)
    yield Case("macchiato", BF16, "plain", L=1, D=1, one=True, **(FAR | {"sinks": 1}))
    yield Case("macchiato", BF16, strided=True, L=31, D=63, **FAR)
    yield Case("macchiato", BF16, "plain", L=31, D=63, strided=True, **KEPT)
    one_kept = KEPT | {"sinks": 1, "kept": 1, "block": 1}
    yield Case("macchiato", BF16, "plain", L=1, D=1, one=True, **one_kept)
    for D in (5, 256):
        yield Case("window", BF16, D=D, softcap=20.0)
    for cut in (False, True):
        kind = "packed" if cut else "state"
        yield Case("recurrent", BF16, kind, D=48, cut=cut, reverse=True)
        yield Case("recurrent", FP32, kind, D=48, cut=cut, strided=True)
        yield Case("recurrent", FP32, "plain", D=1, cut=cut, one=True, reverse=True)
    for dtype in DTYPES:
        yield Case("rowwise", dtype, D=launch.WIDEST_NORM)
    for taps in (1, 2, 3, 9):
        yield Case("convolved", BF16, D=48, taps=taps)


RARE = [case for case in dict.fromkeys(rare()) if case not in COMMON]
