"""What all the benchmarks share: options, calls, CSV files that name their machine, goals.

Figures of a full run go to docs/figures, which the documentation shows; tables to
benchmarks/results. A quick run's mean nothing: they go to build/benchmarks, as any other ``--out``.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import math
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from latte.machine import CPU, describe, in_fresh_process, interleave, peak_memory_bytes

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
QUICK_RESULTS = ROOT / "build" / "benchmarks"
FLOORS = RESULTS / "gpu_floors.csv"
FIGURES = ROOT / "docs" / "figures"
CPU_PAGE = ROOT / "docs" / "results" / "cpu.md"
# The last columns of every row; those of a GPU script begin with the first ones.
MACHINE = ("threads", "cpu", "cores", "torch", "jax", "python", "latte", "date")
OF_A_GPU = ("device", "cuda", "triton", "fla", "transformers")

MODES = ("forward", "forward+backward")
# The sizes of the goals on a CPU: heads, latents per head, value width.
H, L, D = 8, 32, 64

Row = dict[str, Any]


def say(text: str) -> None:
    print(text, flush=True)


# --- the command line ------------------------------------------------------------------------


def parser(description: str | None, budget: float | None = None) -> argparse.ArgumentParser:
    """The options that all the benchmarks have."""
    lines = (description or "").strip().splitlines()
    options = argparse.ArgumentParser(description=lines[0] if lines else None)
    options.add_argument(
        "--quick", action="store_true", help="tiny sizes, to see that the script works (seconds)"
    )
    options.add_argument(
        "--out",
        type=Path,
        help="folder for the CSV files and figures (default: benchmarks/results and docs/figures; "
        "with --quick build/benchmarks)",
    )
    if budget is None:
        text = "keep the rows that a run of the same commit has written, measure the others"
        options.add_argument("--resume", action="store_true", help=text)
    what = "of timed calls per side, mode and size" if budget is None else "(default: %(default)g)"
    options.add_argument("--budget", type=float, default=budget, help=f"seconds {what}")
    return options


def output_folder(args: argparse.Namespace) -> Path:
    """The folder that the results go to, made if need be."""
    out: Path = (args.out or (QUICK_RESULTS if args.quick else RESULTS)).resolve()
    out.mkdir(parents=True, exist_ok=True)
    return out


def use_all_threads() -> int:
    """Give torch every core of this process, unless OMP_NUM_THREADS says otherwise."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    return torch.get_num_threads()


class Apart:
    """`in_fresh_process`; of a quick run the first call alone, to see that it works."""

    def __init__(self, quick: bool) -> None:
        self.quick, self.calls = quick, 0

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.calls += 1
        if self.quick and self.calls > 1:
            return function(*arguments)
        return in_fresh_process(function, *arguments)


def call_of(
    mode: str, op: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], dy: torch.Tensor
) -> Callable[[], Any]:
    """A call of the op: the output, or the gradients of <dy, output> for all inputs."""
    if mode == "forward":

        def forward() -> torch.Tensor:
            with torch.no_grad():
                return op(*inputs)

        return forward
    leaves = [x.detach().requires_grad_() for x in inputs]
    return lambda: torch.autograd.grad(op(*leaves), leaves, dy)


def aten_calls(call: Callable[[], Any]) -> int:
    """PyTorch's operations in a call, in the profiler, those inside others counted too."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return sum(event.name.startswith("aten::") for event in profile.events())


def rates() -> dict[str, float]:
    """What bounds a call, here and now: FLOP/s of a matrix product, bytes/s of a copy and a sum.

    A copy reads and writes. The sum only reads, as a step of decoding reads its weights.
    """
    a, b = torch.randn(1536, 1536), torch.randn(1 << 26)
    c, low = torch.empty_like(b), a.bfloat16()
    calls = {"matmul": lambda: torch.mm(a, a), "copy": lambda: c.copy_(b), "read": lambda: b.sum()}
    calls["matmul, bf16"] = lambda: torch.mm(low, low)
    work = {
        "matmul": 2.0 * 1536**3,
        "matmul, bf16": 2.0 * 1536**3,
        "copy": 8.0 * b.numel(),
        "read": 4.0 * b.numel(),
    }
    times = interleave(calls, 0.5)
    return {name: work[name] / (1e-3 * times[name].median) for name in work}


def peaks(before: int, device: torch.device = CPU) -> Row:
    """The most memory so far, beyond what was in use before and in all."""
    peak = peak_memory_bytes(device)
    return {
        # The kernel counts pages of a thread in batches: nothing taken may look like less.
        "peak_net_mb": round(max(peak - before, 0) / 2**20, 3),
        "peak_process_mb": round(peak / 2**20, 3),
    }


# --- rows --------------------------------------------------------------------------------------


def columns(device: torch.device | None) -> Row:
    """The machine and its versions; of a GPU script (any device) what its rows name besides."""
    known = describe(device or CPU, MACHINE if device is None else (*OF_A_GPU, *MACHINE))
    return known | {"commit": commit()}


@functools.cache
def commit() -> str:
    """The commit that is checked out; "" outside of a clone."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return ""


