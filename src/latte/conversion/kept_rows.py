"""Rows of tokens in which facts are said, and asked about much later.

Which tokens a base looks at again long after they were read is seen in such rows, and hardly in
plain text. A row is natural text or code in which facts stand: sentences, tables, lists of keys and
values, constants. Questions with their answers follow, or a stretch of the text is quoted again.
Some rows are plain text. Every row is a pure function of its text, the seed and its number.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from latte.errors import LatteError

PLACE = "\ue000"  # a character of private use: where the text goes in a chat
LETTERS_A_TOKEN = 12  # at most, of code

NAMES = (
    "Anna Arthur Carlos Chen David Elena Farid Grace Hana Ivan Julia Karim Laura Mateo Nadia Oscar"
    " Paula Ravi Sofia Tomas Ursula Viktor Wanda Yusuf Zoe"
).split()
CITIES = (
    "Lisbon Oslo Cairo Lima Quito Delhi Kyoto Boston Dublin Vienna Naples Prague Tunis Riga Perth"
    " Leeds Turin Malaga Izmir Basel"
).split()
THINGS = (
    "lamp ladder kettle violin mirror carpet helmet basket candle hammer engine printer camera"
    " bridge tunnel statue boat tractor clock piano"
).split()
ADJECTIVES = "old red northern broken second small golden quiet new wooden heavy spare".split()  # noqa: SIM905
GROUPS = "hotel museum company school hospital library team bakery laboratory farm".split()  # noqa: SIM905
FOODS = "rice soup dumplings lentils pancakes noodles cherries olives cheese".split()  # noqa: SIM905
COLOURS = "red blue green yellow purple orange brown grey white black".split()  # noqa: SIM905
WORKS = "baker lawyer nurse painter sailor teacher farmer judge pilot tailor chemist".split()  # noqa: SIM905
PLACES = "cellar attic garden stable kitchen barn chapel drawer garage office".split()  # noqa: SIM905
MONTHS = "January March April June July August October December".split()  # noqa: SIM905
UNITS = "km kg metres litres degrees miles hours tons percent".split()  # noqa: SIM905
SYLLABLES = "bra ven tor mi lo ka zen du pel ri sha nor vik ta gu el ost fa wen cor".split()  # noqa: SIM905

# What is known of a subject, and the kind of its value.
ATTRIBUTES = {
    "telephone number": "phone", "room number": "number", "e-mail address": "mail",
    "price": "money", "date of birth": "date", "favourite dish": "food", "owner": "name",
    "manager": "name", "order number": "code", "licence plate": "code", "speed limit": "measure",
    "departure time": "time", "population": "number", "founder": "name", "colour": "colour",
    "weight": "measure", "access code": "digits", "account number": "digits",
    "nickname": "made", "birthplace": "city", "profession": "work", "serial number": "code",
    "deadline": "date", "budget": "money", "hiding place": "place", "year of birth": "year",
    "new address": "address", "code name": "made", "password of the computer": "made",
    "best friend": "name", "opening time": "time", "version": "version", "lucky number": "digits",
}  # fmt: skip
SAYINGS = (
    "The {what} of {who} is {value}.",
    "The {what} of {who} is {value}. Do not forget it.",
    "As for {who}, the {what} is {value}.",
    "It was known that {who} had the {what} {value}.",
    "Please write down the {what} of {who}: {value}.",
    '"The {what} of {who}? It is {value}," she said.',
    "Note: {who}, {what}: {value}.",
    "We were told that the {what} of {who} is {value}, and nobody doubted it.",
    "Since last week {value} is the {what} of {who}.",
)
ASKINGS = (
    ("What is the {what} of {who}?", "The {what} of {who} is {value}."),
    ("What is the {what} of {who}?", "{value}"),
    ("I forgot the {what} of {who}. Can you tell me?", "It is {value}."),
    ("According to the text, what is the {what} of {who}?", "The {what} is {value}."),
    ("Tell me the {what} of {who}.", "{value}"),
    ("Whose {what} is {value}?", "{who}"),
)
# Said, asked, answered.
EVENTS = (
    ("{name} lives in {city} and works as a {work}.", "Where does {name} live?", "{city}"),
    ("{name}, who is from {city}, became a {work}.", "What is {name}'s profession?", "{work}"),
    ("The train to {city} leaves at {time}.", "When does the train to {city} leave?", "{time}"),
    ("Order {code} was sent to {city}.", "Which order was sent to {city}?", "{code}"),
    ("{name} hid the {thing} in the {place}.", "Where is the {thing}?", "In the {place}"),
    ("The firm {made} was founded by {name} in {year}.", "Who founded {made}?", "{name}"),
    ("{name} paid {money} for the {thing}.", "How much did {name} pay?", "{money}"),
    ("On {date} {name} bought {number} {food}.", "When did {name} buy {food}?", "On {date}"),
    ("{name} speaks {number} languages.", "How many languages does {name} speak?", "{number}"),
    ("The word for {thing} in their language is {made}.", "What is their word for {thing}?",
     "{made}"),
    ("{name} told everyone to meet at {time} in the {place}.", "Where do they meet, and when?",
     "In the {place}, at {time}"),
)  # fmt: skip
OPENINGS = ("Read this text.", "Here is a document.", "Please read the following carefully.", "")


class AskedRow(NamedTuple):
    """Token ids (T,), and the place where the questions begin; T if nothing is asked."""

    ids: Tensor
    asked: int


class Fact(NamedTuple):
    said: str
    question: str
    answer: str


def kept_rows(
    tokenizer: Any, text: Tensor, count: int, length: int, *, seed: int = 0
) -> list[AskedRow]:
    """Rows of at most ``length`` tokens, in which something is asked about later, or nothing is.

    Args:
        tokenizer: The base's tokeniser. Every second row is a chat if it has a template.
        text: Token ids (N,) of natural text. Special tokens are left out.
        count: Number of rows.

    Raises:
        LatteError: There is no text, or the length leaves it no room.
    """
    special = torch.tensor(sorted(tokenizer.all_special_ids), dtype=torch.long)
    text = text[~torch.isin(text, special)]
    if not len(text):
        raise LatteError("kept_rows: expected some text, got none")
    made = _Rows(tokenizer, text.numpy(), length, seed)
    return [made.row(number) for number in range(count)]


class _Rows:
    def __init__(self, tokenizer: Any, text: np.ndarray, length: int, seed: int) -> None:
        self.tokenizer, self.text, self.length, self.seed = tokenizer, text, length, seed
        starts = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        self.start = [index for index in starts if index is not None][:1]

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def row(self, number: int) -> AskedRow:
        rng = np.random.default_rng([self.seed, number])
        kind = number % 8
        if kind == 5:
            text = self.code(rng)
        else:
            places = np.arange(self.length) + rng.integers(len(self.text))
            text = self.text.take(places, mode="wrap")
        if kind == 7:
            return self.joined(self.start, text[: self.length - len(self.start)], [])
        if kind == 6:
            return self.quoted(rng, text)
        return self.asked(rng, text, chat=number % 2 == 0 and bool(self.tokenizer.chat_template))

    def quoted(self, rng: np.random.Generator, text: np.ndarray) -> AskedRow:
        """A stretch of the text is read again at the end."""
        stretch = int(rng.integers(8, max(9, min(128, self.length // 4))))
        said = self.ids(str(rng.choice(["\n\nOnce more: ", "\n\nThe text says: ", "\n\n"])))
        room = self.length - len(self.start) - len(said) - stretch
        if room < stretch:
            raise LatteError(f"kept_rows: expected rows of more tokens, got {self.length}")
        begin = int(rng.integers(0, max(1, room // 2)))
        again = text[begin : begin + stretch]
        return self.joined(self.start, text[:room], [*said, *again])

    def asked(self, rng: np.random.Generator, text: np.ndarray, chat: bool) -> AskedRow:
        """Facts stand in the text, and all are asked about at the end."""
        number, room = int(rng.integers(3, 4 + self.length // 200)), 0
        while room < len(text) // 4:  # the rest is what is said and asked
            if number == 0:
                return self.quoted(rng, text)
            parts, facts = facts_of(rng, number)
            before, after = self.framed(rng, facts, chat)
            said = []
            for part in parts:
                inline = "\n" not in part and rng.random() < 0.4
                said.append(self.ids(f" {part}" if inline else f"\n\n{part}\n\n"))
            room = self.length - len(before) - len(after) - sum(map(len, said))
            number //= 2
        cuts = np.sort(rng.integers(0, room, len(said)))
        body: list[int] = [*text[: cuts[0]]]
        for ids, begin, end in zip(said, cuts, [*cuts[1:], room], strict=True):
            body += [*ids, *text[begin:end]]
        return self.joined(before, body, after)

    def joined(self, before: Sequence[int], body: Any, after: Sequence[int]) -> AskedRow:
        ids = torch.tensor([*before, *map(int, body), *map(int, after)], dtype=torch.long)
        return AskedRow(ids, len(ids) - len(after))

    def framed(
        self, rng: np.random.Generator, facts: Sequence[Fact], chat: bool
    ) -> tuple[list[int], list[int]]:
        """What stands before the text, and after it: all questions with their answers."""
        opening = str(rng.choice(OPENINGS))
        if not chat:
            first, second = (("Question: ", "Answer: "), ("Q: ", "A: "), ("", ""))[rng.integers(3)]
            after = "".join(f"\n\n{first}{x.question}\n{second}{x.answer}" for x in facts)
            return [*self.start, *self.ids(f"{opening}\n\n" * bool(opening))], self.ids(after)
        message = f"{opening}\n\n{PLACE}".strip()
        messages = [{"role": "user", "content": message}]
        if apart := rng.random() < 0.5:
            messages.append({"role": "assistant", "content": "I have read it."})
        for number, fact in enumerate(facts):
            if number or apart:
                messages.append({"role": "user", "content": fact.question})
            else:
                messages[0]["content"] += f"\n\n{fact.question}"
            messages.append({"role": "assistant", "content": fact.answer})
        whole = self.tokenizer.apply_chat_template(messages, tokenize=False)
        before, _, after = whole.partition(PLACE)
        return self.ids(before), self.ids(after)

    def code(self, rng: np.random.Generator) -> np.ndarray:
        """Token ids of files of Python's standard library."""
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py"))
        found: list[int] = []
        while len(found) < self.length:
            file = files[rng.integers(len(files))]
            text = file.read_text(encoding="utf-8")[: LETTERS_A_TOKEN * self.length]
            found += self.ids(text)
        return np.asarray(found)


