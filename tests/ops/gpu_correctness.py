"""Are the kernels right on this GPU? One line for each check, all of them run, exit code 1 if any
failed.

What is exact comes from fp64: the equations in O(T^2) at 777 tokens, the PyTorch backend in fp64
beyond. A result may err at most twice what the equations (or the PyTorch backend) in the same
precision err; the floor of a few ulps is for where those are exact by luck. Laws need no judge.

    python tests/ops/gpu_correctness.py [GROUP...] [--quick] [--out DIR] [--device DEVICE]

Shape suffixes: B batch, T tokens, H query heads, G key/value heads, L latents per head, K key
width, D value width, E channels, N states.

A group is an op and a dtype, ``latte:bfloat16``, or ``huge``: more than 2^31 elements. Without
groups all of them run, one after another; ``benchmarks/gpu_check.py`` starts each in a process of
its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # a script beside scripts

from gpu_common import Place, forget, options, place, reason, stop_if_broken
from records import say
from torch import Tensor, nn

from latte.ops import (
    LatteState,
    Sinks,
    WindowState,
    causal_conv1d,
    latte_attention,
    macchiato_attention,
    rg_lru,
    sliding_window_attention,
)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SIZES = {"H": 8, "G": 8, "L": 32, "K": 64, "D": 64, "E": 1024, "taps": 3}
# Other widths, fewer key/value heads, the smallest padded sizes.
OTHERS = (
    {"H": 8, "G": 2, "L": 16, "K": 128, "D": 128, "E": 768, "taps": 4},
    {"H": 4, "G": 4, "L": 64, "K": 64, "D": 256, "E": 2560, "taps": 2},
    {"H": 3, "G": 1, "L": 3, "K": 40, "D": 72, "E": 100, "taps": 3},
)
QUICK = {"H": 2, "G": 1, "L": 3, "K": 8, "D": 5, "E": 12, "taps": 3}
MODERATE, LONG = 777, 65536
HUGE = 2**31 + 2**24  # elements of the largest input
STATE_ERROR = {torch.bfloat16: 2e-3, torch.float16: 1e-3}  # of an fp32 state, relative
TAIL = 4096  # tokens of the huge check that are computed again from the state before them


# --- the ops: their inputs, a call of each, and what they promise --------------------------------

WINDOW = 128
# With sinks, and late latents: no multiple of a chunk, and short enough for a quick run.
FAR_WINDOW, SINKS = 50, 4
Sizes = dict[str, int]
Normal = Callable[..., Tensor]  # (*shape) -> standard normal numbers


@dataclass(frozen=True)
class Case:
    """One op: ``run(*make(...), **options)`` gives the output and the state.

    ``values``: which input is averaged, so that ones in give ones out (those before are logits);
    ``sources``: which input's gradient sums to zero over the tokens; ``tokens``: how many inputs
    have tokens (the rest are parameters); ``past``: whether an output depends on earlier tokens
    alone; ``far_values``: a second input that is averaged; ``packed_states``: whether packed
    sequences take states.
    """

    run: Callable[..., tuple[Tensor, Any]]
    make: Callable[[Normal, int, int, Sizes], list[Tensor]]
    state: Callable[[Normal, int, Sizes], Any]
    tokens: int
    values: int | None = None
    sources: int | None = None
    past: bool = True
    far_values: int | None = None
    packed_states: bool = True
    options: dict[str, Any] = field(default_factory=dict)


def _latte(normal: Normal, B: int, T: int, s: Sizes) -> list[Tensor]:
    return [normal(B, T, s["H"], n) for n in (s["L"], s["L"], s["D"])]


def _latte_state(normal: Normal, N: int, s: Sizes) -> LatteState:
    return LatteState(normal(N, s["H"], s["L"]).float(), normal(N, s["H"], s["L"], s["D"]).float())


def _local(normal: Normal, B: int, T: int, s: Sizes) -> list[Tensor]:
    return [normal(B, T, s[h], s[n]) for h, n in (("H", "K"), ("G", "K"), ("G", "D"))]


def _local_state(normal: Normal, N: int, s: Sizes) -> WindowState:
    k, v = (normal(N, WINDOW - 1, s["G"], s[n]) for n in ("K", "D"))
    return WindowState(k, v, torch.ones_like(k[:, :, 0, 0], dtype=torch.bool))


def _macchiato(normal: Normal, B: int, T: int, s: Sizes) -> list[Tensor]:
    latent = [normal(B, T, s["H"], s["L"] + 1), normal(B, T, s["H"], s["L"])]
    return [*latent, *_local(normal, B, T, s)]


def _macchiato_state(normal: Normal, N: int, s: Sizes) -> Any:
    return _latte_state(normal, N, s), _local_state(normal, N, s)


def _rg_lru(normal: Normal, B: int, T: int, s: Sizes) -> list[Tensor]:
    return [*(normal(B, T, s["E"]) for _ in range(3)), normal(s["E"]) - 4.0]


def _conv(normal: Normal, B: int, T: int, s: Sizes) -> list[Tensor]:
    return [normal(B, T, s["E"]), normal(s["E"], s["taps"]), normal(s["E"])]


def _tail(normal: Normal, N: int, s: Sizes) -> Tensor:
    return normal(N, s["taps"] - 1, s["E"])


def _with_decays(normal: Normal, B: int, T: int, s: Sizes) -> list[Tensor]:
    """And the gates that the latents' decays are made of."""
    return [*_latte(normal, B, T, s), normal(B, T, s["H"], s["L"])]


