"""What the benchmarks share: their options, timing, and memory.

Timing. Both sides run in one process and take turns: a round is a burst of calls of each side
after the other, and every side's calls are spread over all the rounds, so that a slow moment of
the machine meets both. Calls before the first round warm up. Medians and percentiles are over
single calls.

Memory. Peak resident memory is a property of a whole process and never falls, so each figure
comes from a fresh process (:func:`in_fresh_process`) that does nothing else; it is net of what
was resident before the inputs were made.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from latte.experiments.memory import peak_bytes, reset_peak, resident_bytes  # noqa: F401  for the scripts

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
QUICK_RESULTS = ROOT / "build" / "benchmarks"  # quick figures mean nothing: keep them apart
CHILD = "--child"

# The sizes of the goals: heads, latents per head, value width.
H, L, D = 8, 32, 64

Row = dict[str, Any]


# --- the command line ------------------------------------------------------------------------


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all the benchmarks have."""
    lines = (description or "").strip().splitlines()
    options = argparse.ArgumentParser(description=lines[0] if lines else None)
    options.add_argument(
        "--quick", action="store_true", help="tiny sizes, to see that the script works (seconds)"
    )
    options.add_argument(
        "--out",
        type=Path,
        help="folder for the CSV files and figures (default: benchmarks/results; with --quick "
        "build/benchmarks)",
    )
    options.add_argument(
        "--budget", type=float, help="seconds of timed calls per side, mode and size"
    )
    return options


def output_folder(args: argparse.Namespace) -> Path:
    """The folder that the results go to, made if need be."""
    out: Path = args.out or (QUICK_RESULTS if args.quick else RESULTS)
    out.mkdir(parents=True, exist_ok=True)
    return out


def use_all_threads() -> int:
    """Give torch every core of this process, unless OMP_NUM_THREADS says otherwise."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    return torch.get_num_threads()


# --- time ------------------------------------------------------------------------------------


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

    def row(self) -> Row:
        values = zip(("median_ms", "p10_ms", "p90_ms", "min_ms"), self[:4], strict=True)
        return {name: round(x, 4) for name, x in values} | {"calls": self.calls}


def quantile(ordered: Sequence[float], q: float) -> float:
    """Linear interpolation between the closest ranks."""
    where = q * (len(ordered) - 1)
    low = math.floor(where)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (where - low) * (ordered[high] - ordered[low])


def exponent(tokens: Sequence[float], values: Sequence[float]) -> float:
    """Slope of the least-squares line through (log tokens, log value)."""
    x, y = ([math.log(z) for z in zs] for zs in (tokens, values))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    moment = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return moment / sum((a - mean_x) ** 2 for a in x)


def seconds_of(call: Callable[[], object]) -> float:
    """Wall time of one call, which must return only when its work is done."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleave(sides: Mapping[str, Callable[[], object]], budget: float) -> dict[str, Times]:
    """Time several sides in turns; see the head of this file.

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


# --- memory ----------------------------------------------------------------------------------


def in_fresh_process(script: str, job: Row) -> Row:
    """Run ``script --child JOB`` and return the row that it prints; see :func:`child_job`."""
    command = [sys.executable, script, CHILD, json.dumps(job)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def child_job() -> Row | None:
    """The job that :func:`in_fresh_process` gave to this process, None if it is the parent."""
    return json.loads(sys.argv[2]) if sys.argv[1:2] == [CHILD] else None
