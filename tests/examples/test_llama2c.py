"""llama2.c imports: the model against its equations, the tokenizer against its algorithm.

Shapes: B batch, T sequence, E hidden size, H query heads, G key/value heads, K width of a head,
V vocabulary.
"""

import random

import pytest
import torch

from examples.llama2c import load_llama2c, load_llama2c_tokenizer
from tests.examples.llama2c_reference import (
    Llama2cTokenizer,
    Sizes,
    checkpoint_bytes,
    llama2c_logits,
    random_weights,
    tokenizer_bytes,
    vocabulary,
)

# The model.

ODD_SIZES = [
    Sizes(),
    Sizes(dim=28, hidden=51, layers=2, heads=2, kv_heads=1, positions=19, shared=False),
    Sizes(dim=20, hidden=33, layers=1, heads=5, kv_heads=5, vocabulary=261, positions=7),
]


@pytest.mark.parametrize("sizes", ODD_SIZES, ids=["gqa", "mqa-own-classifier", "mha"])
def test_model_computes_what_llama2c_does(tmp_path, sizes):
    weights = random_weights(sizes)
    (tmp_path / "model.bin").write_bytes(checkpoint_bytes(sizes, weights))
    model = load_llama2c(tmp_path / "model.bin")
    ids_BT = torch.randint(
        sizes.vocabulary, (2, sizes.positions), generator=torch.Generator().manual_seed(1)
    )
    exact = llama2c_logits(sizes, weights, ids_BT, torch.float64)
    single = llama2c_logits(sizes, weights, ids_BT, torch.float32)
    with torch.no_grad():
        found = model(ids_BT).logits
        # Transformers rotates in fp32 whatever the weights, so fp64 cannot be exact either.
        double = model.double()(ids_BT).logits
    allowed = 2 * (single - exact).abs().max()
    assert 0 < allowed < 1e-4 * exact.abs().max()
    assert (found - exact).abs().max() <= allowed
    assert (double - exact).abs().max() <= allowed


# The tokenizer.


def random_tokenizer(seed):
    """(pieces, alphabet): pieces of few characters, so that they overlap in every way."""
    rng = random.Random(seed)
    letters = rng.choice([["a"], ["a", "b"], ["a", "b", "é"], ["-", "日"]])
    alphabet = [" ", *letters]
    pieces = {"".join(rng.choices(alphabet, k=rng.randint(2, 5))) for _ in range(20)}
    return [*rng.sample(sorted(pieces), rng.randint(3, len(pieces))), *alphabet], alphabet


ODD_TEXTS = [
    "",
    " ",
    "  ",
    "   two   and three   spaces  ",
    "\n",
    "\r\n\tTabs\tand\r\nlines\n\n\n",
    "non-breaking\u00a0and thin\u200aand wide\u3000spaces\u2028\u200b",
    "▁lower▁one▁eighth▁block",
    "<s> </s> <unk> <0x0A> \n<s>\n \n</s>\n",
    "naïve café, Señor! â é ñ € ™ – — … ‘single’ “double”",
    "e\u0301 combines; \u0e33\u0e4d; \u202eright to left\u202c",
    "Быстрая лиса, 速い狐, 빠른 여우, الثعلب, 👩‍👩‍👧‍👦 🏳️‍🌈 \U0010ffff \ue000",
    "\x00\x01\x1f\x7f\x80\xff\ufeff\ufffd",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa hehehehehehe wawawawa ......!!!!!!??",
    "Once upon a time, there was a little girl named Lily. She loved to play outside.",
]


@pytest.mark.parametrize("seed", range(12))
def test_random_tokenizers_encode_and_decode_alike(tmp_path, seed):
    pieces, alphabet = random_tokenizer(seed)
    texts, scores = vocabulary(pieces)
    (tmp_path / "tok.bin").write_bytes(tokenizer_bytes(texts, scores))
    wanted = Llama2cTokenizer(texts, scores)
    found = load_llama2c_tokenizer(tmp_path / "tok.bin")
    rng = random.Random(seed)
    letters, weights = [*alphabet, "z", "\n"], [9] * len(alphabet) + [1, 1]
    drawn = ["".join(rng.choices(letters, weights, k=rng.randint(0, 30))) for _ in range(60)]
    for text in (*drawn, *ODD_TEXTS):
        ids = wanted.encode(text)
        assert wanted.decode(ids) == text
        assert found.encode(text, add_special_tokens=False) == ids, repr(text)
        assert found.encode(text) == [1, *ids]
        assert found.decode([1, *ids], skip_special_tokens=True) == text


def test_text_that_spells_a_special_token_stays_text(tmp_path):
    texts, scores = vocabulary([" ", "<", "s", ">", "/"])
    (tmp_path / "tok.bin").write_bytes(tokenizer_bytes(texts, scores))
    found = load_llama2c_tokenizer(tmp_path / "tok.bin", vocab_size=264, max_length=77)
    assert found.convert_tokens_to_ids(["<unk>", "<s>", "</s>"]) == [0, 1, 2]
    assert found.model_max_length == 77
    ids = found.encode("<s>a</s>", add_special_tokens=False)
    assert min(ids) > 2
    assert found.decode(ids, skip_special_tokens=True) == "<s>a</s>"
