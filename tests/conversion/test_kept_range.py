"""Kept keys of texts that are longer than the base's range of positions."""

import copy

import pytest
import torch

from latte.conversion.attention_distillation import base_output
from latte.conversion.step import RotaryTable
from latte.errors import LatteError
from latte.layers.kept_range import KeptRange
from latte.models import LatteCache
from tests.conversion.bases import converted, tokens

# The range is that of 64 positions: keys more than 48 behind are turned by 16, every 16 tokens.
KEPT = {"num_sinks": 2, "delay_latents": True, "joint_softmax": True, "latent_input": "none"}
KEPT |= {"kept_tokens": 6, "kept_block": 4}
EXACT = {"rtol": 1e-9, "atol": 1e-9}
LENGTH = 150


@pytest.fixture(scope="module", params=[("llama", False), ("llama", True), ("gemma3_text", True)])
def model(request):
    family, far = request.param
    return converted(family, **KEPT, far_sinks=far)


@pytest.fixture(scope="module")
def ids():
    return tokens(LENGTH, 2)


@pytest.fixture(scope="module")
def whole(model, ids):
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def read(model, cache, ids, cuts, mask=None):
    found, before = [], 0
    with torch.no_grad():
        for cut in (*cuts, ids.shape[1]):
            given = None if mask is None else mask[:, :cut]
            part = ids[:, before:cut]
            found.append(model(part, attention_mask=given, past_key_values=cache).logits)
            before = cut
    return torch.cat(found, 1)


@pytest.mark.parametrize("cuts", [(), (5, 63, 64, 100), (70, 81, *range(82, 120))])
def test_any_cut_gives_the_same(model, ids, whole, cuts):
    torch.testing.assert_close(read(model, LatteCache(model.config), ids, cuts), whole, **EXACT)


def test_single_tokens_in_a_static_cache_give_the_same(model, ids, whole):
    cache = LatteCache(model.config, max_cache_len=LENGTH)
    torch.testing.assert_close(read(model, cache, ids, range(60, LENGTH)), whole, **EXACT)


def test_a_compiled_step_gives_the_same(ids):
    model, found = converted("llama", **KEPT), []
    cache = LatteCache(model.config, max_cache_len=LENGTH)
    whole = read(model, LatteCache(model.config), ids, ())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    read(model, cache, ids[:, :60], ())
    with torch.no_grad():
        for place in range(60, 84):
            token = ids[:, place : place + 1]
            found.append(compiled(token, past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(found, 1), whole[:, 60:84], **EXACT)


def test_a_compiled_text_gives_the_same(ids):
    model, ids = converted("llama", **KEPT), ids[:1, :70]
    whole = read(model, LatteCache(model.config), ids, ())
    compiled = torch.compile(model, backend="eager")
    found = read(compiled, LatteCache(model.config), ids, (40,))
    torch.testing.assert_close(found, whole, **EXACT)


def test_one_graph_refuses_a_text_beyond_the_range(ids):
    model = converted("llama", **KEPT)
    graph = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="beyond the range of positions"):
        graph(ids, use_cache=False)
    bounds = torch.tensor([0, 20, LENGTH], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="at most 64 tokens, .* got a longer one"):
        graph(ids[:1], cu_seq_lens_q=bounds, use_cache=False)


def test_padding_changes_nothing(model, ids, whole):
    mask = torch.ones(2, LENGTH + 7, dtype=torch.long)
    mask[0, :7], mask[1, 3:] = 0, 1
    mask[1, :3] = 0
    padded = torch.zeros_like(mask)
    padded[0, 7:], padded[1, 3:-4] = ids[0], ids[1]
    mask[1, -4:] = 0
    for cuts in ((), (66, 90, *range(92, 110))):
        found = read(model, LatteCache(model.config), padded, cuts, mask)
        torch.testing.assert_close(found[0, 7:], whole[0], **EXACT)
        torch.testing.assert_close(found[1, 3:-4], whole[1], **EXACT)


def test_keys_stand_within_the_range(model, ids):
    cache = LatteCache(model.config)
    read(model, cache, ids, (90,))
    layer = next(x for x in model.model.layers if x.self_attn.kept_tokens)
    inputs = []
    hook = layer.self_attn.register_forward_pre_hook(
        lambda _, args, kwargs: inputs.append(kwargs["hidden_states"]), with_kwargs=True
    )
    with torch.no_grad():
        model(ids, past_key_values=LatteCache(model.config))
    hook.remove()
    _, k, _ = layer.self_attn.heads(torch.cat(inputs, 1))
    kept = cache.layers[layer.self_attn.layer_idx].state.kept
    position, turned = kept.positions, 0
    place = position.clone()
    for at in range(64, LENGTH, 16):
        far = (position >= 0) & (at - position > 48)
        place[far] += 16
        turned += int(far.sum())
    assert turned and (LENGTH - place[position >= 0]).max() <= 64
    for row, slot, group in (position >= 0).nonzero().tolist():
        where = place[row, slot, group].view(1, 1)
        cos, sin = RotaryTable(model.model, layer.self_attn.layer_kind)(k, where)
        own = k[row, position[row, slot, group], group].view(1, 1, 1, -1)
        expected, _ = layer.self_attn._apply_rotary(own, own, cos, sin, unsqueeze_dim=2)
        torch.testing.assert_close(
            kept.keys[row, slot, group], expected.flatten(), rtol=1e-5, atol=1e-5
        )


