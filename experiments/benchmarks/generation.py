"""Generation at 1k to 64k tokens of context, for several checkpoints side by side.

Time per token, bytes of the cache and peak memory of any causal language models that `latte` can
load: plain models of Transformers, Latte's, converted ones. Batch of one, weights in the dtype
that they are loaded in, all threads, or a GPU with --device cuda.

* Contexts are real: random tokens go through the model's cache in segments, up to each context in
  turn. The prefill's own time is in the table, and not in the figure.
* Time per token: single-token forwards through a copy of that cache, all checkpoints in turns
  (``latte.lab.machine``). A context grows by the timed tokens, fewer than 130.
* Weights: time to read as many bytes as the model's weights have, once, in the same turns. A step
  of a batch of one cannot take less, unless the caches of the processor hold a part of the weights.
* Cache: bytes of the tensors that the cache holds at that context.
* Peak memory: of a fresh process per checkpoint that fills its cache in the same segments and
  generates 8 tokens at each context; and the same less what was resident once the model was there.
  On a GPU, of memory allocated there.
* ``generation.md`` has all of it by context, and how much the cache grows with a token more: that
  of a base and of the layers that a conversion has kept does, that of other layers does not.

Processes follow one another. Run nothing else meanwhile: it would be measured too.

    python -m experiments.benchmarks.generation --checkpoint base=BASE \
        --checkpoint converted=CONVERTED
    python -m experiments.benchmarks.generation \
        --checkpoint window=CONVERTED,mixing=window,local_window=152
    python -m experiments.benchmarks.generation --llama-cpp llama.cpp=FILE.gguf \
        --checkpoint converted=CONVERTED
    python -m experiments.benchmarks.generation --quick
"""

from __future__ import annotations

import copy
import functools
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.benchmarks.llama_cpp import LlamaCppSide, Read
from experiments.benchmarks.records import (
    Apart,
    Row,
    Table,
    numbers,
    output_folder,
    parser,
    peaks,
    pivot,
    say,
    select,
    tiny_checkpoint,
    use_all_threads,
)
from latte.errors import LatteError
from latte.lab import machine
from latte.lab.evaluate.sides import Side, keeps_all_tokens, named_path, side
from latte.lab.evaluate.tables import table

CONTEXTS = tuple(1024 * 2**i for i in range(7))
QUICK_CONTEXTS = (48, 96)
STEPS_FOR_MEMORY = 8
# (model, cache or None, tokens in it, tokens wanted) -> the cache with so many tokens
Fill = Callable[[Any, Any, int, int], Any]
CAPTIONS = {
    "median_ms": "Time of a token (ms, median):",
    "weights_ms": "Time to read the weights once (ms, median):",
    "prefill_s": "Prefill of the whole context (s):",
    "cache_bytes": "Cache (bytes):",
    "peak_net_mb": "Peak memory beyond the model's (MB):",
}


# --- models and their caches --------------------------------------------------------------------


def load(which: Side, device: str, dtype: str | None) -> Any:
    """The model of a checkpoint."""
    model, _ = which.load(device, dtype=dtype)
    return model


def reached(model: Any, contexts: Sequence[int], base_max: int | None) -> list[int]:
    """The contexts that a model is measured at: a base's end at `base_max`, if that is given."""
    most = base_max if keeps_all_tokens(model) else None
    return [n for n in contexts if most is None or n <= most]


