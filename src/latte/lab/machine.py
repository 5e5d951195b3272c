"""Measurements of the machine: time of a call, memory of a process, peak speed, and description.

Time. Several sides run in one process and take turns (:func:`interleave`). In a round each side
makes a burst of calls. The calls of every side are spread over all rounds, so that a slow moment of
the machine affects all sides. Calls before the first round are a warm-up. Medians and percentiles
are over single calls.

Memory. On a CPU it is resident memory, a property of a whole process with its libraries. So each
side to be compared runs in its own process (:func:`in_fresh_process`). On a GPU it is the memory
that PyTorch has allocated.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import importlib.metadata
import multiprocessing
import os
import platform
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from latte.errors import LatteError
from latte.lab.malloc import release_memory
from latte.layers import Mixer
from latte.ops.triton_backend import launch

# ---- time


class Times(NamedTuple):
    """Statistics of single calls, in milliseconds."""

    median: float
    p10: float
    p90: float
    fastest: float
    calls: int

    @staticmethod
    def of(seconds: Sequence[float]) -> Times:
        ms = [1e3 * s for s in seconds]
        median, p10, p90 = np.quantile(ms, (0.5, 0.1, 0.9)).tolist()
        return Times(median, p10, p90, min(ms), len(ms))

    def row(self) -> dict[str, Any]:
        values = zip(("median_ms", "p10_ms", "p90_ms", "min_ms"), self[:4], strict=True)
        return {name: round(x, 4) for name, x in values} | {"calls": self.calls}


def seconds_of(call: Callable[[], object]) -> float:
    """Wall time of one call, which must return only when its work is done."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleave(sides: Mapping[Any, Callable[[], object]], budget: float) -> dict[Any, Times]:
    """Time several sides in turns; see the head of this module.

    Args:
        sides: Functions to time, by name.
        budget: Seconds of timed calls per side. If a call takes longer than that, there are 3
            rounds, with at least one call of each side; else there are 5 rounds.
    """
    expected: dict[Any, float] = {}
    for name, call in sides.items():
        expected[name] = seconds_of(call)  # the first call allocates, and compiles
        if expected[name] < budget:
            expected[name] = min(seconds_of(call) for _ in range(2))
    rounds = 5 if max(expected.values()) < budget else 3
    bursts = {n: max(1, min(25, int(budget / rounds / s))) for n, s in expected.items()}
    seconds: dict[Any, list[float]] = {name: [] for name in sides}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, call in sides.items():
                time.sleep(0.02)  # so that the previous side's threads stop spinning
                seconds[name] += [seconds_of(call) for _ in range(bursts[name])]
    finally:
        gc.enable()
    return {name: Times.of(s) for name, s in seconds.items()}


# ---- memory

CPU = torch.device("cpu")


def default_device() -> torch.device:
    """The device to use where none is named: a GPU if there is one."""
    return torch.device("cuda") if torch.cuda.is_available() else CPU


def memory_bytes(device: torch.device = CPU) -> int:
    """Memory in use now. On a CPU without that information, the peak so far."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _status_bytes("VmRSS") or peak_memory_bytes(device)


def memory_there_is(device: torch.device = CPU) -> int | None:
    """All memory of a GPU, or the memory that this process may use; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (ValueError, OSError, AttributeError):
        return None
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # a container's, versions 2 and 1
        with contextlib.suppress(OSError, ValueError):
            found.append(int(Path("/sys/fs/cgroup", limit).read_text()))
    return min(found)


def size_text(size: float) -> str:
    """`23.4 GB`, in decimal units."""
    for unit in ("bytes", "kB", "MB", "GB", "TB", "PB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} EB"


def peak_memory_bytes(device: torch.device = CPU) -> int:
    """The peak of memory since the start or :func:`reset_peak_memory`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # VmHWM, where there is one: the maximum of `getrusage` is inherited from the process that
    # started this one.
    peak = _status_bytes("VmHWM")
    if peak is None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return peak


def reset_peak_memory(device: torch.device = CPU) -> None:
    """Reset the peak to the memory in use now, if the system can (on a CPU: Linux).

    Memory that malloc keeps but does not use is returned to the system first.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        release_memory()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def _status_bytes(field: str) -> int | None:
    """A field of /proc/self/status in bytes; None where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith(f"{field}:")), None)


# ---- a process of its own


class WorkFailed(LatteError):
    """The worker raised another exception than a LatteError, or was killed."""


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run `function(*arguments)` in a new process. Arguments and result are pickled.

    So memory that it leaves allocated does not count for the next call, and if it is killed, this
    process goes on.

    Raises:
        LatteError: The function raised it.
        WorkFailed: The function raised another exception (its traceback goes to stderr), or the
            process was killed.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        good, value = receiver.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else \
            f"ended with exit code {code}"  # fmt: skip
        raise WorkFailed(f"its process {how}") from None
    except BaseException:  # interrupted: the worker must not continue alone
        process.terminate()
        raise
    finally:
        process.join()
    if not good:
        raise value
    return value


def _work(sender: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        answer = (True, function(*arguments))
    except LatteError as error:
        answer = (False, error)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        traceback.print_exc()
        text = " ".join(str(error).split())
        answer = (False, WorkFailed(f"{type(error).__name__}: {text[:300]}"))
    sender.send(answer)


def _end_with_parent() -> None:
    """End this process when its parent ends: nobody could receive the result."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


# ---- peak speed

# Dense bf16 peak, FLOP/s, from the makers' data sheets; the longest matching name wins.
GPU_PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "H100 PCIe": 756e12,
    "GH200": 989e12,
    "A100": 312e12,
    "A10": 125e12,
    "A30": 165e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
    "T4": 65e12,
}


