"""OpenAI's API as its public reference describes it: requests, and what they must be answered.

The models say what is written here: their next token depends on the last one alone.
"""

import http.client
import json
import random
import tracemalloc
import urllib.request
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from latte.lab.data.tokenizers import byte_tokenizer
from latte.models import LatteForCausalLM, preset_config
from latte.serve import handlers, requests
from tests.serve.test_prompts import CHATML
from tests.serve.test_server import Client, openai

END, SIZE = 256, 264


def scripted(folder, tokenizer, script):
    """A model that says ``script[token]`` after a token. After others all are equally likely."""
    model = LatteForCausalLM(
        preset_config(
            "latte++",
            hidden_size=SIZE,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=16,
            num_latents=8,
            vocab_size=SIZE,
            tie_word_embeddings=False,
        )  # fmt: skip
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(SIZE))
        model.lm_head.weight.zero_()
        for last, token in script.items():
            model.lm_head.weight[token, last] = 1.5
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Client(str(folder))


@pytest.fixture(scope="module")
def bytes_client(tmp_path_factory):
    """Says "abc" after K and after a chat, "😀!" after M, and one of all tokens after R."""
    lines = (b"Kabc", b":a", "M😀!".encode())
    script = {a: b for line in lines for a, b in zip(line, line[1:], strict=False)}
    script |= {ord("c"): END, ord("!"): END}
    with scripted(tmp_path_factory.mktemp("bytes"), byte_tokenizer(), script) as client:
        yield client


def bpe():
    """Bytes, two longer tokens, and the marks of a chat."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "hi", "XY"])}
    merges = [("h", "i"), ("X", "Y")]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture(scope="module")
def bpe_client(tmp_path_factory):
    """Says "hi<|im_end|>XY" after K and after a chat, with "hi" and "XY" as one token each."""
    tokenizer = bpe()
    said = tokenizer.encode("K") + tokenizer.encode("hi<|im_end|>XY<|endoftext|>")
    script = dict(zip(said, said[1:], strict=False))
    script[tokenizer.encode("\n")[0]] = said[1]
    with scripted(tmp_path_factory.mktemp("bpe"), tokenizer, script) as client:
        yield client


@pytest.fixture
def client(request):
    return request.getfixturevalue(f"{request.param}_client")


def answered(client, chat=False, **fields):
    """Texts of an answer's choices, and why they end: of the whole one, and of a stream."""
    api, kind, prefix = client.api.completions, "text_completion", "cmpl-"
    if chat:
        api, kind, prefix = client.api.chat.completions, "chat.completion", "chatcmpl-"
        fields = {"messages": [{"role": "user", "content": "K"}], **fields}
    ask = {"model": client.name, "temperature": 0, **fields}
    whole = api.create(**ask)
    count = len(whole.choices)
    assert [choice.index for choice in whole.choices] == list(range(count))
    assert whole.object == kind and whole.id.startswith(prefix)
    assert all(one.message.role == "assistant" for one in whole.choices if chat)
    texts = [one.message.content if chat else one.text for one in whole.choices]
    yield texts, [one.finish_reason for one in whole.choices]
    if fields.get("best_of"):
        return
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *events, last = api.create(**ask, **options)
    texts, reasons, roles = [""] * count, [None] * count, {}
    for event in events:
        (choice,) = event.choices
        assert reasons[choice.index] is None and event.usage is None
        if chat:
            assert roles.setdefault(choice.index, choice.delta.role) == "assistant"
        texts[choice.index] += (choice.delta.content or "") if chat else choice.text
        reasons[choice.index] = choice.finish_reason
    yield texts, reasons
    assert last.choices == []
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert {event.id for event in (*events, last)} == {last.id}


