"""States that are kept: found by their tokens alone, bounded, and the same to the bit."""

import json
import multiprocessing
import signal
import struct
import threading
import time

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from latte.errors import LatteError
from latte.models import LatteForCausalLM, load_state, preset_config
from latte.models.state_file import read_state
from latte.serve import state_folder
from latte.serve.counters import Counters
from latte.serve.engine import Ahead, Engine, Request
from latte.serve.prefix_cache import StateStore
from latte.serve.reading import Reader
from latte.serve.requests import BadRequest
from latte.serve.state_folder import StateFolder
from tests.conversion.bases import converted
from tests.serve.test_laws import read

PIECE = 16


def build(preset="latte-r-swa++", seed=0):
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_latents": 8}
    shape |= {"initializer_range": 0.4, "sliding_window": 8}
    fields = preset_config(preset, "tiny").to_dict()
    shape = {name: value for name, value in shape.items() if fields.get(name) is not None}
    return LatteForCausalLM(preset_config(preset, "tiny", **shape)).eval()


def text(length, seed=0):
    return np.random.default_rng(seed).integers(0, 256, length).astype(np.int32)


@torch.no_grad()
def logits(model, cache, token=7):
    return model(torch.tensor([[token]]), past_key_values=cache).logits


def continued(model, cache, tokens=20):
    """Greedy."""
    said = [int(logits(model, cache)[0, -1].argmax())]
    while len(said) < tokens:
        said.append(int(logits(model, cache, said[-1])[0, -1].argmax()))
    return said


# ---- names


def test_the_tokens_of_a_state_are_compared_one_by_one():
    model, store = build(), StateStore(10**7)
    cache = read(Reader(model, PIECE), text(20)).cache
    store.put(b"one name", cache, text(20))
    assert store.get(b"one name", text(20)) is not None
    other = text(20)
    other[-1] += 1
    assert store.get(b"one name", other) is None
    assert store.get(b"one name", text(19)) is None


# ---- reading


def test_what_goes_on_from_a_kept_state_is_the_same_to_the_bit():
    model, store = build(), StateStore(10**7)
    first, marks = text(70), (21, 22, 40)
    then = np.concatenate([first, text(25, 1)])
    with_store, without = Reader(model, PIECE, store), Reader(model, PIECE)
    assert read(with_store, first, marks).reused == 0
    again = read(with_store, then, (*marks, 70))
    anew = read(without, then, (*marks, 70))
    assert (again.reused, anew.reused) == (70, 0)
    assert torch.equal(logits(model, again.cache), logits(model, anew.cache))
    assert continued(model, again.cache) == continued(model, anew.cache)
    # From an earlier branch, and from the last common piece of a text that marks nothing.
    branch = np.concatenate([first[:40], text(9, 2)])
    assert read(with_store, branch, marks).reused == 40
    assert read(with_store, first[:40]).reused == 0
    assert read(with_store, np.concatenate([first[:38], text(9, 3)])).reused == 32


def test_two_clients_whose_texts_differ_in_one_token_share_what_is_the_same_alone():
    model, store = build(), StateStore(10**7)
    reader = Reader(model, PIECE, store)
    one, two = text(60), text(60)
    two[35] += 1
    read(reader, one, (34, 50))
    reading = read(reader, two, (34, 50))
    assert reading.reused == 34
    anew = read(Reader(model, PIECE), two, (34, 50))
    assert torch.equal(logits(model, reading.cache), logits(model, anew.cache))
    assert not torch.equal(
        logits(model, read(reader, one, (34, 50)).cache), logits(model, anew.cache)
    )


def test_states_are_copies():
    model, store = build(), StateStore(10**7)
    reader = Reader(model, PIECE, store)
    wanted = logits(model, read(Reader(model, PIECE), text(40)).cache)
    used = read(reader, text(40)).cache  # the client's own, after it was kept
    for _ in range(2):
        continued(model, used)
        for layer in used.layers:
            for x in (layer.log_mass, layer.mean, layer.keys, layer.rglru):
                x.fill_(torch.nan)
            for part in (layer.held[0], *layer.held[1:]):
                for x in part if isinstance(part, tuple) else [part]:
                    if isinstance(x, torch.Tensor) and x.is_floating_point():
                        x.fill_(torch.nan)
        used = read(reader, text(40)).cache
        assert torch.equal(logits(model, used), wanted)


