"""A document is read once, its state is a file, and answers are those of reading it anew."""

import contextlib
import io
import sys

import pytest
import torch

from latte.cli import main
from latte.conversion import convert
from latte.errors import LatteError
from latte.lab.evaluate.chat import Chat
from latte.lab.evaluate.checkpoint import load_checkpoint
from latte.lab.evaluate.documents import read_document
from tests.lab.evaluate.test_chat import COUNTS, STRIPS, TEMPLATE, reads, tokenizer

TEXT = " ".join(f"Box {i} holds {i * i} beans." for i in range(20))
GREEDY = ("--temperature", "0", "--max-new-tokens", "4")


@pytest.fixture(scope="module")
def folders(make_model, save_llama, tmp_path_factory):
    """Folders of one model of each kind: Latte's own, with and without template, and a base."""
    folder = tmp_path_factory.mktemp("models")
    own = make_model("latte-r-swa++", sliding_window=8)
    for name, template in (("own", TEMPLATE), ("plain", None)):
        own.save_pretrained(folder / name)
        tokenizer(template).save_pretrained(folder / name)
    save_llama(folder / "base", 10.0)
    convert(folder / "base", folder / "converted", window=8, num_latents=8)
    for name in ("base", "converted"):
        tokenizer().save_pretrained(folder / name)
    return folder


