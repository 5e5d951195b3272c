"""Decoding on a CPU: time per token, operations, cache and memory, 1k to 100k tokens of context.

``latte-r-swa++`` beside ``transformer++`` of the same size, batch of one, random weights (they do
not change the work), all threads; in turns in one process for each size and dtype.

* eager: single-token forwards of the model through its cache. ``compiled``: the same as one graph
  on a static cache, as ``generate(cache_implementation="static")`` runs it. Contexts grow by the
  timed tokens (fewer than 200).
* Contexts in fp32 are real for Latte: random tokens go through the state in chunks.
  ``transformer++`` processes 1000 so and repeats the last keys and values up to the context; in
  bf16 both process 4 and repeat, since chunks in bf16 are slow on CPUs without instructions for
  it. The cost of a step does not depend on the values.
* weights: one row through ``F.linear`` with every matrix of Latte's model, which reads each weight
  once; its time is what a step of decoding cannot go below.
* Calls: PyTorch's operations of a step per layer in the profiler, those inside others counted too;
  ``torch`` without the native kernels.
* Peak memory, of the smallest size: of a fresh process that fills the cache so and decodes 8
  tokens; and the same less what was resident once the model was there. Latte's contexts are
  stations of one process, ``transformer++`` has one for each.

    python -m experiments.benchmarks.cpu_decode [--quick] [--resume] [--out DIR] [--budget S]
        [--size SIZE]
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from experiments.benchmarks import records
from experiments.benchmarks.generation import Generator, cache_bytes, feed, peaks_of
from experiments.benchmarks.records import Goal, Row, ratio, say, select
from latte.lab.machine import interleave
from latte.models import LatteCache, LatteForCausalLM, preset_config
from latte.ops import cpp_backend, use_backend

LATTE, RIVAL, WEIGHTS = "latte-r-swa++", "transformer++", "weights"
CONTEXTS = {"tiny": (1000, 10000, 100000), "small": (1000, 10000, 100000), "paper": (1000,)}
RIVALS_LONGEST = 10000
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CHUNK = 500
SIDES = ("size", "dtype", "how", "model")
SHOWN = {"median_ms": "Milliseconds per token, by tokens of context:"}


def make_model(name: str, size: str, dtype: str = "float32") -> LatteForCausalLM:
    """A model with random weights."""
    torch.manual_seed(0)
    return LatteForCausalLM(preset_config(name, size)).eval().to(DTYPES[dtype])


def fill(model: LatteForCausalLM, cache: LatteCache | None, seen: int, context: int) -> LatteCache:
    """Bring the cache to the context, from what it has already seen."""
    real = context if model.config.mixer != "softmax" else min(2 * CHUNK, context)
    cache = feed(model, cache, (4 if model.dtype == torch.bfloat16 else real) - seen, CHUNK, seen)
    if cache.get_seq_length() < context:
        for layer in cache.layers:
            state, count = layer.state, context if layer.grows else model.config.sliding_window - 1
            assert state.window is not None and state.position is not None
            newest = torch.arange(count) % 4 - 4
            window = type(state.window)(*(x[:, newest] for x in state.window))
            position = torch.full_like(state.position, context)
            layer.state = state._replace(window=window, position=position)
            layer.seen_tokens = context
    return cache


def compiled(model: LatteForCausalLM, context: int) -> Generator:
    """Steps as one graph on a static cache."""
    side = Generator(model, None)
    side.cache = fill(model, LatteCache(model.config, max_cache_len=context + 300), 0, context)
    side.model = Compiled(model)
    side()  # compiles: a first call of a minute would leave three calls to time
    return side


class Compiled:
    """A model whose forward is compiled; with a mask, which `generate` gives."""

    def __init__(self, model: LatteForCausalLM) -> None:
        self.device, self.step = model.device, torch.compile(model, fullgraph=True)
        self.mask = torch.ones(1, 1, dtype=torch.long)

    def __call__(self, token: torch.Tensor, **options: Any) -> Any:
        return self.step(token, attention_mask=self.mask, **options)


def stream(model: LatteForCausalLM) -> Callable[[], None]:
    """One row through each matrix of the model."""
    matrices = [p.detach().flatten(0, -2) for p in model.parameters() if p.ndim >= 2]
    rows = {m.shape[1]: torch.randn(1, m.shape[1], dtype=m.dtype) for m in matrices}

    def call() -> None:
        for matrix in matrices:
            F.linear(rows[matrix.shape[1]], matrix)

    return call


def time_all(
    size: str, dtype: str, contexts: Sequence[int], budget: float, quick: bool
) -> list[Row]:
    """Every side of one size and dtype: time per token, calls, bytes of the cache."""
    sides: dict[tuple[str, str, int], Any] = {}
    first = contexts[0]
    for name in (LATTE, RIVAL):
        model = make_model(name, size, dtype)
        cache, seen = None, 0
        for context in contexts:
            if name == RIVAL and context > RIVALS_LONGEST:
                continue
            if name == RIVAL:
                cache, seen = None, 0
            cache, seen = fill(model, cache, seen, context), context
            sides[name, "eager", context] = Generator(model, cache)
        if name == LATTE:
            sides[WEIGHTS, "eager", first] = stream(model)
        if size == "tiny" and dtype == "float32" and not quick:
            sides[name, "compiled", first] = compiled(model, first)
        say(f"{size:5} {dtype:8} {name:14} filled")
    layers = preset_config(LATTE, size).num_hidden_layers
    rows = []
    for (name, how, context), times in interleave(sides, budget).items():
        side = sides[name, how, context]
        row: Row = {"model": name, "size": size, "dtype": dtype, "how": how, "context": context}
        row |= times.row() | dict.fromkeys(("cache_bytes", "aten_calls", "aten_torch"), "")
        if name != WEIGHTS:
            row["cache_bytes"] = cache_bytes(side.cache)
        if name != WEIGHTS and how == "eager":
            step = functools.partial(side.model, side.token, past_key_values=side.cache)
            row["aten_calls"] = records.aten_calls(step) / layers
            with use_backend("torch"):
                step()  # makes the constants that later steps share
                row["aten_torch"] = records.aten_calls(step) / layers
        rows.append(row)
    return rows


def measure_memory(name: str, size: str, contexts: Sequence[int]) -> dict[int, Row]:
    """Peak memory of one model at growing contexts, in this process."""
    records.use_all_threads()
    return peaks_of(make_model(name, size), fill, contexts)


def goals_of(rows: Sequence[Row]) -> list[Goal]:
    """What a step costs beside the rival's, its weights and its own at the longest context."""
    goals: list[Goal] = []
    eager = select(rows, how="eager")
    for size, dtype in dict.fromkeys((row["size"], row["dtype"]) for row in rows):
        own = select(eager, size=size, dtype=dtype)
        first, baseline, weights = (
            select(own, model=model, context=1000) for model in (LATTE, RIVAL, WEIGHTS)
        )
        last = select(own, model=LATTE, context=100000)
        what = f"decoding, {size}, {dtype}"
        time = "median_ms"
        goals += ratio(f"{what}, 1000 tokens: time over {RIVAL}'s", 0.9, first, baseline, time)
        if size == "paper":
            goals += ratio(f"{what}: time over streaming the weights", 1.3, first, weights, time)
        goals += ratio(f"{what}: growth of time, 1k to 100k tokens", 1.05, last, first, time)
        if size == "tiny":
            goals += ratio(f"{what}: growth of the cache", 1.0, last, first, "cache_bytes")
            memory = f"{what}: growth of peak memory"
            goals += ratio(memory, 1.05, last, first, "peak_process_mb")
    for row in select(rows, model=LATTE, size="tiny", dtype="float32", how="compiled"):
        ms = float(row["median_ms"])
        goals.append(Goal("decoding, tiny, compiled: ms per token", 1.0, ms, False))
    for row in select(eager, model=LATTE, size="tiny", dtype="float32")[:1]:
        wanted = [("tensor operations", 220, "aten_torch")]
        wanted += [("native kernels", 80, "aten_calls")] * native()
        for kind, most, key in wanted:
            name = f"decoding, {kind}: ATen calls per layer"
            goals.append(Goal(name, most, float(row[key]), False))
    return goals


