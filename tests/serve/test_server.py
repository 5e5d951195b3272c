"""`latte serve` over loopback: OpenAI's own client against a tiny checkpoint on bytes."""

import concurrent.futures
import functools
import gc
import json
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest
import torch
import transformers
import uvicorn
from transformers import CompileConfig, set_seed

from latte.cli import main
from latte.data.tokenizers import byte_tokenizer
from latte.evaluate.checkpoint import load_checkpoint
from latte.evaluate.generate import generate
from latte.models import LatteCache, LatteForCausalLM, preset_config
from latte.serve import server

openai = pytest.importorskip("openai")
pytest.importorskip("transformers.cli.serving.systemone", reason="a server of Transformers 5.23")
GREEDY = {"max_tokens": 10, "temperature": 0}


def save(folder, preset="latte-r-swa++"):
    set_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_latents": 8}
    shape |= {"initializer_range": 0.4, "tie_word_embeddings": False, "sliding_window": 8}
    if preset == "transformer++":
        del shape["num_latents"], shape["sliding_window"]
    model = LatteForCausalLM(preset_config(preset, "tiny", **shape))
    with torch.no_grad():  # ASCII alone: half a character at the end is not streamed
        model.lm_head.weight[128:] *= 0.01
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("served"))


class Client:
    """Requests to a server that runs in a thread of its own."""

    def __init__(self, name, **serving):
        self.name, self.model_and_tokenizer = name, load_checkpoint(name, "cpu")
        listening = server.listen("localhost", 0)
        serving = server.Serving(**serving)
        self.server, self.end = server.make_server(name, *self.model_and_tokenizer, serving)
        options = {"sockets": [listening]}
        self.thread = threading.Thread(target=self.server.run, kwargs=options)
        self.thread.start()
        url = f"http://localhost:{listening.getsockname()[1]}/v1"
        self.api = openai.OpenAI(base_url=url, api_key="none", max_retries=0)

    def complete(self, prompt, **options):
        return self.api.completions.create(model=self.name, prompt=prompt, **options)

    def chat(self, text, **options):
        messages = [{"role": "user", "content": text}]
        return self.api.chat.completions.create(model=self.name, messages=messages, **options)

    def post(self, path, body):
        """The status of an answer, and its JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.api.base_url}{path}", content, headers)
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def close(self):
        self.server.should_exit = True
        self.api.close()
        self.thread.join(20)
        assert not self.thread.is_alive()
        self.end()


@pytest.fixture(scope="module")
def client(folder):
    client = Client(folder)
    yield client
    client.close()


@pytest.fixture(scope="module")
def expected(folder):
    """What `latte generate` says."""
    model, tokenizer = load_checkpoint(folder, "cpu")

    def text(prompt, tokens=10):
        return generate(
            model, tokenizer, prompt, max_new_tokens=tokens, temperature=0, stream=False
        )

    return text


def test_a_completion_is_what_latte_generate_says(client, expected):
    assert [model.id for model in client.api.models.list()] == [client.name]
    whole = client.complete("once", **GREEDY)
    assert whole.choices[0].text == expected("once")
    assert whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (4, 10)
    parts = [part.choices[0].text for part in client.complete("once", stream=True, **GREEDY)]
    assert "".join(parts) == whole.choices[0].text and len(parts) > 2


def test_a_chat_is_lines_of_who_says_what(client, expected):
    wanted = expected("user: hi\nassistant:")
    whole = client.chat("hi", **GREEDY)
    assert whole.choices[0].message.content == wanted
    parts = [
        part.choices[0].delta.content or "" for part in client.chat("hi", stream=True, **GREEDY)
    ]
    assert "".join(parts) == wanted


def test_stop_ends_an_answer(client, expected):
    text = expected("once")
    end = text.index(text[3]) + 1
    stopped = client.complete("once", stop=[text[3]], **GREEDY).choices[0]
    assert stopped.text == text[:end] and stopped.finish_reason == "stop"


def test_temperature_samples_and_a_seed_repeats(client):
    texts = {
        client.complete("once", max_tokens=12, seed=seed).choices[0].text for seed in (1, 2, 1)
    }
    assert len(texts) == 2


def test_several_clients_at_once_each_get_their_own(client, expected):
    prompts = [f"prompt {i}" * (i + 1) for i in range(6)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda prompt: client.complete(prompt, **GREEDY), prompts))
    assert [a.choices[0].text for a in answers] == [expected(prompt) for prompt in prompts]


def caches():
    gc.collect()
    return sum(type(thing) is LatteCache for thing in gc.get_objects())


def test_a_cancelled_request_frees_its_state(client, expected):
    endless = {"max_tokens": 10**6, "temperature": 0}
    stream = client.complete("once", stream=True, **endless)
    next(iter(stream))
    assert caches() == 1
    stream.close()
    with pytest.raises(openai.APITimeoutError):
        client.complete("once", timeout=0.3, **endless)
    assert client.complete("upon", **GREEDY).choices[0].text == expected("upon")
    deadline = time.monotonic() + 20
    while caches() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert caches() == 0


BAD = [
    ("completions", {"temperature": -1}, "temperature: expected 0"),
    ("completions", {"temperature": "hot"}, "temperature: expected 0"),
    ("completions", {"stop": 5}, "stop: expected a string or a list"),
    ("completions", {"stop": [""]}, "stop: expected a string or a list"),
    ("completions", {"prompt": None}, "prompt: expected a string, got none"),
    ("completions", {"prompt": [1, 2]}, "prompt: expected a string, got [1, 2]"),
    ("completions", {"max_tokens": 0}, "max_tokens: expected a whole number from 1"),
    ("completions", {"max_tokens": True}, "max_tokens: expected a whole number from 1"),
    ("completions", {"n": 2}, "n: expected 1"),
    ("completions", {"logprobs": 3}, "logprobs"),
    ("completions", {"echo": True}, "echo: expected false"),
    ("completions", {"best_of": 3}, "best_of: expected 1"),
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
    ("chat/completions", {"logprobs": True}, "logprobs"),
    ("chat/completions", {"logit_bias": [1]}, "logit_bias: expected an object"),
    ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
    ("responses", {"input": 3}, "input: expected a string"),
    ("responses", {"input": [{"type": "what"}]}, "input[0]"),
    ("responses", {"previous_response_id": "x"}, "previous_response_id"),
]
GOOD = {
    "completions": {"prompt": "once"},
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "responses": {"input": "hi"},
}


@pytest.mark.parametrize("streams", [False, True])
def test_bad_requests_are_refused_in_one_line(client, streams):
    for endpoint, fields, said in BAD:
        asked = {**GOOD[endpoint], "stream": streams, **fields}
        status, answer = client.post(endpoint, asked)
        error = answer["error"]
        assert (status, error["type"]) == (400, "invalid_request_error"), fields
        assert said in error["message"] and "\n" not in error["message"]
    with pytest.raises(openai.NotFoundError, match="requested 'other'") as error:
        client.api.completions.create(model="other", prompt="once")
    assert error.value.code == "model_not_found"


def test_bad_json_and_unknown_paths_are_errors_like_all_others(client):
    for content in (b"{", b"[]", b'"hi"', b""):
        status, answer = client.post("completions", content)
        assert status == 400 and "JSON object" in answer["error"]["message"]
    for path in ("load_model", "../load_model", "../reset", "audio/transcriptions"):
        status, answer = client.post(path, {"model": "gpt2"})
        assert status == 404 and answer["error"]["message"]


def test_responses_do_not_stream_unless_asked(client, expected):
    wanted = expected("user: hi\nassistant:")
    ask = {"model": client.name, "input": "hi", "max_output_tokens": 10, "temperature": 0}
    assert client.api.responses.create(**ask).output_text == wanted
    events = list(client.api.responses.create(**ask, stream=True))
    assert events[-1].response.output_text == wanted


def test_a_prompt_and_answer_that_are_too_long(folder):
    client = Client(folder, longest=20)
    try:
        with pytest.raises(openai.BadRequestError, match="at most 20 tokens") as error:
            client.complete("once", max_tokens=16)
        assert error.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="at most 20 tokens"):
            client.complete("o" * 30)
        assert client.complete("once", temperature=0).usage.completion_tokens == 15
    finally:
        client.close()


def test_compiled_steps_say_the_same_from_one_graph(folder, expected, monkeypatch, capsys):
    torch._dynamo.reset()
    # Without the C++ compiler, whose work would last most of a minute.
    eager = functools.partial(CompileConfig, backend="eager")
    monkeypatch.setattr(transformers, "CompileConfig", eager)
    client = Client(folder, compiled=True)
    try:
        assert "compiled a step of decoding in" in capsys.readouterr().err
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert graphs > 0
        for prompt in ("once", "once upon a time"):
            assert client.complete(prompt, **GREEDY).choices[0].text == expected(prompt)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    finally:
        client.close()


def test_the_command_says_where_it_serves(folder, monkeypatch, capsys):
    served = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: served.extend(sockets))
    assert main(["serve", folder, "--port", "0"]) == 0
    assert len(served) == 1
    assert capsys.readouterr().out.startswith(f"serving {folder} at http://localhost:")


def mistake(capsys, *arguments):
    assert main(["serve", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_mistakes_are_one_line(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: pytest.fail("it serves"))
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = mistake(capsys, folder, "--host", "127.0.0.1", "--port", port)
        assert "cannot be served at" in line and "in use" in line
    assert "port: expected 0 to 65535" in mistake(capsys, folder, "--port", "70000")
    assert "no pages" in mistake(capsys, folder, "--continuous-batching")
    assert "does not exist" in mistake(capsys, str(tmp_path / "none"), "--port", "0")
    plain = save(tmp_path / "plain", "transformer++")
    assert "state grows" in mistake(capsys, plain, "--port", "0", "--compile")
    (tmp_path / "plain" / "tokenizer.json").unlink()
    (tmp_path / "plain" / "tokenizer_config.json").unlink()
    assert "has no tokenizer" in mistake(capsys, plain, "--port", "0")
    monkeypatch.setattr(server, "is_serve_available", lambda: False)
    assert "pip install 'latte-attention[serving]'" in mistake(capsys, folder)
