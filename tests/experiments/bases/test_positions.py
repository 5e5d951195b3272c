"""Perplexity by position and by context: what is scored, resuming, and the tables."""

from __future__ import annotations

from math import exp

import numpy as np
import pytest
import torch

from experiments.bases import paired, positions
from experiments.bases.positions import Plan
from experiments.bases.reading import corpus, first_ids
from experiments.bases.results import read_rows
from latte.lab.compare.intervals import mean_of
from latte.lab.data import byte_tokenizer
from latte.lab.data.files import read_documents
from latte.lab.evaluate.sides import side


def options(folders, *more):
    return (
        *("--text", f"tales={folders['texts']}", "--edges", "32,64,128", "--segment", "48"),
        *("--contexts", "16,128", "--scored", "10", "--base-max", "100", *more),
    )


def nll_of(model, start, ids):
    """(T,) nats of each token of a row, from one whole forward pass."""
    row = torch.tensor([[start, *ids.tolist()]])
    with torch.no_grad():
        log_p = model(row[:, :-1], use_cache=False).logits.double().log_softmax(-1)
    return -log_p[0].gather(-1, row[0, 1:, None])[:, 0]


def test_rows_are_those_of_whole_passes(folders, measure):
    rows = read_rows(measure("positions", *options(folders), "--base", "base") / "positions.csv")
    texts = [np.asarray(byte_tokenizer().encode(t)) for t in read_documents_of(folders)]
    models = {
        "base": side(f"x={folders['base']}"),
        "converted": side(f"x={folders['converted']}"),
        "window": side(f"x={folders['converted']},mixing=window,local_window=12"),
    }
    seen = set()
    for name, each in models.items():
        model, _ = each.load()
        for row in [row for row in rows if row["model"] == name]:
            first, last = int(row["first"]), int(row["last"])
            begin = first - int(row["context"]) if row["kind"] == "context" else 0
            nll = nll_of(model, 257, texts[int(row["text"])][begin:last])[first - begin :]
            assert float(row["loss"]) == pytest.approx(float(nll.mean()), rel=2e-5)
            assert int(row["tokens"]) == last - first == len(nll)
            seen.add((name, row["text"], row["kind"], first, row["context"]))
    ours = {(kind, first, c) for n, t, kind, first, c in seen if (n, t) == ("converted", "0")}
    assert ours == {
        *(("position", first, "") for first in (0, 32, 64)),
        *(("context", 128, context) for context in ("16", "128")),
    }
    # A base reads no further than it is told; a short text is scored as far as it fills parts.
    base = {(kind, first, c) for n, t, kind, first, c in seen if (n, t) == ("base", "0")}
    assert base == {("position", 0, ""), ("position", 32, ""), ("context", 128, "16")}
    short = {(kind, first) for n, t, kind, first, _ in seen if (n, t) == ("window", "3")}
    assert short == {("position", 0)}
    assert all(row["cpu"] and row["torch"] and row["date"] and row["command"] for row in rows)
    assert {row["overrides"] for row in rows if row["model"] == "window"} == {
        "mixing=window,local_window=12"
    }


def read_documents_of(folders):
    return [text for file in corpus(f"x={folders['texts']}").files for text in read_documents(file)]


def test_what_is_there_is_not_scored_again(folders, measure, monkeypatch, capsys):
    two = [f"base={folders['base']}", f"converted={folders['converted']}"]
    folder = measure("positions", *options(folders, "--texts", "2"), models=two)
    before = (folder / "positions.csv").read_text()
    scored = []
    real = positions.score_text
    monkeypatch.setattr(
        positions, "score_text", lambda *given: scored.append(len(given[3])) or real(*given)
    )
    measure("positions", *options(folders, "--texts", "2"), models=two)
    assert not scored and (folder / "positions.csv").read_text() == before
    measure("positions", *options(folders, "--texts", "3"), models=two)
    assert len(scored) == 2, "the third text, by both models"
    # A report needs no model; other weights of the same name are refused.
    measure("positions", "--report", models=["base=nowhere"])
    capsys.readouterr()
    measure("positions", *options(folders), models=[f"base={folders['converted']}"], code=2)
    assert "give it another name" in capsys.readouterr().err
    measure("positions", *options(folders, "--start", "<|endoftext|>"), models=two, code=2)
    assert "start=257, and this is 256" in capsys.readouterr().err


