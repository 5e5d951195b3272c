"""Laws of every model that carries a state: Latte's presets, and converted decoders.

However a text is read, whole, in pieces, token by token, padded, packed, or from a file, the
logits and the states are the same. The rows are those of ``modeldb.py``.
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import CompileConfig, GenerationConfig

from latte.layers.rollback import map_tensors
from latte.models import PRESETS, LatteCache, load_state, save_state
from latte.models.cache import tensors_in
from latte.ops import cpp_backend, use_backend
from tests.models.modeldb import CONVERSIONS, OF_PRESETS, ROWS, VOCABULARY, named, tokens

EXACT = {"rtol": 1e-9, "atol": 1e-9}


def over(rows):
    return pytest.mark.parametrize("row", rows, ids=[row.name for row in rows])


STEPPING = [row for row in ROWS if row.steps]
PLAIN = [f"{family}: plain" for family, option in CONVERSIONS if option == "plain"]
HYBRIDS = ["llama: kept", "gemma3_text: kept", "gemma2: hybrid"]


@pytest.fixture(params=["torch", "cpu"])
def backend(request):
    """PyTorch's operations, then the native kernels."""
    if request.param == "cpu" and cpp_backend.ABSENT is not None:
        pytest.skip(cpp_backend.ABSENT)
    with use_backend(request.param):
        yield request.param


@torch.no_grad()
def whole(model, ids, mask=None):
    return model(ids, attention_mask=mask, use_cache=False).logits


@torch.no_grad()
def read(model, cache, ids, sizes, mask=None):
    """The logits of ``ids``, which go through the cache in pieces of these sizes.

    ``mask`` is that of all tokens, those that the cache has read included.
    """
    logits, past = [], cache.get_seq_length()
    for piece in ids.split(list(sizes), 1):
        past += piece.shape[1]
        seen = None if mask is None else mask[:, :past]
        out = model(piece, attention_mask=seen, past_key_values=cache)
        assert out.past_key_values is cache and cache.get_seq_length() == past
        logits.append(out.logits)
    return torch.cat(logits, 1)


def stepped(model, cache, ids, mask=None):
    """The logits of ``ids``, each of which is a step in place."""
    logits = []
    for token in ids.split(1, 1):
        logits.append(read(model, cache, token, [1], mask))
        assert all(layer.is_written_in_place for layer in cache.layers)
    return torch.cat(logits, 1)


def visible(state):
    """A state without what stands at slots that hold nothing."""

    def of(part):
        if part is None:
            return None
        return part._replace(
            keys=part.keys * part.mask[..., None, None],
            values=part.values * part.mask[:, : part.values.shape[1], None, None],
        )

    parts = {name: of(getattr(state, name)) for name in ("window", "pending", "sinks")}
    return state._replace(**parts)


# --- pieces ---------------------------------------------------------------------------------------


@over(ROWS)
def test_pieces_are_the_whole(row):
    model, ids = row.model(), tokens(2, 15)
    expected = whole(model, ids)
    for sizes in ([1] * 15, [9, 1, 1, 4], [2, 1, 12], [6, 1, 1, 3, 1, 1, 1, 1]):
        cache = LatteCache(model.config)
        torch.testing.assert_close(read(model, cache, ids, sizes), expected, **EXACT)
        assert cache.batch_size == 2 and cache.position.tolist() == [15, 15]


