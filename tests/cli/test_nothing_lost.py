"""A command run again with other options replaces nothing that is there."""

import shutil

import pytest

from latte.cli import main


@pytest.fixture
def run(place, tmp_path):
    """A run folder to write into."""
    folder = tmp_path / "run"
    shutil.copytree(place.trained(), folder, ignore=shutil.ignore_patterns("checkpoint-*", ".lock"))
    return folder


def test_a_state_replaces_no_file(place, run, tmp_path, refused):
    file = tmp_path / "precious.txt"
    file.write_text("mine")
    command = ["generate", str(run), "--prompt", "a", "--max-new-tokens", "0", "--save-state"]
    line = refused(*command, file)
    assert f"state {file} exists and is a file" in line and "--force" in line
    assert file.read_text() == "mine"
    assert main([*command, str(file), "--force"]) == 0
    state = file.read_bytes()
    assert state != b"mine"
    assert "exists" in refused(*command, file, "--state", file)
    assert file.read_bytes() == state
    assert main([*command, str(file), "--state", str(file), "--force"]) == 0
    assert file.read_bytes() != state


def test_an_evaluation_of_other_settings_has_another_folder(run, refused):
    for lengths in ("16", "32", "16"):
        assert main(["evaluate", str(run), "--lengths", lengths]) == 0
    tables = {
        name: (run / name / "evaluation.csv").read_text().splitlines()[1].split(",")[1]
        for name in ("evaluation", "evaluation-2")
    }
    assert tables == {"evaluation": "16", "evaluation-2": "32"}
    assert not (run / "evaluation-3").exists()
    output = run / "evaluation"
    before = (output / "evaluation.csv").read_bytes()
    line = refused("evaluate", run, "--lengths", "8", "--output", output)
    assert "lengths is [16] there and [8] here" in line
    assert (output / "evaluation.csv").read_bytes() == before
    weights = run / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    (run / "manifest.json").unlink()
    line = refused("evaluate", run, "--lengths", "16", "--output", output)
    assert "weights is" in line


def test_a_comparison_of_other_settings_has_files_of_its_own(place, tmp_path):
    arguments = ["compare", str(place.recipe()), f"output_dir={tmp_path / 'both'}", "--quiet"]
    for presets in ("swa++", "latte++", "swa++"):
        assert main([*arguments, "--presets", presets, "--lengths", "16"]) == 0
    first, second = (tmp_path / "both" / f"comparison{n}.csv" for n in ("", "-2"))
    assert "swa++" in first.read_text() and "latte++" in second.read_text()
    assert main([*arguments, "--presets", "swa++", "--lengths", "8"]) == 0
    measured = tmp_path / "both" / "swa++"
    assert {path.name for path in measured.glob("measured*")} == {
        *("measured.json", "measured-2.json")
    }
    assert (tmp_path / "both" / "comparison-3.csv").is_file()
