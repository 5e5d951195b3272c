"""`latte benchmark`: time and memory of the ops and of whole models, on this device.

Times are wall times of single calls, all names of one mode and length in turns:
`latte.lab.machine`. Peak memory is net of what was in use before the inputs were made (for models:
once the model was there); on a CPU each case has a process of its own, since resident memory is the
process's. In it lengths ascend, so a length may find a little memory that a shorter one freed and
that still counts as resident.

Modes: "forward" without gradients; "forward+backward" with gradients for all inputs (of a model:
the loss on its own input, gradients for all weights); "decode", of models alone, one more token
after a context of the given length. Weights and inputs are random: they do not change the work.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from latte.errors import LatteError, is_out_of_memory, one_line
from latte.lab import machine
from latte.lab.evaluate.benchmark_ops import OPS, op_call, op_table
from latte.lab.machine import Times, WorkFailed, in_fresh_process, interleave
from latte.lab.progress import progress
from latte.lab.results import results_at
from latte.lab.train.recipe import ModelSection, Recipe
from latte.lab.train.run import model_config
from latte.models import PRESETS, SIZES
from latte.models.atomic_files import writable_folder
from latte.models.cache_name import CACHE_NAME
from latte.models.registry import find_model, other_models
from latte.ops.backend import watch_choices

MODES = ("forward", "forward+backward", "decode")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PREFILL = 512  # tokens of a context that are read at a time
WARM_UP = 16  # tokens of the first call, which loads libraries

COLUMNS = (
    "kind", "name", "mode", "tokens", "batch", "median_ms", "p10_ms", "p90_ms", "min_ms", "calls",
    "tokens_per_second", "peak_net_mb", "note", "heads", "latents", "head_dim", "window", "size",
    "dtype", "backend", "device", "threads", "torch", "date",
)  # fmt: skip

TimedCall = Callable[[], Any]


@dataclass(frozen=True)
class Settings:
    """What is measured. `latents` are per head; the sizes of ops, `size` is that of models."""

    ops: tuple[str, ...] = ("latte", "macchiato", "window", "softmax")
    models: tuple[str, ...] = ("latte-r-swa++", "transformer++")
    modes: tuple[str, ...] = MODES
    lengths: tuple[int, ...] = (1024, 4096)
    batch: int = 1
    heads: int = 8
    latents: int = 32
    head_dim: int = 64
    window: int = 128
    size: str = "tiny"
    dtype: str = "float32"
    backend: str | None = None  # of the ops; None: the library's choice
    device: str | None = None  # None: a GPU if there is one
    budget: float = 1.0  # seconds of timed calls per name, mode and length
    memory: bool = True

    @property
    def place(self) -> torch.device:
        return torch.device(self.device or machine.default_device())


class Case(NamedTuple):
    """One op or model in one mode."""

    kind: str
    name: str
    mode: str


def check(settings: Settings) -> list[Case]:
    """The cases, or a LatteError for names, numbers or a device that cannot be used."""
    known = {
        "ops": OPS,
        "models": (*PRESETS, *(n for n, each in other_models().items() if each.causal)),
        "modes": MODES,
        "size": SIZES,
        "dtype": DTYPES,
    }
    for field, names in known.items():
        given = getattr(settings, field)
        values, what = ([given], "one") if isinstance(given, str) else (given, "some")
        for name in values:
            if name not in names:
                raise LatteError(f"{field}: expected {what} of {', '.join(names)}, got {name!r}")
    for field in ("batch", "heads", "latents", "head_dim", "window", "budget"):
        if not getattr(settings, field) > 0:
            raise LatteError(f"{field}: expected more than 0, got {getattr(settings, field)}")
    try:
        torch.empty(1, device=settings.place)
    except (RuntimeError, AssertionError) as error:
        raise LatteError(f"device {settings.device!r} cannot be used: {one_line(error)}") from None
    for name in settings.models:
        find_model(name).check()
    check_memory(settings)
    cases = [Case("op", n, m) for m in settings.modes for n in settings.ops if m != "decode"]
    cases += [
        Case("model", name, mode)
        for mode in settings.modes
        for name in settings.models
        if mode != "decode" or find_model(name).carries_state
    ]
    if not cases or not settings.lengths:
        raise LatteError("nothing to measure: name ops or models, modes and lengths")
    return cases


def check_memory(settings: Settings) -> None:
    """Raise LatteError for inputs that are larger than the device's memory.

    A bound from below: of ops their values, of models the tokens.
    """
    if not settings.lengths:
        return
    width = settings.heads * settings.head_dim * DTYPES[settings.dtype].itemsize
    if not settings.ops:
        width = torch.long.itemsize
    size = settings.batch * max(settings.lengths) * width
    there = machine.memory_there_is(settings.place)
    if there is not None and size > there:
        raise LatteError(
            f"inputs of batch {settings.batch:,} and {max(settings.lengths):,} tokens take at least"
            f" {machine.size_text(size)}, and there are {machine.size_text(there)} of memory;"
            " expected a smaller --batch, --lengths, --heads or --head-dim"
        )


class BenchmarkTable(NamedTuple):
    """The rows of a benchmark, and the file that has them."""

    rows: list[dict[str, Any]]
    path: Path


def benchmark(
    settings: Settings,
    output: Path,
    *,
    quiet: bool = False,
    named: bool = True,
    force: bool = False,
) -> BenchmarkTable:
    """Measure all cases and write benchmark.csv in a folder.

    Until all cases are measured, the rows so far are in benchmark.partial.csv.

    Args:
        output, named, force: Folder and its options, as for :func:`latte.lab.results.results_at`.
            Device, threads, versions and date are settings too.

    Raises:
        LatteError: The errors of `check`; or the folder cannot be written or holds other results;
            or an op refuses its arguments, such as a backend that this machine does not have.
    """
    cases = check(settings)
    backends = {}
    for case in cases:  # a case that cannot run here raises before files are written
        try:
            with watch_choices() as chosen:
                _maker(case, settings)(WARM_UP)()
            backends[case] = "+".join(sorted(chosen))
        except (ValueError, TypeError) as error:
            raise LatteError(f"{case.name}, {case.mode}: {one_line(error)}") from None
    place = machine.describe(settings.place)
    files = ("benchmark.csv", "benchmark.partial.csv")
    results = results_at(output, files, asdict(settings) | place, named=named, force=force)
    partial = results.path("benchmark.partial.csv")
    writable_folder(results.folder)
    results.keep_settings()
    rows = []
    total = len(cases) * len(set(settings.lengths))
    with (
        open(partial, "w", newline="", encoding="utf-8") as file,
        progress(total, "case", shown=not quiet, bar=False) as state,
    ):
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for kind, mode in dict.fromkeys((case.kind, case.mode) for case in cases):
            group = [case for case in cases if (case.kind, case.mode) == (kind, mode)]
            peaks = {case: _peaks(case, settings) for case in group}
            makers = {case: _maker(case, settings) for case in group}
            for length in sorted(set(settings.lengths)):
                for case, times in _times(makers, length, settings.budget).items():
                    row = _row(case, length, times, peaks[case], settings) | place
                    row["backend"] = backends[case]
                    writer.writerow(row)
                    file.flush()
                    rows.append(row)
                    state.update(1)
                    if not quiet:
                        print(line(row), flush=True)
                        state.spoke()
    partial.replace(results.path("benchmark.csv"))
    return BenchmarkTable(rows, results.path("benchmark.csv"))


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    start = f"{row['mode']:16}  {row['name']:16}  {row['tokens']:>9,} tokens"
    memory_used = f"{row['peak_net_mb']:>10,.1f} MB" if row["peak_net_mb"] != "" else " " * 13
    if row["median_ms"] == "":
        return f"{start}  {row['note']}"
    return (
        f"{start}  {row['median_ms']:>10,.2f} ms (p10 {row['p10_ms']:,.2f}, p90"
        f" {row['p90_ms']:,.2f}, {row['calls']} calls)  {memory_used}  {row['note']}"
    ).rstrip()


def _row(
    case: Case,
    length: int,
    times: Times | str,
    peaks: dict[int, float] | str,
    settings: Settings,
) -> dict[str, Any]:
    notes = [text for text in (times, peaks) if isinstance(text, str) and text]
    row: dict[str, Any] = {**case._asdict(), "tokens": length, "batch": settings.batch}
    row |= {name: "" for name in ("median_ms", "p10_ms", "p90_ms", "min_ms", "calls")}
    row |= {"peak_net_mb": "" if isinstance(peaks, str) else round(peaks[length] / 1e6, 3)}
    if isinstance(times, Times):
        tokens = settings.batch * (1 if case.mode == "decode" else length)
        row |= times.row() | {"tokens_per_second": round(1e3 * tokens / times.median, 1)}
    row |= {"note": "; ".join(dict.fromkeys(notes)), "dtype": settings.dtype}
    if case.kind == "model":
        return row | {"size": settings.size}
    sizes = {name: getattr(settings, name) for name in ("heads", "latents", "head_dim", "window")}
    return row | sizes


def _times(
    makers: dict[Case, Callable[[int], TimedCall]], length: int, budget: float
) -> dict[Case, Times | str]:
    """Times of one length, all cases in turns; a case without enough memory is left out."""
    calls: dict[Case, TimedCall] = {}
    for case, make in makers.items():
        try:
            call = make(length)
            call()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            continue
        calls[case] = call
    timed = interleave(calls, budget) if calls else {}
    return {case: timed.get(case, "out of memory") for case in makers}


def _peaks(case: Case, settings: Settings) -> dict[int, float] | str:
    """Peak bytes by length, or why there are none."""
    if not settings.memory:
        return ""
    try:
        if settings.place.type == "cpu":
            return in_fresh_process(measure_memory, case, settings)
        return measure_memory(case, settings)
    except (WorkFailed, MemoryError, RuntimeError) as error:
        if not (isinstance(error, WorkFailed) or is_out_of_memory(error)):
            raise
        return f"memory: {one_line(error)[:120]}"


def measure_memory(case: Case, settings: Settings) -> dict[int, float]:
    """Peak bytes by length, beyond what was in use before, in this process."""
    device = settings.place
    make = _maker(case, settings)
    make(WARM_UP)()
    before = machine.memory_bytes(device)
    peaks = {}
    for length in sorted(set(settings.lengths)):
        machine.reset_peak_memory(device)
        make(length)()
        peaks[length] = float(max(0, machine.peak_memory_bytes(device) - before))
    return peaks


def _maker(case: Case, settings: Settings) -> Callable[[int], TimedCall]:
    """A function of a length; it makes a call that returns when its work is done."""
    torch.manual_seed(0)
    make = _op(case, settings) if case.kind == "op" else _model(case, settings)
    if settings.place.type != "cuda":
        return make

    def synchronised(length: int) -> TimedCall:
        call = make(length)

        def wait() -> None:
            call()
            torch.cuda.synchronize(settings.place)

        return wait

    return synchronised


def _op(case: Case, settings: Settings) -> Callable[[int], TimedCall]:
    like: dict[str, Any] = {"device": settings.place, "dtype": DTYPES[settings.dtype]}
    sizes = {name: getattr(settings, name) for name in ("heads", "latents", "head_dim", "window")}

    def make(length: int) -> TimedCall:
        op, shapes = op_table(settings.batch, length, **sizes, backend=settings.backend)[case.name]
        return op_call(case.mode, op, [torch.randn(shape, **like) for shape in shapes])

    return make


def _model(case: Case, settings: Settings) -> Callable[[int], TimedCall]:
    from transformers import AutoModelForCausalLM

    longest = max((*settings.lengths, WARM_UP)) + 1
    section = ModelSection(
        preset=case.name,
        size=settings.size,
        overrides={"max_position_embeddings": longest},
    )
    config = model_config(Recipe(model=section), {})
    model = AutoModelForCausalLM.from_config(config).to(settings.place, DTYPES[settings.dtype])
    model.train(case.mode == "forward+backward")

    def tokens(length: int) -> Tensor:
        shape = (settings.batch, length)
        return torch.randint(config.vocab_size, shape, device=settings.place)

    def make(length: int) -> TimedCall:
        ids = tokens(length)
        if case.mode == "forward":
            return torch.no_grad()(lambda: model(input_ids=ids, use_cache=False))
        if case.mode == "forward+backward":

            def step() -> None:
                model.zero_grad(set_to_none=True)
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

            return step
        cache: dict[str, Any] = {CACHE_NAME: None}

        @torch.no_grad()
        def read(piece: Tensor) -> None:
            output = model(input_ids=piece, use_cache=True, **cache)
            cache[CACHE_NAME] = getattr(output, CACHE_NAME)

        for piece in ids.split(PREFILL, dim=1):
            read(piece)
        last = tokens(1)
        return lambda: read(last)

    return make
