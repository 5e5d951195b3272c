"""Time of the ops on a CPU beside softmax attention, a scan of Listing 1 and the machine's limit.

fp32, B = 1, H = 8 heads, L = 32 latents per head, D = 64 value width. Every side uses all threads.
Sides, all timed in turns in one process (``latte.machine``):

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
tokens, each length in a process of its own: time, peak memory beyond what was resident before the
inputs (inputs, outputs, gradients and all between), and the slopes of least-squares lines in the
logarithms.

    python -m benchmarks.cpu_ops [--quick] [--resume] [--out DIR] [--budget SECONDS]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import listing1, records
from benchmarks.figures import draw
from benchmarks.records import MODES, D, Goal, H, L, Row, call_of, say
from latte import machine
from latte.ops import (
    Sinks,
    causal_conv1d,
    latte_attention,
    macchiato_attention,
    rg_lru,
    sliding_window_attention,
)

WINDOW, SINKS = 128, 4
LENGTHS = (1024, 4096, 16384)
SCALING = (4096, 16384, 65536, 262144)
UNROLLS = (1, 2, 4, 8, 16, 32)
GOAL_LENGTH = 4096
TAPS = 4
BF16 = ", bf16"  # ends the name of a side on bf16 tensors
DECAYS = {"forgets 1/64": 1 / 64, "forgets 1/4": 1 / 4}  # mean per token
# Agreement: a thousand roundings of fp32, relative to the largest entry.
TOLERANCE = 1000 * torch.finfo(torch.float32).eps

Call = Callable[[], Any]
Inputs = dict[str, Tensor]
Key = tuple[str, str, int]
NAMES = {"jax scan": "the jitted scan", "sdpa": "SDPA"}


def make_inputs(T: int) -> Inputs:
    """Standard normal inputs of every op; the same for every side."""
    generator = torch.Generator().manual_seed(T)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "latent_q": normal(1, T, H, L),
        "latent_k": normal(1, T, H, L),
        "window_logit": normal(1, T, H, 1),
        "q": normal(1, T, H, D),
        "sink_q": normal(1, T, H, D),
        "k": normal(1, T, H, D),
        "v": normal(1, T, H, D),
        "theta": normal(H * D),
        "taps": normal(H * D, TAPS),
        "dy": normal(1, T, H, D),
        "decay": -torch.empty(1, T, H, L).exponential_(generator=generator),
    }


def torch_sides(mode: str, x: Inputs) -> dict[str, Call]:
    """All sides that run in torch."""
    T = x["v"].shape[1]
    heads_first = [x[name].transpose(1, 2).contiguous() for name in ("q", "k", "v")]
    dy_heads_first = x["dy"].transpose(1, 2).contiguous()
    latent_q = torch.cat([x["window_logit"], x["latent_q"]], -1)
    channels = [x[name].reshape(1, T, H * D) for name in ("v", "q", "k")]

    def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def macchiato(*tensors: Tensor) -> Tensor:
        return macchiato_attention(*tensors, window=WINDOW)[0]

    def late(latent_q: Tensor, latent_k: Tensor, q: Tensor, k: Tensor, v: Tensor, sink_q: Tensor):
        mask = torch.ones(1, SINKS, dtype=torch.bool)
        sinks = Sinks(sink_q, k[:, :SINKS], v[:, :SINKS], mask)
        inputs = latent_q, latent_k, q, k, v
        return macchiato_attention(*inputs, window=WINDOW, sinks=sinks, delay=True)[0]

    def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sliding_window_attention(q, k, v, window=WINDOW)[0]

    def packed(*tensors: Tensor) -> Tensor:
        bounds = torch.tensor([0, T - T // 16, T], dtype=torch.int32)
        return macchiato_attention(*tensors, window=WINDOW, cu_seqlens=bounds)[0]

    def recurrent(*tensors: Tensor) -> Tensor:
        return rg_lru(*tensors)[0]

    def convolution(*tensors: Tensor) -> Tensor:
        return causal_conv1d(*tensors)[0]

    local = [x["q"], x["k"], x["v"]]
    dy, dy_channels = x["dy"], x["dy"].reshape(1, T, H * D)
    calls: dict[str, tuple[Callable[..., Tensor], list[Tensor], Tensor]] = {
        "macchiato": (macchiato, [latent_q, x["latent_k"], *local], dy),
        "rg-lru": (recurrent, [*channels, x["theta"]], dy_channels),
        "conv": (convolution, [channels[0], x["taps"]], dy_channels),
    }
    low = {
        name + BF16: (op, [tensor.bfloat16() for tensor in inputs], dy.bfloat16())
        for name, (op, inputs, dy) in calls.items()
    }
    return {
        "latte": latte_call(mode, x),
        **{name: latte_call(mode, x, mean) for name, mean in DECAYS.items()},
        **{name: call_of(mode, *call) for name, call in (calls | low).items()},
        "packed 15:1": call_of(mode, packed, [latent_q, x["latent_k"], *local], dy),
        "sinks, late": call_of(mode, late, [latent_q, x["latent_k"], *local, x["sink_q"]], dy),
        "window 128": call_of(mode, window, local, dy),
        "sdpa": call_of(mode, softmax, heads_first, dy_heads_first),
    }


def latte_call(mode: str, x: Inputs, decay: float = 0.0, backend: str | None = None) -> Call:
    """Latte's side; with a decay of this mean its latents forget."""

    def latte(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None) -> Tensor:
        return latte_attention(q, k, v, log_decay=log_decay, backend=backend)[0]

    forgets = [x["decay"] * decay] if decay else []
    return call_of(mode, latte, [x["latent_q"], x["latent_k"], x["v"], *forgets], x["dy"])


