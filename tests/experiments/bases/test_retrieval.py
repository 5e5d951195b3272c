"""Passkeys are what they say, and both probes run for several models."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from experiments.bases import passkey
from experiments.bases.results import read_rows
from experiments.probes.questions import make_material
from latte.errors import LatteError
from latte.lab.data import byte_tokenizer
from latte.lab.evaluate.sides import side

TEXT = "".join(chr(97 + (i * i + i // 7) % 26) if i % 6 else " " for i in range(3000))


@pytest.fixture
def material():
    return make_material(byte_tokenizer(), np.asarray(byte_tokenizer().encode(TEXT)))


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("depth", [0.0, 0.4, 1.0])
def test_a_passkey(folders, material, chat, depth):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folders["base"])
    frame = passkey.make_frame(tokenizer, 257, chat=chat)
    case = passkey.passkey_case(tokenizer, material, frame, 3, 5, length=600, depth=depth)
    assert len(case.prompt) + len(case.answer) == 600
    text = byte_tokenizer().decode(case.prompt[0 if chat else 1 :])
    number = byte_tokenizer().decode(case.answer).strip()
    assert len(number) == 5 and number.isdigit()
    assert text.endswith(("[assistant]" if chat else "\n") + passkey.ANSWER)
    assert text.startswith("[user]" + passkey.INTRODUCTION if chat else passkey.INTRODUCTION)
    statement = passkey.STATEMENT.format(number=number)
    before, _, after = text.partition(statement)
    filler = len(before) - text.index(passkey.INTRODUCTION) - len(passkey.INTRODUCTION)
    room = filler + len(after.partition(passkey.QUESTION)[0])
    assert text.count(number) == 2 and filler == round(depth * room)
    # The same number and text at any length and depth; another index has another number.
    other = passkey.passkey_case(tokenizer, material, frame, 3, 5, length=500, depth=0.9)
    assert np.array_equal(other.answer, case.answer)
    other = passkey.passkey_case(tokenizer, material, frame, 3, 6, length=600, depth=depth)
    assert not np.array_equal(other.answer, case.answer)
    with pytest.raises(LatteError, match="has room for -?[0-9]+ tokens"):
        passkey.passkey_case(tokenizer, material, frame, 3, 5, length=60, depth=depth)


def test_an_exact_answer_is_the_greedy_one(folders, material):
    model, tokenizer = side(f"x={folders['base']}").load()
    frame = passkey.make_frame(tokenizer, 257)
    cases = [
        passkey.passkey_case(tokenizer, material, frame, 0, i, length=500, depth=0.5)
        for i in range(3)
    ]
    prompt = torch.from_numpy(cases[1].prompt)[None]
    with torch.no_grad():
        made = model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None)
    cases[1] = passkey.PasskeyCase(cases[1].prompt, made[0, -6:].numpy())  # what it says
    with torch.no_grad():
        scores = passkey.score_passkeys(model, cases, 128)
    assert scores["exact"] == [0.0, 1.0, 0.0] and scores["digits"][1] == 1.0
    assert scores["nll"][1] < min(scores["nll"][0], scores["nll"][2])


def test_both_probes_of_several_models(folders, measure, monkeypatch):
    from experiments.bases import retrieval

    given = ("--text", f"tales={folders['texts']}", "--lengths", "400,500", "--depths", "0,1")
    given = (*given, "--cases", "2", "--segment", "128", "--base-max", "450")
    folder = measure("retrieval", *given)
    rows = read_rows(folder / "retrieval.csv")
    cells = {(r["model"], r["probe"], r["length"]) for r in rows if r["metric"] == "exact"}
    assert cells == {
        *(("base", probe, "400") for probe in retrieval.PROBES),
        *(
            (m, p, n)
            for m in ("converted", "window")
            for p in retrieval.PROBES
            for n in ("400", "500")
        ),
    }
    assert {r["depth"] for r in rows} == {"0", "1"} and {r["cases"] for r in rows} == {"2"}
    text = (folder / "retrieval.md").read_text()
    assert "Passkey" in text and "depth 1" in text and (folder / "retrieval.png").exists()
    before = (folder / "retrieval.csv").read_text()
    monkeypatch.setattr(retrieval, "ask", None)  # nothing is asked again
    measure("retrieval", *given)
    assert (folder / "retrieval.csv").read_text() == before