class Table:
    """A CSV file that is written row by row, so that an interrupted run leaves what it has."""

    def __init__(
        self, path: Path, device: torch.device | None = None, resume: bool = False
    ) -> None:
        self.path, self.device = path, device
        kept = read_rows(path) if resume and path.exists() else []
        self.rows: list[Row] = [row for row in kept if row.get("commit") == commit()]

    def has(self, **key: Any) -> bool:
        """Whether there are rows with these values, of this run or the one that is resumed."""
        return any(all(str(row[k]) == str(value) for k, value in key.items()) for row in self.rows)

    def add(self, row: Row) -> None:
        """Add the row, with the machine's columns; the first one of a new run starts the file."""
        self.rows.append(row | columns(self.device))
        write_rows(self.path, self.rows)


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """A CSV file with the columns of any row."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(
            file, fieldnames=list(dict.fromkeys(k for row in rows for k in row))
        )
        writer.writeheader()
        writer.writerows(rows)


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file, every value as text."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def exponent(tokens: Sequence[float], values: Sequence[float]) -> float:
    """Slope of the least-squares line through (log tokens, log value)."""
    x, y = ([math.log(z) for z in zs] for zs in (tokens, values))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    moment = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return moment / sum((a - mean_x) ** 2 for a in x)


# --- goals -------------------------------------------------------------------------------------


class Goal(NamedTuple):
    """A target and what came out; ``at_least`` says which side of the target is good."""

    name: str
    target: float
    measured: float
    at_least: bool
    note: str = ""

    @property
    def met(self) -> bool:
        return self.measured >= self.target if self.at_least else self.measured <= self.target


def worst(name: str, target: float, found: dict[str, float], at_least: bool) -> list[Goal]:
    """The goal where it is missed most, of several sizes; none if nothing was measured."""
    if not found:
        return []
    where = (min if at_least else max)(found, key=lambda size: found[size])
    goals = [Goal(name, target, value, at_least) for value in found.values()]
    note = f"at {where}; {sum(goal.met for goal in goals)} of {len(goals)} pass"
    return [Goal(name, target, found[where], at_least, note)]


def write_goals(path: Path, script: str, goals: Sequence[Goal], machine: Row) -> list[Row]:
    """Put this script's goals into a file beside the other scripts'; all of them."""
    kept = [row for row in read_rows(path) if row["script"] != script] if path.exists() else []
    new = [
        {
            "script": script,
            "goal": goal.name,
            "target": f"{'>=' if goal.at_least else '<='} {goal.target:g}",
            "measured": f"{goal.measured:.3f}",
            "verdict": "pass" if goal.met else "miss",
            "note": goal.note,
            **machine,
        }
        for goal in goals
    ]
    rows = sorted([*kept, *new], key=lambda row: row["script"])
    if rows:
        write_rows(path, rows)
    return rows


def report_goals(out: Path, script: str, goals: Sequence[Goal]) -> None:
    """Put this script's goals into goals.csv, and all of a CPU's into the docs; print them."""
    rows = write_goals(out / "goals.csv", script, goals, columns(None))
    lines = ["| goal | target | measured | |", "|---|---|---:|---|"]
    for row in rows:
        verdict = f"{row['verdict']}: {row['note']}" if row["note"] else row["verdict"]
        lines.append(f"| {row['goal']} | {row['target']} | {row['measured']} | {verdict} |")
    document(out, "goals", rows, lines)
    print_goals(rows)


def document(
    out: Path, section: str, rows: Sequence[Row], *tables: Sequence[str], page: Path = CPU_PAGE
) -> None:
    """Tables made of the rows into the page, between a section's marks; not of another folder."""
    if out != RESULTS and page == CPU_PAGE:
        return
    one = rows[-1]
    machine = f"{one['cpu']}, {one['cores']} cores, {one['threads']} threads, torch {one['torch']}"
    parts = [f"{machine}, {one['date']}.", *("\n".join(table) for table in tables)]
    if section != "goals":
        parts.append(f"![Figure](../figures/cpu_{section}.png)")
    replace_section(page, section, "\n\n".join(parts))


def replace_section(page: Path, section: str, body: str) -> None:
    """Put a text between a section's marks."""
    mark = f"<!-- results: {section} -->\n"
    head, rest = page.read_text("utf-8").split(mark, 1)
    tail = rest.split("<!-- /results -->", 1)[1]
    page.write_text(f"{head}{mark}{body}\n<!-- /results -->{tail}", "utf-8")


def pivot(
    caption: str, rows: Sequence[Row], down: Sequence[str], across: str, value: str
) -> list[str]:
    """Lines of a table: a row for each combination of ``down``, a column for each ``across``."""
    numbers = list(dict.fromkeys(int(row[across]) for row in rows))
    heads = (*down, *(f"{n:,}" for n in sorted(numbers)))
    lines = [
        caption,
        "",
        f"| {' | '.join(heads)} |",
        "|" + "---|" * len(down) + "---:|" * len(numbers),
    ]
    for key in dict.fromkeys(tuple(row[name] for name in down) for row in rows):
        own = {int(r[across]): r[value] for r in rows if tuple(r[name] for name in down) == key}
        shown = [own.get(n, "") for n in sorted(numbers)]
        cells = ("" if x == "" else f"{float(x):,.{2 if float(x) < 10 else 1}f}" for x in shown)
        lines.append(f"| {' | '.join((*key, *cells))} |")
    return lines


def print_goals(rows: Sequence[Row]) -> None:
    """The table of goals, targets and verdicts."""
    if not rows:
        return
    shown = ("goal", "target", "measured", "verdict", "note")
    widths = [max(len(c), *(len(str(row[c])) for row in rows)) for c in shown]
    print()
    for row in ({c: c for c in shown}, *rows):
        cells = (str(row[c]).ljust(w) for c, w in zip(shown, widths, strict=True))
        print("  ".join(cells).rstrip())
