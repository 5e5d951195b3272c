"""Chats that a base writes itself, as text to train its conversion on.

    python -m examples.base_chats BASE OUT.jsonl [--tokens 60000]

A base that was trained on chats, as SmolLM2-Instruct, is given the beginning of a user's turn in
its own template. It writes the question, and then the answer. No data set is needed (Magpie,
arXiv 2406.08464). A line of the file is `{"text": CHAT}` with the marks of the template, which
`data.special_tokens: true` of a recipe reads as such.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from latte.errors import LatteError
from latte.lab.command_line import OneLineParser, exit_code
from latte.lab.evaluate.generate import text_ends
from latte.lab.progress import progress

QUESTION_TOKENS, ANSWER_TOKENS = 128, 384  # at most
# Questions are to differ from each other; answers are to be typical of the base.
QUESTION = {"temperature": 1.0, "min_p": 0.05, "max_new_tokens": QUESTION_TOKENS}
ANSWER = {"temperature": 0.7, "min_p": 0.05, "max_new_tokens": ANSWER_TOKENS}
PLACE = "{QUESTION}"


def main(arguments: list[str] | None = None) -> int:
    """Write the file; returns the exit code: 0, 2 for a mistake, 130 interrupted."""
    parser = OneLineParser(
        prog="python -m examples.base_chats",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("base", help="folder or GGUF file")
    parser.add_argument("output", help="a new file of JSON lines")
    parser.add_argument("--tokens", type=int, default=60_000, help="how many to write; 60000")
    parser.add_argument("--batch", type=int, default=64, help="chats written together; 64")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    def work() -> None:
        from latte.lab.evaluate.checkpoint import load_checkpoint

        if Path(options.output).exists():
            raise LatteError(f"{options.output} exists already; expected a new file")
        for name in ("tokens", "batch"):
            if getattr(options, name) < 1:
                raise LatteError(f"--{name}: expected at least 1, got {getattr(options, name)}")
        model, tokenizer = load_checkpoint(options.base)
        sizes = (options.tokens, options.batch, options.seed)
        chats = write_chats(model, tokenizer, *sizes)
        lines = "".join(json.dumps({"text": chat}) + "\n" for chat in chats)
        Path(options.output).write_text(lines, encoding="utf-8")
        print(f"{options.output}: {len(chats):,} chats", file=sys.stderr)

    return exit_code("base_chats", work, "nothing was written")


@torch.inference_mode()
def write_chats(model: Any, tokenizer: Any, tokens: int, batch: int, seed: int) -> list[str]:
    """Chats of one question and one answer, with the template's marks, in all about ``tokens``.

    An unfinished question is left out. A long answer is cut.

    Raises:
        LatteError: The tokenizer has no template of chats, or the model ends no question.
    """
    before, between = template_parts(tokenizer)
    torch.manual_seed(seed)
    found: list[str] = []
    with progress(tokens, "token", label="chats") as state:
        while state.done < tokens:
            questions = continued(model, tokenizer, [before] * batch, QUESTION)
            openings = [before + text + between for text, end in questions if end and text.strip()]
            if not openings:
                raise LatteError(
                    f"expected questions of at most {QUESTION_TOKENS} tokens from the base, got"
                    f" {batch} that do not end"
                )
            answers = continued(model, tokenizer, openings, ANSWER)
            new = [
                opening + text + end for opening, (text, end) in zip(openings, answers, strict=True)
            ]
            found += new
            ids = tokenizer(new, add_special_tokens=False).input_ids
            state.update(sum(map(len, ids)))
    return found


def template_parts(tokenizer: Any) -> tuple[str, str]:
    """What the template puts before a question, and between it and the answer."""
    if tokenizer.chat_template is None:
        raise LatteError("expected a base with a chat template, got one without")
    turn = [{"role": "user", "content": PLACE}]
    text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    parts = text.split(PLACE)
    if len(parts) != 2:
        raise LatteError(f"expected a chat template that has the question once, got {text!r}")
    return parts[0], parts[1]


def continued(
    model: Any, tokenizer: Any, openings: list[str], how: dict[str, Any]
) -> list[tuple[str, str]]:
    """Sampled continuations of texts, each with the mark that ended it, "" where none did."""
    given = tokenizer(
        openings, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
    ).to(model.device)
    ends = text_ends(model, tokenizer)
    rows = model.generate(
        input_ids=given["input_ids"],
        attention_mask=given["attention_mask"],
        do_sample=True,
        **ends,
        **how,
    )[:, given["input_ids"].shape[1] :].tolist()
    found = []
    for ids in rows:
        length = next((i for i, token in enumerate(ids) if token in ends["eos_token_id"]), len(ids))
        found.append((tokenizer.decode(ids[:length]), tokenizer.decode(ids[length : length + 1])))
    return found


if __name__ == "__main__":
    raise SystemExit(main())
