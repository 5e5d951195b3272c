"""Causal Latte on a GPU beside flash-linear-attention's kernels: time, memory, errors.

65,536 tokens as B = 1 to 64 sequences, H = 8, L = 16 and 32 latents per head, D = 64, 128 and 256,
bf16; forward, and forward+backward (the gradients of ``<dy, y>`` for q, k and v).

* ``latte``: ``latte.ops.latte_attention``.
* ``chunk_lightnet``, ``chunk_gla``: the same function from the same q, k and v (``gpu_rivals``);
  ``gla, gates given`` starts from softmax, keys and gates made beforehand, for information.
* Bytes: the least that any kernel must move, inputs and outputs once each, over the median time;
  beside it the bandwidth of a copy in the same run.
* Saved: distinct storages that autograd holds between the passes, inputs included.
* Expected: the least time that the kernels' machine code allows (docs/kernels.md).
* sigma: of the logits, 1; and 4 and 8, Latte alone, where tokens go beyond its references' reach.
* Errors: relative norms against fp64, of outputs and of gradients, at 1,024 tokens.

    python benchmarks/gpu_latte.py [--quick] [--out DIR] [--budget SECONDS] [--device DEVICE]
    python benchmarks/gpu_latte.py --warm NUMBER      # measures nothing

``--warm`` compiles what the benchmarks will run, every fourth part of it, so that their time goes
to measuring: Triton keeps what it compiles on disk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import gpu_common as gpu
import torch
from gpu_rivals import gates, gla_with_given_gates, latte_rivals, rg_lru_rival
from records import MODES, Goal, Row, Table, call_of, say, worst
from torch import Tensor

from latte.machine import Times
from latte.ops import latte_attention

OURS = "latte"
RIVALS = ("chunk_lightnet", "chunk_gla")
H, TOKENS, T_OF_ERRORS = 8, 65536, 1024
WARMING, WARM_TOKENS = 4, 2048  # processes
WIDTHS = ((32, 64), (16, 64), (32, 128), (16, 128), (32, 256), (16, 256))
BATCHES = (1, 64, 8, 32, 4, 16, 2)
Op = Callable[..., Tensor]


def latte(backend: str) -> Op:
    return lambda q, k, v: latte_attention(q, k, v, backend=backend)[0]


def make_inputs(at: gpu.Place, B: int, T: int, L: int, D: int, sigma: float = 1.0) -> list[Tensor]:
    """q, k, v and dy, standard normal; q and k times ``sigma``."""
    found = [gpu.normal(at, B, T, H, n, seed=i) for i, n in enumerate((L, L, D, D))]
    return [x * sigma for x in found[:2]] + found[2:]


def least_bytes(mode: str, tokens: int, L: int, D: int, size: int) -> int:
    """Every input read once and every output written once."""
    forward = 2 * L + 2 * D
    backward = 4 * L + 3 * D  # q, k, v, dy in; dq, dk, dv out
    return tokens * H * size * (forward if mode == "forward" else forward + backward)


def sizes(quick: bool) -> list[tuple[int, int, int, int, float]]:
    """(B, T, L, D, sigma): the ends of the range first, so that a cut run has seen them."""
    if quick:
        return [(1, 64, 16, 16, 1.0), (2, 32, 16, 16, 1.0), (1, 64, 16, 16, 8.0)]
    parts = (BATCHES[:2], BATCHES[2:])
    found = [(B, TOKENS // B, L, D, 1.0) for part in parts for L, D in WIDTHS for B in part]
    wide = [(B, TOKENS // B, *WIDTHS[0], sigma) for sigma in (4.0, 8.0) for B in BATCHES[:2]]
    return found[:2] + wide + found[2:]


def errors(
    at: gpu.Place, ops: dict[str, Op], T: int, L: int, D: int
) -> dict[str, dict[str, float]]:
    """Relative errors of every side against the equations in fp64: output, dq, dk, dv."""
    *inputs, dy = make_inputs(at, 1, T, L, D)

    def run(op: Op, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = op(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, dy.to(out.dtype))]

    exact = run(latte("reference"), torch.float64)
    found = {}
    names = ("error_out", "error_dq", "error_dk", "error_dv")
    for side, op in ops.items():
        with gpu.tried(at, side):
            pairs = zip(names, run(op, at.dtype), exact, strict=True)
            found[side] = {name: gpu.relative(got, want) for name, got, want in pairs}
    return found


def memories(at: gpu.Place, ops: dict[str, Op], inputs: Sequence[Tensor]) -> dict[str, gpu.Memory]:
    """Memory of every side that can run."""
    found = {}
    for side, op in ops.items():
        with gpu.tried(at, f"{side}, memory"):
            found[side] = gpu.memory_of(at, op, inputs)
        gpu.forget()
    return found


def rows_of_size(
    at: gpu.Place, table: Table, rivals: dict[str, Op], B: int, T: int, L: int, D: int, sigma: float
) -> None:
    """The rows of one size: both modes of every side."""
    rivals = rivals if sigma == 1.0 else {}
    ops = {OURS: latte(at.backend), **rivals}
    *inputs, dy = make_inputs(at, B, T, L, D, sigma)
    memory = memories(at, ops, inputs)
    bandwidth = gpu.copy_bandwidth(at.device)
    for mode in MODES:
        calls = {side: call_of(mode, op, inputs, dy) for side, op in ops.items()}
        given = gla_with_given_gates() if rivals else None
        if given is not None:
            q, k, v = inputs
            keys, g = gates(k)
            calls["gla, gates given"] = call_of(mode, given, [q.softmax(-1), keys, g, v], dy)
        size = inputs[0].element_size()
        least = least_bytes(mode, B * T, L, D, size)
        expected = gpu.expected_ms(at, f"latte, L = {L}, D = {D}", mode, B * T / TOKENS)

        def more(side: str, t: Times, least: int = least) -> Row:
            rate = least / (t.median / 1e3)
            return {
                "least_bytes": least,
                "gb_per_s": round(rate / 1e9, 1),
                "copy_gb_per_s": round(bandwidth / 1e9, 1),
                "of_copy": round(rate / bandwidth, 4),
                **memory.get(side, gpu.Memory(0, None, None)).row(),
            }

        sizes = {"mode": mode, "B": B, "T": T, "H": H, "L": L, "D": D, "sigma": sigma}
        run = functools.partial(gpu.compare, ratio="times_latte", budget=0.15, expected=expected)
        if not run(at, table, OURS, calls, sizes, more):
            raise RuntimeError("latte did not run")


def goals_of(rows: Sequence[Row], wrong: dict[str, dict[str, float]]) -> list[Goal]:
    """The worst size of each goal; goals that compare need a rival that ran."""
    sized: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if row["sigma"] != 1.0:
            continue
        size = f"L = {row['L']}, D = {row['D']}, B = {row['B']}"
        sized.setdefault((row["mode"], size), {})[row["side"]] = row

    def over(mode: str, column: str) -> dict[str, float]:
        """The best rival's over ours, by size."""
        return {
            size: min(sides[r][column] for r in RIVALS if r in sides) / sides[OURS][column]
            for (m, size), sides in sized.items()
            if m == mode and any(r in sides for r in RIVALS)
        }

    goals = []
    for mode in MODES:
        name = f"latte {mode}: times faster than the best rival, worst size"
        goals += worst(name, 2.0, over(mode, "median_ms"), True)
    saved = {size: 1 / x for size, x in over(MODES[1], "saved_mb").items()}
    goals += worst("latte: saved activations over a rival's", 1 / 3, saved, False)
    shares = {size: s[OURS]["of_copy"] for (mode, size), s in sized.items() if mode == MODES[0]}
    goals += worst("latte forward: share of copy bandwidth", 0.6, shares, True)
    if OURS in wrong and any(r in wrong for r in RIVALS):
        errors = {
            n: wrong[OURS][n] / min(wrong[r][n] for r in RIVALS if r in wrong) for n in wrong[OURS]
        }
        goals += worst("latte: largest error over the best rival's", 1.0, errors, False)
    return goals


