"""KL to a reference by position: of the base itself, of a window, and beside a sum by hand."""

from __future__ import annotations

import json

import pytest
import torch

from experiments.bases.results import read_rows
from latte.lab.data import byte_tokenizer
from latte.lab.evaluate.sides import side

EDGES = ("--edges", "8,32,64")


@pytest.fixture
def chats(tmp_path):
    """A text of 89 tokens, one of them a mark, and one of 21."""
    texts = [
        "a question" + "<|endoftext|>" + "an answer " * 7 + "and so on",
        "twenty letters, or so",
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def run(measure, folders, chats, *options):
    reference = f"base={folders['base']}"
    named = ("--reference", reference, "--text", f"chats={chats}", *EDGES)
    return measure("divergence", *named, *options)


@torch.no_grad()
def by_hand(folders, spec, text, first, last):
    before, after = text.split("<|endoftext|>")
    ids = [*before.encode(), byte_tokenizer().eos_token_id, *after.encode()]
    base, other = (
        side(each).load()[0](torch.tensor([ids])).logits[0, first:last].double().softmax(-1)
        for each in (f"base={folders['base']}", spec)
    )
    return (base * (base.log() - other.log())).sum(-1).mean().item()


def test_divergence_by_position(folders, measure, chats):
    folder = run(measure, folders, chats)
    rows = read_rows(folder / "divergence.csv")
    found = {(r["model"], r["text"], int(r["first"]), int(r["last"])): r for r in rows}
    spans = [("0", 0, 8), ("0", 8, 32), ("0", 32, 64), ("1", 0, 8), ("1", 8, 21)]
    assert set(found) == {(name, *s) for name in ("base", "converted", "window") for s in spans}
    text = json.loads(chats.read_text().splitlines()[0])["text"]
    specs = {
        "converted": f"converted={folders['converted']}",
        "window": f"window={folders['converted']},mixing=window,local_window=12",
    }
    for (name, number, first, last), row in found.items():
        kl = float(row["divergence"])
        if name == "base" or last <= 8:  # the window sees all that the base sees
            assert abs(kl) < 1e-5 and row["same_token"] == "1"
            continue
        assert kl > 1e-3 and int(row["tokens"]) == last - first
        if number == "0":
            assert kl == pytest.approx(by_hand(folders, specs[name], text, first, last), rel=1e-3)
    assert "33 to 64 (1 texts)" in (folder / "divergence.md").read_text()


def test_it_goes_on_where_it_was_and_another_reference_is_refused(folders, measure, chats, capsys):
    folder = run(measure, folders, chats, "--texts", "1")
    before = (folder / "divergence.csv").read_text()
    run(measure, folders, chats)
    after = (folder / "divergence.csv").read_text()
    assert after.startswith(before) and len(after.splitlines()) == 1 + 3 * 5
    other = ("--reference", f"other={folders['converted']}")
    measure("divergence", *other, "--text", f"chats={chats}", *EDGES, code=2)
    assert "with reference=" in capsys.readouterr().err
    assert (folder / "divergence.csv").read_text() == after


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--reference: expected a model to be close to"),
        (("--reference", "base=nowhere", "--edges", "8,4"), "--edges: expected rising numbers"),
        (("--reference", "base=nowhere"), "nowhere"),
    ],
)
def test_mistakes_are_one_line(measure, chats, options, message, capsys):
    measure("divergence", "--text", f"chats={chats}", *options, code=2)
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
