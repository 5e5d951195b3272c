"""Recipes: what is read, what is refused, and in which words."""

import re
from pathlib import Path

import pytest

from latte.errors import LatteError
from latte.lab.train.recipe import Recipe, load_recipe, read_overridden, recipe_from_dict
from latte.lab.train.typed import apply_override, build, read_yaml

RECIPES = Path(__file__).parents[3] / "recipes"
# Recipes of `latte train`; those of other commands are read by those commands' tests.
OTHERS = ("mqar/", "lra/", "ingredients/", "lm_eval/", "conversion/")
SHIPPED = [
    name
    for name in sorted(path.relative_to(RECIPES).as_posix() for path in RECIPES.rglob("*.yaml"))
    if not name.startswith(OTHERS) or name == "conversion/base.yaml"
]


def write(folder, text, name="recipe.yaml"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_the_recipe_of_a_converted_model_is_whole():
    recipe = load_recipe(RECIPES / "conversion/smollm2-kept.yaml")
    assert recipe.steps() == 280 and recipe.conversion.base == "runs/smollm2-layers"


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_are_whole(name):
    from latte.lab.train.run import model_config

    recipe = load_recipe(RECIPES / name)
    recipe.import_plugins()
    config = model_config(recipe, {})
    assert recipe.steps() > 0 and config.hidden_size > 0
    if not name.endswith("base.yaml"):
        assert recipe.output_dir == f"runs/{name.removesuffix('.yaml')}"
    if name.endswith("++.yaml"):
        assert recipe.model.name == Path(name).stem
    if recipe.comparison.presets:  # the recipe of a comparison
        from latte.lab.compare.compare import runs_of

        assert len(runs_of(recipe)) == 3 * len(recipe.comparison.presets)


def test_overrides_and_bases(tmp_path):
    write(tmp_path, "training: {max_steps: 5, batch_size: 3}\nmodel: {size: small}", "base.yaml")
    path = write(tmp_path, "base: base.yaml\ntraining: {batch_size: 4}")
    recipe = load_recipe(
        path, ["training.learning_rate=3e-4", "model.preset=latte++", "data.corpus=[a.txt, b.txt]"]
    )
    assert recipe.training.max_steps == 5
    assert recipe.training.batch_size == 4
    assert recipe.model.size == "small"
    assert recipe.model.preset == "latte++"
    assert recipe.training.learning_rate == 3e-4
    assert recipe.data.corpus == ["a.txt", "b.txt"]
    assert recipe_from_dict(recipe.as_dict()) == recipe


@pytest.mark.parametrize(
    ("override", "steps", "tokens"),
    [("training.max_steps=7", 7, None), ("training.max_tokens=9000", None, 9000)],
)
def test_a_length_in_one_unit_replaces_the_other(override, steps, tokens):
    """Every shipped recipe gives tokens; a newcomer overrides steps."""
    training = load_recipe(RECIPES / "demo.yaml", [override]).training
    assert (training.max_steps, training.max_tokens) == (steps, tokens)
    with pytest.raises(LatteError, match="exactly one"):
        load_recipe(RECIPES / "demo.yaml", ["training.max_steps=7", "training.max_tokens=9000"])


def test_a_length_on_the_command_line_replaces_the_one_of_its_section(tmp_path):
    path = write(tmp_path, "more: {max_tokens: 9}\ntraining: {max_tokens: 9}")
    found = read_overridden(path, ["more.max_steps=3"])
    assert found == {"more": {"max_steps": 3}, "training": {"max_tokens": 9}}


def test_a_home_folder_in_the_output(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    found = load_recipe(RECIPES / "demo.yaml", ["output_dir=~/runs"])
    assert found.output_dir == str(tmp_path / "runs")


def test_tokens_are_rounded_up_to_steps(tmp_path):
    path = write(tmp_path, "training: {max_tokens: 10001, batch_size: 10}")
    recipe = load_recipe(path, ["data.block_length=100"])
    assert recipe.steps() == 11
    assert recipe.steps(processes=2) == 6


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("", ["max_steps=3"], "unknown key 'max_steps'.*'training.max_steps'"),
        ("trainng: {}", [], "unknown key 'trainng'.*'training'"),
        ("", ["training.qqqq=3"], "valid keys are .*training.max_tokens"),
        ("", ["training.max_steps=1.5"], "training.max_steps: expected an integer.*float 1.5"),
        ("", ["training.max_steps=true"], "training.max_steps: expected an integer.*bool True"),
        ("", ["training.bf16=1"], r"training.bf16: expected true or false \(bool\), got int 1"),
        ("", ["training.learning_rate=abc"], "training.learning_rate: expected a number"),
        ("", ["training.learning_rate=-1"], "training.learning_rate: expected a number above 0"),
        ("", ["training.learning_rate=.inf"], "a number above 0 and below 2.63, got inf"),
        ("", ["conversion.mass_weight=.inf"], "mass_weight: expected 0 or more and below 2.63"),
        ("", ["training.max_steps=99999999999999999999"], "max_steps: expected .* below 2.63"),
        ("", ["comparison.lengths=[99999999999999999999]"], "and below 2.63"),
        ("", ["training.schedule=cosin"], "one of 'cosine', .*did you mean 'cosine'"),
        ("", ["training.betas=[0.9]"], "training.betas: expected two numbers"),
        ("", ["training.betas=[0.9, x]"], r"training.betas\[1\]: expected a number"),
        ("", ["data.corpus=3"], "data.corpus: expected text .*a list of text"),
        ("", ["model=3"], "model: expected a section, got int 3"),
        ("", ["model.preset"], "expected key=value"),
        ("", ["model.preset.x=3"], "model.preset is a value"),
        ("model: {preset: a}", ["model.preset.x=3"], "model.preset is a value"),
        ("", ["training.max_steps=9", "training.max_tokens=9"], "exactly one of training.max_step"),
        ("- a", [], "expected a mapping"),
        ("a: [", [], "not valid YAML"),
        ("a: " + "[" * 3000, [], "not valid YAML"),
        ("training: {max_steps: 3}\ntraining: {batch_size: 2}", [], "key 'training' is there twic"),
        ("model: {size: tiny, size: small}", [], "the key 'size' is there twice"),
        ("base: missing.yaml", [], "missing.yaml does not exist"),
        ("base: recipe.yaml", [], "its own base"),
        ("base: 3", [], "base: expected a path"),
    ],
)
def test_mistakes_are_one_clear_line(tmp_path, text, overrides, message):
    if overrides == ["model.preset.x=3"] and not text:
        text = "model: {preset: latte++}"
    text = text or "training: {max_steps: 1}"
    with pytest.raises(LatteError) as caught:
        load_recipe(write(tmp_path, text), overrides)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


