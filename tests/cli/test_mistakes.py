"""Every mistake of a user: one clear line, exit code 2, and nothing on disk has changed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Refused = Callable[..., str]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.max_stepz=3", "the nearest valid key is 'training.max_steps'"),
        ("training.max_steps=three", "training.max_steps: expected an integer (int)"),
        ("training.seed=5000000000", "training.seed: expected 0 to 4294967295, got 5000000000"),
        ("comparison.lengths=[0]", "comparison.lengths: expected numbers of at least 1"),
        ("model.preset=late++", "unknown preset 'late++'"),
        ("model.size=huge", "unknown size 'huge'"),
        ("model.overrides.num_latent=8", "unknown field 'num_latent'"),
        ("model.overrides.num_latents=7", "num_latents must be a multiple of num_attention_heads"),
        ("model.overrides.hidden_size=33", "hidden_size must be a multiple"),
        ("model.overrides.hidden_size=wide", "hidden_size"),
        ("model.overrides.vocab_size=100", "vocabulary"),
        ("data.corpus=nowhere.txt", "nowhere.txt"),
        ("data.hub_validation_split=test", "expected data.hub_validation_split=null with"),
        ("data.tokenizer=./no-such-folder", "no such folder"),
        ("data.block_length=1000000", "too few for a single block"),
    ],
)
def test_recipe_mistakes(
    place: Any, refused: Refused, tmp_path: Path, override: str, message: str
) -> None:
    output = tmp_path / "run"
    line = refused("train", place.recipe(), override, f"output_dir={output}")
    assert message in line
    assert snapshot(tmp_path) == {}


@pytest.mark.parametrize("content", [b"", b"\x00\x01\xff\xfe" * 400], ids=["empty", "binary"])
def test_text_that_is_none(place: Any, refused: Refused, tmp_path: Path, content: bytes) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(content)
    line = refused("train", place.recipe(), f"data.corpus={bad}", f"output_dir={tmp_path / 'run'}")
    assert "bad.txt" in line
    line = refused("evaluate", place.trained(), "--corpus", bad, "--output", tmp_path / "out")
    assert "bad.txt" in line
    assert snapshot(tmp_path) == {"bad.txt": content}


def test_a_second_run_into_the_folder_of_another(place: Any, refused: Refused) -> None:
    before = snapshot(place.trained())
    line = refused("train", place.recipe(), "training.learning_rate=0.5")
    assert "holds another run: training.learning_rate is 0.001 there and 0.5 here" in line
    assert snapshot(place.trained()) == before


def test_a_folder_that_holds_something_else(place: Any, refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    line = refused("train", place.recipe(), f"output_dir={tmp_path}")
    assert "holds no run of latte" in line
    assert snapshot(tmp_path) == {"notes.txt": b"mine"}


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_an_output_folder_that_cannot_be_written(
    place: Any, refused: Refused, tmp_path: Path, command: str
) -> None:
    (tmp_path / "file").write_text("x")
    target = tmp_path / "file" / "run"
    if command == "train":
        line = refused("train", place.recipe(), f"output_dir={target}")
    else:
        line = refused("evaluate", place.trained(), "--output", target)
    assert "cannot be written" in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(place: Any, refused: Refused, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "cannot be written" in refused("train", place.recipe(), f"output_dir={tmp_path / 'r'}")


def damaged(place: Any, tmp_path: Path, damage: str) -> Path:
    folder = tmp_path / "checkpoint"
    shutil.copytree(place.trained(), folder, ignore=shutil.ignore_patterns("checkpoint-*", ".lock"))
    weights, config = folder / "model.safetensors", folder / "config.json"
    values = json.loads(config.read_text())
    if damage == "truncated weights":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "edited weights":
        data = bytearray(weights.read_bytes())
        data[-1] ^= 0xFF
        weights.write_bytes(bytes(data))
    elif damage == "no weights":
        weights.unlink()
    elif damage == "garbage for weights":
        weights.write_bytes(b"not a checkpoint")
        (folder / "manifest.json").unlink()
    elif damage == "no config":
        config.unlink()
    elif damage == "broken config":
        config.write_text("{")
    elif damage == "other model type":
        config.write_text(json.dumps({**values, "model_type": "no-such-model"}))
    elif damage == "other width":
        config.write_text(json.dumps({**values, "hidden_size": 64}))
    elif damage == "impossible sizes":
        config.write_text(json.dumps({**values, "num_latents": 7}))
    elif damage == "more layers":
        config.write_text(json.dumps({**values, "num_hidden_layers": 3}))
    elif damage == "fewer layers":
        config.write_text(json.dumps({**values, "num_hidden_layers": 1}))
    elif damage == "no tokenizer":
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).unlink()
    elif damage == "broken tokenizer":
        (folder / "tokenizer.json").write_text("{}")
        (folder / "manifest.json").unlink()
    elif damage == "edited tokenizer":
        file = folder / "tokenizer.json"
        file.write_text(file.read_text().replace('"single_word":false', '"single_word":true'))
        file.write_text(file.read_text() + " ")
    elif damage == "a larger tokenizer":
        from latte.lab.data import train_bpe

        text = [" ".join(f"{word}{i}" for i in range(60)) for word in ("mean", "mass", "sum")] * 2
        train_bpe(text, 300, progress=False).save_pretrained(folder)
        (folder / "manifest.json").unlink()
    return folder


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("truncated weights", "truncated or damaged"),
        ("edited weights", "was edited: its checksum does not match"),
        ("no weights", "has no weights; expected model.safetensors"),
        ("garbage for weights", "truncated or damaged"),
        ("no config", "config.json is missing"),
        ("broken config", "config.json is damaged"),
        ("other model type", "no-such-model"),
        ("other width", "shape"),
        ("impossible sizes", "num_latents must be a multiple"),
        ("more layers", "lacks weights"),
        ("fewer layers", "its config does not know"),
        ("no tokenizer", "has no tokenizer"),
        ("broken tokenizer", "tokenizer.json is damaged"),
        ("edited tokenizer", "tokenizer.json has"),
        ("a larger tokenizer", "token ids up to 299, but the model's vocabulary has 259 entries"),
    ],
)
def test_damaged_checkpoints(
    place: Any, refused: Refused, tmp_path: Path, damage: str, message: str
) -> None:
    folder = damaged(place, tmp_path, damage)
    before = snapshot(folder)
    assert message in refused("generate", folder, "--max-new-tokens", "2")
    assert snapshot(folder) == before


def test_checkpoints_that_are_not_there(place: Any, refused: Refused, tmp_path: Path) -> None:
    assert "does not exist" in refused("generate", tmp_path / "none")
    assert "is a file" in refused("evaluate", place.recipe())
    assert "is not a checkpoint" in refused("evaluate", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "CHECKPOINT", "--lengths", "a,b"], "expected whole numbers"),
        (["evaluate", "CHECKPOINT", "--lengths", "0"], "at least 1"),
        (["evaluate", "CHECKPOINT", "--segment", "0"], "--segment: expected at least 1"),
        (["evaluate", "CHECKPOINT", "--corpus", "missing.txt"], "missing.txt"),
        (["evaluate", "CHECKPOINT", "--device", "tpu7"], "tpu7"),
        (["generate", "CHECKPOINT", "--temperature", "-1"], "temperature: expected 0"),
        (["generate", "CHECKPOINT", "--prompt", "a", "--top-k", "0"], "top-k: expected at least"),
        (["generate", "CHECKPOINT", "--temperature", "nan"], "temperature: expected 0"),
        (["generate", "CHECKPOINT", "--temperature", "1e-320"], "temperature: expected 0"),
        (["generate", "CHECKPOINT", "--seed", "-1"], "seed: expected 0 to 4294967295"),
        (["generate", "CHECKPOINT", "--top-p", "2"], "top-p: expected a number above 0"),
        (["generate", "CHECKPOINT", "--max-new-tokens", "0"], "expected at least 1"),
        (["train"], "the following arguments are required: recipe"),
        (["train", "missing.yaml"], "missing.yaml does not exist"),
        (["trian"], "invalid choice: 'trian'"),
        (["compare", "RECIPE", "--presets", "latte++,latte++"], "expected different names"),
        (["compare", "RECIPE", "--presets", "latte++,lat"], "unknown preset 'lat'"),
        (
            ["compare", "RECIPE", "--presets", "latte++", "model.architecture=llama"],
            "model.architecture: expected none where presets are compared, got 'llama'",
        ),
        (["compare", "RECIPE"], "name the presets, with --presets"),
        (["compare", "RECIPE", "--presets", "latte++", "--report"], "--report is for several"),
        (["compare", "RECIPE", "--presets", "latte++", "--seeds", "0,x"], "expected whole numbers"),
        (["benchmark", "--ops", "lattte"], "ops: expected some of latte, macchiato"),
        (["benchmark", "--models", "latte+++"], "models: expected some of latte, latte++"),
        (["benchmark", "--modes", "backward"], "modes: expected some of forward"),
        (["benchmark", "--size", "huge"], "size: expected one of tiny"),
        (["benchmark", "--dtype", "int8"], "dtype: expected one of float32"),
        (["benchmark", "--heads", "0"], "heads: expected more than 0, got 0"),
        (["benchmark", "--device", "tpu7"], "tpu7"),
        (["benchmark", "--ops", "none", "--models", "none"], "nothing to measure"),
        (["benchmark", "--ops", "latte", "--backend", "cuda"], "latte, forward: "),
    ],
)
def test_arguments(place: Any, refused: Refused, arguments: list[str], message: str) -> None:
    names = {"CHECKPOINT": place.trained(), "RECIPE": place.recipe()}
    assert message in refused(*(names.get(argument, argument) for argument in arguments))
