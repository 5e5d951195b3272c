"""Our ops on a GPU beside other libraries' kernels: time, memory, errors.

Forward, and forward+backward (the gradients of ``<dy, y>`` for all inputs), bf16. docs/gpu.md says
what each part compares. Beyond that:

* ``latte``: H = 8. Bytes: the least that any kernel must move, inputs and outputs once each, over
  the median time. Saved: distinct storages that autograd holds between the passes, inputs included.
  sigma: of the logits. Errors: relative norms against fp64, at 1,024 tokens.
* ``macchiato``, ``converted``, ``kept``: ``flash`` is held to PyTorch's flash backend, on its
  native (B, H, T, D) layout; the block mask of ``flex window`` is made beforehand.
* ``rglru``: 768 channels; ``conv``: 3 taps and a bias. ``conv1d`` is PyTorch's depthwise
  convolution of the padded, transposed input, transposed back.

Expected: the least time that our kernels' machine code allows (docs/kernels.md).

    python -m experiments.benchmarks.gpu_ops PART [--quick] [--out DIR] [--budget SECONDS]
        [--device DEVICE]
    python -m experiments.benchmarks.gpu_ops latte --warm NUMBER      # measures nothing

``--warm`` compiles what the benchmarks will run, every fourth part of it, so that their time goes
to measuring: Triton keeps what it compiles on disk.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.benchmarks import gpu_common as gpu
from experiments.benchmarks.gpu_baselines import (
    Op,
    latte_baselines,
    rg_lru_baselines,
)
from experiments.benchmarks.records import (
    FLOORS,
    MODES,
    Goal,
    OpCall,
    Row,
    Table,
    read_rows,
    say,
    select,
    worst,
)
from latte.lab import machine
from latte.lab.evaluate.benchmark_ops import MeasuredOp
from latte.lab.machine import Times
from latte.ops import (
    Kept,
    Partition,
    Sinks,
    causal_conv1d,
    latte_attention,
    macchiato_attention,
    rg_lru,
    sliding_window_attention,
)

TOKENS, H = 65536, 8
BATCHES = (1, 64, 8, 32, 4, 16, 2)  # the ends of a range first, so that a cut run has seen them
MAKERS_BANDWIDTH = 3.35e12  # bytes per second, that the floors count with
WARMING, WARM_TOKENS = 4, 2048  # processes


class Point(NamedTuple):
    """What is timed in turns, ours first."""

    sizes: Row
    sides: dict[str, OpCall]
    share: float  # of the work that gpu_floors.csv counts


class Part(NamedTuple):
    """One CSV file, ``gpu_NAME.csv``."""

    sizes: Callable[[bool], list[tuple[Any, ...]]]  # of a quick run, or a whole one
    point: Callable[..., Point]  # (at, *size)
    goals: Callable[[str, Sequence[Row]], list[Goal]]  # of a mode's rows
    ratio: str  # the column of the times over ours
    budget: float  # seconds of timed calls per side


def ours(function: Callable[..., Any], **options: Any) -> Op:
    """One of our ops, its output alone."""
    return MeasuredOp.of(function, **options).op


# --- what is expected, and what is held ----------------------------------------------------------


@functools.cache
def copy_bandwidth(device: torch.device, gigabytes: float = 2.0) -> float:
    """Bytes read and written per second by a copy within the device."""
    size = int(gigabytes * 2**30) if device.type == "cuda" else 2**22
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(7)
    target = torch.empty_like(source)
    watch = gpu.Stopwatch(device)
    for i in range(13):
        target.copy_(source)
        if i >= 3:
            watch.time(lambda: target.copy_(source))
    gpu.forget()
    return 2 * size / (watch.read().median / 1e3)


def expected_ms(at: gpu.Place, case: str, mode: str, share: float) -> float | str:
    """The least time of our kernels, counted from their machine code; "" for what is not counted.

    Each takes as long as its bytes, at the bandwidth of a copy, or as issuing its instructions.

    Args:
        case: of ``gpu_floors.csv``, which docs/kernels.md says how to make; its figures are an
            H100's, of 65,536 tokens.
        share: of the work that was counted.
    """
    slower = MAKERS_BANDWIDTH / copy_bandwidth(at.device)
    floors = select(read_rows(FLOORS), case=case)
    counted = floors if mode != MODES[0] else select(floors, **{"pass": "forward"})
    us = sum(max(float(r["bytes_us"]) * slower, float(r["issue_us"])) for r in counted)
    return round(us * share / 1e3, 4) if counted else ""


@contextlib.contextmanager
def saved_storages() -> Iterator[dict[int, int]]:
    """Sizes of the distinct storages that autograd saves meanwhile, by address."""
    sizes: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield sizes


def memory_of(at: gpu.Place, side: OpCall) -> Row:
    """MB of one forward and backward pass: ``saved`` for the backward pass, inputs included;
    ``kept`` between the passes beyond inputs and output; the ``peak`` beyond the inputs."""
    inputs = [x.detach().clone().requires_grad_() for x in side.inputs]
    before = 0
    if at.cuda:
        gpu.forget()
        gpu.wait(at.device)
        machine.reset_peak_memory(at.device)
        before = machine.memory_bytes(at.device)
    with saved_storages() as sizes:
        out = side.op(*inputs)
    found = {"saved_mb": sum(sizes.values())}
    if at.cuda:
        found["kept_mb"] = machine.memory_bytes(at.device) - before - out.nbytes
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    if at.cuda:
        found["peak_mb"] = machine.peak_memory_bytes(at.device) - before
    return {"kept_mb": "", "peak_mb": "", **{k: round(x / 2**20, 3) for k, x in found.items()}}


def over(
    rows: Sequence[Row], side: str, baselines: Sequence[str], column: str = "median_ms"
) -> dict[str, float]:
    """The best rival's over the side's, by size."""
    sized: dict[str, dict[str, float]] = {}
    for row in rows:
        size = ", ".join(f"{name} = {row[name]}" for name in ("L", "D", "B", "T") if name in row)
        sized.setdefault(size, {})[row["side"]] = row[column]
    return {
        size: min(found[r] for r in baselines if r in found) / found[side]
        for size, found in sized.items()
        if side in found and any(r in found for r in baselines)
    }


def inverse(found: Mapping[str, float]) -> dict[str, float]:
    return {size: 1 / x for size, x in found.items()}


# --- latte -----------------------------------------------------------------------------------

LATTE, LATTE_BASELINES = "latte", ("chunk_lightnet", "chunk_gla")
WIDTHS = ((32, 64), (16, 64), (32, 128), (16, 128), (32, 256), (16, 256))
FORGETTING = {"forgets 1/64": 1 / 64, "forgets 1/4": 1 / 4}
T_OF_ERRORS = 1024


def latte(backend: str) -> Op:
    """Causal Latte; a fourth input is what its latents forget."""
    return lambda q, k, v, g=None: latte_attention(q, k, v, log_decay=g, backend=backend)[0]


def latte_sizes(quick: bool) -> list[tuple[Any, ...]]:
    """(B, T, L, D, sigma)."""
    if quick:
        return [(1, 64, 16, 16, 1.0), (2, 32, 16, 16, 1.0), (1, 64, 16, 16, 8.0)]
    parts = (BATCHES[:2], BATCHES[2:])
    found = [(B, TOKENS // B, L, D, 1.0) for part in parts for L, D in WIDTHS for B in part]
    wide = [(B, TOKENS // B, *WIDTHS[0], sigma) for sigma in (4.0, 8.0) for B in BATCHES[:2]]
    return found[:2] + wide + found[2:]


def latte_point(at: gpu.Place, B: int, T: int, L: int, D: int, sigma: float = 1.0) -> Point:
    """Standard normal inputs; q and k times ``sigma``."""
    q, k, v, dy = (at.normal(B, T, H, n, seed=i) for i, n in enumerate((L, L, D, D)))
    inputs = [q * sigma, k * sigma, v]
    op, case = latte(at.backend), f"L = {L}, D = {D}"
    sides = {LATTE: OpCall(op, inputs, dy, f"latte, {case}")}
    if sigma == 1.0:
        if (L, D) == WIDTHS[0] or at.quick:
            g = at.normal(B, T, H, L, seed=4, dtype=torch.float32).square()
            for name, mean in FORGETTING.items():
                sides[name] = OpCall(op, [*inputs, -mean * g], dy, f"latte, forgetting, {case}")
        baselines = latte_baselines() if at.baselines else {}
        sides |= {name: OpCall(baseline, inputs, dy) for name, baseline in baselines.items()}
    return Point({"B": B, "T": T, "H": H, "L": L, "D": D, "sigma": sigma}, sides, B * T / TOKENS)


def rates(at: gpu.Place, mode: str, side: OpCall, t: Times) -> Row:
    """Every input read once and every output written once, against a copy."""
    forward = sum(x.nbytes for x in side.inputs) + side.dy.nbytes
    least = forward if mode == MODES[0] else 3 * forward - side.dy.nbytes
    rate, bandwidth = least / (t.median / 1e3), copy_bandwidth(at.device)
    return {
        "least_bytes": least,
        "gb_per_s": round(rate / 1e9, 1),
        "copy_gb_per_s": round(bandwidth / 1e9, 1),
        "of_copy": round(rate / bandwidth, 4),
    }


def errors(at: gpu.Place) -> list[Goal]:
    """Relative errors of every side against the equations in fp64: output, dq, dk, dv."""
    L, D = (16, 16) if at.quick else WIDTHS[0]
    point = latte_point(at, 1, 64 if at.quick else T_OF_ERRORS, L, D)
    table = at.table("gpu_latte_errors.csv")

    def run(side: OpCall, op: Op, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(torch.promote_types(x.dtype, dtype)).requires_grad_() for x in side.inputs]
        out = op(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, side.dy.to(out.dtype))]

    columns = ("error_out", "error_dq", "error_dk", "error_dv")
    for name, side in point.sides.items():
        with gpu.tried(at, name):
            exact = [x.double() for x in run(side, latte("reference"), torch.float64)]
            pairs = zip(columns, run(side, side.op, at.dtype), exact, strict=False)
            found = {
                column: ((got.double() - x).norm() / x.norm().clamp_min(1e-300)).item()
                for column, got, x in pairs
            }
            table.add_and_say({"side": name, "L": L, "D": D, **found})
    wrong = {row["side"]: row for row in table.rows}
    baselines = [wrong[r] for r in LATTE_BASELINES if r in wrong]
    if LATTE not in wrong or not baselines:
        return []
    found = {n: wrong[LATTE][n] / min(r[n] for r in baselines) for n in columns}
    return worst("latte: largest error over the best rival's", 1.0, found, False)


def latte_goals(mode: str, rows: Sequence[Row]) -> list[Goal]:
    """The worst size of each goal; goals that compare need a rival that ran."""
    rows = select(rows, sigma=1.0)
    name = f"latte {mode}: times faster than the best rival, worst size"
    goals = worst(name, 2.0, over(rows, LATTE, LATTE_BASELINES), True)
    if mode == MODES[0]:
        shares = {
            f"L = {r['L']}, D = {r['D']}, B = {r['B']}": r["of_copy"]
            for r in select(rows, side=LATTE)
        }
        return goals + worst("latte forward: share of copy bandwidth", 0.6, shares, True)
    saved = inverse(over(rows, LATTE, LATTE_BASELINES, "saved_mb"))
    return goals + worst("latte: saved activations over a rival's", 1 / 3, saved, False)


# --- softmax attention beside Macchiato -----------------------------------------------------------

LENGTHS = (2048, 32768, 131072, 1024, 4096, 8192, 16384, 65536)  # the goals' lengths first
L, K, WINDOW = 16, 64, 128
FLASH = "flash"


def lengths(quick: bool) -> list[tuple[Any, ...]]:
    """(T,)."""
    return [(T,) for T in ((128, 256) if quick else LENGTHS)]


def kept_lengths(quick: bool) -> list[tuple[Any, ...]]:
    """(T,), the goal's length first."""
    return lengths(quick) if quick else [(T,) for T in (16384, 2048, 131072, 4096, 65536)]


