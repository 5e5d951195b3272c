"""The probes' cases are what they say, and their scores are those of whole forward passes."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from experiments.probes import questions as probes
from experiments.probes import report as probe_report
from experiments.probes import scores as probing
from experiments.probes.run import main
from latte.lab.data import byte_tokenizer
from latte.models import LatteForCausalLM, preset_config
from tests.helpers import read_csv

TEXT = "".join(chr(97 + (i * i + i // 7) % 26) if i % 6 else " " for i in range(3000))


@pytest.fixture(scope="module")
def material():
    ids = byte_tokenizer().encode(TEXT)
    return probes.make_material(byte_tokenizer(), np.asarray([257, *ids, 256]))


@pytest.fixture(scope="module", params=["latte-r-swa++", "llama"])
def model(request):
    """A Latte model, and a plain one of Transformers with its growing cache."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 260}
    if request.param == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        made = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        made = LatteForCausalLM(preset_config(request.param, "tiny", **sizes))
    for parameter in made.parameters():  # far from uniform, so that mistakes show
        parameter.data *= 2
    return made.eval()


# --- cases ------------------------------------------------------------------------------------


def test_material_is_text_alone_and_words_of_one_length(material):
    assert byte_tokenizer().decode(material.text) == TEXT and material.start == 257
    assert len(material.words) >= 60 and {len(word) for word in material.words} == {6}


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("length", [256, 400])
def test_a_retrieval_case(material, length, depth):
    case = probes.retrieval_case(material, 3, 5, length=length, depth=depth)
    assert len(case.prompt) + case.candidates.shape[1] == length
    assert case.candidates.shape[0] == 7 and case.prompt[0] == 257
    decode = byte_tokenizer().decode
    prompt, words = decode(case.prompt[1:]), [decode(word) for word in case.candidates]
    body, question = prompt.rsplit("\n", 1)
    name = question.removeprefix("The secret word of ").removesuffix(" is")
    said = [line for line in prompt.split("\n") if line.endswith(".")]
    assert len(said) == 4 and len(set(words)) == 7
    right = f"The secret word of {name} is{words[0]}."
    assert said.count(right) == 1
    for word in words[1:4]:
        assert sum(f" is{word}." in line and name not in line for line in said) == 1
    assert not any(word in prompt for word in words[4:])
    changed = np.flatnonzero(case.prompt != case.control)
    at = body.index(right)
    assert len(changed) and right.startswith(body[at : changed[0] - 1]), "only the right word"
    assert changed[-1] - 1 < at + len(right) - 1
    assert not any(word in decode(case.control) for word in (words[0], *words[4:]))
    if depth == 0:
        assert at == 1
    elif depth == 1:
        assert body.endswith(f"{right}\n")
    else:  # the text before it is that share of all the text
        before = sum(len(line) for line in body[:at].split("\n") if not line.endswith("."))
        room = sum(len(line) for line in body.split("\n") if not line.endswith("."))
        assert before == pytest.approx(depth * room, abs=1)
    # What is asked is the same at any length and depth; another index asks something else.
    other = probes.retrieval_case(material, 3, 5, length=333, depth=0.7)
    assert np.array_equal(case.candidates, other.candidates)
    assert decode(other.prompt).endswith(question)
    again = probes.retrieval_case(material, 3, 5, length=length, depth=depth)
    assert np.array_equal(case.prompt, again.prompt)
    for seed, index in ((3, 6), (4, 5)):
        different = probes.retrieval_case(material, seed, index, length=length, depth=depth)
        assert not np.array_equal(case.candidates, different.candidates)


def test_a_copy_case(material):
    case = probes.copy_case(material, 0, 1, length=200)
    size = probes.COPY_CUE + probes.COPY_ANSWER
    assert len(case.prompt) == len(case.control) == 200 - probes.COPY_ANSWER
    paragraph = [*case.prompt[-probes.COPY_CUE :], *case.answer]
    assert list(case.prompt[1 : 1 + size]) == paragraph
    assert np.array_equal(case.prompt[1 + size :], case.control[1 + size :])
    assert list(case.control[1 : 1 + size]) != paragraph
    assert 1 + size + case.distance + probes.COPY_CUE == len(case.prompt)


