"""The benchmark of weights in 4 and 8 bits: its losses, what it resumes, and its tables."""

import json

import pytest
import torch

from experiments.benchmarks import llama_cpp, quantised, records

pytest.importorskip("gguf", reason="the gguf package is not installed")

from tests.conversion.gguf_files import TOKENS, small_base, write_gguf  # noqa: E402


def test_quality_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    base = small_base("llama", num_hidden_layers=1, tie_word_embeddings=True)
    file = write_gguf(tmp_path / "base.gguf", base, kind="Q4_1")
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "the " * 60}))

    def even(_, pieces):
        return (torch.zeros(piece.shape[1], len(TOKENS)) for piece in pieces)

    monkeypatch.setattr(llama_cpp, "logits", even)
    monkeypatch.setattr(quantised, "PIECE", 16)
    monkeypatch.setattr(quantised, "KEPT", 1)

    def rows(out, tokens, *more):
        given = [str(file), str(text), "--only", "quality", "--weights", "file", "--out", str(out)]
        quantised.main([*given, "--work", str(tmp_path / "work"), "--held-out", tokens, *more])
        found = records.read_rows(out / "quantised.csv")
        return [{key: row[key] for key in ("side", "at", "perplexity", "kl")} for row in found]

    whole = rows(tmp_path / "whole", "40")
    assert [row["at"] for row in whole] == ["16"] * 3 + ["32"] * 3 + ["40"] * 3
    exact, llama, file_bits = whole[-3:]
    assert float(exact["kl"]) == 0 < float(file_bits["kl"]) < 0.1
    assert float(llama["perplexity"]) == pytest.approx(len(TOKENS), abs=1e-3)
    rows(tmp_path / "parts", "32")
    assert rows(tmp_path / "parts", "40", "--resume") == whole
    capsys.readouterr()
    quantised.main([str(file), str(text), "--out", str(tmp_path / "whole"), "--report"])
    said = capsys.readouterr().out
    assert f"| float32 | 40 | {exact['perplexity']} | +0.00 | 0.0 |" in said
    assert f"| file | 40 | {file_bits['perplexity']} |" in said and "Tokens a second" not in said