@over(STEPPING)
def test_steps_are_the_whole_after_a_prompt_of_any_length(row, backend):
    model, ids = row.model(), tokens(2, 19)
    whole_cache = LatteCache(model.config)
    expected = read(model, whole_cache, ids, [19])
    assert not whole_cache.layers[0].is_written_in_place
    for prompt in (1, 2, 4, 5, 6, 14):
        cache = LatteCache(model.config)
        read(model, cache, ids[:, :prompt], [prompt])
        found = stepped(model, cache, ids[:, prompt:])
        torch.testing.assert_close(found, expected[:, prompt:], **EXACT)
        assert cache.batch_size == 2 and cache.position.tolist() == [19, 19]
        for layer, other in zip(cache.layers, whole_cache.layers, strict=True):
            assert layer.seen_tokens == 19
            torch.testing.assert_close(visible(layer.state), visible(other.state), **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@over([row for row in ROWS if row.name in OF_PRESETS or row.name.endswith(": both")])
def test_steps_are_as_exact_as_the_general_way(row, dtype):
    model, ids = row.make().to(dtype), tokens(2, 12)
    for name, module in model.named_modules():
        if name.endswith("self_attn.latents"):  # a converted model keeps them in fp32
            module.float()
    expected, errors = whole(copy.deepcopy(model).double(), ids)[:, -1], []
    for backend in ("reference", "torch", "cpu"):
        if backend == "cpu" and cpp_backend.ABSENT is not None:
            continue
        with use_backend(backend):
            cache = LatteCache(model.config)
            logits = read(model, cache, ids, [6, 1, 1, 1, 1, 1, 1])[:, -1]
            assert cache.layers[0].is_written_in_place == (backend != "reference")
        errors.append((logits.double() - expected).norm() / expected.norm())
    roundings = 4 if row.name in OF_PRESETS else 16  # twice the layers, and large norms
    assert max(errors[1:]) <= max(2 * errors[0], roundings * torch.finfo(dtype).eps)


# --- the rows of a batch --------------------------------------------------------------------------


@over(ROWS)
def test_the_future_cannot_change_the_past(row):
    model, ids = row.model(), tokens(2, 23)
    changed = ids.clone()
    changed[:, 15:] = (changed[:, 15:] + 7) % VOCABULARY
    before, after = whole(model, ids), whole(model, changed)
    assert torch.equal(before[:, :15], after[:, :15])
    assert not torch.allclose(before[:, 15:], after[:, 15:])


@over(ROWS)
def test_rows_of_a_batch_are_alone(row):
    model, ids = row.model(), tokens(3, 13)
    alone = torch.cat([whole(model, each[None]) for each in ids])
    torch.testing.assert_close(whole(model, ids), alone, **EXACT)


@over(ROWS)
def test_packed_sequences_are_the_sequences_alone(row):
    model, lengths = row.model(), (3, 11, 1, 9)
    parts = [tokens(1, length, seed=length) for length in lengths]
    alone = torch.cat([whole(model, part) for part in parts], 1)
    bounds = torch.tensor([0, 3, 14, 15, 24], dtype=torch.int32)
    # Transformers' collators mark packed sequences by positions that start anew.
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        for given in ({"cu_seq_lens_q": bounds}, {"position_ids": places, "use_cache": False}):
            packed = model(torch.cat(parts, 1), **given).logits
            torch.testing.assert_close(packed, alone, **EXACT)


MASKED = {"left": range(5), "right": range(9, 14)}  # in between it takes places in the window


@pytest.mark.parametrize("place", MASKED)
@over(ROWS)
def test_padded_is_unpadded(row, place):
    """The second of two rows is padded."""
    model, ids = row.model(), tokens(2, 14)
    mask = torch.ones_like(ids)
    mask[1, list(MASKED[place])] = 0
    real = mask[1].bool()
    alone = whole(model, ids[:1]), whole(model, ids[1:, real])
    cache = LatteCache(model.config)
    pieces = read(model, cache, ids, [3, 5, 1, 1, 1, 3], mask)
    assert cache.position.tolist() == [14, int(real.sum())]
    for padded in (whole(model, ids, mask), pieces):
        torch.testing.assert_close(padded[:1], alone[0], **EXACT)
        torch.testing.assert_close(padded[1:, real], alone[1], **EXACT)


@over(STEPPING)
def test_padding_goes_through_steps(row, backend):
    model, ids = row.model(), tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :3], mask[1, [9, 10, 15]] = 0, 0
    cache = LatteCache(model.config)
    read(model, cache, ids[:, :5], [5], mask)
    found, real = stepped(model, cache, ids[:, 5:], mask), mask[:, 5:].bool()
    torch.testing.assert_close(found[real], whole(model, ids, mask)[:, 5:][real], **EXACT)
    assert cache.position.tolist() == mask.sum(1).tolist()


@over(ROWS)
def test_rows_are_reordered_repeated_and_selected(row):
    """Of a state, and of buffers in the middle of decoding."""
    model, ids = row.model(), tokens(3, 10)
    new = tokens(6, 3, seed=2)
    moves = {
        (2, 0, 0): lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])),
        (0, 0, 1, 1, 2, 2): lambda cache: cache.batch_repeat_interleave(2),
        (2, 1): lambda cache: cache.batch_select_indices(torch.tensor([2, 1])),
    }
    for rows, move in moves.items():
        again = torch.cat([ids[list(rows)], new[: len(rows)]], 1)
        expected = whole(model, again)[:, 10:]
        for sizes in ([10], [6, 1, 1, 1, 1]):
            cache = LatteCache(model.config)
            read(model, cache, ids, sizes)
            move(cache)
            torch.testing.assert_close(read(model, cache, again[:, 10:], [1, 2]), expected, **EXACT)


