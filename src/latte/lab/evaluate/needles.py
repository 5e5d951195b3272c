"""Tasks of finding facts in a long text, in the manner of RULER (arXiv 2404.06654), as `niah`.

Five tasks for the harness of :mod:`latte.lab.evaluate.tasks`, made from local text, at any length:

* ``niah_single``: a number that was said of a word is asked for; depths are spread evenly;
* ``niah_keys``: numbers were said of four words, and one of them is asked for;
* ``niah_values``: four numbers were said of one word, and all of them are asked for;
* ``niah_variables``: a variable gets a number, and four others get it one from another: which?
* ``niah_words``: the ten most common words of a list.

A case of length n has at most n tokens: prompt, chat template, and room for the answer. It has as
much text as fits. No prompt is cut: the harness's view of the model refuses one that does not fit.
Words, numbers and depths are those of (seed, task, index) at every length. The score, ``found``, is
the share of a case's answers that stand in the output. The answer is begun for the model.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from latte.errors import LatteError
from latte.lab.data.hub_datasets import dataset_of

GROUP = "niah"
TASKS = tuple(f"niah_{kind}" for kind in ("single", "keys", "values", "variables", "words"))
CASES = 24  # of a task and a length
SEVERAL = 4  # numbers of `keys` and `values`
CHAIN = 5  # variables
COMMON = 10  # words
ROOM = 16  # tokens of an answer, on top of twice the right answer's
# A sentence or a line, or its part within 400 characters.
SENTENCE = re.compile(
    r"\S(?:.{0,400}?(?:(?<=[.!?])(?=\s)|\n|\Z)|.{0,400}(?=\s|\Z)|.{0,400})\s*", re.S
)
QUALITIES = (
    "amber bitter brave calm clever cold dusty eager faint gentle golden green hollow humble "
    "idle jolly keen late lively lucky narrow noble odd pale plain proud quick quiet rough "
    "round sharp silent silver slow small solid steep tender vast wild"
).split()
THINGS = (
    "anchor apple basket bell bridge bucket candle castle chair cloud curtain drum feather "
    "fiddle garden glove hammer harbour helmet island jacket kettle ladder lantern meadow "
    "mirror needle orchard paddle pencil pillow ribbon river saddle shovel spoon table tower "
    "violin wagon"
).split()
HIDDEN = (
    "Some special magic numbers are hidden in the following text. Memorise them: I will ask you"
    " about them afterwards.\n\n"
)
NUMBER = "One of the special magic numbers for {key} is: {value}. "
VARIABLES = (
    "Memorise the chain of assignments of variables that is hidden in the following text.\n\n"
)
WORDS = (
    "Below is a numbered list of words. Some words appear more often than others. Memorise those"
    " that appear most often.\n\n"
)


@dataclass(frozen=True)
class Quiz:
    """What a case hides and asks, without the text around it.

    Attributes:
        before: What stands before the text.
        needles: Sentences to hide, in order.
        depths: Where: 0 opens the text, 1 ends it.
        question: What follows the text.
        begun: How the answer begins.
        answers: What an output is to contain.
    """

    before: str
    needles: tuple[str, ...]
    depths: tuple[float, ...]
    question: str
    begun: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """A prompt, how its answer begins, and what the output is to contain."""

    text: str
    begun: str
    answers: tuple[str, ...]


class Material:
    """Local text in pieces of about a sentence, with their numbers of tokens.

    Args:
        documents: Texts. Only as much of them is read as cases need.
        tokenizer: Tokenizer of the model.
        tokens: Largest number of tokens of a case.
    """

    def __init__(self, documents: Iterable[str], tokenizer: Any, tokens: int) -> None:
        self.tokenizer = tokenizer
        self.pieces: list[str] = []
        counts: list[int] = []
        left = 4 * tokens  # cases begin in different places
        for piece in itertools.chain.from_iterable(map(_sentences, documents)):
            self.pieces.append(piece)
            counts.append(self.count(piece))
            left -= counts[-1]
            if left <= 0:
                break
        self.counts = np.asarray(counts, np.int64)
        words = re.findall(r"\b[a-z]{4,10}\b", "".join(self.pieces))
        self.words = sorted(set(words))

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False))


def _sentences(document: str) -> Iterator[str]:
    """The pieces of a document, each with the white space after it; the last one ends a line."""
    text = document.strip()
    for match in SENTENCE.finditer(text):
        yield match[0] if match.end() < len(text) else f"{match[0]}\n"


class Prompts:
    """How a question becomes tokens: with or without a chat template.

    Args:
        tokenizer: Tokenizer of the model.
        chat: Whether the chat template is used.
    """

    def __init__(self, tokenizer: Any, chat: bool) -> None:
        self.tokenizer, self.chat = tokenizer, chat

    def count(self, text: str, begun: str) -> int:
        """Number of tokens that the model reads, a start token included."""
        if not self.chat:
            return 1 + len(self.tokenizer.encode(f"{text} {begun}", add_special_tokens=False))
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": begun}]
        whole = self.tokenizer.apply_chat_template(
            turns, tokenize=False, continue_final_message=True
        )
        return 1 + len(self.tokenizer.encode(whole, add_special_tokens=False))


def expanded(names: Sequence[str]) -> list[str]:
    """The tasks of this module among these names; the group's name stands for all of them."""
    found = [task for name in names for task in (TASKS if name == GROUP else [name])]
    return [task for task in dict.fromkeys(found) if task in TASKS]


