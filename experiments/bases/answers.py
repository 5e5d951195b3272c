"""Generation judged: greedy answers side by side, and how often a model repeats itself.

Likelihood of given text flatters a converted model, whose own text can be far worse
(arXiv 2603.26556). Two kinds of greedy text:

* `prompt`: the answers to `prompts.txt`, by the chat template where there is one, until the model
  ends them or `tokens` are there;
* `continuation`: of held-out text, `tokens` of each, not ended by the end-of-text token; beside
  them how the text itself goes on, the model `the text itself`.

For each text: the share of 4-grams of tokens that have occurred before in it, and the longest
verbatim loop in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.bases.reading import TextFiles
from experiments.bases.results import Row, by_model
from experiments.probes.questions import repeated
from experiments.probes.scores import generate, read
from latte.errors import LatteError
from latte.lab.compare.intervals import mean_of
from latte.lab.evaluate.generate import text_ends
from latte.lab.evaluate.tables import table

KEY = ("kind", "item")
SETTINGS = ("digest", "start", "dtype", "asked", "max_tokens", "prompt_tokens")
VALUES = ("tokens", "ended", "repeated_4", "loop", "asks", "answer")
ITSELF = "the text itself"


def prompts(file: str | Path | None = None) -> list[str]:
    """The lines of a file of prompts, by default the one beside this module."""
    path = Path(file) if file is not None else Path(__file__).with_name("prompts.txt")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise LatteError(f"--prompts {path}: cannot be read ({error.strerror})") from None
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        raise LatteError(f"--prompts {path}: expected a prompt a line, found none")
    return found


def prompt_ids(tokenizer: Any, prompt: str, start: int) -> list[int]:
    """A prompt as a user's message, or behind a start token where there is no chat template."""
    if not tokenizer.chat_template:
        return [start, *tokenizer.encode(prompt, add_special_tokens=False)]
    message = {"role": "user", "content": prompt}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def excerpts(
    corpus: TextFiles, tokenizer: Any, start: int, count: int, given: int, more: int
) -> list[np.ndarray]:
    """(given + more,) ids from the middle of what is read of each of the first `count` texts.

    Raises:
        LatteError: so many texts of that length are not there.
    """
    found = []
    for _, ids in corpus.texts(tokenizer, start, 4 * (given + more)):
        if len(ids) >= given + more:
            first = (len(ids) - given - more) // 2
            found.append(ids[first : first + given + more])
        if len(found) == count:
            return found
    raise LatteError(
        f"--continuations: {corpus.name} has {len(found)} texts of {given + more} tokens or more,"
        f" expected {count}"
    )


@torch.no_grad()
def answer(
    model: Any, ids: Sequence[int], most: int, ends: Sequence[int], segment: int
) -> list[int]:
    """The greedy continuation of a prompt, up to `most` tokens, with the end token if it came."""
    logits, cache = read(model, torch.tensor([list(ids)]), segment)
    made: list[int] = []
    while True:
        made.append(int(logits.argmax(-1)))
        if made[-1] in ends or len(made) == most:
            return made
        token = torch.tensor([[made[-1]]], device=logits.device)
        output = model(input_ids=token, past_key_values=cache, use_cache=True)
        cache, logits = output.past_key_values, output.logits[:, -1]


