"""llama.cpp as a side of ``experiments.benchmarks.generation``: the other program for GGUF files.

It reads the file's quantised weights as they are, and keeps keys and values in fp16.

    pip install llama-cpp-python
    python -m experiments.benchmarks.generation --llama-cpp llama.cpp=FILE.gguf \
        --checkpoint converted=FOLDER

As a command it is a server of completions. One answer is generated at a time, the others wait, as
in ``llama_cpp.server``, which needs more packages. Nothing is streamed.

    python -m experiments.benchmarks.llama_cpp FILE.gguf --port 8000 [--threads 1]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import torch

from experiments.sides import Side
from latte.errors import LatteError

TIMED = 256  # tokens that are generated at a context at most
# Bytes that are resident in a process with llama.cpp alone, which has read and generates.
RESIDENT = """
import random, re, sys
from llama_cpp import Llama

file, context, timed, threads = sys.argv[1], *map(int, sys.argv[2:])
sizes = {"n_ctx": context + timed, "n_threads": threads, "n_threads_batch": threads}
llama = Llama(file, verbose=False, **sizes)
llama.eval([random.randrange(llama.n_vocab()) for _ in range(context)])
for _ in range(8):
    llama.eval([1])
print(1024 * int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]))
"""


def resident_bytes(file: str, context: int) -> int:
    """Memory of a process of llama.cpp that has read so many tokens and generates."""
    sizes = map(str, (context, TIMED, torch.get_num_threads()))
    command = [sys.executable, "-c", RESIDENT, file, *sizes]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@dataclass(frozen=True)
class LlamaCppSide(Side):
    """A GGUF file and its name in tables.

    Attributes:
        most: Number of tokens of the longest context.
    """

    most: int = 0

    def load(self, device: str | None = None, *, dtype: str | None = None) -> tuple[Any, Any]:
        """(model, None). Raises LatteError if llama-cpp-python is missing or cannot read it."""
        try:
            from llama_cpp import Llama
        except ImportError:
            raise LatteError(
                "llama-cpp-python is not installed: pip install llama-cpp-python"
            ) from None
        try:
            return LlamaCpp(Llama(self.folder, **_sizes(self.most + TIMED))), None
        except ValueError as error:
            raise LatteError(f"{self.folder}: {error}") from None


def _sizes(context: int) -> dict[str, Any]:
    """Arguments of llama.cpp's models: room for so many tokens, and as many threads as PyTorch."""
    threads = torch.get_num_threads()
    return {"n_ctx": context, "n_threads": threads, "n_threads_batch": threads, "verbose": False}


def logits(file: str, pieces: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The logits (T, V) of pieces of text (1, T), each read alone."""
    from llama_cpp import Llama

    llama = Llama(file, logits_all=True, **_sizes(max(piece.shape[1] for piece in pieces)))
    for piece in pieces:
        llama.reset()
        llama.eval(piece[0].tolist())
        yield torch.from_numpy(llama.scores[: piece.shape[1]].copy())


class Read:
    """The number of tokens that a model has read, in the place of a cache: that is llama.cpp's."""

    def __init__(self, llama: Any) -> None:
        self.llama, self.tokens = llama, int(llama.n_tokens)

    def __deepcopy__(self, _: Any) -> Read:
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values of all tokens that the model has read now."""
        import llama_cpp

        return int(llama_cpp.llama_state_seq_get_size(self.llama.ctx, 0))


class LlamaCpp:
    """A model of llama.cpp, called as those of Transformers are; its logits stay in llama.cpp."""

    device = torch.device("cpu")
    dtype = "quantised"

    def __init__(self, llama: Any) -> None:
        self.llama = llama
        self.config = SimpleNamespace(vocab_size=llama.n_vocab())

    def num_parameters(self) -> int:
        import llama_cpp

        return int(llama_cpp.llama_model_n_params(self.llama.model))

    def __call__(self, tokens: torch.Tensor, past_key_values: Any = None, **_: Any) -> Any:
        """Read tokens (1, T) after those of a cache; what was read later is forgotten."""
        self.llama.n_tokens = 0 if past_key_values is None else past_key_values.tokens
        self.llama.eval(tokens[0].tolist())
        return SimpleNamespace(past_key_values=Read(self.llama), logits=torch.zeros(1, 1, 1))


# --- the server ---------------------------------------------------------------------------------


def handler(llama: Any) -> type[BaseHTTPRequestHandler]:
    """What answers requests with a model: one after the other."""
    lock = threading.Lock()

    class Completions(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send({})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            names = "prompt", "max_tokens", "temperature"
            with lock:
                answer = llama.create_completion(**{name: asked[name] for name in names})
            self._send(answer)

        def _send(self, body: Any) -> None:
            content = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Say nothing of each request."""

    return Completions


def main() -> None:
    from llama_cpp import Llama

    options = argparse.ArgumentParser(description="Completions of a GGUF file by llama.cpp.")
    options.add_argument("file", metavar="FILE.gguf")
    options.add_argument("--port", type=int, required=True)
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    llama = Llama(args.file, **_sizes(2048))
    ThreadingHTTPServer(("localhost", args.port), handler(llama)).serve_forever()


if __name__ == "__main__":
    main()
