"""What the benchmarks share: their options, timing, and memory.

Timing. All sides run in one process and take turns: ``latte.machine``.

Memory. Peak resident memory is a property of a whole process and never falls, so each figure
comes from a fresh process (:func:`in_fresh_process`) that does nothing else; it is net of what
was resident before the inputs were made.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from latte.machine import Times, interleave, quantile, seconds_of
from latte.machine import memory_bytes as resident_bytes
from latte.machine import peak_memory_bytes as peak_bytes
from latte.machine import reset_peak_memory as reset_peak

__all__ = [  # what the scripts find here, though the package has it
    "Times", "interleave", "peak_bytes", "quantile", "reset_peak", "resident_bytes", "seconds_of",
]  # fmt: skip

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


def exponent(tokens: Sequence[float], values: Sequence[float]) -> float:
    """Slope of the least-squares line through (log tokens, log value)."""
    x, y = ([math.log(z) for z in zs] for zs in (tokens, values))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    moment = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return moment / sum((a - mean_x) ** 2 for a in x)


# --- memory ----------------------------------------------------------------------------------


def in_fresh_process(script: str, job: Row) -> Row:
    """Run ``script --child JOB`` and return the row that it prints; see :func:`child_job`."""
    command = [sys.executable, script, CHILD, json.dumps(job)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def child_job() -> Row | None:
    """The job that :func:`in_fresh_process` gave to this process, None if it is the parent."""
    return json.loads(sys.argv[2]) if sys.argv[1:2] == [CHILD] else None