def test_tokens_that_were_taken_back(model, ids, whole):
    check_taken_back(model, ids, whole)


def test_tokens_taken_back_where_the_first_layer_keeps_its_attention(ids):
    own = converted("llama", **KEPT, converted_layers=(1, 3))
    check_taken_back(own, ids, read(own, LatteCache(own.config), ids, ()))


def check_taken_back(model, ids, whole):
    """Drafts of some tokens and wrong ones, which are taken back: a second one begins where the
    first left turned keys, and some pass places where keys are turned."""
    cache = LatteCache(model.config)
    read(model, cache, ids[:, :60], ())
    cache.activate_past_recording()
    before = 60
    for right, wrong in ((3, 2), (30, 9), (0, 4), (5, 1), (12, 0), (1, 6)):
        draft = torch.cat([ids[:, before : before + right], ids[:, :wrong]], 1)
        found = read(model, cache, draft, (draft.shape[1] // 2,))[:, :right]
        cache.crop(-wrong)
        torch.testing.assert_close(found, whole[:, before : before + right], **EXACT)
        before += right
    found = read(model, cache, ids[:, before:], (12,))
    torch.testing.assert_close(found, whole[:, before:], **EXACT)


def test_gradients_pass_the_places_where_keys_are_turned(model, ids, whole):
    own = copy.deepcopy(model).train()
    logits = own(ids, use_cache=False).logits
    torch.testing.assert_close(logits.detach(), whole, **EXACT)
    table = own.get_input_embeddings().weight
    [grad] = torch.autograd.grad(logits[:, -1].logsumexp(-1).sum(), [table])
    assert grad[ids[:, :60].unique()].abs().sum() > 0


def test_hidden_states_are_whole(model, ids):
    with torch.no_grad():
        out = model(ids, use_cache=False, output_hidden_states=True)
        names = model(ids, use_cache=False, return_dict=False)
    assert out.past_key_values is None
    assert [x.shape[1] for x in out.hidden_states] == [LENGTH] * len(out.hidden_states)
    assert isinstance(names, tuple)


def test_what_cannot_be_read_in_parts(model, ids):
    bounds = torch.tensor([0, 20, LENGTH], dtype=torch.int32)
    with pytest.raises(LatteError, match="at most 64 tokens.*got one of 130"):
        model(ids[:1], cu_seq_lens_q=bounds, use_cache=False)
    seen = []

    def teacher(layer, x, near, context):
        seen.append(layer.layer_idx)
        return base_output(layer, near, context)

    model(ids[:1], cu_seq_lens_q=bounds, use_cache=False, teacher=teacher)  # the base keeps none
    assert seen == [i for i in range(4) if model.config.is_converted(i)]
    own = copy.deepcopy(model).train()
    own.gradient_checkpointing_enable()
    with pytest.raises(LatteError, match="at most 64 tokens with gradient checkpointing"):
        own(ids)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((8192, 64, 32), (6144, 2048)),
        ((64, 8, 4), (48, 16)),
        ((64, 60, 4), None),
        ((3, 2, 4), None),
    ],
)
def test_the_range(given, expected):
    assert KeptRange.of(*given) == (expected and KeptRange(*expected))


@pytest.mark.parametrize("far", [False, True])
def test_a_shorter_range_is_that_of_a_base_with_fewer_positions(ids, far):
    own = converted("llama", **KEPT, far_sinks=far, kept_range=48)
    other = converted("llama", **KEPT, far_sinks=far, max_position_embeddings=48)
    whole = converted("llama", **KEPT, far_sinks=far)
    with torch.no_grad():
        found, same, longer = (x(ids, use_cache=False).logits for x in (own, other, whole))
    assert torch.equal(found, same)
    assert torch.equal(found[:, :48], longer[:, :48])
    assert not torch.allclose(found[:, 64:], longer[:, 64:])


@pytest.mark.parametrize(
    ("given", "said"),
    [(65, "at most max_position_embeddings=64, got 65"), (7, "kept_range=7 is too short"),
     (0, "kept_range must be at least 1")],
)  # fmt: skip
def test_a_range_that_does_not_fit_is_refused(given, said):
    with pytest.raises(LatteError, match=said):
        converted("llama", **KEPT, kept_range=given)


def test_frequencies_that_change_with_the_length_have_no_range():
    with pytest.raises(LatteError, match="kept_range: expected None for a base whose rotary"):
        converted("llama", "longrope", **KEPT, kept_range=24)


def test_queries_look_at_sinks_from_within_the_range(model):
    edges = {layer.self_attn.sink_edge for layer in model.model.layers}
    assert 63 in edges if model.config.far_sinks else 63 not in edges
