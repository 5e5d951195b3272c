"""Needles in long texts: cases are what they say at any length, and are scored whole."""

import importlib.util
import json
import re
from collections import Counter

import pytest

from latte.cli import main
from latte.errors import LatteError
from latte.lab.data import byte_tokenizer
from latte.lab.evaluate import needles
from latte.lab.evaluate import tasks as harness
from tests.lab.evaluate.test_chat import tokenizer

needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = [f"{a}{b}{c}er" for a in LETTERS[:9] for b in "aeiou" for c in LETTERS[:9]]
TEXT = "".join(
    f"{word.capitalize()} {other} and {third}.\n" if i % 3 else f"Is {word} a {other}? "
    for i, (word, other, third) in enumerate(
        zip(WORDS, WORDS[7:] + WORDS[:7], WORDS[31:] + WORDS[:31], strict=True)
    )
)


@pytest.fixture(scope="module")
def material():
    return needles.Material([TEXT, "  ", "The last one"], byte_tokenizer(), 4000)


@pytest.fixture(params=[False, True], ids=["plain", "chat"])
def prompts(request):
    return needles.Prompts(tokenizer(), request.param)


def cases(name, material, prompts, length, **options):
    return needles.make_cases(name, material, prompts, length, **{"cases": 4, "seed": 3, **options})


@pytest.mark.parametrize(
    "text",
    ["One. Two is 3.5? Yes!\n\n  Four", "word " * 300, "x" * 1000, "a" + "b " * 900 + "c.", " \n "],
)
def test_pieces_are_the_text(text):
    found = needles.Material([text], byte_tokenizer(), 10_000).pieces
    assert "".join(found) == (text.strip() + "\n" if text.strip() else "")
    assert all(len(piece.rstrip()) <= 402 for piece in found)
    if text.startswith("One"):
        assert found == ["One. ", "Two is 3.5? ", "Yes!\n\n  ", "Four\n"]


@pytest.mark.parametrize("name", needles.TASKS)
def test_cases_fill_their_length_and_no_more(material, prompts, name):
    """And ask the same at every length."""
    asked = []
    for length in (1500, 3000):
        made, output = cases(name, material, prompts, length)
        for case in made:
            used = prompts.count(case.text, case.begun) + output
            assert length - 160 < used <= length  # a sentence is missing at most
            assert output > len(", ".join(case.answers))
        asked.append([(case.begun, case.answers) for case in made])
    assert asked[0] == asked[1] and len(set(asked[0])) == 4
    assert cases(name, material, prompts, 1500)[0] == cases(name, material, prompts, 1500)[0]
    other, _ = cases(name, material, prompts, 1500, seed=4)
    assert {case.answers for case in other}.isdisjoint(answers for _, answers in asked[0])


def test_numbers(material, prompts):
    places = []
    for case in cases("niah_single", material, prompts, 2000)[0]:
        (number,) = case.answers
        assert re.fullmatch(r"[1-9]\d{6}", number) and case.text.count(number) == 1
        places.append(case.text.index(number) / len(case.text))
    assert places == sorted(places) and places[0] < 0.3 and places[-1] > 0.7
    for case in cases("niah_keys", material, prompts, 2000)[0]:
        told = dict(re.findall(r"magic numbers for ([a-z ]+) is: (\d{7})\.", case.text))
        assert len(told) == 4
        key = re.search(r"special magic number for ([a-z ]+) is:", case.begun)[1]
        assert case.answers == (told[key],) and f"for {key} in the text above?" in case.text
    for case in cases("niah_values", material, prompts, 2000)[0]:
        told = re.findall(r"magic numbers for ([a-z ]+) is: (\d{7})\.", case.text)
        assert len({key for key, _ in told}) == 1
        assert sorted(case.answers) == sorted(value for _, value in told)


def test_variables(material, prompts):
    for case in cases("niah_variables", material, prompts, 2000)[0]:
        value = re.search(r"the value (\d{5}) in the text above", case.text)[1]
        known = {value}
        for new, old in re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w{5})\.", case.text):
            assert old in known  # what it gets its value from was said before
            known.add(new)
        assert known - {value} == set(case.answers) and len(case.answers) == 5


def test_words(material, prompts):
    for case in cases("niah_words", material, prompts, 3500)[0]:
        counts = Counter(re.findall(r"\d+\. (\w+)", case.text))
        common = dict(counts.most_common(10))
        assert set(common) == set(case.answers)
        assert min(common.values()) >= 3 * max(n for w, n in counts.items() if w not in common)


def test_the_score_is_the_share_that_is_found():
    doc = {"answers": ["12", "34", "ab"]}
    assert needles.found(doc, ["12, AB"]) == {"found": pytest.approx(2 / 3)}


@pytest.mark.parametrize(
    ("name", "length", "text", "message"),
    [
        ("niah_single", 300, TEXT, "at 300 tokens has no room for a sentence"),
        ("niah_words", 600, TEXT, "has no room for a list of 100 words"),
        ("niah_values", 9000, "One line.\n", "needs 8,.* tokens of text, and the corpus has 10"),
        ("niah_words", 4000, "One line.\n", "^lengths: .* different words, and the corpus has 1"),
        ("niah_single", 900, "", "needs .* tokens of text, and the corpus has 0"),
    ],
)
def test_what_cannot_be_made_is_one_line(name, length, text, message):
    material = needles.Material([text], byte_tokenizer(), length)
    with pytest.raises(LatteError, match=message) as error:
        cases(name, material, needles.Prompts(byte_tokenizer(), False), length)
    assert "\n" not in str(error.value)


