"""Decoding on a CPU: time per token, cache and memory at contexts of 1k to 100k tokens.

``latte-r-swa++`` beside ``transformer++`` of the same size, fp32, batch of one, random weights
(they do not change the work), all threads.

* Time per token: single-token forwards of the model through its cache, timed in turns over all
  models and contexts in one process (``latte.machine``). Contexts grow by the timed tokens (fewer
  than 200).
* Latte's contexts are real: random tokens go through the state in chunks of 500.
  ``transformer++``, whose prefill takes quadratic time, processes 1000 tokens so, and its keys
  and values are repeated up to the context: the cost of a step does not depend on their values.
  Its cache is this library's, which appends by concatenation.
* Cache: bytes of all layers' states at that context.
* Peak memory: of a fresh process that fills the cache as above and decodes 8 tokens; and the
  same less what was resident once the model was there. ``transformer++`` has a process for each
  context; Latte's contexts are stations of one process, as its peak only covers what was before.

    python benchmarks/cpu_decode.py [--quick] [--out DIR] [--budget SECONDS] [--size SIZE]
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from generation import Generator, cache_bytes, feed, line, peaks_of
from records import (
    Apart,
    Goal,
    Row,
    Table,
    output_folder,
    parser,
    report_goals,
    say,
    use_all_threads,
)

from latte.machine import interleave
from latte.models import SIZES, LatteCache, LatteForCausalLM, preset_config

LATTE, RIVAL = "latte-r-swa++", "transformer++"
CONTEXTS = (1000, 4000, 16000, 64000, 100000)
CHUNK = 500


def make_model(name: str, size: str) -> LatteForCausalLM:
    """A model with random weights."""
    torch.manual_seed(0)
    return LatteForCausalLM(preset_config(name, size)).eval()


def repeat_window(cache: LatteCache, context: int) -> None:
    """Repeat every layer's keys and values until they fill the context."""
    for layer in cache.layers:
        state = layer.state
        index = torch.arange(context) % layer.seen_tokens
        window = type(state.window)(*(x[:, index] for x in state.window))
        position = torch.full_like(state.position, context)
        layer.state = state._replace(window=window, position=position)
        layer.seen_tokens = context


def fill(model: LatteForCausalLM, cache: LatteCache | None, seen: int, context: int) -> LatteCache:
    """Bring the cache to the context, from what it has already seen."""
    wanted = min(2 * CHUNK, context) if model.config.mixer == "softmax" else context
    cache = feed(model, cache, wanted - seen, CHUNK, seen)
    if context > wanted:
        repeat_window(cache, context)
    return cache


def time_all(size: str, contexts: Sequence[int], budget: float) -> dict[tuple[str, int], Row]:
    """Time per token and bytes of cache of every model and context, timed in turns."""
    rows: dict[tuple[str, int], Row] = {}
    sides: dict[str, Generator] = {}
    for name in (LATTE, RIVAL):
        model = make_model(name, size)
        parameters = model.num_parameters()
        cache, seen, seconds = None, 0, 0.0
        for context in contexts:
            if name == RIVAL:
                cache, seen = None, 0
            start = time.perf_counter()
            cache, seen = fill(model, cache, seen, context), context
            seconds += time.perf_counter() - start
            side = sides[f"{name} {context}"] = Generator(model, cache)
            rows[name, context] = {
                "parameters": parameters,
                "cache_bytes": cache_bytes(side.cache),
            }
            say(f"{name:14} filled to {context:6} tokens after {seconds:6.1f} s")
    say("timing single tokens, all in turns ...")
    for (name, context), times in zip(rows, interleave(sides, budget).values(), strict=True):
        rows[name, context] |= times.row()
    return rows


def measure_memory(name: str, size: str, contexts: Sequence[int]) -> dict[int, Row]:
    """Peak memory of one model at growing contexts, in this process."""
    use_all_threads()
    return peaks_of(make_model(name, size), fill, contexts)


def goals_of(rows: Sequence[Row]) -> list[Goal]:
    """Latte's growth from the shortest to the longest context, 1 being constant."""
    ours = [row for row in rows if row["model"] == LATTE]
    rival = [row for row in rows if row["model"] == RIVAL]
    goals = []
    wanted = (
        ("time per token", "median_ms", 1.10, 1, "ms"),
        ("cache size", "cache_bytes", 1.0, 2**20, "MB"),
        ("the process's peak memory", "peak_process_mb", 1.05, 1, "MB"),
    )
    span = f"{ours[0]['context']} to {ours[-1]['context']} tokens"
    for what, column, most, scale, unit in wanted:
        a, b, c, d = (row[column] / scale for side in (ours, rival) for row in (side[0], side[-1]))
        note = f"{a:.2f} to {b:.2f} {unit}; {RIVAL} {c:.2f} to {d:.2f}"
        if column == "peak_process_mb":
            beyond = (f"{row['peak_net_mb']:.0f}" for row in (ours[0], ours[-1]))
            note += f"; beyond the model {' to '.join(beyond)}"
        name = f"decoding, growth of {what}, {span}"
        goals.append(Goal(name, most, b / a, False, note))
    return goals


def main() -> None:
    from figures import of_cpu_decode  # here, so that matplotlib is not part of what is measured

    options = parser(__doc__)
    options.add_argument("--size", choices=SIZES, help="size of the models (default: small)")
    args = options.parse_args()
    out, threads = output_folder(args), use_all_threads()
    contexts = (1000, 1500) if args.quick else CONTEXTS
    budget = args.budget or (0.1 if args.quick else 2.0)
    size = args.size or ("tiny" if args.quick else "small")
    say(f"decode: fp32, batch of 1, size {size}, {threads} threads")
    with torch.inference_mode():
        timed = time_all(size, contexts, budget)
    table = Table(out / "cpu_decode.csv")
    say("peak memory, in processes of its own ...")
    apart = Apart(args.quick)
    # Latte's contexts are stations of one process, the rival's have a process each.
    memory = {LATTE: apart(measure_memory, LATTE, size, contexts), RIVAL: {}}
    for context in contexts:
        memory[RIVAL] |= apart(measure_memory, RIVAL, size, [context])
    for name, context in timed:
        row = timed[name, context] | memory[name][context]
        repeated = name == RIVAL and context > 2 * CHUNK
        filled = {"context_is": "repeated keys and values" if repeated else "processed tokens"}
        table.add({"model": name, "size": size, "context": context, **row, **filled, "B": 1})
        say(line(name, context, row))
    say(f"wrote {table.path} and {of_cpu_decode(out)}")
    report_goals(out, "cpu_decode", goals_of(table.rows))


if __name__ == "__main__":
    main()
