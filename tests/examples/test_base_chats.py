"""Chats written by a small random model, read again as training text."""

import json

import pytest

from examples import base_chats
from latte.lab.data import PackedBlocks
from latte.lab.data.preparing import DataSection, prepare_text
from latte.lab.data.tokenizers import byte_tokenizer

TEMPLATE = (
    "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
def folder(make_model, tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    make_model("transformer++").save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def write(folder, *options):
    file = folder.parent / "chats.jsonl"
    return file, base_chats.main([str(folder), str(file), "--tokens", "500", *options])


def test_chats_have_the_templates_marks_and_are_training_text(folder, capsys):
    file, code = write(folder, "--batch", "8")
    assert code == 0, capsys.readouterr().err
    chats = [json.loads(line)["text"] for line in file.read_text().splitlines()]
    assert sum(map(len, chats)) > 500
    for chat in chats:
        question, answer = chat.split("<|endoftext|>assistant: ", 1)
        assert question.startswith("user: ") and question != "user: "
        assert answer.count("<|endoftext|>") == answer.endswith("<|endoftext|>")
    held_out = folder.parent / "held_out.txt"
    held_out.write_text("some other text")
    section = DataSection(
        str(file), str(held_out), special_tokens=True, cache_dir=str(folder.parent / "cache")
    )
    tokens = prepare_text(section, progress=False).train
    marks = [(tokens.document(i)[1:-1] == tokens.eos).sum() for i in range(len(chats))]
    assert marks == [chat.count("<|endoftext|>") for chat in chats]
    assert len(PackedBlocks(tokens, 64)) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "0"], "--batch: expected at least 1, got 0"),
        (["--tokens", "-5"], "--tokens: expected at least 1, got -5"),
    ],
)
def test_mistakes_are_one_line(folder, options, message, capsys):
    file, code = write(folder, *options)
    assert code == 2 and capsys.readouterr().err == f"base_chats: error: {message}\n"
    assert not file.exists()


def test_a_base_without_a_template_and_a_file_that_exists_are_refused(folder, capsys):
    file, _ = write(folder, "--batch", "8")
    before = file.read_text()
    assert write(folder)[1] == 2 and file.read_text() == before
    byte_tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    file.unlink()
    capsys.readouterr()
    assert write(folder)[1] == 2 and not file.exists()
    assert "expected a base with a chat template" in capsys.readouterr().err
