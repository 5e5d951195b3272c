"""Passkeys are what they say, and both probes run for several models."""

import numpy as np
import pytest
import torch

from experiments.bases import facts, passkey
from experiments.bases.results import read_rows
from experiments.probes.questions import make_material
from experiments.sides import side
from latte.errors import LatteError
from latte.lab.data import byte_tokenizer

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


def test_a_pair_of_texts_with_facts(material):
    depths = [0.1, 0.5]
    pair = facts.fact_texts(material, 3, 5, length=900, depths=depths)
    longest = max(map(len, pair.questions.values()))
    assert pair.texts.shape == (2, 900 - longest - pair.words[0.1].shape[1])
    said = [byte_tokenizer().decode(ids[1:]) for ids in pair.texts]
    for depth in depths:
        question = byte_tokenizer().decode(pair.questions[depth])
        words = [byte_tokenizer().decode(ids) for ids in pair.words[depth]]
        assert words[0] != words[1]
        for text, word in zip(said, words, strict=True):
            assert text.count(question) == 1
            before, _, after = text.partition(question)
            assert after.startswith(f"{word}.\n")
            assert len(before) / len(text) == pytest.approx(depth, abs=0.1)
    assert said[0].count("The secret word of") == 4
    # The two texts differ in the words that are asked for, and in nothing else.
    same = [text for text in said]
    for depth in depths:
        words = [byte_tokenizer().decode(ids) for ids in pair.words[depth]]
        same = [text.replace(f"is{word}.", "is.") for text, word in zip(same, words, strict=True)]
    assert same[0] == same[1]
    with pytest.raises(LatteError, match="have room for -?[0-9]+ tokens"):
        facts.fact_texts(material, 3, 5, length=90, depths=depths)


def test_facts_are_scored_as_if_each_text_was_read_alone(folders, material):
    model, _ = side(f"x={folders['converted']}").load()
    pair = facts.fact_texts(material, 0, 1, length=500, depths=[0.2, 0.9])
    with torch.no_grad():
        found = facts.score_facts(model, pair, 128)
        for depth, question in pair.questions.items():
            for text in range(2):
                nll = []
                for which in (text, 1 - text):
                    word = pair.words[depth][which]
                    ids = np.concatenate([pair.texts[text], question, word])
                    logits = model(torch.from_numpy(ids)[None]).logits[0, -len(word) - 1 : -1]
                    right = torch.from_numpy(word)[:, None]
                    nll.append(-float(logits.log_softmax(-1).gather(1, right).mean()))
                told, unseen = nll
                assert found[depth]["nll"][text] == pytest.approx(told, rel=1e-4)
                assert found[depth]["nll_unseen"][1 - text] == pytest.approx(unseen, rel=1e-4)
            gains = zip(found[depth]["nll_unseen"], found[depth]["nll"], strict=True)
            assert found[depth]["gain"] == pytest.approx([a - b for a, b in gains])


def test_the_probes_of_several_models(folders, measure):
    from experiments.bases import retrieval

    given = ("--text", f"tales={folders['texts']}", "--lengths", "400,500", "--depths", "0,1")
    given = (*given, "--cases", "2", "--segment", "128", "--base-max", "450")
    given = (*given, "--probes", ",".join(retrieval.PROBES))
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
