"""A GGUF file in its own bits beside llama.cpp on the same file: time, memory, quality, clients.

The file is converted without training, once for each of the ``--weights`` of `latte convert`, into
folders FILE-WEIGHTS of --work. A folder that is there is taken, such as one of `latte convert
--trained`, which keeps tokens and makes other calls. Every cell of the table is a row of
``quantised.csv``, written as soon as it is measured; --resume measures the others alone, --only
some parts:

* ``tokens``: time of a token at growing contexts, of both programs in turns, and of reading the
  weights once (``experiments.benchmarks.generation``); seconds of reading the whole context, the
  cache's bytes. Most of the time of this part is llama.cpp's reading of the longest context;
* ``memory``: what is resident in a process of its own that has read a context and generates, and
  what of it was there before the model (PyTorch and other packages);
* ``quality``: perplexity over held-out tokens, and the KL divergence from the weights of the same
  file in fp32, of the base's own attention (nothing of the conversion is in it). Sums are kept
  every 2,048 tokens, where --resume goes on;
* ``clients``: tokens a second of 1, 4 and 8 clients of `latte serve`, and of llama.cpp behind the
  server of ``experiments.benchmarks.llama_cpp``.

At the end, and alone with --report, the tables are printed in Markdown. llama-cpp-python must be
installed. With one thread:

    OMP_NUM_THREADS=1 python -m experiments.benchmarks.quantised FILE.gguf TEXT [--only quality]
"""

from __future__ import annotations

import argparse
import functools
import importlib
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.benchmarks import generation, llama_cpp
from experiments.benchmarks.llama_cpp import LlamaCppSide
from experiments.benchmarks.records import (
    Row,
    Table,
    numbers,
    output_folder,
    parser,
    pivot,
    read_rows,
    say,
    select,
    use_all_threads,
)
from experiments.benchmarks.serving import documents, latte_server, running_server
from experiments.benchmarks.serving_clients import throughput
from experiments.sides import Side
from latte.lab import machine
from latte.lab.data.files import read_documents
from latte.lab.evaluate.tables import table as markdown

PARTS = ("tokens", "memory", "quality", "clients")
WEIGHTS = ("file", "int4", "int8", "bfloat16")
LLAMA = "llama.cpp"
CONTEXTS = (256, 1024, 4096, 8192, 16384, 32768)
CLIENTS, PROMPT, ANSWER = (1, 4, 8), 16, 64
PIECE = 512  # tokens that are read at a time, and that a loss is computed of
KEPT = 4  # pieces after which the sums of losses are written
EXACT = "float32"  # the side that others diverge from


# --- what is compared ---------------------------------------------------------------------------


def converted(file: str, weights: str, work: Path) -> str:
    """The folder of the file's conversion with these weights; made once."""
    from latte.conversion import convert

    folder = work / f"{Path(file).stem}-{weights}"
    if not (folder / "config.json").exists():
        say(f"converting to {folder} ...")
        convert(file, folder, weights=weights, initial="random")  # as fast as any
    return str(folder)


def side_of(name: str, file: str, work: Path, most: int) -> Side:
    """llama.cpp on the file, or its conversion with these weights."""
    if name == LLAMA:
        return LlamaCppSide(name, file, most=most)
    return Side(name, converted(file, name, work))


# --- the parts ----------------------------------------------------------------------------------


def tokens(args: Any, table: Table) -> None:
    """Time of a token, and of reading, at each context."""
    names = [LLAMA, *(name for name in args.weights if name == "file")]
    missing = [
        n for n in args.contexts if not all(table.has(part="tokens", side=s, at=n) for s in names)
    ]
    if not missing:
        return
    models = {
        name: side_of(name, args.file, args.work, max(missing)).load(None)[0] for name in names
    }
    with torch.inference_mode():
        for name, context, row in generation.time_all(models, missing, PIECE, args.budget or 1.0):
            keys = "median_ms", "weights_ms", "prefill_s", "cache_bytes"
            table.add_and_say(
                {"part": "tokens", "side": name, "at": context} | {key: row[key] for key in keys}
            )


def resident(name: str, file: str, work: Path, context: int) -> tuple[int, int]:
    """Bytes of this process once it has read a context and generates, and before the model."""
    use_all_threads()
    importlib.import_module("latte.conversion.modeling")  # and what it needs of Transformers
    before = machine.memory_bytes(torch.device("cpu"))
    model = side_of(name, file, work, context).load(None)[0]
    with torch.inference_mode():
        call = generation.Generator(model, generation.feed(model, None, context, PIECE, 0))
        for _ in range(8):
            call()
    return machine.memory_bytes(torch.device("cpu")), before


