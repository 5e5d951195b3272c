"""The means on the results pages are those of the runs in the committed files."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

NAMES = ("README", "books", "shakespeare", "lra", "mqar")
PAGES = [f"experiments/results/{name}.md" for name in NAMES]
MEASURED = ("loss", "perplexity", "test_accuracy", "validation_accuracy", "accuracy", "loss_at_64",
            "loss_at_256")  # fmt: skip


@pytest.fixture(scope="module")
def script(script_of):
    return script_of("experiments/figures/means.py")


@pytest.fixture(scope="module")
def presets_by_mean(script):
    """The presets whose groups of two runs or more have a mean, by the mean as a page shows it."""
    paths = [path for path in script.FIGURES.glob("*.csv") if path.name != "pairs.csv"]
    found: dict[str, set[str]] = defaultdict(set)
    for group in (x for path in paths for name in MEASURED for x in script.groups(path, name)):
        if len(group.values) > 1:
            mean = group.mean
            for digits in range(5):
                found[mean.text(f".{digits}f")].add(preset_of(group.about.get("preset", "")))
    return found


def preset_of(name: str) -> str:
    """A preset without the options that follow it after a comma."""
    return name.split(",")[0]


def shown_means(page):
    """(first cell of the row, head of the column, mean) of each mean in the tables."""
    for table in page.tables():
        for row in table:
            label, *cells = row.items()
            for column, cell in cells:
                if found := re.fullmatch(r"\**(\d+\.\d+ ± \d+\.\d+)\**", cell):
                    yield label[1], column, found[1]


@pytest.mark.parametrize("name", PAGES)
def test_every_mean_is_one_of_runs(name, read, presets_by_mean):
    """Of the model in its row or column, if that names one of the files' presets."""
    presets = set().union(*presets_by_mean.values())
    shown = list(shown_means(read(name)))
    assert len(shown) >= 10
    for label, column, mean in shown:
        named = {preset_of(x) for x in re.findall(r"`([^`]+)`", f"{label} {column}")} & presets
        found = presets_by_mean.get(mean, set())
        assert found & (named or found), f"{label} | {column}: {mean} is of no runs"


def test_a_group_is_of_runs_that_differ_in_the_seed_alone(script, tmp_path, capsys, monkeypatch):
    file = tmp_path / "runs.csv"
    rows = ["a,64,1,2.0", "a,64,0,1.0", "a,256,0,5.0", "b,64,0,4.0", "b,64,,9.0"]
    file.write_text("\n".join(["preset,length,seed,loss", *rows]))
    first, longer, other = script.groups(file, "loss")
    assert first.about == {"preset": "a", "length": "64"} and first.values == [1.0, 2.0]
    assert longer.values == [5.0] and other.values == [4.0]
    monkeypatch.setattr(script, "FIGURES", tmp_path)
    script.main("runs.csv", "loss", "preset=a", "length=64")
    assert capsys.readouterr().out == "preset=a length=64: 1.5000 ± 6.3531 (1.0000, 2.0000)\n"
