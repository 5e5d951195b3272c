"""What all the benchmarks share: options, calls, CSV files that name their machine, goals.

Figures of a full run go to experiments/figures, which the documentation shows; tables to
experiments/results/benchmarks. A quick run's mean nothing: they go to build/benchmarks, as any
other ``--out``.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from latte.lab.evaluate.benchmark_ops import op_call
from latte.lab.evaluate.tables import table as markdown
from latte.lab.machine import CPU, describe, in_fresh_process, peak_memory_bytes

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "experiments" / "results" / "benchmarks"
QUICK_RESULTS = ROOT / "build" / "benchmarks"
FLOORS = RESULTS / "gpu_floors.csv"
FIGURES = ROOT / "experiments" / "figures"
CPU_PAGE = ROOT / "experiments" / "results" / "cpu.md"
# The last columns of every row; those of a GPU script begin with the first ones.
MACHINE = ("threads", "cpu", "cores", "torch", "jax", "python", "latte", "date")
OF_A_GPU = ("device", "card", "cuda", "triton", "ptxas", "fla", "transformers")

MODES = ("forward", "forward+backward")

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
        help="folder for the CSV files and figures (default: experiments/results/benchmarks and "
        "experiments/figures; "
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


def numbers(text: str) -> tuple[int, ...]:
    """`4096,1024` -> (1024, 4096); argparse makes one line of a ValueError."""
    return tuple(sorted({int(part) for part in text.split(",")}))


def tiny_checkpoint(folder: Path) -> str:
    """A tiny model with random weights that reads bytes, for quick runs; its folder."""
    from latte.lab.data import byte_tokenizer
    from latte.models import LatteForCausalLM, preset_config

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    config = preset_config("latte-r-swa++", "tiny", **sizes, sliding_window=16)
    LatteForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


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


class OpCall(NamedTuple):
    """What is called: ``op(*inputs)``, and the gradients of <dy, output>."""

    op: Callable[..., Tensor]
    inputs: Sequence[Tensor]
    dy: Tensor
    case: str = ""  # of gpu_floors.csv, for what is expected of ours
    forward_only: bool = False

    def call(self, mode: str) -> Callable[[], Any]:
        """The output, or the gradients for all inputs."""
        return op_call(mode, self.op, self.inputs, self.dy)


def aten_calls(call: Callable[[], Any]) -> int:
    """PyTorch's operations in a call, in the profiler, those inside others counted too."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return sum(event.name.startswith("aten::") for event in profile.events())


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
        self.rows = select(kept, commit=commit())

    def has(self, **key: Any) -> bool:
        """Whether there are rows with these values, of this run or the one that is resumed."""
        return bool(select(self.rows, **key))

    def add(self, row: Row) -> None:
        """Add the row, with the machine's columns; the first one of a new run starts the file."""
        self.rows.append(row | columns(self.device))
        write_rows(self.path, self.rows)

    def add_and_say(self, row: Row) -> None:
        """Add the row, and say it in a line."""
        self.add(row)
        say(", ".join(f"{name} {value}" for name, value in row.items() if value != ""))


def select(rows: Sequence[Row], **values: Any) -> list[Row]:
    """The rows whose columns hold these values, read from a file or not."""
    return [r for r in rows if all(str(r.get(name)) == str(x) for name, x in values.items())]


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


def ratio(
    name: str,
    target: float,
    ours: Sequence[Row],
    other: Sequence[Row],
    *columns: str,
    at_least: bool = False,
) -> list[Goal]:
    """The goal of one row's number over another's; none where one of the two is missing.

    Args:
        columns: The number's, and the other row's where that is another one.
    """
    if not ours or not other or "" in (ours[0][columns[0]], other[0][columns[-1]]):
        return []
    a, b = float(ours[0][columns[0]]), float(other[0][columns[-1]])
    return [Goal(name, target, a / b, at_least, f"{a:,.2f} against {b:,.2f}")]


def worst(name: str, target: float, found: dict[str, float], at_least: bool) -> list[Goal]:
    """The goal where it is missed most, of several sizes; none if nothing was measured."""
    if not found:
        return []
    where = (min if at_least else max)(found, key=lambda size: found[size])
    goals = [Goal(name, target, value, at_least) for value in found.values()]
    note = f"at {where}; {sum(goal.met for goal in goals)} of {len(goals)} pass"
    return [Goal(name, target, found[where], at_least, note)]


def report_goals(
    path: Path, script: str, goals: Sequence[Goal], device: torch.device | None = None
) -> None:
    """Put this script's goals into a file beside the other scripts'; print all of them.

    Those of a CPU (no device) also go into the documents.
    """
    kept = [row for row in read_rows(path) if row["script"] != script] if path.exists() else []
    for goal in goals:
        row = {"script": script, "goal": goal.name}
        row |= {"target": f"{'>=' if goal.at_least else '<='} {goal.target:g}"}
        row |= {"measured": f"{goal.measured:.3f}", "verdict": "pass" if goal.met else "miss"}
        kept.append(row | {"note": goal.note} | columns(device))
    if not kept:
        return
    rows = sorted(kept, key=lambda row: row["script"])
    write_rows(path, rows)
    if device is None:
        missed = [row for row in rows if row["verdict"] == "miss"]
        text = f"{len(rows) - len(missed)} of {len(rows)} goals are met. Those that are missed:"
        document(path.parent, "goals", rows, text, goals_table(missed, "goal target measured note"))
    say(f"\n{goals_table(rows)}")


def goals_table(rows: Sequence[Row], head: str = "goal target measured verdict note") -> str:
    """Goals, targets and verdicts in Markdown."""
    columns = head.split()
    return markdown([columns, *([row[name] for name in columns] for row in rows)], 2).rstrip()


def document(
    out: Path, section: str, rows: Sequence[Row], *tables: str, page: Path = CPU_PAGE
) -> None:
    """Tables made of the rows into the page, between a section's marks; not of another folder."""
    if out != RESULTS and page == CPU_PAGE:
        return
    one = rows[-1]
    machine = f"{one['cpu']}, {one['cores']} cores, {one['threads']} threads, torch {one['torch']}"
    parts = [f"{machine}, {one['date']}.", *tables]
    if section != "goals":
        parts.append(f"![Figure](../figures/cpu_{section}.png)")
    replace_section(page, section, "\n\n".join(parts))


def replace_section(page: Path, section: str, body: str) -> None:
    """Put a text between a section's marks."""
    mark = f"<!-- results: {section} -->\n"
    head, rest = page.read_text("utf-8").split(mark, 1)
    tail = rest.split("<!-- /results -->", 1)[1]
    page.write_text(f"{head}{mark}{body}\n<!-- /results -->{tail}", "utf-8")


def pivot(caption: str, rows: Sequence[Row], down: Sequence[str], across: str, value: str) -> str:
    """A caption and a table: a row for each combination of ``down``, a column for each ``across``.

    Rows without the value are left out.
    """
    rows = [row for row in rows if row[value] != ""]
    numbers = sorted({int(row[across]) for row in rows})
    lines = [[*down, *(f"{n:,}" for n in numbers)]]
    for key in dict.fromkeys(tuple(str(row[name]) for name in down) for row in rows):
        own = select(rows, **dict(zip(down, key, strict=True)))
        found = {int(row[across]): float(row[value]) for row in own}
        cells = (found.get(n) for n in numbers)
        shown = ("" if x is None else f"{x:,.{2 if x < 10 else 1}f}" for x in cells)
        lines.append([*key, *shown])
    return f"{caption}\n\n{markdown(lines, len(down)).rstrip()}"