def longest_loop(ids: Sequence[int] | np.ndarray) -> int:
    """Tokens of the longest stretch that is one piece said twice in a row or more often, to the
    letter: ids[i] = ids[i - p] all along it, and it has 2 p tokens or more, for some p.
    """
    tokens, longest = np.asarray(ids), 0
    for period in range(1, len(tokens) // 2 + 1):
        same = np.concatenate([[False], tokens[period:] == tokens[:-period], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])  # begin, end, begin, end, ...
        run = int((edges[1::2] - edges[::2]).max(initial=0))
        if run >= period:
            longest = max(longest, run + period)
    return longest


def row(
    kind: str, item: int, tokenizer: Any, asks: str, ids: Sequence[int], ends: Sequence[int]
) -> Row:
    """A text and what is counted in it, by the columns of `KEY` and `VALUES`."""
    ended = kind == "prompt" and bool(len(ids)) and ids[-1] in ends
    said = list(ids[:-1] if ended else ids)
    return {
        "kind": kind,
        "item": item,
        "tokens": len(said),
        "ended": ended,
        "repeated_4": repeated(said, 4),
        "loop": longest_loop(said),
        "asks": asks,
        "answer": tokenizer.decode(said),
    }


def answer_prompts(
    model: Any,
    tokenizer: Any,
    asked: Sequence[tuple[int, str]],
    start: int,
    most: int,
    segment: int,
) -> list[Row]:
    """The rows of numbered prompts."""
    ends = text_ends(model, tokenizer)["eos_token_id"]
    rows = []
    for item, prompt in asked:
        ids = answer(model, prompt_ids(tokenizer, prompt, start), most, ends, segment)
        rows.append(row("prompt", item, tokenizer, prompt, ids, ends))
    return rows


@torch.no_grad()
def continue_texts(
    model: Any | None,
    tokenizer: Any,
    texts: Sequence[np.ndarray],
    start: int,
    given: int,
    segment: int,
) -> list[Row]:
    """The rows of all excerpts, side by side; without a model those of the texts themselves."""
    if model is None:
        made = [ids[given:].tolist() for ids in texts]
    else:
        read_RT = torch.from_numpy(np.stack([[start, *ids[:given]] for ids in texts]))
        logits, cache = read(model, read_RT, segment)
        made = generate(model, logits, cache, len(texts[0]) - given).tolist()
    return [
        row("continuation", item, tokenizer, tokenizer.decode(ids[:given]), said, ())
        for item, (ids, said) in enumerate(zip(texts, made, strict=True))
    ]


# --- what came out -----------------------------------------------------------------------------

COUNTS = {"repeated_4": ("repeated 4-grams", ".3f"), "loop": ("longest loop (tokens)", ".1f")}


def report(folder: Path, rows: Sequence[Row], *, order: Sequence[str]) -> str:
    """Write answers.md, with all texts; returns its table of counts."""
    counts = counts_table(rows, order)
    parts = ["# Greedy text, side by side\n", counts]
    for kind, title in (("prompt", "Answers"), ("continuation", "Continuations of held-out text")):
        here = [row for row in rows if row["kind"] == kind]
        if here:
            parts.append(f"## {title}\n")
        for item in sorted({int(row["item"]) for row in here}):
            texts = by_model((row for row in here if int(row["item"]) == item), order)
            asks = next(iter(texts.values()))[0]["asks"]
            title = asks if kind == "prompt" else "Text"
            parts.append(f"### {item + 1}. {title}\n")
            if kind == "continuation":
                parts.append(f"Goes on from:\n\n{quoted('...' + asks[-300:])}\n")
            for model, own in texts.items():
                for one in own:
                    name = model + (f" (seed {one['seed']})" if one["seed"] else "")
                    parts.append(f"**{name}:**\n\n{quoted(one['answer'])}\n")
    (folder / "answers.md").write_text("\n".join(parts), encoding="utf-8")
    return counts


def counts_table(rows: Sequence[Row], order: Sequence[str]) -> str:
    """How often each model repeats itself: means with 95% intervals over texts."""
    kinds = [kind for kind in ("continuation", "prompt") if any(r["kind"] == kind for r in rows)]
    names = {"continuation": "continuations", "prompt": "answers"}
    heads = [f"{names[k]}: {title}" for k in kinds for title, _ in COUNTS.values()]
    lines = [["model", *heads, *(["answers ended"] if "prompt" in kinds else [])]]
    for model, own in by_model(rows, order).items():
        cells = []
        for kind in kinds:
            here = [row for row in own if row["kind"] == kind]
            for name, (_, form) in COUNTS.items():
                values = [float(row[name]) for row in here]
                cells.append(mean_of(values).text(form) if values else "-")
        if "prompt" in kinds:
            ended = [row["ended"] == "True" for row in own if row["kind"] == "prompt"]
            cells.append(f"{sum(ended)} of {len(ended)}" if ended else "-")
        lines.append([model, *cells])
    return table(lines)


def quoted(text: str) -> str:
    """A quotation in Markdown that shows the text as it is."""
    return "\n".join(f"    {line}" for line in text.strip("\n").splitlines()) or "    (nothing)"
