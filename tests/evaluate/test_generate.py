"""Streaming a continuation: what is printed and returned is the text that follows the prompt."""

import functools

import pytest
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from latte.errors import LatteError
from latte.evaluate.generate import generate
from latte.models import LatteForCausalLM, preset_config


@pytest.fixture
def words_with_spaces():
    """A tokeniser in the manner of SentencePiece, whose words carry the space before them."""
    pieces = ["<s>", "</s>", *(f"▁{word}" for word in "once upon a time there was".split())]
    tokenizer = Tokenizer(WordLevel({piece: i for i, piece in enumerate(pieces)}, "<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def model(end=None):
    set_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=8, num_hidden_layers=1, eos_token_id=end, **shape)
    ).eval()


def test_the_space_before_the_first_word_is_kept(words_with_spaces, capsys):
    text = generate(
        model(), words_with_spaces, "once upon", max_new_tokens=6, temperature=1.0, seed=3
    )
    assert text.startswith(" ") and len(text.split()) >= 3
    assert capsys.readouterr().out.rstrip("\n") == text


def test_it_ends_where_the_model_says_too(words_with_spaces):
    free = generate(model(), words_with_spaces, "once", max_new_tokens=6, temperature=0, seed=0)
    first = words_with_spaces.convert_tokens_to_ids("▁" + free.split()[0])
    ended = generate(model([first]), words_with_spaces, "once", max_new_tokens=6, temperature=0)
    assert ended.split() == free.split()[:1]


def test_bytes_of_the_command_line_that_are_no_utf_8_are_replaced(words_with_spaces):
    options = {"max_new_tokens": 4, "temperature": 0}
    text = generate(model(), words_with_spaces, "once \udcff upon", **options)
    assert text == generate(model(), words_with_spaces, "once \ufffd upon", **options)


def test_a_compiled_step_writes_the_same_text(words_with_spaces, capsys, monkeypatch):
    # Without the C++ compiler, whose work would last most of a minute.
    quick = functools.partial(transformers.CompileConfig, backend="aot_eager")
    monkeypatch.setattr(transformers, "CompileConfig", quick)
    set_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 8}
    latte = LatteForCausalLM(preset_config("latte++", "tiny", **shape)).eval()
    options = {"max_new_tokens": 6, "temperature": 1.0, "seed": 3}
    plain = generate(latte, words_with_spaces, "once upon", **options)
    capsys.readouterr()
    assert generate(latte, words_with_spaces, "once upon", **options, compiled=True) == plain
    assert "compiled a step of decoding in" in capsys.readouterr().err
    with pytest.raises(LatteError, match="no step of decoding"):
        generate(model(), words_with_spaces, "once", compiled=True)