# ---- facts


def facts_of(rng: np.random.Generator, number: int) -> tuple[list[str], list[Fact]]:
    """What is said, in parts that stand alone, and what is asked of it, in another order."""
    values = _values(rng)
    parts, facts = [], []
    for _ in range(number):
        fact = event(rng, values) if rng.random() < 0.3 else sentence(rng, values)
        parts.append(fact.said)
        facts.append(fact)
    if rng.random() < 0.7:
        said, asked = block(rng, values)
        parts.append(said)
        facts += asked
    order = rng.permutation(len(facts))
    return [parts[i] for i in rng.permutation(len(parts))], [facts[i] for i in order]


def _values(rng: np.random.Generator) -> Callable[[str], str]:
    """A function that draws a value of a kind."""

    def letters(count: int) -> str:
        return "".join(rng.choice(list("ABCDEFGHKLMNPRSTUVWXYZ"), count))

    def digits(count: int) -> str:
        return "".join(map(str, rng.integers(0, 10, count)))

    def made() -> str:
        return "".join(rng.choice(SYLLABLES, rng.integers(2, 4))).capitalize()

    def one_of(words: Sequence[str]) -> Callable[[], str]:
        return lambda: str(rng.choice(words))

    def name() -> str:
        return f"{rng.choice(NAMES)} {made()}" if rng.random() < 0.6 else str(rng.choice(NAMES))

    kinds: dict[str, Callable[[], str]] = {
        "name": name,
        "made": made,
        "digits": lambda: str(rng.integers(1, 10)) + digits(int(rng.integers(2, 7))),
        "number": lambda: str(int(10 ** rng.uniform(0.4, 5))),
        "phone": lambda: "-".join(digits(3) for _ in range(3)),
        "code": lambda: letters(int(rng.integers(1, 4))) + "-" * rng.integers(2) + digits(3),
        "money": lambda: f"{int(10 ** rng.uniform(1, 5))} {rng.choice(['dollars', 'euros'])}",
        "time": lambda: f"{rng.integers(1, 24)}:{rng.integers(10, 60)}",
        "year": lambda: str(rng.integers(1700, 2030)),
        "date": lambda: f"{rng.integers(1, 29)} {rng.choice(MONTHS)} {rng.integers(1700, 2030)}",
        "measure": lambda: f"{rng.integers(2, 900)} {rng.choice(UNITS)}",
        "mail": lambda: f"{made().lower()}{rng.integers(99)}@{made().lower()}.org",
        "address": lambda: f"{rng.integers(1, 300)} {made()} Street, {rng.choice(CITIES)}",
        "version": lambda: ".".join(map(str, rng.integers(0, 20, 3))),
        **{
            kind: one_of(words)
            for kind, words in (
                ("city", CITIES), ("thing", THINGS), ("food", FOODS), ("colour", COLOURS),
                ("work", WORKS), ("place", PLACES),
            )
        },
    }  # fmt: skip
    return lambda kind: kinds[kind]()


