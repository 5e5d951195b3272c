"""The demo, from training to the report, on a few words."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path
from typing import Any

import pytest

from examples import demo as demo_module
from examples.demo import compression_baselines, demo, main
from latte.errors import LatteError
from latte.lab.data.preparing import prepare_text

DEMO_RECIPE = Path(__file__).parents[2] / "recipes" / "demo.yaml"


def small(words: dict[str, str], folder: Path) -> list[str]:
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


def test_the_demo_trains_reports_draws_and_samples(
    words: dict[str, str], tmp_path: Path, capsys: Any
) -> None:
    demo(str(DEMO_RECIPE), small(words, tmp_path / "demo"))
    out = capsys.readouterr().out
    for expected in ("`latte-r-swa++`", "`transformer++`", "gzip", "xz", "bits/byte at 512"):
        assert expected in out, expected
    assert (tmp_path / "demo" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "demo" / "sample.txt").read_text().startswith("def read_lines")
    with open(tmp_path / "demo" / "comparison.csv", newline="") as file:
        rows = list(csv.DictReader(file))
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


def test_blocks_are_a_function_of_seed_and_index(make_recipe: Any) -> None:
    recipe = make_recipe()
    text = prepare_text(recipe.data, progress=False)
    one, again = text.blocks(recipe.data, 50, 0), text.blocks(recipe.data, 50, 0)
    other = text.blocks(recipe.data, 50, 1)
    assert all(one[i]["input_ids"].equal(again[i]["input_ids"]) for i in (0, 7, 49))
    assert any(not one[i]["input_ids"].equal(other[i]["input_ids"]) for i in range(5))


def test_mistakes_and_interruptions_of_the_demo_are_one_line(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--recipe", str(DEMO_RECIPE), "training.max_stepz=3"]) == 2
    assert "training.max_steps" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["--recpie", "x"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and "--recpie" in error

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_module, "demo", interrupted)
    assert main(["--recipe", str(DEMO_RECIPE)]) == 130
    assert "goes on" in capsys.readouterr().err


def test_compression_baselines() -> None:
    held_out = b"a line of text and another\n" * 50 + bytes(range(32, 127)) * 3
    found = compression_baselines(held_out, train=held_out * 2)
    size = len(gzip.compress(held_out, 9))
    assert found["gzip"] == pytest.approx(8 * size / len(held_out))
    assert found["xz_after_train"] < found["xz"]
    assert set(compression_baselines(held_out)) == {"gzip", "xz"}
    with pytest.raises(LatteError, match="got none"):
        compression_baselines(b"")
