"""The Long Range Arena runner, from a recipe to the report, on tasks that take seconds."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml

from experiments import loop
from experiments.lra import training as lra_training
from experiments.lra.data import Examples
from experiments.lra.recipe import LRATraining, load, runs
from experiments.lra.run import RESULT_FILE, LRASweep, load_data, main
from experiments.lra.training import Training, batches, score
from latte.errors import LatteError
from latte.lab.train.run_folder import checkpoints, seal
from tests.helpers import read_csv


def train_all(recipe):
    """Do what is due; the report."""
    return LRASweep(recipe, quiet=True).sweep()[1]


def made(lengths):
    labels = [i % 2 for i in range(len(lengths))]
    return Examples.pack([np.full(n, i % 2, np.uint8) for i, n in enumerate(lengths)], labels)


# ---- what is computed


def test_batches_read_every_example_once_an_epoch_and_go_on_anywhere():
    examples = made([3 + (7 * i) % 50 for i in range(45)])
    section = LRATraining(batch_size=4, bucket_batches=6)
    stream = batches(examples, section, seed=3)
    epochs = [[next(stream) for _ in range(12)] for _ in range(2)]
    for epoch in epochs:
        assert sorted(np.concatenate(epoch).tolist()) == list(range(45))
    assert [b.tolist() for b in epochs[0]] != [b.tolist() for b in epochs[1]]
    later = batches(examples, section, seed=3, start=17)
    assert next(later).tolist() == epochs[1][5].tolist()
    other = batches(examples, section, seed=4)
    assert [next(other).tolist() for _ in range(12)] != [b.tolist() for b in epochs[0]]


def test_a_score_does_not_depend_on_batches_or_padding(recipe_file):
    recipe = load(recipe_file)
    training = Training(runs(recipe)[0], load_data(recipe, quiet=True), torch.device("cpu"))
    examples, model = training.task.validation, training.model.eval()
    ones = [model(**to_inputs(examples, [i])).logits[0] for i in range(len(examples))]
    logits, labels = torch.stack(ones).detach(), torch.from_numpy(examples.labels_N)
    model.train()
    for size in (1, 5, 16):
        found = score(model, examples, replace(training.section, batch_size=size))
        assert found.correct == int((logits.argmax(-1) == labels).sum()) and found.examples == 16
        assert found.loss == pytest.approx(
            float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-5
        )
    assert model.training
    assert score(model, examples, training.section, limit=5).examples == 5
    # A part is not the beginning, which a file sorted by label has from one class.
    sequences = [np.ones(3, np.uint8)] * 100
    by_label = Examples.pack(sequences, [0] * 50 + [1] * 50)
    with torch.no_grad():
        model.score.weight.zero_()
    assert 2 <= score(model, by_label, training.section, limit=20).correct <= 18


def to_inputs(examples, rows):
    batch = examples.batch(rows)
    del batch["labels"]
    return batch


# ---- runs


def outcome_of(folder):
    outcome = json.loads((folder / RESULT_FILE).read_text())["outcome"]
    del outcome["seconds"]
    for point in outcome["curve"]:
        del point["seconds"]
    return outcome


def test_a_recipe_trains_reports_and_is_not_done_twice(recipe_file, tmp_path, capsys, monkeypatch):
    assert main([str(recipe_file)]) == 0
    out, printed = tmp_path / "out", capsys.readouterr().out
    assert "| train | 40 |" in printed and "[2/2] listops window seed 0" in printed
    assert "step 8/8 | epoch 1.60 | loss" in printed and "tok/s | eta 0s" in printed
    assert "| `both` |" in printed and "| most frequent class |" in printed
    assert (out / "accuracy.md").read_text() in printed
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    rows = read_csv(out / "accuracy.csv")
    assert [row["model"] for row in rows] == ["both", "window"]
    task = load_data(load(recipe_file), quiet=True)
    for row in rows:
        folder = out / row["model"] / "seed0"
        result = json.loads((folder / RESULT_FILE).read_text())
        assert result["outcome"]["stopped"] == "steps" and result["outcome"]["steps"] == 8
        curve = result["outcome"]["curve"]
        assert [point["step"] for point in curve] == [2, 4, 6, 8]
        best = max(curve, key=lambda point: point["validation_accuracy"])
        assert result["outcome"]["best_step"] == best["step"]
        assert result["outcome"]["validation"]["accuracy"] == best["validation_accuracy"]
        assert float(row["test_accuracy"]) == result["outcome"]["test"]["accuracy"]
        majority = max(np.bincount(task.test.labels_N)) / 16
        assert float(row["majority_rate"]) == pytest.approx(majority)
        assert [int(line["step"]) for line in read_csv(folder / "curve.csv")] == [2, 4, 6, 8]
        assert not checkpoints(folder)
        # What is exported is the model of the best step, and says what was scored.
        from latte.models import LatteForSequenceClassification

        model = LatteForSequenceClassification.from_pretrained(folder)
        found = score(model, task.test, LRATraining(batch_size=8))
        assert found.correct == result["outcome"]["test"]["correct"]

    monkeypatch.setattr(lra_training, "Training", None)
    assert main([str(recipe_file), "--quiet"]) == 0
    assert main([str(recipe_file), "training.max_minutes=9", "--report"]) == 0
    assert "2 runs" in capsys.readouterr().out


@pytest.mark.parametrize("killed_at", [1, 3])
def test_a_killed_run_goes_on_to_the_same_result(
    recipe_file, tmp_path, monkeypatch, capsys, killed_at
):
    train_all(load(recipe_file, ["select=[both]", f"output_dir={tmp_path / 'whole'}"]))
    plain, calls = loop.take_step, []

    def killed(*arguments):
        calls.append(1)
        if len(calls) == 2 * killed_at + 2:  # a step after a checkpoint
            raise KeyboardInterrupt
        return plain(*arguments)

    monkeypatch.setattr(loop, "take_step", killed)
    few = [str(recipe_file), "select=[both]"]
    assert main([*few, "--quiet"]) == 130
    assert "goes on from the last checkpoint" in capsys.readouterr().err
    folder = tmp_path / "out" / "both" / "seed0"
    assert checkpoints(folder)[-1].name == f"checkpoint-{2 * killed_at}"
    assert not (folder / RESULT_FILE).exists()
    assert main(few) == 0
    assert f"resuming from checkpoint-{2 * killed_at}" in capsys.readouterr().out
    assert len(calls) == 2 * killed_at + 2 + (8 - 2 * killed_at)
    whole = tmp_path / "whole" / "both" / "seed0"
    assert outcome_of(folder) == outcome_of(whole)
    for name in ("model.safetensors", "config.json"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()


def test_a_budget_of_minutes_ends_a_run_with_a_score(recipe_file, tmp_path):
    train_all(load(recipe_file, ["select=[both]", "training.max_minutes=1e-9"]))
    outcome = outcome_of(tmp_path / "out" / "both" / "seed0")
    assert outcome["stopped"] == "minutes" and outcome["steps"] == 1
    assert outcome["test"]["examples"] == 16


def test_a_step_that_is_not_finite_never_reaches_the_weights(recipe_file, tmp_path, monkeypatch):
    plain, calls = loop.take_step, []

    def broken(model, loss, *rest):
        calls.append(1)
        return plain(model, loss * float("nan") if len(calls) == bad else loss, *rest)

    monkeypatch.setattr(loop, "take_step", broken)
    for bad, steps in ((2, 1), (4, 3)):
        calls.clear()
        out = tmp_path / f"at{bad}"
        train_all(load(recipe_file, ["select=[window]", f"output_dir={out}"]))
        outcome = outcome_of(out / "window" / "seed0")
        assert outcome["stopped"] == "diverged" and outcome["steps"] == steps
        assert np.isfinite(outcome["test"]["loss"])
    calls.clear()
    bad = 1
    with pytest.raises(LatteError, match="not finite at step 1 .*try a lower learning rate"):
        train_all(load(recipe_file, ["select=[window]", f"output_dir={tmp_path / 'at1'}"]))


def test_a_run_may_begin_with_a_checkpoint(recipe_file, tmp_path, mistake):
    train_all(load(recipe_file, ["select=[both]"]))
    folder = tmp_path / "out" / "both" / "seed0"
    begin = ["select=[both]", f"initial={folder}", f"output_dir={tmp_path / 'next'}"]
    recipe = load(recipe_file, [*begin, "data.max_length=14"])
    task = load_data(recipe, quiet=True)
    from safetensors.torch import load_file

    kept = load_file(folder / "model.safetensors")
    state = Training(runs(recipe)[0], task, torch.device("cpu")).model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in kept.items())
    # Another number of classes: the encoder is taken, the head is not.
    (run,) = runs(recipe)
    run.config["num_labels"] = 12
    state = Training(run, task, torch.device("cpu")).model.state_dict()
    assert state["score.weight"].shape == (12, 16)
    assert torch.equal(state["model.norm.weight"], kept["model.norm.weight"])

    def refused(*overrides):
        error = mistake(main, recipe_file, *begin, *overrides, "--quiet")
        assert not (tmp_path / "next").exists()
        return error

    assert "embed_tokens.weight is (16, 16) there and (17, 16) here" in refused(
        "shared.vocab_size=17"
    )
    assert "is missing there" in refused("shared.num_hidden_layers=2")
    deeper = ["select=[window]", "shared.num_hidden_layers=2", f"output_dir={tmp_path / 'deep'}"]
    train_all(load(recipe_file, deeper))
    deep = f"initial={tmp_path / 'deep/window/seed0'}"
    assert "is there and not here" in refused("select=[window]", deep)
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    assert "model of another kind: expected 'latte', found 'gpt2'" in refused()
    (folder / "config.json").unlink()
    assert "is not a checkpoint" in refused()


def test_a_language_model_is_a_beginning_for_a_causal_classifier(recipe_file, tmp_path):
    from experiments.lra.initial import load_encoder
    from latte.models import LatteForCausalLM, preset_config

    run = runs(load(recipe_file, ["shared.is_causal=true"]))[0]
    fields = {name: value for name, value in run.config.items() if name != "num_labels"}
    language_model = LatteForCausalLM(preset_config(run.preset, "tiny", **fields))
    language_model.save_pretrained(tmp_path / "lm")
    classifier = lra_training.fresh_model(run)
    assert load_encoder(classifier, tmp_path / "lm") == ["score.weight"]
    tokens = torch.randint(16, (2, 7))
    hidden = [
        model.model.eval()(tokens).last_hidden_state for model in (classifier, language_model)
    ]
    assert torch.equal(*hidden)
    both_ways = lra_training.fresh_model(runs(load(recipe_file))[0])
    with pytest.raises(LatteError, match="is missing there"):  # the RG-LRU of the other direction
        load_encoder(both_ways, tmp_path / "lm")
    # The same shapes, and another function.
    for field, value in (("embedding_multiplier", 4.0), ("sliding_window", 3), ("rope_theta", 5)):
        overrides = ["shared.is_causal=true", f"models.both.{field}={value}"]
        other = lra_training.fresh_model(runs(load(recipe_file, overrides))[0])
        with pytest.raises(LatteError, match=r"does not fit: (embedding_scale|sliding_w|rope_th)"):
            load_encoder(other, tmp_path / "lm")


def test_pairs_of_texts(tiny, tmp_path):
    """Two towers, from files to the table: whether both texts are the same letter."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 64), ("eval", 16), ("test", 16)):
        rows = []
        for i in range(count):
            first = "abcd"[rng.integers(4)]
            second = first if i % 2 else "abcd"[("abcd".index(first) + 1) % 4]
            rows.append(f"{i % 2}.0\t1\t2\t{first * rng.integers(2, 7)}\t{second * 4}\n")
        (tmp_path / f"{split}.tsv").write_text("".join(rows))
    files = {"train": "train", "validation": "eval", "test": "test"}
    recipe_file = tmp_path / "pairs.yaml"
    recipe = tiny | {
        "task": "retrieval",
        "data": {key: str(tmp_path / f"{name}.tsv") for key, name in files.items()},
        "output_dir": str(tmp_path / "out"),
    }
    recipe_file.write_text(yaml.safe_dump(recipe))
    overrides = ["select=[both]", "training.max_steps=80", "training.learning_rate=0.01",
                 "training.eval_steps=20", "shared.initializer_range=0.2",
                 "shared.hidden_dropout=0"]  # fmt: skip
    train_all(load(recipe_file, overrides))
    outcome = outcome_of(tmp_path / "out" / "both" / "seed0")
    assert outcome["test"]["accuracy"] >= 0.9, outcome["curve"]
    config = json.loads((tmp_path / "out/both/seed0/config.json").read_text())
    assert config["architectures"] == ["LatteForPairClassification"]
    overrides[0] = "models={alone: {preset: longformer}}"  # said before anything is trained
    with pytest.raises(LatteError, match="'longformer' classifies single texts, not pairs"):
        runs(load(recipe_file, overrides))


