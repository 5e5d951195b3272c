"""A checkpoint trained through the command line, once for all tests here."""

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

RECIPE = """
model:
  preset: {preset}
  size: tiny
  overrides: {{hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, \
num_key_value_heads: 2, intermediate_size: 64}}
data:
  corpus: {folder}/train-*.txt
  validation: {folder}/held-out-*.txt
  cache_dir: {folder}/cache
  block_length: 32
training: {{max_steps: 4, batch_size: 2, warmup_steps: 1, log_steps: 2, save_steps: 2,
  eval_steps: 4}}
output_dir: {folder}/{preset}
"""


@dataclass(frozen=True)
class Place:
    """A folder with text, recipes and, under `trained`, a run folder for each preset."""

    folder: Path

    def recipe(self, preset="latte-r-swa++"):
        return self.folder / f"{preset}.yaml"

    def trained(self, preset="latte-r-swa++"):
        return self.folder / preset


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    from latte.cli import main

    folder = tmp_path_factory.mktemp("place")
    generator = random.Random(0)
    choice = ["latent", "window", "state", "mean", "mass", "token", "sum", "of", "the", "a"]
    for number in range(6):
        kind = "held-out" if number < 2 else "train"
        text = " ".join(generator.choices(choice, k=300))
        (folder / f"{kind}-{number}.txt").write_text(text + "\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LATTE_CACHE", str(folder / "cache"))
        for preset in ("latte-r-swa++", "transformer++"):
            recipe = folder / f"{preset}.yaml"
            recipe.write_text(RECIPE.format(preset=preset, folder=folder), encoding="utf-8")
            assert main(["train", str(recipe), "--quiet"]) == 0
    return Place(folder)


@pytest.fixture
def refused(capsys):
    """refused(*arguments) -> the one line on stderr of a command that ends with exit code 2."""
    from latte.cli import main

    def run(*arguments):
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:  # argparse
            code = stop.code
        captured = capsys.readouterr()
        assert code == 2, captured
        assert captured.out == ""
        lines = captured.err.splitlines()
        assert len(lines) == 1, captured.err
        assert "error:" in lines[0] and "Traceback" not in lines[0]
        return lines[0]

    return run
