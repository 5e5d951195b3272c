"""`latte serve` over loopback: OpenAI's own client against a tiny checkpoint on bytes."""

import argparse
import concurrent.futures
import functools
import gc
import json
import re
import socket
import subprocess
import sys
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
from latte.cli.parser import size
from latte.lab.data.tokenizers import byte_tokenizer
from latte.lab.evaluate.checkpoint import load_checkpoint
from latte.lab.evaluate.generate import generate
from latte.models import LatteCache, LatteForCausalLM, preset_config
from latte.serve import server
from latte.serve.settings import Serving

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
        serving = Serving(**serving)
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

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.server.should_exit = True
        self.api.close()
        self.thread.join(20)
        assert not self.thread.is_alive()
        self.end()


@pytest.fixture(scope="module")
def client(folder):
    with Client(folder) as client:
        yield client


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


def test_an_answer_has_the_name_of_its_request(client):
    one, other = (client.api.completions.with_raw_response.create(
        model=client.name, prompt="once", max_tokens=2) for _ in range(2))  # fmt: skip
    assert one.headers["x-request-id"] != other.headers["x-request-id"]
    own = client.api.completions.with_raw_response.create(
        model=client.name, prompt="once", max_tokens=2, extra_headers={"x-request-id": "mine-1"}
    )
    assert own.headers.get_list("x-request-id") == ["mine-1"]


def test_a_chat_is_lines_of_who_says_what(client, expected):
    wanted = expected("user: hi\nassistant:")
    whole = client.chat("hi", **GREEDY)
    assert whole.choices[0].message.content == wanted
    parts = [
        part.choices[0].delta.content or "" for part in client.chat("hi", stream=True, **GREEDY)
    ]
    assert "".join(parts) == wanted


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
        client.complete("once", n=3, timeout=0.3, **endless)
    assert client.complete("upon", **GREEDY).choices[0].text == expected("upon")
    deadline = time.monotonic() + 20
    while caches() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert caches() == 0


GOOD = {
    "completions": {"prompt": "once"},
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "responses": {"input": "hi"},
}


def test_bad_json_and_unknown_paths_are_errors_like_all_others(client):
    for content in (b"{", b"[]", b'"hi"', b""):
        status, answer = client.post("completions", content)
        assert status == 400 and "JSON object" in answer["error"]["message"]
    for path in ("load_model", "../load_model", "../reset", "audio/transcriptions"):
        status, answer = client.post(path, {"model": "gpt2"})
        assert status == 404 and answer["error"]["message"]


def test_a_prompt_and_answer_that_are_too_long(folder):
    with Client(folder, longest=20) as client:
        with pytest.raises(openai.BadRequestError, match="at most 20 tokens") as error:
            client.complete("once", max_tokens=16)
        assert error.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="at most 20 tokens"):
            client.complete("o" * 30)
        assert client.complete("once", temperature=0).usage.completion_tokens == 15
        own = {"generation_config": '{"do_sample": false}'}  # it asks for no length
        assert client.complete("once", extra_body=own).usage.completion_tokens == 15
        own = {"generation_config": '{"max_new_tokens": 16}'}
        with pytest.raises(openai.BadRequestError, match="and 16 of the answer"):
            client.complete("once", extra_body=own)


def test_compiled_steps_say_the_same_from_one_graph(folder, expected, monkeypatch, capsys):
    torch._dynamo.reset()
    # Without the C++ compiler, whose work would last most of a minute.
    eager = functools.partial(CompileConfig, backend="eager")
    monkeypatch.setattr(transformers, "CompileConfig", eager)
    with Client(folder, compiled=True) as client:
        assert "compiled a step of decoding in" in capsys.readouterr().err
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert graphs > 0
        for prompt in ("once", "once upon a time", "once upon a time"):
            answer = client.complete(prompt, **GREEDY)
            assert answer.choices[0].text == expected(prompt)
        assert answer.usage.prompt_tokens_details.cached_tokens == len(prompt) - 1
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_the_command_says_where_it_serves(folder, monkeypatch, capsys):
    served = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: served.extend(sockets))
    assert main(["serve", folder, "--port", "0"]) == 0
    assert len(served) == 1
    assert capsys.readouterr().out.startswith(f"serving {folder} at http://localhost:")


