"""The second turn of a chat over a long document: time to its first token, from servers that run.

A client asks a question about a document, gets an answer, and asks another one, sending the whole
again as chats do. Servers, one after the other, each in a process of its own on this machine:

* ``latte serve CHECKPOINT``, which keeps states;
* the same with ``--state-cache 0``, which reads the conversation anew;
* with ``--base FOLDER``, ``transformers serve`` over that model, with ``--base-options`` such as
  ``--continuous-batching`` (only streams and chats are asked of it);
* with ``--vllm PYTHON``, the Python of an environment with vLLM and its plug-in, vLLM's server over
  CHECKPOINT, with prefix caching and without.

Rows of the CSV file, for each server and length of the document:

* ``first turn``: document and question;
* ``second turn``: the same, the answer, and a question, after the server has come to rest;
* ``new tokens alone``: what the second turn adds, as a prompt of its own (of the first server).

Times are seconds at the client, from sending the request to the first piece of text: its JSON, the
chat's template, the tokeniser, reading and one step are all in it. Every conversation has a
document of its own, cut from FILE, so that nothing is reused but what the conversation itself sent.
Medians and quantiles over ``--repeats`` conversations. Answers are greedy; whether the second
answers of the servers with and without states are equal is said, and is a column. The same of vLLM
with and without prefix caching; its texts do not begin with the start token.

    python -m experiments.benchmarks.serving CHECKPOINT FILE [--tokens 1024,32768] [--base FOLDER]
    python -m experiments.benchmarks.serving --quick
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.benchmarks.records import (
    Row,
    Table,
    numbers,
    output_folder,
    parser,
    say,
    tiny_checkpoint,
)

TOKENS = (1024, 8192, 32768)
QUICK_TOKENS = (64, 256)
ANSWER = 16  # tokens
QUESTIONS = ("Who is this about?", "And where does it take place?")


class Turn(NamedTuple):
    """One request: seconds to the first text, what was said, and the usage."""

    seconds: float
    text: str
    prompt_tokens: int
    cached_tokens: int


class Server:
    """A server in a process of its own, and requests to it."""

    def __init__(
        self, name: str, command: Sequence[str], port: int, model: str | None, **variables: str
    ) -> None:
        self.name, self.model, self.url = name, model, f"http://localhost:{port}"
        environment = {**os.environ, **variables}
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        while not (self._answers("/health") or self._answers("/v1/models")):
            if self.process.poll() is not None:
                raise SystemExit(f"{name}: the server ended: {' '.join(command)}")
            time.sleep(0.2)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()

    def post(self, path: str, body: Row | bytes, timeout: float | None = None) -> Any:
        """The answer to a request, to read from; the body as JSON, or as it is."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/{path}", content, headers)
        return urllib.request.urlopen(request, timeout=timeout)

    def stream(self, path: str, tokens: int, **body: Any) -> Iterator[tuple[float, str, Row]]:
        """Moments at which something came, its text, and the usage so far, where that is said.

        Greedy, at most so many tokens.
        """
        body |= {"stream": True, "temperature": 0, "max_tokens": tokens}
        body["stream_options"] = {"include_usage": True}
        if self.model is not None:
            body["model"] = self.model
        with self.post(path, body) as events:
            for event in events:
                if event.startswith(b"data: {"):
                    fields = json.loads(event[6:])
                    said = ""
                    for choice in fields["choices"]:  # the last event may have none
                        said += choice.get("text") or choice.get("delta", {}).get("content") or ""
                    yield time.perf_counter(), said, fields.get("usage") or {}

    def ask(self, path: str, **body: Any) -> Turn:
        begun, first, text = time.perf_counter(), None, ""
        usage: Row = {}
        for moment, said, counted in self.stream(path, ANSWER, **body):
            usage = counted or usage
            if said and first is None:
                first = moment - begun
            text += said
        whole = time.perf_counter() - begun  # of an answer that has no text
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return Turn(first or whole, text, usage.get("prompt_tokens", 0), cached)

    def chat(self, messages: list[dict[str, str]]) -> Turn:
        return self.ask("chat/completions", messages=messages)

    def counters(self) -> dict[str, float]:
        """What the server counts; nothing where it has no counters."""
        try:
            with urllib.request.urlopen(f"{self.url}/metrics") as answer:
                lines = answer.read().decode().splitlines()
        except urllib.error.HTTPError:
            return {}
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def wait_until_idle(self) -> None:
        """Wait until nothing is read any more: what was said, for its next turn."""
        before: float | None = -1.0
        while before != (before := self.counters().get("latte_read_tokens_total")):
            time.sleep(0.5)

    def _answers(self, path: str) -> bool:
        try:
            with urllib.request.urlopen(self.url + path):
                return True
        except OSError:
            return False