@pytest.fixture
def notes(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text(TEXT)
    return file


def states(folder):
    return sorted(folder.glob("notes.txt.*.safetensors"))


def chat(folder, file, lines, *more, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    return main(["chat", str(folder), "--read", str(file), *GREEDY, *more])


@pytest.mark.parametrize("kind", ["own", "converted"])
def test_the_second_call_reads_the_question_alone(folders, notes, kind, capsys, monkeypatch):
    """And its answers are those of the first, and of a chat that reads all."""
    said = []
    for call in range(2):
        assert chat(folders / kind, notes, ["who?", "/clear", "who?"], monkeypatch=monkeypatch) == 0
        out, err = capsys.readouterr()
        said.append(out)
        assert err.count("\n") == 1 and str(states(notes.parent)[0]) in err
        assert ("tokens/s" in err, "read before" in err) == (call == 0, call == 1)
    assert len(states(notes.parent)) == 1
    assert said[0] == said[1] and said[0][: len(said[0]) // 2] * 2 == said[0]
    model, tokens = load_checkpoint(folders / kind)
    anew = Chat(model, tokens, document=TEXT, temperature=0, max_new_tokens=4).say("who?")
    assert said[0].startswith(anew)
    again = read_document(model, tokens, TEXT, notes)
    with reads(model) as lengths:
        talk = Chat(model, tokens, document=again, temperature=0, max_new_tokens=4)
        assert talk.say("who?") == anew
        assert sum(lengths) < 40 < len(again.ids)
        first = list(talk.tokens)
        talk.say("more?")  # the conversation goes on
        assert talk.tokens[: len(first) - 1] == first[:-1]
    talk.clear()
    assert talk.say("who?") == anew


@pytest.mark.parametrize("kind", ["own", "converted", "base"])
def test_apart_each_message_begins_at_the_document(folders, notes, kind, capsys, monkeypatch):
    answers = []
    for lines, more in ((["a", "b"], ["--apart"]), (["a"], []), (["b"], [])):
        assert chat(folders / kind, notes, lines, *more, monkeypatch=monkeypatch) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] + answers[2]


@pytest.mark.parametrize("kind", ["own", "converted", "base"])
def test_generate_answers_with_a_template(folders, notes, kind, capsys, monkeypatch):
    assert chat(folders / kind, notes, ["who?"], monkeypatch=monkeypatch) == 0
    wanted = capsys.readouterr().out.strip("\n")
    options = ["--read", str(notes), "--prompt", "who?", *GREEDY]
    assert main(["generate", str(folders / kind), *options]) == 0
    out, err = capsys.readouterr()
    assert out == f"{wanted}\n" and ("read before" in err) == (kind != "base")


def test_generate_continues_without_a_template(folders, notes, capsys):
    prompt = ["--prompt", " Box 3", *GREEDY]
    assert main(["generate", str(folders / "plain"), "--file", str(notes), *prompt]) == 0
    wanted = capsys.readouterr().out
    for _ in range(2):
        assert main(["generate", str(folders / "plain"), "--read", str(notes), *prompt]) == 0
        assert capsys.readouterr().out == wanted
    assert len(states(notes.parent)) == 1
    model, tokens = load_checkpoint(folders / "plain")
    assert read_document(model, tokens, TEXT, notes).ids[0] == tokens.bos_token_id


def test_a_base_keeps_its_cache_in_memory_and_says_so(folders, notes, capsys):
    model, tokens = load_checkpoint(folders / "base")
    read = read_document(model, tokens, TEXT, notes)
    assert "no file is written" in capsys.readouterr().err and not states(notes.parent)
    talk = Chat(model, tokens, document=read, temperature=0, max_new_tokens=6)
    anew = Chat(model, tokens, document=TEXT, temperature=0, max_new_tokens=6)
    for question in ("one", "two"):
        with reads(model) as lengths:
            assert talk.say(question) == anew.say(question)
        assert len(read.ids) < sum(lengths) < 2 * len(read.ids) or question == "two"
    talk.clear()
    assert talk.say("one") == Chat(
        model, tokens, document=TEXT, temperature=0, max_new_tokens=6
    ).say("one")
    assert read.read_cache.get_seq_length() == len(read.ids)


def test_each_document_template_and_model_has_a_file(folders, notes, capsys):
    model, tokens = load_checkpoint(folders / "own")
    other, _ = load_checkpoint(folders / "converted")
    for text, shape, reader in (
        (TEXT, {}, model),
        (TEXT + "!", {}, model),
        (TEXT, {"system": "be brief"}, model),
        (TEXT, {}, other),
    ):
        before = len(states(notes.parent))
        read_document(reader, tokens, text, notes, **shape)
        read_document(reader, tokens, text, notes, **shape)
        assert len(states(notes.parent)) == before + 1
        first, second = capsys.readouterr().err.splitlines()
        assert "is kept in" in first and "read before" in second


@pytest.mark.parametrize("damage", ["cut", "other weights", "other text", "no file"])
def test_a_state_of_no_use_is_set_aside(folders, notes, damage, capsys):
    model, tokens = load_checkpoint(folders / "own")
    first = read_document(model, tokens, TEXT, notes)
    place = first.file
    content = place.read_bytes()
    if damage == "cut":
        content = content[:-9]
        place.write_bytes(content)
    elif damage == "other weights":
        other, _ = load_checkpoint(folders / "converted")
        content = read_document(other, tokens, TEXT, notes).file.read_bytes()
        place.write_bytes(content)
    elif damage == "other text":
        content = read_document(model, tokens, TEXT[::-1], notes).file.read_bytes()
        place.write_bytes(content)
    else:
        place.unlink()
        place.mkdir()
    capsys.readouterr()
    again = read_document(model, tokens, TEXT, notes)
    reason, done = capsys.readouterr().err.splitlines()
    assert str(place) in reason and "set aside as" in reason and "is kept in" in done
    (aside,) = notes.parent.glob("*.unused")
    assert aside.is_dir() if damage == "no file" else aside.read_bytes() == content
    assert again.file == place and place.is_file() and again.ids == first.ids
    with contextlib.suppress(OSError):
        aside.rmdir()


def test_a_state_that_cannot_be_written_costs_no_answer(folders, notes, capsys, monkeypatch):
    from latte.lab.evaluate import documents

    model, tokens = load_checkpoint(folders / "own")

    def full(*_):
        raise LatteError("state s cannot be written: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(documents, "save_state", full)
        read = read_document(model, tokens, TEXT, notes)
    line = capsys.readouterr().err
    assert read.file is None and line.count("\n") == 1
    assert "not kept: state s cannot be written: No space" in line and "--state-dir" in line
    with monkeypatch.context() as patch:  # a folder without the right to write, also for root
        patch.setattr("os.access", lambda *_: False)
        read = read_document(model, tokens, TEXT, notes)
    line = capsys.readouterr().err
    assert read.file is None and line.count("\n") == 1 and "not a writable folder" in line
    there = notes.parent / "states" / "of mine"
    assert read_document(model, tokens, TEXT, notes, states=there).file.parent == there
    assert not states(notes.parent) and len(states(there)) == 1
    (notes.parent / "file").write_text("")
    with pytest.raises(LatteError, match="output folder .* cannot be written"):
        read_document(model, tokens, TEXT, notes, states=notes.parent / "file")


def test_beyond_the_range(save_llama, make_model, notes, tmp_path, capsys):
    from transformers import GPT2Config, GPT2LMHeadModel

    save_llama(tmp_path / "short", max_position_embeddings=64)
    model, tokens = load_checkpoint(tmp_path / "short")
    tokens.chat_template = TEMPLATE
    read_document(model, tokens, TEXT, notes)
    warned, _ = capsys.readouterr().err.splitlines()
    assert "more than the 64" in warned and "expect worse answers" in warned
    torch.manual_seed(0)
    learned = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, n_positions=64)).eval()
    with pytest.raises(LatteError, match="expected at most 64 tokens, since this model has no mor"):
        read_document(learned, tokens, TEXT, notes)
    capsys.readouterr()
    own = make_model("latte-r-swa++", sliding_window=8, max_position_embeddings=64)
    read_document(own, tokens, TEXT, notes)
    assert capsys.readouterr().err.count("\n") == 1  # a state of constant size has no range


def test_templates(folders, notes):
    model, _ = load_checkpoint(folders / "own")
    read = read_document(model, tokenizer(STRIPS), f"\n {TEXT}", notes)
    assert read.text == f"[user]{TEXT}\n\n"
    with pytest.raises(LatteError, match="keeps messages as they are"):
        read_document(model, tokenizer("{{ messages | length }}"), TEXT, notes)
    read = read_document(model, tokenizer(COUNTS), TEXT, notes)
    talk = Chat(model, tokenizer(COUNTS), document=read, temperature=0, max_new_tokens=2)
    talk.say("a")
    with pytest.raises(LatteError, match="keeps earlier messages as they are"):
        talk.say("b")


def test_a_model_that_keeps_nothing_is_one_line(folders, notes, monkeypatch):
    model, tokens = load_checkpoint(folders / "base")
    monkeypatch.setattr(model, "_supports_default_dynamic_cache", lambda: False)
    with pytest.raises(LatteError, match="a model that keeps what it has read"):
        read_document(model, tokens, TEXT, notes)
