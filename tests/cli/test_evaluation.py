"""`latte evaluate` beyond held-out text: tasks, probes, and the controls of converted models."""

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


def test_probes_write_a_table_a_csv_and_a_plot(place: Any, tmp_path: Path, capsys: Any) -> None:
    arguments = ["evaluate", str(place.trained()), "--probes", "copy,retrieval", "--cases", "2"]
    arguments += ["--lengths", "256,230", "--depths", "0,1", "--segment", "100"]
    assert main([*arguments, "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "retrieval (2 cases each)" in out and "token_match_unseen" in out
    with open(tmp_path / "probes.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    cells = {(row["probe"], row["length"], row["depth"]) for row in rows}
    depths = {("retrieval", n, d) for n in ("230", "256") for d in ("0.0", "1.0")}
    assert cells == depths | {("copy", "230", ""), ("copy", "256", "")}
    assert (tmp_path / "probes.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["probes.csv", "probes.png"]


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
        (["--probes", "needle"], "expected some of retrieval, copy, continuation, got 'needle'"),
        (["--probes", "copy", "--lengths", "20"], "too few for the copy probe"),
        (["--probes", "copy", "--lengths", "99999"], "give more with --corpus"),
        (["--probes", "copy", "--cases", "0"], "--cases: expected at least 1, got 0"),
        (["--probes", "retrieval", "--depths", "2"], "numbers from 0 to 1"),
        (["--tasks", "gone.yaml"], "gone.yaml"),
        (["--tasks", ","], "expected names separated by commas"),
        (["--mixing", "window"], "expected a converted model"),
        (["--mixing", "half"], "expected one of learned, window, latents, base, got 'half'"),
        (["--probes", "copy", "--mixing", "window"], "expected a converted model"),
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


def test_mixing_reaches_the_model_and_names_the_folder(
    place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A model whose config has the field gets it; its results have a folder of their own."""
    import transformers

    from latte.experiments.checkpoint import load_checkpoint

    class MixedConfig(transformers.LlamaConfig):
        model_type = "mixed_llama"
        mixing: str = "learned"

    class MixedLlama(transformers.LlamaForCausalLM):
        config: MixedConfig
        config_class = MixedConfig

    transformers.AutoConfig.register("mixed_llama", MixedConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(MixedConfig, MixedLlama, exist_ok=True)
    folder = tmp_path / "mixed"
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MixedConfig(**sizes, intermediate_size=16, vocab_size=259)
    MixedLlama(config).save_pretrained(folder)
    for file in place.trained().glob("tokenizer*"):
        shutil.copy(file, folder)
    assert load_checkpoint(folder)[0].config.mixing == "learned"
    assert load_checkpoint(folder, mixing="latents")[0].config.mixing == "latents"
    text = tmp_path / "text.txt"
    text.write_text("some text to score, " * 30)
    arguments = ["evaluate", str(folder), "--corpus", str(text), "--lengths", "32"]
    assert main([*arguments, "--mixing", "window"]) == 0
    with open(folder / "evaluation-window" / "evaluation.csv", newline="") as file:
        assert [row["model"] for row in csv.DictReader(file)] == ["mixed (window)"]
    assert not (folder / "evaluation").exists()
