"""Compile what the benchmarks will run, so that their time goes to measuring.

    python benchmarks/gpu_warm.py NUMBER [--device DEVICE]

NUMBER of four picks every fourth job. Triton keeps what it compiles on disk; what the rivals'
autotuners choose meanwhile is forgotten, since it was timed beside other work.
"""

from __future__ import annotations

import os

os.environ["FLA_CACHE_RESULTS"] = "0"

from collections.abc import Callable, Sequence

import torch
from gpu_common import call_of, options, place, reason, say
from gpu_latte import WIDTHS, latte, make_inputs
from gpu_rivals import latte_rivals, rg_lru_rival

PROCESSES, TOKENS = 4, 2048


def jobs(at) -> list[Callable[[], object]]:  # noqa: ANN001
    """One for every width of Latte's comparison, and the recurrence's."""
    found: list[Callable[[], object]] = []
    for L, D in WIDTHS:

        def compare(L: int = L, D: int = D) -> None:
            *inputs, dy = make_inputs(at, 1, TOKENS, L, D)
            for op in (latte(at.backend), *latte_rivals().values()):
                call_of("forward+backward", op, inputs, dy)()

        found.append(compare)

    def recurrence() -> None:
        op = rg_lru_rival()
        if op is not None:
            x = torch.randn(1, TOKENS, 768, device=at.device, dtype=at.dtype)
            call_of("forward+backward", op, [x, x, x, x[0, 0]], x)()

    return [*found, recurrence]


def main(argv: Sequence[str] | None = None) -> None:
    parser = options(__doc__, 120)
    parser.add_argument("number", type=int, choices=range(PROCESSES))
    args = parser.parse_args(argv)
    at = place(args)
    for job in jobs(at)[args.number :: PROCESSES]:
        try:
            job()
        except Exception as error:  # noqa: BLE001 - the benchmark itself will say what is wrong
            say(f"warming: {reason(error)}")


if __name__ == "__main__":
    main()
