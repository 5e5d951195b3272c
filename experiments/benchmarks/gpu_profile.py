"""Where the time of training and of a decoding step goes on a GPU: kernel by kernel, and the gaps.

    python -m experiments.benchmarks.gpu_profile [--quick] [--out DIR] [--budget SECONDS]
        [--device DEVICE] [--backend BACKEND]

``latte-r-swa++`` and ``transformer++`` of "paper" size: a training step of 32,768 tokens as blocks
of 1k, 4k and 16k, plain and compiled, and an eager step of one token after 1,024, beside Llama's.
Each runs a few times under PyTorch's profiler, warmed up. ``gpu_profile.csv`` has a row for each
kernel of a case, the longest first, and one for the whole case:

* ``launches``: kernels, copies and fills of one step.
* ``busy_us``: their time on the device. ``gap_us``: time between the first and the last of them in
  which the device did nothing: the host was too slow. Times of one step.
* ``host_us``: time of one step on the host's clock, the profiler's own cost included.
* ``allocated_mb``: memory asked for in one step. ``read_gb``: the inputs of PyTorch's operations,
  at two bytes an element; their rate ``gb_per_s`` tells how far from the memory's peak the device
  was. The bytes of our kernels are in ``gpu_floors.csv``.

Also ``fused``: Macchiato's forward pass in one kernel beside two: the window's, the latents', and
what mixes their outputs, by length and width. :func:`kernels_of_row` decides from a row whether one
kernel or two should serve its length and width (docs/kernels.md). On ``--device cpu`` PyTorch's
operations take the place of kernels.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from experiments.benchmarks import gpu_common as gpu
from experiments.benchmarks import gpu_models
from experiments.benchmarks.records import Row, Table, columns, say, write_rows
from latte.ops import latte_attention, macchiato_attention, sliding_window_attention, use_backend

STEPS = 3  # profiled together
SHOWN = 12  # kernels of a case that are printed


class Kernel(NamedTuple):
    """One run of one kernel, in microseconds."""

    name: str
    start: float
    end: float


def kernels_of(events: Sequence[Any], cuda: bool) -> list[Kernel]:
    """What ran on the device, in order; on a CPU the operations that call no other."""
    if cuda:
        found = [e for e in events if e.device_type == DeviceType.CUDA and e.name]
    else:
        found = [e for e in events if e.name.startswith(("aten::", "latte::"))]
        found = [e for e in found if not any(c.name.startswith("aten::") for c in e.cpu_children)]
    ran = [Kernel(e.name, e.time_range.start, e.time_range.end) for e in found]
    return sorted(ran, key=lambda kernel: kernel.start)


def busy_and_gaps(ran: Sequence[Kernel]) -> tuple[float, float]:
    """Microseconds in which something ran, and in which nothing did between first and last."""
    busy, end = 0.0, ran[0].start if ran else 0.0
    for kernel in ran:
        busy += max(0.0, kernel.end - max(end, kernel.start))
        end = max(end, kernel.end)
    return busy, (end - ran[0].start - busy) if ran else 0.0


def _inner(event: Any) -> bool:
    """Whether another of PyTorch's operations called this one."""
    return event.cpu_parent is not None and event.cpu_parent.name.startswith("aten::")


def bytes_of(event: Any) -> int:
    """The bytes of an operation's inputs, as the profiler has their shapes, at two per element."""
    return sum(2 * torch.Size(shape).numel() for shape in event.input_shapes if shape)


def profiled(at: gpu.Place, call: Callable[[], Any], steps: int = STEPS) -> tuple[Row, list[Row]]:
    """The whole of a call, and its kernels, the longest first."""
    for _ in range(2):
        call()  # compiles
    gpu.wait(at.device)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if at.cuda else [])
    start = time.perf_counter()
    with profile(activities=activities, profile_memory=True, record_shapes=True) as found:
        for _ in range(steps):
            call()
        gpu.wait(at.device)
    host = (time.perf_counter() - start) * 1e6
    events: list[Any] = list(found.events())
    ran = kernels_of(events, at.cuda)
    busy, gap = busy_and_gaps(ran)
    memory = "self_device_memory_usage" if at.cuda else "self_cpu_memory_usage"
    allocated = sum(max(0, getattr(event, memory)) for event in events)
    operations = [e for e in events if e.name.startswith("aten::") and not _inner(e)]
    read = sum(map(bytes_of, operations))
    whole: Row = {"kernel": "", "launches": round(len(ran) / steps, 1)}
    whole |= {"busy_us": round(busy / steps, 1), "gap_us": round(gap / steps, 1), "share": 1.0}
    whole |= {
        "host_us": round(host / steps, 1),
        "allocated_mb": round(allocated / steps / 2**20, 1),
    }
    whole |= {"read_gb": round(read / steps / 1e9, 4)}
    whole["gb_per_s"] = round(read / busy / 1e3, 1) if busy else ""
    rows: list[Row] = []
    for name, own in itertools.groupby(sorted(ran), key=lambda kernel: kernel.name):
        times = [kernel.end - kernel.start for kernel in own]
        total = sum(times)
        row: Row = {"kernel": name[:120], "launches": round(len(times) / steps, 1)}
        row |= {"busy_us": round(total / steps, 1), "gap_us": ""}
        rows.append(row | {"share": round(total / busy, 4) if busy else ""})
    return whole, sorted(rows, key=lambda row: -row["busy_us"])


