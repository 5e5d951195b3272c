"""The grid of ingredients: equal parameters, its plan, and runs that are done once."""

from pathlib import Path

import pytest
import yaml

from experiments.ingredients.recipe import load, make_run, planned
from experiments.ingredients.report import best_rate, difference
from experiments.ingredients.run import IngredientsGrid, main
from latte.errors import LatteError
from latte.models import count_parameters
from latte.models.registry import find_model
from tests.helpers import read_csv

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "recipes/ingredients"
SMALL = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "num_latents": 8}
TINY = {
    "models": {
        "window": {"preset": "swa++", "fit": "intermediate_size"},
        "gate": {"preset": "trial", "fit": "intermediate_size", "output_gate": True},
        "alone": {
            "preset": "trial", "fit": "value_dim", "mlp": "none", "value_skip": True,
        },
    },
    "shared": SMALL,
    "parameters": 12_000,
    "baseline": "window",
    "tolerance": 0.02,
    "plan": [
        {"models": ["gate"], "rates": [1e-2]},
        {"models": ["window", "gate"], "rates": [1e-2, 1e-3], "seeds": [1]},
    ],
    "data": {"corpus": "embedded", "block_length": 16, "max_validation_tokens": 500},
    "training": {
        "max_steps": 4,
        "batch_size": 2,
        "learning_rate": 1e-3,
        "min_learning_rate": 1e-4,
        "warmup_steps": 1,
    },
    "lengths": [16, 32],
}  # fmt: skip


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "tiny.yaml"
    output = {"output_dir": str(tmp_path / "out")}
    data = TINY["data"] | {"cache_dir": str(tmp_path / "cache")}
    path.write_text(yaml.safe_dump(TINY | output | {"data": data}))
    return path


def rows(folder):
    return read_csv(folder / "runs.csv")


# ---- equal parameters


def test_models_have_equal_parameters(recipe_file):
    from latte.lab.train.run import model_config

    recipe = load(recipe_file)
    for name in recipe.models:
        config = model_config(make_run(recipe, name, 1e-3, 0).recipe, {})
        assert count_parameters(config) == pytest.approx(12_000, rel=0.02), name
    assert set(recipe.overrides["alone"]) - set(SMALL) == {"value_dim", "mlp", "value_skip"}


@pytest.mark.parametrize(
    ("file", "rival", "parameters"),
    [
        ("shakespeare.yaml", ("mamba2", {"intermediate_size": 344, "vocab_size": 259}), 840_520),
        ("wikipedia.yaml", ("transformer++", {"vocab_size": 4096}), 1_574_016),
    ],
)
def test_all_models_of_a_recipe_have_the_parameters_of_its_rival(file, rival, parameters):
    from latte.lab.train.run import model_config

    name, sizes = rival
    assert count_parameters(find_model(name).config("tiny", **sizes)) == parameters
    recipe = load(RECIPES / file)
    assert recipe.parameters == parameters
    runs = {run.preset: run for run in planned(recipe)}
    assert set(runs) == set(recipe.models)
    for name, run in runs.items():
        if "fit" in recipe.models[name]:
            found = count_parameters(model_config(run.recipe, {}))
            assert found == pytest.approx(parameters, rel=0.005), name


def test_a_number_that_cannot_be_had_is_refused(recipe_file):
    recipe = load(recipe_file, ["tolerance=1e-5"])
    with pytest.raises(LatteError, match=r"models.alone: no value_dim gives 12,000"):
        planned(recipe)


# ---- the plan


def test_the_plan_orders_the_runs_and_each_is_done_once(recipe_file):
    labels = [run.label for run in planned(load(recipe_file))]
    assert labels == [
        "gate, rate 0.01, seed 0",
        "window, rate 0.01, seed 1",
        "window, rate 0.001, seed 1",
        "gate, rate 0.01, seed 1",
        "gate, rate 0.001, seed 1",
    ]
    twice = ["plan=[{models: [gate, gate], rates: [1e-2]}, {models: [gate], rates: [1e-2]}]"]
    assert len(planned(load(recipe_file, twice))) == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("plan=[]", "plan: expected at least one stage"),
        ("plan=[{models: [gat], rates: [1e-3]}]", r"plan\[0\].models: no model is called 'gat'"),
        ("plan=[{models: [gate], rates: []}]", r"plan\[0\].rates: expected different numbers"),
        ("plan=[{models: [gate], rate: [1e-3]}]", r"unknown key 'plan\[0\].rate'"),
        ("baseline=mamba", "baseline: no model is called 'mamba'"),
        ("parameters=0", "parameters: expected a number above 0"),
        ("models.gate.output_gates=true", "models.gate: .*output_gates"),
        ("models.gate.fit=size", "models.gate: .*size"),
    ],
)
def test_mistakes_are_one_line(recipe_file, override, message, mistake):
    mistake(main, recipe_file, override, "--dry-run")
    with pytest.raises(LatteError, match=message):
        planned(load(recipe_file, [override]))


# ---- runs


def test_runs_are_done_once_and_reported(recipe_file, monkeypatch, mistake):
    monkeypatch.setattr(IngredientsGrid, "apart", False)
    one = "plan=[{models: [gate, alone], rates: [1e-2]}]"
    assert main([str(recipe_file), one, "--quiet"]) == 0
    folder = recipe_file.parent / "out"
    first = rows(folder)
    assert [row["model"] for row in first] == ["gate", "alone"]
    for row in first:
        assert (row["rate"], row["seed"], row["steps"], row["tokens"]) == ("0.01", "0", "4", "128")
        assert float(row["loss_at_16"]) > 0 and float(row["loss_at_32"]) > 0
        assert int(row["parameters"]) == pytest.approx(12_000, rel=0.02)
        assert row["commit"] and float(row["seconds"]) > 0 and not row["problem"]

    # Another plan keeps them, does its own, and compares.
    monkeypatch.setattr(IngredientsGrid, "do", forbidden_for("gate"))
    other = "plan=[{models: [gate, window], rates: [1e-2]}]"
    assert main([str(recipe_file), other, "--quiet"]) == 0
    second = {row["model"]: row for row in rows(folder)}
    assert set(second) == {"gate", "alone", "window"}
    assert second["gate"] == first[0]
    paired = float(second["gate"]["loss_at_16"]) - float(second["window"]["loss_at_16"])
    assert f"{paired:+.4f}" in (folder / "runs.md").read_text()

    # Other settings by the same name are refused where they are wanted, and not reported.
    changed = "training.batch_size=3"
    assert "holds another run: " in mistake(main, recipe_file, other, changed, "--report")


def forbidden_for(name):
    real = IngredientsGrid.do

    def do(self, run):
        assert run.preset != name, f"{run.label} was done again"
        real(self, run)

    return do


# ---- the report


def test_the_best_rate_is_chosen_on_common_seeds():
    assert best_rate({1e-3: {0: 2.0}, 3e-3: {0: 1.9, 1: 2.5, 2: 2.5}}) == 3e-3
    assert best_rate({1e-3: {0: 2.0, 1: 1.0}, 3e-3: {0: 1.9, 1: 2.5}}) == 1e-3
    assert best_rate({1e-3: {0: 2.0}, 3e-3: {1: 1.9}}) == 3e-3


def test_differences_are_paired_by_seed():
    assert difference({0: 1.5, 1: 1.6, 2: 9.0}, {0: 1.6, 1: 1.7}) == "-0.1000 ± 0.0000"
    assert difference({0: 1.5}, {0: 1.6}) == "-0.1000"
    assert difference({0: 1.5}, {1: 1.6}) == ""
