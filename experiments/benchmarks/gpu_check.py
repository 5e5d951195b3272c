"""Everything that a GPU has to show: first whether the kernels are right, then how fast they are.

    python -m experiments.benchmarks.gpu_check [--quick] [--out DIR] [--only NAME...]
        [--budget SECONDS]
                                   [--no-baselines]
    python -m experiments.benchmarks.gpu_check --fill
    # Triton's cache, once, before: takes what it takes

Parts, each in a process of its own: ``check``, several groups at a time of
tests/ops/gpu_correctness.py, then one after another, as they are timed, ``latte``, ``macchiato``,
``converted``, ``kept`` and ``rglru`` of gpu_ops.py, ``decode``, ``runtime`` and ``training`` of
gpu_models.py. Each has a share of the budget, ten minutes in all. Rows are written as they come, so
that a run that is cut off keeps what it has; a part that fails or runs out of time says so in one
line, and the next one starts. At the end: figures, the table of goals, and the failed checks. Exit
code 1 if a check or a part failed, 2 without a GPU.

The checks also decide where the kernels are the default: a run on a GPU writes the rows of its card
in ``latte/ops/triton_backend/checked.csv``, and ``--table`` makes them of a file of checks again.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from experiments.benchmarks import gpu_models, gpu_ops
from experiments.benchmarks.gpu_common import OUT_OF_MEMORY, TARGETS, Place, options, place
from experiments.benchmarks.records import RESULTS, ROOT, Row, goals_table, read_rows, say
from latte.ops.triton_backend import checked
from tests.ops.gpu_correctness import CASES, SIZES, STEPS, groups

# Shares of the budget. What a part does not use, the later ones get.
SHARES = {
    "check": 0.33,
    "latte": 0.16,
    "macchiato": 0.07,
    "converted": 0.05,
    "kept": 0.04,
    "rglru": 0.05,
    "decode": 0.08,
    "runtime": 0.1,
    "training": 0.12,
}
FILLING = 3600.0  # seconds that compiling everything once may take
GRACE = 20.0  # seconds that a part may take beyond its share before it is ended
CHECKS = "gpu_checks.csv"
# Compute capability by a part of the GPU's name, for files of checks that do not have it.
CARDS = {"A100": 80, "L40": 89, "H100": 90, "H200": 90, "B200": 100, "RTX 50": 120}


def command(module: str, at: Place, seconds: float, *more: str) -> list[str]:
    """A part's command line, with this run's place."""
    line = [sys.executable, "-m", module, *more, "--out", str(at.out)]
    line += ["--budget", f"{seconds:.0f}", "--device", str(at.device), "--backend", at.backend]
    line += [] if at.baselines else ["--no-baselines"]
    return [*line, "--quick"] if at.quick else line


def run(line: Sequence[str], seconds: float, **variables: str) -> str | None:
    """A process with a deadline; why it failed, None if it did not."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **variables}
    try:
        done = subprocess.run(line, env=environment, cwd=ROOT, timeout=seconds)
    except subprocess.TimeoutExpired:
        return "out of time"
    return None if done.returncode == 0 else f"ended with exit code {done.returncode}"


def fill(at: Place) -> None:
    """Compile what the checks and the rivals run, which count when they run again.

    What the rivals' autotuners choose is forgotten: it was timed beside other work.
    """
    numbers = range(gpu_ops.WARMING) if at.baselines and not at.quick else ()
    lines = [
        command("experiments.benchmarks.gpu_ops", at, FILLING, "latte", "--warm", str(n))
        for n in numbers
    ]
    with ThreadPoolExecutor() as pool:
        warmed = [pool.submit(run, line, FILLING, FLA_CACHE_RESULTS="0") for line in lines]
        run_checks(at, FILLING)
        for done in warmed:
            if (broken := done.result()) is not None:
                say(f"warming: {broken}")


