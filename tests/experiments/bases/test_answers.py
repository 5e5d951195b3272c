"""Greedy texts side by side, and what counts as repetition."""

from __future__ import annotations

import pytest
import torch

from experiments.bases import answers
from experiments.bases.results import ResultsFile, read_rows
from latte.lab.evaluate.generate import text_ends
from latte.lab.evaluate.sides import Side, side


@pytest.mark.parametrize(
    ("text", "loop"),
    [
        ("abcdefgh", 0),
        ("abcabc", 6),  # a piece twice in a row
        ("xabcabcabyz", 8),  # and a part of it again
        ("abcdxabcd", 0),  # the same again, but not in a row
        ("aab", 2),
        ("", 0),
        ("zababababq", 8),
        ("hahahaxxxxxx", 6),
    ],
)
def test_the_longest_loop(text, loop):
    assert answers.longest_loop([ord(letter) for letter in text]) == loop


def test_an_answer_is_what_generate_says(folders):
    for name in ("base", "converted"):
        model, tokenizer = side(f"x={folders[name]}").load()
        ids = answers.prompt_ids(tokenizer, "Why is the sky blue?", 257)
        assert tokenizer.decode(ids) == "[user]Why is the sky blue?[/][assistant]"
        ends = text_ends(model, tokenizer)
        made = answers.answer(model, ids, 20, ends["eos_token_id"], segment=16)
        with torch.no_grad():
            prompt = torch.tensor([ids])
            whole = model.generate(prompt, max_new_tokens=20, do_sample=False, **ends)
        assert made == whole[0, len(ids) :].tolist()
        stop = made[:3].index(made[2]) + 1
        assert answers.answer(model, ids, 20, [made[2]], segment=16) == made[:stop]


def test_any_text_comes_back_from_the_file(tmp_path):
    texts = ["a\rb", 'c\n"d",', "e\r\nf", "\0"]
    results = ResultsFile(tmp_path / "x.csv", ("item",), (), ("answer",))
    each = Side("x", "nowhere")
    for item, text in enumerate(texts):
        results.add(
            [{"item": item, "answer": text}], {"model": "x", "seed": ""}, torch.device("cpu")
        )
    again = ResultsFile(tmp_path / "x.csv", ("item",), (), ("answer",))
    assert [row["answer"] for row in again.of(each)] == texts
    results.add([{"item": 0, "answer": "new"}], {"model": "x", "seed": ""}, torch.device("cpu"))
    assert [row["answer"] for row in results.latest()] == ["new", *texts[1:]]


def test_texts_of_several_models(folders, measure, tmp_path, monkeypatch):
    (tmp_path / "prompts.txt").write_text("Hello?\n\nWho are you?\n")
    given = ("--text", f"tales={folders['texts']}", "--prompts", str(tmp_path / "prompts.txt"))
    given = (*given, "--continuations", "2", "--prompt-tokens", "40", "--max-tokens", "30")
    folder = measure("answers", *given)
    rows = read_rows(folder / "answers.csv")
    counts = {name: sum(row["model"] == name for row in rows) for name in ("base", "window")}
    assert counts == {"base": 4, "window": 4}
    itself = [row for row in rows if row["model"] == answers.ITSELF]
    assert len(itself) == 2 and all(int(row["tokens"]) == 30 for row in itself)
    text = (folder / "answers.md").read_text()
    assert "### 2. Who are you?" in text and "**converted:**" in text and "Goes on from" in text
    assert "| the text itself |" in text and "answers ended" in text
    before = (folder / "answers.csv").read_text()
    monkeypatch.setattr(answers, "answer_prompts", None)  # nothing is asked again
    monkeypatch.setattr(answers, "continue_texts", None)
    measure("answers", *given)
    assert (folder / "answers.csv").read_text() == before
