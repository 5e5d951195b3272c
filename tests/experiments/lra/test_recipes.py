"""Long Range Arena recipes: those of the repository, and mistakes in one's own."""

import importlib
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import yaml

from experiments.lra.data import load_task
from experiments.lra.recipe import load, runs
from experiments.lra.run import main
from latte.lab.train.recipe import load_recipe
from latte.models.config import preset_config

ROOT = Path(__file__).parents[3]


def check_beginning(recipe):
    """The language model that a recipe begins with is one of the recipes, of the same sizes."""
    assert recipe.initial is not None
    first = load_recipe(ROOT / "recipes" / f"{recipe.initial.removeprefix('runs/')}.yaml")
    assert first.output_dir == recipe.initial
    [run] = runs(recipe)
    assert run.preset == first.model.preset and run.config["is_causal"] is True
    assert run.config["vocab_size"] >= recipe.data.vocab_size
    assert first.model.overrides.items() <= run.config.items()


@pytest.mark.parametrize(
    "path", sorted((ROOT / "recipes/lra").glob("*.yaml")), ids=lambda p: p.stem
)
def test_recipes_have_the_papers_models_and_the_controls(path):
    if path.stem == "base":
        pytest.skip("no task")
    recipe = load(path)
    assert {"latte", "latte-r++", "latte-r-swa++", "transformer++", "swa++"} <= set(recipe.models)
    assert path.stem.split("-")[0] == recipe.task
    if recipe.initial is not None:
        check_beginning(recipe)
        return
    for run in runs(recipe):
        assert run.config["is_causal"] is False
        assert run.config["vocab_size"] == recipe.data.vocab_size
    if path.stem == "listops":
        data = recipe.data
        assert (data.min_length, data.max_length, data.max_depth, data.max_args) == (
            500, 2000, 10, 10,
        )  # fmt: skip
        sizes = (data.train_examples, data.validation_examples, data.test_examples)
        assert sizes == (96_000, 2_000, 2_000)
    lengths = {"text": 4096, "retrieval": 4000, "image": 1024, "pathfinder": 1024}
    if path.stem in lengths:
        assert recipe.data.longest == lengths[path.stem]


TABLE_8 = {  # heads, latents, width, learning rate, batch, weight decay, dropout, epochs
    "listops": (4, 40, 128, 1e-3, 64, 0.01, 0.1, 50),
    "text": (4, 256, 256, 1e-3, 32, 0.05, 0.1, 32),
    "retrieval": (4, 40, 128, 1e-4, 32, 0.01, 0.1, 20),
    "image": (4, 40, 512, 1e-3, 32, 0.05, 0.1, 200),
    "pathfinder": (4, 256, 256, 1e-3, 64, 0.03, 0.2, 200),
}


@pytest.mark.parametrize("task", TABLE_8)
def test_full_recipes_are_table_8(task):
    recipe = load(ROOT / f"recipes/lra/{task}.yaml")
    section = recipe.training
    rates = section.learning_rate, section.batch_size, section.weight_decay
    position = "sinusoidal" if task in ("image", "pathfinder") else "rope"
    for run in runs(recipe):
        config = preset_config(run.preset, "tiny", **run.config)
        sizes = config.num_attention_heads, config.num_latents, config.hidden_size
        if config.num_latents is None:
            sizes = (sizes[0], TABLE_8[task][1], sizes[2])
        else:
            assert config.num_hidden_layers == 6
        assert (*sizes, *rates, config.hidden_dropout, section.max_epochs) == TABLE_8[task]
        if run.model == "latte-r-swa++":
            assert config.position == position


@pytest.mark.parametrize(("page", "count"), [("lra", 4), ("mqar", 3)])
def test_documented_commands_could_be_typed(page, count):
    module = importlib.import_module(f"experiments.{page}.recipe")
    text = (ROOT / "experiments/results" / f"{page}.md").read_text(encoding="utf-8")
    commands = [shlex.split(line) for line in re.findall(r"^\$ (.*)$", text, re.M)]
    commands = [words for words in commands if words[:3] == ["python", "-m", f"experiments.{page}"]]
    assert len(commands) >= count
    for words in commands:
        overrides = [word for word in words[4:] if word[0] != "-"]
        assert module.runs(module.load(ROOT / words[3], overrides))


# ---- mistakes: one line each, and nothing written


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task=listop"], "task: expected one of listops, text"),
        (["data.min_lenght=3"], "nearest valid key is 'data.min_length'"),
        (["data.min_length=12"], "expected a length between them"),
        (["training.max_epochs=1", "training.max_steps=1"], "exactly one of training.max_steps"),
        (["training.batch_size=0"], "training.batch_size: expected a number above 0, got 0"),
        (["training.warmup_steps=-1"], "training.warmup_steps: expected 0 or more"),
        (["training.betas=[1,2]"], "training.betas: expected two numbers"),
        (["training.seeds=[]"], "training.seeds: expected different numbers"),
        (["training.seeds=[99999999999999999999]"], "training.seeds: expected 0 to 4294967295"),
        (["training.learning_rate=.inf"], "training.learning_rate: expected a number above 0"),
        (["workers=0"], "workers: expected at least 1, got 0"),
        (["shared.hidden_size=15"], "models.both: "),
        (["models.both.preset=latte-z++"], "unknown preset 'latte-z++'"),
        (["models.both.sliding_windw=3"], "unknown field 'sliding_windw'"),
        (["models={}"], "models: expected at least one model"),
        (["select=[neither]"], "no model is called 'neither'; expected some of both, window"),
    ],
)
def test_mistakes_are_one_line(recipe_file, tmp_path, mistake, overrides, message):
    error = mistake(main, recipe_file, *overrides, "--dry-run")
    assert message in error and error.startswith("lra: error: ")
    assert not (tmp_path / "out").exists()


def test_missing_files(tiny, recipe_file, tmp_path, mistake):
    assert "does not exist" in mistake(main, tmp_path / "none.yaml")
    recipe_file.write_text("models: {}")
    assert "missing key 'task': expected one of listops" in mistake(main, recipe_file)
    recipe_file.write_text(
        yaml.safe_dump({**tiny, "task": "text", "data": {"train": "no.jsonl", "test": "no.jsonl"},
                        "output_dir": str(tmp_path / "out")})
    )  # fmt: skip
    assert "no.jsonl: no such file or folder" in mistake(main, recipe_file, "--quiet")


def test_a_dry_run_and_the_balance_train_nothing(recipe_file, tmp_path, capsys):
    # An override of the length replaces the recipe's.
    assert main([str(recipe_file), "training.max_epochs=1", "--dry-run"]) == 0
    assert capsys.readouterr().out.endswith("2 runs\n")
    assert main([str(recipe_file), "--balance"]) == 0
    table = capsys.readouterr().out
    task = load_task("listops", load(recipe_file).data, tmp_path / "cache")
    counts = np.bincount(task.train.labels_N, minlength=10)
    assert f"{counts.argmax()}: {counts.max() / 40:.4f}" in table
    assert main([str(recipe_file), "--report"]) == 0
    assert "No run has a result yet." in capsys.readouterr().out
    assert not list((tmp_path / "out").glob("*/*"))