# --- states that are kept -------------------------------------------------------------------------


@over(ROWS)
def test_the_size_depends_on_the_length_where_a_state_grows(row):
    model, sizes = row.model(), []
    for length in (1, 5, 40):
        cache = LatteCache(model.config)
        read(model, cache, tokens(2, length), [length])
        sizes.append(cache.nbytes)
    assert (sizes[0] < sizes[1] < sizes[2]) if row.grows else (sizes[0] == sizes[1] == sizes[2])


@over(ROWS)
def test_a_state_as_a_file_goes_on_bit_for_bit(row, tmp_path):
    model, ids = row.model(), tokens(2, 18)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    cache = LatteCache(model.config)
    read(model, cache, ids[:, :11], [11], mask)
    save_state(cache, tmp_path / "state")
    loaded = load_state(tmp_path / "state", model)
    assert loaded.position.tolist() == [11, 6] and loaded.nbytes == cache.nbytes
    ours, wanted = (read(model, each, ids[:, 11:], [3, 1, 1, 2], mask) for each in (loaded, cache))
    assert torch.equal(ours, wanted)


@over(STEPPING)
def test_the_middle_of_decoding_is_a_state_too(row, tmp_path):
    """A state, a copy and a file go on, and what was taken stays as it is."""
    model, ids = row.model(), tokens(2, 20)
    expected = whole(model, ids)[:, 12:]
    cache = LatteCache(model.config)
    read(model, cache, ids[:, :4], [4])
    stepped(model, cache, ids[:, 4:12])
    taken, position = [layer.state for layer in cache.layers], cache.position
    before = [map_tensors(torch.clone, state) for state in taken]
    twin, handed = copy.deepcopy(cache), LatteCache(model.config)
    for layer, state in zip(handed.layers, taken, strict=True):
        layer.update(state, 12)
    save_state(cache, tmp_path / "state")
    loaded = [load_state(tmp_path / "state", model, static_room=room) for room in (None, 8)]
    assert [each.is_static for each in loaded] == [False, True]
    for each in (cache, twin, handed, *loaded):
        torch.testing.assert_close(stepped(model, each, ids[:, 12:]), expected, **EXACT)
        torch.testing.assert_close(taken, before, rtol=0, atol=0)
    assert position.tolist() == [12, 12]
    loaded = load_state(tmp_path / "state", model)  # in pieces again, after steps
    stepped(model, loaded, ids[:, 12:14])
    torch.testing.assert_close(read(model, loaded, ids[:, 14:], [6]), expected[:, 2:], **EXACT)


@over(STEPPING)
def test_buffers_of_a_static_cache_stay_where_they_are(row, backend):
    model, ids = row.model(), tokens(2, 20)
    expected, home = whole(model, ids), None
    cache = LatteCache(model.config, max_cache_len=32)
    for _ in range(2):
        read(model, cache, ids[:, :3], [3])
        for start, steps, piece in ((3, 6, 4), (13, 2, 5)):
            stop = start + steps
            found = stepped(model, cache, ids[:, start:stop])
            torch.testing.assert_close(found, expected[:, start:stop], **EXACT)
            places = [x.data_ptr() for layer in cache.layers for x in buffers_of(layer)]
            home = home or places
            assert places == home
            found = read(model, cache, ids[:, stop : stop + piece], [piece])
            torch.testing.assert_close(found, expected[:, stop : stop + piece], **EXACT)
            cache.reorder_cache(torch.tensor([0, 1]))
        cache.reset()
        assert cache.get_seq_length() == 0 and not cache.is_initialized


def buffers_of(layer):
    return tensors_in(layer.buffers.parts)


@over(ROWS)
def test_tokens_are_taken_back(row):
    model, ids, other = row.model(), tokens(2, 20), tokens(2, 9, seed=1)
    cache = LatteCache(model.config)
    read(model, cache, ids[:, :6], [6])
    cache.activate_past_recording()
    read(model, cache, ids[:, 6:15], [3, 1, 1, 4])
    cache.crop(-7)  # back inside the first of these pieces
    expected = whole(model, torch.cat([ids[:, :8], other], 1))[:, 8:]
    torch.testing.assert_close(read(model, cache, other, [1, 2, 6]), expected, **EXACT)
    cache.crop(-9)  # all of what came since
    expected = whole(model, ids)[:, 8:]
    torch.testing.assert_close(read(model, cache, ids[:, 8:], [12]), expected, **EXACT)


