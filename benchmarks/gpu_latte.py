"""Causal Latte on a GPU beside flash-linear-attention's kernels: time, memory, errors.

65,536 tokens as B = 1 to 64 sequences, H = 8, L = 16 and 32 latents per head, D = 64, 128 and 256,
bf16; forward, and forward+backward (the gradients of ``<dy, y>`` for q, k and v).

* ``latte``: ``latte.ops.latte_attention``.
* ``chunk_lightnet``, ``chunk_gla``: the same function from the same q, k and v (``gpu_rivals``);
  ``gla, gates given`` starts from softmax, keys and gates made beforehand, for information.
* Bytes: the least that any kernel must move, inputs and outputs once each, over the median time;
  beside it the bandwidth of a copy in the same run.
* Saved: distinct storages that autograd holds between the passes, inputs included.
* Errors: relative norms against fp64, of outputs and of gradients, at 1,024 tokens.

    python benchmarks/gpu_latte.py [--quick] [--out DIR] [--budget SECONDS] [--device DEVICE]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from common import Row
from gpu_common import (
    MODES,
    Memory,
    Place,
    call_of,
    copy_bandwidth,
    forget,
    measure,
    memory_of,
    normal,
    options,
    place,
    reason,
    relative,
    say,
    stop_if_broken,
)
from gpu_rivals import gates, gla_with_given_gates, latte_rivals
from records import Goal
from torch import Tensor

from latte.ops import latte_attention

OURS = "latte"
RIVALS = ("chunk_lightnet", "chunk_gla")
H, TOKENS, T_OF_ERRORS = 8, 65536, 1024
WIDTHS = ((32, 64), (16, 64), (32, 128), (16, 128), (32, 256), (16, 256))
BATCHES = (1, 64, 8, 32, 4, 16, 2)
Op = Callable[..., Tensor]


def latte(backend: str) -> Op:
    return lambda q, k, v: latte_attention(q, k, v, backend=backend)[0]


def make_inputs(at: Place, B: int, T: int, L: int, D: int) -> list[Tensor]:
    """q, k, v and dy, standard normal."""
    return [normal(at, B, T, H, n, seed=i) for i, n in enumerate((L, L, D, D))]


def least_bytes(mode: str, tokens: int, L: int, D: int, size: int) -> int:
    """Every input read once and every output written once."""
    forward = 2 * L + 2 * D
    backward = 4 * L + 3 * D  # q, k, v, dy in; dq, dk, dv out
    return tokens * H * size * (forward if mode == "forward" else forward + backward)


def sizes(quick: bool) -> Iterator[tuple[int, int, int, int]]:
    """(B, T, L, D): the ends of the range first, so that a cut run has seen them."""
    if quick:
        yield from ((1, 64, 16, 16), (2, 32, 16, 16))
        return
    for batches in (BATCHES[:2], BATCHES[2:]):
        for L, D in WIDTHS:
            for B in batches:
                yield B, TOKENS // B, L, D


def errors(at: Place, ops: dict[str, Op], T: int, L: int, D: int) -> dict[str, dict[str, float]]:
    """Relative errors of every side against the equations in fp64: output, dq, dk, dv."""
    *inputs, dy = make_inputs(at, 1, T, L, D)

    def run(op: Op, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = op(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, dy.to(out.dtype))]

    exact = run(latte("reference"), torch.float64)
    found = {}
    for side, op in ops.items():
        try:
            got = run(op, at.dtype)
        except Exception as error:  # noqa: BLE001 - a rival that cannot run is left out
            stop_if_broken(at, error)
            say(f"  {side}: {reason(error)}")
            continue
        names = ("error_out", "error_dq", "error_dk", "error_dv")
        found[side] = {n: relative(a, e) for n, a, e in zip(names, got, exact, strict=True)}
    return found


def memories(at: Place, ops: dict[str, Op], inputs: Sequence[Tensor]) -> dict[str, Memory]:
    """Memory of every side that can run."""
    found = {}
    for side, op in ops.items():
        try:
            found[side] = memory_of(at, op, inputs)
        except Exception as error:  # noqa: BLE001
            stop_if_broken(at, error)
            say(f"  {side}, memory: {reason(error)}")
        forget()
    return found


def compare(at: Place, rivals: dict[str, Op], B: int, T: int, L: int, D: int) -> list[Row]:
    """The rows of one size: both modes of every side."""
    ops = {OURS: latte(at.backend), **rivals}
    *inputs, dy = make_inputs(at, B, T, L, D)
    memory = memories(at, ops, inputs)
    bandwidth = copy_bandwidth(at.device)
    rows = []
    for mode in MODES:
        calls = {side: call_of(mode, op, inputs, dy) for side, op in ops.items()}
        given = gla_with_given_gates() if rivals else None
        if given is not None:
            q, k, v = inputs
            keys, g = gates(k)
            calls["gla, gates given"] = call_of(mode, given, [q.softmax(-1), keys, g, v], dy)
        times, failed = measure(at, calls, budget=0.05 if at.quick else 0.15)
        if OURS not in times:
            raise RuntimeError(f"latte did not run: {failed[OURS]}")
        least = least_bytes(mode, B * T, L, D, inputs[0].element_size())
        for side, t in times.items():
            rate = least / (t.median / 1e3)
            row: Row = {"side": side, "mode": mode, "B": B, "T": T, "H": H, "L": L, "D": D}
            row |= {"dtype": str(at.dtype).removeprefix("torch."), **t.row()}
            row |= {"times_latte": round(t.median / times[OURS].median, 3)}
            row |= {"least_bytes": least, "gb_per_s": round(rate / 1e9, 1)}
            row |= {"copy_gb_per_s": round(bandwidth / 1e9, 1)}
            row |= {"of_copy": round(rate / bandwidth, 4)}
            row |= memory[side].row() if side in memory else Memory(0, None, None).row()
            rows.append(row)
    return rows


def goals_of(rows: Sequence[Row], wrong: dict[str, dict[str, float]]) -> list[Goal]:
    """The worst size of each goal; goals that compare need a rival that ran."""
    goals = []
    sized: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        key = (row["mode"], row["L"], row["D"], row["B"])
        sized.setdefault(key, {})[row["side"]] = row
    for mode in MODES:
        here = {k: v for k, v in sized.items() if k[0] == mode}
        ratios = {
            k: min(v[r]["median_ms"] for r in RIVALS if r in v) / v[OURS]["median_ms"]
            for k, v in here.items()
            if any(r in v for r in RIVALS)
        }
        if ratios:
            worst = min(ratios, key=lambda k: ratios[k])
            met = sum(r >= 2 for r in ratios.values())
            note = f"at L={worst[1]}, D={worst[2]}, B={worst[3]}; {met} of {len(ratios)} sizes pass"
            name = f"latte {mode}: times faster than the best rival, worst size"
            goals.append(Goal(name, 2.0, ratios[worst], True, note))
    saved = {
        k: v[OURS]["saved_mb"] / min(v[r]["saved_mb"] for r in RIVALS if r in v)
        for k, v in sized.items()
        if k[0] == MODES[1] and any(r in v for r in RIVALS)
    }
    if saved:
        most = max(saved, key=lambda k: saved[k])
        note = f"at L={most[1]}, D={most[2]}, B={most[3]}"
        goals.append(
            Goal("latte: saved activations over a rival's", 1 / 3, saved[most], False, note)
        )
    shares = {k: v[OURS]["of_copy"] for k, v in sized.items() if k[0] == "forward"}
    if shares:
        least = min(shares, key=lambda k: shares[k])
        note = f"at L={least[1]}, D={least[2]}, B={least[3]}; best {max(shares.values()):.2f}"
        goals.append(Goal("latte forward: share of copy bandwidth", 0.6, shares[least], True, note))
    if OURS in wrong and any(r in wrong for r in RIVALS):
        over = {
            n: wrong[OURS][n] / min(wrong[r][n] for r in RIVALS if r in wrong) for n in wrong[OURS]
        }
        name = max(over, key=lambda n: over[n])
        goals.append(
            Goal("latte: largest error over the best rival's", 1.0, over[name], False, name)
        )
    return goals


def main(argv: Sequence[str] | None = None) -> None:
    at = place(options(__doc__, 110).parse_args(argv))
    rivals = latte_rivals() if at.cuda else {}
    say(f"latte: {at.dtype}, H = {H}, {at.device}, backend {at.backend}")
    say(f"copy: {copy_bandwidth(at.device) / 1e9:.0f} GB/s read and written")
    L, D = (16, 16) if at.quick else WIDTHS[0]
    wrong = errors(at, {OURS: latte(at.backend), **rivals}, 64 if at.quick else T_OF_ERRORS, L, D)
    table = at.table("gpu_latte_errors.csv")
    for side, found in wrong.items():
        table.add({"side": side, "L": L, "D": D, **found})
        say(f"errors {side:18} " + ", ".join(f"{n[6:]} {e:.2e}" for n, e in found.items()))
    table, left_out = at.table("gpu_latte.csv"), 0
    for B, T, L, D in sizes(at.quick):
        if at.left() <= 0:
            left_out += 1
            continue
        for row in compare(at, rivals, B, T, L, D):
            table.add(row)
            say(
                f"L = {L} D = {D:3} B = {B:2} {row['mode']:17} {row['side']:17} "
                f"{row['median_ms']:8.3f} ms (p10 {row['p10_ms']:.3f}, p90 {row['p90_ms']:.3f}), "
                f"{row['times_latte']:.2f} x latte, {100 * row['of_copy']:.0f}% of copy, "
                f"saved {row['saved_mb']} MB"
            )
        forget()
    if left_out:
        say(f"out of time: {left_out} sizes left out (--budget)")
    at.goals("gpu_latte", goals_of(table.rows, wrong))


if __name__ == "__main__":
    main()
