"""Time and peak memory of Latte on a CPU, 4k to 256k tokens, and the exponents fitted to them.

fp32, B = 1, H = 8, L = 32, D = 64, causal, all threads. Each length and mode runs in a process
of its own: a small call first (256 tokens), then the inputs, then warm-up and timed calls.

* Time: the median of the timed calls. "forward" without gradients; "forward+backward" with the
  gradients of ``<dy, y>`` for all inputs.
* Peak memory: the process's peak resident memory over all these calls less what was resident
  before the inputs were made. It holds the inputs, outputs, gradients, saved activations and
  intermediates.
* Exponent: the slope of a least-squares line through (log tokens, log value), over all lengths,
  of equal weight. The note gives the slope over the longer half alone, since fixed costs at the
  shorter lengths flatten the line.

    python benchmarks/cpu_scaling.py [--quick] [--out DIR] [--budget SECONDS]
"""

from __future__ import annotations

from collections.abc import Sequence

import records
import torch
from records import MODES, D, Goal, H, L, Row, say

from latte import machine
from latte.ops import latte_attention

LENGTHS = tuple(4096 * 2**i for i in range(7))


def make_inputs(T: int, gradients: bool) -> list[torch.Tensor]:
    """q, k, v and the output's gradient."""
    generator = torch.Generator().manual_seed(T)
    widths = (L, L, D, D) if gradients else (L, L, D)
    inputs = [torch.randn(1, T, H, width, generator=generator) for width in widths]
    return [x.requires_grad_(gradients and i < 3) for i, x in enumerate(inputs)]


def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dy: torch.Tensor | None = None) -> None:
    """One call, with gradients if dy is given."""
    if dy is None:
        with torch.no_grad():
            latte_attention(q, k, v)
    else:
        torch.autograd.grad(latte_attention(q, k, v)[0], (q, k, v), dy)


def measure(mode: str, tokens: int, budget: float) -> Row:
    """One length and mode, in this process."""
    records.use_all_threads()
    gradients = mode == "forward+backward"
    step(*make_inputs(256, gradients))
    before = machine.memory_bytes()
    machine.reset_peak_memory()
    inputs = make_inputs(tokens, gradients)
    times = machine.interleave({"latte": lambda: step(*inputs)}, budget)["latte"]
    return times.row() | records.peaks(before)


def goals_of(rows: Sequence[Row]) -> list[Goal]:
    """Exponents of time and memory per mode."""
    goals = []
    for column, what in (("median_ms", "time"), ("peak_net_mb", "peak memory")):
        for mode in MODES:
            here = [row for row in rows if row["mode"] == mode]
            tokens, values = [row["tokens"] for row in here], [row[column] for row in here]
            upper = max(2, -(-len(here) // 2))
            longer = records.exponent(tokens[-upper:], values[-upper:])
            name = f"{mode}: exponent of {what}, {tokens[0]} to {tokens[-1]} tokens"
            note = f"{longer:.3f} from {tokens[-upper]} tokens"
            goals.append(Goal(name, 1.05, records.exponent(tokens, values), False, note))
    return goals


def main() -> None:
    from figures import of_scaling  # here, so that matplotlib is not part of what is measured

    args = records.parser(__doc__).parse_args()
    out, threads = records.output_folder(args), records.use_all_threads()
    lengths = (1024, 2048) if args.quick else LENGTHS
    budget = args.budget or (0.05 if args.quick else 2.0)
    say(f"scaling: fp32, B = 1, H = {H}, L = {L}, D = {D}, {threads} threads")
    table, apart = records.Table(out / "cpu_scaling.csv"), records.Apart(args.quick)
    for mode in MODES:
        for T in lengths:
            row = apart(measure, mode, T, budget)
            sizes = {"dtype": "float32", "B": 1, "H": H, "L": L, "D": D}
            table.add({"mode": mode, "tokens": T, **row, **sizes})
            say(
                f"{mode:17} T = {T:6} {row['median_ms']:10.2f} ms ({row['calls']} calls), "
                f"{1e3 * row['median_ms'] / T:.2f} us per token; peak memory "
                f"{row['peak_net_mb']:.1f} MB, {1024 * row['peak_net_mb'] / T:.1f} kB per token"
            )
    say(f"wrote {table.path} and {of_scaling(out)}")
    records.report_goals(out, "cpu_scaling", goals_of(table.rows))


if __name__ == "__main__":
    main()
