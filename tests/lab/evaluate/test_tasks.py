"""lm-evaluation-harness on our models, from local files and without a network."""

import importlib.util
import json
import socket
import sys
from pathlib import Path

import pytest
import torch

from latte.errors import LatteError
from latte.lab.data import byte_tokenizer
from latte.lab.evaluate import tasks as harness
from tests.helpers import read_csv

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "recipes" / "lm_eval"
needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed"
)


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """Anything that asks for the network fails, and nothing is found in a cache."""

    def refuse(*arguments):
        raise AssertionError("this asked for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache", raising=False)


@pytest.fixture(scope="module")
def model(make_model):
    return make_model("latte-r-swa++")


def likelihood(model, prompt, choice, start):
    """log p(choice | start token, prompt), by one forward pass."""
    tokenizer = byte_tokenizer()
    context = [start, *tokenizer.encode(prompt)]
    answer = tokenizer.encode(choice)
    with torch.no_grad():
        logits = model(torch.tensor([[*context, *answer]])).logits[0].log_softmax(-1)
    return sum(float(logits[len(context) + i - 1, token]) for i, token in enumerate(answer))


@needs_harness
@pytest.mark.parametrize("limit", [5, None])
def test_a_task_from_local_files(model, offline, monkeypatch, tmp_path, limit):
    """The harness's accuracies are those of likelihoods computed here, start token included."""
    monkeypatch.chdir(ROOT)
    tokenizer = byte_tokenizer()
    tasks = harness.load_tasks([str(RECIPES / "local.yaml")])
    scores = harness.evaluate_tasks(model, tokenizer, tasks, limit=limit, batch_size=3)
    lines = (RECIPES / "sums.validation.jsonl").read_text().splitlines()[:limit]
    right = {"acc": 0, "acc_norm": 0}
    for row in map(json.loads, lines):
        prompt = f"Question: {row['question']}\nAnswer:"
        found = [
            likelihood(model, prompt, f" {choice}", tokenizer.bos_token_id)
            for choice in row["choices"]
        ]
        per_byte = [x / len(choice) for x, choice in zip(found, row["choices"], strict=True)]
        right["acc"] += found.index(max(found)) == row["answer"]
        right["acc_norm"] += per_byte.index(max(per_byte)) == row["answer"]
    values = {row.metric: row for row in scores.rows}
    assert {name: row.value for name, row in values.items()} == {
        name: pytest.approx(count / len(lines)) for name, count in right.items()
    }
    assert {row.samples for row in scores.rows} == {len(lines)}
    assert {row.num_fewshot for row in scores.rows} == {0}
    assert scores.record["start_token_added"] is True and tokenizer.add_bos_token is False
    table, record = harness.write_tasks(tmp_path, scores, "tiny")
    rows = read_csv(table)
    assert [(row["model"], row["metric"]) for row in rows] == [
        ("tiny", "acc"),
        ("tiny", "acc_norm"),
    ]
    assert json.loads(record.read_text())["limit"] == limit
    assert "sums" in harness.tasks_table(scores.rows)


@needs_harness
def test_examples_before_a_question_and_the_random_state(model, offline, monkeypatch):
    monkeypatch.chdir(ROOT)
    seen = []
    forward = model.forward

    def spy(input_ids, **rest):
        seen.append(input_ids)
        return forward(input_ids, **rest)

    monkeypatch.setattr(model, "forward", spy)
    tasks = harness.load_tasks([str(RECIPES / "local.yaml")])
    before = torch.random.get_rng_state()
    scores = harness.evaluate_tasks(model, byte_tokenizer(), tasks, limit=1, num_fewshot=2)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert {row.num_fewshot for row in scores.rows} == {2}
    prompt = byte_tokenizer().decode(seen[0][0])
    assert prompt.count("Question:") == 3 and prompt.startswith("<|startoftext|>Question:")
    for start in ("<|endoftext|>", "<|pad|>", ""):
        seen.clear()
        harness.evaluate_tasks(model, byte_tokenizer(), tasks, limit=1, start=start)
        assert byte_tokenizer().decode(seen[0][0]).startswith(f"{start}Question:")
    with pytest.raises(LatteError, match="no token '<bos>'"):
        harness.evaluate_tasks(model, byte_tokenizer(), tasks, limit=1, start="<bos>")
    seen.clear()
    harness.evaluate_tasks(model, byte_tokenizer(), tasks, limit=1, max_length=16)
    assert {x.shape[1] for x in seen} == {16}


