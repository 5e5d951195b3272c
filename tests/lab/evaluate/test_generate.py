"""Streaming a continuation: what is printed and returned is the text that follows the prompt."""

import functools

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from latte.errors import LatteError
from latte.lab.data.tokenizers import byte_tokenizer
from latte.lab.evaluate.generate import generate
from latte.models import LatteForCausalLM, load_state, preset_config


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


def test_a_model_that_is_not_finite_is_one_line(words_with_spaces):
    broken = model()
    with torch.no_grad():
        broken.lm_head.weight.fill_(torch.nan)
    for sampling in ({"temperature": 0.0}, {"temperature": 1.0}):
        with pytest.raises(LatteError, match="logits are NaN after the prompt"):
            generate(broken, words_with_spaces, "the cat", max_new_tokens=3, **sampling)


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


@pytest.fixture
def reader():
    """A byte model at a weight scale where what was read is seen in what is written."""
    set_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_latents": 8}
    shape |= {"initializer_range": 0.4, "tie_word_embeddings": False, "sliding_window": 8}
    return LatteForCausalLM(preset_config("latte-r-swa++", "tiny", **shape)).eval()


GREEDY = {"max_new_tokens": 12, "temperature": 0, "stream": False}


def test_a_document_is_read_once_and_prompts_go_on_from_its_state(reader, tmp_path, monkeypatch):
    monkeypatch.setattr("latte.lab.evaluate.generate.READ_AT_ONCE", 32)
    tokenizer, document, file = byte_tokenizer(), "a long text, of some pieces " * 5, tmp_path / "s"
    options = GREEDY | {"max_new_tokens": 0}
    assert generate(reader, tokenizer, "", document=document, save_state=file, **options) == ""
    answers = set()
    for prompt in ("who?", "what", "why"):
        anew = generate(reader, tokenizer, prompt, document=document, **GREEDY)
        assert generate(reader, tokenizer, prompt, state=file, **GREEDY) == anew
        assert generate(reader, tokenizer, document + prompt, **GREEDY) == anew
        answers.add(anew)
    assert len(answers) == 3


def test_the_state_is_that_after_the_prompt(reader, tmp_path):
    tokenizer, file, greedy = byte_tokenizer(), tmp_path / "state", GREEDY
    said = generate(reader, tokenizer, "once upon", save_state=file, **greedy)
    assert said == generate(reader, tokenizer, "once upon", **greedy)
    assert load_state(file, reader).get_seq_length() == 10  # with the start token
    # From state to state, the first still being what it was.
    generate(reader, tokenizer, " a", state=file, save_state=tmp_path / "next", **greedy)
    on = generate(reader, tokenizer, " time", state=tmp_path / "next", **greedy)
    assert on == generate(reader, tokenizer, "once upon a time", **greedy)
    assert load_state(file, reader).get_seq_length() == 10


def test_a_document_alone_is_continued(reader):
    tokenizer = byte_tokenizer()
    wanted = generate(reader, tokenizer, "once upon", **GREEDY)
    assert generate(reader, tokenizer, "", document="once upon", **GREEDY) == wanted


def test_states_that_do_not_fit_are_refused(reader, words_with_spaces, tmp_path):
    tokenizer, file = byte_tokenizer(), tmp_path / "state"
    generate(reader, tokenizer, "once", save_state=file, **GREEDY)
    with pytest.raises(LatteError, match="some text to continue with"):
        generate(reader, tokenizer, "", state=file, **GREEDY)
    with pytest.raises(LatteError, match="expected at least 1, got 0"):
        generate(reader, tokenizer, "a", state=file, **GREEDY | {"max_new_tokens": 0})
    with pytest.raises(LatteError, match="its folder does not exist"):  # before it is read
        generate(reader, tokenizer, "once", **GREEDY, save_state=tmp_path / "no" / "such")
    with pytest.raises(LatteError, match="none of Latte's own"):
        generate(model(), words_with_spaces, "once", **GREEDY, save_state=file)


def test_other_models_read_the_document_as_part_of_the_prompt(words_with_spaces):
    wanted = generate(model(), words_with_spaces, "once upon a time", **GREEDY)
    assert generate(model(), words_with_spaces, "a time", document="once upon", **GREEDY) == wanted


def test_a_compiled_step_goes_on_from_a_state(reader, tmp_path, monkeypatch):
    quick = functools.partial(transformers.CompileConfig, backend="eager")
    monkeypatch.setattr(transformers, "CompileConfig", quick)
    options = GREEDY | {"save_state": tmp_path / "state", "max_new_tokens": 0}
    generate(reader, byte_tokenizer(), "once upon a time", **options)
    options = GREEDY | {"state": tmp_path / "state"}
    plain = generate(reader, byte_tokenizer(), " there", **options)
    assert generate(reader, byte_tokenizer(), " there", **options, compiled=True) == plain
