"""Which folder a checkpoint's path means, and that no other is taken in its place."""

import pytest

from latte.errors import LatteError
from latte.evaluate.checkpoint import find_checkpoint, load_checkpoint
from latte.train.run_folder import FINISHED_FILE, write_manifest


@pytest.fixture
def run(tmp_path):
    """A run folder with checkpoints of the steps 2 and 4."""
    for step in (2, 4):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        write_manifest(folder, [folder / "config.json"])
    return tmp_path


def test_an_unfinished_run_has_its_newest_checkpoint(run):
    assert find_checkpoint(run) == run / "checkpoint-4"
    assert find_checkpoint(run / "checkpoint-2") == run / "checkpoint-2"
    (run / "config.json").write_text("{}")
    assert find_checkpoint(run) == run


def test_a_finished_run_without_its_config_is_no_checkpoint_of_an_earlier_step(run):
    (run / FINISHED_FILE).write_text("{}")
    (run / "model.safetensors").write_bytes(b"weights")
    for answer in (find_checkpoint, load_checkpoint):
        with pytest.raises(LatteError) as caught:
            answer(run)
        assert str(caught.value) == f"{run} is not a checkpoint: {run}/config.json is missing"


def test_a_damaged_newest_checkpoint_is_named_with_the_one_before(run):
    (run / "checkpoint-4" / "config.json").write_text("{ }")
    with pytest.raises(LatteError, match="checkpoint-4/config.json has 3 bytes, expected 2") as it:
        find_checkpoint(run)
    assert str(it.value).endswith(f"to use an earlier checkpoint, name it: {run / 'checkpoint-2'}")
    (run / "checkpoint-2" / "config.json").unlink()
    with pytest.raises(LatteError, match="is not a checkpoint: .*checkpoint-4/config.json has 3"):
        find_checkpoint(run)