def _mixed_with_decays(normal: Normal, B: int, T: int, s: Sizes) -> list[Tensor]:
    return [*_macchiato(normal, B, T, s), normal(B, T, s["H"], s["L"])]


def forgetting(op: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
    """The op whose last input are gates: its latents forget a tenth a token on average."""

    def run(*inputs: Tensor, **options: Any) -> tuple[Tensor, Any]:
        *others, u = inputs
        wide = u if u.dtype == torch.float64 else u.float()
        return op(*others, log_decay=nn.functional.logsigmoid(3.0 + 1.5 * wide), **options)

    return run


def _sinks(normal: Normal, B: int, T: int, s: Sizes) -> list[Tensor]:
    """Queries, then keys and values that all sequences share."""
    q, *kept = (normal(1, SINKS, s["G"], s[n]) for n in ("K", "K", "D"))
    return [normal(B, T, s["H"], s["K"]), *kept]


def _local_with_sinks(normal: Normal, B: int, T: int, s: Sizes) -> list[Tensor]:
    return [*_local(normal, B, T, s), *_sinks(normal, B, T, s)]


def _converted(normal: Normal, B: int, T: int, s: Sizes) -> list[Tensor]:
    return [*_macchiato(normal, B, T, s), *_sinks(normal, B, T, s)]


def _tail_of(normal: Normal, shapes: Sequence[tuple[int, ...]]) -> WindowState:
    k, v = (normal(*shape) for shape in shapes)
    return WindowState(k, v, torch.ones(k.shape[:2], dtype=torch.bool, device=k.device))


def _far_window_state(normal: Normal, N: int, s: Sizes) -> Any:
    """A window's tail, and that 100 tokens have been read before it."""
    tail = _tail_of(normal, [(N, FAR_WINDOW - 1, s["G"], s[n]) for n in ("K", "D")])
    return tail, torch.full((N,), 100, device=tail.keys.device)


def _converted_state(normal: Normal, N: int, s: Sizes) -> Any:
    """Latents, tail and pending sources, and that 100 tokens have been read before them."""
    tail, position = _far_window_state(normal, N, s)
    pending = [(N, FAR_WINDOW, s["H"], s["L"]), (N, FAR_WINDOW, s["G"], s["D"])]
    return (_latte_state(normal, N, s), tail, _tail_of(normal, pending)), position


def with_sinks(op: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
    """The op whose last inputs are the sinks' queries, keys and values.

    Its state is the op's, and how many tokens were read.
    """

    def run(*inputs: Tensor, **options: Any) -> tuple[Tensor, Any]:
        *others, q, keys, values = inputs
        cu, mask = options.get("cu_seqlens"), options.get("key_mask")
        N, (B, T) = q.shape[0] if cu is None else len(cu) - 1, q.shape[:2]
        keys, values = (x.expand(N, -1, -1, -1) for x in (keys, values))
        state, position = options.pop("initial_state", None) or (None, None)
        flags = torch.ones(N, SINKS, dtype=torch.bool, device=q.device)
        sinks = Sinks(q, keys, values, flags, position)
        out, state = op(*others, sinks=sinks, initial_state=state, **options)
        if state is None or cu is not None:
            return out, () if state is None else state
        read = torch.full((B,), T, device=q.device) if mask is None else mask.sum(1)
        return out, (state, read if position is None else position + read)

    return run


ALL_THREE = {"window": FAR_WINDOW, "delay": True, "joint": True}
CASES = {
    "latte": Case(latte_attention, _latte, _latte_state, 3, values=2, sources=1),
    "forgetting": Case(
        forgetting(latte_attention), _with_decays, _latte_state, 4, values=2, sources=1
    ),
    "bidirectional": Case(
        latte_attention,
        _latte,
        _latte_state,
        3,
        values=2,
        sources=1,
        past=False,
        options={"causal": False},
    ),
    "macchiato": Case(
        macchiato_attention,
        _macchiato,
        _macchiato_state,
        5,
        values=4,
        sources=1,
        options={"window": WINDOW},
    ),
    "macchiato-forgetting": Case(
        forgetting(macchiato_attention),
        _mixed_with_decays,
        _macchiato_state,
        6,
        values=4,
        sources=1,
        options={"window": WINDOW},
    ),
    "window": Case(
        sliding_window_attention,
        _local,
        _local_state,
        3,
        values=2,
        options={"window": WINDOW},
    ),
    "converted": Case(
        with_sinks(macchiato_attention),
        _converted,
        _converted_state,
        6,
        values=4,
        sources=1,
        far_values=7,
        packed_states=False,
        options=ALL_THREE,
    ),
    "window-sinks": Case(
        with_sinks(sliding_window_attention),
        _local_with_sinks,
        _far_window_state,
        4,
        values=2,
        far_values=5,
        options={"window": FAR_WINDOW},
    ),
    "rg_lru": Case(rg_lru, _rg_lru, lambda normal, N, s: normal(N, s["E"]).float(), 3),
    "conv": Case(causal_conv1d, _conv, _tail, 1),
}


def tensors_of(tree: Any) -> list[Tensor]:
    """The floating-point tensors of nested tuples, in order."""
    if isinstance(tree, Tensor):
        return [tree] if tree.is_floating_point() else []
    return [x for item in tree for x in tensors_of(item)] if isinstance(tree, tuple) else []


def map_state(fn: Callable[[Tensor], Tensor], state: Any) -> Any:
    """``fn`` of every floating-point tensor of a state."""
    if isinstance(state, Tensor):
        return fn(state) if state.is_floating_point() else state
    if hasattr(state, "_fields"):
        return type(state)(*(map_state(fn, x) for x in state))
    return tuple(map_state(fn, x) for x in state)


# --- judging ------------------------------------------------------------------------------------


class Failed(Exception):
    """A check that did not hold, with what was found."""


class Skipped(Exception):
    """A check that cannot run here, with the reason."""


class Bench(NamedTuple):
    """One op at one dtype, and where."""

    at: Place
    case: Case
    dtype: torch.dtype
    sizes: dict[str, int]

    def inputs(self, B: int, T: int, seed: int = 0, scale: float = 1.0) -> list[Tensor]:
        """Standard normal inputs; the logits of a softmax times ``scale``."""
        xs = self.case.make(self._normal(seed), B, T, self.sizes)
        if scale == 1.0:
            return xs
        return [x * scale if i < (self.case.values or 0) else x for i, x in enumerate(xs)]

    def state(self, N: int, seed: int = 7) -> Any:
        return self.case.state(self._normal(seed), N, self.sizes)

    def _normal(self, seed: int) -> Callable[..., Tensor]:
        generator = torch.Generator(self.at.device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            x = torch.randn(*shape, generator=generator, device=self.at.device)
            return x.to(self.dtype)

        return normal

    def call(self, backend: str, inputs: Sequence[Tensor], **options: Any) -> tuple[Tensor, Any]:
        return self.case.run(*inputs, backend=backend, **{**self.case.options, **options})

    def results(self, backend: str, inputs: Sequence[Tensor], **options: Any) -> list[Tensor]:
        """Outputs (and states), then the gradients of a random projection of them."""
        leaves = [x.detach().requires_grad_() for x in inputs]
        out, state = self.call(backend, leaves, **options)
        found = [out, *tensors_of(state)]
        total = torch.zeros((), dtype=torch.float64, device=self.at.device)
        generator = torch.Generator(self.at.device).manual_seed(99)
        for x in found:
            weights = torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype)
            total = total + (torch.where(x.isfinite(), x, 0.0) * weights).double().sum()
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
        return [x.detach() for x in found] + [g for g in grads if g is not None]


def lift(x: Tensor) -> Tensor:
    return x.double()


def judge(got: list[Tensor], plain: list[Tensor], exact: list[Tensor], dtype: torch.dtype) -> str:
    """Every tensor errs at most twice what the judge of that precision errs.

    A state is fp32 also for half-precision inputs, where the judge rounds nothing: it may err as
    much as the factors of its products are rounded (bf16, and tf32 for fp16).
    """
    worst, where = 0.0, 0
    for i, (a, b, e) in enumerate(zip(got, plain, exact, strict=True)):
        if a.dtype != b.dtype or a.shape != b.shape:
            raise Failed(f"tensor {i}: {a.dtype} {tuple(a.shape)}, expected {b.dtype}")
        a_dtype, seen = a.dtype, torch.isfinite(e)
        if not torch.equal(a[~seen].double(), e[~seen]):
            raise Failed(f"tensor {i}: other infinities, or NaN")
        a, b, e = (torch.where(seen, x.double(), 0.0) for x in (a, b, e))
        norm = max(e.norm().item(), 1e-30)
        error, limit = (a - e).norm().item(), 2 * (b - e).norm().item()
        limit = max(limit, 16 * torch.finfo(torch.float32).eps * max(1.0, norm))
        if a_dtype != dtype:
            limit = max(limit, STATE_ERROR[dtype] * norm)
        if not error <= limit:
            raise Failed(f"tensor {i}: error {error / norm:.2e}, allowed {limit / norm:.2e}")
        if error / limit > worst:
            worst, where = error / limit, i
    return f"at most {100 * worst:.0f}% of what is allowed (tensor {where})"


# --- the checks: each returns what it found, or raises Failed or Skipped ------------------------


def agrees(b: Bench, judge_backend: str, B: int, T: int, scale: float = 1.0, **options: Any) -> str:
    """Values and gradients against fp64."""
    inputs = b.inputs(B, T, scale=scale)
    state = options.get("initial_state")
    wide = options | ({} if state is None else {"initial_state": map_state(lift, state)})
    exact = b.results(judge_backend, [lift(x) for x in inputs], **wide)
    plain = b.results(judge_backend, inputs, **options)
    got = b.results(b.at.backend, inputs, **options)
    return judge(got, plain, exact, b.dtype)


def everything(b: Bench, T: int) -> dict[str, Any]:
    """Mask, packing, a state in and a state out, as far as the op takes them together."""
    device = b.at.device
    cu = torch.tensor([0, 0, T // 4, T // 4 + 1, T // 2, T], dtype=torch.int32, device=device)
    mask = torch.rand(1, T, generator=torch.Generator().manual_seed(11)) > 0.3
    options = {"key_mask": mask.to(device), "cu_seqlens": cu}
    if b.case.past and b.case.packed_states:
        options |= {"initial_state": b.state(len(cu) - 1), "output_final_state": True}
    return options


def going_on(b: Bench, T: int) -> dict[str, Any]:
    """Mask, a state in and a state out."""
    mask = torch.rand(2, T, generator=torch.Generator().manual_seed(11)) > 0.3
    options = {"key_mask": mask.to(b.at.device), "initial_state": b.state(2)}
    return options | {"output_final_state": True}


def rows_sum_to_one(b: Bench, T: int) -> str:
    inputs = b.inputs(1, T, scale=8.0)
    assert b.case.values is not None
    for i in (b.case.values, b.case.far_values):
        if i is not None:
            inputs[i] = torch.ones_like(inputs[i])
    out, _ = b.call(b.at.backend, inputs)
    off = (out.float() - 1.0).abs().max().item()
    allowed = max(1e-4, torch.finfo(b.dtype).eps)
    if not off <= allowed:
        raise Failed(f"a row sums to 1 {off:+.1e}, allowed {allowed:.1e}")
    return f"off by at most {off:.1e}"


def source_gradients_vanish(b: Bench, T: int) -> str:
    inputs = b.inputs(1, T)
    assert b.case.sources is not None
    k = inputs[b.case.sources].requires_grad_()
    out, _ = b.call(b.at.backend, inputs)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    (dk,) = torch.autograd.grad((out * weights).sum(), k)
    dk = dk.double()
    share = (dk.sum(1).abs() / dk.abs().sum(1).clamp_min(1e-30)).max().item()
    allowed = 1e-5 + torch.finfo(b.dtype).eps
    if not (share <= allowed and dk.abs().max() > 0):
        raise Failed(f"sum over tokens is {share:.1e} of the sum of sizes, allowed {allowed:.1e}")
    return f"{share:.1e} of the sum of sizes"


def past_is_past(b: Bench, T: int) -> str:
    inputs, cut = b.inputs(1, T), 2 * T // 3
    before, _ = b.call(b.at.backend, inputs)
    later = [x.clone() for x in inputs]
    for x in later[: b.case.tokens]:
        x[:, cut:] = 3.0 - 2.0 * x[:, cut:]
    after, _ = b.call(b.at.backend, later)
    if not torch.equal(before[:, :cut], after[:, :cut]):
        off = (before[:, :cut].float() - after[:, :cut].float()).abs().max().item()
        raise Failed(f"later tokens changed earlier outputs by {off:.1e}")
    if torch.equal(before[:, cut:], after[:, cut:]):
        raise Failed("the outputs do not depend on the inputs at all")
    return "to the last bit"


def steps_are_the_whole(b: Bench, T: int, steps: int = 8) -> str:
    """A prefill and single tokens through the state, as in decoding, against all at once."""
    inputs, n = b.inputs(2, T), b.case.tokens

    def stepwise(backend: str, xs: list[Tensor]) -> list[Tensor]:
        first = [x[:, : T - steps] if i < n else x for i, x in enumerate(xs)]
        out, state = b.call(backend, first, output_final_state=True)
        found = [out]
        for t in range(T - steps, T):
            now = [x[:, t : t + 1] if i < n else x for i, x in enumerate(xs)]
            out, state = b.call(backend, now, initial_state=state, output_final_state=True)
            found.append(out)
        return [torch.cat(found, 1), *tensors_of(state)]

    with torch.no_grad():
        wide = [lift(x) for x in inputs]
        out, state = b.call("reference", wide, output_final_state=True)
        exact = [out, *tensors_of(state)]
        return judge(stepwise(b.at.backend, inputs), stepwise("reference", inputs), exact, b.dtype)


def runs_repeat(b: Bench, T: int) -> str:
    """A difference between runs is a race."""
    inputs = b.inputs(2, T)
    first, second = (b.results(b.at.backend, inputs) for _ in range(2))
    for i, (x, y) in enumerate(zip(first, second, strict=True)):
        if not torch.equal(x, y):
            off = (x.double() - y.double()).abs().max().item()
            raise Failed(f"tensor {i} differs by {off:.1e} between two runs")
    return "bit for bit"


def host_does_not_wait(b: Bench, T: int) -> str:
    """Forward and backward while PyTorch raises on every synchronisation."""
    if not b.at.cuda:
        raise Skipped("there is no GPU to wait for")
    leaves = [x.requires_grad_() for x in b.inputs(1, T)]
    options = everything(b, T)

    def step() -> None:
        out, _ = b.call(b.at.backend, leaves, **options)
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    step()
    torch.cuda.synchronize(b.at.device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "no synchronisation"


def compiles_in_one_graph(b: Bench, T: int) -> str:
    torch._dynamo.reset()
    inputs = [x.requires_grad_() for x in b.inputs(2, T)]

    def fn(*xs: Tensor) -> Tensor:
        return b.call(b.at.backend, xs)[0]

    backend = "inductor" if b.at.cuda else "aot_eager"
    compiled = torch.compile(fn, fullgraph=True, backend=backend)
    results = []
    for run in (compiled, fn):
        out = run(*inputs)
        results.append([out, *torch.autograd.grad(out, inputs, torch.ones_like(out))])
    for i, (x, y) in enumerate(zip(*results, strict=True)):
        off = ((x.double() - y.double()).norm() / y.double().norm().clamp_min(1e-30)).item()
        if not off <= 2 * torch.finfo(b.dtype).eps:
            raise Failed(f"tensor {i}: compiled differs by {off:.1e}")
    return "forward and backward"


def huge(at: Place, name: str) -> str:
    """Beyond 2^31 elements: the last tokens again, from the state before them, are the same."""
    sizes = SIZES | {"H": 8, "G": 8, "L": 16, "K": 64, "D": 512, "E": 4096}
    if not at.cuda:
        sizes = QUICK
    b = Bench(at, CASES[name], torch.bfloat16 if at.cuda else torch.float32, sizes)
    width = sizes["E"] if name in ("rg_lru", "conv") else sizes["H"] * sizes["D"]
    T = HUGE // width if at.cuda else 300
    tail = TAIL if at.cuda else 50
    if at.cuda:
        free, need = torch.cuda.mem_get_info(at.device)[0], 14 * 2 * T * width
        if free < need:
            raise Skipped(f"needs {need / 2**30:.0f} GiB, {free / 2**30:.0f} are free")
    leaves = [x.requires_grad_() for x in b.inputs(1, T)]
    out, _ = b.call(at.backend, leaves)
    dy = torch.zeros_like(out)
    dy[:, -tail:] = b._normal(5)(*dy[:, -tail:].shape)
    n = b.case.tokens
    whole = [out[:, -tail:].detach()]
    whole += [g[:, -tail:].clone() for g in torch.autograd.grad(out, leaves[:n], dy)]
    last_dy = dy[:, -tail:].clone()
    del out, dy
    with torch.no_grad():
        first = [x[:, :-tail] if i < n else x for i, x in enumerate(leaves)]
        _, state = b.call(at.backend, first, output_final_state=True)
    last = [
        (x[:, -tail:] if i < n else x).detach().clone().requires_grad_()
        for i, x in enumerate(leaves)
    ]
    del first, leaves
    out, _ = b.call(at.backend, last, initial_state=state)
    again = [out.detach(), *torch.autograd.grad(out, last[:n], last_dy)]
    for i, (x, y) in enumerate(zip(whole, again, strict=True)):
        off = ((x.double() - y.double()).norm() / y.double().norm().clamp_min(1e-30)).item()
        if not off <= 4 * torch.finfo(b.dtype).eps:
            raise Failed(f"tensor {i}: the last {tail} tokens differ by {off:.1e}")
    return f"{T} tokens, {T * width:,} elements"


def checks_of(at: Place, name: str, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], str]]]:
    """Name and call of every check of one op and dtype."""
    case = CASES[name]
    b = Bench(at, case, dtype, QUICK if at.quick else SIZES)
    T = 70 if at.quick else MODERATE
    yield "fp64 reference", lambda: agrees(b, "reference", 2, T)
    yield "mask, packing, states", lambda: agrees(b, "reference", 1, T, **everything(b, T))
    if not case.packed_states:
        yield "mask, states", lambda: agrees(b, "reference", 2, T, **going_on(b, T))
    if name == "converted":
        for one in ("sinks alone", "sinks and late latents", "sinks and joint softmax"):
            some = {"delay": "late" in one, "joint": "joint" in one}
            yield one, lambda some=some: agrees(b, "reference", 2, T, **some)
    if case.values is not None:
        yield "extreme logits", lambda: agrees(b, "reference", 1, T // 2, scale=1e4)
        yield "rows sum to 1", lambda: rows_sum_to_one(b, T)
    if case.sources is not None:
        yield "source gradients sum to 0", lambda: source_gradients_vanish(b, T)
    if case.past:
        yield "the future leaves the past alone", lambda: past_is_past(b, T)
        yield "steps are the whole", lambda: steps_are_the_whole(b, T)
    yield "runs repeat", lambda: runs_repeat(b, T)
    yield "no synchronisation", lambda: host_does_not_wait(b, T)
    yield "compiled in one graph", lambda: compiles_in_one_graph(b, T)
    if at.quick:
        return
    for B in (1, 64):
        tokens = LONG // B
        yield f"B = {B}, T = {tokens}", lambda B=B, t=tokens: agrees(b, "torch", B, t)
    if name in ("latte", "forgetting", "macchiato") and dtype == torch.float32:
        # One segment per sequence: sums that tensor cores cut off would drift with its length.
        yield "B = 32, T = 16384, uncut", lambda: agrees(b, "torch", 32, 16384)
    for sizes in OTHERS:
        used = {k: v for k, v in sizes.items() if k in relevant(name)}
        label = ", ".join(f"{k} = {v}" for k, v in used.items())
        yield label, lambda s=sizes: agrees(b._replace(sizes=s), "reference", 2, 333)


def relevant(name: str) -> str:
    """The sizes that an op has."""
    few = {"rg_lru": ("E",), "conv": ("E", "taps"), "window": ("H", "G", "K", "D")}
    few["window-sinks"] = few["window"]
    few |= dict.fromkeys(("latte", "forgetting", "bidirectional"), ("H", "L", "D"))
    return few.get(name, "HGLKD")


def groups() -> list[str]:
    """All groups: an op and a dtype each, and the large one."""
    return [f"{name}:{dtype}" for dtype in DTYPES for name in CASES] + ["huge"]


def has_kernels(at: Place, name: str) -> str | None:
    """Why the backend does not serve this op, or None if it does."""
    b = Bench(at, CASES[name], torch.float32, QUICK)
    try:
        b.call(at.backend, b.inputs(1, 4))
    except ValueError as error:
        return str(error)
    return None


def checks_in(at: Place, group: str) -> Iterator[tuple[str, Callable[[], str]]]:
    """Full name and call of every check of a group."""
    if group == "huge":
        for name in ("latte", "macchiato", "window", "rg_lru", "conv"):
            if has_kernels(at, name) is None:
                yield f"huge: {name}", lambda name=name: huge(at, name)
        return
    name, _, dtype = group.partition(":")
    if name not in CASES or dtype not in DTYPES:
        raise SystemExit(f"unknown group {group!r}, expected one of {', '.join(groups())}")
    missing = has_kernels(at, name)
    if missing is not None:

        def skip() -> str:
            raise Skipped(missing)

        yield f"{group}: all checks", skip
        return
    for label, check in checks_of(at, name, DTYPES[dtype]):
        yield f"{group}: {label}", check


def run_group(at: Place, group: str, table: Any) -> int:
    """Run the checks of a group, a line and a row for each; how many failed."""
    failures = 0
    for name, check in checks_in(at, group):
        start = time.monotonic()
        try:
            verdict, detail = "pass", check()
        except Skipped as why:
            verdict, detail = "skip", str(why)
        except Failed as why:
            verdict, detail = "FAIL", str(why)
        except Exception as error:  # noqa: BLE001 - a check that raises has failed; the next runs
            verdict, detail = "FAIL", reason(error)
            table.add(row_of(name, verdict, detail, start))
            say(f"{verdict}  {name}: {detail}")
            failures += 1
            try:
                stop_if_broken(at, error)
            except Exception:
                later = f"{group}: all later checks"
                table.add(row_of(later, "FAIL", "not run: the GPU is in error", start))
                raise
            continue
        failures += verdict == "FAIL"
        table.add(row_of(name, verdict, detail, start))
        say(f"{verdict}  {name}: {detail}")
        forget()
    return failures


def row_of(name: str, verdict: str, detail: str, start: float) -> dict[str, Any]:
    seconds = round(time.monotonic() - start, 2)
    return {"check": name, "verdict": verdict, "detail": detail, "seconds": seconds}


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__, 120)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help="default: all of them")
    args = parser.parse_args(argv)
    at = place(args)
    chosen = args.groups or groups()
    name = f"gpu_checks-{chosen[0].replace(':', '-')}.csv" if args.groups else "gpu_checks.csv"
    table = at.table(name)
    failures = sum(run_group(at, group, table) for group in chosen)
    say(f"{len(table.rows)} checks, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