def scan_call(mode: str, x: Inputs, unroll: int) -> Call:
    """The scan's side."""
    q, k, v = x["latent_q"], x["latent_k"], x["v"]
    if mode == "forward":
        return listing1.forward(q, k, v, unroll)
    return listing1.gradients(q, k, v, x["dy"], unroll)


def difference(ours: Any, theirs: Any) -> float:
    """Largest difference relative to the largest entry, over one array or a tuple of them."""
    ours, theirs = ([x] if not isinstance(x, tuple) else x for x in (ours, theirs))
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        a, b = (y if isinstance(y, Tensor) else listing1.to_torch(y) for y in (a, b))
        worst = max(worst, ((a.double() - b.double()).abs().max() / b.abs().max()).item())
    return worst


def agree(label: str, ours: Any, theirs: Any) -> None:
    """Stop unless two sides computed the same function."""
    worst = difference(ours, theirs)
    say(f"check {label}: relative difference {worst:.1e}")
    if not worst <= TOLERANCE:
        raise SystemExit(f"check failed: {label} differ by {worst:.1e}, allowed {TOLERANCE:.1e}")


def check_sides(T: int) -> None:
    """Latte and the scan against the equations in fp64, values and gradients."""
    x = make_inputs(T)
    exact = {name: value.double() for name, value in x.items()}
    for mode in MODES:
        for decay in (*DECAYS.values(), 0.0):
            judge = latte_call(mode, exact, decay, backend="reference")()
            name = f"latte, decay {decay:g}, {mode}, with the fp64 reference"
            agree(name, latte_call(mode, x, decay)(), judge)
        if listing1.AVAILABLE:
            scan = scan_call(mode, x, unroll=4)()
            agree(f"jax scan, {mode}, with the fp64 reference", scan, judge)


def fastest_unroll(mode: str, T: int, unrolls: Sequence[int], budget: float) -> int:
    """The unroll whose median time is the smallest, all timed in turns."""
    x = make_inputs(T)
    times = machine.interleave({str(n): scan_call(mode, x, n) for n in unrolls}, budget)
    best = min(times, key=lambda n: times[n].median)
    all_of_them = ", ".join(f"{n}: {t.median:.1f} ms" for n, t in times.items())
    say(f"unroll, {mode}, T = {T}: {all_of_them}; fastest {best}")
    return int(best)