# What the server answers: fields of a request, the texts of its choices, why they end.
STOPPED, SHORT = ["stop"], ["length"]
COMPLETIONS = [
    ("bytes", {"prompt": "K"}, ["abc"], STOPPED),
    ("bytes", {"prompt": "K", "max_tokens": 2}, ["ab"], SHORT),
    ("bytes", {"prompt": "K", "max_tokens": 3}, ["abc"], SHORT),
    ("bytes", {"prompt": "K", "max_tokens": 4}, ["abc"], STOPPED),
    ("bytes", {"prompt": "R", "logit_bias": {"120": 100}}, ["x" * 16], SHORT),
    ("bytes", {"prompt": "K", "max_tokens": 0}, [""], SHORT),
    ("bytes", {"prompt": None, "max_tokens": 0}, [""], SHORT),
    ("bytes", {"prompt": "K", "stop": "c"}, ["ab"], STOPPED),
    ("bytes", {"prompt": "K", "stop": ["zz", "b"]}, ["a"], STOPPED),
    ("bytes", {"prompt": "K", "stop": "bc", "max_tokens": 3}, ["a"], STOPPED),
    ("bytes", {"prompt": "K", "stop": "bcd"}, ["abc"], STOPPED),
    ("bytes", {"prompt": "K", "stop": "bd", "max_tokens": 2}, ["ab"], SHORT),
    ("bytes", {"prompt": "K", "stop": []}, ["abc"], STOPPED),
    ("bytes", {"prompt": ["K", "a"]}, ["abc", "bc"], STOPPED * 2),
    ("bytes", {"prompt": [75]}, ["abc"], STOPPED),
    ("bytes", {"prompt": [[75], [77, 75, 97]]}, ["abc", "bc"], STOPPED * 2),
    ("bytes", {"prompt": "K", "n": 2, "seed": 1}, ["abc"] * 2, STOPPED * 2),
    ("bytes", {"prompt": ["K", "a"], "n": 2}, ["abc", "abc", "bc", "bc"], STOPPED * 4),
    ("bytes", {"prompt": "K", "best_of": 3}, ["abc"], STOPPED),
    ("bytes", {"prompt": "MK", "echo": True}, ["MKabc"], STOPPED),
    ("bytes", {"prompt": [[77, 75], [97]], "echo": True}, ["MKabc", "abc"], STOPPED * 2),
    ("bytes", {"prompt": "K", "echo": True, "max_tokens": 0, "n": 2}, ["K"] * 2, SHORT * 2),
    ("bytes", {"prompt": "M"}, ["😀!"], STOPPED),
    ("bytes", {"prompt": "M", "max_tokens": 2}, ["\ufffd"], SHORT),
    ("bytes", {"prompt": "M", "stop": "😀"}, [""], STOPPED),
    ("bpe", {"prompt": "K"}, ["hiXY"], STOPPED),
    ("bpe", {"prompt": "K", "stop": "<|im_end|>"}, ["hi"], STOPPED),
    ("bpe", {"prompt": "K", "stop": ["i<|im_end|>X"]}, ["h"], STOPPED),
    ("bpe", {"prompt": "K", "stop": "i"}, ["h"], STOPPED),
    ("bpe", {"prompt": "K", "stop": ["XY", "Y"]}, ["hi"], STOPPED),
    ("bpe", {"prompt": "K", "stop": "iX"}, ["hiXY"], STOPPED),  # the mark is between them
]
CHATS = [
    ("bytes", {}, ["abc"], STOPPED),
    ("bytes", {"max_completion_tokens": 2, "max_tokens": 9}, ["ab"], SHORT),
    ("bytes", {"max_tokens": 3, "n": 2}, ["abc"] * 2, SHORT * 2),
    ("bytes", {"stop": ["b"], "n": 3}, ["a"] * 3, STOPPED * 3),
    ("bytes", {"logit_bias": {"256": 100, "97": -100}}, [""], STOPPED),
    ("bpe", {}, ["hiXY"], STOPPED),
    ("bpe", {"stop": "<|im_end|>"}, ["hi"], STOPPED),
    ("bpe", {"messages": [{"role": "user", "content": [{"type": "text", "text": "K"}]}]},
        ["hiXY"], STOPPED),
]  # fmt: skip