def cases(at: gpu.Place) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Case, model and call; what a call needs is made when it is asked for."""
    size, total, lengths = "paper", 32768, [1024, 4096, 16384]
    if at.quick:
        size, total, lengths = "tiny", 128, [64]
    for T, compiled in itertools.product(lengths, (False, True)):
        if at.quick and compiled:
            continue
        for name in (gpu_models.OURS, gpu_models.RIVAL):
            step = gpu_models.make_step(at, name, size, compiled, total // T, T)

            def train(step: Any = step) -> None:
                with use_backend(at.backend, everywhere=True):
                    step()

            yield f"training, T = {T}{', compiled' if compiled else ''}", name, train
    context = 64 if at.quick else 1024
    model = gpu_models.make_model(at, gpu_models.OURS, size, at.dtype)
    yield "a step", gpu_models.OURS, gpu_models.Latte(at, model, 1, context)
    llama = gpu_models.Llama(at, gpu_models.make_llama(at, size), 1, context)
    yield "a step", gpu_models.LLAMA, llama


def profile_all(at: gpu.Place) -> None:
    """A row for every kernel of every case."""
    table = at.table("gpu_profile.csv")
    sides = cases(at)
    while at.left() > 0 and (side := next(sides, None)) is not None:
        case, name, call = side
        with gpu.tried(at, f"{case}, {name}"):
            whole, rows = profiled(at, call, 1 if at.quick else STEPS)
            named = {"case": case, "model": name}
            table.add_and_say(named | whole)
            here = columns(at.device)
            table.rows += [named | row | here for row in rows]
            write_rows(table.path, table.rows)
            for row in rows[:SHOWN]:
                say(f"    {row['launches']:6} x {row['kernel'][:60]:60} {row['busy_us']:10} us")
        del call, side
        gpu.forget()


# L, K and D of the comparison, and tokens of one row.
FUSED_WIDTHS = ((16, 64, 64), (32, 64, 64), (32, 128, 128), (64, 64, 128))
FUSED_LENGTHS = (1024, 4096, 16384, 65536)


# Two kernels must be this much faster: their outputs take memory too.
WORTH = 0.95


def kernels_of_row(row: Mapping[str, Any]) -> int:
    """How many kernels should serve the length and width of a row of ``gpu_fused.csv``: 1 or 2."""
    return 2 if float(row["two"]) < WORTH * float(row["fused"]) else 1


def in_two(gate: Tensor, window: Callable[[], Any], latents: Callable[[], Any]) -> Tensor:
    """Both branches, and the least that mixes them: one launch, with the window's share given."""
    return torch.lerp(latents()[0], window()[0], gate)


def compare_fused(at: gpu.Place) -> None:
    """Macchiato in one kernel, its branches, and both of these with their mixture."""
    table: Table = at.table("gpu_fused.csv")
    heads, window = (8, 128) if not at.quick else (2, 16)
    points = [(*w, T) for w in FUSED_WIDTHS for T in FUSED_LENGTHS]
    for L, K, D, T in at.while_time([(3, 8, 8, 64)] if at.quick else points):
        lq, lk = (at.normal(1, T, heads, L + n, seed=n) for n in (1, 0))
        q, k, v = (at.normal(1, T, heads, n, seed=i + 2) for i, n in enumerate((K, K, D)))
        own: Any = {"window": window, "backend": at.backend}
        gate = lq.softmax(-1)[..., :1]
        branches: dict[str, gpu.DeviceCall] = {
            "window": functools.partial(sliding_window_attention, q, k, v, **own),
            "latents": functools.partial(latte_attention, lq[..., 1:], lk, v, backend=at.backend),
        }
        sides: dict[str, gpu.DeviceCall] = {
            "fused": functools.partial(macchiato_attention, lq, lk, q, k, v, **own),
            **branches,
            "two": functools.partial(in_two, gate, *branches.values()),
        }
        with torch.no_grad():
            times = gpu.measure(at, sides, budget=0.2, rounds=3, graphs=True)
        if len(times) < len(sides):
            continue
        one, near, far, _ = (times[name].median for name in sides)
        row: Row = {"L": L, "K": K, "D": D, "T": T, "heads": heads, "window": window}
        row |= {name: round(t.median, 4) for name, t in times.items()}
        row |= {"times_slower_branch": round(one / max(near, far), 3)}
        row["times_both"] = round(one / (near + far), 3)
        table.add_and_say(row | {"kernels": kernels_of_row(row)})


def main(argv: Sequence[str] | None = None) -> None:
    at = gpu.place(gpu.options(__doc__, 600).parse_args(argv))
    profile_all(at)
    compare_fused(at)


if __name__ == "__main__":
    main()
