"""A document that is read once: its state is a file, and every question starts from it.

    notes.txt
    notes.txt.5d1c0a7be3f2-9a41c77d02be.safetensors

The file's name has a digest of the tokens that were read (the document, and what the chat template
and a system message put before it) and one of the model's weights. So another document, template or
model has a file of its own, and the one that fits is used again without asking. A file that cannot
be used is set aside, and the document is read anew.

With a chat template the document stands in the first message of the user, and a question follows
it. Without one the document begins the text, and a prompt continues it.
"""

from __future__ import annotations

import copy
import hashlib
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from latte.errors import LatteError, one_line
from latte.lab.data.tokenizers import document_ends
from latte.lab.evaluate.generate import keeps_state, new_cache, read
from latte.lab.results import own_file
from latte.models.atomic_files import check_writable, writable_folder
from latte.models.state_file import fingerprint, read_state, save_state

DIGITS = 12  # of each digest in a file's name
QUESTION = "\ue000"  # a character of private use: where the template puts the question


@dataclass(frozen=True)
class ReadDocument:
    """A document with the cache that has read it.

    Attributes:
        document: The document's own text.
        text: All text that was read, without a start token.
        ids: Its tokens, start token included.
        read_cache: Cache after these tokens. :meth:`cache` gives copies.
        file: File of the state; None if it is in memory alone.
    """

    document: str
    text: str
    ids: list[int]
    read_cache: Any
    file: Path | None = None

    def cache(self) -> Any:
        """A cache of its own for one conversation, which starts after the document."""
        return copy.deepcopy(self.read_cache)


def opening(system: str) -> list[dict[str, str]]:
    """The messages before the user's first one."""
    return [{"role": "system", "content": system}] if system else []


def asked_about(document: str, question: str) -> str:
    """The message with a document and the first question about it."""
    return f"{document}\n\n{question}"


def read_document(
    model: Any,
    tokenizer: Any,
    document: str,
    file: str | Path,
    *,
    system: str = "",
    states: str | Path | None = None,
) -> ReadDocument:
    """Read a document, or take the state of an earlier call. A line on stderr says which.

    Args:
        model: Causal language model.
        tokenizer: Its tokenizer.
        document: Text of the document.
        file: File that has it.
        system: System message, where the tokenizer has a chat template.
        states: Folder of the state; by default that of the document.

    Raises:
        LatteError: The model keeps nothing of what it reads, its range ends within the document, or
            the folder ``states`` cannot be written.
    """
    file = Path(file).expanduser()
    cache = new_cache(model)
    if cache is None:
        raise LatteError(
            f"read: expected a model that keeps what it has read, which a {type(model).__name__}"
            " does not; --file gives it the document with each question"
        )
    text = text_before_question(tokenizer, document, system)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if tokenizer.chat_template is None:
        ids = [document_ends(tokenizer)[0], *ids]
    if not keeps_state(model):
        took = _read(model, ids, cache, file)
        why = "this model's cache grows with the text, so it stays in memory and no file is written"
        _say(f"{took}; {why}")
        return ReadDocument(document, text, ids, cache)
    if states is not None:
        writable_folder(Path(states).expanduser())
    place = state_place(file, ids, model, states)
    found = _kept(place, model, ids)
    if found is not None:
        _say(f"{file}: {len(ids):,} tokens, read before; the state is that of {place}")
        return ReadDocument(document, text, ids, found, place)
    problem = _not_writable(place.parent)  # found out before, said after it was read
    took = _read(model, ids, cache, file)
    if problem is None:
        try:
            save_state(cache, place, torch.tensor(ids))
        except LatteError as error:  # such as a full disk; what was read is still there
            problem = one_line(error)
    if problem is not None:
        _say(f"{took}; the state is not kept: {problem}; --state-dir names another folder")
        return ReadDocument(document, text, ids, cache)
    _say(f"{took}; the state, {cache.nbytes / 1000:,.0f} kB, is kept in {place}")
    return ReadDocument(document, text, ids, cache, place)


def text_before_question(tokenizer: Any, document: str, system: str = "") -> str:
    """The text up to the place of the first question.

    Raises:
        LatteError: The chat template changes messages.
    """
    if tokenizer.chat_template is None:
        return document
    asked = {"role": "user", "content": asked_about(document, QUESTION)}
    text: str = tokenizer.apply_chat_template(
        [*opening(system), asked], tokenize=False, add_generation_prompt=True
    )
    before, found, _ = text.rpartition(QUESTION)
    if not found:
        raise LatteError("read: expected a chat template that keeps messages as they are")
    return before


def state_place(file: Path, ids: list[int], model: Any, states: str | Path | None = None) -> Path:
    """The file of the state of these tokens: beside the document, or in the folder ``states``."""
    read = hashlib.sha256(np.asarray(ids, np.int32).tobytes()).hexdigest()[:DIGITS]
    folder = file.parent if states is None else Path(states).expanduser()
    return folder / f"{file.name}.{read}-{fingerprint(model)[:DIGITS]}.safetensors"


def _read(model: Any, ids: list[int], cache: Any, file: Path) -> str:
    """Read the tokens. Returns what to say about it."""
    longest = _range(model)
    if longest is not None and len(ids) > longest:
        _say(
            f"{file}: {len(ids):,} tokens, more than the {longest:,} that this model was trained on"
            " at once (max_position_embeddings): expect worse answers"
        )
    begun = time.perf_counter()
    try:
        read(model, ids, cache, str(file))
    except IndexError:  # a table of positions has an end
        if longest is None or len(ids) <= longest:
            raise
        raise LatteError(
            f"{file}: expected at most {longest:,} tokens, since this model has no more positions,"
            f" got {len(ids):,}"
        ) from None
    seconds = time.perf_counter() - begun
    rate = f"{len(ids) / seconds:,.0f} tokens/s"
    return f"{file}: {len(ids):,} tokens read in {seconds:.1f} s ({rate})"


def _range(model: Any) -> int | None:
    """Number of tokens up to which a model with full attention was trained; None without one."""
    config = model.config.get_text_config()
    layers = range(config.num_hidden_layers)
    if keeps_state(model) and not any(config.state_grows(layer) for layer in layers):
        return None
    longest = getattr(config, "max_position_embeddings", None)
    return longest if isinstance(longest, int) else None


def _kept(place: Path, model: Any, ids: list[int]) -> Any:
    """The cache of an earlier call; None if there is none. A file of no use is set aside."""
    if not os.path.lexists(place):
        return None
    try:
        cache, found = read_state(place, model)
        if found is not None and found.tolist() == ids and cache.get_seq_length() == len(ids):
            return cache
        problem = f"{place} is the state of another text"
    except LatteError as error:
        problem = one_line(error)
    try:
        aside, _ = own_file(place.with_name(f"{place.name}.unused"), lambda _: False)
        os.rename(place, aside)
        _say(f"{problem}; it is set aside as {aside.name}, and the document is read anew")
    except OSError:
        _say(f"{problem}; the document is read anew")
    return None


def _not_writable(folder: Path) -> str | None:
    """Why no file can be made in a folder; None if it can."""
    try:
        check_writable(folder, "folder")
    except LatteError as error:
        return one_line(error)
    return None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
