import copy
import json
import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from latte.errors import LatteError
from latte.lab.data import TokenFile, open_corpus, tokenize_corpus, train_bpe

TEXTS = ["first", "zweiter Text ü", "x", "the last one\n"]


def test_contents(token_file):
    tokens = token_file(TEXTS)
    assert tokens.num_documents == 4 and tokens.tokens.dtype == np.uint16
    assert tokens.num_bytes == sum(len(text.encode()) for text in TEXTS)
    for number, text in enumerate(TEXTS):
        assert tokens.document(number).tolist() == [257, *text.encode(), 256]
        assert tokens.document_bytes[number] == len(text.encode())
    assert len(tokens) == len(tokens.tokens) == tokens.num_bytes + 8
    assert tokens.byte_lengths[tokens.tokens].sum() == tokens.num_bytes
    assert not tokens.tokens.flags.writeable


def test_large_vocabulary_is_uint32(token_file, tokenizer):
    large = copy.deepcopy(tokenizer)
    large.add_tokens([f"<extra-{i}>" for i in range(66_000)])
    tokens = token_file(["a <extra-65999> b"], tokenizer=large)
    assert tokens.tokens.dtype == np.uint32 and int(tokens.tokens.max()) == 259 + 65_999
    assert tokens.byte_lengths[tokens.tokens].sum() == tokens.num_bytes


def test_reused_only_when_it_matches(jsonl, tmp_path, tokenizer, monkeypatch):
    train, other = jsonl(TEXTS, "t.jsonl"), jsonl(["held out"], "v.jsonl")
    cache = tmp_path / "cache"

    def make(tok=tokenizer, split="train", **how):
        return tokenize_corpus(open_corpus(train, validation=other), tok, split, cache,
                               progress=False, **how)  # fmt: skip

    first = make()
    stamp = (first.path / "tokens.bin").stat().st_mtime_ns
    assert make().path == first.path and (first.path / "tokens.bin").stat().st_mtime_ns == stamp
    held_out = make(split="validation")
    bpe = train_bpe(TEXTS * 3, 262, progress=False)
    by_bpe = make(bpe)
    by_mark = make(special_tokens=True)
    jsonl([*TEXTS[:-1], "changed"], "t.jsonl")
    changed = make()
    assert len({first.path, held_out.path, by_bpe.path, by_mark.path, changed.path}) == 5
    assert bytes(changed.document(3)[1:-1].astype(np.uint8)) == b"changed"
    first.check_vocabulary(258)
    with pytest.raises(LatteError, match="go up to 257 .* the model has only 257"):
        first.check_vocabulary(257)


def test_pickled_by_path(token_file):
    tokens = token_file(["long text " * 10_000])
    data = pickle.dumps(tokens)
    assert len(data) < 3000
    assert np.array_equal(pickle.loads(data).tokens, tokens.tokens)


def damage_truncate(path):
    os.truncate(path / "tokens.bin", 10)


def damage_edit(path):
    data = bytearray((path / "tokens.bin").read_bytes())
    data[4] ^= 1
    (path / "tokens.bin").write_bytes(data)


def damage_offsets(path):
    np.save(path / "offsets.npy", np.arange(5))


def damage_missing(path):
    (path / "bytes.npy").unlink()


def damage_index(path):
    (path / "index.json").write_text("{")


def damage_nesting(path):
    (path / "index.json").write_text("[" * 100_000)


def damage_pipe(path):
    (path / "index.json").unlink()
    os.mkfifo(path / "index.json")


def entry(**changed):
    """The damage of other entries; None: one that is not there."""

    def damage(path):
        index = json.loads((path / "index.json").read_text()) | changed
        kept = {name: value for name, value in index.items() if value is not None}
        (path / "index.json").write_text(json.dumps(kept))

    return damage


DAMAGES = [
    (damage_truncate, "truncated or edited token cache: expected 84 bytes, found 10"),
    (damage_edit, "edited token cache: its checksum does not match"),
    (damage_offsets, "edited token cache"),
    (damage_missing, "or an incomplete one: no bytes.npy"),
    (damage_index, "index.json is damaged"),
    (damage_nesting, "index.json is damaged"),
    (damage_pipe, "index.json is a pipe"),
    (entry(files=None), "bad entry 'files'"),
    (entry(files=[1]), "bad entry"),
    (entry(files={"tokens.bin": 3}), "bad entry"),
    (entry(tokens="many"), "bad entry"),
    (entry(tokens=3), "bad entry tokens"),
    (entry(bos=-1), "bad entry bos"),
    (entry(dtype="text"), "bad entry"),
    (entry(vocab_size=None), "bad entry 'vocab_size'"),
    (entry(format=99), "format 99, expected 1"),
]