def run_checks(at: Place, seconds: float) -> list[Row]:
    """All groups of checks, several at a time; the rows of all of them.

    A group that ran out of memory beside others runs again alone.
    """
    end = time.monotonic() + seconds
    at_a_time = max(1, min(6, (os.cpu_count() or 2) // 2)) if at.cuda else 1
    table = at.table(CHECKS)

    def run_group(group: str) -> list[Row]:
        left = max(1.0, end - time.monotonic())
        broken = run(command("tests.ops.gpu_correctness", at, left, group), left + GRACE)
        path = at.out / f"gpu_checks-{group.replace(':', '-')}.csv"
        found = read_rows(path) if path.exists() else []
        path.unlink(missing_ok=True)
        # A failed check ends with exit code 1 too, but has a row.
        if broken is not None and not any(row["verdict"] == "FAIL" for row in found):
            say(f"FAIL  {group}: {broken}")
            found.append({"check": group, "verdict": "FAIL", "detail": broken, "seconds": ""})
        return [{key: r[key] for key in ("check", "verdict", "detail", "seconds")} for r in found]

    crowded = []
    with ThreadPoolExecutor(at_a_time) as pool:
        running = {pool.submit(run_group, group): group for group in groups()}
        for done in as_completed(running):
            rows = done.result()
            if at_a_time > 1 and any(row["detail"] == OUT_OF_MEMORY for row in rows):
                crowded.append(running[done])
                continue
            for row in rows:
                table.add(row)
    for group in crowded:
        for row in run_group(group):
            table.add(row)
    return table.rows


def checked_rows(rows: Sequence[Row]) -> list[checked.Checked]:
    """Where the kernels are to be the default, from the rows of checks.

    A group, an op and a dtype, has rows if none of its checks failed and some passed. A check that
    ran out of memory has not run. The single tokens have theirs if the check of steps passed.
    """
    found = []
    for group in dict.fromkeys(":".join(row["check"].split(":")[:2]) for row in rows):
        name, _, dtype = group.partition(":")
        if name not in CASES:
            continue
        own = [row for row in rows if row["check"].startswith(f"{group}:")]
        failed = [r for r in own if r["verdict"] == "FAIL" and r["detail"] != OUT_OF_MEMORY]
        passed = [row for row in own if row["verdict"] == "pass"]
        if not passed:
            continue
        letters = "".join(CASES[name].inputs.values())
        widths = {x: max(_sizes(row["check"], x) for row in passed) for x in "LKD" if x in letters}
        for step in (False, True):
            counted = [row for row in passed if STEPS in row["check"]] if step else passed
            if not counted or any(STEPS in r["check"] for r in failed) or (failed and not step):
                continue
            last = max(counted, key=lambda row: row["date"])
            found.append(
                checked.Checked(
                    card=int(last.get("card") or _card(last["device"])),
                    name=name,
                    step=step,
                    dtype=dtype,
                    L=widths.get("L", 0),
                    K=widths.get("K", 0),
                    D=widths.get("D", 0),
                    checks=len(counted),
                    device=last["device"],
                    torch=last["torch"],
                    triton=last["triton"],
                    date=last["date"],
                    ptxas=last.get("ptxas", ""),
                )
            )
    return found


def _sizes(check: str, letter: str) -> int:
    """The size of this letter in a check's name, else the size of most checks."""
    given = re.search(rf"\b{letter} = (\d+)", check)
    return int(given[1]) if given else SIZES[letter]


def _card(device: str) -> int:
    return next((card for part, card in CARDS.items() if part in device), 0)


def renew_table(rows: Sequence[Row], path: Path = checked.TABLE) -> None:
    """Put the rows of these checks' cards in the place of those that the table has."""
    new = checked_rows(rows)
    ran = {int(r.get("card") or _card(r["device"])) for r in rows}
    kept = [row for row in checked.read(path) if row.card not in ran] if path.exists() else []
    checked.write([*kept, *new], path)
    say(f"the kernels are the default for {len(new)} ops, dtypes and steps: {path}")


def run_part(name: str, at: Place, seconds: float) -> str | None:
    """One benchmark; why it failed, None if it did not."""
    say(f"\n--- {name}, {seconds:.0f} s")
    module = gpu_ops if name in gpu_ops.PARTS else gpu_models
    broken = run(command(module.__name__, at, seconds, name), seconds + GRACE)
    if broken is not None:
        say(f"{name}: {broken}; its rows so far are in {at.out}")
    return broken


def draw(out: Path) -> None:
    """The figures, where matplotlib is installed."""
    try:
        from experiments.benchmarks.figures import draw_all
    except ImportError:
        say(
            "matplotlib is not installed: draw later: python -m experiments.benchmarks.figures"
            f" {out}"
        )
        return
    for path in draw_all(out):
        say(f"drew {path}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__, 600)
    parser.add_argument(
        "--only", nargs="+", choices=tuple(SHARES), metavar="NAME", help=", ".join(SHARES)
    )
    parser.add_argument("--fill", action="store_true", help="compile, measure nothing")
    parser.add_argument(
        "--table", action="store_true", help=f"only the table of defaults, from {CHECKS}"
    )
    args = parser.parse_args(argv)
    if args.table:
        renew_table(read_rows((args.out or RESULTS) / CHECKS))
        return 0
    at = place(args)
    if args.fill:
        fill(at)
        return 0
    chosen = [name for name in SHARES if name in (args.only or SHARES)]
    say(f"gpu-check: {', '.join(chosen)} in {args.budget:.0f} s, results in {at.out}")
    failures: list[str] = []
    checks: list[Row] = []
    for i, name in enumerate(chosen):
        total = sum(SHARES[later] for later in chosen[i:])
        seconds = max(5.0, (at.left() - GRACE / 2) * SHARES[name] / total)
        if name == "check":
            checks = run_checks(at, seconds)
            if at.cuda and not args.quick and at.backend == "triton":
                renew_table(checks)
        elif (broken := run_part(name, at, seconds)) is not None:
            failures.append(f"{name}: {broken}")
    draw(at.out)
    goals = at.out / TARGETS
    if goals.exists():
        say(f"\n{goals_table(read_rows(goals))}")
    failures += [f"{r['check']}: {r['detail']}" for r in checks if r["verdict"] == "FAIL"]
    if checks:
        counts = {v: sum(r["verdict"] == v for r in checks) for v in ("pass", "skip", "FAIL")}
        say(f"\nchecks: {', '.join(f'{n} {v}' for v, n in counts.items())}")
    for failure in failures:
        say(f"FAIL  {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