def test_the_store_is_bounded_and_the_least_recently_used_leaves():
    model = build()
    one = StateStore(10**7)
    read(Reader(model, PIECE, one), text(16))
    assert len(one) == 1
    held = sum(x.numel() * x.element_size() for kept in one._kept.values() for x in leaves(kept))
    assert one.nbytes == held + 16 * 4
    store = StateStore(3 * one.nbytes)
    reader = Reader(model, PIECE, store)
    for seed in (0, 1, 2, 0, 3):
        read(reader, text(16, seed))
    assert len(store) == 3 and store.nbytes <= store.room
    assert [reader.begin(text(16, seed)).reused for seed in (0, 1, 2, 3)] == [16, 0, 16, 16]
    small = StateStore(one.nbytes - 1)
    read(Reader(model, PIECE, small), text(16))
    assert (len(small), small.nbytes, small.too_large) == (0, 0, 1)


def leaves(kept):
    from latte.models.cache import tensors_in

    return tensors_in(kept.states)


def test_a_state_that_grows_is_counted_as_large_as_it_is():
    model, store = build("transformer++"), StateStore(10**8)
    reader = Reader(model, PIECE, store)
    sizes = []
    for length in (160, 320):
        read(reader, text(length, length), (length,))
        sizes.append(list(store._kept.values())[-1].nbytes)
    assert 1.9 < sizes[1] / sizes[0] < 2.1
    assert len(store) == 2  # none every few pieces: each would hold all tokens before


def on_disk(path, model, room=10**8):
    """A reader whose states are also kept as files, and their folder."""
    folder = StateFolder(path, model, room)
    return Reader(model, PIECE, StateStore(10**7, folder)), folder


class Broken(RuntimeError):
    """A forward that ends in the middle, after the first layer has read."""


def fails(*given):
    raise Broken


def request(ids, ends):
    """Of one token. The next turn sends 40 tokens."""
    own = {"sampler": None, "put": lambda token, score: True}
    return Request(text(ids), **own, end=ends.append, follow=lambda written: (text(40), ()))


def test_an_answer_that_could_not_be_read_leaves_no_state(monkeypatch):
    model = build()
    reader = Reader(model, PIECE, StateStore(10**7))
    ahead, ours = Ahead(reader), request(10, [])
    ahead.add(ours)
    assert ahead.read() == PIECE
    with monkeypatch.context() as broken, pytest.raises(Broken):
        broken.setattr(model.get_decoder().layers[-1], "forward", fails)
        ahead.read()
    assert not ahead
    ahead.add(ours)
    while ahead:
        ahead.read()
    kept = read(reader, text(40))
    assert kept.reused == 40
    anew = read(Reader(model, PIECE), text(40))
    assert torch.equal(logits(model, kept.cache), logits(model, anew.cache))


def test_a_request_that_comes_after_the_end_is_told_so():
    ends = []
    engine = Engine(Reader(build(), PIECE), slots=1, counters=Counters())
    engine.close()
    engine.submit(request(20, ends))
    assert [str(error) for error in ends] == ["the server ends"]


class Greedy:
    """A sampler."""

    is_greedy = True

    def __call__(self, logits):
        return int(logits[0].argmax())

    def took(self, token):
        pass


class Asked:
    """A request to a loop of its own thread, greedy, of so many tokens."""

    def __init__(self, engine, ids, tokens=3, **options):
        self.said, self.errors, self.ended, self.began = (
            [],
            [],
            threading.Event(),
            threading.Event(),
        )

        def put(token, score):
            self.said.append(token)
            self.began.set()
            return len(self.said) >= tokens

        def end(error):
            self.errors.append(error)
            self.ended.set()

        engine.submit(Request(ids, sampler=Greedy(), put=put, end=end, **options))

    def answer(self):
        assert self.ended.wait(60)
        (error,) = self.errors
        if error is not None:
            raise error
        return self.said


@pytest.fixture
def engine():
    engine = Engine(Reader(build(), PIECE, StateStore(10**7)), slots=4, counters=Counters())
    yield engine
    engine.close()


def alone(model, ids, tokens):
    cache = read(Reader(model, PIECE), ids[:-1]).cache
    said = [int(logits(model, cache, int(ids[-1]))[0, -1].argmax())]
    while len(said) < tokens:
        said.append(int(logits(model, cache, said[-1])[0, -1].argmax()))
    return said


LONG = 300  # tokens of an answer that is running while another request fails


def test_a_token_that_the_model_does_not_have_ends_no_other(engine):
    running = Asked(engine, text(20), LONG)
    assert running.began.wait(60)
    for token in (260, -1):
        with pytest.raises(BadRequest, match="prompt: expected token ids below 260"):
            Asked(engine, np.append(text(20), token).astype(np.int32))
    assert running.answer() == alone(engine.reader.model, text(20), LONG)


