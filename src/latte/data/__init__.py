"""Text for language models: corpora, tokenisers, token files and training blocks.

    corpus = open_corpus("embedded")
    tokenizer = byte_tokenizer()
    tokens = tokenize_corpus(corpus, tokenizer, "train", "cache/")
    blocks = PackedBlocks(tokens, 256, seed=0)
    batch = BlockCollator()([blocks[0], blocks[1]])

Neither ``datasets`` nor ``transformers`` is imported before a function needs it, and torch with
the names that need it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from latte.data.blocks import (
        BlockCollator,
        EvaluationText,
        PackedBlocks,
        bits_per_byte,
        perplexity,
    )
    from latte.data.corpora import Corpus, compression_baselines, open_corpus, sample_text
    from latte.data.tokenfile import TokenFile, tokenize_corpus
    from latte.data.tokenizers import (
        byte_tokenizer,
        load_tokenizer,
        model_vocab_size,
        train_bpe,
    )

_NAMES = {
    "blocks": ("BlockCollator", "EvaluationText", "PackedBlocks", "bits_per_byte", "perplexity"),
    "corpora": ("Corpus", "compression_baselines", "open_corpus", "sample_text"),
    "tokenfile": ("TokenFile", "tokenize_corpus"),
    "tokenizers": ("byte_tokenizer", "load_tokenizer", "model_vocab_size", "train_bpe"),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

__all__ = [
    "BlockCollator",
    "Corpus",
    "EvaluationText",
    "PackedBlocks",
    "TokenFile",
    "bits_per_byte",
    "byte_tokenizer",
    "compression_baselines",
    "load_tokenizer",
    "model_vocab_size",
    "open_corpus",
    "perplexity",
    "sample_text",
    "tokenize_corpus",
    "train_bpe",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