@pytest.mark.parametrize("text", ["lots", "-1", "1XB", "GiB", ""])
def test_wrong_sizes(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected bytes, such as 1GiB"):
        size(text)


def test_mistakes_are_one_line(folder, tmp_path, monkeypatch, mistake):
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: pytest.fail("it serves"))
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = mistake(main, "serve", folder, "--host", "127.0.0.1", "--port", port)
        assert "cannot be served at" in line and "in use" in line
    plain = save(tmp_path / "plain", "transformer++")
    assert "state grows" in mistake(main, "serve", plain, "--port", "0", "--compile")
    monkeypatch.setattr(server, "is_serve_available", lambda: False)
    assert "pip install 'latte-attention[serving]'" in mistake(main, "serve", folder)


# ---- states that are kept


def conversation(client, first, second, **options):
    """Two turns: the answer to the second, and how many tokens of its prompt were reused."""
    ask = {"model": client.name, **GREEDY, **options}
    messages = [{"role": "user", "content": first}]
    answer = client.api.chat.completions.create(messages=messages, **ask)
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    messages.append({"role": "user", "content": second})
    wait_until_idle(client)
    answer = client.api.chat.completions.create(messages=messages, **ask)
    return answer.choices[0].message.content, answer.usage


def metrics(client):
    url = str(client.api.base_url).replace("/v1/", "/metrics")
    with urllib.request.urlopen(url) as answer:
        lines = answer.read().decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


def wait_until_idle(client):
    """Until what was said has been read for the next turn."""
    before = None
    while before != (before := metrics(client)["latte_read_tokens_total"]):
        time.sleep(0.2)


@pytest.fixture(scope="module")
def forgetful(folder):
    """A server that keeps no state."""
    with Client(folder, state_cache=0) as client:
        yield client


def test_a_turn_reads_what_is_new_and_says_the_same(client, forgetful):
    first, second = "a document\n" * 60, "and then?"
    text, usage = conversation(client, first, second)
    again, anew = conversation(forgetful, first, second)
    assert text == again
    assert usage.prompt_tokens == anew.prompt_tokens
    # What was sent and said before, but for the last token of it.
    new = len("user: and then?\nassistant:")
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - new - 1
    assert anew.prompt_tokens_details.cached_tokens == 0


def test_streams_and_responses_say_what_was_reused(client):
    messages = [{"role": "user", "content": "streamed " * 50}]
    ask = {"model": client.name, "messages": messages, **GREEDY}
    client.api.chat.completions.create(**ask)
    counted = {"stream": True, "stream_options": {"include_usage": True}}
    usage = list(client.api.chat.completions.create(**ask, **counted))[-1].usage
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    ask = {"model": client.name, "input": "streamed " * 50, "max_output_tokens": 5}
    for answer in (
        client.api.responses.create(**ask),
        list(client.api.responses.create(**ask, stream=True))[-1].response,
    ):
        usage = answer.usage
        assert usage.input_tokens_details.cached_tokens == usage.input_tokens - 1
    whole = client.complete("completed " * 60, **GREEDY)
    again = client.complete("completed " * 60, **GREEDY)
    assert again.choices[0].text == whole.choices[0].text
    assert again.usage.prompt_tokens_details.cached_tokens == 600 - 1
    longer = client.complete("completed " * 70, **GREEDY)
    assert longer.usage.prompt_tokens_details.cached_tokens == 512 - 1  # of the prompt alone


