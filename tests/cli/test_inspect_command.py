"""`latte inspect` at work."""

import pytest

from latte.cli import main
from latte.cli.parser import parse
from tests.helpers import read_csv

FILES = {"summary.csv", "index.html"}
SETTINGS = {"summary.settings.json"}
LATENT_FILES = {"usage.csv", "collapse.png", "effective.png"}
WINDOW_FILES = {"window_share.csv", "window_share.png"}


@pytest.mark.parametrize("preset", ["latte-r-swa++", "transformer++"])
def test_inspect_writes_tables_figures_and_a_page(place, preset, tmp_path, capsys):
    arguments = ["inspect", str(place.trained(preset)), "--text", "latent mean of the state"]
    assert main([*arguments, "--output", str(tmp_path), "--layers", "1", "--at", "3,9"]) == 0
    out = capsys.readouterr().out
    latents = preset.startswith("latte")
    expected = FILES | (LATENT_FILES | WINDOW_FILES if latents else set()) | {"weights.csv"}
    assert {path.name for path in tmp_path.iterdir()} == expected | SETTINGS
    assert all(name in out for name in expected)
    assert f"{preset}: 1 layer of 2 heads, 25 tokens read, 25 of them shown" in out
    assert ("effective latents" in out) == latents and ("no latents" in out) != latents
    assert [row["layer"] for row in read_csv(tmp_path / "summary.csv")] == ["1", "1"]


def test_inspect_reads_a_file_and_writes_beside_the_checkpoint(place, tmp_path, capsys):
    import shutil

    folder = tmp_path / "run"
    shutil.copytree(place.trained(), folder, ignore=shutil.ignore_patterns("checkpoint-*", ".lock"))
    text = place.folder / "held-out-0.txt"
    arguments = ["inspect", str(folder), "--file", str(text), "--tokens", "20"]
    assert main([*arguments, "--statistics-tokens", "300"]) == 0
    assert "300 tokens read, 20 of them shown" in capsys.readouterr().out
    names = {path.name for path in (folder / "inspection").iterdir()}
    assert names == FILES | LATENT_FILES | WINDOW_FILES | SETTINGS


def test_layers_count_from_zero():
    assert parse(["inspect", "run", "--text", "a", "--layers", "0,3"]).layers == [0, 3]
