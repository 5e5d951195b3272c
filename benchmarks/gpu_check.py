"""Everything that a GPU has to show: first whether the kernels are right, then how fast they are.

    python benchmarks/gpu_check.py [--quick] [--out DIR] [--only NAME...] [--budget SECONDS]

Parts, each a script of its own and in a process of its own: ``check`` (gpu_correctness.py, several
groups at a time), then one after another, as they are timed, ``latte``, ``macchiato``, ``rglru``,
``decode``, ``runtime`` and ``training``. Each has a share of the budget, ten minutes in all. Rows
are written as they come, so that a run that is cut off keeps what it has; a part that fails or runs
out of time says so in one line, and the next one starts. At the end: figures, the table of goals,
and the failed checks. Exit code 1 if a check or a part failed, 2
without a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from common import Row
from gpu_common import TARGETS, Place, options, place, say
from gpu_correctness import groups
from records import print_goals, read_rows

HERE = Path(__file__).parent
# Shares of the budget. What a part does not use, the later ones get.
SHARES = {
    "check": 0.2,
    "latte": 0.3,  # the rivals' autotuners search for most of it
    "macchiato": 0.08,
    "rglru": 0.05,
    "decode": 0.1,
    "runtime": 0.12,
    "training": 0.15,
}
GRACE = 20.0  # seconds that a part may take beyond its share before it is ended


def command(script: str, at: Place, seconds: float, *more: str) -> list[str]:
    """A part's command line, with this run's place."""
    line = [sys.executable, str(HERE / script), *more, "--out", str(at.out)]
    line += ["--budget", f"{seconds:.0f}", "--device", str(at.device), "--backend", at.backend]
    return [*line, "--quick"] if at.quick else line


def environment() -> dict[str, str]:
    """Output as it comes; one thread where processes share the processor."""
    return {**os.environ, "PYTHONUNBUFFERED": "1"}


class Running:
    """A process with a deadline."""

    def __init__(self, name: str, line: Sequence[str], seconds: float) -> None:
        self.name, self.deadline = name, time.monotonic() + seconds
        self.process = subprocess.Popen(line, env=environment())

    def ended(self) -> bool:
        if self.process.poll() is None and time.monotonic() > self.deadline:
            self.process.kill()
            self.process.wait()
        return self.process.poll() is not None

    def broken(self) -> str | None:
        """Why the process failed, None if it did not."""
        code = self.process.returncode
        if code == 0:
            return None
        return "out of time" if code == -9 else f"ended with exit code {code}"


def start_warming(at: Place, seconds: float) -> list[Running]:
    """Compile the rivals' kernels beside the checks, which are not timed."""
    if not at.cuda or at.quick:
        return []
    return [Running("warm", command("gpu_warm.py", at, seconds, str(i)), seconds) for i in range(4)]


def run_checks(at: Place, seconds: float) -> list[Row]:
    """All groups of checks, several at a time; the rows of all of them."""
    end = time.monotonic() + seconds
    waiting = groups()
    at_a_time = max(1, min(6, (os.cpu_count() or 2) // 2)) if at.cuda else 1
    running: list[Running] = []
    rows: list[Row] = []
    table = at.table("gpu_checks.csv")

    def collect(done: Running) -> None:
        path = at.out / f"gpu_checks-{done.name.replace(':', '-')}.csv"
        found = read_rows(path) if path.exists() else []
        path.unlink(missing_ok=True)
        broken = done.broken()
        # A failed check ends with exit code 1 too, but has a row.
        if broken is not None and not any(row["verdict"] == "FAIL" for row in found):
            say(f"FAIL  {done.name}: {broken}")
            found.append({"check": done.name, "verdict": "FAIL", "detail": broken, "seconds": ""})
        for row in found:
            kept = {key: row[key] for key in ("check", "verdict", "detail", "seconds")}
            table.add(kept)
            rows.append(kept)

    while waiting or running:
        while waiting and len(running) < at_a_time:
            group, left = waiting.pop(0), max(1.0, end - time.monotonic())
            line = command("gpu_correctness.py", at, left, group)
            running.append(Running(group, line, left + GRACE))
        for process in [r for r in running if r.ended()]:
            running.remove(process)
            collect(process)
        time.sleep(0.05)
    return rows


def run_part(name: str, at: Place, seconds: float) -> str | None:
    """One benchmark; why it failed, None if it did not."""
    say(f"\n--- {name}, {seconds:.0f} s")
    part = Running(name, command(f"gpu_{name}.py", at, seconds), seconds + GRACE)
    while not part.ended():
        time.sleep(0.05)
    broken = part.broken()
    if broken is not None:
        say(f"{name}: {broken}; its rows so far are in {at.out}")
    return broken


def draw(out: Path) -> None:
    """The figures, where matplotlib is installed."""
    try:
        from gpu_figures import draw_all
    except ImportError:
        say(f"matplotlib is not installed: draw later with gpu_figures.py {out}")
        return
    for path in draw_all(out):
        say(f"drew {path}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__, 600)
    parser.add_argument(
        "--only", nargs="+", choices=tuple(SHARES), metavar="NAME", help=", ".join(SHARES)
    )
    args = parser.parse_args(argv)
    at = place(args)
    chosen = [name for name in SHARES if name in (args.only or SHARES)]
    say(f"gpu-check: {', '.join(chosen)} in {args.budget:.0f} s, results in {at.out}")
    failures: list[str] = []
    checks: list[Row] = []
    for i, name in enumerate(chosen):
        total = sum(SHARES[later] for later in chosen[i:])
        seconds = max(5.0, (at.left() - GRACE / 2) * SHARES[name] / total)
        if name == "check":
            warming = start_warming(at, seconds) if len(chosen) > 1 else []
            checks = run_checks(at, seconds)
            for process in warming:
                process.deadline = 0.0
                process.ended()
        elif (broken := run_part(name, at, seconds)) is not None:
            failures.append(f"{name}: {broken}")
    draw(at.out)
    goals = at.out / TARGETS
    if goals.exists():
        print_goals(read_rows(goals))
    failures += [f"{r['check']}: {r['detail']}" for r in checks if r["verdict"] == "FAIL"]
    if checks:
        counts = {v: sum(r["verdict"] == v for r in checks) for v in ("pass", "skip", "FAIL")}
        say(f"\nchecks: {', '.join(f'{n} {v}' for v, n in counts.items())}")
    for failure in failures:
        say(f"FAIL  {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
