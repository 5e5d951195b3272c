"""The five commands of the page "Your own text", run on a small text."""

import random
import shlex

from latte.cli import main

SMALL = (
    "model.overrides.hidden_size=32", "model.overrides.num_hidden_layers=1",
    "model.overrides.intermediate_size=64", "data.block_length=64", "training.max_tokens=512",
    "training.batch_size=2",
)  # fmt: skip


def five(document):
    """The commands of the block that trains a text of one's own."""
    return next(block for _, block in document.blocks("bash") if "my-text.txt" in block)


def test_the_five_commands(read, root, tmp_path, monkeypatch, capsys):
    block = five(read("docs/own-text.md"))
    lines = [line for line in block.splitlines() if line]
    assert len(lines) == 5
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LATTE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "recipes").symlink_to(root / "recipes")
    words = random.Random(0).choices(["once", "upon", "a", "time", "there", "was"], k=4000)
    (tmp_path / "my-text.txt").write_text(" ".join(words))
    for line in lines[2:]:  # after the set-up
        program, *rest = shlex.split(line)
        assert program == "latte"
        if rest[0] == "train":
            rest += SMALL
        if rest[0] == "generate":
            rest += ["--max-new-tokens", "5"]
        assert main(rest) == 0, line
    said = capsys.readouterr().out
    assert "Once upon a time" in said
    assert (tmp_path / "runs/mine/evaluation/evaluation.csv").is_file()
