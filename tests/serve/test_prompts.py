"""Chats as tokens: those of the tokenizer itself, marked where other requests branch."""

import concurrent.futures
import random
import threading
import types

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from latte.lab.data.tokenizers import byte_tokenizer
from latte.serve.prompts import LARGE, LONG, Prompts, Splits
from latte.serve.requests import BadRequest

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# An answer is opened by what a chat that goes on has not.
THINKS = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
# Refuses a chat that begins with no user.
STRICT = (
    "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}" + CHATML
)
WORDS = ("the", "captain", "said", "\n", "\n\n", "  ", "é", "日本", "<|im", "<|im_end|>x", "1234")


@pytest.fixture(scope="module")
def bpe():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_end|>x"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([text(random.Random(0), 2000)], trainer)

    def make(template):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
        tokenizer.chat_template = template
        return tokenizer

    return make


STRIPS = CHATML.replace("message.content }}", "message.content | trim }}")
LEAVES_OUT = CHATML.replace(
    "{{ message.content }}<|im_end|>",
    "{% if message.content %}{{ message.content }}<|im_end|>{% endif %}",
)


def text(rng, words):
    return " ".join(rng.choice(WORDS) for _ in range(words))


def chat(rng, turns, words=20):
    messages = [{"role": "system", "content": "be brief"}]
    for turn in range(turns):
        role = "user" if turn % 2 == 0 else "assistant"
        messages.append({"role": role, "content": text(rng, rng.randrange(words))})
    return messages


def ids_of(prompt):
    return prompt["input_ids"][0].tolist()


@pytest.mark.parametrize("template", [CHATML, THINKS])
def test_the_tokens_are_the_tokenizers_own(bpe, template):
    tokenizer, rng = bpe(template), random.Random(1)
    prompts = Prompts(bpe(template))
    for turns in (1, 3, 5, 3, 1):
        messages = chat(rng, turns, words=100)
        messages[0]["content"] = "the captain said " * LONG
        own = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        for _ in range(2):  # the second time from what is remembered
            assert ids_of(prompts.apply_chat_template(messages)) == own["input_ids"]
    assert prompts._splits._known


