"""Clients that behave badly, for a long time: no wrong answer, no leak, every error one line.

Eight clients of a `latte serve` in a process of its own ask for completions and chats of random
lengths, streamed or not, leave in the middle, wait too short, send bad JSON, drop connections, ask
for too much or for another model: also for 2,001 messages, for texts of 1.9 million characters and
of 5 MB. Every whole answer (greedy) is compared with `latte generate` in this process. Another
process asks for `/health` ten times a second. The server's resident memory, its states and its
places are printed, and written to the CSV file with the numbers of requests and the longest time
that `/health` has taken.

    python -m experiments.benchmarks.serving_soak CHECKPOINT [--minutes 30]
    python -m experiments.benchmarks.serving_soak --quick
"""

from __future__ import annotations

import collections
import contextlib
import json
import multiprocessing
import random
import socket
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.benchmarks.records import Row, Table, output_folder, parser, say, tiny_checkpoint
from experiments.benchmarks.serving import Server, latte_server

CLIENTS, LONGEST = 8, 900  # at once; tokens of a prompt and its answer
PIECES = ("once ", "upon ", "a time ", "there was ", "a captain. ")


class Soak:
    """Clients, and what became of their requests."""

    def __init__(self, server: Server, expected: Callable[[str, int], str], seconds: float) -> None:
        self.server, self.expected = server, expected
        self.end = time.monotonic() + seconds
        self.done: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        kinds = (
            *[self.whole] * 6,
            *[self.streamed] * 4,
            *[self.chat] * 2,
            *(self.leave, self.leave, self.wait_too_short, self.bad_json),
            *(self.drop, self.too_long, self.another_model),
            *(self.many_messages, self.many_characters, self.too_large),
        )
        self.kinds: tuple[Callable[[random.Random], None], ...] = kinds

    def client(self, seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < self.end:
            kind = rng.choice(self.kinds)
            try:
                kind(rng)
                self.done[kind.__name__] += 1
            except Exception as error:  # whatever it is, it is counted
                self.wrong.append(f"{kind.__name__}: {error!r}")

    # --- requests

    def body(self, rng: random.Random) -> Row:
        prompt = "".join(rng.choices(PIECES, k=rng.choice((1, 3, 10, 40))))
        asked = {"prompt": prompt, "max_tokens": rng.choice((1, 5, 20)), "temperature": 0}
        return {"model": self.server.model, **asked}

    def compare(self, body: Row, text: str) -> None:
        wanted = self.expected(body["prompt"], body["max_tokens"])
        if text != wanted:
            self.wrong.append(f"{body}: expected {wanted!r}, got {text!r}")

    def refused(self, status: int, path: str, body: Any) -> None:
        try:
            self.server.post(path, body).close()
        except urllib.error.HTTPError as error:
            message = json.load(error)["error"]["message"]
            if error.code == status and message and "\n" not in message:
                return
        self.wrong.append(f"{path} {str(body)[:80]}: expected {status} and one line")

    def whole(self, rng: random.Random) -> None:
        body = self.body(rng)
        with self.server.post("completions", body) as answer:
            self.compare(body, json.load(answer)["choices"][0]["text"])

    def streamed(self, rng: random.Random) -> None:
        body = self.body(rng)
        asked = {"prompt": body["prompt"]}
        came = self.server.stream("completions", body["max_tokens"], **asked)
        self.compare(body, "".join(text for _, text, _ in came))

    def chat(self, rng: random.Random) -> None:
        body = self.body(rng)
        messages = [{"role": "user", "content": body.pop("prompt")}]
        said = set()
        for _ in range(2):  # the second time from what is kept
            with self.server.post("chat/completions", body | {"messages": messages}) as answer:
                said.add(json.load(answer)["choices"][0]["message"]["content"])
        if len(said) > 1:
            self.wrong.append(f"{messages}: {said}")

    def leave(self, rng: random.Random) -> None:
        body = self.body(rng) | {"stream": True, "max_tokens": 400}
        with self.server.post("completions", body) as events:
            next(iter(events))

    def wait_too_short(self, rng: random.Random) -> None:
        with contextlib.suppress(TimeoutError, urllib.error.URLError):
            self.server.post("completions", self.body(rng) | {"max_tokens": 200}, 0.05).close()

    def bad_json(self, rng: random.Random) -> None:
        self.refused(400, "completions", b"{")

    def too_long(self, rng: random.Random) -> None:
        self.refused(400, "completions", self.body(rng) | {"prompt": "once " * LONGEST})

    def many_messages(self, rng: random.Random) -> None:
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": "a"} for i in range(2001)]
        self.refused(400, "chat/completions", {"model": self.server.model, "messages": messages})

    def many_characters(self, rng: random.Random) -> None:
        self.refused(400, "completions", self.body(rng) | {"prompt": "once " * 380_000})

    def too_large(self, rng: random.Random) -> None:
        self.refused(413, "completions", self.body(rng) | {"prompt": "once " * 1_000_000})

    def another_model(self, rng: random.Random) -> None:
        self.refused(404, "completions", self.body(rng) | {"model": "another"})

    def drop(self, rng: random.Random) -> None:
        port = int(self.server.url.rpartition(":")[2])
        with socket.create_connection(("localhost", port)) as connection:
            connection.send(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{"
            )


def watch(url: str, ends: float, worst: Any) -> None:
    """Ask for /health until this moment, and keep the longest time. It runs in its own process."""
    while time.time() < ends:
        begun = time.perf_counter()
        with urllib.request.urlopen(f"{url}/health") as answer:
            answer.read()
        worst.value = max(worst.value, time.perf_counter() - begun)
        time.sleep(0.1)


def resident_mb(process: int) -> float:
    """Of a process; Linux alone."""
    text = Path(f"/proc/{process}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) / 1024


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("checkpoint", nargs="?")
    options.add_argument("--minutes", type=float, help="30, or a fifth of one with --quick")
    args = options.parse_args(arguments)
    if not args.quick and args.checkpoint is None:
        options.error("expected CHECKPOINT, or --quick")
    with tempfile.TemporaryDirectory() as folder:
        if args.quick:
            args.checkpoint = tiny_checkpoint(Path(folder, "model"))
        run(args, folder)


def run(args: Any, folder: str) -> None:
    from latte.lab.evaluate.checkpoint import load_checkpoint
    from latte.lab.evaluate.generate import generate

    minutes = args.minutes or (0.2 if args.quick else 30)
    model, tokenizer = load_checkpoint(args.checkpoint, "cpu")
    lock, known = threading.Lock(), dict[tuple[str, int], str]()
    own_start = tokenizer.chat_template is None  # else texts begin as they are

    def expected(prompt: str, tokens: int) -> str:
        with lock:
            if (prompt, tokens) not in known:
                given: dict[str, Any] = {"max_new_tokens": tokens, "temperature": 0}
                known[prompt, tokens] = (
                    generate(model, tokenizer, prompt, **given, stream=False)
                    if own_start
                    else plain(prompt, tokens)
                )
            return known[prompt, tokens]

    def plain(prompt: str, tokens: int) -> str:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=tokens, do_sample=False)[0, ids.shape[1] :]
        return tokenizer.decode(out, skip_special_tokens=True)

    table = Table(output_folder(args) / "serving_soak.csv")
    bounds = ["--state-cache", "64MiB", "--state-cache-dir", f"{folder}/states"]
    bounds += ["--state-cache-disk", "128MiB", "--max-length", str(LONGEST)]
    with latte_server(args.checkpoint, *bounds) as server:
        soak = Soak(server, expected, 60 * minutes)
        apart = multiprocessing.get_context("spawn")
        worst = apart.Value("d", 0.0)
        watched = (server.url, time.time() + 60 * minutes, worst)
        watcher = apart.Process(target=watch, args=watched, daemon=True)
        watcher.start()
        threads = [threading.Thread(target=soak.client, args=(i,)) for i in range(CLIENTS)]
        for thread in threads:
            thread.start()
        begun = time.monotonic()
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(60 * minutes / 30 / CLIENTS)
            seen = server.counters()
            row: Row = {"checkpoint": args.checkpoint, "seconds": round(time.monotonic() - begun)}
            row |= {"resident_mb": round(resident_mb(server.process.pid), 1)}
            row |= {"state_bytes": int(seen["latte_state_bytes"])}
            row |= {"disk_bytes": int(seen["latte_state_disk_bytes"])}
            row |= {"slots": int(seen["latte_slots_in_use"])}
            row |= {"requests": soak.done.total(), "wrong": len(soak.wrong)}
            row |= {"longest_health_s": round(worst.value, 3)}
            table.add_and_say(row)
        watcher.join()
        if watcher.exitcode:
            soak.wrong.append("/health was not answered")
    say(f"requests by kind: {dict(soak.done)}")
    for line in soak.wrong[:10]:
        say(f"wrong: {line}")
    if soak.wrong:
        raise SystemExit(f"{len(soak.wrong)} wrong")


if __name__ == "__main__":
    main()