@contextlib.contextmanager
def running_server(
    name: str, command: Sequence[str], model: str | None, **variables: str
) -> Iterator[Server]:
    """The server of a command, on a free port, while it is used."""
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        port = taken.getsockname()[1]
    server = Server(name, [*command, "--port", str(port)], port, model, **variables)
    with contextlib.closing(server):
        yield server


def latte_server(checkpoint: str, *options: str) -> Any:
    """`latte serve`."""
    command = [sys.executable, "-m", "latte.cli", "serve", checkpoint, *options]
    return running_server("latte", command, checkpoint)


def base_server(folder: str, options: str) -> Any:
    """`transformers serve`."""
    start = "import sys; from transformers.cli.transformers import main; sys.exit(main())"
    command = [sys.executable, "-c", start, "serve", folder, *shlex.split(options)]
    return running_server("transformers", command, None)


def vllm_server(python: str, checkpoint: str, template: str, *options: str) -> Any:
    """vLLM's server with Latte's plug-in.

    It has as much memory for states as ``latte serve`` by default, and the checkpoint's dtype.
    """
    from transformers import AutoConfig

    import latte  # noqa: F401  its configurations

    dtype = str(AutoConfig.from_pretrained(checkpoint).dtype or "float32").removeprefix("torch.")
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint]
    command += ["--dtype", dtype, "--kv-cache-memory-bytes", str(2**30)]
    command += ["--max-model-len", "131072", "--chat-template", template]
    command += ["--enable-prompt-tokens-details", *options]
    return running_server("vLLM", command, checkpoint, VLLM_ALLOW_LONG_MAX_MODEL_LEN="1")


class Conversation:
    """Two turns over a document; the first server's answer is what all of them are sent."""

    def __init__(self, document: str) -> None:
        self.first = [{"role": "user", "content": f"{document}\n\n{QUESTIONS[0]}"}]
        self.second: list[dict[str, str]] = []

    def ask(self, server: Server) -> tuple[Turn, Turn]:
        first = server.chat(self.first)
        if not self.second:
            answer = {"role": "assistant", "content": first.text}
            self.second = [*self.first, answer, {"role": "user", "content": QUESTIONS[1]}]
        server.wait_until_idle()
        return first, server.chat(self.second)

    def added(self, tokenizer: Any) -> str:
        """What the second turn adds, as text."""

        def text(messages: list[dict[str, str]], opens: bool) -> str:
            return tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=opens
            )

        return text(self.second, True).removeprefix(text(self.second[:-1], False))


def documents(tokenizer: Any, file: str, tokens: int, count: int) -> list[str]:
    """Texts of so many tokens each, one after the other from the documents of a file."""
    from latte.lab.data.files import read_documents

    found: list[str] = []
    ids: list[int] = []
    for text in read_documents(Path(file)):
        ids += tokenizer.encode(text, add_special_tokens=False)
        while len(ids) >= tokens:
            found.append(tokenizer.decode(ids[:tokens]))
            ids = ids[tokens:]
            if len(found) == count:
                return found
    raise SystemExit(f"{file}: expected {count} times {tokens:,} tokens of text, got fewer")


