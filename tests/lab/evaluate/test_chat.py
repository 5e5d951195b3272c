"""Conversations: every turn reads its new tokens alone, and says what reading all would say."""

import contextlib
import io
import sys

import pytest
import torch
from transformers import set_seed

from latte.cli import main
from latte.errors import LatteError
from latte.lab.data.tokenizers import byte_tokenizer
from latte.lab.evaluate.chat import Chat, converse
from latte.models import LatteForCausalLM, preset_config

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
STRIPS = TEMPLATE.replace("m.content", "m.content | trim")
COUNTS = "{{ messages | length }}" + TEMPLATE


def tokenizer(template=TEMPLATE):
    made = byte_tokenizer()
    made.chat_template = template
    return made


@pytest.fixture(scope="module")
def model():
    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = preset_config(
        "latte-r-swa++",
        size="tiny",
        vocab_size=len(byte_tokenizer()),
        num_attention_heads=2,
        num_key_value_heads=2,
        num_latents=8,
        sliding_window=8,
        **sizes,
    )
    return LatteForCausalLM(config).double().eval()


@contextlib.contextmanager
def reads(model):
    """The numbers of tokens of the model's forward passes, as they come."""
    lengths = []

    def counted(_, arguments, options):
        ids = arguments[0] if arguments else options["input_ids"]
        lengths.append(ids.shape[1])

    hook = model.register_forward_pre_hook(counted, with_kwargs=True)
    yield lengths
    hook.remove()


def test_answers_are_those_of_reading_the_whole_conversation(model):
    chat = Chat(model, tokenizer(), temperature=0, max_new_tokens=12, document="long " * 30)
    for message in ("one", "two", "three"):
        before = len(chat.tokens)
        with reads(model) as lengths:
            chat.say(message)
        # A turn: its message and the template's marks, and then a token at a time.
        assert sum(lengths) <= len(chat.tokens) - before + 1
        prompt = len(chat.tokens) - 12
        with torch.no_grad():
            logits = model(torch.tensor([chat.tokens[:-1]])).logits[0, prompt - 1 :]
        assert logits.argmax(-1).tolist() == chat.tokens[prompt:]
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 3
    assert chat.messages[0]["content"].startswith("long long")


def test_the_mark_of_the_end_is_the_templates(model):
    chat = Chat(model, tokenizer(), temperature=0, max_new_tokens=3)
    chat.say("a")
    free = list(chat.tokens)
    chat.clear()
    chat.ends["eos_token_id"] = [free[-2]]  # the answer ends at its second token at the latest
    chat.say("a")
    assert chat.tokens[-1] == free[-2] and len(chat.tokens) < len(free)
    ended = len(chat.tokens) - 1
    chat.say("b")
    assert chat.tokenizer.decode(chat.tokens[ended:]).startswith("[end][user]b[end][assistant]")


def test_a_template_may_strip_answers_and_may_not_change_what_was_said(model):
    chat = Chat(model, tokenizer(STRIPS), temperature=0, max_new_tokens=2)
    chat.say("a")
    chat.messages[-1]["content"] = f" {chat.messages[-1]['content'].strip()}\n"
    chat.say("b")
    chat = Chat(model, tokenizer(COUNTS), temperature=0, max_new_tokens=2)
    chat.say("a")
    with pytest.raises(LatteError, match="keeps earlier messages as they are"):
        chat.say("b")
    assert len(chat.messages) == 2


def test_the_same_seed_says_the_same_and_a_cleared_chat_begins_anew(model):
    chat = Chat(model, tokenizer(), system="be brief", seed=3, max_new_tokens=8)
    first = chat.say("a")
    assert chat.say("a") != first
    chat.clear()
    pieces = []
    assert chat.say("a", pieces.append) == first
    assert "".join(pieces) == first
    assert chat.messages[0] == {"role": "system", "content": "be brief"}


def test_an_answer_that_is_stopped_can_be_gone_on_with(model):
    chat = Chat(model, tokenizer(), temperature=0, max_new_tokens=50)
    begun = len(chat.tokens)
    chat.say("a", lambda _: chat.stop())
    assert len(chat.tokens) - begun < 50
    chat.say("b")
    assert chat.tokenizer.decode(chat.tokens).count("[user]") == 2


def test_no_template_is_one_line(model):
    with pytest.raises(LatteError, match="expected a tokenizer with a chat template"):
        Chat(model, byte_tokenizer())


def test_the_command_answers_lines(model, tmp_path, monkeypatch, capsys):
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n\n/clear\na\n/exit\nb\n"))
    options = ["--temperature", "0", "--max-new-tokens", "4"]
    assert main(["chat", str(tmp_path / "model"), *options]) == 0
    said = capsys.readouterr().out
    half = said[: len(said) // 2]
    assert half and said == half * 2
    assert main(["chat", str(tmp_path / "model"), "--top-p", "2"]) == 2


def test_the_end_of_the_input_ends_the_conversation(model, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    converse(Chat(model, tokenizer()))
