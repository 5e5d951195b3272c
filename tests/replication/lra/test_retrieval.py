"""Pairs of papers from tab-separated files made on the spot."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from latte.errors import LatteError
from replication.lra.data import RetrievalOptions, load_task

LINES = ["1.0\tP1\tP2\tb'first \"text'\ta second one", "0.0\tP3\tP4\tshort\täö", "0\ta\tb\t\tx"]


def write(path: Path, lines: list[str]) -> str:
    data = "".join(line + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


@pytest.fixture
def options(tmp_path: Path) -> RetrievalOptions:
    return RetrievalOptions(
        train=write(tmp_path / "train.tsv", LINES),
        validation=write(tmp_path / "eval.tsv.gz", LINES[:2]),
        test=write(tmp_path / "test.tsv", LINES[1:]),
        max_length=12,
    )


def test_pairs_in_bytes(options: RetrievalOptions) -> None:
    task = load_task("retrieval", options, "unused")
    assert [len(examples) for examples in task.splits().values()] == [3, 2, 2]
    assert task.train.labels_N.tolist() == [1, 0, 0]
    assert task.train.sequence(0, 0).tobytes() == b"b'first \"text'"[:12]
    assert task.train.sequence(0, 1).tobytes() == b"a second one"
    assert task.train.sequence(1, 1).tobytes() == "äö".encode()
    batch = task.train.batch([0, 2])
    assert batch["input_ids"].shape == (2, 2, 12)
    assert batch["attention_mask"].sum(-1).tolist() == [[12, 12], [0, 1]]
    few = load_task("retrieval", replace(options, max_examples=1), "unused")
    assert [len(examples) for examples in few.splits().values()] == [1, 1, 1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1\tP1\tP2\tonly one text", r"line 3: expected 5 fields between tabs \(label, id1, id2,"
                                     r" text1, text2\), found 4"),
        ("1\ta\tb\tx\ty\tz", "line 3: expected 5 fields .* found 6"),
        ("yes\ta\tb\tx\ty", "line 3: expected label 0 or 1 in the first field, found 'yes'"),
    ],
)  # fmt: skip
def test_a_malformed_line(
    options: RetrievalOptions, tmp_path: Path, line: str, message: str
) -> None:
    bad = write(tmp_path / "bad.tsv", [*LINES[:2], line])
    with pytest.raises(LatteError, match=f"{bad}, {message}") as caught:
        load_task("retrieval", replace(options, validation=bad), "unused")
    assert "\n" not in str(caught.value)


def test_missing_empty_and_binary_files(options: RetrievalOptions, tmp_path: Path) -> None:
    with pytest.raises(LatteError, match="none.tsv: cannot be read .No such file"):
        load_task("retrieval", replace(options, test=str(tmp_path / "none.tsv")), "unused")
    with pytest.raises(LatteError, match="empty.tsv: expected pairs, found no line"):
        load_task("retrieval", replace(options, test=write(tmp_path / "empty.tsv", [])), "unused")
    (tmp_path / "latin.tsv").write_bytes(LINES[1].encode("latin-1"))
    with pytest.raises(LatteError, match="latin.tsv, line 1: expected UTF-8 text"):
        load_task("retrieval", replace(options, test=str(tmp_path / "latin.tsv")), "unused")
    with pytest.raises(LatteError, match="data.max_length: expected at least 1, got 0"):
        load_task("retrieval", replace(options, max_length=0), "unused")
