"""What the GPU benchmarks share: where they run, timing on the device, memory, models, the budget.

Timing. Every side of a comparison is warmed up first (kernels compile, autotuners search), then
the sides take turns over several rounds, each call between two CUDA events and after a write of
more than the level-2 cache; ops as replays of CUDA graphs. Medians and percentiles are over single
calls. A side that cannot run (out of memory, a library missing) says so in one line, and the others
go on.

On ``--device cpu`` the same scripts run with a wall clock, for their tests: those times mean
nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import records
import torch
from records import Goal, Row, Table, say

from latte import machine
from latte.machine import Times
from latte.models import LatteForCausalLM, preset_config

NO_GPU = 2  # exit code
TARGETS = "gpu_goals.csv"
FLOORS = records.RESULTS / "gpu_floors.csv"
MAKERS_BANDWIDTH = 3.35e12  # bytes per second, that the floors count with
FLUSH_BYTES = 256 * 2**20  # several times the level-2 cache of any GPU
Call = Callable[[], Any]


class Place(NamedTuple):
    """Where and how a script runs."""

    device: torch.device
    backend: str  # of Latte's ops
    dtype: torch.dtype
    out: Path
    quick: bool
    deadline: float  # of time.monotonic()

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def precision(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def left(self) -> float:
        """Seconds left of the budget."""
        return self.deadline - time.monotonic()

    def while_time(self, points: Iterable[Any]) -> Iterator[Any]:
        """The points as long as there is time; then one line says how many are left out."""
        points = list(points)
        for done, point in enumerate(points):
            if self.left() <= 0:
                say(f"out of time: {len(points) - done} sizes left out (--budget)")
                return
            yield point
            forget()

    def table(self, name: str) -> Table:
        return Table(self.out / name, self.device)

    def goals(self, script: str, goals: Sequence[Goal]) -> None:
        """Print the goals of this script and put them beside the others'."""
        rows = records.write_goals(self.out / TARGETS, script, goals, records.columns(self.device))
        records.print_goals([row for row in rows if row["script"] == script])


def options(description: str | None, budget: float) -> argparse.ArgumentParser:
    """The options that all the GPU benchmarks have."""
    found = records.parser(description, budget)
    found.add_argument("--device", default="cuda", help="cuda, or cpu to try the script itself")
    found.add_argument("--backend", help="of Latte's ops (default: triton; on a CPU torch)")
    return found


def place(args: argparse.Namespace) -> Place:
    """Check the device and make the output folder; without a GPU one line and exit code 2."""
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no GPU here: expected a CUDA device that PyTorch can use (or --device cpu)")
        raise SystemExit(NO_GPU)
    backend = args.backend or ("triton" if device.type == "cuda" else "torch")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    deadline = time.monotonic() + args.budget
    return Place(device, backend, dtype, records.output_folder(args), args.quick, deadline)


# --- time ------------------------------------------------------------------------------------


@functools.cache
def _flush_buffer(device: torch.device) -> torch.Tensor:
    return torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)


def flush(device: torch.device) -> None:
    """Write more than the level-2 cache holds."""
    if device.type == "cuda":
        _flush_buffer(device).zero_()


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Milliseconds of calls: CUDA events on a GPU, read once all of them are recorded."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.ms: list[float] = []

    def time(self, call: Call) -> None:
        if self.device.type != "cuda":
            start = time.perf_counter()
            call()
            self.ms.append(1e3 * (time.perf_counter() - start))
            return
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        call()
        pair[1].record()
        self.events.append(pair)

    def read(self) -> list[float]:
        wait(self.device)
        self.ms += [start.elapsed_time(end) for start, end in self.events]
        self.events.clear()
        return self.ms


def reason(error: BaseException) -> str:
    """One line for what went wrong."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def forget() -> None:
    """Drop what failed calls and earlier sizes left in memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def replayed(at: Place, name: str, call: Call) -> Call:
    """The call, which has run before, as a CUDA graph: the host's time is then not measured.

    The call itself on a CPU, and where it cannot be captured, which one line says.
    """
    if not at.cuda:
        return call
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except Exception as error:  # noqa: BLE001 - whatever a rival's host code does
        stop_if_broken(at, error)
        say(f"  {name}: timed with the host, as it cannot be captured ({reason(error)})")
        forget()
        return call
    return graph.replay


