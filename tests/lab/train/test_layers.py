"""The layer-wise stage of a conversion: from a recipe to a model, cut off and gone on with."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from latte.cli import main
from latte.lab.train.stages import convert_and_train, load_conversion_recipe

RECIPE = Path("recipes/conversion/smollm2.yaml")


@pytest.fixture(scope="module")
def base(save_llama, tmp_path_factory):
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    return save_llama(tmp_path_factory.mktemp("base"), **sizes, num_key_value_heads=2)


@pytest.fixture(scope="module")
def settings(words):
    found = [f"data.{key}={value}" for key, value in words.items()]
    found += ["data.block_length=64", "data.max_validation_tokens=64"]
    found += ["conversion.window=8", "conversion.num_latents=8", "conversion.num_sinks=2"]
    found += ["conversion.keep_layers=[]", "conversion.kept_window=null"]
    layers = {"rows": 4, "held_out_rows": 1, "steps": 4, "eval_steps": 2, "processes": 1}
    return [*found, *(f"layers.{key}={value}" for key, value in layers.items()), "training=null"]


@pytest.fixture(scope="module")
def recipe(settings):
    return lambda *given: load_conversion_recipe(RECIPE, [*settings, *given])


@pytest.fixture(scope="module")
def result(base, recipe, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "out"
    return convert_and_train(str(base), out, recipe("conversion.keep_layers=[1]"), quiet=True)


def test_a_model_comes_out_whose_base_is_unchanged(base, result):
    before, after = (load_file(folder / "model.safetensors") for folder in (base, result))
    new = [name for name in after if ".latents." in name]
    assert {name.split(".")[2] for name in new} == {"0", "2"}
    assert set(after) == set(before) | set(new)
    for name, weight in before.items():
        assert torch.equal(after[name], weight.to(after[name].dtype)), name
    model = AutoModelForCausalLM.from_pretrained(result)
    assert model.config.converted_layers == (0, 2) and model.config.joint_softmax
    assert model(torch.arange(20)[None]).logits.isfinite().all()


def test_errors_are_written_and_rows_are_not_kept(result):
    lines = (result / "layers" / "layers.csv").read_text().splitlines()
    assert lines[0] == "layer,step,output_error,mass_divergence,window_error,seconds"
    assert {tuple(line.split(",")[:2]) for line in lines[1:]} >= {("0", "0"), ("2", "0")}
    assert not (result / "layers" / "rows").exists()


def test_a_run_that_was_cut_off_goes_on(base, recipe, result, tmp_path, monkeypatch):
    """The same weights; what was recorded and fitted is not done again."""
    from latte.lab.train import layers

    fitted = []

    def one(layer, *rest):
        if len(fitted) == 1:
            raise KeyboardInterrupt
        fitted.append(layer.layer_idx)
        return fit(layer, *rest)

    fit, out = layers._fit_one, tmp_path / "out"
    monkeypatch.setattr(layers, "_fit_one", one)
    with pytest.raises(KeyboardInterrupt):
        convert_and_train(str(base), out, recipe("conversion.keep_layers=[1]"), quiet=True)
    rows = sorted((out / "layers" / "rows").iterdir())
    times = [row.stat().st_mtime_ns for row in rows]
    assert len(rows) == 5 and not (out / "config.json").exists()

    def other(layer, *rest):
        assert layer.layer_idx not in fitted
        assert [row.stat().st_mtime_ns for row in rows] == times
        return fit(layer, *rest)

    monkeypatch.setattr(layers, "_fit_one", other)
    convert_and_train(str(base), out, recipe("conversion.keep_layers=[1]"), quiet=True)
    one_go, two_goes = (load_file(folder / "model.safetensors") for folder in (result, out))
    assert all(torch.equal(two_goes[name], weight) for name, weight in one_go.items())


def test_several_processes_fit_the_same(base, recipe, result, tmp_path):
    """The number of processes is not part of a conversion's identity, nor of its result."""
    given = recipe("conversion.keep_layers=[1]", "layers.processes=2")
    out = convert_and_train(str(base), tmp_path / "out", given, quiet=True)
    one, two = (load_file(folder / "model.safetensors") for folder in (result, out))
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-4, atol=1e-5)
    assert json.loads((out / "conversion.json").read_text())["recipe"]["layers"]["processes"] == 2


def test_a_layer_says_how_far_it_came(base, settings, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["convert", str(base), str(out), "--recipe", str(RECIPE), *settings]
    assert main([*command, "evaluation.max_tokens=64", "evaluation.lengths=[64]"]) == 0
    told = capsys.readouterr().err
    assert "layers: recording 5 rows of" in told
    assert "layers: layer 2 (3 of 3), output error" in told
    capsys.readouterr()
    assert main([*command, "evaluation.max_tokens=64", "evaluation.lengths=[64]"]) == 0
    assert "is finished; nothing to do" in capsys.readouterr().out


def test_scores_of_kept_tokens_are_fitted_before_the_latents(base, recipe, tmp_path):
    """Scores start as 0. They are those of the layers with kept tokens, and are in the model."""
    own = recipe("conversion.kept_tokens=[4,0,4]", "conversion.kept_block=4", "layers.kept_rows=3")
    out = convert_and_train(str(base), tmp_path / "out", own, quiet=True)
    weights = load_file(out / "model.safetensors")
    scores = {name: x for name, x in weights.items() if ".kept_scores.down.weight" in name}
    assert {name.split(".")[2] for name in scores} == {"0", "2"}
    assert all(x.abs().max() > 0 for x in scores.values())
    assert not (out / "layers" / "kept").exists()
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model(torch.arange(40)[None] % 7).logits.isfinite().all()
