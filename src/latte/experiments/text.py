"""From a recipe's `data` section to a tokenizer, training blocks and held-out documents."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..data.blocks import BlockCollator, PackedBlocks
from ..data.corpora import Corpus, open_corpus, sample_text
from ..data.tokenfile import TokenFile, tokenize_corpus
from ..data.tokenizers import byte_tokenizer, load_tokenizer, train_bpe
from ..errors import LatteError
from .recipe import DataSection
from .scoring import HeldOut

# A vocabulary is learnt from at most so much text, drawn evenly from the corpus.
BPE_SAMPLE_BYTES = 20_000_000


@dataclass(frozen=True)
class Text:
    """What training and evaluation read."""

    corpus: Corpus
    tokenizer: Any
    train: TokenFile
    validation: TokenFile

    @property
    def bytes_per_token(self) -> float:
        """Of the training text; bos and eos count as tokens of no bytes."""
        return self.train.num_bytes / len(self.train)

    def blocks(self, section: DataSection, count: int, seed: int) -> PackedBlocks:
        """The first `count` training blocks of the order that `seed` chooses."""
        return PackedBlocks(self.train, section.block_length, seed=seed, length=count)

    @staticmethod
    def collator() -> BlockCollator:
        """Always one packed row: a batch's layout does not depend on where documents end."""
        return BlockCollator("packed")


def prepare_text(section: DataSection, progress: bool = True) -> Text:
    """Open, learn a vocabulary if asked to, tokenise once. Raises LatteError for bad input."""
    cache = cache_folder(section)
    corpus = open_corpus(section.corpus, validation=section.validation)
    tokenizer = make_tokenizer(section, corpus, cache, progress)
    return Text(
        corpus,
        tokenizer,
        tokenize_corpus(corpus, tokenizer, "train", cache, progress=progress),
        tokenize_corpus(corpus, tokenizer, "validation", cache, progress=progress),
    )


def cache_folder(section: DataSection) -> Path:
    """`data.cache_dir`, else $LATTE_CACHE, else ~/.cache/latte."""
    chosen = section.cache_dir or os.environ.get("LATTE_CACHE") or "~/.cache/latte"
    return Path(chosen).expanduser()


def make_tokenizer(section: DataSection, corpus: Corpus, cache: Path, progress: bool) -> Any:
    """The section's tokenizer; a BPE is learnt from the training text once and kept."""
    if section.tokenizer == "byte":
        return byte_tokenizer()
    if section.tokenizer != "bpe":
        return load_tokenizer(section.tokenizer)
    from filelock import FileLock

    name = f"bpe-{section.vocab_size}-{corpus.fingerprint('train')[:20]}"
    folder = cache / name
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f".{name}.lock"):
            if not folder.is_dir():
                sample = sample_text(corpus, BPE_SAMPLE_BYTES)
                tokenizer = train_bpe(
                    sample,
                    section.vocab_size,
                    total_bytes=sum(len(text.encode()) for text in sample),
                    progress=progress,
                )
                staged = cache / f".{name}.tmp-{os.getpid()}"
                tokenizer.save_pretrained(staged)
                staged.rename(folder)
    except OSError as error:
        raise LatteError(
            f"{cache}: the tokenizer cannot be written ({error.strerror or error})"
        ) from None
    return load_tokenizer(folder)


def held_out(tokens: TokenFile, max_bytes: int | None = None) -> HeldOut:
    """The documents of a token file without bos and eos, at most `max_bytes` of text.

    To shorten, every document is cut to the same number of tokens, chosen as large as the budget
    allows, so that no document dominates; a tokenizer that is not byte-level keeps or drops
    whole documents instead, since bytes of a part are then unknown.
    """
    documents = [tokens.document(d)[1:-1] for d in range(tokens.num_documents)]
    sizes = [int(size) for size in tokens.document_bytes]
    if max_bytes is not None and sum(sizes) > max_bytes:
        if tokens.byte_lengths is None:
            kept = max(1, int(np.searchsorted(np.cumsum(sizes), max_bytes, "right")))
            documents, sizes = documents[:kept], sizes[:kept]
        else:
            documents, sizes = _cut_evenly(documents, tokens.byte_lengths, max_bytes)
    return HeldOut(documents, tokens.bos, sum(sizes))


def _cut_evenly(
    documents: list[np.ndarray], byte_lengths: np.ndarray, max_bytes: int
) -> tuple[list[np.ndarray], list[int]]:
    """Cut to the largest common number of tokens whose bytes add up to at most `max_bytes`."""
    running = [np.cumsum(byte_lengths[document]) for document in documents]

    def total(limit: int) -> int:
        return sum(int(sizes[min(limit, len(sizes)) - 1]) for sizes in running if len(sizes))

    low, high = 1, max(len(document) for document in documents)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if total(middle) <= max_bytes else (low, middle - 1)
    cut = [document[:low] for document in documents]
    return cut, [
        int(sizes[len(d) - 1]) if len(d) else 0 for sizes, d in zip(running, cut, strict=True)
    ]