def test_a_report_is_about_all_models_and_a_failed_run_costs_the_others_nothing(
    recipe_file, tmp_path, monkeypatch, capsys
):
    train_all(load(recipe_file, ["select=[window]"]))

    def short_of_memory(run, *_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    plain = lra_training.Training
    monkeypatch.setattr(lra_training, "Training", short_of_memory)
    assert main([str(recipe_file), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert "lra: error: 1 run failed" in error and error.count("CUDA out of memory") == 2
    assert "`window`" in (tmp_path / "out" / "accuracy.md").read_text()
    monkeypatch.setattr(lra_training, "Training", plain)
    train_all(load(recipe_file, ["select=[both]"]))
    assert [row["model"] for row in read_csv(tmp_path / "out" / "accuracy.csv")] == [
        "both",
        "window",
    ]


# ---- recipes


def test_a_folder_with_another_run_or_another_kind_of_checkpoint(recipe_file, tmp_path):
    few = ["select=[window]"]
    train_all(load(recipe_file, few))
    folder = tmp_path / "out" / "window" / "seed0"
    before = (folder / RESULT_FILE).read_text()
    with pytest.raises(LatteError, match="another run: training.batch_size is 8 there and 4 here"):
        train_all(load(recipe_file, [*few, "training.batch_size=4"]))
    assert (folder / RESULT_FILE).read_text() == before
    (folder / RESULT_FILE).write_text(before[:50])
    with pytest.raises(LatteError, match="is damaged .* delete it"):
        train_all(load(recipe_file, few))
    # A checkpoint of a language model where this run's should be.
    (folder / RESULT_FILE).unlink()
    staged = folder / "staged"
    staged.mkdir()
    torch.save({"model": {"lm_head.weight": torch.zeros(2)}}, staged / "state.pt")
    seal(staged, folder / "checkpoint-4")
    with pytest.raises(LatteError, match="checkpoint-4/state.pt is no checkpoint of this run"):
        train_all(load(recipe_file, few))
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"years of work")
    with pytest.raises(LatteError, match="not empty and holds no run of latte"):
        train_all(load(recipe_file, few))
    assert (folder / "model.safetensors").read_bytes() == b"years of work"