def test_a_conversation_about_a_book_reads_the_book_once(client, tmp_path, monkeypatch, capsys):
    """``examples/book_chat.py``, against a running server."""
    from examples import book_chat  # imports openai, which may not be there

    (tmp_path / "book.txt").write_text("It was a bright day in April. " * 40)
    url = ["--url", str(client.api.base_url), "--tokens", "8"]
    command = ["book_chat", str(tmp_path / "book.txt"), "Who is this?", "And then?", *url]
    monkeypatch.setattr("sys.argv", command)
    ask = book_chat.ask

    def ask_and_wait(*arguments):
        answer = ask(*arguments)
        wait_until_idle(client)  # the server has then read the answer for the next turn
        return answer

    monkeypatch.setattr(book_chat, "ask", ask_and_wait)
    book_chat.main()
    printed = capsys.readouterr().out
    found = re.findall(r"\[([\d,]+) tokens, ([\d,]+) of them read before; first word", printed)
    (first, none), (second, reused) = (
        tuple(int(x.replace(",", "")) for x in pair) for pair in found
    )
    assert none == 0 and 1200 < first <= reused < second
    assert printed.count("> ") == 2


# ---- requests that share a step


@pytest.mark.parametrize("preset", ["latte-conv-swa++", "transformer++"])
def test_many_clients_with_all_kinds_of_wishes_get_what_each_gets_alone(tmp_path, preset):
    name = save(tmp_path, preset)
    model, tokenizer = load_checkpoint(name, "cpu")
    client = Client(name, slots=3, piece=16)

    def alone(prompt, seed, **wishes):
        ids = tokenizer(f"<|startoftext|>{prompt}", split_special_tokens=False).input_ids
        torch.manual_seed(seed)
        ids = torch.tensor([ids])
        out = model.generate(ids, max_new_tokens=24, pad_token_id=0, **wishes)
        return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)

    def asked(prompt, seed, **wishes):
        config = json.dumps({"max_new_tokens": 24, "do_sample": False, **wishes})
        own = {"seed": seed, "generation_config": config}
        return client.complete(prompt, extra_body=own).choices[0].text

    kinds = [
        {"do_sample": False},
        {"do_sample": True, "top_k": 0},
        {"do_sample": True, "top_k": 5, "temperature": 0.7},
        {"do_sample": True, "top_k": 0, "top_p": 0.8},
        {"do_sample": False, "repetition_penalty": 1.5},
        {"do_sample": True, "top_k": 0, "min_p": 0.05},
    ]
    wishes = [(f"prompt {i} " * (1 + 5 * (i % 4)), i, kinds[i % 6]) for i in range(12)]
    try:
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda w: asked(w[0], w[1], **w[2]), wishes))
    finally:
        client.close()
    assert answers == [alone(prompt, seed, **own) for prompt, seed, own in wishes]


def test_a_long_prompt_is_read_between_the_steps_of_running_answers(folder, monkeypatch):
    from latte.serve.engine import Engine

    happened = []
    for name in ("_read", "_step"):
        own = getattr(Engine, name)
        monkeypatch.setattr(
            Engine, name, lambda self, own=own, name=name: (happened.append(name), own(self))
        )
    with Client(folder, piece=16) as client:
        running = client.complete("once", stream=True, max_tokens=10**6, temperature=0)
        next(iter(running))
        happened.clear()
        client.complete("long " * 200, max_tokens=1)
        read = [i for i, name in enumerate(happened) if name == "_read"]
        assert len(read) >= 1000 // 16
        assert all(happened[i + 1] == "_step" for i in read[:-1])
        running.close()


