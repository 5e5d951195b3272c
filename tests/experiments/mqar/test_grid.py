"""The MQAR grid, from a recipe to the report, on cells that take seconds."""

from __future__ import annotations

import csv
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml

from experiments import loop
from experiments.grids import claimed
from experiments.mqar import training as mqar_training
from experiments.mqar.data import MQAR, MQARTable, shifted_labels
from experiments.mqar.recipe import Cell, load, runs
from experiments.mqar.report import best, markdown
from experiments.mqar.run import RESULT_FILE, MQARSweep, main
from experiments.mqar.training import count_correct, query_logits, train_run
from latte.errors import LatteError
from latte.lab.train.run_folder import checkpoints
from latte.models import registry

ROOT = Path(__file__).parents[3]
TINY: dict[str, Any] = {
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


def sweep(recipe: Any) -> str:
    """Do what is due; the report."""
    return MQARSweep(recipe, quiet=True).sweep()[1]


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY | {"output_dir": str(tmp_path / "out")}))
    return path


@pytest.fixture
def model() -> Any:
    from latte.models import LatteForCausalLM, preset_config

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    return LatteForCausalLM(preset_config("latte++", "tiny", **sizes, initializer_range=0.5))


# ---- what is computed


def test_query_logits_are_those_of_the_whole_model(model: Any) -> None:
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


def test_accuracy_counts_right_answers_among_all_tokens(model: Any) -> None:
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


def test_every_example_is_read_once_an_epoch_in_an_order_of_the_seed(recipe_file: Path) -> None:
    recipe = load(recipe_file, ["data.cells=null", "data.mixture=[[8,2,20],[16,4,9]]",
                                "data.tests=[[8,2]]"])  # fmt: skip
    run = runs(recipe)[0]
    tables = {c.name: mqar_training.make_table(c, recipe.data, "train") for c in run.train}
    sizes = {"8x2": 8, "16x4": 4}
    batches = list(mqar_training._batches(run, tables, sizes, 2))
    again = list(mqar_training._batches(run, tables, sizes, 2))
    assert [(n, r.tolist()) for n, r in batches] == [(n, r.tolist()) for n, r in again]
    for half in (batches[:6], batches[6:]):
        for name, count in (("8x2", 20), ("16x4", 9)):
            rows = [row for cell, part in half if cell == name for row in part.tolist()]
            assert sorted(rows) == list(range(count))
    assert [r.tolist() for _, r in batches[:6]] != [r.tolist() for _, r in batches[6:]]


def tables_of(run: Any, recipe: Any) -> tuple[Any, Any]:
    train = {c.name: mqar_training.make_table(c, recipe.data, "train") for c in run.train}
    return train, {c.name: mqar_training.make_table(c, recipe.data, "test") for c in run.tests}


def test_runs_repeat_exactly_and_leave_the_random_state(recipe_file: Path) -> None:
    recipe = load(recipe_file)
    run = runs(recipe)[0]
    state = torch.get_rng_state()
    outcomes = [train_run(run, *tables_of(run, recipe), torch.device("cpu")) for _ in range(2)]
    assert torch.equal(state, torch.get_rng_state())
    curves = [[{**p, "seconds": 0} for p in outcome.curve] for outcome in outcomes]
    assert curves[0] == curves[1] and outcomes[0].cells == outcomes[1].cells
    assert outcomes[0].stopped == "epochs" and outcomes[0].steps == 6 and outcomes[0].epochs == 2
    assert outcomes[0].cells[0]["queries"] == 20
    assert outcomes[0].curve[-1]["loss"] < outcomes[0].curve[0]["loss"]