def test_tables_and_figure(folders, measure):
    given = (*options(folders), "--base", "base", "--control", "window")
    seeds = [f"converted#{seed}={folders['converted']}" for seed in (0, 1)]
    models = [f"base={folders['base']}", f"window={folders['converted']},mixing=window", *seeds]
    folder = measure("positions", *given, models=models)
    assert (folder / "positions.png").read_bytes().startswith(b"\x89PNG")
    rows = read_rows(folder / "positions.csv")
    summary = read_rows(folder / "positions-summary.csv")
    at = {(r["kind"], r["model"], r["from"], r["to"]): r for r in summary}
    losses = {
        model: [
            float(r["loss"])
            for r in rows
            if r["model"] == model and r["kind"] == "position" and r["first"] == "32"
            if r["seed"] in ("", "0")
        ]
        for model in ("base", "converted", "window")
    }
    mean = mean_of(losses["converted"])
    row = at["position", "converted", "33", "64"]
    assert float(row["loss"]) == pytest.approx(mean.value, rel=1e-5)
    assert float(row["loss_half_width"]) == pytest.approx(mean.half_width, rel=1e-4)
    assert float(row["perplexity"]) == pytest.approx(exp(mean.value), rel=1e-5)
    assert (row["texts"], row["seeds"]) == ("5", "2")
    pairs = zip(losses["converted"], losses["base"], strict=True)
    assert float(row["minus_base"]) == pytest.approx(mean_of([a - b for a, b in pairs]).value)
    # From the start to 64: both halves together.
    halves = [float(at["position", "base", a, b]["loss"]) for a, b in (("1", "32"), ("33", "64"))]
    texts = [r for r in rows if r["model"] == "base" and r["text"] == "3"]
    assert len(texts) == 1, "a short text counts in the first part alone"
    short = float(texts[0]["loss"])
    first_half = (6 * halves[0] - short) / 5
    whole = float(at["whole", "base", "1", "64"]["loss"])
    assert whole == pytest.approx((first_half + halves[1]) / 2, rel=1e-5)
    text = (folder / "positions.md").read_text()
    assert "Of the distance from 'window' to 'base'" in text or "won back" not in text
    assert "| model | 1 to 32 | 33 to 64 (5 of 6 texts) | 65 to 128 (5 of 6 texts) |" in text
    assert "tokens before them" in text


def test_share_won_back():
    base, control = {"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 2.0, "b": 3.0, "c": 5.0}
    half = {text: (base[text] + control[text]) / 2 for text in base}
    share = paired.won_back(half, control, base)
    assert (share.value, share.half_width, share.count) == (pytest.approx(0.5), pytest.approx(0), 3)
    assert paired.won_back(half, base, control) is None, "no control is worse than the base"
    # The jackknife, spelt out for two texts: pseudo-values 2 r - r without the other.
    mixed = {"a": 1.5, "b": 2.2}
    share = paired.won_back(mixed, control, base)
    whole, without = (0.5 + 0.8) / 2, (0.8, 0.5)
    expected = mean_of([2 * whole - other for other in without])
    assert share.value == pytest.approx(whole)
    assert share.half_width == pytest.approx(expected.half_width)
    assert paired.difference({"a": 2.0, "x": 9.0}, base).value == 1.0


def test_the_longest_context_is_the_row_read_on():
    plan = Plan((4, 8), (2, 8), scored=3)
    parts = plan.rows(100, None)
    assert [(part.kind, part.begin, part.edges) for part in parts] == [
        ("both", 0, (4, 8, 11)),
        ("context", 6, (2, 5)),
    ]
    assert [list(key.values()) for key in parts[0].keys()] == [
        ["position", 0, 4, ""],
        ["position", 4, 8, ""],
        ["context", 8, 11, 8],
    ]
    assert [part.kind for part in plan.rows(10, None)] == ["position"], "too short for contexts"
    assert [part.kind for part in Plan((4,), (2, 8), scored=3).rows(20, None)] == [
        *("position", "context", "context")
    ]


def test_long_texts_are_not_encoded_whole():
    seen = []

    def encode(texts):
        seen.append(len(texts[0]))
        return [np.frombuffer(texts[0].encode(), np.uint8)[::16]]  # 16 characters a token

    text = "abcdefgh" * 1000
    assert first_ids(encode, text, 40).tolist() == list(text.encode()[: 40 * 16 : 16])
    assert max(seen) < len(text) and len(seen) > 1


def test_joined_documents(folders):
    texts = list(corpus(f"x={folders['texts']},join=true").texts(byte_tokenizer(), 256, 500))
    documents = [byte_tokenizer().encode(text) for text in read_documents_of(folders)]
    whole = documents[0] + [256] + documents[1]
    assert texts[0][1].tolist() == whole[:500] and len(texts) > 1