def test_a_chat_that_is_split_for_its_next_turn_delays_no_other(engine):
    begun, go_on = threading.Event(), threading.Event()

    def follow(written):
        begun.set()
        assert go_on.wait(60)
        return text(40), ()

    Asked(engine, text(20), follow=follow).answer()
    assert begun.wait(60)
    model = engine.reader.model
    assert Asked(engine, text(20, seed=1)).answer() == alone(model, text(20, seed=1), 3)
    go_on.set()
    deadline = time.monotonic() + 60
    while engine.reader.begin(text(40)).reused < 40 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.reader.begin(text(40)).reused == 40


@pytest.mark.parametrize("harm", ["shape", "values"])
def test_a_damaged_file_of_one_prompt_ends_no_other_answer(tmp_path, harm):
    model = build()
    reader, folder = on_disk(tmp_path, model)
    read(reader, text(19))
    folder.close()
    for file in tmp_path.rglob("*.safetensors"):
        {"shape": of_another_shape, "values": flipped("layers.0.latent.mean")}[harm](file)
    folder = StateFolder(tmp_path, model, 10**8)
    engine = Engine(Reader(model, PIECE, StateStore(10**7, folder)), 4, Counters())
    try:
        running = Asked(engine, text(20, seed=1), LONG)
        assert running.began.wait(60)
        for _ in range(2):
            assert Asked(engine, text(20)).answer() == alone(model, text(20), 3)
        assert running.answer() == alone(model, text(20, seed=1), LONG)
    finally:
        engine.close()
        folder.close()


@pytest.mark.parametrize(("scaling", "slots"), [("longrope", 1), ("dynamic", 1), ("yarn", 4)])
def test_rows_share_no_step_whose_frequencies_the_longest_one_chooses(scaling, slots):
    engine = Engine(Reader(converted("llama", scaling), PIECE), slots=4, counters=Counters())
    engine.close()
    assert engine.slots == slots


# ---- on disk


def test_states_survive_a_restart(tmp_path):
    model = build()
    reader, folder = on_disk(tmp_path, model)
    read(reader, text(40), (20,))
    folder.close()
    files = sorted(tmp_path.rglob("*.safetensors"))
    assert len(files) == len(folder) == 2
    assert folder.nbytes == sum(file.stat().st_size for file in files)
    assert sorted(load_state(file, model).get_seq_length() for file in files) == [20, 40]
    assert sorted(len(read_state(file, model)[1]) for file in files) == [20, 40]

    reader, again = on_disk(tmp_path, model)
    reading = read(reader, text(40), (20,))
    assert reading.reused == 40
    anew = read(Reader(model, PIECE), text(40), (20,))
    assert torch.equal(logits(model, reading.cache), logits(model, anew.cache))
    other = build(seed=1)
    elsewhere = StateFolder(tmp_path, other, 10**8)
    assert read(Reader(other, PIECE, StateStore(10**7, elsewhere)), text(40), (20,)).reused == 0


def truncated(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flipped(name):
    """Harm: one bit of a tensor."""

    def harm(file):
        whole = bytearray(file.read_bytes())
        (length,) = struct.unpack("<Q", whole[:8])
        begin, _ = json.loads(whole[8 : 8 + length])[name]["data_offsets"]
        whole[8 + length + begin + 3] ^= 4
        file.write_bytes(whole)

    return harm


def of_another_shape(file):
    """Harm: a file of the first format, without a checksum, whose rows cannot join others."""
    with safe_open(file, framework="pt") as opened:
        about, held = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}
    del about["sha256"]
    held["layers.0.window.keys"] = torch.cat([held["layers.0.window.keys"]] * 2, -1)
    save_file(held, file, about | {"format": "latte state 1"})


