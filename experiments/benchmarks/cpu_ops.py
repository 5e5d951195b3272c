"""Time of the ops on a CPU beside softmax attention, a scan of Listing 1 and the machine's limit.

fp32, B = 1, H = 8 heads, L = 32 latents per head, D = 64 value width. Every side uses all threads.
Sides, all timed in turns in one process (``latte.lab.machine``):

* ``latte``: ``latte.ops.latte_attention``, causal.
* ``jax scan``: the same function as Listing 1 of the paper, corrected, jitted (``listing1``), at
  its fastest unroll of 1 to 32, searched per mode at the length of the goals. Before timing, both
  are checked against the fp64 reference, and against each other at every length.
* ``sdpa``: ``torch.nn.functional.scaled_dot_product_attention``, causal, K = 64, on its native
  contiguous (B, H, T, D) layout.
* ``forgets 1/64``, ``forgets 1/4``: Latte with a ``log_decay`` per token, of these means, whose
  gradient is one more.
* ``macchiato`` (window 128, K = 64), ``window 128`` (``sliding_window_attention``) and ``rg-lru``
  on H D = 512 channels.
* ``sinks, late``: Macchiato with 4 sinks and delayed latents.
* ``conv``: the causal convolution of 4 taps on 512 channels.
* ``packed 15:1``: Macchiato of two packed sequences, of 15/16 and 1/16 of the tokens.
* ``macchiato, bf16``, ``rg-lru, bf16`` and ``conv, bf16``: the same calls on bf16 tensors.

"forward" is one call without gradients. "forward+backward" is one call and the gradients of
``<dy, y>`` for a fixed random dy with respect to all inputs; the scan's need not return y itself.

The limit is the time of a call's matrix products and bytes at the rates of a large product and a
copy, measured in the same run (products in bf16 for bf16). After that Latte alone from 4k to 256k
tokens, by `latte benchmark`: time, peak memory beyond what was resident before the inputs (inputs,
outputs, gradients and all between; a process for each mode), and the slopes of least-squares lines
in the logarithms.

    python -m experiments.benchmarks.cpu_ops [--quick] [--resume] [--out DIR] [--budget SECONDS]
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.benchmarks import listing1, records
from experiments.benchmarks.figures import publish
from experiments.benchmarks.records import MODES, Goal, OpCall, Row, ratio, say, select
from latte.lab import machine
from latte.lab.evaluate.benchmark import Settings, benchmark
from latte.lab.evaluate.benchmark_ops import MeasuredOp, op_table
from latte.ops import Partition, Sinks, causal_conv1d

H, L, D = 8, 32, 64
WINDOW, SINKS, TAPS = 128, 4, 4
LENGTHS = (1024, 4096, 16384)
SCALING = (4096, 16384, 65536, 262144)
# Columns of `latte benchmark` that are kept.
SCALED = "mode tokens median_ms p10_ms p90_ms min_ms calls peak_net_mb dtype".split()
UNROLLS = (1, 2, 4, 8, 16, 32)
GOAL_LENGTH = 4096
BF16 = ", bf16"  # ends the name of a side on bf16 tensors
IN_BF16 = ("macchiato", "rg-lru", "conv")
DECAYS = {"forgets 1/64": 1 / 64, "forgets 1/4": 1 / 4}  # mean per token
# The sides that the page shows; the others are in the CSV file.
IN_DOCUMENTS = [
    *("latte", "forgets 1/64", "macchiato", "macchiato, bf16", "sinks, late", "window 128"),
    *("rg-lru", "conv", "jax scan", "sdpa"),
]
# Agreement: a thousand roundings of fp32, relative to the largest entry.
TOLERANCE = 1000 * torch.finfo(torch.float32).eps


def ops_at(T: int, backend: str | None = None) -> dict[str, MeasuredOp]:
    """The table of `latte benchmark` at the sizes of the goals."""
    sizes = {"heads": H, "latents": L, "head_dim": D, "window": WINDOW}
    return op_table(1, T, **sizes, backend=backend)


def make_sides(T: int) -> dict[str, OpCall]:
    """All sides that run in torch, Latte first, on standard normal inputs."""
    generator = torch.Generator().manual_seed(T)
    ops = ops_at(T)
    macchiato = ops["macchiato"].op

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def side(op: Callable[..., Tensor], inputs: Sequence[Tensor]) -> OpCall:
        with torch.no_grad():
            shape = op(*inputs).shape
        return OpCall(op, inputs, normal(*shape))

    def of_table(name: str) -> OpCall:
        return side(ops[name].op, [normal(*shape) for shape in ops[name].shapes])

    def late(*tensors: Tensor) -> Tensor:
        mask = torch.ones(1, SINKS, dtype=torch.bool)
        keys, values = (x[:, :SINKS] for x in tensors[3:5])
        sinks = Sinks(tensors[5], keys, values, mask)
        return macchiato(*tensors[:5], partition=Partition(sinks, delay=True))

    bounds = torch.tensor([0, T - T // 16, T], dtype=torch.int32)
    latte, mixture = of_table("latte"), of_table("macchiato")
    decay = -torch.empty(1, T, H, L).exponential_(generator=generator)
    sides = {"latte": latte}
    for name, mean in DECAYS.items():
        sides[name] = forgetting(latte, decay * mean)
    sides |= {"macchiato": mixture, "rg-lru": of_table("rg-lru")}
    conv = MeasuredOp.of(causal_conv1d).op
    sides["conv"] = side(conv, [normal(1, T, H * D), normal(H * D, TAPS)])
    for name in IN_BF16:
        op, inputs, dy, *_ = sides[name]
        sides[name + BF16] = OpCall(op, [x.bfloat16() for x in inputs], dy.bfloat16())
    packed = functools.partial(macchiato, cu_seqlens=bounds)
    sides["packed 15:1"] = side(packed, mixture.inputs)
    sides["sinks, late"] = side(late, [*mixture.inputs, normal(1, T, H, D)])
    sides["window 128"] = of_table("window")
    attention = functools.partial(F.scaled_dot_product_attention, is_causal=True)
    heads_first = [x.transpose(1, 2).contiguous() for x in sides["window 128"].inputs]
    sides["sdpa"] = side(attention, heads_first)
    return sides


def forgetting(latte: OpCall, log_decay: Tensor) -> OpCall:
    """The same with one more input."""

    def op(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        return latte.op(q, k, v, log_decay=log_decay)

    return OpCall(op, [*latte.inputs, log_decay], latte.dy)


def scan_call(mode: str, latte: OpCall, unroll: int) -> Callable[[], Any]:
    """The scan on Latte's inputs."""
    q, k, v = latte.inputs
    if mode == "forward":
        return listing1.forward(q, k, v, unroll)
    return listing1.gradients(q, k, v, latte.dy, unroll)


