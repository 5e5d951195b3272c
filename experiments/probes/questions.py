"""What the probes ask: prompts as token ids, pure functions of (seed, index).

Likelihood on ordinary text hides what a model can no longer look up; three probes ask directly.

* retrieval: `The secret word of NAME is WORD.` stands at a depth of a long natural text, other
  such statements (distractors) elsewhere in it, and the text ends with the question. The right
  word competes with the distractors' words, and with words that were never said. A control text,
  where the statement has another word, says how likely the right one was without being told.
* copy: a paragraph opens the text, natural text follows, then the paragraph's first tokens come
  again: does the model go on as the paragraph did? A control text, where another paragraph stood
  there, says how far it would have got without having seen it.
* continuation: natural text to go on from, to measure how much a model repeats itself.

A case of `length` n takes n tokens in all: start token, prompt and answer. All cases of a probe
and length have prompts of the same length, so they batch without padding. The same (seed, index)
gives the same names, words and surroundings at every length and depth: differences between cells
are not differences between samples. Shape suffixes: P prompt tokens, C candidates, A answer
tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from latte.errors import LatteError

NAMES = (
    "Anna Arthur Charles Clara David Edward Emily Frank George Grace Harry Helen Henry Jack Jane "
    "John Julia Kate Laura Lucy Maria Martha Oliver Paul Peter Rose Ruth Sarah Thomas William"
).split()
# Words of five letters: equally long for a tokeniser of bytes, and mostly one token of others.
WORDS = (
    "apple beach bread chair clock cloud coast court cream crown dress earth field flame floor "
    "fruit glass grass green heart horse house knife light metal money month mouse music night "
    "ocean paper pearl piano place plant plate pound price queen river round sheep shirt skirt "
    "smile smoke snake stage stone storm study sugar table tiger tower track train voice watch "
    "water wheat wheel white woman world"
).split()
STATEMENT = "The secret word of {name} is"
COPY_CUE, COPY_ANSWER = 16, 32
CONTINUATION = 128


@dataclass(frozen=True)
class Material:
    """What cases are made of, in one tokeniser's ids.

    Attributes:
        text: (N,) int64, natural text without special tokens.
        start: the id that opens a document.
        line: ids of a paragraph break.
        stop: ids of a full stop.
        statements: name -> ids of `The secret word of NAME is`.
        words: ids of candidate words, all of the same length A.
    """

    text: np.ndarray
    start: int
    line: tuple[int, ...]
    stop: tuple[int, ...]
    statements: tuple[tuple[int, ...], ...]
    words: tuple[tuple[int, ...], ...]

    def piece(self, start: int, count: int) -> np.ndarray:
        """`count` tokens from `start` on; the text goes round."""
        return self.text.take(np.arange(start, start + count), mode="wrap")


@dataclass(frozen=True)
class RetrievalCase:
    """`prompt` (P,), ending with the question; `control` (P,), the same but for the right word;
    `candidates` (C, A): the right word, then those of the distractors, then as many that neither
    says."""

    prompt: np.ndarray
    control: np.ndarray
    candidates: np.ndarray


@dataclass(frozen=True)
class CopyCase:
    """`prompt` (P,), ending with the cue; `control` (P,), the same without the paragraph;
    `answer` (A,), how the paragraph goes on; `distance` from the paragraph's end to the cue."""

    prompt: np.ndarray
    control: np.ndarray
    answer: np.ndarray
    distance: int


@dataclass(frozen=True)
class ContinuationCase:
    """`prompt` (P,) and how its text goes on, `answer` (A,)."""

    prompt: np.ndarray
    answer: np.ndarray


def make_material(tokenizer: Any, text: np.ndarray) -> Material:
    """Encode the statements, and find words that are equally long in this tokeniser.

    Args:
        text: (N,) ids of natural text; special tokens are taken out.

    Raises:
        LatteError: there is no text, or the tokeniser spells hardly any words alike.
    """
    from latte.lab.data.tokenizers import document_ends

    special = np.asarray(sorted({*tokenizer.all_special_ids, *document_ends(tokenizer)}))
    text = np.asarray(text, np.int64)
    text = text[~np.isin(text, special)]
    if not len(text):
        raise LatteError("probes: the text to hide things in has no tokens")
    prefix = STATEMENT.format(name=NAMES[0])
    by_length: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
    for word in WORDS:
        ids = _continuation(tokenizer, prefix, f" {word}")
        by_length[len(ids)].append(ids)
    # The shortest kind that has 20 words or more, else the largest kind.
    chosen = max(by_length.values(), key=lambda found: (min(len(found), 20), -len(found[0])))
    words = tuple(dict.fromkeys(chosen))
    if len(words) < 10:
        raise LatteError(f"probes: only {len(words)} words are equally long in this tokenizer")
    return Material(
        text=text,
        start=document_ends(tokenizer)[0],
        line=_ids(tokenizer, "\n"),
        stop=_continuation(tokenizer, prefix, "."),
        statements=tuple(_ids(tokenizer, STATEMENT.format(name=name)) for name in NAMES),
        words=words,
    )