def subject(rng: np.random.Generator, values: Callable[[str], str]) -> str:
    kind = rng.integers(5)
    if kind == 0:
        return f"the {rng.choice(ADJECTIVES)} {values('thing')}"
    if kind == 1:
        return f"the {values('made')} {rng.choice(GROUPS)}"
    return (values("name"), values("name"), f"Project {values('made')}")[kind - 2]


def sentence(rng: np.random.Generator, values: Callable[[str], str]) -> Fact:
    what = str(rng.choice(list(ATTRIBUTES)))
    words = {"what": what, "who": subject(rng, values), "value": values(ATTRIBUTES[what])}
    return Fact(SAYINGS[rng.integers(len(SAYINGS))].format(**words), *asking(rng, words))


def asking(rng: np.random.Generator, words: dict[str, str]) -> tuple[str, str]:
    question, answer = ASKINGS[rng.integers(len(ASKINGS))]
    return question.format(**words), answer.format(**words)


def event(rng: np.random.Generator, values: Callable[[str], str]) -> Fact:
    kinds = "name city work time code thing place made year money date number food".split()  # noqa: SIM905
    words = {kind: values(kind) for kind in kinds}
    return Fact(*(part.format(**words) for part in EVENTS[rng.integers(len(EVENTS))]))


def block(rng: np.random.Generator, values: Callable[[str], str]) -> tuple[str, list[Fact]]:
    """A table, a list or constants in code, and questions about some of its cells."""
    columns = [str(x) for x in rng.permutation(list(ATTRIBUTES))[: rng.integers(1, 4)]]
    table = {}
    for _ in range(rng.integers(2, 6)):
        table[subject(rng, values)] = {what: values(ATTRIBUTES[what]) for what in columns}
    cells = [
        {"what": what, "who": who, "value": value}
        for who, row in table.items()
        for what, value in row.items()
    ]
    kind = rng.integers(5)
    if kind == 0:
        rows = [["name", *columns], ["---"] * (1 + len(columns))]
        rows += [[who, *row.values()] for who, row in table.items()]
        said = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    elif kind == 1:
        rows = [["name", *columns], *([who, *row.values()] for who, row in table.items())]
        said = "\n".join(",".join(row) for row in rows)
    elif kind == 2:
        said = json.dumps(table, indent=2 if rng.random() < 0.5 else None)
    elif kind == 3:
        said = "\n".join(
            f"{who}_{what}".replace(" ", "_").upper() + f' = "{value}"'
            for who, row in table.items()
            for what, value in row.items()
        )
    else:
        said = "\n".join(f"- {x['who']}, {x['what']}: {x['value']}" for x in cells)
    chosen = rng.permutation(len(cells))[: rng.integers(1, 4)]
    return said, [Fact("", *asking(rng, cells[i])) for i in chosen]