def test_a_length_that_cannot_be_is_found_before_the_cases_are_made(monkeypatch):
    made, hidden = [], needles._hidden
    monkeypatch.setattr(needles, "_hidden", lambda *given: made.append(1) or hidden(*given))
    names = ["niah_single", "niah_words"]
    with pytest.raises(LatteError, match="niah_words at 600 tokens has no room"):
        needles.needle_tasks(names, byte_tokenizer(), [TEXT], [1500, 600])
    assert len(made) < needles.CASES


@needs_harness
@pytest.mark.parametrize("chat", [False, True])
def test_the_harness_sees_each_prompt_whole(make_model, monkeypatch, chat):
    model, words = make_model("latte-r-swa++"), tokenizer()
    made = needles.needle_tasks(["niah_single"], words, [TEXT], [700], cases=3, chat=chat)
    assert list(made) == ["niah_single_700"]
    rows = list(made["niah_single_700"].test_docs())
    prompts, heard = needles.Prompts(words, chat), []

    def repeats(input_ids, attention_mask, **_):
        """A model that finds the numbers of the first two rows."""
        import torch

        found = []
        for row, mask in zip(input_ids, attention_mask, strict=True):
            said = words.decode(row[mask.bool()])
            heard.append((int(mask.sum()), said))
            number = re.search(r"\d{7}", said)[0] if len(heard) < 3 else "0000000"
            found.append([*row.tolist(), *words.encode(f" {number}.", add_special_tokens=False)])
        return torch.tensor(found)

    monkeypatch.setattr(model, "generate", repeats)
    scores = harness.evaluate_tasks(
        model, words, {"tasks": made}, batch_size=2, max_length=700, chat=chat, whole=True
    )
    assert [(row.metric, row.samples) for row in scores.rows] == [("found", 3)]
    assert scores.rows[0].value == pytest.approx(2 / 3) and scores.record["prompts_cut"] == 0
    assert {said.count("[user]") for _, said in heard} == {int(chat)}
    for count, said in heard:
        (row,) = (row for row in rows if row["text"] in said)
        assert said.endswith(row["begun"])
        assert count == prompts.count(row["text"], row["begun"]) - chat  # it has no start token
    with pytest.raises(LatteError, match="--max-length of at least .*room for the question"):
        harness.evaluate_tasks(model, words, {"tasks": made}, max_length=500, chat=chat, whole=True)


@needs_harness
@pytest.mark.parametrize("kind", ["multiple_choice", "generate_until"])
def test_other_tasks_say_how_many_prompts_are_cut(make_model, tmp_path, capsys, kind):
    rows = [{"question": "why " * n, "choices": ["a", "b"], "answer": 0} for n in (2, 40, 60)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = "doc_to_choice: choices\n"
    if kind == "generate_until":
        more = "generation_kwargs: {until: ['.'], max_gen_toks: 2}\n"
    (tmp_path / "long.yaml").write_text(
        f"task: long\ndataset_path: json\noutput_type: {kind}\ntest_split: validation\n"
        f"dataset_kwargs: {{data_files: {{validation: {tmp_path / 'long.jsonl'}}}}}\n"
        "doc_to_text: question\ndoc_to_target: answer\n" + more
    )
    tasks = harness.load_tasks([str(tmp_path / "long.yaml")])
    capsys.readouterr()
    model = make_model("latte-r-swa++")
    scores = harness.evaluate_tasks(model, byte_tokenizer(), tasks, max_length=100)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "prompts" in line]
    cut, every = (4, 6) if kind == "multiple_choice" else (2, 3)
    assert scores.record["prompts_cut"] == cut
    assert line.startswith(f"{cut} of {every} prompts are longer than the 100 tokens")
    longest = int(re.search(r"--max-length (\d+)", line)[1])
    again = harness.evaluate_tasks(model, byte_tokenizer(), tasks, max_length=longest)
    assert again.record["prompts_cut"] == 0


@needs_harness
def test_the_command(save_llama, tmp_path, mistake, capsys):
    folder = tmp_path / "base"
    save_llama(folder)
    (tmp_path / "text.txt").write_text(TEXT)
    start = ["evaluate", str(folder), "--corpus", str(tmp_path / "text.txt"), "--limit", "2"]
    options = ["--tasks", "niah_single,niah_keys", "--lengths", "600,700", "--seed", "1"]
    assert main([*start, *options]) == 0
    out = capsys.readouterr().out
    for name in ("niah_single_600", "niah_keys_600", "niah_single_700", "niah_keys_700"):
        assert re.search(rf"{name} +0 +2 +found", out)
    record = json.loads((folder / "evaluation" / "tasks.settings.json").read_text())
    assert (record["seed"], record["lengths"]) == (1, [600, 700]) and record["corpus_files"]
    for more, said in (
        (["--tasks", "niah,hellaswag"], "niah is evaluated by itself, got 'hellaswag' with it"),
        (["--tasks", "niah", "--chat-template"], "chat-template: the tokenizer has none"),
        (["--tasks", "niah", "--max-length", "500"], "max-length: expected at least 4096"),
        (["--tasks", "niah", "--num-fewshot", "2"], "num-fewshot: niah has no examples, got 2"),
    ):
        assert said in mistake(main, *start, *more)