def warm(at: gpu.Place, number: int) -> None:
    """Every fourth of the widths' comparisons and the recurrence's, once."""

    def width(L: int, D: int) -> None:
        *inputs, dy = make_inputs(at, 1, WARM_TOKENS, L, D)
        for op in (latte(at.backend), *latte_rivals().values()):
            call_of(MODES[1], op, inputs, dy)()

    def recurrence() -> None:
        op = rg_lru_rival()
        if op is not None:
            x = torch.randn(1, WARM_TOKENS, 768, device=at.device, dtype=at.dtype)
            call_of(MODES[1], op, [x, x, x, x[0, 0]], x)()

    jobs: list[Callable[[], None]] = [*(lambda s=s: width(*s) for s in WIDTHS), recurrence]
    for job in jobs[number::WARMING]:
        with gpu.tried(at, "warming"):
            job()


def main(argv: Sequence[str] | None = None) -> None:
    parser = gpu.options(__doc__, 110)
    parser.add_argument("--warm", type=int, choices=range(WARMING), help="compile, measure nothing")
    args = parser.parse_args(argv)
    at = gpu.place(args)
    if args.warm is not None:
        warm(at, args.warm)
        return
    rivals = latte_rivals() if at.cuda else {}
    say(f"latte: {at.dtype}, H = {H}, {at.device}, backend {at.backend}")
    say(f"copy: {gpu.copy_bandwidth(at.device) / 1e9:.0f} GB/s read and written")
    L, D = (16, 16) if at.quick else WIDTHS[0]
    wrong = errors(at, {OURS: latte(at.backend), **rivals}, 64 if at.quick else T_OF_ERRORS, L, D)
    table = at.table("gpu_latte_errors.csv")
    for side, found in wrong.items():
        table.add({"side": side, "L": L, "D": D, **found})
        say(f"errors {side:18} " + ", ".join(f"{n[6:]} {e:.2e}" for n, e in found.items()))
    table = at.table("gpu_latte.csv")
    for size in at.while_time(sizes(at.quick)):
        rows_of_size(at, table, rivals, *size)
    at.goals("gpu_latte", goals_of(table.rows, wrong))


if __name__ == "__main__":
    main()
