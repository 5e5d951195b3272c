"""What limits each of Triton's kernels, from its machine code: no GPU is needed, nothing runs.

Two floors are put beside each other, for 65,536 tokens of 8 heads (of 2,048 channels): the time for
the bytes that a kernel moves, and the time in which all its instructions can be issued, one per
cycle by each quarter of a multiprocessor. Both are bounds: no kernel is faster, most are slower.

    python -m experiments.benchmarks.gpu_floors [PART OF A NAME] [--cards 80 90 ...]
    python -m experiments.benchmarks.gpu_floors --write

``--write`` makes ``gpu_floors.csv``, an H100's. ``gpu_ops`` puts its floors beside its times.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from experiments.benchmarks.gpu_ops import WIDTHS
from experiments.benchmarks.records import FLOORS, Row, say, write_rows
from tests.ops.triton_backend.launches import BF16, FAR, KEPT, Case
from tests.ops.triton_backend.machine_code import CARDS, analyse

HEADS: Any = {"heads": (8, 8), "T": 4096}
TIMED = {
    f"latte, L = {L}, D = {D}": Case("latte", BF16, "plain", L=L, D=D, **HEADS) for L, D in WIDTHS
}
TIMED["latte, forgetting, L = 32, D = 64"] = Case("latte", BF16, "plain", forgets=True, **HEADS)
TIMED |= {
    f"macchiato, L = {L}, D = 64": Case("macchiato", BF16, "plain", L=L, window=128, **HEADS)
    for L in (32, 16)
}
SMOLLM2: Any = {"L": 16, "window": 128, "heads": (9, 3), "T": 4096}
TIMED["converted, L = 16, D = 64"] = Case("macchiato", BF16, "plain", **SMOLLM2, **FAR)
TIMED["kept, L = 16, D = 64"] = Case("macchiato", BF16, "plain", **SMOLLM2, **KEPT)
TIMED |= {
    "latte, both directions": Case("latte", BF16, "plain", causal=False, **HEADS),
    "rg_lru": Case("recurrent", BF16, "plain", D=2048, T=4096),
    "conv": Case("convolved", BF16, "plain", D=2048, T=4096, taps=3),
}
H100 = 90
SHOWN = ["case", "kernel", "warps", "stack", "KB", "blocks", "instructions", "bytes_us", "issue_us"]


def table(rows: Sequence[Row]) -> str:
    """A table in Markdown."""
    lines = [
        f"| {' | '.join(SHOWN).replace('_us', ', us')} |",
        "|---|---|" + "---:|" * (len(SHOWN) - 2),
    ]
    lines += [f"| {' | '.join(str(row[name]) for name in SHOWN)} |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", nargs="?", default="", help="of a case's name")
    parser.add_argument("--cards", nargs="+", type=int, default=list(CARDS), choices=CARDS)
    parser.add_argument("--write", action="store_true", help="the CSV file")
    args = parser.parse_args()
    if args.write and args.part:
        parser.error("--write is for all cases: expected no part of a name")
    for capability in [H100] if args.write else args.cards:
        card = CARDS[capability]
        rows = [
            {"case": label, **row.cells(card)}
            for label, case in TIMED.items()
            if args.part in label
            for row in analyse(case, capability)
        ]
        say(f"\n{card.name} (sm_{capability})\n\n{table(rows)}")
    if args.write:
        write_rows(FLOORS, rows)


if __name__ == "__main__":
    main()
