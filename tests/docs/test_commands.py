"""What documents tell to run: commands could be typed (their targets, files, options and recipes
exist), every Python snippet runs, and the figure is what its script draws."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib

import matplotlib.image
import pytest
import torch
import yaml

from latte.cli.parser import build_parser, parse
from latte.lab.train.recipe import load_recipe
from latte.lab.train.stages import load_conversion_recipe
from latte.models.registry import other_models, preset_names


def make_targets(root):
    rules = re.findall(r"^([a-z0-9 -]+):", (root / "Makefile").read_text(), re.M)
    return [target for rule in rules for target in rule.split()]


def check_latte(words, root):
    options = parse(words)
    if options.command in ("train", "compare"):
        recipe = load_recipe(root / options.recipe, options.overrides)
        recipe.import_plugins()
        names = {*preset_names(), *other_models()}
        assert recipe.model.preset in names
    if options.command == "convert" and options.recipe is not None:
        stages = load_conversion_recipe(root / options.recipe, options.overrides).stages
        assert stages(options.base, root)
    if options.command == "compare":
        chosen = options.presets or recipe.comparison.presets
        assert chosen and set(chosen) <= names


def check(words, root):
    """Fails for a command that nobody could type from the repository's root."""
    while "=" in words[0]:  # a variable for the command
        words = words[1:]
    program, *rest = words
    if program == "make":
        assert rest and set(rest) <= set(make_targets(root)), words
    elif program == "latte":
        check_latte(rest, root)
    elif program == ".":
        assert rest == [".venv/bin/activate"], words
    elif program == "torchrun":
        at = rest.index("latte.cli")
        assert rest[at - 1] == "-m" and rest[0] == "--nproc-per-node" and rest[1].isdigit()
        check_latte(rest[at + 1 :], root)
    elif words[:3] == ["python", "-m", "examples.demo"]:
        load_recipe(root / "recipes/demo.yaml", words[3:])
    elif words[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(words[2]), words
    elif program == "python":
        assert (root / rest[0]).is_file(), words
    elif program == "pip":
        extras = tomllib.loads((root / "pyproject.toml").read_text())["project"][
            "optional-dependencies"
        ]
        wanted = re.findall(r"\[([\w,]+)\]", words[-1])
        assert all(name in extras for group in wanted for name in group.split(","))
        assert (root / "constraints.txt").is_file() and "constraints.txt" in words
    else:
        raise AssertionError(f"not a command of this project: {words}")


def test_commands_in_blocks(document, root):
    commands = document.commands()
    for words in commands:
        check(words, root)
    assert document.text.count("```bash") == len(document.blocks("bash"))


def test_commands_in_sentences(document, root):
    found = re.findall(r"`((?:make|latte|python) [^`]+)`", document.prose)
    for command in found:
        if command.isupper() or re.search(r"[A-Z]{4,}", command):
            continue  # `latte COMMAND --help`
        if command.split()[0] == "latte" and len(command.split()) == 2:
            words = [*command.split()[1:], "--help"]
            with pytest.raises(SystemExit) as stop:
                build_parser().parse_args(words)
            assert stop.value.code == 0, command
        elif command.startswith("latte evaluate "):
            check_latte(["evaluate", "a-checkpoint", *command.split()[2:], "256"], root)
        elif command not in ("python -m latte.cli",):
            check(command.split(), root)


@pytest.mark.parametrize(
    "words",
    [
        ["latte", "train", "recipes/none.yaml"],
        ["latte", "train", "recipes/demo.yaml", "training.max_step=3"],
        ["latte", "evaluate", "runs/x", "--length", "3"],
        ["make", "everything"],
        ["python", "experiments/figures/none.py"],
    ],
)
def test_a_wrong_command_would_be_found(words, root):
    with pytest.raises((AssertionError, ValueError, SystemExit)):
        check(words, root)


# --- Python ------------------------------------------------------------------------------------


def test_python_snippets_run(document, tmp_path, monkeypatch):
    """Those of one file in order, in one namespace and an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LATTE_CACHE", str(tmp_path / "cache"))
    namespace: dict[str, object] = {"__name__": "snippets"}
    blocks = document.blocks("python")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for line, block in blocks:
            # Blank lines, so that a traceback names the line of the document.
            exec(compile("\n" * (line - 1) + block, str(document.path), "exec"), namespace)
    assert document.text.count("```python") == len(blocks)


def test_the_tour_has_snippets(read):
    counts = {name: len(read(name).blocks("python")) for name in ("docs/tour.md", "docs/guide.md")}
    assert counts["docs/tour.md"] >= 8 and counts["docs/guide.md"] >= 8


def test_the_figure_is_what_its_script_draws(root, script_of, tmp_path):
    """Fonts may differ from machine to machine, the picture does not."""
    script = script_of("docs/figures/weights.py")
    p_TL, window_TS, latents_TLS = script.probabilities()
    rows_T = (window_TS + latents_TLS.sum(1)).sum(-1)
    torch.testing.assert_close(rows_T, torch.ones_like(rows_T))
    torch.testing.assert_close(window_TS.sum(-1), p_TL[:, 0])
    script.draw(tmp_path / "weights.png")
    committed = root / "docs/figures/weights.png"
    assert committed.stat().st_size < 200_000
    drawn, kept = (matplotlib.image.imread(path) for path in (tmp_path / "weights.png", committed))
    assert drawn.shape == kept.shape
    assert abs(drawn - kept).mean() < 0.02


# --- The workflow, which calls what developers call ---------------------------------------------


@pytest.fixture
def jobs(root):
    return yaml.safe_load((root / ".github/workflows/ci.yml").read_text())["jobs"]


def test_its_commands_exist(jobs, root):
    runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = set(make_targets(root))
    for command in runs:
        program, *words = shlex.split(re.sub(r"\$\{\{.*?\}\}", "", command))
        if program == "make":
            wanted = {word for word in words if "=" not in word}
            assert wanted and wanted <= targets, command
        else:
            assert (root / program).is_file() and not words, command
    assert ".ci/run" in runs
    for name in re.findall(r"[\w-]+\.txt", (root / ".github/workflows/ci.yml").read_text()):
        assert (root / name).is_file()


def test_every_python_that_is_supported_is_tested(jobs, root):
    oldest = tomllib.loads((root / "pyproject.toml").read_text())["project"]["requires-python"]
    tested = jobs["test"]["strategy"]["matrix"]["python"]
    assert oldest == f">={tested[0]}" and tested == [f"3.{n}" for n in range(11, 11 + len(tested))]
