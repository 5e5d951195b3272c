"""From a recipe's `data` section to a tokenizer, training blocks and held-out documents.

A recipe is read without torch: `latte.lab.data` imports it with the first of its names that needs
it.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latte.errors import LatteError
from latte.lab import data
from latte.lab.data.corpora import Corpus, open_corpus, sample_text
from latte.lab.data.files import FileSource, find_files
from latte.lab.data.tokenfile import TokenFile, made_once, tokenize_corpus
from latte.lab.data.tokenizers import byte_tokenizer, load_tokenizer, train_bpe
from latte.ops.processes import is_first_process

if TYPE_CHECKING:
    from latte.lab.data.blocks import BlockCollator, EvaluationText, PackedBlocks

# Largest amount of text from which a vocabulary is learnt. It is drawn evenly from the corpus.
BPE_SAMPLE_BYTES = 20_000_000


@dataclass
class DataSection:
    """The text of a run, and how it is cut into blocks of tokens."""

    # training text: `embedded`, `hub:NAME`, a path, a folder, a glob, or a list
    corpus: str | list[str] = "embedded"
    # held-out text, as files; without it a part of the corpus is held out
    validation: str | list[str] | None = None
    field: str = "text"  # JSON field or Parquet column that holds the text
    hub_config: str | None = None  # configuration of a Hub dataset
    hub_validation_split: str | None = None  # held-out split of a Hub dataset; None: 1% by hash
    tokenizer: str = "byte"  # `byte`, `bpe` (trained on the corpus), a folder, or a name on the Hub
    vocab_size: int = 8192  # number of entries of a trained BPE
    special_tokens: bool = False  # whether marks of chats and the like in the text are read as such
    block_length: int = 256  # number of tokens of a training example
    # no document sees another in the same block; `false` ignores bounds
    respect_documents: bool = True
    start_blocks: bool = False  # a block begins with the start token, in place of its first token
    # folder of tokenised text; None: `$LATTE_CACHE`, or `~/.cache/latte`
    cache_dir: str | None = None
    # number of held-out tokens scored during training; None: all
    max_validation_tokens: int | None = 200_000


@dataclass(frozen=True)
class Text:
    """The text that training and evaluation read."""

    corpus: Corpus
    tokenizer: Any
    train: TokenFile
    validation: TokenFile

    @property
    def bytes_per_token(self) -> float:
        """Bytes per token of the training text. bos and eos count as tokens without bytes."""
        return self.train.num_bytes / len(self.train)

    def blocks(self, section: DataSection, count: int, seed: int) -> PackedBlocks:
        """The first `count` training blocks of the order that `seed` chooses."""
        return _blocks("training", self.train, section, seed=seed, length=count)

    def held_out_blocks(self, section: DataSection) -> PackedBlocks:
        """The blocks of the held-out text, in its order."""
        return _blocks("held-out", self.validation, section, shuffle=False)

    def held_out(self, max_tokens: int | None = None, *, join: bool = False) -> EvaluationText:
        """The held-out documents, or about `max_tokens` of them, spread evenly."""
        return data.EvaluationText(self.validation, join=join, max_tokens=max_tokens)

    @staticmethod
    def collator(section: DataSection, *, pack: bool = True) -> BlockCollator:
        """The collator, with one layout for every batch: packed if documents are kept separate.

        Without `pack` each document has its own row. This is for models that cannot separate packed
        documents. The tokens, and the tokens that each can see, are the same.
        """
        if not section.respect_documents:
            return data.BlockCollator("rows")
        return data.BlockCollator("packed" if pack else "padded")


def _blocks(which: str, tokens: TokenFile, section: DataSection, **order: Any) -> PackedBlocks:
    _check_length(which, tokens, section)
    return data.PackedBlocks(
        tokens,
        section.block_length,
        respect_documents=section.respect_documents,
        start_blocks=section.start_blocks,
        **order,
    )


def _check_length(which: str, tokens: TokenFile, section: DataSection) -> None:
    """Raise LatteError if a text has no whole block of tokens."""
    if len(tokens) < section.block_length:
        of = "data.corpus"
        if which == "held-out" and section.validation is not None:
            of = "data.validation"
        raise LatteError(
            f"{of}: the {which} text has {len(tokens):,} tokens, too few for a single block of"
            f" {section.block_length:,}; expected more text, or a smaller data.block_length"
        )


def prepare_text(section: DataSection, progress: bool = True) -> Text:
    """Open the corpus, train a BPE if asked to, tokenise once. Raises LatteError for bad input.

    With ``progress``, messages and progress bars are shown.
    """
    cache = cache_folder(section.cache_dir)
    corpus = open_section(section)
    if progress and (note := corpus.note()):
        print(note, file=sys.stderr, flush=True)
    tokenizer = make_tokenizer(section, corpus, cache, progress)
    how: Any = {"progress": progress, "special_tokens": section.special_tokens}
    return Text(
        corpus,
        tokenizer,
        tokenize_corpus(corpus, tokenizer, "train", cache, **how),
        tokenize_corpus(corpus, tokenizer, "validation", cache, **how),
    )


def open_section(section: DataSection) -> Corpus:
    """The corpus of a recipe's `data` section."""
    if not (isinstance(section.corpus, str) and section.corpus.startswith("hub:")):
        for name in ("hub_config", "hub_validation_split"):
            if getattr(section, name) is not None:
                raise LatteError(
                    f"data.{name}: only for a 'hub:NAME' corpus; expected data.{name}=null with"
                    f" {section.corpus!r}"
                )
    return open_corpus(
        section.corpus,
        validation=section.validation,
        field=section.field,
        config=section.hub_config,
        validation_split=section.hub_validation_split,
    )