def test_probabilities_of_tokens(client, folder):
    model, tokenizer = load_checkpoint(folder, "cpu")
    whole = client.complete("once", logprobs=2, **GREEDY).choices[0]
    told = whole.logprobs
    assert "".join(told.tokens) == whole.text and told.text_offset == list(range(10))
    ids = tokenizer(f"<|startoftext|>once{whole.text}", split_special_tokens=False).input_ids
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0, -11:-1].log_softmax(-1)
    chosen = torch.tensor(told.token_logprobs)
    torch.testing.assert_close(chosen, wanted.amax(-1), rtol=1e-4, atol=1e-5)
    for top, expected, text in zip(told.top_logprobs, wanted, told.tokens, strict=True):
        assert list(top)[0] == text
        values = torch.tensor(list(top.values()))
        torch.testing.assert_close(values, expected.topk(2).values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ids", [False, True])
def test_probabilities_of_a_prompt(client, folder, ids):
    """It is read in two pieces, and not from a state that is kept."""
    model, tokenizer = load_checkpoint(folder, "cpu")
    text = "once upon a time " * 20
    own = tokenizer(text).input_ids
    with torch.no_grad():
        read = torch.tensor([[tokenizer.bos_token_id, *own]])
        wanted = model(read).logits[0, :-1].log_softmax(-1)
    ask = {"echo": True, "logprobs": 2, "n": 2, **GREEDY}
    for _ in range(2):
        answer = client.complete(own if ids else text, **ask)
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        for choice in answer.choices:
            told = choice.logprobs
            assert choice.text == text + client.complete(text, **GREEDY).choices[0].text
            assert "".join(told.tokens) == choice.text
            assert told.text_offset == list(range(len(own) + 10))
            values = torch.tensor(told.token_logprobs[: len(own)])
            expected = wanted[torch.arange(len(own)), torch.tensor(own)]
            torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-5)
            for top, row in zip(told.top_logprobs, wanted, strict=False):
                likely = torch.tensor(sorted(top.values())[-2:])
                expected = row.topk(2).values.flip(0)
                torch.testing.assert_close(likely, expected, rtol=1e-4, atol=1e-5)


def test_several_answers_read_their_prompt_once(client):
    prompt = "several " * 100
    before = float(metrics(client)["latte_read_tokens_total"])
    answer = client.complete(prompt, n=5, max_tokens=1, seed=3)
    wait_until_idle(client)
    assert float(metrics(client)["latte_read_tokens_total"]) - before < 2 * len(prompt)
    assert answer.usage.completion_tokens == 5 and answer.usage.prompt_tokens == len(prompt)


def test_answers_are_sent_at_once(client):
    """Parts of an answer do not wait for the receipt of the part before, of 40 ms."""
    client.complete("once", **GREEDY)
    for connection in client.server.server_state.connections:
        own = connection.transport.get_extra_info("socket")
        assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(("frequency", "presence"), [(0.5, 0), (0, 0.8), (0.3, -0.2)])
def test_penalties_are_of_what_the_answer_has_had(client, folder, frequency, presence):
    model, tokenizer = load_checkpoint(folder, "cpu")
    ids = tokenizer("<|startoftext|>once", split_special_tokens=False).input_ids
    counts, prompt = torch.zeros(model.config.vocab_size), len(ids)
    for _ in range(40):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        ids.append(int((logits - frequency * counts - presence * (counts > 0)).argmax()))
        counts[ids[-1]] += 1
    wishes = {"frequency_penalty": frequency, "presence_penalty": presence}
    answer = client.complete("once", max_tokens=40, temperature=0, **wishes)
    assert answer.choices[0].text == tokenizer.decode(ids[prompt:], skip_special_tokens=True)


def test_a_model_without_states_is_answered_one_by_one(save_llama, tmp_path):
    save_llama(tmp_path, initializer_range=0.4)
    model, tokenizer = load_checkpoint(tmp_path, "cpu")
    with Client(str(tmp_path)) as client:
        wanted = generate(model, tokenizer, "once", max_new_tokens=10, temperature=0, stream=False)
        for _ in range(2):
            answer = client.complete("once", **GREEDY)
            assert answer.choices[0].text == wanted
            assert answer.usage.prompt_tokens_details.cached_tokens == 0
        parts = client.complete("once", stream=True, **GREEDY)
        assert "".join(part.choices[0].text for part in parts) == wanted
        with pytest.raises(openai.BadRequestError, match="logprobs: not served"):
            client.complete("once", logprobs=1)
        with pytest.raises(openai.BadRequestError, match="best_of: not served"):
            client.complete("once", best_of=2)
        assert metrics(client)["latte_written_tokens_total"] == "30.0"
        stop = wanted[4]
        for choice in client.complete("once", n=2, echo=True, stop=stop, **GREEDY).choices:
            assert choice.text == "once" + wanted[: wanted.index(stop)]
        ask = {"max_tokens": 5, "seed": 3}
        one, two = (choice.text for choice in client.complete("once", n=2, **ask).choices)
        assert one != two and one == client.complete("once", **ask).choices[0].text
        with pytest.raises(openai.APITimeoutError):
            ends = model.generation_config.eos_token_id, tokenizer.eos_token_id
            never = {str(token): -100 for token in ends}
            client.complete("once", max_tokens=10**6, temperature=0, timeout=0.3, logit_bias=never)
        assert client.complete("once", **GREEDY).choices[0].text == wanted


