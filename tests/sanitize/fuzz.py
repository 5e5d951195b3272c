"""Random calls of the native ops for so many seconds: ``run.py`` starts this under sanitizers.

Raw ops with one wrong argument, which must be refused in one line or do no harm; then valid calls,
in one thread and in several at once, and attention in parts of long sequences. Each is a function
of its kind and seed, which the log holds.
"""

from __future__ import annotations

import itertools
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from latte.ops import cpp_backend
from tests.ops.cpp_backend import calls

THREADS = 3
ATTENTION = ("latte", "macchiato", "window")


def try_wrong_arguments(log: Any) -> int:
    """Each argument of each raw op, wrong in each way; how many there were."""
    count = 0
    for name, given in sorted(calls.raw_calls().items()):
        for place, x in enumerate(given):
            if not isinstance(x, torch.Tensor):
                continue
            for label, wrong in calls.wrong_tensors(x):
                print(f"{name}, argument {place}: {label}", file=log, flush=True)
                arguments = [y.clone() if isinstance(y, torch.Tensor) else y for y in given]
                arguments[place], count = wrong, count + 1
                try:
                    with torch.no_grad():
                        getattr(torch.ops.latte, name)(*arguments)
                except ValueError as error:
                    if not str(error).startswith(f"latte::{name}: "):
                        raise
    return count


def main(seconds: float, first_seed: int, log_path: str, library: str) -> None:
    if library not in Path("/proc/self/maps").read_text():
        sys.exit(f"fuzz: {library} is not loaded: {cpp_backend.ABSENT}")
    with open(log_path, "w") as log:

        def one(kind: str, seed: int) -> None:
            print(f"{kind}, seed {seed}", file=log, flush=True)
            calls.call(kind, seed)

        # Arguments are looked at before the instruction set matters: once is enough.
        level = torch.backends.cpu.get_cpu_capability()
        wrong, valid = try_wrong_arguments(log) if level == "DEFAULT" else 0, 0
        begun, seed = time.monotonic(), itertools.count(first_seed)
        with ThreadPoolExecutor(THREADS) as pool:
            while time.monotonic() < begun + seconds:
                now = next(seed)
                if now % 2:
                    for kind in calls.KINDS:
                        one(kind, now)
                    kind = ATTENTION[now // 2 % len(ATTENTION)]
                    print(f"{kind} in parts, seed {now}", file=log, flush=True)
                    calls.call_in_parts(kind, now)
                    valid += 1
                else:
                    kinds = [*calls.KINDS] * THREADS
                    list(pool.map(one, kinds, range(now, now + len(kinds))))
                valid += len(calls.KINDS) * (1 if now % 2 else THREADS)
    print(f"sanitize: {level}: {valid} valid and {wrong} wrong calls, nothing found", flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5])