@pytest.mark.parametrize(
    "harm",
    [truncated, flipped("ids"), flipped("layers.0.latent.mean"), of_another_shape],
    ids=["truncated", "tokens", "values", "shape"],
)
def test_a_damaged_file_is_set_aside_and_its_text_read_anew(tmp_path, harm):
    model = build()
    reader, folder = on_disk(tmp_path, model)
    read(reader, text(40), (20,))
    folder.close()
    files = sorted(tmp_path.rglob("*.safetensors"))
    for file in files:
        harm(file)
    left = files[0].with_suffix(".safetensors.tmp-999999999")
    left.write_bytes(b"half")
    again = StateFolder(tmp_path, model, 10**8)
    assert not left.exists()
    wanted = logits(model, read(Reader(model, PIECE), text(40), (20,)).cache)
    reading = read(Reader(model, PIECE, StateStore(10**7, again)), text(40), (20,))
    assert reading.reused == 0
    assert torch.equal(logits(model, reading.cache), wanted)
    again.close()
    # The new states are in the place of the damaged ones, which are still there.
    assert sorted(tmp_path.rglob("*.safetensors")) == files
    aside = sorted(tmp_path.rglob("*.damaged"))
    assert [file.stem for file in aside] == [file.stem for file in files]
    assert again.nbytes == sum(file.stat().st_size for file in (*files, *aside))
    reading = read(Reader(model, PIECE, StateStore(10**7, again)), text(40), (20,))
    assert reading.reused == 40
    assert torch.equal(logits(model, reading.cache), wanted)


def test_the_folder_is_bounded(tmp_path):
    model = build()
    reader, one = on_disk(tmp_path / "one", model)
    read(reader, text(16))
    one.close()
    reader, folder = on_disk(tmp_path / "some", model, int(3.5 * one.nbytes))
    for seed in range(6):
        read(reader, text(16, seed))
    folder.close()
    assert len(list((tmp_path / "some").rglob("*.safetensors"))) == len(folder) == 3
    again = StateFolder(tmp_path / "some", model, int(2.5 * one.nbytes))
    assert len(again) == 2
    reader = Reader(model, PIECE, StateStore(10**7, again))
    assert [reader.begin(text(16, seed)).reused for seed in (0, 3, 4, 5)] == [0, 0, 16, 16]


def test_a_state_that_cannot_be_written_stops_no_other(tmp_path, monkeypatch):
    model = build()
    reader, folder = on_disk(tmp_path, model)
    failed = threading.Event()

    def fails_later(*given):
        failed.set()
        raise Broken

    with monkeypatch.context() as broken:
        broken.setattr(state_folder, "save_state", fails_later)
        read(reader, text(16))
        assert failed.wait(60)
    read(reader, text(16, seed=1))
    folder.close()
    assert len(folder) == 1


def test_a_folder_closes_in_time_when_its_disk_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr(state_folder, "WAITING", 1)
    hangs, go_on = threading.Event(), threading.Event()

    def save(*given):
        hangs.set()
        go_on.wait(60)

    monkeypatch.setattr(state_folder, "save_state", save)
    model = build()
    reader, folder = on_disk(tmp_path, model)
    read(reader, text(16))
    assert hangs.wait(60)
    read(reader, text(16, seed=1))
    folder.close(seconds=0.1)  # the queue is full, and its reader hangs
    go_on.set()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LatteError, match="state-cache-dir .*expected a folder to write to"):
        StateFolder(tmp_path / "file", build(), 10**8)


def write_on(path):
    model = build()
    reader = Reader(model, PIECE, StateStore(10**8, StateFolder(path, model, 10**9)))
    for seed in range(10**6):
        read(reader, text(40, seed))


def test_killed_while_states_are_written_no_broken_file_is_read(tmp_path):
    # Forked from a process that has imported PyTorch, which lasts ten seconds, and has no threads.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["latte.serve.reading", "latte.serve.state_folder"])
    for _ in range(4):
        process = context.Process(target=write_on, args=(tmp_path,))
        before = set(tmp_path.rglob("*.safetensors"))
        process.start()
        while len(set(tmp_path.rglob("*.safetensors")) - before) < 5 and process.is_alive():
            time.sleep(0.001)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    model = build()
    written = sorted(tmp_path.rglob("*.safetensors"))
    assert written
    for file in written:  # all of them are whole
        cache, ids = read_state(file, model)
        assert cache.get_seq_length() == len(ids)
    folder = StateFolder(tmp_path, model, 10**9)
    assert not list(tmp_path.rglob("*.tmp-*")) and len(folder) == len(written)
    reading = read(Reader(model, PIECE, StateStore(10**8, folder)), text(40))
    assert reading.reused == 40
    anew = read(Reader(model, PIECE), text(40))
    assert torch.equal(logits(model, reading.cache), logits(model, anew.cache))


def test_a_state_larger_than_the_room_removes_no_other(tmp_path):
    model = build("transformer++")
    folder = StateFolder(tmp_path, model, 8000)
    reader = Reader(model, PIECE, StateStore(10**7, folder))
    read(reader, text(8))
    read(reader, text(200, seed=1))
    folder.close()
    assert len(folder) == len(list(tmp_path.rglob("*.safetensors"))) == 1