@pytest.mark.parametrize(("client", "fields", "texts", "reasons"), COMPLETIONS, indirect=["client"])
def test_completions(client, fields, texts, reasons):
    for answer in answered(client, **fields):
        assert answer == (texts, reasons)


@pytest.mark.parametrize(("client", "fields", "texts", "reasons"), CHATS, indirect=["client"])
def test_chats(client, fields, texts, reasons):
    for answer in answered(client, chat=True, **fields):
        assert answer == (texts, reasons)


def test_fields_that_change_nothing(bytes_client):
    same = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
    same |= {"safety_identifier": "x", "prompt_cache_key": "y", "seed": None, "stop": None}
    rest = {"n": 1, "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}}
    of_chats = {"tools": [], "tool_choice": "none", "parallel_tool_calls": None}
    of_chats |= {"response_format": {"type": "text"}, "modalities": ["text"]}
    of_chats |= {"chat_template_kwargs": None, "logprobs": False, "verbosity": "medium"}
    own = {"prompt": "K", "suffix": "", "best_of": 1, "echo": False, "logprobs": None}
    ask = {"temperature": 0, **same, **rest}
    status, answer = bytes_client.post("completions", {**ask, **own})
    assert (status, answer["choices"][0]["text"]) == (200, "abc")
    messages = [{"role": "user", "content": "K"}]
    status, answer = bytes_client.post(
        "chat/completions", {**ask, **of_chats, "messages": messages}
    )
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "abc")
    own = {"input": "K", "parallel_tool_calls": None, "truncation": "disabled", "tools": []}
    status, answer = bytes_client.post("responses", {"temperature": 0, **same, **own, "seed": 3})
    assert status == 400 and "stop" in answer["error"]["message"]  # it has no such field
    del same["stop"]
    status, answer = bytes_client.post("responses", {"temperature": 0, **same, **own, "seed": 3})
    assert (status, answer["output"][0]["content"][0]["text"]) == (200, "abc")


def test_choices_have_seeds_of_their_own(bytes_client):
    def texts(prompt="R", **fields):
        answer = bytes_client.api.completions.create(
            model=bytes_client.name, prompt=prompt, max_tokens=1, **fields
        )
        return [choice.text for choice in answer.choices]

    several = texts(n=6, seed=5)
    assert len(set(several)) > 1
    assert several == [texts(seed=5 + i)[0] for i in range(6)] == texts(n=6, seed=5)
    assert texts(["R", "R"], n=2, seed=5) == several[:2] * 2


def test_the_best_of_several_is_the_most_likely_one(bytes_client):
    """After R any token is as likely as another. What follows then has different chances."""
    ask = {"model": bytes_client.name, "prompt": "R", "max_tokens": 2, "seed": 4}
    several = bytes_client.api.completions.create(**ask, n=40, logprobs=0)
    means = [sum(x.logprobs.token_logprobs) / len(x.logprobs.tokens) for x in several.choices]
    by_mean = sorted(range(40), key=lambda i: -means[i])
    assert means[by_mean[1]] > means[by_mean[2]]
    best = bytes_client.api.completions.create(**ask, n=2, best_of=40)
    assert best.usage.completion_tokens == 80
    assert [one.text for one in best.choices] == [several.choices[i].text for i in by_mean[:2]]
    assert best.choices[0].logprobs is None


def joined(parts):
    """The log-probabilities of a stream as those of a whole completion."""
    return {name: [x for part in parts for x in part[name]] for name in parts[0]}