def retrieval_case(
    material: Material, seed: int, index: int, *, length: int, depth: float, distractors: int = 3
) -> RetrievalCase:
    """A statement at `depth` (0: opens the text, 1: right before the question).

    The distractors' statements stand at random depths, which are the same whatever `depth` is.

    Raises:
        LatteError: the length leaves no room, or the text is shorter.
    """
    if not 0 <= depth <= 1:
        raise LatteError(f"depths: expected numbers from 0 to 1, got {depth:g}")
    rng = np.random.default_rng([seed, index, 1])
    people = rng.permutation(len(material.statements))[: 1 + distractors]
    words = np.asarray(material.words)
    drawn = words[rng.permutation(len(words))[: 2 + 2 * distractors]]
    candidates, instead = drawn[:-1], drawn[-1]
    origin, places = int(rng.integers(len(material.text))), rng.uniform(size=distractors)

    def statement(who: int, word: np.ndarray) -> list[int]:
        named = [*material.line, *material.statements[who], *word.tolist()]
        return [*named, *material.stop, *material.line]

    said = [statement(who, word) for who, word in zip(people, candidates, strict=False)]
    question = [*material.line, *material.statements[people[0]]]
    room = length - words.shape[1] - 1 - len(question) - sum(map(len, said))
    _check_room("retrieval", length, room, material)
    text = material.piece(origin, room)
    # At either end the right statement is the outermost one.
    where = [(round(depth * room), 2 if depth > 0.5 else 0, 0)]
    where += [(int(place * room), 1, i + 1) for i, place in enumerate(places)]

    def assemble(right: list[int]) -> np.ndarray:
        ids, done = [material.start], 0
        for place, _, which in sorted(where):
            ids += [*text[done:place].tolist(), *(said[which] if which else right)]
            done = place
        return np.asarray([*ids, *text[done:].tolist(), *question], np.int64)

    return RetrievalCase(
        prompt=assemble(said[0]),
        control=assemble(statement(people[0], instead)),
        candidates=candidates,
    )


def copy_case(
    material: Material,
    seed: int,
    index: int,
    *,
    length: int,
    cue: int = COPY_CUE,
    answer: int = COPY_ANSWER,
) -> CopyCase:
    """A paragraph of `cue + answer` tokens at the start, and its first `cue` tokens at the end.

    Raises:
        LatteError: the length leaves no room, or the text is shorter.
    """
    rng = np.random.default_rng([seed, index, 2])
    size = cue + answer
    room = length - 1 - 2 * len(material.line) - size - cue - answer
    _check_room("copy", length, room, material, more=2 * size)
    origin = int(rng.integers(len(material.text)))
    # One after the other, going round: none of the three overlaps another.
    paragraph = material.piece(origin, size)
    control = material.piece(origin + size, size)
    text = material.piece(origin + 2 * size, room)
    line = np.asarray(material.line, np.int64)
    end = [line, text, line, paragraph[:cue]]
    start = np.asarray([material.start])
    return CopyCase(
        prompt=np.concatenate([start, paragraph, *end]),
        control=np.concatenate([start, control, *end]),
        answer=paragraph[cue:],
        distance=room + 2 * len(line),
    )


def continuation_case(
    material: Material, seed: int, index: int, *, length: int
) -> ContinuationCase:
    """Natural text, cut: the answer is its last 128 tokens, or half of it if that is less.

    Raises:
        LatteError: the length leaves no room, or the text is shorter.
    """
    answer = min(CONTINUATION, length // 2)
    _check_room("continuation", length, length - answer - 2, material, more=answer)
    rng = np.random.default_rng([seed, index, 3])
    text = material.piece(int(rng.integers(len(material.text))), length - 1)
    cut = len(text) - answer
    start = np.asarray([material.start])
    return ContinuationCase(np.concatenate([start, text[:cut]]), text[cut:])


def repeated(ids: Sequence[int] | np.ndarray, n: int) -> float:
    """1 - distinct n-grams / n-grams: 0 if none occurs twice (seq-rep-n, arXiv 1908.04319)."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _check_room(probe: str, length: int, room: int, material: Material, more: int = 0) -> None:
    """`room` tokens of text between the parts, `more` in them."""
    if room < 1:
        raise LatteError(
            f"lengths: {length} tokens are too few for the {probe} probe, which needs at least"
            f" {length - room + 1}"
        )
    if room + more > len(material.text):
        raise LatteError(
            f"lengths: the {probe} probe at {length} tokens needs {room + more:,} tokens of text,"
            f" and there are {len(material.text):,}; give more with --corpus"
        )


def _ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _continuation(tokenizer: Any, prefix: str, text: str) -> tuple[int, ...]:
    """The ids of `text` as they come after `prefix`."""
    before, whole = _ids(tokenizer, prefix), _ids(tokenizer, prefix + text)
    return whole[len(before) :]
