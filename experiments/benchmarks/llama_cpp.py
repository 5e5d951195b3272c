"""llama.cpp as a side of ``experiments.benchmarks.generation``: the other program for GGUF files.

It reads the file's quantised weights as they are, and keeps keys and values in fp16.

    pip install llama-cpp-python
    python -m experiments.benchmarks.generation --llama-cpp llama.cpp=FILE.gguf \
        --checkpoint converted=FOLDER
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from latte.errors import LatteError
from latte.lab.evaluate.sides import Side

TIMED = 256  # tokens that are generated at a context at most


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
        threads = torch.get_num_threads()
        sizes = {"n_ctx": self.most + TIMED, "n_threads": threads, "n_threads_batch": threads}
        try:
            return LlamaCpp(Llama(self.folder, verbose=False, **sizes)), None
        except ValueError as error:
            raise LatteError(f"{self.folder}: {error}") from None


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
