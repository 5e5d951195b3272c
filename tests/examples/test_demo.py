"""The demo, from training to the report, on a few words."""

import gzip
from pathlib import Path

import pytest

from examples import demo as demo_module
from examples.demo import compression_baselines, demo, main
from latte.errors import LatteError
from tests.helpers import read_csv

DEMO_RECIPE = Path(__file__).parents[2] / "recipes" / "demo.yaml"


def small(words, folder):
    """Overrides that shrink the demo's recipe to seconds."""
    return [
        *(f"data.{key}={value}" for key, value in words.items()),
        "data.tokenizer=byte",
        "data.block_length=32",
        "training.max_tokens=1000",
        "training.eval_steps=4",
        "training.log_steps=4",
        "model.overrides={hidden_size: 32, num_hidden_layers: 2, intermediate_size: 64}",
        f"output_dir={folder}",
    ]


def test_the_demo_trains_reports_draws_and_samples(words, tmp_path, capsys):
    demo(str(DEMO_RECIPE), small(words, tmp_path / "demo"))
    out = capsys.readouterr().out
    for expected in ("`latte-r-swa++`", "`transformer++`", "gzip", "xz", "bits/byte at 512"):
        assert expected in out, expected
    assert (tmp_path / "demo" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "demo" / "sample.txt").read_text().startswith("def read_lines")
    rows = read_csv(tmp_path / "demo" / "comparison.csv")
    assert [(row["preset"], row["length"]) for row in rows] == [
        (preset, length)
        for preset in ("latte-r-swa++", "transformer++")
        for length in ("32", "128", "512")
    ]
    assert len({(row["tokens"], row["text_bytes"]) for row in rows}) == 1
    import transformers

    import latte  # noqa: F401  registers the models

    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "demo" / "latte-r-swa++")
    # Again: nothing is trained twice.
    weights = tmp_path / "demo" / "transformer++" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    demo(str(DEMO_RECIPE), small(words, tmp_path / "demo"))
    assert weights.stat().st_mtime_ns == before


def test_mistakes_and_interruptions_of_the_demo_are_one_line(mistake, capsys, monkeypatch):
    assert "training.max_steps" in mistake(main, "--recipe", DEMO_RECIPE, "training.max_stepz=3")
    assert "--recpie" in mistake(main, "--recpie", "x")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_module, "demo", interrupted)
    assert main(["--recipe", str(DEMO_RECIPE)]) == 130
    assert "goes on" in capsys.readouterr().err


def test_compression_baselines():
    held_out = b"a line of text and another\n" * 50 + bytes(range(32, 127)) * 3
    found = compression_baselines(held_out, train=held_out * 2)
    size = len(gzip.compress(held_out, 9))
    assert found["gzip"] == pytest.approx(8 * size / len(held_out))
    assert found["xz_after_train"] < found["xz"]
    assert set(compression_baselines(held_out)) == {"gzip", "xz"}
    with pytest.raises(LatteError, match="got none"):
        compression_baselines(b"")
