"""Passkey: a number hidden in natural text, and asked for at the end (arXiv 2305.16300).

The text stands in a user's message where the tokenizer has a chat template. The assistant's answer
is begun for the model, `The pass key is`, so that what is measured is whether it finds the number
and not how it answers. A case of `length` n takes n tokens in all, start and answer included; all
cases of a length are equally long. Names, numbers and surroundings are those of (seed, index) at
every length and depth. Shape suffixes: P prompt tokens, A answer tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from experiments.probes.questions import Material
from experiments.probes.scores import follow, read
from latte.errors import LatteError

INTRODUCTION = (
    "There is a pass key hidden in the following text. Find it and remember it; I will ask you"
    " about it.\n\n"
)
STATEMENT = "\nThe pass key is {number}. Remember it. {number} is the pass key.\n"
QUESTION = "\n\nWhat is the pass key?"
ANSWER = "The pass key is"
PLACE = "\ue000"  # a character of private use: where the text goes


@dataclass(frozen=True)
class Frame:
    """What stands around the text, as token ids; `chat`: made by the tokenizer's template."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    chat: bool


@dataclass(frozen=True)
class PasskeyCase:
    """`prompt` (P,), ending with the begun answer, and `answer` (A,), the number's tokens."""

    prompt: np.ndarray
    answer: np.ndarray


def make_frame(tokenizer: Any, start: int, *, chat: bool | None = None) -> Frame:
    """The words around the text; by the chat template if there is one, or as `chat` says.

    Raises:
        LatteError: `chat` with a tokenizer that has no template.
    """
    chat = bool(tokenizer.chat_template) if chat is None else chat
    if not chat:
        before, after = [start, *ids_of(tokenizer, INTRODUCTION)], f"{QUESTION}\n{ANSWER}"
        return Frame(tuple(before), tuple(ids_of(tokenizer, after)), False)
    if not tokenizer.chat_template:
        raise LatteError("chat: the tokenizer has no chat template")
    message = {"role": "user", "content": f"{INTRODUCTION}{PLACE}{QUESTION}"}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    first, _, second = text.partition(PLACE)
    return Frame(tuple(ids_of(tokenizer, first)), tuple(ids_of(tokenizer, second + ANSWER)), True)


def passkey_case(
    tokenizer: Any,
    material: Material,
    frame: Frame,
    seed: int,
    index: int,
    *,
    length: int,
    depth: float,
) -> PasskeyCase:
    """A number of five digits at `depth` (0: opens the text, 1: ends it).

    Raises:
        LatteError: the length leaves no room, or the text is shorter.
    """
    rng = np.random.default_rng([seed, index, 5])
    origin = int(rng.integers(len(material.text)))
    statement, answer = number_ids(tokenizer, rng)
    room = length - len(frame.before) - len(statement) - len(frame.after) - len(answer)
    if not 1 <= room <= len(material.text):
        raise LatteError(
            f"lengths: a passkey at {length} tokens has room for {room} tokens of text; expected 1"
            f" to {len(material.text):,}, which there are"
        )
    text = material.piece(origin, room)
    cut = round(depth * room)
    prompt = [*frame.before, *text[:cut], *statement, *text[cut:], *frame.after]
    return PasskeyCase(np.asarray(prompt, np.int64), np.asarray(answer, np.int64))


def number_ids(tokenizer: Any, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """(the statement, the answer) of a number that is spelt in as many tokens as 12345 is."""

    def spelt(number: int) -> tuple[list[int], list[int]]:
        begun, whole = (ids_of(tokenizer, ANSWER + more) for more in ("", f" {number}"))
        return ids_of(tokenizer, STATEMENT.format(number=number)), whole[len(begun) :]

    lengths = [len(ids) for ids in spelt(12345)]
    for number in rng.integers(10_000, 100_000, size=1000):
        found = spelt(int(number))
        if [len(ids) for ids in found] == lengths:
            return found
    raise LatteError("passkey: this tokenizer spells no other number in as many tokens as 12345")


def score_passkeys(
    model: nn.Module, batch: Sequence[PasskeyCase], segment: int
) -> dict[str, list[float]]:
    """`exact`: the greedy answer is the number, all its tokens; `digits`: the share of its tokens
    that the likeliest one is, the right ones before it given; `nll`: nats a token of the number.
    """
    prompts, answers = (
        torch.from_numpy(np.stack([getattr(case, name) for case in batch]))
        for name in ("prompt", "answer")
    )
    logits_RV, cache = read(model, prompts, segment)
    nll_RA, right_RA = follow(model, logits_RV, cache, answers)
    return {
        "exact": right_RA.all(1).double().tolist(),
        "digits": right_RA.double().mean(1).tolist(),
        "nll": nll_RA.double().mean(1).tolist(),
    }


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))