@pytest.mark.parametrize("damage, message", DAMAGES)
def test_damaged_cache_is_one_line(token_file, damage, message):
    path = token_file(TEXTS).path
    damage(path)
    for attempt in (lambda: TokenFile(path), lambda: token_file(TEXTS)):
        with pytest.raises(LatteError, match=message) as caught:
            attempt()
        assert "\n" not in str(caught.value)


def test_a_digest_is_of_the_tokens_alone(token_file):
    first, other = token_file(TEXTS), token_file([*TEXTS[:-1], "else"])
    assert first.digest != other.digest
    entry(digest=None)(first.path)  # as an earlier version wrote it
    assert TokenFile(first.path).digest == first.digest


def test_no_cache_there(tmp_path):
    with pytest.raises(LatteError, match="not a token cache"):
        TokenFile(tmp_path)


def test_unwritable_cache(jsonl, tmp_path, tokenizer):
    (tmp_path / "file").write_text("")
    corpus = open_corpus(jsonl(), held_out=0.5)
    for cache in (tmp_path / "file", tmp_path / "file" / "below", "/proc/nothing/here"):
        with pytest.raises(LatteError, match="the token cache cannot be written") as caught:
            tokenize_corpus(corpus, tokenizer, "train", cache, progress=False)
        assert "\n" not in str(caught.value)


def test_empty_and_bad_corpora_leave_nothing(jsonl, tmp_path, tokenizer):
    cache = tmp_path / "cache"
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    with pytest.raises(LatteError, match="the train split of the corpus is empty"):
        tokenize_corpus(open_corpus(empty), tokenizer, "train", cache, progress=False)
    bad = jsonl(["fine"])
    bad.write_text(bad.read_text() + "broken\n")
    corpus = open_corpus(bad, validation=empty)
    with pytest.raises(LatteError, match="line 2: malformed JSON"):
        tokenize_corpus(corpus, tokenizer, "train", cache, progress=False)
    assert not [path for path in cache.iterdir() if not path.name.endswith(".lock")]


def test_progress_bar(jsonl, tmp_path, tokenizer, capfd, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    corpus = open_corpus(jsonl(), held_out=0.5)
    tokenize_corpus(corpus, tokenizer, "train", tmp_path / "cache")
    shown = capfd.readouterr().err
    assert "Tokenising train" in shown and "100%" in shown and "tokens" in shown


# A corpus whose documents arrive slowly, so that a process can be caught in the middle of it.
WORKER = """
import sys, time
import latte.lab.data.corpora as corpora, latte.lab.data.tokenfile as tokenfile
from latte.lab.data import byte_tokenizer, open_corpus, tokenize_corpus
tokenfile.BATCH_CHARACTERS = 1
path, cache, pause = sys.argv[1], sys.argv[2], float(sys.argv[3])
plain = corpora.Corpus.documents
def slow(self, split, meter=None):
    for number, text in enumerate(plain(self, split, meter)):
        if number == 20:
            print("begun", flush=True)
        time.sleep(pause)
        yield text
corpora.Corpus.documents = slow
tokens = tokenize_corpus(open_corpus(path, validation=path + ".v.txt"), byte_tokenizer(),
                         "train", cache, progress=False)
print("made", len(tokens), tokens.path.name, tokens.path.stat().st_ino, flush=True)
"""


def start(path, cache, pause):
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(path), str(cache), str(pause)],
        stdout=subprocess.PIPE,
        text=True,
    )


def visible(cache):
    return [path for path in cache.iterdir() if not path.name.startswith(".")]


def test_killed_in_the_middle_and_two_at_once(jsonl, tmp_path):
    path, cache = jsonl([f"document {i}" for i in range(50)]), tmp_path / "cache"
    (tmp_path / "corpus.jsonl.v.txt").write_text("held out")
    killed = start(path, cache, 0.05)
    assert killed.stdout.readline() == "begun\n"
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert visible(cache) == []
    assert len(list(cache.glob(".*.tmp-*"))) == 1  # what it left; nobody takes it for a cache

    began = time.monotonic()
    both = [start(path, cache, 0.02) for _ in range(2)]
    lines = [process.communicate(timeout=60)[0].splitlines() for process in both]
    assert time.monotonic() - began < 60
    assert [process.returncode for process in both] == [0, 0]
    # One wrote, the other waited for it and read the very same folder.
    assert sum("begun" in line for line in lines) == 1
    assert lines[0][-1] == lines[1][-1] and lines[0][-1].startswith("made ")
    assert len(visible(cache)) == 1 and not list(cache.glob(".*.tmp-*"))
    tokens = TokenFile(visible(cache)[0])
    assert bytes(tokens.document(49)[1:-1].astype(np.uint8)) == b"document 49"
