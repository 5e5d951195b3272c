"""Facts in a long text, all asked about after one reading of it.

As the probe `retrieval` (`experiments.probes`): `The secret word of NAME is WORD.` stands at a
depth of a natural text with other such statements. What differs is what one reading is used for. A
text has a statement at every depth, and is asked about each of them from the state after it. Texts
come in pairs, which differ in the asked words alone: each is the control of the other, and both are
asked. For two depths a case costs a quarter of the reading. Shape suffixes: R = 2 the texts of a
pair, P text tokens, A answer tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from experiments.probes.questions import Material
from experiments.probes.scores import DISTRACTORS, Scores, follow, read
from latte.errors import LatteError


@dataclass(frozen=True)
class FactTexts:
    """A pair of texts.

    Attributes:
        texts: (2, P) int64, start token included.
        questions: of each depth the ids of its question.
        words: of each depth the words (2, A) that the two texts say.
    """

    texts: np.ndarray
    questions: dict[float, np.ndarray]
    words: dict[float, np.ndarray]


def fact_texts(
    material: Material, seed: int, index: int, *, length: int, depths: Sequence[float]
) -> FactTexts:
    """The pair of a number. The longest question and its answer end at `length` tokens.

    Three other statements stand at random depths, or fewer where more than one depth is asked
    about: a text has four statements, or as many as there are depths.

    Raises:
        LatteError: the length leaves no room, or the text or the names are too few.
    """
    rng = np.random.default_rng([seed, index, 6])
    others = max(0, 1 + DISTRACTORS - len(depths))
    if len(depths) + others > len(material.statements):
        raise LatteError(f"depths: expected at most {len(material.statements)}, got {len(depths)}")
    people = [material.statements[i] for i in rng.permutation(len(material.statements))]
    words = np.asarray(material.words)[rng.permutation(len(material.words))]
    origin, places = int(rng.integers(len(material.text))), rng.uniform(size=others)
    if len(words) < 2 * len(depths) + others:
        raise LatteError(f"depths: expected at most {(len(words) - others) // 2} in one text")

    def said(who: int, word: np.ndarray) -> list[int]:
        named = [*material.line, *people[who], *word.tolist()]
        return [*named, *material.stop, *material.line]

    where = [*depths, *places]  # of each statement; those asked about are the first
    pairs = {depth: words[2 * i : 2 * i + 2] for i, depth in enumerate(depths)}
    statements = [[said(i, word) for word in pair] for i, pair in enumerate(pairs.values())]
    left = words[2 * len(depths) :]
    statements += [[said(len(depths) + i, left[i])] * 2 for i in range(others)]
    questions = {
        depth: np.asarray([*material.line, *people[i]], np.int64) for i, depth in enumerate(depths)
    }
    room = length - 1 - words.shape[1] - max(map(len, questions.values()))
    room -= sum(len(pair[0]) for pair in statements)
    if not 1 <= room <= len(material.text):
        raise LatteError(
            f"lengths: facts at {length} tokens have room for {room} tokens of text; expected 1 to"
            f" {len(material.text):,}, which there are"
        )
    text = material.piece(origin, room)
    texts = []
    for which in range(2):
        ids, done = [material.start], 0
        for i in np.argsort(where, kind="stable"):
            place = round(where[i] * room)
            ids += [*text[done:place].tolist(), *statements[i][which]]
            done = place
        texts.append(np.asarray([*ids, *text[done:].tolist()], np.int64))
    return FactTexts(np.stack(texts), questions, pairs)


def score_facts(model: nn.Module, pair: FactTexts, segment: int) -> dict[float, Scores]:
    """Of each depth and both texts: `exact` (the greedy answer is the word), `nll` (nats a token of
    it), `nll_unseen` (in the other text, which says another word) and `gain`, their difference.
    """
    _, cache = read(model, torch.from_numpy(pair.texts), segment)
    found = {}
    for depth, question in pair.questions.items():
        asked = torch.from_numpy(question).expand(2, -1).to(next(model.parameters()).device)
        output: Any = model(input_ids=asked, past_key_values=copy.deepcopy(cache), use_cache=True)
        logits_RV, own = output.logits[:, -1].float(), output.past_key_values
        words = torch.from_numpy(pair.words[depth])
        nll_RA, right_RA = follow(model, logits_RV, own, words)
        other_RA, _ = follow(model, logits_RV, own, words.flip(0))
        told, unseen = nll_RA.mean(1), other_RA.mean(1).flip(0)
        scores = {"exact": right_RA.all(1), "nll": told, "nll_unseen": unseen}
        scores["gain"] = unseen - told
        found[depth] = {metric: value.double().tolist() for metric, value in scores.items()}
    return found