def gpu_peak_flops(name: str) -> float | None:
    """Dense bf16 peak of a GPU by its name, FLOP/s; None if it is not in the table."""
    matches = [key for key in GPU_PEAK_FLOPS if all(word in name for word in key.split())]
    return GPU_PEAK_FLOPS[max(matches, key=len)] if matches else None


@functools.cache
def cpu_matmul_flops(bf16: bool) -> float:
    """FLOP/s of the best of several 512x512x512 matrix products here and now (about 0.1 s)."""
    size = 512
    a = torch.randn(size, size, dtype=torch.bfloat16 if bf16 else torch.float32)
    b = a.clone()
    return 2 * size**3 / min(seconds_of(lambda: torch.mm(a, b)) for _ in range(8))


def peak_flops(device: torch.device, bf16: bool, processes: int) -> tuple[float | None, str]:
    """The FLOP/s of all processes together (or None), and the source of the figure.

    The measurement does not change the random state of training.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        single = gpu_peak_flops(name)
        return (None if single is None else single * processes), f"{name}, dense bf16 data sheet"
    with torch.random.fork_rng(devices=[]):
        single = cpu_matmul_flops(bf16)
    return single * processes, f"CPU, measured {'bf16' if bf16 else 'fp32'} matmul"


def flops_per_token(model: nn.Module, length: int) -> float:
    """Training FLOPs per token, 6 per weight used in a product plus three times the mixers' own.

    Forward costs 2 per weight and token, backward twice that. If a model has no mixer of
    `latte.layers`, only the weights are counted. The second forward of gradient checkpointing is
    not counted (model FLOPs, not hardware FLOPs).
    """
    config: Any = model.config
    weights = sum(p.numel() for p in model.parameters() if p.ndim >= 2)
    if not getattr(config, "tie_word_embeddings", False):
        weights -= config.vocab_size * config.hidden_size  # the input embedding is a look-up
    mixers = [m for m in model.modules() if isinstance(m, Mixer)]
    return 6.0 * weights + 3.0 * sum(mixing_flops(mixer, length) for mixer in mixers)


def mixing_flops(mixer: Any, length: int) -> float:
    """Forward FLOPs per token of mixing at a length, without projections; 0 if unknown.

    They are 2 * (K + D) per head and visible key, and 2 * 2 * D per latent, or what the mixer's own
    method `mixing_flops` says.
    """
    if hasattr(mixer, "mixing_flops"):
        return mixer.mixing_flops(length)  # type: ignore[no-any-return]
    D, seen = mixer.o_proj.in_features // mixer.num_heads, 0.0
    window = mixer.base_window if getattr(mixer, "mixing", None) == "base" else mixer.window
    if window is not None or mixer.grows:
        seen = min(window or length, (length + 1) / 2)
    reads = hasattr(mixer, "latents") and getattr(mixer, "reads_latents", True)
    latents = mixer.latents.k_proj.out_features if reads else 0
    return 2.0 * mixer.num_heads * (mixer.head_dim + D) * seen + 4.0 * latents * D


# ---- description

# Names of packages that differ from the names in a table.
PACKAGES = {"latte": "latte-attention", "fla": "flash-linear-attention"}


def describe(
    device: torch.device = CPU, fields: Sequence[str] = ("device", "threads", "torch", "date")
) -> dict[str, Any]:
    """The machine and software of a result, and its date.

    Args:
        device: Device of the result.
        fields: Names of values: `device`, `card` (compute capability times ten), `cpu`, `cores`,
            `threads`, `cuda`, `ptxas` (Triton's), `python`, `date` (UTC), or a package for its
            version ("" if it is not installed).
    """
    known: dict[str, Callable[[], Any]] = {
        "device": lambda: torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cpu": cpu_name,
        "cores": lambda: len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads,
        "card": lambda: launch.capability(device) if device.type == "cuda" else "",
        "cuda": lambda: torch.version.cuda or "",
        "ptxas": lambda: launch.assembler() or "",
        "torch": lambda: torch.__version__,
        "python": platform.python_version,
        "date": lambda: datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    return {name: known[name]() if name in known else version(name) for name in fields}


@functools.cache
def cpu_name() -> str:
    """The processor's name, as the system gives it."""
    with contextlib.suppress(OSError):  # not Linux
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@functools.cache
def version(package: str) -> str:
    """The version of a package, installed or (ours) beside this file; "" if there is none."""
    try:
        return importlib.metadata.version(PACKAGES.get(package, package))
    except importlib.metadata.PackageNotFoundError:
        return getattr(sys.modules["latte"], "__version__", "") if package == "latte" else ""
