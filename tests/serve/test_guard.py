"""Clients that ask for too much, too slowly or from elsewhere: the others get their answers."""

import json
import socket
import threading
import urllib.error
import urllib.request

import pytest

pytest.importorskip("openai")
pytest.importorskip("transformers.cli.serving.systemone", reason="a server of Transformers 5.23")

from latte.cli import main
from latte.errors import LatteError
from latte.serve import server
from latte.serve.guard import allowed_hosts
from latte.serve.prompts import Prompts, Splits
from tests.serve.test_server import GOOD, Client, save

BODY, MESSAGES, CHARACTERS = 20_000, 20, 5_000
HOSTS = ["localhost", "[::1]", "*.example.com"]
LONG_WAIT = 60  # seconds, after which a test fails


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("guarded"))


@pytest.fixture(scope="module")
def client(folder):
    limits = {"body": BODY, "messages": MESSAGES, "characters": CHARACTERS, "patience": 0.3}
    with Client(folder, hosts=HOSTS, **limits) as client:
        yield client


def connected(client):
    return socket.create_connection(("localhost", client.api.base_url.port), LONG_WAIT)


def answer_to(client, content):
    """The status and the JSON of an answer to these bytes."""
    with connected(client) as connection:
        connection.sendall(content)
        head, _, body = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def is_healthy(client, timeout=LONG_WAIT):
    url = str(client.api.base_url).replace("/v1/", "/health")
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        return answer.status == 200


def refused(status, answer, said, expected=400):
    error = answer["error"]
    assert (status, error["type"]) == (expected, "invalid_request_error")
    assert said in error["message"] and "\n" not in error["message"]


def messages(count, content="a"):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i in range(count)]


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        ("chat/completions", {"messages": messages(21)}, "at most 20 messages, got 21"),
        ("responses", {"input": messages(21)}, "input: expected at most 20 messages, got 21"),
        ("completions", {"prompt": "a" * 5000}, "at most 5000 characters in a request, got 50"),
        ("chat/completions", {"messages": messages(2, "a" * 2500)}, "at most 5000 characters"),
        ("chat/completions", {"tools": [{"a": "b" * 5000}]}, "at most 5000 characters"),
        ("responses", {"input": "a" * 5000}, "at most 5000 characters"),
    ],
)
def test_too_many_messages_or_characters_are_refused(client, path, fields, said):
    refused(*client.post(path, {**GOOD[path], **fields}), said)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [BODY + 1, 10 * BODY, 100 * BODY])
def test_a_body_that_is_too_large_is_refused(client, size, chunked):
    """Also if the client closes its connection after the answer, and reads it after it has sent."""
    body = json.dumps(GOOD["completions"]).encode().ljust(size)
    about = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % size
    content = b"%x\r\n%b\r\n0\r\n\r\n" % (size, body) if chunked else body
    head = POST + b"content-type: application/json\r\nconnection: close\r\n" + about
    try:
        found = answer_to(client, head + b"\r\n\r\n" + content)
    except ConnectionError:
        assert size == 100 * BODY  # no server reads all of what it does not want
    else:
        refused(*found, f"expected a body of at most {BODY} bytes, got more", 413)
    assert is_healthy(client)


def test_a_body_of_the_largest_size_is_read(client):
    body = json.dumps({**GOOD["completions"], "max_tokens": 1}).encode().ljust(BODY)
    assert client.post("completions", body)[0] == 200


