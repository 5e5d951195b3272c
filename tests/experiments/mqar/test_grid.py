"""The MQAR grid, from a recipe to the report, on cells that take seconds."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml

from experiments.grids import claimed
from experiments.mqar import training as mqar_training
from experiments.mqar.data import MQAR, MQARTable, shifted_labels
from experiments.mqar.recipe import Cell, load, runs
from experiments.mqar.report import best, markdown
from experiments.mqar.run import RESULT_FILE, MQARSweep, main
from experiments.mqar.training import count_correct, query_logits, train_run
from tests.helpers import read_csv

ROOT = Path(__file__).parents[3]
TINY = {
    "models": {
        "both": {"preset": "latte-r-swa++", "sliding_window": 4},
        "window": {"preset": "swa++", "sliding_window": 4},
    },
    "shared": {"num_hidden_layers": 2, "num_attention_heads": 2},
    "data": {
        "cells": [[8, 2], [16, 2]],
        "vocab_size": 32,
        "train_examples": 20,
        "test_examples": 10,
    },
    "widths": [16],
    "latents": [4],
    "mlp_ratio": 1.0,
    "training": {"max_epochs": 2, "learning_rates": [1e-3, 1e-2], "batch_size": 8},
}


def sweep(recipe):
    """Do what is due; the report."""
    return MQARSweep(recipe, quiet=True).sweep()[1]


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY | {"output_dir": str(tmp_path / "out")}))
    return path


@pytest.fixture
def model():
    from latte.models import LatteForCausalLM, preset_config

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    return LatteForCausalLM(preset_config("latte++", "tiny", **sizes, initializer_range=0.5))


# ---- what is computed


def test_query_logits_are_those_of_the_whole_model(model):
    """Gathering before the head gives the logits, and the loss, of the causal model itself."""
    data = MQAR(16, 3, examples=5, vocab_size=32)
    table = data.table()
    tokens, queries, answers = (t.long() for t in vars(table).values())
    logits = query_logits(model, tokens, queries)
    everywhere = model(input_ids=tokens).logits
    for m in range(5):
        torch.testing.assert_close(logits[m], everywhere[m, queries[m]])
    labels = torch.stack([item["labels"] for item in data])
    loss = model(input_ids=tokens, labels=shifted_labels(labels)).loss
    torch.testing.assert_close(F.cross_entropy(logits.flatten(0, 1), answers.flatten()), loss)


def test_accuracy_counts_right_answers_among_all_tokens(model):
    table = MQAR(16, 3, examples=7, vocab_size=32).table()
    said = model(input_ids=table.tokens_MT.long()).logits.argmax(-1)
    answers = said.gather(1, table.queries_MN.long()).int()
    model.train()
    for wrong in (0, 1, 5):
        changed = answers.flatten().clone()
        changed[:wrong] = (changed[:wrong] + 1) % 32
        own = MQARTable(table.tokens_MT, table.queries_MN, changed.view_as(answers))
        assert count_correct(model, own, batch_size=3) == (21 - wrong, 21)
    assert model.training


def tables_of(run, recipe):
    train = {c.name: mqar_training.make_table(c, recipe.data, "train") for c in run.train}
    return train, {c.name: mqar_training.make_table(c, recipe.data, "test") for c in run.tests}


def test_success_ends_a_run_only_when_all_examples_confirm_it(recipe_file, monkeypatch):
    recipe = load(recipe_file, ["training.quick_examples=4", "training.max_epochs=5"])
    run = runs(recipe)[0]
    lucky = {4: 1.0, 10: 0.5}  # the first examples pass, all together do not

    def counted(model, table, *_, **__):
        return int(lucky[len(table)] * 20), 20

    monkeypatch.setattr(mqar_training, "count_correct", counted)
    outcome = train_run(run, *tables_of(run, recipe), torch.device("cpu"))
    assert outcome.stopped == "epochs" and outcome.epochs == 5
    lucky[10] = 1.0
    outcome = train_run(run, *tables_of(run, recipe), torch.device("cpu"))
    assert outcome.stopped == "accuracy" and outcome.epochs == 1
    assert outcome.cells[0]["accuracy"] == 1.0


def test_embeddings_may_have_a_learning_rate_of_their_own(recipe_file):
    recipe = load(recipe_file, ["training.embedding_rate=0.5", "shared.tie_word_embeddings=false"])
    run = runs(recipe)[0]
    training = mqar_training.Training(run, *tables_of(run, recipe), torch.device("cpu"))
    fresh, optimizer = training.model, training.optimizer
    names = {id(p): name for name, p in fresh.named_parameters()}
    groups = {
        names[id(p)]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert set(groups) == set(names.values())
    for name, p in fresh.named_parameters():
        rate = 5e-4 if name in ("model.embed_tokens.weight", "lm_head.weight") else 1e-3
        assert groups[name] == (rate, 0.1 if p.ndim >= 2 else 0.0), name


# ---- the grid


def test_a_grid_reports_and_resumes_run_by_run(recipe_file, tmp_path, monkeypatch, capsys):
    assert main([str(recipe_file)]) == 0
    out = tmp_path / "out"
    printed = capsys.readouterr().out
    assert "[8/8] 16x2 window E16 lr 0.01 seed 0" in printed
    assert "| `both` | 16 | 4 |" in printed and "| `window` | 16 | - |" in printed
    results = sorted(out.rglob(RESULT_FILE))
    assert len(results) == 8  # 2 cells, 2 models, 2 learning rates
    rows = read_csv(out / "accuracy.csv")
    assert len(rows) == 8
    assert {(row["model"], row["window"], row["latents"]) for row in rows} == {
        ("both", "4", "4"),
        ("window", "4", ""),
    }
    for row in rows:
        assert float(row["accuracy"]) == pytest.approx(int(row["correct"]) / int(row["queries"]))
    assert (out / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "accuracy.md").read_text() in printed
    assert not (out / "latents.png").exists()
    lost = out / "8x2" / "window" / "E16" / "lr0.01-seed0" / RESULT_FILE
    before = json.loads(lost.read_text())
    kept = {path: path.stat().st_mtime_ns for path in results if path != lost}
    lost.unlink()
    done = []
    plain = mqar_training.train_run
    monkeypatch.setattr(
        mqar_training, "train_run", lambda run, *rest: done.append(run.label) or plain(run, *rest)
    )
    sweep(load(recipe_file))
    assert done == ["8x2 window E16 lr 0.01 seed 0"]
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert json.loads(lost.read_text())["outcome"]["cells"] == before["outcome"]["cells"]


def test_a_run_that_another_process_does_is_passed_over(recipe_file):
    first, *others = runs(load(recipe_file))
    with claimed(first):
        assert main([str(recipe_file), "--quiet"]) == 0
    assert not (first.folder / RESULT_FILE).exists()
    assert all((run.folder / RESULT_FILE).exists() for run in others)


def test_solved_cells_need_no_more_learning_rates(recipe_file, tmp_path, monkeypatch):
    monkeypatch.setattr(mqar_training, "count_correct", lambda *_, **__: (20, 20))
    sweep(load(recipe_file, ["select=[both]", "training.skip_solved=true"]))
    folders = sorted(path.parent.name for path in (tmp_path / "out").rglob(RESULT_FILE))
    assert folders == ["lr0.001-seed0"] * 2


def test_a_mixture_and_a_sweep_over_latents(recipe_file, tmp_path):
    overrides = [
        "data.cells=null",
        "data.mixture=[[8,2,20],[16,4,8]]",
        "data.tests=[[8,2],[16,2],[16,4]]",
        "latents=[2,4]",
        "training.learning_rates=[1e-3]",
    ]
    table = sweep(load(recipe_file, overrides))
    assert "| 8 / 2 | 16 / 2 | 16 / 4 |" in table
    assert len(list((tmp_path / "out").rglob(RESULT_FILE))) == 3  # window has no latents
    assert (tmp_path / "out" / "latents.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_shows_the_best_learning_rate_over_the_seeds(recipe_file):
    recipe = load(recipe_file, ["training.seeds=[0,1]", "data.cells=[[8,2]]", "select=[window]"])
    accuracies = {(1e-3, 0): 0.9, (1e-3, 1): 0.2, (1e-2, 0): 0.6, (1e-2, 1): 0.7}
    results = {
        run: {
            "outcome": {
                "cells": [
                    {"length": 8, "pairs": 2, "accuracy": accuracies[run.learning_rate, run.seed]}
                ],
                "stopped": "minutes" if run.seed else "epochs",
                "seconds": 30.0,
            }
        }
        for run in runs(recipe)
    }
    assert best(results)["8x2", "window", 16, None][8, 2] == (1e-2, [0.6, 0.7])
    text = markdown(results)
    assert "0.6500 ± 0.6353" in text
    assert "4 runs, 2m00s of training; 2 of them cut by their minutes" in text


# ---- recipes and documents


@pytest.mark.parametrize("name", ["full", "based", "cpu", "cpu-512", "latents"])
def test_recipes_have_runs_and_every_control(name):
    recipe = load(ROOT / "recipes" / "mqar" / f"{name}.yaml")
    grid = runs(recipe)
    assert all(run.config["num_hidden_layers"] == 2 for run in grid)
    assert recipe.data.vocab_size == 8192 and recipe.data.power_a == 0.01
    cells = [[64, 4], [128, 8], [256, 16], [512, 64]]
    if name == "latents":
        assert len({run.latents for run in grid}) >= 5 and recipe.data.cells == cells
        return
    windows = {run.config.get("sliding_window") for run in grid if run.preset == "latte-r-swa++"}
    controls = {run.config.get("sliding_window") for run in grid if run.preset == "swa++"}
    assert windows == controls
    presets = {run.preset for run in grid}
    assert {"latte-r++", "latte++", "transformer++", "linear++"} <= presets
    if name == "full":
        assert recipe.data.cells == cells and recipe.widths == [64, 128, 256, 512]
        assert recipe.data.train_examples == 100_000 and recipe.data.test_examples == 10_000
        assert windows == {16, 32, 128} and len(grid) == 640
    if name == "based":
        assert grid[0].tests[-1] == Cell(1024, 256, 1000)


# ---- mistakes: one line each, and nothing written


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.cells=[[64,17]]"], "length 64 with 17 pairs: expected a length of at least 68"),
        (["data.vocab_size=31"], "vocab_size must be even"),
        (["data.cells=[[8]]"], "data.cells: expected [length, pairs], got [8]"),
        (["data.cells=[]"], "at least one [length, pairs], got none"),
        (["data.cells=[[8,2],[8,2]]"], "data.cells: expected different cells"),
        (["data.mixture=[[8,2,9]]"], "exactly one of data.cells and data.mixture"),
        (["data.cells=null", "data.mixture=[[8,2,9]]"], "data.tests go together"),
        (["data.cells=null", "data.mixture=[[8,2,0]]", "data.tests=[[8,2]]"], "1 example"),
        (["data.train_examples=0"], "data.train_examples: expected a number above 0, got 0"),
        (["training.stop_at=99"], "training.stop_at: expected above 0 and at most 1"),
        (["training.learning_rates=[]"], "training.learning_rates: expected different numbers"),
        (["training.learning_rates=[-1.0]"], "expected numbers above 0"),
        (["data.seed=5000000000"], "data.seed: expected 0 to 4294967295"),
        (["training.learning_rates=[.inf]"], "training.learning_rates: expected numbers above 0"),
        (["widths=[15]"], "models.both: "),
        (["models.both=3"], "models.both: expected a section with a preset"),
        (["models={a/b: {preset: latte++}}"], "they name folders"),
        (["select=[]"], "select: expected at least one model"),
    ],
)
def test_mistakes_are_one_line(recipe_file, tmp_path, mistake, overrides, message):
    error = mistake(main, recipe_file, *overrides)
    assert message in error and error.startswith("mqar: error: ")
    assert not (tmp_path / "out").exists()


def test_wrong_arguments_are_one_line(mistake):
    assert "--reprot" in mistake(main, "recipe.yaml", "--reprot")
