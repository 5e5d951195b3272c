"""Pieces from the middle of texts."""

import json

import pytest

from examples import middles


def test_a_piece_begins_after_the_blank_line_that_follows_the_middle(tmp_path, capsys):
    long = "a" * 30 + "\n\nin the middle\n\n" + "b" * 30
    texts = [long, "too short\n\n", "no blank line " * 9]
    file, output = tmp_path / "books.jsonl", tmp_path / "pieces.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert middles.main([str(output), str(file), "--characters", "18"]) == 0
    (piece,) = (json.loads(line)["text"] for line in output.read_text().splitlines())
    assert piece == "in the middle\n\nb"
    assert "1 pieces, 16 characters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--characters", "0"], "--characters: expected at least 1, got 0"),
        (["nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(tmp_path, mistake, options, message):
    file, output = tmp_path / "books.txt", tmp_path / "pieces.jsonl"
    file.write_text("text")
    assert message in mistake(middles.main, output, file, *options)
    assert not output.exists()