@pytest.mark.parametrize(
    ("host", "answered"),
    [
        ("localhost", True),
        ("localhost:8000", True),
        ("LOCALHOST", True),
        ("[::1]:8000", True),
        ("api.example.com", True),
        ("example.com", False),
        ("evil.com", False),
        ("evil.com:8000", False),
        ("localhost.evil.com", False),
        ("evil.com/@localhost", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_requests_for_another_host_are_refused(client, path, host, answered):
    content = f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
    status, answer = answer_to(client, content.encode())
    if answered:
        assert status == 200
    else:
        refused(status, answer, f"host: expected {' or '.join(HOSTS)}, got {host!r}")


def test_a_server_of_this_machine_has_its_names():
    own = ["localhost", "127.0.0.1", "[::1]"]
    for host in ("localhost", "127.0.0.1", "127.0.0.2"):
        assert allowed_hosts(host, ["a.com"]) == [*own, host, "a.com"]
    assert allowed_hosts("::1") == [*own, "[::1]"]
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.com"):
        assert allowed_hosts(host) is None
        assert allowed_hosts(host, ["a.com"]) == ["a.com"]
    for name in ("a.com:80", "*a.com", "a*", "", "http://a.com", "::1"):
        with pytest.raises(LatteError, match="allowed-hosts: expected names without a port"):
            allowed_hosts("localhost", [name])


def test_the_command_answers_its_own_names(folder, monkeypatch):
    made = []

    class Made(Exception):
        pass

    def make(name, model, tokenizer, serving):
        made.append(serving)
        raise Made

    monkeypatch.setattr(server, "make_server", make)
    options = ["--max-body", "1MiB", "--max-messages", "7", "--max-characters", "9"]
    options += ["--client-timeout", "2.5", "--allowed-hosts", "a.com,*.b.com"]
    with pytest.raises(Made):
        main(["serve", folder, "--port", "0", *options])
    (serving,) = made
    assert serving.hosts == ["localhost", "127.0.0.1", "[::1]", "localhost", "a.com", "*.b.com"]
    limits = (serving.body, serving.messages, serving.characters, serving.patience)
    assert limits == (2**20, 7, 9, 2.5)


def test_a_page_of_another_site_can_send_no_request(client):
    """Without asking first, a browser sends a body as plain text alone."""
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        url = f"{client.api.base_url}completions"
        body = json.dumps(GOOD["completions"]).encode()
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(urllib.request.Request(url, body, {"content-type": kind}))
        assert error.value.code == 400
    url = f"{client.api.base_url}models"
    asked = urllib.request.Request(url, None, {"origin": "http://evil.com"})
    with urllib.request.urlopen(asked) as answer:
        assert "access-control-allow-origin" not in answer.headers


# ---- clients that are slow


POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
HALVES = {
    "nothing": b"",
    "line": POST[:12],
    "header": POST + b"content-",
    "body": POST + b"content-length: 100\r\n\r\n{",
    "chunk": POST + b"transfer-encoding: chunked\r\n\r\n5\r\n{",
    "second request": b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" + POST[:12],
}


@pytest.mark.parametrize("content", HALVES.values(), ids=HALVES.keys())
def test_half_a_request_is_dropped(client, content):
    with connected(client) as connection:
        connection.sendall(content)
        try:
            while connection.recv(65536):
                pass
        except ConnectionError:
            pass  # an ended connection, as an end of the file is


def test_a_client_that_reads_nothing_is_dropped(client):
    ask = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n" * 50
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(LONG_WAIT)
        connection.connect(("127.0.0.1", client.api.base_url.port))
        with pytest.raises(ConnectionError):
            while True:
                connection.sendall(ask)


def test_a_long_answer_to_a_client_that_only_reads_is_no_silence(client):
    """It lasts many times as long as a client may be silent."""
    parts = client.complete("once", max_tokens=800, stream=True, temperature=0)
    assert sum(1 for _ in parts) > 500


# ---- long requests


@pytest.mark.parametrize("path", GOOD)
def test_others_are_answered_while_a_prompt_is_split(client, monkeypatch, path):
    splits, go_on = threading.Event(), threading.Event()
    encoding = Splits._encoding

    def slow(self, text):
        if "a long text" in text:
            splits.set()
            assert go_on.wait(LONG_WAIT)
        return encoding(self, text)

    monkeypatch.setattr(Splits, "_encoding", slow)
    ids = Prompts.ids

    def slow_ids(self, text):
        if text == "a long text":
            splits.set()
            assert go_on.wait(LONG_WAIT)
        return ids(self, text)

    monkeypatch.setattr(Prompts, "ids", slow_ids)
    long = json.loads(json.dumps(GOOD[path]).replace("once", "hi").replace("hi", "a long text"))
    found = []
    asked = threading.Thread(target=lambda: found.append(client.post(path, long)[0]))
    asked.start()
    try:
        assert splits.wait(LONG_WAIT)
        assert is_healthy(client)
        assert client.complete("once", max_tokens=3, seed=0).usage.completion_tokens == 3
        assert client.chat("hi", max_tokens=3, seed=0).usage.completion_tokens == 3
        assert not found
    finally:
        go_on.set()
        asked.join(LONG_WAIT)
    assert found == [200]
