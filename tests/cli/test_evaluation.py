"""`latte evaluate` beyond held-out text: tasks, and the controls of converted models."""

import csv
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from latte.cli import main

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is missing")
def test_tasks_write_a_table_a_csv_and_a_record(
    place: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    arguments = ["evaluate", str(place.trained()), "--tasks", "recipes/lm_eval/local.yaml"]
    assert main([*arguments, "--limit", "3", "--output", str(tmp_path)]) == 0
    assert "acc_norm" in capsys.readouterr().out
    record = json.loads((tmp_path / "tasks.json").read_text())
    assert record["limit"] == 3 and record["rows"][0]["samples"] == 3
    with open(tmp_path / "tasks.csv", newline="") as file:
        assert [row["task"] for row in csv.DictReader(file)] == ["sums", "sums"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "a", "--limit", "0"], "--limit: expected at least 1, got 0"),
        (["--num-fewshot", "-1"], "--num-fewshot: expected 0 or more"),
        (["--tasks", "gone.yaml"], "gone.yaml"),
        (["--tasks", ","], "expected names separated by commas"),
        (["--mixing", "window"], "expected a converted model"),
        (["--mixing", "half"], "expected one of learned, window, latents, base, got 'half'"),
    ],
)
def test_mistakes(
    place: Any,
    refused: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    if "--tasks" in options and importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm-eval is missing")
    output = tmp_path / "out"
    line = refused("evaluate", place.trained(), *options, "--output", output)
    assert message in line
    assert not output.exists() or not list(output.iterdir())


def test_generate_prints_no_prompt_before_its_error(
    place: Any, refused: Callable[..., str], tmp_path: Path
) -> None:
    """Nothing is on stdout where the error is one of the tokeniser's."""
    folder = tmp_path / "endless"
    shutil.copytree(place.trained(), folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["eos_token"]
    file.write_text(json.dumps(settings))
    (folder / "manifest.json").unlink()
    assert "has no eos token" in refused("generate", folder, "--prompt", "the latent")


def test_a_prompt_of_bytes_that_are_no_utf_8_is_printed(place: Any, capfd: Any) -> None:
    arguments = ["--prompt", "mean \udcff", "--max-new-tokens", "2", "--seed", "0"]
    assert main(["generate", str(place.trained()), *arguments]) == 0
    assert capfd.readouterr().out.startswith("mean \ufffd")


def test_a_converted_model_and_its_controls(place: Any, tmp_path: Path, capsys: Any) -> None:
    """Each mixing reaches the model, and its results have a folder of their own."""
    import transformers

    from latte.conversion import convert
    from latte.lab.evaluate.checkpoint import load_checkpoint

    base, folder = tmp_path / "base", tmp_path / "converted"
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, intermediate_size=16, vocab_size=259)
    transformers.LlamaForCausalLM(config).save_pretrained(base)
    for file in place.trained().glob("tokenizer*"):
        shutil.copy(file, base)
    convert(base, folder, window=8, num_latents=4)
    assert load_checkpoint(folder)[0].config.mixing == "learned"
    text = tmp_path / "text.txt"
    text.write_text("some text to score, " * 30)
    arguments = ["evaluate", str(folder), "--corpus", str(text), "--lengths", "64"]
    losses = {}
    for mixing in ("window", "latents", "base"):
        assert main([*arguments, "--mixing", mixing]) == 0
        with open(folder / f"evaluation-{mixing}" / "evaluation.csv", newline="") as file:
            (row,) = csv.DictReader(file)
        assert row["model"] == f"converted ({mixing})"
        losses[mixing] = row["loss"]
    assert len(set(losses.values())) == 3
    assert not (folder / "evaluation").exists()
    assert main(["evaluate", str(base), *arguments[2:]]) == 0
    with open(base / "evaluation" / "evaluation.csv", newline="") as file:
        assert float(next(csv.DictReader(file))["loss"]) == pytest.approx(float(losses["base"]))