def test_a_long_text_is_split_once(bpe):
    splits = Splits(bpe(CHATML))
    long = "<|im_start|>user\n" + "the captain said " * (LONG // 10)
    first, _ = splits.encode(long + "<|im_end|>\n")
    split = []
    own = splits._encoding
    splits._encoding = lambda part: split.append(part) or own(part)
    again, before = splits.encode(long + "<|im_end|>\n<|im_start|>")
    assert split == ["<|im_end|>\n", "<|im_start|>"]
    assert again[:-1].tolist() == first.tolist()
    assert before(len(long)) == len(first) - 2
    assert before(17) == splits.encode(long)[1](17)  # within what is remembered


def test_a_text_whose_parts_have_other_tokens_is_not_cut(bpe):
    splits = Splits(bpe(CHATML))
    splits.check("<|im_start|>user<|im_end|>")
    assert splits._pattern is not None
    splits._encoding = lambda part: types.SimpleNamespace(ids=[len(part)])
    splits.check("<|im_start|>user<|im_end|>")
    assert splits._pattern is None
    assert splits.encode("<|im_start|>user<|im_end|>")[0].tolist() == [26]


@pytest.mark.parametrize("template", [CHATML, THINKS, STRICT, None])
def test_a_turn_begins_with_what_was_marked_in_the_turns_before(bpe, template):
    rng = random.Random(2)
    prompts = Prompts(byte_tokenizer() if template is None else bpe(template))
    messages = chat(rng, 1) if template is not STRICT else chat(rng, 1)[1:]
    marked = set()
    for answer in ("yes", "no\n\nbut", "", "  once"):
        prompt = prompts.apply_chat_template(messages)
        ids = ids_of(prompt)
        places = {tuple(ids[:mark]) for mark in prompt.marks}
        assert marked <= places and len(places) == len(prompt.marks)
        assert all(0 < mark < len(ids) for mark in prompt.marks)
        # At the end of the last message, or where its answer is opened.
        rest = prompts.decode(ids[prompt.marks[-1] :])
        opening = "<|im_start|>assistant\n<think>\n"
        assert rest == {THINKS: f"\n{opening}", None: ":"}.get(template, "\n")
        then = prompts.answered(prompt, answer)
        end = then.marks[-1]
        assert end == len(ids_of(then)) - 1
        marked = places | {tuple(ids_of(then)[:end])}
        messages = [*messages, {"role": "assistant", "content": answer}]
        messages.append({"role": "user", "content": text(rng, 9)})


def marks_of_every_beginning(prompts, messages):
    """The marks of a chat, each from rendering the chat up to there."""
    whole = prompts.apply_chat_template(messages)
    text, ends = prompts._render(messages, {"add_generation_prompt": True}), set()
    roles = [message["role"] for message in messages[1:]] + ["assistant"]
    follows = "<think>" not in text  # answers do not begin as they were opened
    for count, role in enumerate(roles, 1):
        opens = {"add_generation_prompt": role == "assistant" and follows}
        before = prompts._render(messages[:count], opens, strict=False)
        if before and text.startswith(before):
            ends.add(len(before) - 1)
    ids, starts = prompts._splits.encode(text)
    assert ids.tolist() == ids_of(whole)
    return sorted(starts(end) for end in ends)


@pytest.mark.parametrize("template", [CHATML, THINKS, STRICT, STRIPS, LEAVES_OUT, None])
def test_the_marks_are_where_the_chat_up_to_a_message_ends(bpe, template):
    rng = random.Random(3)
    prompts = Prompts(byte_tokenizer() if template is None else bpe(template))
    for turns in (1, 2, 5, 9):
        messages = chat(rng, turns, words=4)[template is STRICT :]
        messages += [
            {"role": "user", "content": content} for content in ("", " ", "  a", "b \n", "\n", "c")
        ]
        messages.append({"role": "tool", "content": "12"})
        marks = prompts.apply_chat_template(messages).marks
        every = marks_of_every_beginning(prompts, messages)
        if template is LEAVES_OUT:  # the end of a message without content is not known
            assert set(marks) <= set(every)
            assert len(marks) >= sum(bool(message["content"]) for message in messages)
        else:
            assert list(marks) == every


def test_the_work_is_in_proportion_to_the_chat(bpe, monkeypatch):
    """Number of messages that are rendered, and of characters that are split, for each message."""
    tokenizer = bpe(CHATML)
    prompts, render = Prompts(tokenizer), tokenizer.apply_chat_template
    rendered, split = [], []
    monkeypatch.setattr(
        tokenizer,
        "apply_chat_template",
        lambda messages, **options: rendered.append(len(messages)) or render(messages, **options),
    )
    encoding = prompts._splits._encoding
    monkeypatch.setattr(
        prompts._splits, "_encoding", lambda part: split.append(len(part)) or encoding(part)
    )

    def work(messages):
        rendered.clear(), split.clear()
        prompt = prompts.apply_chat_template(messages)
        assert len(prompt.marks) == len(messages)
        return sum(rendered) / len(messages), sum(split) / len(messages)

    roles = ("user", "assistant")
    one, ten = (
        work([{"role": roles[i % 2], "content": "a"} for i in range(count)]) for count in (41, 401)
    )
    assert ten[0] <= one[0] + 1 and ten[1] <= 1.1 * one[1]
    # However many kinds of messages there are, and whatever they call.
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    many = [
        {"role": roles[i % 2], "content": "a", "tool_calls": calls * (i + 1)} for i in range(101)
    ]
    rendered.clear()
    prompts.apply_chat_template(many)
    assert sum(rendered) <= 25 * len(many)


def test_long_texts_are_split_one_by_one_and_short_ones_pass_them(bpe, monkeypatch):
    prompts = Prompts(bpe(CHATML))
    long, splits, go_on = "the captain said " * (LARGE // 10), threading.Event(), threading.Event()
    encoding = prompts._splits._encoding

    def slow(part):
        if len(part) > LARGE:
            splits.set()
            assert go_on.wait(60)
        return encoding(part)

    monkeypatch.setattr(prompts._splits, "_encoding", slow)
    chat = [{"role": "user", "content": long}]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        try:
            first = pool.submit(prompts.apply_chat_template, chat)
            assert splits.wait(60)
            second = pool.submit(prompts.ids, long)
            assert ids_of(prompts.apply_chat_template([{"role": "user", "content": "the"}]))
            assert len(prompts.ids("the captain"))
            assert not (first.done() or second.done())
            prompts.end()
        finally:
            go_on.set()
        assert ids_of(first.result(60))
        with pytest.raises(BadRequest, match="the server ends"):
            second.result(60)


def test_the_start_token_comes_by_itself_where_there_is_no_template(bpe):
    plain, own = Prompts(byte_tokenizer()), Prompts(bpe(CHATML))
    start = plain.tokenizer.bos_token_id
    ids = plain._splits.encode("hi")[0]
    assert plain.begin(ids).tolist() == [start, *ids]
    assert plain.begin(plain.begin(ids)).tolist() == [start, *ids]
    assert plain.begin(ids[:0]).tolist() == [start]
    ids = own._splits.encode("the")[0]
    assert own.begin(ids) is ids
    assert len(own.begin(ids[:0])) == 1
