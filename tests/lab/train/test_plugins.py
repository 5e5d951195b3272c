"""A recipe's `plugins`: code of a user, which runs where its user has named it and nowhere else."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from latte.cli import main
from latte.errors import LatteError
from latte.lab.train.recipe import load_recipe, recipe_from_dict
from latte.models import registry

PLUGIN = '''
from latte.layers import LatteAttention
from latte.models.registry import register_mixer, register_preset

class Doubled(LatteAttention):
    """Latte's output twice over."""

    def _attend(self, x, projected, context):
        y, state = super()._attend(x, projected, context)
        return 2 * y, state

register_mixer("doubled", Doubled)
register_preset("doubled++", mixer="doubled", latent_input="conv", position="none")
'''


@pytest.fixture
def forget():
    """forget() -> as in a process that has imported no plugin."""

    def run():
        registry._mixers.pop("doubled", None)
        registry._presets.pop("doubled++", None)
        for name in [name for name in sys.modules if name.startswith("latte_plugin_")]:
            del sys.modules[name]

    yield run
    run()


@pytest.fixture
def plugin_recipe(make_recipe, tmp_path):
    """A recipe of two steps in a folder with its plugin."""
    values = make_recipe("latte-conv++", max_steps=2, save_steps=1).as_dict()
    values["model"]["preset"] = "doubled++"
    values["model"]["overrides"].pop("sliding_window")
    values["plugins"] = ["doubled.py"]
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "doubled.py").write_text(PLUGIN, encoding="utf-8")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return folder / "recipe.yaml"


def test_a_mixer_of_a_plugin_is_trained_and_used(plugin_recipe, tmp_path, forget, capsys):
    assert main(["train", str(plugin_recipe)]) == 0
    run, plugin = tmp_path / "run", plugin_recipe.parent / "doubled.py"
    assert f"(try: latte generate {run} --plugins {plugin})" in capsys.readouterr().out
    assert json.loads((run / "config.json").read_text())["mixer"] == "doubled"
    stored = json.loads((run / "recipe.json").read_text())["plugins"]
    assert stored == [str(plugin_recipe.parent / "doubled.py")]
    whole = load_file(run / "model.safetensors")
    named = ["--plugins", str(plugin)]
    for arguments in (
        ["evaluate", str(run), "--lengths", "32", "--max-tokens", "100", *named],
        ["generate", str(run), "--prompt", "latent", "--max-new-tokens", "2", *named],
        ["inspect", str(run), "--text", "latent mean", *named],
        ["compare", str(plugin_recipe), "--presets=doubled++,latte++", "--seeds=0", "--dry-run"],
        ["train", str(plugin_recipe)],  # goes on after step 1
    ):
        forget()
        if arguments[0] == "train":
            for name in ("finished.json", "model.safetensors", "manifest.json"):
                (run / name).unlink()
            shutil.rmtree(run / "checkpoint-2")
        assert main(arguments) == 0, capsys.readouterr().err
    assert "resuming from checkpoint-1" in capsys.readouterr().out
    again = load_file(run / "model.safetensors")
    assert all(bool((again[name] == weight).all()) for name, weight in whole.items())
    forget()
    moved = plugin.rename(tmp_path / "doubled.py")
    assert main(["generate", str(run), "--max-new-tokens=1", f"--plugins={moved}"]) == 0


@pytest.mark.parametrize("command", ["generate", "chat", "evaluate", "inspect"])
@pytest.mark.parametrize("file", ["recipe.json", "config.json", "tokenizer_config.json"])
def test_a_folder_cannot_run_code(make_model, tmp_path, forget, mistake, command, file):
    from latte.lab.data.tokenizers import byte_tokenizer

    folder, ran = tmp_path / "downloaded", tmp_path / "ran"
    make_model("latte++", num_hidden_layers=1).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    plugin = str(folder / "its_own.py")
    Path(plugin).write_text(f"open({str(ran)!r}, 'w')\n")
    if file == "recipe.json":
        recipe = recipe_from_dict({"training": {"max_steps": 1}, "plugins": [plugin]})
        values = recipe.as_dict()
    else:
        kind, code = {
            "config.json": ("AutoConfig", "its_own.Its"),
            "tokenizer_config.json": ("AutoTokenizer", ["its_own.Its", None]),
        }[file]
        values = json.loads((folder / file).read_text())
        values |= {"model_type": "its", "tokenizer_class": "Its", "auto_map": {kind: code}}
        if file == "tokenizer_config.json":
            (folder / "tokenizer.json").unlink()
    (folder / file).write_text(json.dumps(values))
    also = ["--text=a"] if command == "inspect" else []
    line = mistake(main, command, folder, *also)
    assert "code" in line and not ran.exists()
    if file == "recipe.json":
        assert f"--plugins {plugin}" in line
        named = [command, folder, *also, "--plugins", plugin, "--device=none"]
        line = mistake(main, *named)  # the device is wrong
        assert ran.exists() and "--plugins" not in line


def test_a_plugin_that_was_edited_ends_its_run(plugin_recipe, forget, mistake):
    train = ["train", str(plugin_recipe), "--quiet"]
    assert main([*train, "training.max_minutes=1e-6"]) == 0
    forget()
    plugin = plugin_recipe.parent / "doubled.py"
    plugin.write_text(PLUGIN.replace("2 * y", "3 * y"))
    assert "the plugin doubled.py has changed since this run began" in mistake(main, *train)


def test_attention_that_is_code_of_the_hub_is_refused(make_model, tmp_path, mistake):
    make_model("latte++").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["attn_implementation"] = "someone/kernel"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "the code 'someone/kernel'" in mistake(main, "generate", tmp_path)


def test_files_are_found_beside_the_recipe_or_here(tmp_path, monkeypatch):
    for folder in ("recipes", "here"):
        (tmp_path / folder).mkdir()
    beside, here = tmp_path / "recipes" / "a.py", tmp_path / "here" / "b.py"
    beside.touch()
    here.touch()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "recipes" / "base.yaml").write_text("plugins: [a.py, b.py, some.module]")
    path = tmp_path / "here" / "recipe.yaml"
    path.write_text("base: ../recipes/base.yaml\ntraining: {max_steps: 1}")
    assert load_recipe(path).plugins == [str(beside), str(here), "some.module"]
    assert load_recipe(path, ["plugins=[b.py]"]).plugins == [str(here)]
    with pytest.raises(LatteError, match="plugins: expected a list of text"):
        load_recipe(path, ["plugins=b.py"])


def test_a_run_is_identified_by_the_names_of_its_plugins():
    values = {"training": {"max_steps": 1}}
    one = recipe_from_dict({**values, "plugins": ["/a/mine.py", "b.c"]})
    moved = recipe_from_dict({**values, "plugins": ["/d/mine.py", "b.c"]})
    other = recipe_from_dict({**values, "plugins": ["/a/other.py", "b.c"]})
    assert one.identity() == moved.identity() != other.identity()
    assert recipe_from_dict(one.as_dict()) == one