def needle_tasks(
    names: Sequence[str],
    tokenizer: Any,
    documents: Iterable[str],
    lengths: Sequence[int],
    *,
    cases: int = CASES,
    seed: int = 0,
    chat: bool = False,
) -> dict[str, Any]:
    """The harness's tasks of these names, one for each length, such as ``niah_single_4096``.

    Args:
        names: Some of :data:`TASKS`.
        tokenizer: Tokenizer of the model.
        documents: Texts to hide needles in.
        lengths: Largest numbers of tokens of prompt and answer.
        cases: Number of cases of a task and a length.
        seed: Seed of words, numbers and places.
        chat: Whether prompts are messages in the tokenizer's chat template.

    Raises:
        LatteError: There is no template, too little text, or a length has no room for a case.
    """
    if chat and not tokenizer.chat_template:
        raise LatteError("chat-template: the tokenizer has none")
    material = Material(documents, tokenizer, max(lengths))
    prompts = Prompts(tokenizer, chat)
    cells = list(itertools.product(names, lengths))
    for name, length in cells:  # one case of each: all of them take minutes in long texts
        make_cases(name, material, prompts, length, cases=1, seed=seed)
    found = {}
    for name, length in cells:
        made, output = make_cases(name, material, prompts, length, cases=cases, seed=seed)
        task = f"{name}_{length}"
        found[task] = _task(task, made, output)
    return found


def make_cases(
    name: str, material: Material, prompts: Prompts, length: int, *, cases: int, seed: int
) -> tuple[list[Case], int]:
    """The cases of a task at a length, and the number of tokens that an output may have.

    Raises:
        LatteError: There is no room, or too little text.
    """
    draws = [np.random.default_rng([seed, TASKS.index(name), i]) for i in range(cases)]
    is_list = name == "niah_words"
    quizzes = [
        _list_of_words(material, rng) if is_list else _quiz(name, rng, (i + 0.5) / cases)
        for i, rng in enumerate(draws)
    ]
    answers = (", ".join(quiz.answers) for quiz in quizzes)
    output = 2 * max(map(material.count, answers)) + ROOM
    found = []
    for quiz, rng in zip(quizzes, draws, strict=True):
        where = f"{name} at {length:,} tokens"
        fill = _listed if is_list else _hidden
        found.append(fill(where, quiz, material, prompts, length - output, rng))
    return found, output


