"""Reviews and pairs of papers by bytes, from files and datasets, and batches of them."""

import gzip
import json
import lzma
from dataclasses import replace

import numpy as np
import pytest

from experiments.lra.data import ListOpsOptions, RetrievalOptions, TextOptions, load_task
from experiments.lra.data.examples import Examples
from latte.errors import LatteError
from tests.experiments.lra.test_listops import sequences

ROWS = [{"text": f"review {i} " + "ä good film " * (i % 5), "label": i % 2} for i in range(200)]


def write(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with lzma.open(path, "wt", encoding="utf-8") as file:
        file.write(text)
    return str(path)


@pytest.fixture
def options(tmp_path):
    return TextOptions(
        train=write(tmp_path / "train.jsonl.xz", ROWS),
        test=write(tmp_path / "test.jsonl.xz", ROWS[:10]),
        max_length=30,
    )


def test_bytes_and_labels(options):
    task = load_task("text", options, "unused")
    assert sequences(task.test) == [row["text"].encode()[:30] for row in ROWS[:10]]
    assert task.test.labels_N.tolist() == [0, 1] * 5
    both = sequences(task.train) + sequences(task.validation)
    assert sorted(both) == sorted(row["text"].encode()[:30] for row in ROWS)


def test_the_validation_split_goes_by_the_text_alone(options, tmp_path):
    task = load_task("text", options, "unused")
    assert 8 <= len(task.validation) <= 35  # a tenth of 200, more or less
    assert not set(sequences(task.train)) & set(sequences(task.validation))
    again = write(tmp_path / "again.jsonl.xz", [*ROWS[::-1], *ROWS])
    turned = load_task("text", replace(options, train=again), "unused")
    assert set(sequences(turned.validation)) == set(sequences(task.validation))
    assert len(turned.validation) == 2 * len(task.validation)  # copies stay on one side
    other = load_task("text", replace(options, seed=1), "unused")
    assert set(sequences(other.validation)) != set(sequences(task.validation))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x", "label": 2}, "line 11: field 'label' must be 0 or 1, got 2"),
        ({"text": "x", "label": True}, "line 11: field 'label' must be 0 or 1, got True"),
        ({"text": "x"}, "line 11: no field 'label'; there is 'text'"),
        ({"review": "x", "label": 1}, "line 11: no field 'text'; there is 'review', 'label'"),
        ({"text": 3, "label": 1}, "line 11: field 'text' must hold text, found int"),
        ([1], "line 11: expected a JSON object, found list"),
    ],
)
def test_a_wrong_row(options, tmp_path, row, message):
    bad = write(tmp_path / "bad.jsonl.xz", [*ROWS[:10], row])
    with pytest.raises(LatteError, match=f"{bad}, {message}"):
        load_task("text", replace(options, train=bad), "unused")


def test_mistakes(options, tmp_path):
    one_class = write(tmp_path / "ones.jsonl.xz", [row for row in ROWS if row["label"]])
    (tmp_path / "plain.txt").write_text("a film")
    for fields, message in (
        ({"test": str(tmp_path / "none.jsonl")}, "no such file"),
        ({"test": one_class}, r"label 0 and with label 1, got 100 with \[1\]"),
        ({"test": str(tmp_path / "plain.txt")}, "plain.txt: expected JSON lines"),
        ({"validation_share": 1.0}, "data.validation_share: expected between 0 and 1"),
        ({"max_length": 0}, "data.max_length: expected at least 1, got 0"),
    ):
        with pytest.raises(LatteError, match=message):
            load_task("text", replace(options, **fields), "unused")
    with pytest.raises(LatteError, match="task: expected one of listops, text.*got 'images'"):
        load_task("images", options, "unused")
    with pytest.raises(LatteError, match="expected TextOptions, got ListOpsOptions"):
        load_task("text", ListOpsOptions(), "unused")


# ---- batches


def test_batches_are_padded_to_their_own_longest_and_masked():
    pieces = [np.arange(1, n + 1, dtype=np.uint8) for n in (3, 5, 2, 5)]
    examples = Examples.pack(pieces, [0, 1, 2, 3])
    assert examples.lengths().tolist() == [3, 5, 2, 5]
    batch = examples.batch([2, 0])
    assert batch["input_ids"].tolist() == [[1, 2, 0], [1, 2, 3]]
    assert batch["attention_mask"].tolist() == [[True, True, False], [True] * 3]
    assert batch["labels"].tolist() == [2, 0]
    assert "attention_mask" not in examples.batch([1, 3])


# ---- retrieval

LINES = ["1.0\tP1\tP2\tb'first \"text'\ta second one", "0.0\tP3\tP4\tshort\täö", "0\ta\tb\t\tx"]


def write_pairs(path, lines):
    data = "".join(line + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


@pytest.fixture
def pairs(tmp_path):
    return RetrievalOptions(
        train=write_pairs(tmp_path / "train.tsv", LINES),
        validation=write_pairs(tmp_path / "eval.tsv.gz", LINES[:2]),
        test=write_pairs(tmp_path / "test.tsv", LINES[1:]),
        max_length=12,
    )


def test_pairs_in_bytes(pairs):
    task = load_task("retrieval", pairs, "unused")
    assert [len(examples) for examples in task.splits().values()] == [3, 2, 2]
    assert task.train.labels_N.tolist() == [1, 0, 0]
    assert task.train.sequence(0, 0).tobytes() == b"b'first \"text'"[:12]
    assert task.train.sequence(0, 1).tobytes() == b"a second one"
    assert task.train.sequence(1, 1).tobytes() == "äö".encode()
    batch = task.train.batch([0, 2])
    assert batch["input_ids"].shape == (2, 2, 12)
    assert batch["attention_mask"].sum(-1).tolist() == [[12, 12], [0, 1]]
    few = load_task("retrieval", replace(pairs, max_examples=1), "unused")
    assert [len(examples) for examples in few.splits().values()] == [1, 1, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"1\tP1\tP2\tone text", r"line 1: expected 5 fields .*text1, text2\), found 4"),
        (b"yes\ta\tb\tx\ty", "line 1: expected label 0 or 1 in the first field, found 'yes'"),
        (LINES[1].encode("latin-1"), "line 1: expected UTF-8 text"),
        (b"", "expected pairs, found no line"),
        (None, "cannot be read .No such file"),
    ],
)
def test_wrong_files_of_pairs(pairs, tmp_path, content, message):
    bad = tmp_path / "bad.tsv"
    if content is not None:
        bad.write_bytes(content)
    with pytest.raises(LatteError, match=f"{bad}.* {message}|{bad}: {message}"):
        load_task("retrieval", replace(pairs, validation=str(bad)), "unused")


def test_a_dataset_of_the_hub(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(name, config, **arguments):
        asked.append((name, arguments["split"]))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = load_task("text", TextOptions(max_length=30), "unused")
    assert asked == [("stanfordnlp/imdb", "train"), ("stanfordnlp/imdb", "test")]
    assert len(task.test) == 200 and len(task.train) + len(task.validation) == 200
    with pytest.raises(LatteError, match="no column 'stars'; there is 'text', 'label'"):
        load_task("text", TextOptions(label_field="stars"), "unused")
