"""What the system refuses is one line."""

from __future__ import annotations

import pytest
import torch
from safetensors import SafetensorError

from latte.lab.command_line import exit_code
from latte.models.plain_files import check_plain, read_object


def write_to_a_full_disk() -> None:
    torch.save({"a": torch.zeros(1000)}, "/dev/full")


def as_safetensors_says_it() -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left (os error 28)")


@pytest.mark.parametrize("work", [write_to_a_full_disk, as_safetensors_says_it])
def test_a_full_disk_is_said_to_be_full(work, capsys):
    assert exit_code("latte", work, "run it again") == 2
    line = capsys.readouterr().err
    assert line == "latte: error: No space left on device; run it again\n"


def test_another_error_of_a_library_is_not_hidden():
    def work() -> None:
        raise SafetensorError("a mistake in the code")

    with pytest.raises(SafetensorError):
        exit_code("latte", work, "")


def test_a_file_that_must_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    (tmp_path / "a.json").write_text("{}")
    assert read_object(tmp_path / "a.json") == {}
    monkeypatch.setattr("os.access", lambda *_: False)  # root may read everything
    with pytest.raises(ValueError, match="a.json cannot be read: permission denied"):
        check_plain(tmp_path / "a.json")
