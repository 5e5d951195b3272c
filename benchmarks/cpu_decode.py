"""Decoding on a CPU: time per token, cache and memory at contexts of 1k to 100k tokens.

``latte-r-swa++`` beside ``transformer++`` of the same size, fp32, batch of one, random weights
(they do not change the work), all threads.

* Time per token: single-token forwards of the model through its cache, timed in turns over all
  models and contexts in one process (see ``common``). Contexts grow by the timed tokens (fewer
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

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from common import (
    Row,
    child_job,
    in_fresh_process,
    interleave,
    output_folder,
    parser,
    peak_bytes,
    reset_peak,
    resident_bytes,
    use_all_threads,
)
from records import Goal, Table, report_goals

from latte.layers.state import map_tensors
from latte.models import SIZES, LatteCache, LatteForCausalLM, preset_config

LATTE, RIVAL = "latte-r-swa++", "transformer++"
CONTEXTS = (1000, 4000, 16000, 64000, 100000)
CHUNK = 500
STEPS_FOR_MEMORY = 8


def make_model(name: str, size: str) -> LatteForCausalLM:
    """A model with random weights."""
    torch.manual_seed(0)
    return LatteForCausalLM(preset_config(name, size)).eval()


def feed(model: LatteForCausalLM, cache: LatteCache, count: int) -> None:
    """Random tokens through the model, and into the cache, in chunks."""
    generator = torch.Generator().manual_seed(cache.get_seq_length())
    while count:
        n = min(CHUNK, count)
        tokens = torch.randint(model.config.vocab_size, (1, n), generator=generator)
        model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        count -= n


def copy_of(model: LatteForCausalLM, cache: LatteCache) -> LatteCache:
    """The same states in memory of their own."""
    copy = LatteCache(model.config)
    for old, new in zip(cache.layers, copy.layers, strict=True):
        new.update(map_tensors(torch.clone, old.state), old.seen_tokens)
    return copy


def repeat_window(cache: LatteCache, context: int) -> None:
    """Repeat every layer's keys and values until they fill the context."""
    for layer in cache.layers:
        state = layer.state
        index = torch.arange(context) % layer.seen_tokens
        window = type(state.window)(*(x[:, index] for x in state.window))
        position = torch.full_like(state.position, context)
        layer.state = state._replace(window=window, position=position)
        layer.seen_tokens = context


def fill(model: LatteForCausalLM, cache: LatteCache, context: int) -> None:
    """Bring the cache to the context, from what it has already seen."""
    if model.config.mixer == "softmax":
        feed(model, cache, min(2 * CHUNK, context))
        if context > cache.get_seq_length():
            repeat_window(cache, context)
    else:
        feed(model, cache, context - cache.get_seq_length())


def decode(model: LatteForCausalLM, cache: LatteCache) -> torch.Tensor:
    """One more token."""
    token = torch.zeros(1, 1, dtype=torch.long)
    return model(token, past_key_values=cache, use_cache=True).logits


def time_all(size: str, contexts: Sequence[int], budget: float) -> dict[tuple[str, int], Row]:
    """Time per token and bytes of cache of every model and context, timed in turns."""
    rows: dict[tuple[str, int], Row] = {}
    sides: dict[str, Any] = {}
    for name in (LATTE, RIVAL):
        model = make_model(name, size)
        parameters = sum(p.numel() for p in model.parameters())
        cache, seconds = LatteCache(model.config), 0.0
        for context in contexts:
            if name == RIVAL:
                cache = LatteCache(model.config)
            start = time.perf_counter()
            fill(model, cache, context)
            seconds += time.perf_counter() - start
            own = copy_of(model, cache)
            rows[name, context] = {"parameters": parameters, "cache_bytes": own.nbytes}
            sides[f"{name} {context}"] = lambda model=model, own=own: decode(model, own)
            print(
                f"{name:14} filled to {context:6} tokens after {seconds:6.1f} s, "
                f"cache {own.nbytes / 2**20:.2f} MB",
                flush=True,
            )
    print("timing single tokens, all in turns ...", flush=True)
    for (name, context), times in zip(rows, interleave(sides, budget).values(), strict=True):
        rows[name, context] |= times.row()
    return rows


def measure_memory(job: Row) -> Row:
    """Peak memory of one model at growing contexts, in this process; by context, as text."""
    use_all_threads()
    model = make_model(job["model"], job["size"])
    before = resident_bytes()
    reset_peak()
    peaks: Row = {}
    with torch.inference_mode():
        cache = LatteCache(model.config)
        for context in job["contexts"]:
            fill(model, cache, context)
            for _ in range(STEPS_FOR_MEMORY):
                decode(model, cache)
            peak = peak_bytes()
            peaks[str(context)] = {
                "peak_net_mb": round((peak - before) / 2**20, 3),
                "peak_process_mb": round(peak / 2**20, 3),
            }
    return peaks


def all_memory(
    size: str, contexts: Sequence[int], quick: bool
) -> Iterator[tuple[tuple[str, int], Row]]:
    """Peak memory of every model and context, as the processes end."""
    first = True
    for name, stations in ((LATTE, [contexts]), (RIVAL, [[c] for c in contexts])):
        for together in stations:
            job = {"model": name, "size": size, "contexts": list(together)}
            # A quick run starts one process of its own, to see that this works.
            apart = first or not quick
            peaks = in_fresh_process(__file__, job) if apart else measure_memory(job)
            first = False
            for context in together:
                yield (name, context), peaks[str(context)]


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
    job = child_job()
    if job is not None:
        print(json.dumps(measure_memory(job)))
        return
    from figures import draw_decode  # here, so that matplotlib is not part of what is measured

    options = parser(__doc__)
    options.add_argument("--size", choices=SIZES, help="size of the models (default: small)")
    args = options.parse_args()
    out, threads = output_folder(args), use_all_threads()
    contexts = (1000, 1500) if args.quick else CONTEXTS
    budget = args.budget or (0.1 if args.quick else 2.0)
    size = args.size or ("tiny" if args.quick else "small")
    print(f"decode: fp32, batch of 1, size {size}, {threads} threads", flush=True)
    with torch.inference_mode():
        timed = time_all(size, contexts, budget)
    table = Table(out / "cpu_decode.csv")
    print("peak memory, in processes of its own ...", flush=True)
    for (name, context), memory in all_memory(size, contexts, args.quick):
        row = timed[name, context] | memory
        repeated = name == RIVAL and context > 2 * CHUNK
        filled = {"context_is": "repeated keys and values" if repeated else "processed tokens"}
        table.add({"model": name, "size": size, "context": context, **row, **filled, "B": 1})
        print(
            f"{name:14} at {context:6} tokens: {row['median_ms']:8.2f} ms per token "
            f"(p10 {row['p10_ms']:.2f}, p90 {row['p90_ms']:.2f}, {row['calls']} calls), "
            f"cache {row['cache_bytes'] / 2**20:.2f} MB, peak memory {row['peak_net_mb']:.0f} MB",
            flush=True,
        )
    print(f"wrote {table.path} and {draw_decode(out)}")
    report_goals(out, "cpu_decode", goals_of(table.rows))


if __name__ == "__main__":
    main()
