"""Wall time of calls, several sides in turns.

Both sides run in one process and take turns: a round is a burst of calls of each side after the
other, and every side's calls are spread over all the rounds, so that a slow moment of the machine
meets both. Calls before the first round warm up. Medians and percentiles are over single calls.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Times(NamedTuple):
    """Statistics of single calls, in milliseconds."""

    median: float
    p10: float
    p90: float
    fastest: float
    calls: int

    @staticmethod
    def of(seconds: Sequence[float]) -> Times:
        ms = sorted(1e3 * s for s in seconds)
        p10, p90 = (quantile(ms, q) for q in (0.1, 0.9))
        return Times(statistics.median(ms), p10, p90, ms[0], len(ms))

    def row(self) -> dict[str, Any]:
        values = zip(("median_ms", "p10_ms", "p90_ms", "min_ms"), self[:4], strict=True)
        return {name: round(x, 4) for name, x in values} | {"calls": self.calls}


def quantile(ordered: Sequence[float], q: float) -> float:
    """Linear interpolation between the closest ranks."""
    where = q * (len(ordered) - 1)
    low = math.floor(where)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (where - low) * (ordered[high] - ordered[low])


def seconds_of(call: Callable[[], object]) -> float:
    """Wall time of one call, which must return only when its work is done."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleave(sides: Mapping[str, Callable[[], object]], budget: float) -> dict[str, Times]:
    """Time several sides in turns; see the head of this module.

    Args:
        budget: seconds of timed calls per side. A side with calls longer than that still gets
            one call in each of 3 rounds; there are 5 rounds if all sides are quicker.
    """
    expected: dict[str, float] = {}
    for name, call in sides.items():
        expected[name] = seconds_of(call)  # the first call allocates, and compiles
        if expected[name] < budget:
            expected[name] = min(seconds_of(call) for _ in range(2))
    rounds = 5 if max(expected.values()) < budget else 3
    bursts = {n: max(1, min(25, int(budget / rounds / s))) for n, s in expected.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, call in sides.items():
                time.sleep(0.02)  # threads of the side before, spinning for work, go to sleep
                seconds[name] += [seconds_of(call) for _ in range(bursts[name])]
    finally:
        gc.enable()
    return {name: Times.of(s) for name, s in seconds.items()}
