"""A file of latents goes on with kept tokens: a file of every layer's latents and scores."""

import json

import pytest

from experiments.kept import refit
from latte.conversion import apply_latents, convert, save_latents

pytest.importorskip("gguf", reason="the gguf package is not installed")
from tests.conversion.gguf_files import small_base, write_gguf  # noqa: E402


def test_a_file_of_latents_goes_on_with_kept_tokens(tmp_path, monkeypatch, capsys):
    base = write_gguf(tmp_path / "base.gguf", small_base("llama", num_hidden_layers=2))
    model = convert(base, window=16, num_latents=8, keep_layers=[1], kept_window=40)
    save_latents(model, tmp_path / "latents", base=base)
    words = "The river was wide, and nobody had crossed it since the summer. "
    texts = [json.dumps({"text": words * 300 + str(i)}) for i in range(2)]
    (tmp_path / "text.jsonl").write_text("\n".join(texts), encoding="utf-8")
    for name, value in {"LENGTH": 900, "ROWS": 4, "ASKED": (2, 0), "FIT_STEPS": 2}.items():
        monkeypatch.setattr(refit, name, value)
    given = [str(base), str(tmp_path / "latents"), str(tmp_path / "out"), "--steps", "2"]
    given += ["--text", f"text={tmp_path / 'text.jsonl'}", "--window", "16", "--block", "8"]
    given += ["--lengths", "900", "--kept-range", "60", "--kept-half-life", "500"]
    assert refit.main(given) == 2
    assert "--kept-tokens is needed" in capsys.readouterr().err
    given += ["--kept-tokens", "3,5"]
    assert refit.main(given) == 0
    assert (
        "layer 1: output error" in (said := capsys.readouterr().out)
        and "step 2: 900 tokens, KL" in said
    )
    made = apply_latents(base, tmp_path / "out.safetensors")
    assert list(made.config.kept_tokens) == [3, 5] and not made.config.keep_layers
    assert (made.config.kept_range, made.config.kept_half_life) == (60, 500.0)
    for layer in made.model.mixers:
        assert layer.latents.kept_scores.down.weight.abs().max() > 0