def memory(args: Any, table: Table) -> None:
    """Resident memory of each side."""
    for context in args.memory_at:
        for name in (LLAMA, *args.weights):
            if table.has(part="memory", side=name, at=context):
                continue
            row: Row = {"part": "memory", "side": name, "at": context}
            if name == LLAMA:
                found, before = llama_cpp.resident_bytes(args.file, context), 0
            else:
                given = name, args.file, args.work, context
                converted(args.file, name, args.work)
                found, before = machine.in_fresh_process(resident, *given)
            row |= {"resident_mb": round(found / 1e6, 1), "before_mb": round(before / 1e6, 1)}
            table.add_and_say(row)


def logits(model: Any, pieces: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The logits (T, V) of pieces of text (1, T), each read alone, by the base's own attention."""
    from latte.lab.train.conversion_trainer import mixing  # here: 250 MB that no token needs

    for piece in pieces:
        with torch.inference_mode(), mixing(model, "base"):
            found = model(piece, use_cache=False).logits[0]
        yield found  # outside: the caller may leave the rest


def held_out(args: Any) -> torch.Tensor:
    """The tokens of the text, (1, T)."""
    from latte.conversion.pretrained import load_tokenizer

    tokenizer, found = load_tokenizer(args.file), []
    for text in read_documents(Path(args.text)):
        found += tokenizer(text)["input_ids"]
        if len(found) >= args.held_out:
            return torch.tensor(found[: args.held_out])[None]
    raise SystemExit(f"{args.text}: expected {args.held_out:,} tokens, got {len(found):,}")


def quality(args: Any, table: Table) -> None:
    """Perplexity, and the divergence from the file's weights in fp32."""
    from latte.conversion import convert

    sides = [EXACT, LLAMA, *args.weights]
    rows = [select(table.rows, part="quality", side=name) for name in sides]
    common = set.intersection(*({int(row["at"]) for row in own} for own in rows))
    begun = max(common, default=0)
    if begun >= args.held_out:
        return
    sums = {name: [0.0, 0.0] for name in sides}
    for name, own in zip(sides, rows, strict=True):
        for row in select(own, at=begun):
            sums[name] = [float(row["nats"]), float(row["kl_nats"])]
    pieces = held_out(args)[:, begun:].split(PIECE, 1)
    exact = convert(args.file, None, dtype="float32", initial="random")
    models = {name: side_of(name, args.file, args.work, 0).load(None)[0] for name in args.weights}
    found = [logits(exact, pieces), llama_cpp.logits(args.file, pieces)]
    found += [logits(model, pieces) for model in models.values()]
    at = begun
    for number, (piece, *each) in enumerate(zip(pieces, *found, strict=True), 1):
        at += piece.shape[1]
        first = each[0].float().log_softmax(-1)
        for name, own in zip(sides, each, strict=True):
            logs = own.float().log_softmax(-1)
            loss = -logs[:-1].gather(1, piece[0, 1:, None]).double().sum().item()
            kl = (first.exp() * (first - logs)).sum().double().item()
            sums[name] = [sums[name][0] + loss, sums[name][1] + kl]
        if number % KEPT == 0 or number == len(pieces):
            for name, (nats, kl) in sums.items():
                predicted = at - -(-at // PIECE)  # all but the first token of each piece
                new: Row = {"part": "quality", "side": name, "at": at, "nats": nats, "kl_nats": kl}
                new |= {"perplexity": round(math.exp(nats / predicted), 4)}
                table.add_and_say(new | {"kl": round(kl / at, 6)})


def llama_server(file: str, threads: int) -> Any:
    """llama.cpp on the file, behind HTTP."""
    command = [sys.executable, "-m", "experiments.benchmarks.llama_cpp", file]
    return running_server(LLAMA, [*command, "--threads", str(threads)], LLAMA)


def clients(args: Any, table: Table) -> None:
    """Tokens a second of some clients at once."""
    from transformers import AutoTokenizer

    counts = CLIENTS[:1] if args.quick else CLIENTS
    servers: dict[str, Callable[[], Any]] = {
        name: functools.partial(
            latte_server,
            converted(args.file, name, args.work),
            *("--state-cache", "0", "--max-batch", str(max(counts))),
        )
        for name in args.weights
        if name == "file"
    }
    servers[LLAMA] = functools.partial(llama_server, args.file, torch.get_num_threads())
    tokenizer = AutoTokenizer.from_pretrained(converted(args.file, args.weights[0], args.work))
    texts = documents(tokenizer, args.text, PROMPT, max(counts))
    tokens = 8 if args.quick else ANSWER
    for name, start in servers.items():
        due = [n for n in counts if not table.has(part="clients", side=name, at=n)]
        if not due:
            continue
        with start() as server:
            throughput(server, texts[:1], 8, False)  # not measured: what is done once
            for n in due:
                runs = [throughput(server, texts[:n], tokens, False) for _ in range(2)]
                rate = statistics.median(count / seconds for count, seconds in runs)
                table.add_and_say(
                    {"part": "clients", "side": name, "at": n, "tokens_per_s": round(rate, 2)}
                )


# --- the tables ---------------------------------------------------------------------------------

TABLES = {
    "tokens": {
        "median_ms": "Time of a token (ms, median) after so many tokens:",
        "weights_ms": "Time to read the weights once, in the same turns (ms, median):",
        "prefill_s": "Reading the whole context (s):",
        "cache_bytes": "State (bytes):",
    },
    "memory": {
        "resident_mb": "Resident memory (MB) after so many tokens:",
        "before_mb": "Of it before the model was loaded (MB):",
    },
    "clients": {"tokens_per_s": "Tokens a second of so many clients at once:"},
}


def report(rows: Sequence[Row]) -> str:
    """The tables in Markdown, of the rows that there are."""
    parts = []
    for part, columns in TABLES.items():
        own = select(rows, part=part)
        shown = columns.items() if own else ()
        parts += [pivot(text, own, ("side",), "at", column) for column, text in shown]
    own = select(rows, part="quality")
    lines = [("side", "tokens", "perplexity", "over float32 (%)", "KL from float32 (nats)")]
    for row in select(own, at=max((int(row["at"]) for row in own), default=0)):  # the last sums
        (exact,) = select(own, side=EXACT, at=row["at"])
        over = 100 * (float(row["perplexity"]) / float(exact["perplexity"]) - 1)
        lines.append(
            (row["side"], *map(str, (row["at"], row["perplexity"])), f"{over:+.2f}", str(row["kl"]))
        )
    if own:
        parts.append(f"Held-out text, the base's own attention:\n\n{markdown(lines).rstrip()}")
    return "\n\n".join(parts)


# --- the script ---------------------------------------------------------------------------------


def names(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Some of the known names, by commas."""
    found = tuple(text.split(","))
    if unknown := [name for name in found if name not in known]:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {unknown[0]}")
    return found


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("file", metavar="FILE.gguf")
    options.add_argument("text", metavar="TEXT", help="file of held-out documents")
    options.add_argument(
        "--only",
        type=functools.partial(names, known=PARTS),
        default=PARTS,
        help=f"some of {','.join(PARTS)} (default: all)",
    )
    options.add_argument(
        "--weights",
        type=functools.partial(names, known=WEIGHTS),
        default=WEIGHTS,
        help=f"some of {','.join(WEIGHTS)} (default: all)",
    )
    options.add_argument(
        "--contexts", type=numbers, default=CONTEXTS, help="tokens of ``tokens``, by commas"
    )
    options.add_argument(
        "--memory-at", type=numbers, default=(1024, 8192), help="tokens of ``memory``, by commas"
    )
    options.add_argument("--held-out", type=int, default=20000, help="tokens of TEXT")
    options.add_argument(
        "--work", type=Path, default=Path("build/quantised"), help="folder of the conversions"
    )
    options.add_argument("--report", action="store_true", help="print the tables, measure nothing")
    args = options.parse_args(arguments)
    if args.quick:
        args.contexts, args.memory_at, args.held_out = (48, 96), (48,), 1024
    path = output_folder(args) / "quantised.csv"
    if args.report:
        say(report(read_rows(path)))
        return
    args.work.mkdir(parents=True, exist_ok=True)
    use_all_threads()
    table = Table(path, resume=args.resume)
    parts = {"tokens": tokens, "memory": memory, "quality": quality, "clients": clients}
    for part in args.only:
        parts[part](args, table)
    say(f"wrote {table.path}\n\n{report(table.rows)}")


if __name__ == "__main__":
    main()
