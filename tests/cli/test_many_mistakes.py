"""Hundreds of mistakes: one clear line, exit code 2, and nothing on disk has changed.

All of them are in `make test-all`; in `make test` those whose line is known, and thirty more. They
run in this process: the seconds that `import torch` takes are not counted.
"""

import importlib.util
import json
import re
import resource
import shutil
import time

import pytest

from tests.cli.many_mistakes import DAMAGES, FILES, SAID, cases, commands, damage, make_box

CASES = cases()
QUICK = CASES[:: len(CASES) // 30]
SECONDS = 5.0  # of this process on the CPU, whatever else the machine does


def slow_unless(quick, *values):
    return pytest.param(*values, marks=() if quick else pytest.mark.slow)


@pytest.fixture(scope="module")
def places(place, save_llama, tmp_path_factory):
    """The trained run, and a base to convert with its tokenizer."""
    folder = tmp_path_factory.mktemp("mistakes")
    save_llama(folder / "base", num_hidden_layers=2)
    recipe = f"""
data: {{corpus: '{place.folder}/train-*.txt', validation: '{place.folder}/held-out-*.txt',
  cache_dir: {place.folder}/cache, block_length: 32, respect_documents: false}}
conversion: {{window: 8, num_latents: 4}}
layers: {{rows: 2, held_out_rows: 1, steps: 1, batch_size: 1, processes: 1}}
training: {{max_steps: 1, batch_size: 1}}
"""
    (folder / "conversion.yaml").write_text(recipe)
    return {"folder": folder, "run": place.trained(), "base": folder / "base"}


class Box:
    """A working directory full of traps, and a trained run in it, for case after case."""

    def __init__(self, place, places, folder):
        self.place, self.places, self.folder = place, places, folder
        self.fill()

    def fill(self):
        """Make it all anew."""
        shutil.rmtree(self.folder, ignore_errors=True)
        run = self.folder / "runs" / "latte-r-swa++"
        shutil.copytree(self.places["run"], run, ignore=shutil.ignore_patterns(".lock"))
        self.cwd = self.folder / "box"
        self.names = make_box(self.cwd, run, self.places["base"])
        self.names["recipe"] = str(self.place.recipe())
        self.names["conversion"] = str(self.places["folder"] / "conversion.yaml")
        self.before = self.contents()
        self.folders = {path for path in self.folder.rglob("*") if path.is_dir()}

    def contents(self):
        """Which file it is, its size and its time, of every file. Locks are nobody's data."""
        found = {}
        for folder in (self.folder, self.places["folder"], self.place.folder):
            for path in folder.rglob("*"):
                if path.is_file() and path.name != ".lock" and "/cache/" not in str(path):
                    about = path.stat()
                    found[str(path)] = (about.st_ino, about.st_size, about.st_mtime_ns)
        return found


@pytest.fixture(scope="module")
def shared_box(place, places, tmp_path_factory):
    return Box(place, places, tmp_path_factory.mktemp("box"))


@pytest.fixture
def box(place, shared_box, monkeypatch):
    """The box, which the next case finds as this one did."""
    monkeypatch.chdir(shared_box.cwd)
    monkeypatch.setenv("LATTE_CACHE", str(place.folder / "cache"))
    yield shared_box
    left = shared_box.contents()
    folders = {path for path in shared_box.folder.rglob("*") if path.is_dir()}
    if left != shared_box.before or folders != shared_box.folders:
        shared_box.fill()


def filled(argument, names):
    """With the box's paths in the place of their names; other braces are YAML's."""
    return re.sub(r"\{(\w+)\}", lambda name: names.get(name[1], name[0]), argument)


def refuse(case, box, capsys):
    """Run a case, check what it left, and give its line."""
    from latte.cli import main

    arguments = [filled(argument, box.names) for argument in case.arguments]
    capsys.readouterr()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    began = time.process_time()
    try:
        if case.limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (case.limit, limits[1]))
        code = main(arguments)
    except SystemExit as stop:  # argparse
        code = stop.code
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    seconds = time.process_time() - began
    captured = capsys.readouterr()
    assert code == 2, (arguments, code, captured)
    (line,) = captured.err.splitlines()
    assert "error:" in line and "Traceback" not in line
    after = box.contents()
    changed = [path for path, about in box.before.items() if after.get(path) != about]
    assert not changed, (arguments, line)
    if case.limit is None:
        new = sorted(after.keys() - box.before.keys())
        assert not new, (arguments, line)
    assert seconds < SECONDS, (arguments, seconds)
    return line


@pytest.mark.parametrize("case", list(commands(SAID)), ids=lambda case: case.name)
def test_what_the_line_says(case, box, capsys):
    for part, package in (("--tasks", "lm_eval"), ("serve", "prometheus_client")):
        if part in case.name and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is missing")
    assert SAID[case.name] in refuse(case, box, capsys)


@pytest.mark.parametrize(
    "case", [slow_unless(case in QUICK, case) for case in CASES], ids=lambda case: case.name
)
def test_every_mistake_is_one_line(case, box, capsys):
    refuse(case, box, capsys)


ODD = [
    (command, file, how)
    for how in DAMAGES
    for file in FILES
    for command in ("generate", "convert")
    if command == "generate" or file not in ("recipe.json", "manifest.json")
]
QUICK_ODD = [
    *(("generate", file, "pipe") for file in FILES),
    *(("convert", file, "pipe") for file in ("config.json", "model.safetensors")),
    *(("generate", "generation_config.json", how) for how in ("null", "wrong kinds")),
    *(("generate", "config.json", how) for how in ("nesting", "device")),
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("command", "file", "how"), [slow_unless(case in QUICK_ODD, *case) for case in ODD]
)
def test_an_odd_file_is_used_or_one_line(command, file, how, places, tmp_path, capsys):
    from latte.cli import main

    source = places["run" if command == "generate" else "base"]
    kept = shutil.ignore_patterns("checkpoint-*", ".lock", "manifest.json", "tensorboard")
    shutil.copytree(source, tmp_path / "odd", ignore=kept)
    damage(tmp_path / "odd" / file, how)
    arguments = {
        "generate": ("--prompt", "a", "--max-new-tokens", "1"),
        "convert": (str(tmp_path / "out"), "--window", "8"),
    }[command]
    capsys.readouterr()
    code = main([command, str(tmp_path / "odd"), *arguments])
    lines = capsys.readouterr().err.splitlines()
    assert code in (0, 2) and (code == 0 or len(lines) == 1), lines
    if code == 2:
        assert "error:" in lines[0] and not (tmp_path / "out").exists()


@pytest.mark.parametrize("layers", [50_000, 1_000_000])
def test_a_config_that_its_weights_do_not_fit_builds_nothing(layers, places, tmp_path, capsys):
    """It would take minutes for so many layers, and all of the memory."""
    from latte.cli import main

    for name, command in (("run", "generate"), ("base", "convert")):
        folder = tmp_path / name
        shutil.copytree(places[name], folder, ignore=shutil.ignore_patterns("check*", ".lock"))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
        began = time.process_time()
        assert main([command, str(folder), *([str(tmp_path / "out")] * (name == "base"))]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1 and ("parameters" in line or "layers" in line)
        assert time.process_time() - began < SECONDS
