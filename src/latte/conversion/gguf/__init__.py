"""GGUF files: pretrained decoders in llama.cpp's format, weights and tokenizer in one file.

A file says by metadata what its model is: ``llama.rope.freq_base`` is 10000.0. Every key that
decides a result is read, has a default, or is refused in one line. docs/reference/gguf.md lists
them, and each has a test. The defaults are those of llama.cpp's loader. Weights are dequantised by
the ``gguf`` package, and the model is a plain one of Transformers.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from latte.conversion.gguf.config import gguf_config
from latte.conversion.gguf.file import TRANSFORMERS, GgufFile, gguf_at, open_gguf
from latte.conversion.gguf.tokenizer import gguf_tokenizer
from latte.conversion.gguf.weights import gguf_model

__all__ = [
    "TRANSFORMERS",
    "GgufFile",
    "gguf_at",
    "gguf_config",
    "gguf_model",
    "gguf_tokenizer",
    "open_gguf",
]
