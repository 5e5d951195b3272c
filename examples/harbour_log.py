"""A document of about 6,000 tokens with six facts, and a question about each of them.

The document is the log of a harbour: sentences that a seed puts together from short lists. Two
facts stand at the beginning, two in the middle and two at the end. Each question is asked by
itself, from the state after the document.

    python -m examples.harbour_log MODEL [MODEL ...] --seeds 0 1 2

prints which questions each model answers rightly, for each seed's log.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LINES = 330  # number of sentences beside the facts
PARAGRAPH = 6  # sentences
ANSWER_TOKENS = 24


@dataclass(frozen=True)
class Fact:
    """A sentence of the document.

    Attributes:
        place: Where it stands: 0 begins the document, 1 ends it.
        sentence: The sentence.
        question: What is asked about it.
        answer: The words that a right answer has, in any case.
    """

    place: float
    sentence: str
    question: str
    answer: str


FACTS = (
    Fact(
        0.0,
        "The pass code of the harbour office is 74193.",
        "What is the pass code of the harbour office?",
        "74193",
    ),
    Fact(
        0.04,
        "The lighthouse keeper is called Agnes Moller.",
        "What is the lighthouse keeper called?",
        "Agnes",
    ),
    Fact(
        0.48,
        "The old ferry was sold to a farmer for 850 crowns.",
        "For how many crowns was the old ferry sold?",
        "850",
    ),
    Fact(
        0.52,
        "The spare key lies under the blue flowerpot.",
        "Where does the spare key lie?",
        "flowerpot",
    ),
    Fact(
        0.96,
        "The next meeting of the council is on 14 October.",
        "On which day is the next meeting of the council?",
        "14 October",
    ),
    Fact(
        1.0,
        "The harbour cat is named Pepper.",
        "What is the harbour cat named?",
        "Pepper",
    ),
)
FORMS = (
    "On {day} the {ship} came in from {town} and unloaded {count} {goods} at the {place}.",
    "The weather on {day} was {weather}, and nobody went out before noon.",
    "Two men from {town} repaired the fence beside the {place}.",
    "The {ship} left for {town} with {count} {goods} on board.",
    "In the evening the crew of the {ship} ate at the inn near the {place}.",
    "Somebody from {town} asked for {goods}, but there were none left.",
    "The morning of {day} was {weather}, so the {ship} stayed at the {place}.",
    "A letter from {town} said that {count} {goods} would come by {day}.",
)
WORDS = {
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
    "ship": "Albatross Hermine Northstar Petrel Swallow Tern Valiant Mermaid".split(),
    "town": "Bergen Lisbon Hull Antwerp Gdansk Cork Rouen Riga".split(),
    "goods": (
        *("barrels of salt", "crates of apples", "sacks of flour", "bales of wool"),
        *("boxes of nails", "rolls of canvas", "tons of coal", "baskets of herring"),
    ),
    "place": (
        *("north pier", "fish market", "old crane"),
        *("customs house", "dry dock", "stone quay"),
    ),
    "weather": ("calm", "foggy", "cold and clear", "windy", "mild", "grey with light rain"),
}


def document(lines: int, seed: int = 0) -> str:
    """The log, with this number of sentences beside the facts."""
    draw = random.Random(seed)

    def sentence() -> str:
        words = {name: draw.choice(choice) for name, choice in WORDS.items()}
        return draw.choice(FORMS).format(**words, count=draw.randint(2, 60))

    found: list[str] = []
    for number in range(lines + 1):
        found += [fact.sentence for fact in FACTS if round(fact.place * lines) == number]
        found += [sentence()] * (number < lines)
    parts = (found[i : i + PARAGRAPH] for i in range(0, len(found), PARAGRAPH))
    return "\n\n".join(map(" ".join, parts))


def answers(model: Any, tokenizer: Any, file: Path) -> list[str]:
    """Greedy answers to all questions. The document is read from the file, or its state is."""
    from latte.lab.evaluate.chat import Chat
    from latte.lab.evaluate.documents import read_document
    from latte.lab.evaluate.generate import generate

    read = read_document(model, tokenizer, file.read_text(encoding="utf-8"), file)
    greedy: dict[str, Any] = {"temperature": 0, "max_new_tokens": ANSWER_TOKENS}
    if tokenizer.chat_template is not None:
        chat = Chat(model, tokenizer, document=read, **greedy)
    found = []
    for fact in FACTS:
        if tokenizer.chat_template is not None:
            chat.clear()
            said = chat.say(fact.question)
        else:
            prompt = f"\n\nQuestion: {fact.question}\nAnswer:"
            said = generate(model, tokenizer, prompt, state=read.cache(), stream=False, **greedy)
            said = said.strip().partition("\n")[0]
        found.append(said.strip())
    return found


def is_right(fact: Fact, answer: str) -> bool:
    """Whether an answer has the fact."""
    return all(word in answer.lower() for word in fact.answer.lower().split())


def main(arguments: list[str] | None = None) -> int:
    """Print, for each model and seed, how many questions are answered rightly, and which."""
    from latte.lab.command_line import OneLineParser
    from latte.lab.evaluate.checkpoint import load_checkpoint

    parser = OneLineParser(prog="python -m examples.harbour_log", description=__doc__,
                           formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a folder, or a GGUF file")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the logs (0)")
    options = parser.parse_args(arguments)
    for place in options.models:
        model, tokenizer = load_checkpoint(place)
        for seed in options.seeds:
            with tempfile.TemporaryDirectory() as folder:
                log = Path(folder) / "log.txt"
                log.write_text(document(LINES, seed), encoding="utf-8")
                found = zip(FACTS, answers(model, tokenizer, log), strict=True)
            right = [fact.answer for fact, said in found if is_right(fact, said)]
            print(f"{place}, seed {seed}: {len(right)} of {len(FACTS)}: {', '.join(right)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