def feed(model: Any, cache: Any, count: int, segment: int, seen: int) -> Any:
    """Random tokens through the model in segments; the cache afterwards."""
    generator = torch.Generator().manual_seed(seen)
    while count:
        n = min(segment, count)
        tokens = torch.randint(model.config.vocab_size, (1, n), generator=generator)
        output = model(
            tokens.to(model.device), past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        cache = output.past_key_values
        count -= n
    wait(model)
    return cache


class Generator:
    """One model and a cache of its own; each call generates one token."""

    def __init__(self, model: Any, cache: Any) -> None:
        self.model, self.cache = model, copy.deepcopy(cache)
        self.token = torch.zeros(1, 1, dtype=torch.long, device=model.device)

    def __call__(self) -> None:
        output = self.model(self.token, past_key_values=self.cache, use_cache=True)
        self.cache = output.past_key_values
        self.token = output.logits[:, -1:].argmax(-1)
        wait(self.model)


class Reader:
    """Each call reads as many bytes as a model's weights have."""

    def __init__(self, model: Any) -> None:
        self.model = model
        count = sum(x.nbytes for x in model.parameters()) // 4
        self.numbers = torch.ones(count, device=model.device)

    def __call__(self) -> None:
        self.numbers.sum()
        wait(self.model)


def wait(model: Any) -> None:
    """Return once the work is done."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def tensors_of(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Every tensor within an object, once."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        return
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list | tuple | set):
        inner = value
    elif hasattr(value, "__dict__"):
        inner = vars(value).values()
    for part in inner:
        yield from tensors_of(part, seen)


def cache_bytes(cache: Any) -> int:
    """Bytes of all tensors that a cache holds, whatever its class."""
    if isinstance(cache, Read):
        return cache.nbytes
    return sum(x.nbytes for x in tensors_of(cache, set()))


# --- measuring ----------------------------------------------------------------------------------


def peaks_of(model: Any, fill: Fill, contexts: Sequence[int]) -> dict[int, Row]:
    """Peak memory of this process at growing contexts, net of what was in use before and in all."""
    device = model.device
    before = machine.memory_bytes(device)
    machine.reset_peak_memory(device)
    found, seen = {}, 0
    side = Generator(model, None)
    with torch.inference_mode():
        for context in contexts:
            side.cache = fill(model, side.cache, seen, context)
            for _ in range(STEPS_FOR_MEMORY):
                side()
            seen = context + STEPS_FOR_MEMORY
            found[context] = peaks(before, device)
    return found


def fill(segment: int, model: Any, cache: Any, seen: int, context: int) -> Any:
    """Random tokens in segments, up to the context."""
    return feed(model, cache, context - seen, segment, seen)


def measure_memory(
    which: Side, device: str, dtype: str | None, segment: int, contexts: Sequence[int]
) -> dict[int, Row]:
    """Peak memory of one checkpoint, in this process, by context."""
    use_all_threads()
    return peaks_of(load(which, device, dtype), functools.partial(fill, segment), contexts)


def time_all(
    models: dict[str, Any],
    contexts: Sequence[int],
    segment: int,
    budget: float,
    base_max: int | None = None,
) -> Iterator[tuple[str, int, Row]]:
    """(name, context, row) with time per token and bytes of cache, context by context."""
    caches: dict[str, Any] = dict.fromkeys(models)
    prefill = dict.fromkeys(models, 0.0)
    every, seen = models, 0
    for context in contexts:
        models = {name: m for name, m in every.items() if reached(m, [context], base_max)}
        if not models:
            return
        for name, model in models.items():
            start = time.perf_counter()
            caches[name] = fill(segment, model, caches[name], seen, context)
            prefill[name] += time.perf_counter() - start
            say(f"{name:16} at {context:6} tokens after {prefill[name]:7.1f} s")
        seen = context
        sides: dict[tuple[str, type], Any] = {
            (name, Generator): Generator(model, caches[name]) for name, model in models.items()
        }
        sizes = {name: cache_bytes(sides[name, Generator].cache) for name in models}
        for name, model in models.items():
            if hasattr(model, "parameters"):  # llama.cpp has no tensors to show
                sides[name, Reader] = Reader(model)
        times = machine.interleave(sides, budget)
        for name, model in models.items():
            row: Row = {"parameters": model.num_parameters()}
            row |= {"cache_bytes": sizes[name], "prefill_s": round(prefill[name], 3)}
            reading = times.get((name, Reader))
            row["weights_ms"] = "" if reading is None else reading.row()["median_ms"]
            yield name, context, row | times[name, Generator].row()


# --- the script ---------------------------------------------------------------------------------


def quick_checkpoints(folder: Path) -> list[Side]:
    """A tiny Latte model and a tiny Llama with random weights, saved like any checkpoint."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tiny_checkpoint(folder / "latte")
    tiny_checkpoint(folder / "llama")
    sizes: Any = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 260}
    config = LlamaConfig(**sizes)
    LlamaForCausalLM(config).save_pretrained(folder / "llama")
    return [Side(name, str(folder / name)) for name in ("latte", "llama")]


