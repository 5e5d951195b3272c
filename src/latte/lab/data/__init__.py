"""Text for language models: corpora, tokenisers, token files and training blocks.

    corpus = open_corpus("embedded")
    tokenizer = byte_tokenizer()
    tokens = tokenize_corpus(corpus, tokenizer, "train", "cache/")
    blocks = PackedBlocks(tokens, 256, seed=0)
    batch = BlockCollator()([blocks[0], blocks[1]])

``datasets`` and ``transformers`` are imported only when a function needs them. torch is imported
with the names that need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from latte.lab.data.corpora import Corpus, open_corpus, sample_text
from latte.lab.data.tokenfile import TokenFile, tokenize_corpus
from latte.lab.data.tokenizers import byte_tokenizer, load_tokenizer, model_vocab_size, train_bpe
from latte.ops.lazy import lazy_names

if TYPE_CHECKING:
    from latte.lab.data.blocks import (
        BlockCollator,
        EvaluationText,
        PackedBlocks,
        bits_per_byte,
        perplexity,
    )

__all__ = [
    "BlockCollator",
    "Corpus",
    "EvaluationText",
    "PackedBlocks",
    "TokenFile",
    "bits_per_byte",
    "byte_tokenizer",
    "load_tokenizer",
    "model_vocab_size",
    "open_corpus",
    "perplexity",
    "sample_text",
    "tokenize_corpus",
    "train_bpe",
]

__getattr__, __dir__ = lazy_names(__name__, __all__, ("blocks",))