@needs_harness
def test_groups_downloaded_as_files_score_the_same(model, offline, monkeypatch, tmp_path):
    """download.py turns tasks into JSONL and a YAML that the same command reads."""
    monkeypatch.chdir(ROOT)
    # The index of the harness's own tasks takes seconds, and none of them is needed here.
    monkeypatch.setattr("lm_eval.tasks.TaskManager", small_manager)
    group = tmp_path / "both" / "group.yaml"
    group.parent.mkdir()
    (group.parent / "task.yaml").write_text((RECIPES / "local.yaml").read_text())
    group.write_text("group: both\ntask: [sums]\naggregate_metric_list: [{metric: acc}]\n")
    whole = harness.evaluate_tasks(
        model, byte_tokenizer(), harness.load_tasks([str(group)]), limit=4
    )
    spec = importlib.util.spec_from_file_location("download", RECIPES / "download.py")
    assert spec is not None and spec.loader is not None
    download = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(download)
    out = tmp_path / "data"
    monkeypatch.setattr(sys, "argv", ["download.py", str(group), str(out)])
    download.main()
    monkeypatch.setattr(sys, "argv", ["download.py", str(tmp_path / "gone.yaml"), str(out)])
    with pytest.raises(SystemExit, match="gone.yaml does not exist"):
        download.main()
    (group.parent / "task.yaml").unlink()
    (out / "task.yaml").write_text((RECIPES / "local.yaml").read_text())  # stands for the index
    again = harness.evaluate_tasks(
        model, byte_tokenizer(), harness.load_tasks([str(out / "local.yaml")]), limit=4
    )
    kinds = [(row.kind, row.metric, row.value, row.samples) for row in whole.rows]
    assert kinds == [(row.kind, row.metric, row.value, row.samples) for row in again.rows]
    assert ("group", "acc") in {(row.kind, row.metric) for row in again.rows}
    assert again.record["tasks"]["sums"]["dataset_path"] == "json"
    assert (out / "sums" / "train.jsonl").read_text().count("\n") == 8


def small_manager(include_defaults=True, include_path=None):
    from lm_eval.tasks.manager import TaskManager

    return TaskManager(include_defaults=False, include_path=include_path)


@needs_harness
@pytest.mark.parametrize(
    ("spec", "content", "message"),
    [
        ("gone.yaml", None, "gone.yaml does not exist"),
        ("a/b", None, "expected a name of the harness's or a .yaml file"),
        ("bad.yaml", "- 1", "cannot be read"),
        ("bad.yaml", "tsk: x", "names no 'task' and no 'group'"),
        ("bad.yaml", "task: x\ndataset_path: json\noutput_type: multiple_choice\n"
         "dataset_kwargs: {data_files: {validation: none.jsonl}}", "none.jsonl"),
    ],
)  # fmt: skip
def test_mistakes(tmp_path, monkeypatch, spec, content, message):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(spec).write_text(content)
    with pytest.raises(LatteError, match=message):
        harness.load_tasks([spec])


@needs_harness
def test_an_unknown_name(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **rest: small_manager(
        include_path=RECIPES))  # fmt: skip
    with pytest.raises(LatteError, match="no task 'sms'; the nearest name is 'sums'"):
        harness.load_tasks(["sms"])
    with pytest.raises(LatteError, match="limit: expected at least 1, got 0"):
        harness.evaluate_tasks(None, None, {}, limit=0)


def test_the_harness_is_not_installed(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(LatteError, match=r'pip install "latte-attention\[eval\]"'):
        harness.load_tasks(["hellaswag"])


@needs_harness
@pytest.mark.parametrize("kind", ["multiple_choice", "generate_until"])
def test_an_answer_longer_than_the_context_is_named(model, offline, tmp_path, kind, monkeypatch):
    """Before the first task is run, and not as the harness's own assertion."""
    other = {"multiple_choice": "generate_until", "generate_until": "multiple_choice"}[kind]
    for name, output, size in (("fits", other, 9), ("long", kind, 40)):
        row = {"question": "what", "choices": ["a", "b" * (size - 1)], "answer": 0}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        more = {
            "multiple_choice": "doc_to_choice: choices\n",
            "generate_until": f"generation_kwargs: {{until: ['.'], max_gen_toks: {size}}}\n",
        }
        (tmp_path / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\noutput_type: {output}\ntest_split: validation\n"
            f"dataset_kwargs: {{data_files: {{validation: {tmp_path / name}.jsonl}}}}\n"
            "doc_to_text: question\ndoc_to_target: answer\n" + more[output]
        )
    tasks = harness.load_tasks([str(tmp_path / f"{name}.yaml") for name in ("fits", "long")])
    monkeypatch.setattr(model, "forward", lambda *_, **__: pytest.fail("a task is run"))
    message = "^task long: an answer.* has 40 tokens, and the model sees 32; .*--max-length of"
    with pytest.raises(LatteError, match=message):
        harness.evaluate_tasks(model, byte_tokenizer(), tasks, max_length=32)