def test_a_continuation_case(material):
    case = probes.continuation_case(material, 0, 1, length=400)
    whole = byte_tokenizer().decode([*case.prompt[1:], *case.answer])
    assert whole in TEXT + TEXT and len(case.answer) == 128 and len(case.prompt) == 400 - 128


def test_repetition():
    assert probes.repeated([1, 2, 1, 2, 1], 2) == pytest.approx(1 - 2 / 4)
    assert probes.repeated([1, 2, 3], 4) == 0.0 and probes.repeated([5] * 9, 4) == 1 - 1 / 6


# --- scores -----------------------------------------------------------------------------------


def whole(model, ids):
    with torch.no_grad():
        return model(torch.as_tensor(np.asarray(ids))[None]).logits[0].double().log_softmax(-1)


def test_retrieval_scores_are_those_of_whole_sequences(model, material):
    cases = [probes.retrieval_case(material, 0, i, length=230, depth=0.5) for i in range(2)]
    with torch.no_grad():
        found = probing.score_retrieval(model, cases, segment=57)
    for row, case in enumerate(cases):
        values, exact = [], True
        for which, word in enumerate(case.candidates):
            log_p = whole(model, [*case.prompt, *word])[len(case.prompt) - 1 : -1]
            values.append(float(log_p.gather(1, torch.as_tensor(word)[:, None]).mean()))
            if which == 0:
                exact = bool((log_p.argmax(1) == torch.as_tensor(word)).all())
        margin, unsaid = values[0] - max(values[1:4]), values[0] - max(values[4:])
        wanted = {"nll": -values[0], "margin": margin, "margin_unsaid": unsaid}
        log_p = whole(model, [*case.control, *case.candidates[0]])[len(case.control) - 1 : -1]
        unseen = -float(log_p.gather(1, torch.as_tensor(case.candidates[0])[:, None]).mean())
        wanted |= {"nll_unseen": unseen, "gain": unseen + values[0]}
        wanted |= {"ranked_first": margin > 0, "beats_unsaid": unsaid > 0, "exact": exact}
        assert {name: value[row] for name, value in found.items()} == {
            name: pytest.approx(float(value), abs=1e-4) for name, value in wanted.items()
        }


def test_greedy_continuation_is_that_of_whole_sequences(model, material):
    cases = [probes.copy_case(material, 0, i, length=180) for i in range(2)]
    prompts = torch.from_numpy(np.stack([case.prompt for case in cases]))
    with torch.no_grad():
        logits, cache = probing.read(model, prompts, 50)
        made = probing.generate(model, logits, cache, 5)
    for case, row in zip(cases, made.tolist(), strict=True):
        ids = list(case.prompt)
        for token in row:
            assert token == int(whole(model, ids)[-1].argmax())
            ids.append(token)


class Copier(nn.Module):
    """Says what followed the latest earlier place where the last `match` tokens stood."""

    def __init__(self, match=3, vocabulary=260):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.match, self.vocabulary = match, vocabulary

    def forward(self, input_ids, past_key_values=None, use_cache=True):
        before = [[] for _ in input_ids] if past_key_values is None else past_key_values
        logits = torch.zeros(*input_ids.shape, self.vocabulary)
        rows = [list(row) for row in before]
        for i, row in enumerate(rows):
            for j, token in enumerate(input_ids[i].tolist()):
                row.append(token)
                tail = row[-self.match :]
                for at in range(len(row) - self.match - 1, -1, -1):
                    if row[at : at + self.match] == tail:
                        logits[i, j, row[at + self.match]] = 20.0
                        break
        return SimpleNamespace(logits=logits, past_key_values=rows)


def test_a_model_that_copies_gets_full_marks(material):
    rows = probing.run_probes(
        Copier(6),
        material,
        ["copy", "retrieval"],
        [240],
        depths=[0.0, 1.0],
        cases=4,
        segment=100,
        batch_tokens=480,
        progress=False,
    )
    values = {(row.metric, row.depth): row.value for row in rows}
    assert values["token_match", None] == values["exact", None] == 1.0
    assert values["token_match_unseen", None] < 0.5
    assert values["nll", None] < 0.1 < values["nll_unseen", None]
    gain = values["nll_unseen", None] - values["nll", None]
    assert values["gain", None] == pytest.approx(gain)
    for depth in (0.0, 1.0):
        assert values["exact", depth] == values["ranked_first", depth] == 1.0
        assert values["margin", depth] > 1
        assert values["gain", depth] > 1
    assert {row.cases for row in rows} == {4}
    assert [row.probe for row in rows] == sorted((row.probe for row in rows), reverse=True)