def agree(label: str, ours: Any, theirs: Any) -> None:
    """Stop unless two sides computed the same: arrays or tuples of them, by their largest entry."""
    ours, theirs = ([x] if not isinstance(x, tuple) else x for x in (ours, theirs))
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        a, b = (y if isinstance(y, Tensor) else listing1.to_torch(y) for y in (a, b))
        worst = max(worst, ((a.double() - b.double()).abs().max() / b.abs().max()).item())
    say(f"check {label}: relative difference {worst:.1e}")
    if not worst <= TOLERANCE:
        raise SystemExit(f"check failed: {label} differ by {worst:.1e}, allowed {TOLERANCE:.1e}")


def check_sides(T: int) -> None:
    """Latte and the scan against the equations in fp64, values and gradients."""
    sides, exact = make_sides(T), ops_at(T, "reference")["latte"].op
    for mode in MODES:
        for name in (*DECAYS, "latte"):
            ours = sides[name]
            wide = OpCall(exact, [x.double() for x in ours.inputs[:3]], ours.dy.double())
            judge = forgetting(wide, ours.inputs[3].double()) if name in DECAYS else wide
            label = f"{name}, {mode}, with the fp64 reference"
            agree(label, ours.call(mode)(), judge.call(mode)())
        if listing1.AVAILABLE:
            scan = scan_call(mode, sides["latte"], unroll=4)()
            agree(f"jax scan, {mode}, with the fp64 reference", scan, judge.call(mode)())


def fastest_unroll(mode: str, T: int, unrolls: Sequence[int], budget: float) -> int:
    """The unroll whose median time is the smallest, all timed in turns."""
    latte = make_sides(T)["latte"]
    times = machine.interleave({n: scan_call(mode, latte, n) for n in unrolls}, budget)
    best = min(times, key=lambda n: times[n].median)
    all_of_them = ", ".join(f"{n}: {t.median:.1f} ms" for n, t in times.items())
    say(f"unroll, {mode}, T = {T}: {all_of_them}; fastest {best}")
    return best


