"""What the GPU benchmarks share: where they run, inputs, timing on the device, the budget.

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

import torch

from experiments.benchmarks import records
from experiments.benchmarks.records import Goal, Table, say
from latte.lab.machine import Times

NO_GPU = 2  # exit code
OUT_OF_MEMORY = "out of memory"
TARGETS = "gpu_goals.csv"
FLUSH_BYTES = 256 * 2**20  # several times the level-2 cache of any GPU
DeviceCall = Callable[[], Any]


class Place(NamedTuple):
    """Where and how a script runs."""

    device: torch.device
    backend: str  # of Latte's ops
    dtype: torch.dtype
    out: Path
    quick: bool
    deadline: float  # of time.monotonic()
    baselines: bool  # whether kernels of flash-linear-attention are timed too

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

    def normal(self, *shape: int, seed: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Standard normal numbers on the device, a function of seed and shape."""
        generator = torch.Generator(self.device).manual_seed(seed)
        x = torch.randn(*shape, generator=generator, device=self.device)
        return x.to(dtype or self.dtype)

    def table(self, name: str) -> Table:
        return Table(self.out / name, self.device)

    def goals(self, script: str, goals: Sequence[Goal]) -> None:
        """Print the goals of this script and those that are there."""
        records.report_goals(self.out / TARGETS, script, goals, self.device)


def options(description: str | None, budget: float) -> argparse.ArgumentParser:
    """The options that all the GPU benchmarks have."""
    found = records.parser(description, budget)
    found.add_argument("--device", default="cuda", help="cuda, or cpu to try the script itself")
    found.add_argument("--backend", help="of Latte's ops (default: triton; on a CPU torch)")
    found.add_argument(
        "--no-baselines",
        action="store_true",
        help="leave out flash-linear-attention, whose autotuners compile for many minutes",
    )
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
    out, baselines = records.output_folder(args), device.type == "cuda" and not args.no_baselines
    return Place(device, backend, dtype, out, args.quick, deadline, baselines)


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

    def time(self, call: DeviceCall) -> None:
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

    def read(self) -> Times:
        wait(self.device)
        self.ms += [start.elapsed_time(end) for start, end in self.events]
        self.events.clear()
        return Times.of([x / 1e3 for x in self.ms])


def reason(error: BaseException) -> str:
    """One line for what went wrong."""
    if isinstance(error, torch.OutOfMemoryError):
        return OUT_OF_MEMORY
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def forget() -> None:
    """Drop what failed calls and earlier sizes left in memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def replayed(at: Place, name: str, call: DeviceCall) -> DeviceCall:
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
    sides: Mapping[Any, DeviceCall],
    *,
    budget: float = 1.0,
    rounds: int = 5,
    cold_cache: bool = True,
    graphs: bool = False,
) -> dict[Any, Times]:
    """Time the sides in turns: statistics of those that ran. The others say why they did not.

    Args:
        budget: seconds of timed calls per side; each gets at least one call a round.
        cold_cache: write over the level-2 cache before every call.
        graphs: replay the calls as CUDA graphs.
    """
    bursts: dict[Any, int] = {}
    timed = dict(sides)
    for name, call in sides.items():
        with tried(at, str(name)):
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
    watches = {name: Stopwatch(at.device) for name in bursts}
    for _ in range(rounds):
        for name, burst in bursts.items():
            for _ in range(burst):
                if cold_cache:
                    flush(at.device)
                watches[name].time(timed[name])
            watches[name].read()
    return {name: watch.read() for name, watch in watches.items()}


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


@contextlib.contextmanager
def attention_by(at: Place, kind: str) -> Iterator[None]:
    """Softmax attention held to PyTorch's ``flash`` backend, or to ``standard``: T x T weights."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = [SDPBackend.MATH if kind == "standard" else SDPBackend.FLASH_ATTENTION]
    if not at.cuda:
        backends = [*backends, SDPBackend.MATH]
    with sdpa_kernel(backends):
        yield
