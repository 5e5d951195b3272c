"""Run folders: claimed once, never overwritten, checkpoints whole or not at all."""

import os
from pathlib import Path

import pytest

from latte.errors import LatteError
from latte.lab.train import run_folder
from latte.lab.train.recipe import recipe_from_dict
from latte.lab.train.run_folder import (
    STAGING,
    FolderInUse,
    checkpoints,
    claim,
    newest_checkpoint,
    seal,
)


def recipe(folder, **training):
    return recipe_from_dict({"training": {"max_steps": 4, **training}, "output_dir": str(folder)})


def add_checkpoint(folder, step):
    staged = folder / STAGING / f"checkpoint-{step}"
    (staged / "shards").mkdir(parents=True)
    (staged / "model.safetensors").write_bytes(bytes(range(100)))
    (staged / "shards" / "0.distcp").write_bytes(b"shard")
    final = folder / f"checkpoint-{step}"
    seal(staged, final)
    return final


def snapshot(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_same_run_resumes_from_the_newest_checkpoint(tmp_path):
    first = claim(recipe(tmp_path / "run"))
    assert first.resume is None and not first.finished
    first.lock.close()
    add_checkpoint(tmp_path / "run", 2)
    newest = add_checkpoint(tmp_path / "run", 10)
    again = claim(recipe(tmp_path / "run", log_steps=99))
    assert again.resume == newest
    again.lock.close()


def test_another_run_is_refused_and_nothing_changes(tmp_path):
    claim(recipe(tmp_path)).lock.close()
    before = snapshot(tmp_path)
    with pytest.raises(LatteError, match=r"another run: training.learning_rate is 0.001 .* 0.5"):
        claim(recipe(tmp_path, learning_rate=0.5))
    with pytest.raises(LatteError, match="another run: processes is 1 there and 2 here"):
        claim(recipe(tmp_path), processes=2)
    assert snapshot(tmp_path) == before


def test_a_folder_in_use_is_refused(tmp_path):
    first = claim(recipe(tmp_path))
    with pytest.raises(LatteError, match="another process is training"):
        claim(recipe(tmp_path))
    first.lock.close()


def test_a_folder_that_another_process_makes_its_own_meanwhile_is_in_use(tmp_path, monkeypatch):
    theirs, before = [], Path.iterdir

    def meanwhile(folder):
        if folder == tmp_path and not theirs:
            monkeypatch.setattr(Path, "iterdir", before)
            theirs.append(claim(recipe(tmp_path)))
        return before(folder)

    monkeypatch.setattr(Path, "iterdir", meanwhile)
    with pytest.raises(FolderInUse):
        claim(recipe(tmp_path))
    theirs[0].lock.close()
    assert not claim(recipe(tmp_path)).finished


@pytest.mark.parametrize("damage", ["cut", "edit", "remove", "manifest", "shard"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, damage):
    good = add_checkpoint(tmp_path, 2)
    bad = add_checkpoint(tmp_path, 4)
    weights = bad / "model.safetensors"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:50])
    elif damage == "edit":
        weights.write_bytes(bytes(100))
    elif damage == "remove":
        weights.unlink()
    elif damage == "manifest":
        (bad / "manifest.json").write_text("{")
    else:
        (bad / "shards" / "0.distcp").write_bytes(b"SHARD")
    found, problems = newest_checkpoint(tmp_path)
    assert found == good
    assert len(problems) == 1 and "checkpoint-4" in problems[0]


def test_only_damaged_checkpoints_are_an_error(tmp_path):
    claim(recipe(tmp_path)).lock.close()
    (add_checkpoint(tmp_path, 2) / "model.safetensors").unlink()
    with pytest.raises(LatteError, match="no complete checkpoint"):
        claim(recipe(tmp_path))


def test_a_half_written_checkpoint_is_never_seen(tmp_path):
    claim(recipe(tmp_path)).lock.close()
    half = tmp_path / STAGING / "checkpoint-8"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    owner = claim(recipe(tmp_path))
    assert owner.resume is None
    assert not half.exists()
    owner.lock.close()


def test_rotation_keeps_the_newest_by_number(tmp_path):
    for step in (2, 10, 9):
        add_checkpoint(tmp_path, step)
    run_folder.rotate(tmp_path / "checkpoint-10", keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10"]
    # A later one was damaged, and the run went on before it.
    run_folder.rotate(tmp_path / "checkpoint-9", keep=1)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10"]


def test_what_a_run_reads_belongs_to_it(tmp_path):
    read = {"the training text": "1", "the base": "2"}
    owner = claim(recipe(tmp_path))
    owner.check_inputs({**read, "the base": "0"}, begun=False)  # nothing of it has been used yet
    owner.check_inputs(read, begun=False)
    before = snapshot(tmp_path)
    owner.check_inputs(read, begun=True)
    with pytest.raises(LatteError, match=r": the base has changed since .* put the earlier one"):
        owner.check_inputs({**read, "the base": "3"}, begun=True)
    owner.check_inputs({**read, "a plugin": "4"}, begun=True)  # an earlier version's run
    assert snapshot(tmp_path) == before
    owner.lock.close()


def test_a_pipe_in_a_folder_is_refused(tmp_path):
    claim(recipe(tmp_path)).lock.close()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(LatteError, match=r"config.json is a pipe"):
        claim(recipe(tmp_path))