def machine_rates(size: int) -> dict[str, float]:
    """What bounds a call, here and now: FLOP/s of a matrix product, bytes/s read and written.

    Args:
        size: Number of rows and columns of the matrices.
    """
    a, b = torch.randn(size, size), torch.randn(1 << 26)
    c, low = torch.empty_like(b), a.bfloat16()
    calls = {"matmul": lambda: torch.mm(a, a), "matmul" + BF16: lambda: torch.mm(low, low)}
    times = machine.interleave({**calls, "copy": lambda: c.copy_(b)}, 0.5)
    work = {**dict.fromkeys(calls, 2.0 * size**3), "copy": 8.0 * b.numel()}
    found = {name: work[name] / (1e-3 * times[name].median) for name in work}
    say(", ".join(f"{name}: {rate / 1e9:.1f} G/s" for name, rate in found.items()))
    return found


def limit_ms(side: str, mode: str, T: int, rates: dict[str, float]) -> float | str:
    """The time of a call's matrix products at their rate, and of its bytes at that of a copy.

    Products of Latte's chunks of 32 tokens and of the keys that a window sees; backward once more
    what the weights are made of. Bytes are inputs, outputs, gradients: each is moved once. "" for
    the rivals.
    """
    if side in ("jax scan", "sdpa"):
        return ""
    back, C, low = mode == MODES[1], 32, side.endswith(BF16)
    latent = (7 * L * D + 4 * C * L + 3 * C * D) if back else (2 * L * D + C * L + C * D)
    local, sinks = (keys * D * (7 if back else 2) for keys in (WINDOW, SINKS))
    products, widths = {
        "latte": (latent, 2 * L + 2 * D),
        **dict.fromkeys(DECAYS, (latent, 3 * L + 2 * D)),
        "window 128": (local, 4 * D),
        "macchiato": (latent + local, 2 * L + 1 + 4 * D),
        "sinks, late": (latent + local + sinks, 2 * L + 1 + 5 * D),
        "packed 15:1": (latent + local, 2 * L + 1 + 4 * D),
        "rg-lru": (0, 4 * D),
        "conv": (0, 2 * D),
    }[side.removesuffix(BF16)]
    moved = (2 if low else 4) * widths * (2 if back else 1)
    rate = rates["matmul" + BF16 if low else "matmul"]
    return round(1e3 * T * H * (2 * products / rate + moved / rates["copy"]), 3)


def goals_of(rows: Sequence[Row]) -> list[Goal]:
    """The goals at the lengths that were run."""
    goals = []
    for forward, mode in zip((True, False), MODES, strict=True):
        own = select(rows, mode=mode)
        at = {row["side"]: [row] for row in select(own, tokens=GOAL_LENGTH)}
        macchiato = at.get("macchiato", [])
        for side in ("latte", "window 128", "macchiato"):
            name = f"{side}, {mode}, T = {GOAL_LENGTH}: times its limit"
            both = at.get(side, [])
            goals += ratio(name, 2.0 if forward else 2.5, both, both, "median_ms", "limit_ms")
        found = {
            f"T = {row['tokens']}": float(row["median_ms"]) / float(row["limit_ms"])
            for row in select(own, side="rg-lru")
        }
        name = f"rg-lru, {mode}: times the copy rate"
        goals += records.worst(name, 3.0 if forward else 4.0, found, False)
        for name, target, other in (
            ("macchiato in bf16, {}: times faster than in fp32", 1.5, "macchiato" + BF16),
            ("macchiato, {}: rate packed 15:1, of one sequence's", 0.91, "packed 15:1"),
        ):
            name = name.format(f"{mode}, T = {GOAL_LENGTH}")
            goals += ratio(name, target, macchiato, at.get(other, []), "median_ms", at_least=True)
        found = {
            f"{row['side']}, T = {row['tokens']}": float(row["times_latte"])
            for row in own
            if row["side"] in DECAYS and int(row["tokens"]) >= GOAL_LENGTH
        }
        name = f"latents that forget, {mode}: times latte"
        goals += records.worst(name, 1.25, found, False)
        for baseline, text, T, target in (
            ("jax scan", "the jitted scan", GOAL_LENGTH, 3.0 if forward else 5.0),
            ("sdpa", "SDPA", LENGTHS[-1], 20),
        ):
            ours, theirs = (select(own, side=side, tokens=T) for side in ("latte", baseline))
            name = f"{mode}, T = {T}: times faster than {text}"
            goals += ratio(name, target, theirs, ours, "median_ms", at_least=True)
    return goals


# --- time and memory as they grow ---------------------------------------------------------------


