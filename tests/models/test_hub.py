"""Without a network a name on the Hub is one line, at once."""

import time

import pytest

from latte.errors import LatteError
from latte.models import hub

DISK_ALONE = {"trust_remote_code": False, "local_files_only": True}


@pytest.fixture
def away(monkeypatch):
    """The client would retry for half a minute."""
    import huggingface_hub

    def fail(*args, **options):
        raise OSError("no network")

    session = type("Session", (), {"head": fail, "request": fail, "get": fail})()
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: session)
    hub.hub_answers.cache_clear()
    yield
    hub.hub_answers.cache_clear()


def test_names_are_looked_up_on_the_disk_alone(away, tmp_path):
    from latte.conversion import convert
    from latte.lab.data.tokenizers import load_tokenizer

    began = time.perf_counter()
    assert hub.hub_options("nope") == DISK_ALONE
    with pytest.raises(LatteError, match="no folder or file nope here, and the .* Hub cannot be"):
        convert("nope", tmp_path / "out")
    with pytest.raises(LatteError, match="no folder or file nope here, and the .* Hub cannot be"):
        load_tokenizer("nope")
    assert not (tmp_path / "out").exists()
    assert time.perf_counter() - began < 20  # the client's retries take longer


def test_a_look_up_that_hangs_is_given_up(monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(hub, "SECONDS", 0.05)
    session = type("Session", (), {"head": lambda *a, **k: time.sleep(30)})()
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: session)
    hub.hub_answers.cache_clear()
    assert not hub.hub_answers()
    hub.hub_answers.cache_clear()


def test_what_is_on_the_disk_asks_nobody(monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "hub_answers", lambda: pytest.fail("asked"))
    assert hub.hub_options(tmp_path) == DISK_ALONE
    assert hub.unreachable(tmp_path) == ""