def measure(
    at: Place,
    sides: Mapping[str, Call],
    *,
    budget: float = 1.0,
    rounds: int = 5,
    cold_cache: bool = True,
    graphs: bool = False,
) -> tuple[dict[str, Times], dict[str, str]]:
    """Time the sides in turns: statistics of those that ran, and why the others did not.

    Args:
        budget: seconds of timed calls per side; each gets at least one call a round.
        cold_cache: write over the level-2 cache before every call.
        graphs: replay the calls as CUDA graphs.
    """
    failed: dict[str, str] = {}
    bursts: dict[str, int] = {}
    timed = dict(sides)
    for name, call in sides.items():
        try:
            call()  # compiles and searches
            wait(at.device)
            if graphs:
                timed[name] = call = replayed(at, name, call)
            seconds = budget
            for _ in range(2):
                start = time.perf_counter()
                call()
                wait(at.device)
                seconds = max(min(seconds, time.perf_counter() - start), 1e-6)
                if seconds >= budget:
                    break  # a long call needs no second opinion
            bursts[name] = max(1, min(30, int(budget / rounds / seconds)))
        except Exception as error:  # noqa: BLE001 - whatever a rival raises, the others go on
            stop_if_broken(at, error)
            failed[name] = reason(error)
            say(f"  {name}: {failed[name]}")
            forget()
    watches = {name: Stopwatch(at.device) for name in bursts}
    for _ in range(rounds):
        for name, burst in bursts.items():
            for _ in range(burst):
                if cold_cache:
                    flush(at.device)
                watches[name].time(timed[name])
            watches[name].read()
    return {name: Times.of([x / 1e3 for x in w.read()]) for name, w in watches.items()}, failed


def compare(
    at: Place,
    table: Table,
    ours: str,
    calls: Mapping[str, Call],
    sizes: Row,
    more: Callable[[str, Times], Row] = lambda side, times: {},
    *,
    ratio: str,
    budget: float,
    expected: float | str = "",
) -> dict[str, Times]:
    """Time the sides in turns: a row and a line for each, with how many times ours it took.

    Args:
        sizes: the first columns; the name of the side goes before ``mode``.
        more: further columns of a side.
        ratio: the column of the times over ours.
        expected: of ours: :func:`expected_ms`.

    Returns the times, none where ours did not run: then there are no rows.
    """
    times, failed = measure(at, calls, budget=0.05 if at.quick else budget, graphs=True)
    if ours not in times:
        say(f"{ours} is left out: {failed[ours]}")
        return {}
    for side, t in times.items():
        row: Row = {"side": side, **sizes, "dtype": at.precision, **t.row()}
        row |= {"expected_ms": expected if side == ours else ""}
        row |= {ratio: round(t.median / times[ours].median, 3)} | more(side, t)
        table.add(row)
        where = " ".join(f"{name} = {value}" for name, value in sizes.items() if name != "mode")
        say(
            f"{where} {sizes['mode']:17} {side:26} {t.median:9.3f} ms (p10 {t.p10:.3f}, p90"
            f" {t.p90:.3f}), {row[ratio]:.2f} x {ours}"
            + (f", expected {expected} ms" if row["expected_ms"] else "")
        )
    return times


def stop_if_broken(at: Place, error: BaseException) -> None:
    """After an illegal access nothing more can run in this process: raise it again."""
    try:
        wait(at.device)
    except Exception:
        raise error from None


