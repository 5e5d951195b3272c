"""What a command prints, where the output's encoding has not every character."""

import io
import sys

import pytest

from latte.cli import main

COMMANDS = {
    "generate": ("--prompt", "日本", "--max-new-tokens", "30", "--seed", "1"),
    "inspect": ("--text", "ein Wörtchen", "--force", "--output", "größe"),
}


def printed(arguments, encoding, patch):
    written = io.BytesIO()
    patch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    assert main(arguments) == 0
    sys.stdout.flush()
    return written.getvalue()


@pytest.mark.parametrize("command", COMMANDS)
def test_unknown_characters_are_replaced(place, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LATTE_CACHE", str(place.folder / "cache"))
    arguments = [command, str(place.trained()), *COMMANDS[command]]
    whole = printed(arguments, "utf-8", monkeypatch).decode("utf-8")
    assert not whole.isascii()
    for encoding in ("ascii", "latin-1"):
        expected = whole.encode(encoding, "replace")
        assert printed(arguments, encoding, monkeypatch) == expected
