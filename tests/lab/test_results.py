"""Results are replaced by results of the same settings alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from latte.errors import LatteError
from latte.lab.results import numbered, own_file, results_at
from latte.models.atomic_files import check_new_file, check_writable, staged_beside

FILES = ("scores.csv", "scores.png", "positions.csv")


def write(place: Any, **texts: str) -> None:
    with place.writing() as staged:
        for name, text in texts.items():
            (staged / f"{name}.csv").write_text(text)


def at(folder: Path, length: int, **options: Any) -> Any:
    options = {"named": False} | options
    return results_at(folder, FILES, {"length": length, "corpus": ["a"]}, **options)


def test_the_same_settings_have_the_same_place_and_others_a_number(tmp_path: Path) -> None:
    folder = tmp_path / "evaluation"
    for length, text in ((8, "one"), (16, "two"), (8, "three")):
        write(at(folder, length), scores=text)
    assert (folder / "scores.csv").read_text() == "three"
    assert (tmp_path / "evaluation-2" / "scores.csv").read_text() == "two"
    assert json.loads((folder / "scores.settings.json").read_text())["length"] == 8
    assert {path.name for path in folder.iterdir()} == {"scores.csv", "scores.settings.json"}


def test_a_number_in_names_where_the_folder_is_given(tmp_path: Path) -> None:
    for length in (8, 16, 8):
        write(at(tmp_path, length, number="files"), scores=str(length), positions="")
    assert (tmp_path / "scores.csv").read_text() == "8"
    assert (tmp_path / "scores-2.csv").read_text() == "16"
    assert (tmp_path / "positions-2.csv").exists()


def test_what_the_user_named_is_refused_and_forced(tmp_path: Path) -> None:
    write(at(tmp_path, 8), scores="one", positions="here")
    with pytest.raises(
        LatteError, match="other settings: length is 8 there and 16 here; .*--force"
    ):
        at(tmp_path, 16, named=True)
    write(at(tmp_path, 16, named=True, force=True), scores="two")
    assert (tmp_path / "scores.csv").read_text() == "two"
    assert not (tmp_path / "positions.csv").exists()  # it was of the results that are gone


@pytest.mark.parametrize("name", FILES)
def test_files_that_no_settings_tell_of_are_the_users(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(LatteError, match=f"{name} exists; choose another name"):
        at(tmp_path, 8, named=True)
    assert at(tmp_path, 8).folder == tmp_path.with_name(f"{tmp_path.name}-2")


def test_settings_that_cannot_be_read_are_no_ones(tmp_path: Path) -> None:
    write(at(tmp_path / "a", 8), scores="one")
    (tmp_path / "a" / "scores.settings.json").write_text("{")
    assert at(tmp_path / "a", 8).folder.name == "a-2"


def test_a_failure_while_writing_leaves_the_old_results(tmp_path: Path) -> None:
    write(at(tmp_path, 8), scores="old")
    with pytest.raises(LatteError, match="cannot be written into .*: No space left on device"):
        with at(tmp_path, 8).writing() as staged:
            (staged / "scores.csv").write_text("new")
            Path("/dev/full").write_text("x" * 100_000)
    assert (tmp_path / "scores.csv").read_text() == "old"
    assert not list(tmp_path.glob(".*"))


def test_a_place_is_taken_while_its_results_are_written(tmp_path: Path) -> None:
    """Two commands that end at the same time have two places."""
    first, second = at(tmp_path, 8, number="files"), at(tmp_path, 9, number="files")
    assert first.number == second.number == 1
    with first.writing():
        assert at(tmp_path, 9, number="files").number == 2
        assert at(tmp_path, 8, number="files").number == 1
    with pytest.raises(RuntimeError), at(tmp_path, 10, number="files").writing():
        raise RuntimeError
    assert at(tmp_path, 11, number="files").number == 2


def test_new_files(tmp_path: Path) -> None:
    assert check_new_file(tmp_path / "state", "state") == tmp_path / "state"
    (tmp_path / "state").write_text("mine")
    with pytest.raises(LatteError, match="state .* exists and is a file; .*--force"):
        check_new_file(tmp_path / "state", "state")
    assert check_new_file(tmp_path / "state", "state", force=True)
    for path, what in ((tmp_path, "folder"), (Path("/dev/full"), "device")):
        with pytest.raises(LatteError, match=what):  # --force would replace the device itself
            check_new_file(path, "state", force=True)
    with pytest.raises(LatteError, match="its folder does not exist"):
        check_new_file(tmp_path / "none" / "state", "state")


def test_numbers_stand_before_the_suffix(tmp_path: Path) -> None:
    assert numbered(Path("a/b.csv"), 3) == Path("a/b-3.csv")
    assert numbered(Path("a/b-1.5"), 2, "") == Path("a/b-1.5-2")
    (tmp_path / "x.json").write_text("")
    assert own_file(tmp_path / "x.json", lambda _: False) == (tmp_path / "x-2.json", 2)
    assert own_file(tmp_path / "x.json", lambda _: True) == (tmp_path / "x.json", 1)


def test_a_folder_to_be_made_is_not_made(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(LatteError, match="cannot be written"):
        check_writable(tmp_path / "file" / "b")


def test_a_folder_that_a_killed_process_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / ".out.tmp-99999999"
    others = [tmp_path / name for name in (".out.tmp-mine", ".other.tmp-1", ".out-2.tmp-1")]
    for folder in (left, *others):
        folder.mkdir()
        (folder / "model.safetensors").touch()
    with staged_beside(tmp_path / "out") as staged:
        assert not left.exists()
        monkeypatch.setattr("os.getpid", lambda: 1)
        with staged_beside(tmp_path / "out"):  # of another process, beside one that is alive
            assert staged.is_dir()
    assert sorted(tmp_path.iterdir()) == sorted(others)