@contextlib.contextmanager
def tried(at: Place, label: str) -> Iterator[None]:
    """What fails within says so in one line, and the rest goes on; but for a broken GPU."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever a rival raises
        stop_if_broken(at, error)
        say(f"  {label}: {reason(error)}")
        forget()


@functools.cache
def copy_bandwidth(device: torch.device, gigabytes: float = 2.0) -> float:
    """Bytes read and written per second by a copy within the device."""
    size = int(gigabytes * 2**30) if device.type == "cuda" else 2**22
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(7)
    target = torch.empty_like(source)
    watch = Stopwatch(device)
    for i in range(13):
        target.copy_(source)
        if i >= 3:
            watch.time(lambda: target.copy_(source))
    median = Times.of([x / 1e3 for x in watch.read()]).median
    forget()
    return 2 * size / (median / 1e3)


def expected_ms(at: Place, case: str, mode: str, share: float) -> float | str:
    """The least time of our kernels, counted from their machine code; "" for what is not counted.

    Each takes as long as its bytes, at the bandwidth of a copy, or as issuing its instructions.

    Args:
        case: of ``gpu_floors.csv``, which docs/kernels.md says how to make; its figures are an
            H100's, of 65,536 tokens.
        share: of the work that was counted.
    """
    slower = MAKERS_BANDWIDTH / copy_bandwidth(at.device)
    floors = [r for r in records.read_rows(FLOORS) if r["case"] == case]
    ours = [r for r in floors if mode != records.MODES[0] or r["pass"] == "forward"]
    us = sum(max(float(r["bytes_us"]) * slower, float(r["issue_us"])) for r in ours)
    return round(us * share / 1e3, 4) if ours else ""


# --- memory ----------------------------------------------------------------------------------


class Memory(NamedTuple):
    """Bytes of one forward and backward pass."""

    saved: int  # held for the backward pass: distinct storages, inputs included
    kept: int | None  # allocated between the passes beyond inputs and output; None on a CPU
    peak: int | None  # most allocated beyond the inputs; None on a CPU

    def row(self) -> Row:
        mb = {name: "" if x is None else round(x / 2**20, 3) for name, x in self._asdict().items()}
        return {f"{name}_mb": x for name, x in mb.items()}


@contextlib.contextmanager
def saved_storages() -> Iterator[dict[int, int]]:
    """Sizes of the distinct storages that autograd saves meanwhile, by address."""
    sizes: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield sizes


def memory_of(at: Place, op: Callable[..., torch.Tensor], leaves: Sequence[torch.Tensor]) -> Memory:
    """What ``op(*leaves)`` keeps for its backward pass, and the peak of both passes."""
    inputs = [x.detach().clone().requires_grad_() for x in leaves]
    before = 0
    if at.cuda:
        forget()
        wait(at.device)
        machine.reset_peak_memory(at.device)
        before = machine.memory_bytes(at.device)
    with saved_storages() as sizes:
        out = op(*inputs)
    kept = None
    if at.cuda:
        kept = machine.memory_bytes(at.device) - before - out.nbytes
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    peak = machine.peak_memory_bytes(at.device) - before if at.cuda else None
    return Memory(sum(sizes.values()), kept, peak)


# --- calls -----------------------------------------------------------------------------------


def normal(at: Place, *shape: int, seed: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Standard normal numbers on the device, a function of seed and shape."""
    generator = torch.Generator(at.device).manual_seed(seed)
    x = torch.randn(*shape, generator=generator, device=at.device)
    return x.to(dtype or at.dtype)


def relative(a: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is exact."""
    exact = exact.double()
    return ((a.double() - exact).norm() / exact.norm().clamp_min(1e-300)).item()


# --- models ------------------------------------------------------------------------------------


def make_model(
    at: Place, name: str, size: str, dtype: torch.dtype, **overrides: Any
) -> LatteForCausalLM:
    """A model on the device, in inference mode; every run draws the same random weights."""
    torch.manual_seed(0)
    with torch.device(at.device):
        model = LatteForCausalLM(preset_config(name, size, **overrides))
    return model.to(dtype).eval()


def tokens(at: Place, vocabulary: int, B: int, T: int) -> torch.Tensor:
    """Random tokens (B, T)."""
    generator = torch.Generator(at.device).manual_seed(1)
    return torch.randint(vocabulary, (B, T), generator=generator, device=at.device)


@contextlib.contextmanager
def attention_by(at: Place, kind: str) -> Iterator[None]:
    """Softmax attention held to PyTorch's ``flash`` backend, or to ``standard``: T x T weights."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = [SDPBackend.MATH if kind == "standard" else SDPBackend.FLASH_ATTENTION]
    if not at.cuda:
        backends = [*backends, SDPBackend.MATH]
    with sdpa_kernel(backends):
        yield
