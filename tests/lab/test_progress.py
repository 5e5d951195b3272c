"""A long command says how far it is, on a terminal and elsewhere."""

import threading
import time
from types import SimpleNamespace

import pytest

from latte.lab import progress


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0.001)


def until(condition):
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("waited in vain")


def test_lines_come_while_work_goes_on(often, capsys):
    said = []

    def line_with(text):
        said.extend(capsys.readouterr().err.splitlines())
        return any(text in line for line in said)

    before = threading.active_count()
    with progress.progress(300_000, "token") as state:
        until(lambda: line_with("0 of 300,000 tokens (0%) in 0 s"))
        assert not line_with("left")
        state.describe("base at 4096")
        state.update(120_000)
        until(
            lambda: line_with("base at 4096: 120,000 of 300,000 tokens (40%) in 0 s, about 0 s l")
        )
    assert threading.active_count() == before
    capsys.readouterr()
    time.sleep(0.01)
    assert not capsys.readouterr().err


def test_nothing_is_said_where_nothing_is_asked(often, capsys):
    with progress.progress(10, "token", shown=False) as state:
        state.update(10)
        time.sleep(0.01)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar(often, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with progress.progress(10, "token") as state:
        state.describe("base")
        state.update(10)
    said = capsys.readouterr().err
    assert "base: 100%" in said and "10.0/10.0" in said and "of 10 tokens" not in said


@pytest.mark.parametrize(
    ("seconds", "text"), [(12.3, "12 s"), (60, "1 min"), (3540, "59 min"), (11_100, "3 h 5 min")]
)
def test_times(seconds, text):
    assert progress.minutes(seconds) == text


def test_scoring_says_how_far_it_is(often, capsys):
    """Its forward pass waits until a line was said."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from latte.lab.evaluate.lengths import evaluate_lengths

    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                    num_attention_heads=1)
    )  # fmt: skip
    batch = {
        "input_ids": torch.arange(7)[None],
        "targets": torch.arange(1, 8)[None],
        "target_bytes": torch.ones(1, 7),
    }
    text = SimpleNamespace(num_targets=7, batches=lambda length, rows: iter([batch]))
    said, wanted = [], "base at 8: 0 of 7 tokens (0%) in "

    def wait(*_):  # what is read while a line is written may be a part of it
        until(lambda: said.append(capsys.readouterr().err) or wanted in "".join(said))

    model.register_forward_pre_hook(wait)
    evaluate_lengths(model, text, [8], label="base")
    assert wanted in "".join(said)


def test_a_command_that_speaks_by_itself_gets_no_lines(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS", 0.05)
    with progress.progress(10, "step") as state:
        for _ in range(20):
            time.sleep(0.005)
            state.spoke()
        assert capsys.readouterr().err == ""
        until(lambda: "0 of 10 steps" in capsys.readouterr().err)


def test_of_an_unknown_total_the_time_is_said(often, capsys):
    with progress.progress(0, "layer", label="converting"):
        until(lambda: "converting: at work for 0 s" in capsys.readouterr().err)
    with progress.progress(0, "document", label="reading") as state:
        state.update(3)
        until(lambda: "reading: 3 documents in 0 s" in capsys.readouterr().err)


def test_what_was_done_before_is_not_counted_into_the_speed():
    state = progress.Progress(100, "step")
    state.skip(50)
    state._start -= 60
    assert state.line() == "50 of 100 steps (50%) in 1 min"
    state.update(25)
    assert state.line().endswith("about 1 min left")


def test_training_says_a_line_where_it_logs_seldom(often, capsys, make_recipe):
    from latte.lab.train.run import train

    train(make_recipe(log_steps=100))
    said = capsys.readouterr()
    assert " of 6 steps (" in said.err
    train(make_recipe(name="quiet", log_steps=100), quiet=True)
    assert capsys.readouterr().err == ""