def test_a_request_that_fails_harms_no_other(client, expected, monkeypatch):
    from latte.serve.engine import Engine
    from latte.serve.sampling import Sampler

    choose = Sampler.__call__

    def fails(self, logits):
        if 1.25 in (self._penalties.frequency, self.config.temperature) and self._length > 10:
            raise RuntimeError("broken")
        return choose(self, logits)

    monkeypatch.setattr(Sampler, "__call__", fails)
    wishes = [{}, {"frequency_penalty": 1.25}, {}]

    def ask(own):
        return client.complete("once", max_tokens=30, temperature=0, **own).choices[0].text

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        first, broken, last = [pool.submit(ask, own) for own in wishes]
    assert first.result() == last.result() == expected("once", 30)
    with pytest.raises(openai.InternalServerError, match="broken"):
        broken.result()
    with pytest.raises(openai.APIError, match="broken"):
        list(client.complete("once", stream=True, max_tokens=30, frequency_penalty=1.25))
    stream = {"model": client.name, "input": "once", "temperature": 1.25, "stream": True}
    *_, error, last = client.api.responses.create(**stream)
    assert (error.message, last.type, last.response.status) == (
        "broken",
        "response.failed",
        "failed",
    )
    # The loop goes on whatever fails in it.
    monkeypatch.setattr(Engine, "_keep", lambda self, kept: 1 / 0)
    with pytest.raises(openai.InternalServerError, match="division by zero"):
        ask({})
    monkeypatch.undo()
    assert ask({}) == expected("once", 30)


def test_counters(folder):
    with Client(folder) as client:
        for _ in range(2):
            client.complete("count " * 10, **GREEDY)
        client.post("completions", {"prompt": 5})
        seen = metrics(client)
    requests = 'latte_requests_total{endpoint="/v1/completions",status="%s"}'
    assert (seen[requests % 200], seen[requests % 400]) == ("2.0", "1.0")
    assert seen["latte_written_tokens_total"] == "20.0"
    assert seen["latte_prompt_tokens_total"] == "122.0"
    assert seen["latte_reused_tokens_total"] == "60.0"
    assert seen["latte_read_tokens_total"] == "60.0"
    assert seen["latte_time_to_first_token_seconds_count"] == "2.0"
    assert seen["latte_time_per_token_seconds_count"] == "18.0"
    assert float(seen["latte_state_bytes"]) > 0 and seen["latte_states"] == "1.0"


def test_a_server_that_is_asked_to_end_does_so_in_the_middle_of_a_stream(folder, tmp_path):
    command = [sys.executable, "-m", "latte.cli", "serve", folder, "--port", "0"]
    with (
        open(tmp_path / "errors", "w", encoding="utf-8") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            url = re.search(r"http://\S+", process.stdout.readline())[0]
            api = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
            stream = api.completions.create(
                model=folder, prompt="once", stream=True, max_tokens=10**6, temperature=0
            )
            next(iter(stream))
            process.terminate()
            with pytest.raises(openai.APIError, match="the server ends"):
                list(stream)
            # An answer of so many tokens would last for hours.
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert (tmp_path / "errors").read_text() == ""