def flash_side(at: gpu.Place, local: Sequence[Tensor], dy: Tensor) -> OpCall:
    """Causal softmax attention over all keys, which may have fewer heads."""
    *inputs, dy = (x.transpose(1, 2).contiguous() for x in (*local, dy))

    def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with gpu.attention_by(at, "flash"):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return OpCall(flash, inputs, dy)


def flash_goals(mode: str, rows: Sequence[Row], name: str, targets: dict[int, float]) -> list[Goal]:
    """Times faster than flash, by tokens."""
    goals = []
    for T, target in targets.items():
        for faster in over(select(rows, T=T), name, (FLASH,)).values():
            text = f"{name} {mode}, T = {T}: times faster than causal flash"
            goals.append(Goal(text, target, faster, True))
    return goals


MACCHIATO, FLEX = "macchiato", "flex window"
BRANCHES = ("its latents", "its window")


def flex_window(at: gpu.Place, T: int) -> Op:
    """FlexAttention over the window, (B, H, T, D), T a multiple of the window."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key > query - WINDOW)

    # A block of 128 queries sees its own keys and the block before: written down, since
    # create_block_mask would form all T x T pairs.
    N = T // WINDOW
    row = torch.arange(N, dtype=torch.int32, device=at.device)
    blocks = torch.zeros(1, 1, N, N, dtype=torch.int32, device=at.device)
    blocks[..., 0] = (row - 1).clamp_min(0)
    if N > 1:
        blocks[..., 1:, 1] = row[1:]
    count = (row + 1).clamp_max(2)[None, None]
    mask = BlockMask.from_kv_blocks(count, blocks, BLOCK_SIZE=WINDOW, mask_mod=seen)
    compiled: Any = torch.compile(flex_attention) if at.cuda else flex_attention
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def macchiato_point(at: gpu.Place, T: int) -> Point:
    """Both branches, each alone, and softmax attention."""
    widths = (L + 1, L, K, K, K, K)
    latent_q, latent_k, *local, dy = (at.normal(1, T, H, n, seed=i) for i, n in enumerate(widths))
    near: dict[str, Any] = {"window": WINDOW, "backend": at.backend}
    inputs, case = [latent_q, latent_k, *local], f"macchiato, L = {L}, D = {K}"
    latents = [latent_q[..., 1:].contiguous(), latent_k, local[2]]
    sides = {
        MACCHIATO: OpCall(ours(macchiato_attention, **near), inputs, dy, case),
        BRANCHES[0]: OpCall(latte(at.backend), latents, dy),
        BRANCHES[1]: OpCall(ours(sliding_window_attention, **near), local, dy),
        FLASH: flash_side(at, local, dy),
    }
    with gpu.tried(at, FLEX):  # which has no backward on a CPU
        flash = sides[FLASH]
        sides[FLEX] = flash._replace(op=flex_window(at, T), forward_only=not at.cuda)
    return Point({"B": 1, "T": T, "H": H, "L": L, "D": K}, sides, T / TOKENS)


def macchiato_goals(mode: str, rows: Sequence[Row]) -> list[Goal]:
    """Faster than flash from 2,048 tokens on; close to the slower of its branches."""
    first, second = (over(rows, MACCHIATO, (branch,)) for branch in BRANCHES)
    slower = {size: 1 / max(first[size], second[size]) for size in first if size in second}
    name = f"macchiato {mode}: time over the slower of its branches, worst length"
    faster = flash_goals(mode, rows, MACCHIATO, {2048: 1.0, 32768: 10.0, 131072: 40.0})
    return faster + worst(name, 1.15, slower, False)


SMOLLM2 = {"H": 9, "G": 3, "L": 16, "K": 64, "D": 64}
CONVERTED, SINKS, BASE = "converted", 4, "plain"
ALONE = {"with sinks": "sinks", "with delay": "delay", "with joint": "joint"}
KEPT, KEPT_TOKENS = "kept", 64  # a block is as long


class Converted:
    """A layer of a converted SmolLM2 and its inputs; the first tokens are the sinks."""

    def __init__(self, at: gpu.Place, T: int) -> None:
        H, G, L, K, D = SMOLLM2.values()
        shapes = ((H, L + 1), (H, L), (H, K), (G, K), (G, D), (H, D))
        *self.inputs, self.dy = (at.normal(1, T, *shape, seed=i) for i, shape in enumerate(shapes))
        far = (x[:, :SINKS].clone() for x in self.inputs[3:])
        self.far = [at.normal(1, T, H, K, seed=9), *far]
        self.mask = torch.ones(1, SINKS, dtype=torch.bool, device=at.device)
        self.scores, self.backend = at.normal(1, T, G, seed=10).float(), at.backend

    def side(self, *parts: str, case: str = "") -> OpCall:
        """With these of sinks, delay, joint and kept."""
        options: dict[str, Any] = {"window": WINDOW, "backend": self.backend}
        kept = Kept(self.scores, KEPT_TOKENS, KEPT_TOKENS) if KEPT in parts else None
        partition = Partition(None, "delay" in parts, "joint" in parts, kept)
        op = ours(macchiato_attention, **options)

        def with_sinks(*xs: Tensor) -> Tensor:
            *near, far_q, keys, values = xs
            sinks = Sinks(far_q, keys, values, self.mask)
            return op(*near, partition=partition._replace(sinks=sinks))

        if "sinks" in parts:
            return OpCall(with_sinks, self.inputs + self.far, self.dy, case)
        op = ours(macchiato_attention, partition=partition, **options)
        return OpCall(op, self.inputs, self.dy, case)


def converted_point(at: gpu.Place, T: int) -> Point:
    """Sinks, delay and joint together, each alone, and none."""
    layer = Converted(at, T)
    case = f"converted, L = {SMOLLM2['L']}, D = {SMOLLM2['D']}"
    sides = {CONVERTED: layer.side(*ALONE.values(), case=case), BASE: layer.side()}
    sides |= {name: layer.side(part) for name, part in ALONE.items()}
    sides[FLASH] = flash_side(at, layer.inputs[2:], layer.dy)
    return Point({"B": 1, "T": T, **SMOLLM2}, sides, T / TOKENS)


def converted_goals(mode: str, rows: Sequence[Row]) -> list[Goal]:
    """At most half as much again as without the three; faster than flash from 4,096 tokens on."""
    more = inverse(over(rows, CONVERTED, (BASE,)))
    name = f"converted {mode}: time over that without sinks, delay and joint, worst length"
    faster = flash_goals(mode, rows, CONVERTED, {4096: 1.0, 32768: 8.0})
    return worst(name, 1.5, more, False) + faster


def kept_point(at: gpu.Place, T: int) -> Point:
    """The converted layer with kept tokens, without them, and softmax attention."""
    layer = Converted(at, T)
    case = f"kept, L = {SMOLLM2['L']}, D = {SMOLLM2['D']}"
    sides = {KEPT: layer.side(*ALONE.values(), KEPT, case=case)}
    sides[CONVERTED] = layer.side(*ALONE.values())
    sides[FLASH] = flash_side(at, layer.inputs[2:], layer.dy)
    return Point({"B": 1, "T": T, **SMOLLM2}, sides, T / TOKENS)


def kept_goals(mode: str, rows: Sequence[Row]) -> list[Goal]:
    """At most 1.6 times the time without them, at 16,384 tokens."""
    more = inverse(over(select(rows, T=16384), KEPT, (CONVERTED,)))
    return worst(f"kept {mode}: time over that without kept tokens, T = 16384", 1.6, more, False)


# --- the RG-LRU and the convolution --------------------------------------------------------------

E, TAPS = 768, 3
BASELINES = {"rg_lru": ("chunk_hgrn", "chunk_hgrn, compiled gates"), "conv": ("conv1d",)}


def conv1d(x_BTE: Tensor, weight_EK: Tensor, bias_E: Tensor) -> Tensor:
    """The same convolution by PyTorch's, (B, E, T) inside."""
    padded = F.pad(x_BTE.transpose(1, 2), (weight_EK.shape[1] - 1, 0))
    y = F.conv1d(padded, weight_EK[:, None], bias_E, groups=x_BTE.shape[2])
    return y.transpose(1, 2)


