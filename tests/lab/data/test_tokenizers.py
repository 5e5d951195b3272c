import copy

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from latte.errors import LatteError
from latte.lab.data import load_tokenizer, model_vocab_size, open_corpus, sample_text, train_bpe
from latte.lab.data.tokenizers import (
    Encoder,
    _pieces,
    document_ends,
    is_byte_tokenizer,
    token_byte_lengths,
    token_bytes,
    tokenizer_fingerprint,
)

HARD = [
    "plain text",
    " leading and trailing  spaces \n\n",
    "\x00\x01\x7f control, tab\t and \r\n line ends",
    "Grüße 漢字 😀👩‍👩‍👧 e\u0301 \ufeff \u200b \U0010ffff",
    "<|endoftext|> is text here, <|pad|> too",
    "".join(chr(c) for c in range(0x20, 0x800, 3)),
    "don't you'll  we're . , !",
]


@pytest.fixture(scope="module")
def bpe():
    sample = sample_text(open_corpus("embedded"), 300_000)
    return train_bpe(sample, 600, progress=False)


@pytest.fixture(params=["byte", "bpe"])
def any_tokenizer(request, bpe, tokenizer):
    return {"byte": tokenizer, "bpe": bpe}[request.param]


@pytest.mark.parametrize("text", HARD)
def test_lossless(any_tokenizer, text):
    ids = any_tokenizer(text)["input_ids"]
    assert any_tokenizer.decode(ids) == text
    assert not set(ids) & set(any_tokenizer.all_special_ids)
    assert Encoder(any_tokenizer)([text, "x"])[0].tolist() == ids
    lengths = np.array(token_byte_lengths(any_tokenizer))
    assert lengths[ids].sum() == len(text.encode())


def test_lossless_on_random_text(any_tokenizer):
    rng = np.random.default_rng(0)
    points = rng.integers(1, 0x11000, 3000)
    text = "".join(chr(c) for c in points if not 0xD800 <= c < 0xE000)
    assert any_tokenizer.decode(any_tokenizer(text)["input_ids"]) == text


def test_save_and_auto_round_trip(any_tokenizer, tmp_path):
    assert isinstance(any_tokenizer, PreTrainedTokenizerBase)
    any_tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    for text in HARD:
        assert again(text)["input_ids"] == any_tokenizer(text)["input_ids"]
        assert again.decode(again(text)["input_ids"]) == text
    names = ("eos_token_id", "bos_token_id", "pad_token_id")
    assert [getattr(again, n) for n in names] == [getattr(any_tokenizer, n) for n in names]
    assert tokenizer_fingerprint(again) == tokenizer_fingerprint(any_tokenizer)
    assert is_byte_tokenizer(again) == is_byte_tokenizer(any_tokenizer)
    assert tokenizer_fingerprint(load_tokenizer(tmp_path)) == tokenizer_fingerprint(again)


def test_byte_ids(tokenizer):
    text = "aé\n"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert document_ends(tokenizer) == (257, 256) and tokenizer.pad_token_id == 258
    assert len(tokenizer) == 259 and is_byte_tokenizer(tokenizer)
    assert is_byte_tokenizer(load_tokenizer("byte"))


def test_bytes_with_added_words_are_not_plain_bytes(tokenizer):
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens(["<word>"])
    assert not is_byte_tokenizer(larger)
    assert Encoder(larger)(["a<word>"])[0].tolist() == [97, 259]


def test_bpe_is_deterministic_and_compresses(bpe):
    sample = sample_text(open_corpus("embedded"), 300_000)
    assert len(bpe) == 600
    assert tokenizer_fingerprint(train_bpe(sample, 600, progress=False)) == tokenizer_fingerprint(
        bpe
    )
    assert len(bpe("".join(sample))["input_ids"]) < 0.6 * len("".join(sample))
    assert document_ends(bpe) == (1, 0)


def test_special_tokens_in_a_text_are_text_unless_they_are_asked_for(any_tokenizer):
    text, eos = "a<|endoftext|>b", any_tokenizer.eos_token_id
    plain = Encoder(any_tokenizer)([text])[0].tolist()
    assert eos not in plain and any_tokenizer.decode(plain) == text
    read = Encoder(any_tokenizer, special_tokens=True)([text])[0].tolist()
    assert read == [*Encoder(any_tokenizer)(["a"])[0], eos, *Encoder(any_tokenizer)(["b"])[0]]


def test_fingerprint_ignores_padding_and_truncation(bpe, tokenizer):
    before = tokenizer_fingerprint(bpe)
    bpe(["a", "longer text"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(bpe) == before != tokenizer_fingerprint(tokenizer)
    assert len(Encoder(bpe)(["a much longer text than two tokens"])[0]) > 2


@pytest.mark.parametrize("text", HARD)
def test_the_bytes_of_tokens_are_those_of_the_text(any_tokenizer, text):
    ids = any_tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(token_bytes(any_tokenizer, index) for index in ids) == text.encode()


def test_vocabulary_sizes(tokenizer):
    assert model_vocab_size(tokenizer) == 259
    assert model_vocab_size(tokenizer, multiple_of=64) == 320
    assert model_vocab_size(tokenizer, at_least=50267) == 50267
    with pytest.raises(LatteError, match="multiple_of must be"):
        model_vocab_size(tokenizer, multiple_of=0)


def test_very_long_documents_are_cut_where_the_ids_do_not_change(bpe):
    text = "".join(f"Line {i} of it\n" + "\n" * (i % 3) + "  indented.\n" for i in range(400))
    pieces = list(_pieces(text, 500))
    assert len(pieces) > 10 and "".join(pieces) == text
    ids = [i for piece in pieces for i in bpe(piece)["input_ids"]]
    assert ids == bpe(text)["input_ids"]
    assert "".join(_pieces("x" * 1234, 500)) == "x" * 1234


def test_errors(tmp_path, bpe):
    with pytest.raises(LatteError, match="too small for a vocabulary of 5000"):
        train_bpe(["tiny text"], 5000, progress=False)
    with pytest.raises(LatteError, match="vocab_size must be at least 259"):
        train_bpe(["tiny text"], 100, progress=False)
    with pytest.raises(LatteError, match="no such folder"):
        load_tokenizer(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(LatteError, match="expected 'byte', a folder or") as caught:
        load_tokenizer(tmp_path / "empty")
    assert "\n" not in str(caught.value)
    bpe.save_pretrained(tmp_path / "bad")
    (tmp_path / "bad" / "tokenizer.json").write_text("{")
    with pytest.raises(LatteError, match="expected 'byte', a folder or"):
        load_tokenizer(tmp_path / "bad")


def test_a_tokenizer_without_eos_is_refused(tmp_path, bpe):
    bpe.save_pretrained(tmp_path)
    without = AutoTokenizer.from_pretrained(tmp_path, eos_token=None)
    with pytest.raises(LatteError, match="has no eos token"):
        document_ends(without)
    only_eos = AutoTokenizer.from_pretrained(tmp_path, bos_token=None)
    assert document_ends(only_eos) == (0, 0)  # as GPT-2: the end of one opens the next