@over(ROWS)
def test_any_number_of_tokens_is_taken_back(row):
    model, ids = row.model(), tokens(1, 9)
    expected, cache = whole(model, ids), LatteCache(model.config)
    cache.activate_past_recording()
    read(model, cache, ids, [4, 1, 4])
    for count in range(1, 10):
        cropped = copy.deepcopy(cache)
        cropped.crop(-count)
        found = read(model, cropped, ids[:, 9 - count :], [count])
        torch.testing.assert_close(found, expected[:, 9 - count :], **EXACT)


# --- generation -----------------------------------------------------------------------------------


def generate(model, ids, mask=None, **settings):
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0} | settings
    # In a prompt, generate would take a 0 for padding.
    config = GenerationConfig(suppress_tokens=[0], eos_token_id=None, **settings)
    torch.manual_seed(1)
    return model.generate(ids, attention_mask=mask, generation_config=config)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 2},
    ],
    ids=["greedy", "beams", "samples"],
)
@over(named([*PRESETS, *PLAIN, *HYBRIDS, "llama: both"]))
def test_every_cache_generates_what_none_does(row, settings):
    model, ids = row.model(), tokens(3, 12)
    mask = torch.ones_like(ids)
    mask[1, :4], mask[2, :9] = 0, 0
    expected = generate(model, ids * mask, mask, use_cache=False, **settings)
    assert expected[:, 12:].unique().numel() > 3  # not one token over and over
    for kind in ("dynamic", "static", "offloaded"):
        found = generate(model, ids * mask, mask, cache_implementation=kind, **settings)
        assert torch.equal(found, expected), kind


SLOW = ["gemma2: plain", "llama: base", "llama: both", "llama: kept", "gemma2: hybrid"]


@pytest.mark.parametrize(
    "row",
    [
        *named(["latte-r-swa++", "transformer++"]),
        *(pytest.param(row, marks=pytest.mark.slow) for row in named(SLOW)),
    ],
    ids=lambda row: row.name,
)
def test_compiled_decoding_is_one_graph(row):
    """Also for the next text, longer than the first; windows turn over many times."""
    torch._dynamo.reset()
    model = row.make()
    compiled = CompileConfig(backend="aot_eager", fullgraph=True)
    compiled._compile_all_devices = True
    static = {"cache_implementation": "static", "max_cache_len": 64, "compile_config": compiled}
    for length in (7, 11):
        ids = tokens(2, length)
        mask = torch.ones_like(ids)
        mask[1, : length // 2] = 0
        expected = generate(model, ids * mask, mask, max_new_tokens=24)
        with torch._dynamo.config.patch(error_on_recompile=True):
            found = generate(model, ids * mask, mask, max_new_tokens=24, **static)
        assert torch.equal(found, expected)


def scaled(_module, _inputs, output):
    """A hook that changes what a module gives: its output, and none of the states beside it."""

    def of(x):
        half = torch.linspace(0.5, 1.5, (x.shape[-1] + 1) // 2, dtype=x.dtype)
        return x * half.repeat(2)[: x.shape[-1]]  # a rotary table has each angle twice

    if isinstance(output, torch.Tensor):
        return of(output)
    parts = (of(output[0]), *output[1:])
    return type(output)(*parts) if hasattr(output, "_fields") else parts


@over(named([*OF_PRESETS, *PLAIN, "llama: both, conv", "gemma2: joint, both"]))
def test_a_hook_acts_in_steps_as_in_a_whole_forward(row):
    """Whatever a forward calls, a step calls too, or it is not taken."""
    model, ids = copy.deepcopy(row.model()), tokens(1, 7)
    plain, called = whole(model, ids), []
    parts = [*model.model.children(), model.lm_head, *model.model.layers[1].modules()]
    seen = [part.register_forward_hook(lambda m, *_: called.append(m)) for part in parts]
    whole(model, ids)
    for hook in seen:
        hook.remove()
    assert len(called) > 8
    for part in dict.fromkeys(called):
        hook = part.register_forward_hook(scaled)
        expected, cache = whole(model, ids), LatteCache(model.config)
        found = read(model, cache, ids, [4, 1, 1, 1])
        hook.remove()
        assert (expected - plain).abs().max() > 1e-7, part  # a hundred times the tolerance
        torch.testing.assert_close(found, expected, **EXACT)
    torch.testing.assert_close(
        read(model, LatteCache(model.config), ids, [4, 1, 1, 1]), plain, **EXACT
    )