def exponent(tokens: Sequence[float], values: Sequence[float]) -> float:
    """Slope of the least-squares line through (log tokens, log value)."""
    x, y = ([math.log(z) for z in zs] for zs in (tokens, values))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    moment = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return moment / sum((a - mean_x) ** 2 for a in x)


def scaling_goals(rows: Sequence[Row]) -> list[Goal]:
    """Exponents of time and memory per mode; in the note that of the longer half."""
    goals = []
    for column, what in (("median_ms", "time"), ("peak_net_mb", "peak memory")):
        for mode in MODES:
            here = select(rows, mode=mode)
            T = [int(row["tokens"]) for row in here]
            # The peak of a quick run may lie in memory that was used before.
            values = [max(1e-3, float(row[column])) for row in here]
            half = len(T) // 2 - (len(T) < 4)
            name = f"{mode}: exponent of {what}, {T[0]} to {T[-1]} tokens"
            note = f"{exponent(T[half:], values[half:]):.3f} from {T[half]} tokens"
            goals.append(Goal(name, 1.05, exponent(T, values), False, note))
    return goals


def scale(args: Any, out: Path) -> list[Goal]:
    """cpu_scaling.csv, its figure and section; the goals."""
    table = records.Table(out / "cpu_scaling.csv", resume=args.resume)
    budget = args.budget or (0.05 if args.quick else 1.0)
    for mode in MODES:
        lengths = (1024, 2048) if args.quick else SCALING
        missing = tuple(T for T in lengths if not table.has(mode=mode, tokens=T))
        if not missing:
            continue
        chosen: Any = {"ops": ("latte",), "models": (), "modes": (mode,), "device": "cpu"}
        chosen |= {"heads": H, "latents": L, "head_dim": D}
        settings = Settings(**chosen, lengths=missing, budget=budget)
        with tempfile.TemporaryDirectory() as folder:
            rows = benchmark(settings, Path(folder), quiet=True).rows
        for row in rows:
            table.add_and_say({name: row[name] for name in SCALED})
    captions = {"median_ms": "Milliseconds:", "peak_net_mb": "Peak memory, MB:"}
    publish(table, "scaling", ("mode",), "tokens", captions)
    return scaling_goals(table.rows)


def main() -> None:
    args = records.parser(__doc__).parse_args()
    out, threads = records.output_folder(args), records.use_all_threads()
    lengths: Sequence[int] = (128, 256) if args.quick else LENGTHS
    unrolls: Sequence[int] = (1, 4) if args.quick else UNROLLS
    budget = args.budget or (0.05 if args.quick else 1.0)
    say(f"ops: B = 1, H = {H}, L = {L}, D = {D}, {threads} threads")
    if not listing1.AVAILABLE:
        say("jax is not installed: leaving out the jax scan (pip install jax)")
    check_sides(64 if args.quick else 256)
    rates = machine_rates(256 if args.quick else 1536)  # bf16 takes seconds where it is emulated
    table = records.Table(out / "cpu_ops.csv", resume=args.resume)
    for mode in MODES:
        missing = [T for T in lengths if not table.has(mode=mode, tokens=T)]
        unroll = 0
        if listing1.AVAILABLE and missing:
            at = lengths[-1] if args.quick else GOAL_LENGTH
            unroll = fastest_unroll(mode, at, unrolls, budget / 2)
        for T in missing:
            sides = make_sides(T)
            calls = {name: side.call(mode) for name, side in sides.items()}
            if listing1.AVAILABLE:
                scan = scan_call(mode, sides["latte"], unroll)
                agree(f"latte with jax scan, {mode}, T = {T}", calls["latte"](), scan())
                calls = {"latte": calls.pop("latte"), "jax scan": scan, **calls}
            measured = machine.interleave(calls, budget)
            for side, statistics in measured.items():
                row: Row = {"side": side, "mode": mode, "tokens": T, **statistics.row()}
                row |= {"times_latte": round(statistics.median / measured["latte"].median, 3)}
                row |= {"unroll": unroll if side == "jax scan" else ""}
                row |= {"limit_ms": limit_ms(side, mode, T, rates)}
                dtype = "bfloat16" if side.endswith(BF16) else "float32"
                table.add_and_say(row | {"dtype": dtype, "B": 1, "H": H, "L": L, "D": D})
    captions = {"median_ms": "Milliseconds, by tokens:"}
    publish(table, "ops", ("mode", "side"), "tokens", captions, {"side": IN_DOCUMENTS})
    records.report_goals(out / "goals.csv", "cpu_ops", goals_of(table.rows) + scale(args, out))


if __name__ == "__main__":
    main()