def limit_ms(side: str, mode: str, T: int, rates: dict[str, float]) -> float:
    """The time of a call's matrix products at their rate, and of its bytes at that of a copy.

    Products of Latte's chunks of 32 tokens and of the keys that a window sees; backward once more
    what the weights are made of. Bytes are inputs, outputs, gradients: each is moved once.
    """
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
    return 1e3 * T * H * (2 * products / rate + moved / rates["copy"])


def goals_of(rows: Sequence[Row]) -> list[Goal]:
    """The goals at the lengths that were run."""
    times = {(r["side"], r["mode"], int(r["tokens"])): float(r["median_ms"]) for r in rows}
    limits = {
        (r["side"], r["mode"], int(r["tokens"])): float(r["limit_ms"])
        for r in rows
        if r["limit_ms"]
    }
    goals = []

    def ratio(name: str, target: float, a: Key, b: Key, others: dict[Key, float]) -> None:
        if a in times and b in others:
            high, low, fast = times[a], others[b], others is times
            first, second = (low, high) if fast else (high, low)
            note = f"{first:.1f} ms against {second:.1f} ms"
            goals.append(Goal(name, target, high / low, fast, note))

    for mode, most in zip(MODES, (2.0, 2.5), strict=True):
        for side in ("latte", "window 128", "macchiato"):
            key = (side, mode, GOAL_LENGTH)
            ratio(f"{side}, {mode}, T = {GOAL_LENGTH}: times its limit", most, key, key, limits)
        found = {
            f"T = {T}": times[side, m, T] / limits[side, m, T]
            for side, m, T in limits
            if (side, m) == ("rg-lru", mode)
        }
        most = 3.0 if mode == MODES[0] else 4.0
        goals += records.worst(f"rg-lru, {mode}: times the copy rate", most, found, False)
        name = f"macchiato in bf16, {mode}, T = {GOAL_LENGTH}: times faster than in fp32"
        first, second = (("macchiato" + end, mode, GOAL_LENGTH) for end in ("", BF16))
        ratio(name, 1.5, first, second, times)
        name = f"macchiato, {mode}, T = {GOAL_LENGTH}: rate packed 15:1, of one sequence's"
        ratio(name, 0.91, first, ("packed 15:1", mode, GOAL_LENGTH), times)
        found = {
            f"{side}, T = {T}": times[side, m, T] / times["latte", m, T]
            for side, m, T in times
            if side in DECAYS and m == mode and T >= GOAL_LENGTH
        }
        goals += records.worst(f"latents that forget, {mode}: times latte", 1.25, found, False)
    for rival, T, targets in (
        ("jax scan", GOAL_LENGTH, (3.0, 5.0)),
        ("sdpa", LENGTHS[-1], (20, 20)),
    ):
        for mode, target in zip(MODES, targets, strict=True):
            name = f"{mode}, T = {T}: times faster than {NAMES[rival]}"
            ratio(name, target, (rival, mode, T), ("latte", mode, T), times)
    return goals


# --- one length in a process of its own: time and memory as they grow ----------------------------


def alone(mode: str, T: int, budget: float) -> Row:
    """Time and peak memory of Latte, inputs and gradients included, in this process."""
    records.use_all_threads()

    def prepare(T: int) -> Call:
        generator = torch.Generator().manual_seed(T)
        shapes = (("latent_q", L), ("latent_k", L), ("v", D), ("dy", D))
        made = shapes if mode == MODES[1] else shapes[:3]
        x = {name: torch.randn(1, T, H, width, generator=generator) for name, width in made}
        return latte_call(mode, {"dy": x["v"], **x})

    prepare(256)()
    before = machine.memory_bytes()
    machine.reset_peak_memory()
    times = machine.interleave({"latte": prepare(T)}, budget)["latte"]
    return times.row() | records.peaks(before)


