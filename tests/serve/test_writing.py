"""The text of an answer does not depend on how it is cut into tokens, nor on when it is told."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from latte.lab.data.tokenizers import byte_tokenizer
from latte.serve.sampling import TokenScore
from latte.serve.writing import Words, Writer
from tests.serve.test_openai_client import bpe

MOST = 10**6
TEXTS = ("hi", " ", "XY", "é", "€", "😀", "\ufffd", "a", "日本", "\n", "ab", "b")


def with_fallback():
    """As Llama's: words begin with a mark, and bytes are tokens where a character is none."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abhiXY", "hi", "▁hi", "XY"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [("h", "i"), ("▁", "hi"), ("X", "Y")]
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        + [decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


TOKENIZERS = {"bytes": byte_tokenizer, "bpe": bpe, "fallback": with_fallback}


def written(writer, ids):
    """The texts of all pieces, and the tokens told with each."""
    texts, scored = [], []
    for token in ids:
        piece = writer.put(token, TokenScore(token, -1.0, ()))
        texts.append(piece.text)
        scored.append(piece.scored)
        if writer.reason is not None:
            break
    return texts, scored


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_text_is_the_tokenizers_own(kind):
    tokenizer, rng = TOKENIZERS[kind](), random.Random(0)
    words = Words(tokenizer)
    for _ in range(40):
        text = "".join(rng.choices(TEXTS, k=rng.randrange(1, 60)))
        ids = tokenizer.encode(text, add_special_tokens=False)
        texts, scored = written(Writer(words, len(ids)), ids)
        assert "".join(texts) == tokenizer.decode(ids) == text
        told = [one for piece in scored for one in piece]
        assert [one.score.token for one in told] == ids
        for (offset, one), (later, _) in zip(told, told[1:], strict=False):
            name = words.name(one.token)
            assert offset <= later and (name.startswith("bytes:") or name[:1] in text[offset:])
        # Nothing that is whole waits.
        assert max(map(len, texts)) <= 3


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_part_of_a_character_is_named_by_its_bytes(kind):
    tokenizer = TOKENIZERS[kind]()
    words = Words(tokenizer)
    ids = tokenizer.encode("a€", add_special_tokens=False)[-3:]
    assert [words.name(token) for token in ids] == [r"bytes:\xe2", r"bytes:\x82", r"bytes:\xac"]
    assert b"".join(words.bytes(token) for token in ids) == "€".encode()


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_tokens_that_are_no_text(kind):
    tokenizer, rng = TOKENIZERS[kind](), random.Random(1)
    words = Words(tokenizer)
    for length in (1, 3, 20, 300):
        for ids in (rng.choices(range(260), k=length), rng.choices((0xE2, 0x82, 0xFF), k=length)):
            texts, scored = written(Writer(words, length), ids)
            whole = tokenizer.decode(ids, skip_special_tokens=True)
            # Beyond 16 tokens that are never a character, one can be told in other pieces.
            assert "".join(texts) == whole or length > 16
            assert abs(len("".join(texts)) - len(whole)) <= length // 8
            assert sum(map(len, scored)) == length


def until_a_stop(text, stops):
    """The text before the stop string that ends first, and whether there is one."""
    for end in range(len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)], True
    return text, False


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_stop_strings_are_found_wherever_tokens_begin(kind):
    tokenizer, rng = TOKENIZERS[kind](), random.Random(2)
    words = Words(tokenizer)
    found = 0
    for _ in range(300):
        parts = rng.choices(TEXTS[:5], k=rng.randrange(1, 12))
        text = "".join(parts)
        stops = ["".join(rng.choices("hiXY é", k=rng.randrange(1, 5))) for _ in range(2)]
        wanted, stopped = until_a_stop(text, stops)
        found += stopped
        ids = tokenizer.encode(text, add_special_tokens=False)
        writer = Writer(words, len(ids), stops=stops)
        texts, scored = written(writer, ids)
        assert "".join(texts) == wanted
        assert writer.reason == ("stop" if stopped else "length")
        told = [one for piece in scored for one in piece]
        assert all(one.offset < len(wanted) for one in told)
        assert [one.score.token for one in told] == ids[: len(told)]
        assert stopped or len(told) == len(ids)
    assert 30 < found < 270


def test_only_what_may_be_a_stop_string_is_held_back():
    tokenizer = byte_tokenizer()
    writer = Writer(Words(tokenizer), MOST, ends={256}, stops=["abc", "bd"])
    texts, _ = written(writer, [*b"xabxbabd", 256])
    assert texts == ["x", "", "", "abx", "", "b", "", "a"]
    assert (writer.reason, writer.tokens) == ("stop", 8)
    writer = Writer(Words(tokenizer), MOST, ends={256}, stops=["abc"])
    texts, _ = written(writer, [*b"ab", 256])
    assert texts == ["", "", "ab"] and writer.reason == "stop"