def test_sampling_follows_the_probabilities_and_the_seed():
    logits = torch.tensor([[0.0, math.log(3.0), -math.inf]]).expand(400, 3)
    uniform = probing.draws(0, range(400))
    found = probing.generate(nn.Identity(), logits, None, 1, uniform)
    assert set(found.flatten().tolist()) == {0, 1}
    assert float(found.double().mean()) == pytest.approx(0.75, abs=0.07)
    assert torch.equal(uniform[7], probing.draws(0, [7])[0])  # whatever it is batched with


def test_results_do_not_depend_on_batches(model, material, tmp_path, monkeypatch):
    monkeypatch.setattr(probes, "CONTINUATION", 8)
    keep = {"depths": [0.5], "cases": 3, "progress": False}
    names = ["retrieval", "continuation"]
    one = probing.run_probes(model, material, names, [220], batch_tokens=1, segment=64, **keep)
    all_ = probing.run_probes(model, material, names, [220], batch_tokens=9999, segment=999, **keep)
    for a, b in zip(one, all_, strict=True):
        assert (a.metric, a.depth) == (b.metric, b.depth)
        assert a.value == pytest.approx(b.value, abs=1e-3)
    spread = next(row for row in one if row.metric == "nll")
    assert spread.stderr is not None and spread.stderr > 0
    probe_report.write_probes(tmp_path / "probes.csv", one, "m")
    assert [row["metric"] for row in read_csv(tmp_path / "probes.csv")] == [
        row.metric for row in one
    ]
    table = probe_report.probes_table(one)
    assert "retrieval (3 cases each)" in table and "repeated_4_greedy" in table


# --- the command ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(words, tmp_path_factory):
    """An untrained model in a folder that says what text its run held out."""
    folder = tmp_path_factory.mktemp("probed")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    LatteForCausalLM(preset_config("swa++", "tiny", **sizes)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    recipe = {"model": {"preset": "swa++", "size": "tiny", "overrides": sizes}, "data": words}
    (folder / "recipe.json").write_text(json.dumps(recipe | {"training": {"max_steps": 1}}))
    return folder


def test_the_command_writes_a_table_a_csv_and_a_plot(checkpoint, tmp_path, capsys):
    arguments = [str(checkpoint), "--probes", "copy,retrieval", "--cases", "2"]
    arguments += ["--lengths", "256,230", "--depths", "0,1", "--segment", "100"]
    assert main([*arguments, "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "retrieval (2 cases each)" in out and "token_match_unseen" in out
    rows = read_csv(tmp_path / "probes.csv")
    cells = {(row["probe"], row["length"], row["depth"]) for row in rows}
    depths = {("retrieval", n, d) for n in ("230", "256") for d in ("0.0", "1.0")}
    assert cells == depths | {("copy", "230", ""), ("copy", "256", "")}
    assert (tmp_path / "probes.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "probes.csv",
        "probes.png",
        "probes.settings.json",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--probes", "needle"], "expected some of retrieval, copy, continuation, got 'needle'"),
        (["--probes", "copy", "--lengths", "99"], "for the copy probe, which needs at least 100"),
        (["--probes", "retrieval", "--lengths", "100"], "are too few for the retrieval probe"),
        (["--probes", "copy", "--lengths", "99999"], "give more with --corpus"),
        (["--probes", "copy", "--cases", "0"], "--cases: expected at least 1, got 0"),
        (["--probes", ","], "expected names separated by commas"),
        (["--seed", "-1"], "--seed: expected 0 or more"),
        (["--probes", "retrieval", "--depths", "2"], "numbers from 0 to 1"),
        (["--probes", "copy", "--mixing", "window"], "expected a converted model"),
    ],
)
def test_mistakes_of_the_command_are_one_line(checkpoint, tmp_path, mistake, options, message):
    assert message in mistake(main, checkpoint, *options, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()
