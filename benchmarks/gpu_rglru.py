"""The RG-LRU and the causal convolution on a GPU, beside the libraries' kernels.

65,536 tokens as B = 1 to 64 sequences, 768 channels, bf16; forward, and forward+backward.

* ``rg_lru``: ``latte.ops.rg_lru``, gates included. ``chunk_hgrn``: flash-linear-attention's
  recurrence, with the gates computed in PyTorch (``gpu_rivals``), compiled where it can be:
  ``compiled gates``.
* ``conv``: ``latte.ops.causal_conv1d``, 3 taps and a bias. ``conv1d``: PyTorch's depthwise
  convolution of the padded, transposed input, transposed back.

    python benchmarks/gpu_rglru.py [--quick] [--out DIR] [--budget SECONDS] [--device DEVICE]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from common import Row
from gpu_common import MODES, Place, call_of, forget, measure, normal, options, place, say
from gpu_rivals import find, rg_lru_inputs, rg_lru_rival
from records import Goal
from torch import Tensor
from torch.nn import functional as F

from latte.ops import causal_conv1d, rg_lru

TOKENS, E, TAPS = 65536, 768, 3
BATCHES = (1, 64, 8, 32, 4, 16, 2)
RIVALS = {"rg_lru": ("chunk_hgrn", "chunk_hgrn, compiled gates"), "conv": ("conv1d",)}
Op = Callable[..., Tensor]


def conv1d(x_BTE: Tensor, weight_EK: Tensor, bias_E: Tensor) -> Tensor:
    """The same convolution by PyTorch's, (B, E, T) inside."""
    padded = F.pad(x_BTE.transpose(1, 2), (weight_EK.shape[1] - 1, 0))
    y = F.conv1d(padded, weight_EK[:, None], bias_E, groups=x_BTE.shape[2])
    return y.transpose(1, 2)


def compiled_hgrn(at: Place) -> Op | None:
    """``chunk_hgrn`` after gates fused by torch.compile."""
    hgrn = find("fla.ops.hgrn", "chunk_hgrn") if at.cuda else None
    if hgrn is None:
        return None
    gates: Any = torch.compile(rg_lru_inputs)
    return lambda *xs: hgrn(*gates(*xs))[0]


def ops_of(at: Place) -> dict[str, dict[str, Op]]:
    """The sides of both comparisons, ours first."""
    recurrences: dict[str, Op] = {"rg_lru": lambda *xs: rg_lru(*xs, backend=at.backend)[0]}
    plain = rg_lru_rival() if at.cuda else None
    fused = compiled_hgrn(at) if plain is not None else None
    for name, op in zip(RIVALS["rg_lru"], (plain, fused), strict=True):
        if op is not None:
            recurrences[name] = op
    convolutions: dict[str, Op] = {
        "conv": lambda *xs: causal_conv1d(*xs, backend=at.backend)[0],
        "conv1d": conv1d,
    }
    return {"rg_lru": recurrences, "conv": convolutions}


def make_inputs(at: Place, op: str, B: int, T: int, width: int) -> tuple[list[Tensor], Tensor]:
    """Inputs and dy."""
    x, r, i, dy = (normal(at, B, T, width, seed=n) for n in range(4))
    if op == "rg_lru":
        return [x, r, i, normal(at, width, seed=4) - 4.0], dy
    return [x, normal(at, width, TAPS, seed=5), normal(at, width, seed=6)], dy


def goals_of(rows: Sequence[Row]) -> list[Goal]:
    """At least the speed of the fastest rival, at the worst size."""
    ms = {(r["op"], r["mode"], r["B"], r["side"]): r["median_ms"] for r in rows}
    goals = []
    for op, rivals in RIVALS.items():
        for mode in MODES:
            ratios = {
                B: min(ms[op, mode, B, s] for s in rivals if (op, mode, B, s) in ms) / ours
                for (o, m, B, side), ours in ms.items()
                if (o, m, side) == (op, mode, op) and any((op, mode, B, s) in ms for s in rivals)
            }
            if ratios:
                worst = min(ratios, key=lambda B: ratios[B])
                name = f"{op} {mode}: times faster than the best rival, worst size"
                goals.append(Goal(name, 1.0, ratios[worst], True, f"at B = {worst}"))
    return goals


def main(argv: Sequence[str] | None = None) -> None:
    at = place(options(__doc__, 40).parse_args(argv))
    tokens, width = (128, 16) if at.quick else (TOKENS, E)
    say(f"rglru: {at.dtype}, {width} channels, {tokens} tokens, {at.device}")
    table, left_out, ops = at.table("gpu_rglru.csv"), 0, ops_of(at)
    for B in (1, 2) if at.quick else BATCHES:
        for op, sides in ops.items():
            for mode in MODES:
                if at.left() <= 0:
                    left_out += 1
                    continue
                inputs, dy = make_inputs(at, op, B, tokens // B, width)
                calls = {side: call_of(mode, fn, inputs, dy) for side, fn in sides.items()}
                times, failed = measure(at, calls, budget=0.05 if at.quick else 0.2)
                if op not in times:
                    say(f"{op} is left out: {failed[op]}")
                    continue
                for side, t in times.items():
                    row: Row = {"op": op, "side": side, "mode": mode, "B": B, "T": tokens // B}
                    row |= {"E": width, "dtype": str(at.dtype).removeprefix("torch."), **t.row()}
                    row |= {"times_ours": round(t.median / times[op].median, 3)}
                    table.add(row)
                    say(
                        f"B = {B:2} {mode:17} {side:26} {t.median:8.3f} ms "
                        f"(p10 {t.p10:.3f}, p90 {t.p90:.3f}), {row['times_ours']:.2f} x {op}"
                    )
        forget()
    if left_out:
        say(f"out of time: {left_out} sizes left out (--budget)")
    at.goals("gpu_rglru", goals_of(table.rows))


if __name__ == "__main__":
    main()