def _quiz(name: str, rng: np.random.Generator, depth: float) -> Quiz:
    """What a case of a task hides and asks."""

    def number() -> str:
        return str(rng.integers(1_000_000, 10_000_000))

    if name == "niah_variables":
        letters = np.array(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
        chain: list[str] = []
        while len(chain) < CHAIN:
            variable = "".join(rng.choice(letters, 5))
            chain += [variable] * (variable not in chain)
        value = str(rng.integers(10_000, 100_000))
        given = [value, *(f"VAR {variable}" for variable in chain)]
        needles = [f"VAR {new} = {old}. " for new, old in zip(chain, given, strict=False)]
        depths = sorted(rng.random(CHAIN).tolist())
        asked = (
            f"\n\nFind all variables that are assigned the value {value} in the text above,"
            " directly or by way of other variables."
        )
        begun = f"{CHAIN} variables are assigned the value {value}:"
        return Quiz(VARIABLES, tuple(needles), tuple(depths), asked, begun, tuple(chain))
    pairs = rng.permutation(len(QUALITIES) * len(THINGS))[:SEVERAL].tolist()
    keys = [f"{QUALITIES[i % len(QUALITIES)]} {THINGS[i // len(QUALITIES)]}" for i in pairs]
    values = tuple(number() for _ in range(SEVERAL))
    depths = rng.random(SEVERAL).tolist()
    if name == "niah_single":
        keys, values, depths = keys[:1], values[:1], [depth]
    elif name == "niah_values":
        keys = keys[:1] * SEVERAL
    hidden = zip(keys, values, strict=True)
    needles = [NUMBER.format(key=key, value=value) for key, value in hidden]
    answers = values if name == "niah_values" else values[:1]
    many = len(answers) > 1
    what = f"are all the special magic numbers for {keys[0]}" if many else (
        f"is the special magic number for {keys[0]}")  # fmt: skip
    begun = f"The special magic number{'s' * many} for {keys[0]} {'are' if many else 'is'}:"
    asked = f"\n\nWhat {what} in the text above?"
    return Quiz(HIDDEN, tuple(needles), tuple(depths), asked, begun, answers)


def _hidden(
    where: str,
    quiz: Quiz,
    material: Material,
    prompts: Prompts,
    most: int,
    rng: np.random.Generator,
) -> Case:
    """The quiz in as much text as fits into ``most`` tokens. ``where`` names the case in errors."""
    bare = f"{quiz.before}{''.join(quiz.needles)}{quiz.question}"
    left, total = most - prompts.count(bare, quiz.begun), int(material.counts.sum())
    if left > total:
        raise LatteError(
            f"lengths: {where} needs {left:,} tokens of text, and the corpus has {total:,}: name"
            " more in --corpus"
        )
    begin = int(rng.integers(len(material.pieces))) if material.pieces else 0
    turned = np.roll(material.counts, -begin)
    pieces = material.pieces[begin:] + material.pieces[:begin]
    count = int(np.searchsorted(turned.cumsum(), left, side="right"))
    while count > 0:
        parts = pieces[:count]
        for depth, needle in sorted(zip(quiz.depths, quiz.needles, strict=True), reverse=True):
            parts.insert(round(depth * count), needle)
        text = f"{quiz.before}{''.join(parts).rstrip()}{quiz.question}"
        over = prompts.count(text, quiz.begun) - most
        if over <= 0:
            return Case(text, quiz.begun, quiz.answers)
        count -= max(1, over // int(turned.max()))
    raise LatteError(f"lengths: {where} has no room for a sentence beside its question")


def _list_of_words(material: Material, rng: np.random.Generator) -> Quiz:
    """The words of a list, the common ones first; all words of the text come as needles."""
    words = tuple(material.words[i] for i in rng.permutation(len(material.words)))
    question = f"\n\nWhat are the {COMMON} most common words in the list above?"
    begun = f"The {COMMON} words that appear most often are:"
    return Quiz(WORDS, words, (), question, begun, words[:COMMON])


def _listed(
    where: str,
    quiz: Quiz,
    material: Material,
    prompts: Prompts,
    most: int,
    rng: np.random.Generator,
) -> Case:
    """A list in which ten words appear about ten times as often as each of the others."""
    rare = quiz.needles[COMMON:]
    left = most - prompts.count(f"{quiz.before}{quiz.question}", quiz.begun)
    sample = quiz.needles[:100]
    each = material.count(_numbered(sample)) / max(1, len(sample))
    count = int(max(0, left) / max(1.0, each))
    order = rng.random(count)  # of the entries: the same for each try
    while (often := count // (3 * COMMON)) >= 3:
        seldom = max(1, often // 10)
        needed = -(-(count - COMMON * often) // seldom)
        if needed > len(rare):
            raise LatteError(
                f"lengths: {where} needs {COMMON + needed} different words, and the corpus has"
                f" {len(quiz.needles)}: name more text in --corpus"
            )
        entries = (list(quiz.answers) * often + list(rare[:needed]) * seldom)[:count]
        mixed = [entries[i] for i in np.argsort(order[:count], kind="stable")]
        text = f"{quiz.before}{_numbered(mixed)}{quiz.question}"
        over = prompts.count(text, quiz.begun) - most
        if over <= 0:
            return Case(text, quiz.begun, quiz.answers)
        count -= max(1, int(over / (2 * each)))
    raise LatteError(f"lengths: {where} has no room for a list of {10 * COMMON} words")


def _numbered(words: Sequence[str]) -> str:
    """`1. river 2. stone`."""
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def found(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The share of a case's answers that the output contains."""
    said = results[0].lower()
    return {"found": float(np.mean([answer.lower() in said for answer in doc["answers"]]))}


def _task(name: str, made: Sequence[Case], tokens: int) -> Any:
    """The harness's task of these cases, whose outputs have up to this number of tokens."""
    from lm_eval.api.task import ConfigurableTask

    rows = [
        {
            **{"text": case.text, "begun": case.begun, "answers": list(case.answers)},
            "answer": ", ".join(case.answers),
        }
        for case in made
    ]

    class Needles(ConfigurableTask):
        """A task whose cases were made here."""

        def download(self, *_: Any, **__: Any) -> None:
            self.dataset = {"test": dataset_of(rows)}

    return Needles(
        config={
            **{"task": name, "dataset_path": "made from local text", "test_split": "test"},
            **{"output_type": "generate_until", "doc_to_text": "text", "doc_to_target": "answer"},
            **{"gen_prefix": "begun", "process_results": found, "num_fewshot": 0},
            "metric_list": [{"metric": "found", "aggregation": "mean", "higher_is_better": True}],
            "generation_kwargs": {"do_sample": False, "max_gen_toks": tokens, "until": []},
            "metadata": {"version": 1.0},
        }
    )
