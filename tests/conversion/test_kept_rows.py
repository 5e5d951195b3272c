"""Rows in which facts are said and asked about later."""

import pytest
import torch

from latte.conversion.kept_rows import AskedRow, kept_rows
from latte.lab.data import byte_tokenizer

TEXT = "The river was wide, and nobody had crossed it since the summer. " * 40


@pytest.fixture(scope="module")
def tokenizer():
    found = byte_tokenizer()
    found.chat_template = "{% for x in messages %}<{{ x.role }}>{{ x.content }}\n{% endfor %}"
    return found


@pytest.fixture(scope="module")
def text(tokenizer):
    return torch.tensor(tokenizer.encode(TEXT))


@pytest.fixture(scope="module")
def rows(tokenizer, text):
    return kept_rows(tokenizer, text, 24, 4000)


def test_rows_are_functions_of_the_seed(tokenizer, text, rows):
    again = kept_rows(tokenizer, text, 24, 4000)
    other = kept_rows(tokenizer, text, 24, 4000, seed=1)
    for a, b, c in zip(rows, again, other, strict=True):
        assert torch.equal(a.ids, b.ids) and a.asked == b.asked
        assert not torch.equal(a.ids, c.ids)


def test_what_is_asked_was_said(tokenizer, rows):
    """Every answer's last word stands in the text before the questions."""
    asked = 0
    for row in rows:
        assert 8 <= len(row.ids) <= 4000
        said, after = (tokenizer.decode(x) for x in row.ids.tensor_split([row.asked]))
        for line in after.splitlines():
            if line.startswith(("Answer: ", "A: ", "<assistant>")) and "read it" not in line:
                asked += 1
                word = line.rstrip(".").split()[-1].removeprefix("<assistant>")
                assert word.lower() in said.lower(), line
    assert asked > 50
    assert any(row.asked == len(row.ids) for row in rows)


def test_no_row_has_the_words_of_the_evaluation(tokenizer, rows):
    whole = " ".join(tokenizer.decode(row.ids) for row in rows).lower()
    assert not any(words in whole for words in ("pass key", "passkey", "secret word"))


@pytest.mark.parametrize("length", [64, 300])
def test_short_rows_ask_less(tokenizer, text, length):
    rows = kept_rows(tokenizer, text, 8, length)
    assert all(isinstance(row, AskedRow) and len(row.ids) <= length for row in rows)
    assert any(row.asked < len(row.ids) for row in rows)


def test_special_tokens_of_the_text_are_left_out(tokenizer, text):
    marked = torch.cat([torch.tensor([tokenizer.eos_token_id]), text[:50]])
    (row,) = kept_rows(tokenizer, marked.repeat(30), 1, 600, seed=3)
    assert int((row.ids == tokenizer.eos_token_id).sum()) <= 1


def test_no_text_is_one_line(tokenizer):
    with pytest.raises(ValueError, match="expected some text"):
        kept_rows(tokenizer, torch.tensor([tokenizer.eos_token_id]), 1, 600)
