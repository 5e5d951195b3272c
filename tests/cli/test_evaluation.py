"""`latte evaluate` beyond held-out text: tasks, and the controls of converted models."""

import json
import shutil
from pathlib import Path

import pytest

from latte.cli import main
from tests.helpers import read_csv

ROOT = Path(__file__).parents[2]


def test_generate_prints_no_prompt_before_its_error(place, refused, tmp_path):
    """Nothing is on stdout where the error is one of the tokeniser's."""
    folder = tmp_path / "endless"
    shutil.copytree(place.trained(), folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["eos_token"]
    file.write_text(json.dumps(settings))
    (folder / "manifest.json").unlink()
    assert "has no eos token" in refused("generate", folder, "--prompt", "the latent")


def test_a_prompt_of_bytes_that_are_no_utf_8_is_printed(place, capfd):
    arguments = ["--prompt", "mean \udcff", "--max-new-tokens", "2", "--seed", "0"]
    assert main(["generate", str(place.trained()), *arguments]) == 0
    assert capfd.readouterr().out.startswith("mean \ufffd")


def test_a_converted_model_and_its_controls(save_llama, tmp_path, capsys):
    """Each mixing reaches the model, and its results have a folder of their own."""
    from latte.conversion import convert
    from latte.lab.evaluate.checkpoint import load_checkpoint

    base, folder = save_llama(tmp_path / "base"), tmp_path / "converted"
    convert(base, folder, window=8, num_latents=4)
    assert load_checkpoint(folder)[0].config.mixing == "learned"
    text = tmp_path / "text.txt"
    text.write_text("some text to score, " * 30)
    arguments = ["evaluate", str(folder), "--corpus", str(text), "--lengths", "64"]
    losses = {}
    for mixing in ("window", "latents", "base"):
        assert main([*arguments, "--mixing", mixing]) == 0
        (row,) = read_csv(folder / f"evaluation-{mixing}" / "evaluation.csv")
        assert row["model"] == f"converted ({mixing})"
        losses[mixing] = row["loss"]
    assert len(set(losses.values())) == 3
    assert not (folder / "evaluation").exists()
    assert main(["evaluate", str(base), *arguments[2:]]) == 0
    (row,) = read_csv(base / "evaluation" / "evaluation.csv")
    assert float(row["loss"]) == pytest.approx(float(losses["base"]))