def report(rows: Sequence[Row]) -> str:
    """Markdown: what is in the rows by model and context."""
    parts = [pivot(text, rows, ("model",), "context", c) for c, text in CAPTIONS.items()]
    lines = [("model", "bytes")]
    for name in dict.fromkeys(row["model"] for row in rows):
        sizes = [(int(r["context"]), int(r["cache_bytes"])) for r in select(rows, model=name)]
        (first, small), (last, large) = min(sizes), max(sizes)
        if last > first:
            lines.append((name, f"{(large - small) / (last - first):,.0f}"))
    parts.append(f"Growth of the cache with a token more:\n\n{table(lines)}")
    return "\n\n".join(parts)


def main() -> None:
    from experiments.benchmarks.figures import (
        draw,  # here: matplotlib is not part of what is measured
    )

    options = parser(__doc__)
    options.add_argument(
        "--checkpoint",
        action="append",
        default=[],
        metavar="NAME=FOLDER[,FIELD=VALUE...]",
        help="a checkpoint and its name in the figure, with other values of its config's fields, "
        "such as mixing=window of a converted model; repeat it",
    )
    options.add_argument(
        "--llama-cpp",
        action="append",
        default=[],
        metavar="NAME=FILE.gguf",
        help="a GGUF file that llama.cpp runs, and its name in the figure (llama-cpp-python)",
    )
    options.add_argument(
        "--contexts", type=numbers, help="tokens, by commas (default: 1024,2048,...,65536)"
    )
    options.add_argument("--segment", type=int, default=512, help="tokens read at a time")
    options.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    options.add_argument("--dtype", help="of the weights, such as float32 (default: as saved)")
    options.add_argument(
        "--base-max", type=int, help="the longest context of a model that keeps all tokens"
    )
    args = options.parse_args()
    contexts = args.contexts or (QUICK_CONTEXTS if args.quick else CONTEXTS)
    option = "--checkpoint"
    try:
        chosen = {each.name: each for each in map(side, args.checkpoint)}
        option = "--llama-cpp"
        for name, file, fields in map(named_path, args.llama_cpp):
            if fields:
                raise LatteError(f"expected NAME=FILE.gguf alone, got fields of a config: {fields}")
            chosen[name] = LlamaCppSide(name, file, most=max(contexts))
    except LatteError as error:
        raise SystemExit(f"{option}: {error}") from None
    if not chosen and not args.quick:
        raise SystemExit("expected --checkpoint NAME=FOLDER, at least one (or --quick)")
    budget = args.budget or (0.05 if args.quick else 2.0)
    segment = min(args.segment, 32) if args.quick else args.segment
    out, threads = output_folder(args), use_all_threads()
    results = Table(out / "generation.csv", resume=args.resume)
    with tempfile.TemporaryDirectory() as scratch:
        chosen = chosen or {each.name: each for each in quick_checkpoints(Path(scratch))}
        try:
            models = {name: load(each, args.device, args.dtype) for name, each in chosen.items()}
        except LatteError as error:
            raise SystemExit(f"error: {error}") from None
        reach = {name: reached(model, contexts, args.base_max) for name, model in models.items()}
        contexts = [
            n
            for n in contexts
            if not all(results.has(model=m, context=n) for m in chosen if n in reach[m])
        ]
        say(f"generation: batch of 1, {args.device}, {threads} threads")
        say("peak memory, in processes of its own ...")
        apart = Apart(args.quick)
        memory = {
            name: apart(measure_memory, each, args.device, args.dtype, segment, due)
            for name, each in chosen.items()
            if (due := [n for n in reach[name] if n in contexts])
        }
    where = machine.describe(torch.device(args.device), ("device", "transformers"))
    with torch.inference_mode():
        for name, context, row in time_all(models, contexts, segment, budget, args.base_max):
            row |= memory[name][context] | {"segment": segment, **where, "B": 1}
            dtype = str(models[name].dtype).removeprefix("torch.")
            row |= {"dtype": dtype, "overrides": chosen[name].fields()}
            results.add_and_say({"model": name, "context": context, **row})
    page = results.path.with_suffix(".md")
    page.write_text(report(results.rows), "utf-8")
    say(f"wrote {results.path}, {page} and {draw(out, 'generation')}")


if __name__ == "__main__":
    main()
