"""Clients at once: tokens a second of all, and how long a running answer waits for a long prompt.

``latte serve CHECKPOINT`` in a process of its own, without kept states, since every prompt is new.
Greedy answers to prompts of 16 tokens, cut from FILE.

* ``throughput``: so many clients at once, each with one request of 256 tokens; all tokens that
  came, by the seconds from the first request to the end of the last answer. Answers are streamed,
  and then sent whole. Then, once the server has ended, with ``--vllm PYTHON`` the same of vLLM's
  server, whose environment has that Python; at last ``generate`` over a padded batch of the same
  prompts in this process, which sends nothing.
* ``waiting``: seconds between the tokens of one stream, with nothing else to do and while the
  prompt of another client, of ``--long`` tokens, is read: median, 95% quantile, longest. Beside
  them, the seconds to the first token of a prompt of one piece (``--prefill-piece``) on a server
  that does nothing else: reading one piece and one step. A running answer should wait no longer.

    python -m experiments.benchmarks.serving_clients CHECKPOINT FILE [--clients 1,2,4,8,16]
        [--long 32768]
        [--vllm .venv-vllm/bin/python]
    python -m experiments.benchmarks.serving_clients --quick
"""

from __future__ import annotations

import itertools
import json
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from experiments.benchmarks.records import (
    Row,
    Table,
    numbers,
    output_folder,
    parser,
    use_all_threads,
)
from experiments.benchmarks.serving import (
    Server,
    add_vllm,
    documents,
    latte_server,
    vllm_server,
    with_text,
)

CLIENTS, PROMPT, ANSWER, LONG, PIECE = (1, 2, 4, 8, 16), 16, 256, 32768, 256


def throughput(
    server: Server, prompts: list[str], tokens: int, streamed: bool = True
) -> tuple[int, float]:
    """Tokens of all answers, and seconds."""

    def ask(prompt: str) -> int:
        if streamed:
            found = server.stream("completions", tokens, prompt=prompt)
            return max(usage.get("completion_tokens", 0) for _, _, usage in found)
        body = {"model": server.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        with server.post("completions", body | {"stream": False}) as answer:
            return json.load(answer)["usage"]["completion_tokens"]

    with ThreadPoolExecutor(len(prompts)) as pool:
        begun = time.perf_counter()
        counts = list(pool.map(ask, prompts))
        return sum(counts), time.perf_counter() - begun


def waiting(server: Server, prompt: str, long: str, tokens: int) -> tuple[list[float], list[float]]:
    """Seconds between the texts of one stream: before another prompt is read, and meanwhile."""
    moments: list[float] = []
    enough, over = threading.Event(), threading.Event()

    def run() -> None:
        for moment, _, _ in server.stream("completions", 10**6, prompt=prompt):
            moments.append(moment)
            if len(moments) > tokens:
                enough.set()
            if over.is_set():
                return
        enough.set()  # the answer has ended

    thread = threading.Thread(target=run)
    thread.start()
    enough.wait()
    begun = time.perf_counter()
    list(server.stream("completions", 1, prompt=long))
    ended = time.perf_counter()
    over.set()
    thread.join()
    pairs = list(zip(moments, moments[1:], strict=False))
    before = [b - a for a, b in pairs if b < begun]
    return before, [b - a for a, b in pairs if begun <= b <= ended]


def one_piece(server: Server, prompts: list[str]) -> list[float]:
    """Seconds to the first token of each prompt, one after the other."""
    seconds = []
    for prompt in prompts:
        begun = time.perf_counter()
        seconds.append(next(server.stream("completions", 2, prompt=prompt))[0] - begun)
    return seconds


def generated(checkpoint: str, prompts: list[str], tokens: int, repeats: int) -> float:
    """Seconds of `generate` over all prompts as one padded batch, the median."""
    from latte.lab.data.tokenizers import document_ends
    from latte.lab.evaluate.checkpoint import load_checkpoint

    model, tokenizer = load_checkpoint(checkpoint, "cpu")
    tokenizer.padding_side, (_, end) = "left", document_ends(tokenizer)
    tokenizer.pad_token_id = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        model.generate(
            batch["input_ids"],
            attention_mask=batch["attention_mask"],
            **{"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False},
            pad_token_id=end,
        )
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def quantile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--clients", type=numbers, help=f"at once; {CLIENTS}")
    options.add_argument("--answer", type=int, help=f"tokens of each answer; {ANSWER}")
    options.add_argument("--long", type=int, help=f"tokens of the other client's prompt; {LONG}")
    options.add_argument("--repeats", type=int, default=3, help="of each number of clients")
    add_vllm(options)
    with_text(options, arguments, run)


def run(args: Any) -> None:
    from transformers import AutoTokenizer

    from latte.serve.prompts import PLAIN_CHAT

    clients = args.clients or ((1, 2) if args.quick else CLIENTS)
    answer = args.answer or (8 if args.quick else ANSWER)
    long = args.long or (256 if args.quick else LONG)
    table = Table(output_folder(args) / "serving_clients.csv")
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    texts = documents(tokenizer, args.file, PROMPT, max(clients))
    (other,) = documents(tokenizer, args.file, long, 1)
    pieces = documents(tokenizer, args.file, PIECE, 2 * args.repeats)
    use_all_threads()

    def add(side: str, **row: Any) -> None:
        start: Row = {"checkpoint": args.checkpoint, "side": side, "answer_tokens": answer}
        table.add_and_say(start | row)

    def rates(side: str, server: Server) -> None:
        throughput(server, texts, answer)  # not measured: what is done once
        for count, streamed in itertools.product(clients, (True, False)):
            given = server, texts[:count], answer, streamed
            runs = [throughput(*given) for _ in range(args.repeats)]
            rate = statistics.median(tokens / seconds for tokens, seconds in runs)
            add(side, clients=count, streamed=streamed, tokens_per_s=round(rate, 2))

    most = ["--state-cache", "0", "--max-batch", str(max(clients)), "--prefill-piece", str(PIECE)]
    with latte_server(args.checkpoint, *most) as server:
        rates("latte serve", server)
        alone = one_piece(server, pieces)
        before, meanwhile = waiting(server, texts[0], other, answer)
    measured = {"alone": before, "long prompt": meanwhile, "one piece and a step": alone}
    for name, values in measured.items():
        row: Row = {"clients": name, "long_tokens": long if name == "long prompt" else 0}
        row |= {f"p{p}_s": round(quantile(values, p / 100), 4) for p in (50, 95, 100)}
        add("between tokens", **row)
    if args.vllm:
        most = ["--max-num-seqs", str(max(clients))]
        with vllm_server(args.vllm, args.checkpoint, PLAIN_CHAT, *most) as server:
            rates("vLLM", server)
    for count in clients:
        seconds = generated(args.checkpoint, texts[:count], answer, args.repeats)
        rate = count * answer / seconds
        add("generate, padded", clients=count, tokens_per_s=round(rate, 2))


if __name__ == "__main__":
    main()
