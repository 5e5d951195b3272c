"""llama2.c imports: the folder that is written, and files that are refused."""

import math
import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.llama2c import import_llama2c, load_llama2c, load_llama2c_tokenizer, main
from latte.errors import LatteError
from tests.examples.llama2c_reference import (
    Sizes,
    checkpoint_bytes,
    random_weights,
    tokenizer_bytes,
    vocabulary,
)


def small_files(folder):
    texts, scores = vocabulary([" a", " b", "ab", "ba", "aa", " ", "a", "b"])
    sizes = replace(Sizes(), vocabulary=len(texts))
    checkpoint, tokenizer = folder / "model.bin", folder / "tok.bin"
    checkpoint.write_bytes(checkpoint_bytes(sizes, random_weights(sizes)))
    tokenizer.write_bytes(tokenizer_bytes(texts, scores))
    return checkpoint, tokenizer


def test_a_folder_that_the_auto_classes_load(tmp_path, capsys):
    checkpoint, tokenizer = small_files(tmp_path)
    folder = tmp_path / "new" / "folder"
    assert main([str(checkpoint), str(tokenizer), str(folder)]) == 0
    assert capsys.readouterr().out == f"written: {folder}\n"
    assert {path.name for path in folder.iterdir()} >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert list(folder.parent.iterdir()) == [folder]

    own, own_tokenizer = load_llama2c(checkpoint), load_llama2c_tokenizer(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(folder)
    fast = AutoTokenizer.from_pretrained(folder)
    assert type(model) is type(own)
    assert (fast.bos_token_id, fast.eos_token_id, fast.model_max_length) == (1, 2, 23)
    for text in ["ab  baab", "<s>a</s>", "", "▁é\n"]:
        ids = own_tokenizer.encode(text)
        assert fast.encode(text) == ids
        assert fast.decode(ids, skip_special_tokens=True) == text
    ids_BT = torch.tensor([fast.encode("abba bab")])
    with torch.no_grad():
        assert torch.equal(model(ids_BT).logits, own(ids_BT).logits)
    assert model.generation_config.eos_token_id == [2, 1]


Change = Callable[[bytes], bytes]
GOOD_TEXTS, GOOD_SCORES = vocabulary([" a", " b", "ab", "ba", "aa", " ", "a", "b"])


def header(**changed):
    """Write other sizes into the header."""
    names = ["dim", "hidden", "layers", "heads", "kv_heads", "vocabulary", "positions"]

    def change(data):
        values = dict(zip(names, struct.unpack_from("<7i", data), strict=True)) | changed
        return struct.pack("<7i", *values.values()) + data[28:]

    return change


def token(index, text=None, score=None):
    """Write another token in place of one, or append one."""

    def change(_):
        texts = [*GOOD_TEXTS, ""]
        scores = [*GOOD_SCORES, -100.0]
        texts[index] = texts[index] if text is None else text
        scores[index] = scores[index] if score is None else score
        count = len(GOOD_TEXTS) + (index >= len(GOOD_TEXTS))
        return tokenizer_bytes(texts[:count], scores[:count])

    return change


BAD_CHECKPOINTS = {
    "empty": (lambda data: b"", "header of 28 bytes, got 0 bytes"),
    "versioned": (lambda data: b"24ka" + struct.pack("<i", 2) + data, "export of version 2"),
    "cut": (lambda data: data[:-4], "expected 276228 bytes"),
    "another sign": (header(vocabulary=-267), "expected 340308 bytes"),
    "absurd": (header(vocabulary=2**31 - 1, dim=6 * 2**28), "got 276228 bytes"),
    "no layers": (header(layers=0), "not a llama2.c model"),
    "heads do not divide": (header(heads=7), "not a llama2.c model"),
    "not a number": (
        lambda data: data[:32] + struct.pack("<f", math.nan) + data[36:],
        "embedding has values that are not finite",
    ),
    "text": (lambda data: b"Once upon a time, there was a little girl.", "not a llama2.c model"),
}
BAD_TOKENIZERS = {
    "only a header": (lambda data: data[:4], "expected token 3 to be <0x00>, got the end"),
    "cut in a token": (lambda data: data[:-1], "token 266 is cut short"),
    "a token missing": (lambda data: data[:-9], "266 tokens; expected the model's 267"),
    "too long a token": (lambda data: b"\5\0\0\0" + data[4:], "1 to 5 bytes, got 0.0 and 6"),
    "no number": (token(266, score=math.nan), "token 266: expected a finite score"),
    "no UTF-8": (token(266, b"\xc3"), "token 266: expected UTF-8"),
    "another byte": (token(13, "<0x0a>"), "token 13 to be <0x0A>, got '<0x0a>'"),
    "twice": (token(266, "a"), "tokens 265 and 266 are both 'a'"),
    "no space": (token(264, "x"), "no token for the space"),
    "equal scores": (token(262, score=-2.0), "'ab' and 'ba' have the same score -2.0"),
}


@pytest.fixture
def refused(tmp_path, mistake):
    """refused(checkpoint, tokenizer, output): the one line of a refusal that writes nothing."""

    def run(*arguments):
        before = sorted(tmp_path.rglob("*"))
        line = mistake(main, *arguments)
        assert sorted(tmp_path.rglob("*")) == before
        return line

    return run


@pytest.mark.parametrize("name", BAD_CHECKPOINTS)
def test_bad_checkpoints(tmp_path, refused, name):
    checkpoint, tokenizer = small_files(tmp_path)
    change, message = BAD_CHECKPOINTS[name]
    checkpoint.write_bytes(change(checkpoint.read_bytes()))
    line = refused(checkpoint, tokenizer, tmp_path / "out")
    assert message in line and str(checkpoint) in line


@pytest.mark.parametrize("name", BAD_TOKENIZERS)
def test_bad_tokenizers(tmp_path, refused, name):
    checkpoint, tokenizer = small_files(tmp_path)
    change, message = BAD_TOKENIZERS[name]
    tokenizer.write_bytes(change(tokenizer.read_bytes()))
    line = refused(checkpoint, tokenizer, tmp_path / "out")
    assert message in line and str(tokenizer) in line


def test_files_that_are_not_there_or_in_the_way(tmp_path, refused, monkeypatch):
    checkpoint, tokenizer = small_files(tmp_path)
    out = tmp_path / "out"
    assert "cannot be read: No such file" in refused(tmp_path / "none.bin", tokenizer, out)
    assert "cannot be read: Is a directory" in refused(checkpoint, tmp_path, out)
    assert "not a llama2.c model" in refused(tokenizer, checkpoint, out)
    assert "cannot be written: Not a directory" in refused(checkpoint, tokenizer, tokenizer / "out")
    assert f"{tokenizer} exists" in refused(checkpoint, tokenizer, tokenizer)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("empty", "link"):
        assert "exists; expected a new one" in refused(checkpoint, tokenizer, tmp_path / name)

    from transformers import PreTrainedTokenizerFast

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", full)  # after the model's
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(LatteError, match="out cannot be written: No space left on device$"):
        import_llama2c(checkpoint, tokenizer, out)
    assert sorted(tmp_path.rglob("*")) == before