SCORED = [
    ("bytes", {"prompt": "K"}, ["a", "b", "c"], [0, 1, 2]),
    ("bytes", {"prompt": "K", "stop": "c"}, ["a", "b"], [0, 1]),
    ("bytes", {"prompt": "M"},
        ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80", "!"], [0, 0, 0, 0, 1]),
    ("bytes", {"prompt": "aM", "echo": True, "max_tokens": 3},
        ["a", "M", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98"], [0, 1, 2, 2, 2]),
    ("bytes", {"prompt": "é", "echo": True, "max_tokens": 0},
        ["bytes:\\xc3", "bytes:\\xa9"], [0, 0]),
    ("bpe", {"prompt": "K"}, ["hi", "<|im_end|>", "XY"], [0, 2, 2]),
    ("bpe", {"prompt": "K", "stop": "<|im_end|>"}, ["hi"], [0]),
    ("bpe", {"prompt": "K", "stop": "Y"}, ["hi", "<|im_end|>", "XY"], [0, 2, 2]),
]  # fmt: skip


@pytest.mark.parametrize(("client", "fields", "tokens", "offsets"), SCORED, indirect=["client"])
def test_log_probabilities_of_completions(client, fields, tokens, offsets):
    ask = {"model": client.name, "temperature": 0, "logprobs": 3, **fields}
    whole = client.api.completions.create(**ask).choices[0].logprobs.model_dump()
    assert (whole["tokens"], whole["text_offset"]) == (tokens, offsets)
    for token, logprob, top in zip(
        tokens, whole["token_logprobs"], whole["top_logprobs"], strict=True
    ):
        if logprob is None:
            assert top is None
            continue
        assert top[token] == logprob and len(top) in (3, 4)
        assert sorted(top.values())[-3:] == sorted(top.values(), reverse=True)[:3][::-1]
    events = client.api.completions.create(**ask, stream=True)
    parts = [event.choices[0].logprobs for event in events]
    assert joined([part.model_dump() for part in parts if part is not None]) == whole


def test_the_first_token_of_a_text_has_no_probability(bytes_client, bpe_client):
    """It has one if the start token is before it."""
    ask = {"prompt": "Ka", "echo": True, "max_tokens": 0, "logprobs": 0}
    for client, first in ((bytes_client, float), (bpe_client, type(None))):
        told = client.complete(**ask).choices[0].logprobs
        assert [type(x) for x in told.token_logprobs] == [first, float]
        assert told.top_logprobs[1] == {"a": told.token_logprobs[1]}


def test_tokens_of_the_same_text_are_all_named(bpe_client):
    """Ids of the model that the tokenizer does not have have no text at all."""
    ask = {"prompt": "R", "max_tokens": 1, "seed": 0, "logprobs": 20}
    unused = {str(index): 90 for index in range(SIZE - 3, SIZE)}
    top = bpe_client.complete(**ask, logit_bias=unused).choices[0].logprobs
    assert len(top.top_logprobs[0]) in (20, 21)
    assert set(top.top_logprobs[0]) >= set(top.tokens)


@pytest.mark.parametrize(
    ("client", "answer"),
    [("bytes", [("a", b"a"), ("b", b"b")]), ("bpe", [("hi", b"hi"), ("<|im_end|>", None)])],
    indirect=["client"],
)
def test_log_probabilities_of_chats(client, answer):
    ask = {"messages": [{"role": "user", "content": "K"}], "temperature": 0, "max_tokens": 2}
    ask |= {"model": client.name, "logprobs": True, "top_logprobs": 4}
    whole = client.api.chat.completions.create(**ask).choices[0].logprobs.content
    assert [one.token for one in whole] == [token for token, _ in answer]
    for one, (_, raw) in zip(whole, answer, strict=True):
        assert raw is None or bytes(one.bytes) == raw
        assert len(one.top_logprobs) == 4 and one.top_logprobs[0].logprob == one.logprob
    events = list(client.api.chat.completions.create(**ask, stream=True))
    parts = [event.choices[0].logprobs for event in events]
    assert [one for part in parts if part is not None for one in part.content] == whole


def test_responses(bytes_client):
    ask = {"model": bytes_client.name, "temperature": 0, "instructions": "be brief"}
    given = [
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "1", "output": "2"},
        {"type": "input_text", "text": "and"},
        {"type": "input_text", "text": "K"},
    ]
    for own, status in (({}, "completed"), ({"max_output_tokens": 2}, "incomplete")):
        text = "abc"[: own.get("max_output_tokens", 3)]
        whole = bytes_client.api.responses.create(**ask, **own, input=given)
        assert (whole.output_text, whole.status) == (text, status)
        assert whole.output[0].status == status
        assert (whole.incomplete_details is None) == (status == "completed")
        *events, last = bytes_client.api.responses.create(**ask, **own, input=given, stream=True)
        assert last.type == f"response.{status}" and last.response.output == whole.output[:0] + [
            whole.output[0].model_copy(update={"id": last.response.output[0].id})
        ]
        assert last.response.usage.output_tokens == whole.usage.output_tokens
        deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
        assert "".join(deltas) == text
        assert [e.sequence_number for e in (*events, last)] == list(range(len(events) + 1))
        assert [e.type.removeprefix("response.") for e in events if "delta" not in e.type] == [
            "created", "in_progress", "output_item.added", "content_part.added",
            "output_text.done", "content_part.done", "output_item.done",
        ]  # fmt: skip


def test_models(bytes_client):
    (listed,) = bytes_client.api.models.list()
    assert bytes_client.api.models.retrieve(bytes_client.name) == listed
    assert (listed.id, listed.object) == (bytes_client.name, "model")
    with pytest.raises(openai.NotFoundError, match="requested 'other/one'") as error:
        bytes_client.api.models.retrieve("other/one")
    assert error.value.code == "model_not_found"


def test_events_of_streams(bytes_client):
    ask = {"prompt": "K", "temperature": 0, "max_tokens": 1, "stream": True}
    url = f"{bytes_client.api.base_url}completions"
    request = urllib.request.Request(url, json.dumps(ask).encode())
    request.add_header("content-type", "application/json")
    request.add_header("x-request-id", "1")
    with urllib.request.urlopen(request) as answer:
        text = answer.read().decode()
    first, last, done, nothing = text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    for event, own in ((first, "a"), (last, "")):
        fields = json.loads(event.removeprefix("data: "))
        assert fields.pop("created") > 0 and fields.pop("system_fingerprint")
        choice = {"index": 0, "text": own, "logprobs": None}
        choice["finish_reason"] = None if own else "length"
        about = {"id": "cmpl-1", "object": "text_completion", "model": bytes_client.name}
        assert fields == {**about, "choices": [choice]}


def test_an_error_in_a_stream_is_its_last_event(bytes_client, monkeypatch):
    monkeypatch.setattr(handlers.Completions, "_last", lambda self, choice: 1 / 0)
    events = bytes_client.complete("K", temperature=0, stream=True)
    assert next(events).choices[0].text == "a"
    with pytest.raises(openai.APIError, match="division by zero"):
        list(events)
    monkeypatch.undo()
    assert bytes_client.complete("K", temperature=0).choices[0].text == "abc"


REFUSED = [
    ("completions", {"suffix": "x"}, "suffix"),
    ("completions", {"n": 0}, "n"),
    ("completions", {"n": 129}, "n"),
    ("completions", {"n": 2, "best_of": 1}, "best_of"),
    ("completions", {"best_of": 2, "stream": True}, "best_of"),
    ("completions", {"prompt": ["K"] * 65, "n": 2}, "prompt"),
    ("completions", {"prompt": [SIZE]}, "prompt"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": [75, "K"]}, "prompt"),
    ("completions", {"stop": ["a"] * 5}, "stop"),
    ("completions", {"stream_options": {"include_usage": True}}, "stream_options"),
    ("completions", {"stream": True, "stream_options": {"usage": True}}, "stream_options"),
    ("completions", {"top_k": 3}, "top_k"),
    ("chat/completions", {"tools": [{"type": "function"}]}, "tools"),
    ("chat/completions", {"functions": [{"name": "f"}]}, "functions"),
    ("chat/completions", {"tool_choice": "required"}, "tool_choice"),
    ("chat/completions", {"response_format": {"type": "json_schema"}}, "response_format"),
    ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
    ("chat/completions", {"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
    ("chat/completions", {"reasoning_effort": "high"}, "reasoning_effort"),
    ("chat/completions", {"modalities": ["text", "audio"]}, "modalities"),
    ("chat/completions", {"echo": True}, "echo"),
    ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
    ("chat/completions", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ("responses", {"tools": [{"type": "web_search"}]}, "tools"),
    ("responses", {"background": True}, "background"),
    ("responses", {"truncation": "auto"}, "truncation"),
    ("responses", {"input": [{"type": ["x"]}]}, "input"),
]  # fmt: skip
# What the line says of values that are wrong.
WRONG = [
    ("completions", {"temperature": -1}, "temperature: expected 0"),
    ("completions", {"temperature": "hot"}, "temperature: expected 0"),
    ("completions", {"stop": 5}, "stop: expected a string or a list"),
    ("completions", {"stop": [""]}, "stop: expected a string or a list"),
    ("completions", {"prompt": "half \ud800"}, "prompt: expected a string of valid Unicode"),
    ("completions", {"max_tokens": True}, "max_tokens: expected a whole number from 0"),
    ("completions", {"logprobs": 30}, "logprobs: expected a whole number from 0 to 20"),
    ("completions", {"seed": 1.5}, "seed: expected a whole number"),
    ("completions", {"prmpt": "x"}, "prmpt"),
    ("completions", {"generation_config": "{"}, "generation_config: expected a JSON object"),
    ("completions", {"generation_config": '{"num_beams": 4}'}, "got num_beams"),
    ("chat/completions", {"messages": "hi"}, "messages: expected a list of objects"),
    ("chat/completions", {"messages": None}, "messages: expected a list of objects, got none"),
    ("chat/completions", {"messages": []}, "at least one message"),
    ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ("chat/completions", {"messages": [{"role": 1, "content": ""}]}, "messages[0].role"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "reads text alone",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "half \ud800"}]},
        "messages[0].content: expected a string",
    ),
    ("chat/completions", {"logprobs": 1}, "logprobs: expected true or false"),
    ("chat/completions", {"logit_bias": [1]}, "logit_bias: expected an object"),
    ("chat/completions", {"logit_bias": {"9999": 1}}, "logit_bias: expected token ids below"),
    ("responses", {"input": 3}, "input: expected a string"),
    ("responses", {"input": [{"type": "what"}]}, "input[0]"),
    ("responses", {"previous_response_id": "x"}, "previous_response_id"),
]
GOOD = {
    "completions": {"prompt": "K", "max_tokens": 1},
    "chat/completions": {"messages": [{"role": "user", "content": "K"}], "max_tokens": 1},
    "responses": {"input": "K", "max_output_tokens": 1},
}


@pytest.mark.parametrize(("endpoint", "fields", "param"), REFUSED)
def test_what_is_not_served_is_refused(bytes_client, endpoint, fields, param):
    status, answer = bytes_client.post(endpoint, {**GOOD[endpoint], **fields})
    assert status == 400 and answer.keys() == {"error"}
    error = answer["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"].startswith(param) and "\n" not in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_said_in_one_line(bytes_client, stream):
    for endpoint, fields, said in WRONG:
        asked = {**GOOD[endpoint], "stream": stream, **fields}
        status, answer = bytes_client.post(endpoint, asked)
        error = answer["error"]
        assert (status, error["type"]) == (400, "invalid_request_error"), fields
        assert said in error["message"] and "\n" not in error["message"]
    with pytest.raises(openai.NotFoundError, match="requested 'other'") as error:
        bytes_client.api.completions.create(model="other", prompt="once", stream=stream)
    assert error.value.code == "model_not_found"


def nested(depth):
    return json.loads("[" * depth + "]" * depth)


ODD = [
    None, True, False, 0, -1, 1, 2, 1.5, 10**400, 1e308, 1e-300, float("nan"), "", "x", "\ud800",
    "x" * 2000, "{}", "[]", '{"top_k": "x"}', "[" * 5000, [], {}, [None], [[]], [{}], {"": None},
    {"type": None}, {"type": ["text"]}, {"include_usage": 1}, {"120": 1e-300}, {"-1": 1}, ["x", 1],
    [1, "x"], [10**30], [[1], "x"], [{"role": "user"}], [{"role": None, "content": []}],
    [{"role": "user", "content": [{"type": {}}]}], [{"role": "assistant", "tool_calls": None}],
    [{"role": "tool", "content": "x", "tool_call_id": {}}], [{"type": "function_call"}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "[]"}],
    [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}],
    [{"type": "reasoning"}], [{"type": "input_text", "text": "K"}], nested(60), nested(900),
]  # fmt: skip
FIELDS = {
    "completions": requests.OF_COMPLETIONS,
    "chat/completions": requests.OF_CHATS,
    "responses": requests.OF_RESPONSES,
}


def test_the_documents_name_every_field():
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    assert [x for fields in FIELDS.values() for x in fields if f"`{x}`" not in text] == []


# Those that ended in 500, or cut a stream.
KNOWN = [
    ("chat/completions", {"chat_template_kwargs": None}),
    ("chat/completions", {"chat_template_kwargs": {"self": 1, "messages": 2}}),
    ("completions", {"prompt": nested(900)}),
    ("completions", {"generation_config": '{"repetition_penalty": 1e-300}'}),
    ("completions", {"generation_config": '{"repetition_penalty": 2, "min_p": 1, "top_p": 1}'}),
    ("completions", {"generation_config": '{"temperature": 2, "do_sample": true}'}),
    ("completions", {"seed": 10**400, "temperature": 10**400}),
    ("responses", {"parallel_tool_calls": None}),
    ("responses", {"input": [{"type": "function_call", "call_id": "1", "name": "f",
                              "arguments": "{}"}]}),
    ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": None}]}),
]  # fmt: skip


@pytest.fixture(scope="module")
def connection(bytes_client):
    """One connection for many requests."""
    url = bytes_client.api.base_url
    connection = http.client.HTTPConnection(url.host, url.port, timeout=60)
    yield connection
    connection.close()


def check_answered(connection, endpoint, fields, stream):
    """An answer, or a refusal in one line; a stream that ends as streams do."""
    body = json.dumps({**GOOD[endpoint], "stream": stream, **fields})
    connection.request("POST", f"/v1/{endpoint}", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    text = answer.read().decode()
    assert answer.status in (200, 400, 404), (fields, text)
    if answer.status != 200:
        error = json.loads(text)["error"]
        assert error["message"] and "\n" not in error["message"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert '"error": {' not in text, (fields, text)
        *_, last, nothing = text.split("\n\n")
        done = "response." if endpoint == "responses" else "[DONE]"
        assert done in last and nothing == ""
    else:
        assert json.loads(text)["object"] in ("text_completion", "chat.completion", "response")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("endpoint", "fields"), KNOWN)
def test_requests_that_failed_once(connection, endpoint, fields, stream):
    check_answered(connection, endpoint, fields, stream)


@pytest.mark.parametrize("endpoint", GOOD)
def test_no_value_of_any_field_is_an_error_of_the_server(connection, endpoint):
    rng = random.Random(endpoint)
    for name in FIELDS[endpoint]:
        for value in rng.sample(ODD, 12):
            check_answered(connection, endpoint, {name: value}, rng.random() < 0.5)


def test_nothing_of_a_refused_request_stays(connection):
    def ask(count):
        for i in range(count):
            text = f"{i}" + "x" * 10**6
            for endpoint, fields in (
                ("completions", {"prompt": text, "n": 0}),
                ("chat/completions", {"tools": [{text: 1}]}),
                ("responses", {"input": text, "model": text}),
                ("completions", {text: 1}),
            ):
                check_answered(connection, endpoint, fields, False)

    ask(1)
    tracemalloc.start()
    try:
        ask(4)
        assert tracemalloc.get_traced_memory()[0] < 3 * 10**6
    finally:
        tracemalloc.stop()