def measure(
    table: Table, name: str, tokens: int, turns: dict[str, list[Turn]], **about: Any
) -> None:
    """A row for each kind of turn."""
    for kind, measured in turns.items():
        seconds = sorted(turn.seconds for turn in measured)
        row: Row = {"server": name, "document_tokens": tokens, "turn": kind}
        row |= {"median_s": round(statistics.median(seconds), 4), "repeats": len(seconds)}
        row |= {"least_s": round(seconds[0], 4), "most_s": round(seconds[-1], 4)}
        row |= {"prompt_tokens": measured[-1].prompt_tokens}
        table.add_and_say(row | {"cached_tokens": measured[-1].cached_tokens} | about)


def add_vllm(options: Any) -> None:
    options.add_argument(
        "--vllm", metavar="PYTHON", help="of an environment with vLLM and Latte's plug-in"
    )


def with_text(options: Any, arguments: list[str] | None, run: Callable[[Any], None]) -> None:
    """Run a benchmark on CHECKPOINT and FILE, or with --quick on small ones made for it."""
    options.add_argument("checkpoint", nargs="?")
    options.add_argument("file", nargs="?", help="text, one document a line (.jsonl, .jsonl.xz)")
    args = options.parse_args(arguments)
    if not args.quick and args.file is None:
        options.error("expected CHECKPOINT and FILE, or --quick")
    with tempfile.TemporaryDirectory() as folder:
        if args.quick:
            args.checkpoint = tiny_checkpoint(Path(folder, "model"))
            args.file = str(Path(folder, "text.jsonl"))
            Path(args.file).write_text(json.dumps({"text": "Call me Ishmael. " * 500}) + "\n")
        run(args)


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", type=numbers, help=f"of documents; {TOKENS}")
    options.add_argument("--repeats", type=int, help="conversations of each length; 5")
    options.add_argument("--base", help="a model for `transformers serve`, to put beside it")
    options.add_argument("--base-options", default="", help="more options of `transformers serve`")
    add_vllm(options)
    with_text(options, arguments, run)


def run(args: Any) -> None:
    from transformers import AutoTokenizer

    from latte.serve.prompts import Prompts

    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    Prompts(tokenizer)  # gives it a template, if it has none
    repeats = args.repeats or (2 if args.quick else 5)
    table = Table(output_folder(args) / "serving.csv")
    conversations = {
        tokens: [Conversation(text) for text in documents(tokenizer, args.file, tokens, repeats)]
        for tokens in args.tokens or (QUICK_TOKENS if args.quick else TOKENS)
    }
    said: dict[str, dict[int, list[str]]] = {}
    servers: list[tuple[str, Any]] = [
        ("states", latte_server(args.checkpoint)),
        ("anew", latte_server(args.checkpoint, "--state-cache", "0")),
    ]
    if args.base:
        servers.append(("base", base_server(args.base, args.base_options)))
    if args.vllm:
        of_vllm = (args.vllm, args.checkpoint, tokenizer.chat_template)
        servers.append(("vllm states", vllm_server(*of_vllm, "--enable-prefix-caching")))
        servers.append(("vllm anew", vllm_server(*of_vllm)))
    for name, opened in servers:
        said[name] = {}
        with opened as server:
            # Not measured: what is done once.
            server.chat([{"role": "user", "content": "Hello"}])
            for tokens, each in conversations.items():
                turns: dict[str, list[Turn]] = {"first turn": [], "second turn": []}
                for conversation in each:
                    first, second = conversation.ask(server)
                    turns["first turn"].append(first)
                    turns["second turn"].append(second)
                    server.wait_until_idle()
                    if name == "anew":  # no state helps it
                        alone = server.ask("completions", prompt=conversation.added(tokenizer))
                        turns.setdefault("new tokens alone", []).append(alone)
                about = {"checkpoint": args.base if name == "base" else args.checkpoint}
                said[name][tokens] = [turn.text for turn in turns["second turn"]]
                if name.endswith("anew"):
                    states = said[name.replace("anew", "states")]
                    about["answers_equal"] = states[tokens] == said[name][tokens]
                measure(table, name, tokens, turns, **about)
        if name.endswith("anew"):
            equal = said[name.replace("anew", "states")] == said[name]
            whose = "of vLLM " if name.startswith("vllm") else ""
            say(f"second answers {whose}with and without states are equal: {equal}")


if __name__ == "__main__":
    main()