def cache_folder(cache_dir: str | None) -> Path:
    """A recipe's `cache_dir`, else $LATTE_CACHE, else ~/.cache/latte."""
    chosen = cache_dir or os.environ.get("LATTE_CACHE") or "~/.cache/latte"
    return Path(chosen).expanduser()


def make_tokenizer(section: DataSection, corpus: Corpus, cache: Path, progress: bool) -> Any:
    """The section's tokenizer. A BPE is trained on the training text once and kept."""
    if section.tokenizer == "byte":
        return byte_tokenizer()
    if section.tokenizer != "bpe":
        return load_tokenizer(section.tokenizer)

    def learn(folder: Path) -> None:
        sample = sample_text(corpus, BPE_SAMPLE_BYTES, progress=progress)
        total = sum(len(text.encode()) for text in sample)
        tokenizer = train_bpe(sample, section.vocab_size, total_bytes=total, progress=progress)
        tokenizer.save_pretrained(folder)

    name = f"bpe-{section.vocab_size}-{corpus.fingerprint('train')[:20]}"
    return load_tokenizer(made_once(cache, name, learn, "tokenizer"))


def evaluation_text(
    corpus: str | list[str],
    tokenizer: Any,
    *,
    field: str = "text",
    join: bool = False,
    max_tokens: int | None = None,
) -> EvaluationText:
    """The text of `--corpus` to score, as tokens."""
    chosen = evaluation_corpus(corpus, field)
    return _tokenized(chosen, tokenizer, cache_folder(None), join, max_tokens)


def evaluation_corpus(corpus: str | list[str], field: str = "text") -> Corpus:
    """The corpus whose validation part is that text: all of local files, else what is held out."""
    if isinstance(corpus, str) and (corpus == "embedded" or corpus.startswith("hub:")):
        return open_corpus(corpus, field=field)
    specs = [corpus] if isinstance(corpus, str) else corpus
    paths = list(dict.fromkeys(path for spec in specs for path in find_files(spec)))
    whole = FileSource(paths, field)
    return Corpus(whole.name, whole, whole)


def held_out_text(
    section: DataSection, tokenizer: Any, *, join: bool = False, max_tokens: int | None = None
) -> EvaluationText:
    """The text that a run with this `data` section held out. It was not trained on."""
    cache, marks = cache_folder(section.cache_dir), section.special_tokens
    return _tokenized(open_section(section), tokenizer, cache, join, max_tokens, marks)


def _tokenized(
    corpus: Corpus,
    tokenizer: Any,
    cache: Path,
    join: bool,
    max_tokens: int | None,
    special_tokens: bool = False,
) -> EvaluationText:
    how: Any = {"progress": is_first_process(), "special_tokens": special_tokens}
    tokens = tokenize_corpus(corpus, tokenizer, "validation", cache, **how)
    return data.EvaluationText(tokens, join=join, max_tokens=max_tokens)
