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

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpu_common import Place, compare, expected_ms, normal, options, place
from gpu_rivals import find, rg_lru_inputs, rg_lru_rival
from records import MODES, Goal, Row, call_of, say, worst
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
                f"B = {B}": min(ms[op, mode, B, s] for s in rivals if (op, mode, B, s) in ms) / ours
                for (o, m, B, side), ours in ms.items()
                if (o, m, side) == (op, mode, op) and any((op, mode, B, s) in ms for s in rivals)
            }
            name = f"{op} {mode}: times faster than the best rival, worst size"
            goals += worst(name, 1.0, ratios, True)
    return goals


def main(argv: Sequence[str] | None = None) -> None:
    at = place(options(__doc__, 40).parse_args(argv))
    tokens, width = (128, 16) if at.quick else (TOKENS, E)
    say(f"rglru: {at.dtype}, {width} channels, {tokens} tokens, {at.device}")
    table, ops = at.table("gpu_rglru.csv"), ops_of(at)
    batches = (1, 2) if at.quick else BATCHES
    for B, op, mode in at.while_time((B, op, m) for B in batches for op in ops for m in MODES):
        inputs, dy = make_inputs(at, op, B, tokens // B, width)
        calls = {side: call_of(mode, fn, inputs, dy) for side, fn in ops[op].items()}
        sizes = {"op": op, "mode": mode, "B": B, "T": tokens // B, "E": width}
        expected = expected_ms(at, op, mode, tokens * width / (65536 * 2048))
        run = functools.partial(compare, ratio="times_ours", budget=0.2, expected=expected)
        run(at, table, op, calls, sizes)
    at.goals("gpu_rglru", goals_of(table.rows))


if __name__ == "__main__":
    main()
