"""A GGUF file in its own bits beside llama.cpp on the same file: time, memory, quality, clients.

The file is converted without training, once for each of the ``--weights`` of `latte convert`, into
folders of --work. Every cell of the table is a row of ``quantised.csv``, written as soon as it is
measured; --resume measures the others alone, --only some parts:

* ``tokens``: time of a token at growing contexts, of both programs in turns, and of reading the
  weights once (``experiments.benchmarks.generation``); seconds of reading the whole context, the
  cache's bytes;
* ``memory``: what is resident in a process of its own that has read 1,024 tokens and generates;
* ``quality``: perplexity over held-out tokens, and the KL divergence from the weights of the same
  file in fp32, of the base's own attention (nothing of the conversion is in it);
* ``clients``: tokens a second of 1, 4 and 8 clients of `latte serve` and of
  ``python -m llama_cpp.server``.

llama-cpp-python must be installed (with its server for ``clients``). With one thread:

    OMP_NUM_THREADS=1 python -m experiments.benchmarks.quantised FILE.gguf TEXT [--only quality]
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from experiments.benchmarks import generation
from experiments.benchmarks.llama_cpp import LlamaCppSide
from experiments.benchmarks.records import (
    Row,
    Table,
    numbers,
    output_folder,
    parser,
    say,
    use_all_threads,
)
from experiments.benchmarks.serving import documents, latte_server, running_server
from experiments.benchmarks.serving_clients import throughput
from experiments.sides import Side
from latte.lab import machine
from latte.lab.data.files import read_documents
from latte.lab.train.conversion_trainer import mixing

PARTS = ("tokens", "memory", "quality", "clients")
WEIGHTS = ("file", "int4", "int8", "bfloat16")
LLAMA = "llama.cpp"
CONTEXTS = (256, 1024, 4096, 8192, 16384, 32768)
CLIENTS, PROMPT, ANSWER = (1, 4, 8), 16, 64
PIECE = 512  # tokens that are read at a time, and that a loss is computed of


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


def resident(name: str, file: str, work: Path) -> float:
    """Memory of this process, once it has read and generates, in MB (10^6 bytes)."""
    use_all_threads()
    model = side_of(name, file, work, 1024).load(None)[0]
    with torch.inference_mode():
        call = generation.Generator(model, generation.feed(model, None, 1024, PIECE, 0))
        for _ in range(8):
            call()
    return machine.memory_bytes(torch.device("cpu")) / 1e6


def memory(args: Any, table: Table) -> None:
    """Resident memory of each side."""
    for name in (LLAMA, *args.weights):
        if not table.has(part="memory", side=name):
            side_of(name, args.file, args.work, 1024)
            found = machine.in_fresh_process(resident, name, args.file, args.work)
            table.add_and_say(
                {"part": "memory", "side": name, "at": 1024, "resident_mb": round(found, 1)}
            )


def logs(model: Any, ids: torch.Tensor) -> Iterator[torch.Tensor]:
    """Log-probabilities (T, V) of the tokens after each of those of a piece, piece by piece."""
    with torch.inference_mode(), mixing(model, "base"):
        for piece in ids.split(PIECE, 1):
            yield model(piece, use_cache=False).logits[0].float().log_softmax(-1)


def quality(args: Any, table: Table) -> None:
    """Perplexity, and the divergence from the file's weights in fp32."""
    from latte.conversion import convert
    from latte.conversion.pretrained import load_tokenizer

    names = [name for name in args.weights if not table.has(part="quality", side=name)]
    if not names:
        return
    tokenizer, found = load_tokenizer(args.file), []
    for text in read_documents(Path(args.text)):
        found += tokenizer(text)["input_ids"]
        if len(found) >= args.held_out:
            break
    ids = torch.tensor(found[: args.held_out])[None]
    exact = convert(args.file, None, dtype="float32", initial="random")
    models = {"float32": exact}
    for name in names:
        models[name] = side_of(name, args.file, args.work, 0).load(None)[0]
    sums: dict[str, list[float]] = {name: [0.0, 0.0, 0] for name in models}
    with torch.inference_mode():
        runs = zip(*(logs(model, ids) for model in models.values()), strict=True)
        for piece, (first, *others) in zip(ids.split(PIECE, 1), runs, strict=True):
            for name, found in zip(models, (first, *others), strict=True):
                loss = -found[:-1].gather(1, piece[0, 1:, None]).double().sum().item()
                kl = (first.exp() * (first - found)).sum().double().item()
                sums[name] = [sums[name][0] + loss, sums[name][1] + kl, sums[name][2] + len(found)]
            for row in quality_rows(sums):
                say(", ".join(f"{key} {value}" for key, value in row.items()))
    for row in quality_rows(sums):
        if not table.has(part="quality", side=row["side"], at=row["at"]):
            table.add(row)


def quality_rows(sums: dict[str, list[float]]) -> list[Row]:
    """A row for each side, of its summed losses and divergences, and the number of tokens."""
    rows: list[Row] = []
    for name, (loss, kl, count) in sums.items():
        predicted = count - -(-count // PIECE)  # all but the first token of each piece
        row: Row = {"part": "quality", "side": name, "at": int(count)}
        row |= {"perplexity": round(math.exp(loss / predicted), 4), "kl": round(kl / count, 6)}
        rows.append(row)
    return rows


def llama_server(file: str, threads: int) -> Any:
    """``python -m llama_cpp.server`` on the file."""
    command = [sys.executable, "-m", "llama_cpp.server", "--model", file, "--n_ctx", "2048"]
    command += ["--n_threads", str(threads), "--verbose", "False"]
    return running_server(LLAMA, command, None)


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
    for name, start in servers.items():
        due = [n for n in counts if not table.has(part="clients", side=name, at=n)]
        if not due:
            continue
        with start() as server:
            throughput(server, texts[:1], 8)  # not measured: what is done once
            for count in due:
                runs = [throughput(server, texts[:count], ANSWER, False) for _ in range(2)]
                rate = statistics.median(tokens / seconds for tokens, seconds in runs)
                table.add_and_say(
                    {"part": "clients", "side": name, "at": count, "tokens_per_s": round(rate, 2)}
                )


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
    options.add_argument("--contexts", type=numbers, default=CONTEXTS, help="tokens, by commas")
    options.add_argument("--held-out", type=int, default=20000, help="tokens of TEXT")
    options.add_argument(
        "--work", type=Path, default=Path("build/quantised"), help="folder of the conversions"
    )
    args = options.parse_args(arguments)
    if args.quick:
        args.contexts, args.held_out = (48, 96), 1024
    args.work.mkdir(parents=True, exist_ok=True)
    use_all_threads()
    table = Table(output_folder(args) / "quantised.csv", resume=args.resume)
    parts = {"tokens": tokens, "memory": memory, "quality": quality, "clients": clients}
    for part in args.only:
        parts[part](args, table)
    say(f"wrote {table.path}")


if __name__ == "__main__":
    main()