def test_yaml_reads_numbers_as_people_write_them():
    values = read_yaml("a: 3e-4\nb: 1e6\nc: -2.5E+3\nd: 12", "here")
    assert values == {"a": 3e-4, "b": 1e6, "c": -2500.0, "d": 12}


def test_what_looks_like_a_date_or_a_comment_is_text():
    tree = read_yaml("a: 2001-02-03\nb: 2001-99-99\nc: {x: &x {k: 1}, y: {<<: *x, k: 2}}", "here")
    assert (tree["a"], tree["b"]) == ("2001-02-03", "2001-99-99")
    assert tree["c"]["y"] == {"k": 2}
    apply_override(tree, "a=runs/one #2")
    apply_override(tree, "b=[" + "[" * 3000)
    apply_override(tree, "c='quoted' # comment")
    assert (tree["a"], tree["c"]) == ("runs/one #2", "quoted")
    assert tree["b"] == "[" * 3001


def test_identity_leaves_out_what_does_not_change_weights():
    base = {"training": {"max_steps": 1}}
    one = build(Recipe, {**base, "output_dir": "a"})
    two = build(Recipe, {"training": {"max_steps": 1, "log_steps": 7}, "output_dir": "b"})
    other = build(Recipe, {"training": {"max_steps": 1, "seed": 1}})
    assert one.identity() == two.identity() != other.identity()


def test_a_missing_recipe_and_a_folder(tmp_path):
    with pytest.raises(LatteError, match="does not exist"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(LatteError, match="is a folder"):
        load_recipe(tmp_path)


def test_openwebtext_takes_every_preset_at_paper_size():
    from latte.lab.train.run import model_config
    from latte.models import PRESETS

    for preset in PRESETS:
        recipe = load_recipe(RECIPES / "openwebtext.yaml", [f"model.preset={preset}"])
        config = model_config(recipe, {})
        assert (config.hidden_size, config.vocab_size) == (768, 50267)