def scaling_goals(rows: Sequence[Row]) -> list[Goal]:
    """Exponents of time and memory per mode; in the note that of the longer half."""
    goals = []
    for column, what in (("median_ms", "time"), ("peak_net_mb", "peak memory")):
        for mode in MODES:
            here = [row for row in rows if row["mode"] == mode]
            # Of a quick run, in memory that was used before, the peak may be 0.
            found = {int(row["tokens"]): max(1e-3, float(row[column])) for row in here}
            T, values = list(found), list(found.values())
            half = len(T) // 2 - (len(T) < 4)
            name = f"{mode}: exponent of {what}, {T[0]} to {T[-1]} tokens"
            note = f"{records.exponent(T[half:], values[half:]):.3f} from {T[half]} tokens"
            goals.append(Goal(name, 1.05, records.exponent(T, values), False, note))
    return goals


def scale(args: Any, out: Path) -> list[Goal]:
    """cpu_scaling.csv, its figure and section; the goals."""
    table = records.Table(out / "cpu_scaling.csv", resume=args.resume)
    apart = records.Apart(args.quick)
    for mode in MODES:
        for T in (1024, 2048) if args.quick else SCALING:
            if not table.has(mode=mode, tokens=T):
                row = apart(alone, mode, T, args.budget or (0.05 if args.quick else 1.0))
                table.add({"mode": mode, "tokens": T, **row, "dtype": "float32"})
                say(
                    f"{mode:17} T = {T:6} {row['median_ms']:10.2f} ms ({row['calls']} calls), "
                    f"peak memory {row['peak_net_mb']:.1f} MB"
                )
    captions = {"median_ms": "Milliseconds:", "peak_net_mb": "Peak memory, MB:"}
    tables = [
        records.pivot(text, table.rows, ("mode",), "tokens", c) for c, text in captions.items()
    ]
    records.document(out, "scaling", table.rows, *tables)
    say(f"wrote {table.path} and {draw(out, 'cpu_scaling')}")
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

    rates = records.rates()
    say(
        f"{rates['matmul'] / 1e9:.0f} GFLOP/s of products, {rates['copy'] / 1e9:.1f} GB/s of copies"
    )
    table = records.Table(out / "cpu_ops.csv", resume=args.resume)
    for mode in MODES:
        missing = [T for T in lengths if not table.has(mode=mode, tokens=T)]
        unroll = 0
        if listing1.AVAILABLE and missing:
            at = lengths[-1] if args.quick else GOAL_LENGTH
            unroll = fastest_unroll(mode, at, unrolls, budget / 2)
        for T in missing:
            x = make_inputs(T)
            sides = torch_sides(mode, x)
            if listing1.AVAILABLE:
                scan = scan_call(mode, x, unroll)
                agree(f"latte with jax scan, {mode}, T = {T}", sides["latte"](), scan())
                sides = {"latte": sides.pop("latte"), "jax scan": scan, **sides}
            measured = machine.interleave(sides, budget)
            for side, statistics in measured.items():
                row: Row = {"side": side, "mode": mode, "tokens": T, **statistics.row()}
                row |= {"times_latte": round(statistics.median / measured["latte"].median, 3)}
                row |= {"unroll": unroll if side == "jax scan" else ""}
                limited = side not in ("jax scan", "sdpa")
                row |= {"limit_ms": round(limit_ms(side, mode, T, rates), 3) if limited else ""}
                dtype = "bfloat16" if side.endswith(BF16) else "float32"
                table.add(row | {"dtype": dtype, "B": 1, "H": H, "L": L, "D": D})
                say(
                    f"{mode:17} T = {T:6} {side:15} {statistics.median:10.2f} ms "
                    f"(p10 {statistics.p10:.2f}, p90 {statistics.p90:.2f}, "
                    f"{statistics.calls} calls), {row['times_latte']:.2f} x latte",
                )
    say(f"wrote {table.path} and {draw(out, 'cpu_ops')}")
    bounded = [row for row in table.rows if row["limit_ms"]]
    tables = [
        records.pivot(text, rows, ("mode", "side"), "tokens", column)
        for text, rows, column in (
            ("Milliseconds, by tokens:", table.rows, "median_ms"),
            ("The limit, milliseconds:", bounded, "limit_ms"),
        )
    ]
    records.document(out, "ops", table.rows, *tables)
    records.report_goals(out, "cpu_ops", goals_of(table.rows) + scale(args, out))


if __name__ == "__main__":
    main()