def native() -> bool:
    """Whether the native kernels are there."""
    return cpp_backend.unavailable(torch.zeros(1)) is None


def main() -> None:
    options = records.parser(__doc__)
    options.add_argument("--size", choices=CONTEXTS, help="of the models (default: all)")
    args = options.parse_args()
    out, threads = records.output_folder(args), records.use_all_threads()
    sizes = [args.size] if args.size else ["tiny"] if args.quick else list(CONTEXTS)
    budget = args.budget or (0.1 if args.quick else 2.0)
    native_or_not = "with" if native() else "without"
    say(f"decode: batch of 1, {threads} threads, {native_or_not} native kernels")
    table = records.Table(out / "cpu_decode.csv", resume=args.resume)
    apart = records.Apart(args.quick)
    for size in sizes:
        for dtype in DTYPES:
            if table.has(size=size, dtype=dtype):
                continue
            contexts = (1000, 1500) if args.quick else CONTEXTS[size]
            contexts = contexts if dtype == "float32" else contexts[:1]
            memory: dict[str, dict[int, Row]] = {LATTE: {}, RIVAL: {}, WEIGHTS: {}}
            if (size, dtype) == ("tiny", "float32"):
                memory[LATTE] = apart(measure_memory, LATTE, size, contexts)
                for context in contexts:
                    if context <= RIVALS_LONGEST:
                        memory[RIVAL] |= apart(measure_memory, RIVAL, size, [context])
            with torch.inference_mode():
                rows = time_all(size, dtype, contexts, budget, args.quick)
            for row in rows:
                eager = row["how"] == "eager"
                peaks = memory[row["model"]].get(row["context"], {}) if eager else {}
                blank = {"peak_net_mb": "", "peak_process_mb": ""}
                table.add_and_say(row | blank | peaks)
    from experiments.benchmarks.figures import (
        publish,  # here: matplotlib is not part of what is measured
    )

    only = {"how": ["eager"], "model": [LATTE, RIVAL]}
    publish(table, "decode", ("size", "dtype", "model"), "context", SHOWN, only)
    records.report_goals(out / "goals.csv", "cpu_decode", goals_of(table.rows))


if __name__ == "__main__":
    main()