def rglru_sizes(quick: bool) -> list[tuple[Any, ...]]:
    """(B, T, E, op)."""
    tokens, width = (128, 16) if quick else (TOKENS, E)
    batches = (1, 2) if quick else BATCHES
    return [(B, tokens // B, width, op) for B in batches for op in BASELINES]


def rglru_point(at: gpu.Place, B: int, T: int, width: int, op: str) -> Point:
    """One of the two ops."""
    x, r, i, dy = (at.normal(B, T, width, seed=n) for n in range(4))
    function: Callable[..., Any] = rg_lru if op == "rg_lru" else causal_conv1d
    if op == "rg_lru":
        inputs = [x, r, i, at.normal(width, seed=4) - 4.0]
        baselines = rg_lru_baselines() if at.baselines else {}
    else:
        inputs = [x, at.normal(width, TAPS, seed=5), at.normal(width, seed=6)]
        baselines = {"conv1d": conv1d}
    sides = {op: OpCall(ours(function, backend=at.backend), inputs, dy, op)}
    sides |= {name: OpCall(baseline, inputs, dy) for name, baseline in baselines.items()}
    return Point({"op": op, "B": B, "T": T, "E": width}, sides, B * T * width / (TOKENS * 2048))


def rglru_goals(mode: str, rows: Sequence[Row]) -> list[Goal]:
    """At least the speed of the fastest rival, at the worst size."""
    goals = []
    for op, baselines in BASELINES.items():
        name = f"{op} {mode}: times faster than the best rival, worst size"
        goals += worst(name, 1.0, over(select(rows, op=op), op, baselines), True)
    return goals


# --- all of them ---------------------------------------------------------------------------------

PARTS = {
    LATTE: Part(latte_sizes, latte_point, latte_goals, "times_latte", 0.15),
    "macchiato": Part(lengths, macchiato_point, macchiato_goals, "times_macchiato", 0.3),
    "converted": Part(lengths, converted_point, converted_goals, "times_converted", 0.2),
    "kept": Part(kept_lengths, kept_point, kept_goals, "times_kept", 0.2),
    "rglru": Part(rglru_sizes, rglru_point, rglru_goals, "times_ours", 0.2),
}


def compare(at: gpu.Place, table: Table, part: Part, point: Point) -> bool:
    """A row for each side and mode; whether ours ran in both: else there are none.

    Latte's rows have each side's memory and bandwidth too.
    """
    first, ran = next(iter(point.sides)), True
    memory: dict[str, Row] = {}
    for name, side in point.sides.items() if first == LATTE else ():
        with gpu.tried(at, f"{name}, memory"):
            memory[name] = memory_of(at, side)
        gpu.forget()
    for mode in MODES:
        sides = {n: s for n, s in point.sides.items() if mode == MODES[0] or not s.forward_only}
        calls = {name: side.call(mode) for name, side in sides.items()}
        budget = 0.05 if at.quick else part.budget
        times = gpu.measure(at, calls, budget=budget, graphs=True)
        if first not in times:
            say(f"{first} is left out")
            ran = False
            continue
        for name, t in times.items():
            side = sides[name]
            expected = expected_ms(at, side.case, mode, point.share) if side.case else ""
            row: Row = {"side": name, "mode": mode, **point.sizes, "dtype": at.precision}
            row |= {**t.row(), "expected_ms": expected}
            row |= {part.ratio: round(t.median / times[first].median, 3)}
            if first == LATTE:
                whole = side if side.case else point.sides[first]
                row |= {**rates(at, mode, whole, t), **memory.get(name, {})}
            table.add_and_say(row)
    return ran


def warm(at: gpu.Place, number: int) -> None:
    """Every fourth of the widths' comparisons and the recurrence's, once."""
    points: list[Callable[[], Point]] = [
        functools.partial(latte_point, at, 1, WARM_TOKENS, *width) for width in WIDTHS
    ]
    points.append(functools.partial(rglru_point, at, 1, WARM_TOKENS, E, "rg_lru"))
    for make in points[number::WARMING]:
        for name, side in make().sides.items():
            with gpu.tried(at, f"warming {name}"):
                side.call(MODES[1])()


def main(argv: Sequence[str] | None = None) -> None:
    parser = gpu.options(__doc__, 110)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--warm", type=int, choices=range(WARMING), help="compile, measure nothing")
    args = parser.parse_args(argv)
    at = gpu.place(args)
    if args.warm is not None:
        warm(at, args.warm)
        return
    part, script = PARTS[args.part], f"gpu_{args.part}"
    say(f"{args.part}: {at.dtype}, {at.device}, backend {at.backend}")
    say(f"copy: {copy_bandwidth(at.device) / 1e9:.0f} GB/s read and written")
    goals = errors(at) if args.part == LATTE else []
    table = at.table(f"{script}.csv")
    ran = [
        compare(at, table, part, part.point(at, *s)) for s in at.while_time(part.sizes(at.quick))
    ]
    for mode in MODES:
        goals += part.goals(mode, select(table.rows, mode=mode))
    at.goals(script, goals)
    if not all(ran):
        raise RuntimeError(f"{args.part}: ours did not run at {ran.count(False)} sizes")


if __name__ == "__main__":
    main()