def test_success_ends_a_run_only_when_all_examples_confirm_it(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load(recipe_file, ["training.quick_examples=4", "training.max_epochs=5"])
    run = runs(recipe)[0]
    lucky = {4: 1.0, 10: 0.5}  # the first examples pass, all together do not

    def counted(model: Any, table: Any, *_: Any, **__: Any) -> tuple[int, int]:
        return int(lucky[len(table)] * 20), 20

    monkeypatch.setattr(mqar_training, "count_correct", counted)
    outcome = train_run(run, *tables_of(run, recipe), torch.device("cpu"))
    assert outcome.stopped == "epochs" and outcome.epochs == 5
    lucky[10] = 1.0
    outcome = train_run(run, *tables_of(run, recipe), torch.device("cpu"))
    assert outcome.stopped == "accuracy" and outcome.epochs == 1
    assert outcome.cells[0]["accuracy"] == 1.0


def test_a_budget_of_minutes_ends_a_run_with_a_complete_score(recipe_file: Path) -> None:
    recipe = load(recipe_file, ["training.max_minutes=1e-9", "training.quick_examples=4"])
    run = runs(recipe)[0]
    outcome = train_run(run, *tables_of(run, recipe), torch.device("cpu"))
    assert outcome.stopped == "minutes" and outcome.steps == 1
    assert outcome.cells[0]["queries"] == 20


def test_embeddings_may_have_a_learning_rate_of_their_own(recipe_file: Path) -> None:
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


def test_a_step_that_is_not_finite_never_reaches_the_weights(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load(recipe_file)
    run = runs(recipe)[0]
    plain, calls = mqar_training.query_logits, []

    def broken(*arguments: Any) -> Any:
        calls.append(1)
        return plain(*arguments) * (float("nan") if len(calls) == 2 else 1.0)

    monkeypatch.setattr(mqar_training, "query_logits", broken)
    outcome = train_run(run, *tables_of(run, recipe), torch.device("cpu"))
    assert outcome.stopped == "diverged" and outcome.steps == 1
    assert outcome.cells[0]["queries"] == 20


# ---- the grid


def test_a_grid_reports_and_resumes_run_by_run(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert main([str(recipe_file)]) == 0
    out = tmp_path / "out"
    printed = capsys.readouterr().out
    assert "[8/8] 16x2 window E16 lr 0.01 seed 0" in printed
    assert "| `both` | 16 | 4 |" in printed and "| `window` | 16 | - |" in printed
    results = sorted(out.rglob(RESULT_FILE))
    assert len(results) == 8  # 2 cells, 2 models, 2 learning rates
    with open(out / "accuracy.csv", newline="") as file:
        rows = list(csv.DictReader(file))
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


def test_an_interrupted_grid_keeps_what_it_has(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    plain, calls = mqar_training.train_run, []

    def interrupted(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return plain(*arguments)

    monkeypatch.setattr(mqar_training, "train_run", interrupted)
    assert main([str(recipe_file), "--quiet"]) == 130
    assert "goes on after the last finished run" in capsys.readouterr().err
    assert len(list((tmp_path / "out").rglob(RESULT_FILE))) == 2
    assert len((tmp_path / "out" / "accuracy.csv").read_text().splitlines()) == 3
    assert main([str(recipe_file), "--quiet"]) == 0
    assert len(calls) == 3 + 6


def test_a_killed_run_goes_on_to_the_same_result(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the checkpoint of its newest evaluation, which is gone at the end."""
    one = ["select=[both]", "data.cells=[[8,2]]", "training.learning_rates=[1e-2]"]
    one.append("training.evaluations_per_epoch=2")  # after steps 2, 3, 5 and 6
    sweep(load(recipe_file, [*one, f"output_dir={tmp_path / 'whole'}"]))
    plain, calls = loop.take_step, []

    def killed(*arguments: Any) -> bool:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return plain(*arguments)

    monkeypatch.setattr(loop, "take_step", killed)
    assert main([str(recipe_file), *one, "--quiet"]) == 130
    (run,) = runs(load(recipe_file, one))
    assert [path.name for path in checkpoints(run.folder)] == ["checkpoint-2", "checkpoint-3"]
    assert main([str(recipe_file), *one, "--quiet"]) == 0
    assert len(calls) == 5 + 3 and checkpoints(run.folder) == []
    (whole,) = (tmp_path / "whole").rglob(RESULT_FILE)
    outcomes = []
    for file in (whole, run.folder / RESULT_FILE):
        outcome = json.loads(file.read_text())["outcome"]
        for times in (outcome, *outcome["curve"]):
            del times["seconds"]
        outcomes.append(outcome)
    assert outcomes[0] == outcomes[1] and len(outcomes[0]["curve"]) == 4


def test_a_run_that_another_process_does_is_passed_over(recipe_file: Path) -> None:
    first, *others = runs(load(recipe_file))
    with claimed(first):
        assert main([str(recipe_file), "--quiet"]) == 0
    assert not (first.folder / RESULT_FILE).exists()
    assert all((run.folder / RESULT_FILE).exists() for run in others)


def test_solved_cells_need_no_more_learning_rates(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mqar_training, "count_correct", lambda *_, **__: (20, 20))
    sweep(load(recipe_file, ["select=[both]", "training.skip_solved=true"]))
    folders = sorted(path.parent.name for path in (tmp_path / "out").rglob(RESULT_FILE))
    assert folders == ["lr0.001-seed0"] * 2


def test_a_mixture_and_a_sweep_over_latents(recipe_file: Path, tmp_path: Path) -> None:
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


def test_the_table_shows_the_best_learning_rate_over_the_seeds(recipe_file: Path) -> None:
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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_tiny_cell_is_learned(tmp_path: Path) -> None:
    """Four pairs among 32 tokens, all of them in the window: the loop learns what can be learned.

    With a window of 8 the latents have to carry some of them, which takes longer
    (experiments/results/mqar.md).
    """
    path = tmp_path / "learn.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "base": str(ROOT / "recipes/mqar/base.yaml"),
                "models": {"small": {"preset": "latte-r-swa++", "sliding_window": 32}},
                "select": ["small"],
                # A vocabulary this small can do without tied embeddings, and is learned sooner.
                "shared": {"tie_word_embeddings": False},
                "init_scale": 0.8,
                "data": {
                    "cells": [[32, 4]],
                    "vocab_size": 128,
                    "train_examples": 25_600,
                    "test_examples": 1000,
                },
                "widths": [64],
                "latents": [64],
                "mlp_ratio": 1.0,
                "training": {
                    "max_epochs": 4,
                    "learning_rates": [3e-3],
                    "betas": [0.9, 0.99],
                    "batch_size": 64,
                    "warmup_steps": 20,
                    "stop_at": 0.95,
                    "evaluations_per_epoch": 8,
                    "quick_examples": 250,
                },
                "output_dir": str(tmp_path / "out"),
            }
        )
    )
    sweep(load(path))
    (file,) = (tmp_path / "out").rglob(RESULT_FILE)
    outcome = json.loads(file.read_text())["outcome"]
    assert outcome["cells"][0]["accuracy"] > 0.9, outcome["curve"]


def test_plugins_register_models(recipe_file: Path, tmp_path: Path, monkeypatch: Any) -> None:
    registry.find_model("latte++")  # with it the library's presets are registered
    monkeypatch.setattr(registry, "_presets", dict(registry._presets))
    plugin = tmp_path / "mine.py"  # beside the recipe
    plugin.write_text(
        "from latte.models.registry import register_preset\n"
        "register_preset('mqar-mine', mixer='latte', latent_input='conv', position='none')\n"
    )
    models = "models={mine: {preset: mqar-mine}}"
    with pytest.raises(LatteError, match="models.mine: unknown preset 'mqar-mine'"):
        runs(load(recipe_file, [models]))
    values = yaml.safe_load(recipe_file.read_text()) | {"plugins": ["mine.py"]}
    recipe_file.write_text(yaml.safe_dump(values))
    assert runs(load(recipe_file, [models, "select=[mine]"]))[0].config["num_latents"] == 4
    with pytest.raises(LatteError, match="plugins: gone.py is not a file"):
        load(recipe_file, ["plugins=[gone.py]"])


# ---- recipes and documents


@pytest.mark.parametrize("name", ["full", "based", "cpu", "cpu-512", "latents"])
def test_recipes_have_runs_and_every_control(name: str) -> None:
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


def test_documented_commands_could_be_typed() -> None:
    text = (ROOT / "docs" / "mqar.md").read_text(encoding="utf-8")
    commands = re.findall(r"^\$ (.*)$", text, re.M)
    found = [shlex.split(line) for line in commands if "experiments.mqar" in line]
    assert len(found) >= 3
    for words in found:
        assert words[:3] == ["python", "-m", "experiments.mqar"]
        arguments = [word for word in words[4:] if not word.startswith("--")]
        assert runs(load(ROOT / words[3], arguments))


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
        (["training.betas=[0.9]"], "training.betas: expected two numbers"),
        (["training.seeds=[-1]"], "training.seeds: expected 0 to 4294967295, got -1"),
        (["data.seed=5000000000"], "data.seed: expected 0 to 4294967295"),
        (["training.learning_rates=[.inf]"], "training.learning_rates: expected numbers above 0"),
        (["training.warmup_steps=-1"], "training.warmup_steps: expected 0 or more"),
        (["training.max_epoch=3"], "nearest valid key is 'training.max_epochs'"),
        (["widths=[15]"], "models.both: "),
        (["latents=[3]"], "num_latents must be a multiple of num_attention_heads"),
        (["models.both.preset=latte-z++"], "unknown preset 'latte-z++'"),
        (["models.both.sliding_windw=3"], "unknown field 'sliding_windw'"),
        (["models.both=3"], "models.both: expected a section with a preset"),
        (["models={a/b: {preset: latte++}}"], "they name folders"),
        (["models={}"], "models: expected at least one model, got none"),
        (["select=[neither]"], "no model is called 'neither'; expected some of both, window"),
        (["select=[]"], "select: expected at least one model"),
    ],
)
def test_mistakes_are_one_line(
    recipe_file: Path, tmp_path: Path, capsys: Any, overrides: list[str], message: str
) -> None:
    assert main([str(recipe_file), *overrides]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error and error.startswith("mqar: error: ")
    assert not (tmp_path / "out").exists()


def test_a_missing_recipe_and_a_folder_that_is_a_file(
    recipe_file: Path, tmp_path: Path, capsys: Any
) -> None:
    assert main([str(tmp_path / "none.yaml")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main([str(recipe_file), f"output_dir={recipe_file}"]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_overrides_may_stand_after_options(recipe_file: Path, capsys: Any) -> None:
    assert main([str(recipe_file), "--dry-run", "select=[window]", "--quiet", "widths=[16]"]) == 0
    assert "both" not in capsys.readouterr().out


def test_wrong_arguments_are_one_line(capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["recipe.yaml", "--reprot"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and "--reprot" in error


def test_a_folder_with_other_or_damaged_results_is_left_alone(
    recipe_file: Path, tmp_path: Path
) -> None:
    few = ["select=[window]", "data.cells=[[8,2]]", "training.learning_rates=[1e-3]"]
    sweep(load(recipe_file, few))
    (file,) = (tmp_path / "out").rglob(RESULT_FILE)
    before = file.read_text()
    with pytest.raises(LatteError, match="another run: training.max_epochs is 2 there and 3 here"):
        sweep(load(recipe_file, [*few, "training.max_epochs=3"]))
    assert file.read_text() == before
    file.write_text(before[:50])
    with pytest.raises(LatteError, match="is damaged .* delete it"):
        sweep(load(recipe_file, few))
    assert file.read_text() == before[:50]


def test_a_report_of_what_is_done_trains_nothing(
    recipe_file: Path, tmp_path: Path, capsys: Any
) -> None:
    assert main([str(recipe_file), "--report"]) == 0
    assert "No run has a result yet." in capsys.readouterr().out
    sweep(load(recipe_file, ["select=[window]", "data.cells=[[8,2]]"]))
    assert main([str(recipe_file), "--report"]) == 0
    assert "2 runs" in capsys.readouterr().out
    assert len(list((tmp_path / "out").rglob(RESULT_FILE))) == 2


def test_a_report_is_about_all_models_whichever_this_call_trained(
    recipe_file: Path, tmp_path: Path
) -> None:
    one = ["data.cells=[[8,2]]", "training.learning_rates=[1e-3]"]
    for name in ("window", "both"):
        sweep(load(recipe_file, [*one, f"select=[{name}]"]))
        with open(tmp_path / "out" / "accuracy.csv", newline="") as file:
            found = [row["model"] for row in csv.DictReader(file)]
        assert found == (["window"] if name == "window" else ["both", "window"])
    other = [*one, "select=[both]", "models.window.sliding_window=3"]  # passed over: not these
    assert "`window`" not in sweep(load(recipe_file, other))


def test_a_run_that_fails_costs_the_others_nothing(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    plain = mqar_training.train_run

    def short_of_memory(run: Any, *rest: Any) -> Any:
        if run.model != "both":
            return plain(run, *rest)
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    monkeypatch.setattr(mqar_training, "train_run", short_of_memory)
    assert main([str(recipe_file), "data.cells=[[8,2]]", "--quiet"]) == 2
    failed, *_, last = capsys.readouterr().err.splitlines()
    assert failed.startswith("  failed: 8x2 both E16 L4 lr 0.001 seed 0: CUDA out of memory. Tri")
    assert last.startswith("mqar: error: 2 runs failed and would be tried again; the others")
    assert (tmp_path / "out" / "accuracy.md").read_text().count("| `window`") == 1


def test_a_dry_run_lists_and_does_nothing(recipe_file: Path, tmp_path: Path, capsys: Any) -> None:
    assert main([str(recipe_file), "--dry-run"]) == 0
    assert capsys.readouterr().out.endswith("8 runs\n")
    assert not (tmp_path / "out").exists()
