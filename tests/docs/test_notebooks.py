"""The notebooks run from top to bottom, and are committed without outputs.

Their code cells are run as they are, in one namespace: no Jupyter is needed.
"""

import ast
import json
from pathlib import Path

import matplotlib.pyplot
import pytest
import torch

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs/notebooks").glob("*.ipynb"))
NAMES = [path.stem for path in NOTEBOOKS]


def cells(path, kind):
    body = json.loads(path.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in body["cells"] if cell["cell_type"] == kind]


def run(path):
    """The names that a notebook's cells leave."""
    namespace = {"__name__": "notebook"}
    with torch.random.fork_rng():
        for number, cell in enumerate(cells(path, "code")):
            exec(compile(cell, f"{path.name}, code cell {number}", "exec"), namespace)
    return namespace


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A folder of their own, and figures that are drawn and not shown."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("LATTE_CACHE", str(tmp_path / "cache"))
    matplotlib.use("agg")
    yield
    matplotlib.pyplot.close("all")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_a_notebook_runs(path, monkeypatch):
    """The conversion's on a random base of one page."""
    monkeypatch.setenv("LATTE_NOTEBOOK_BASE", "random")
    assert run(path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_it_is_committed_without_outputs(path):
    body = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in body["cells"] if cell["cell_type"] == "code"]
    assert code and all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
    assert all(ast.parse("".join(cell["source"])) for cell in code)
