"""Kept tokens in a base's attention: the definition, on tiny decoders."""

import pytest
import torch

from experiments.kept.attention import blocks, kept_attention, kept_sets, key_difference
from latte.conversion.attention_distillation import base_output, watch
from tests.conversion.bases import converted, tokens

BLOCK, LENGTH, SINKS = 4, 45, 2


@pytest.fixture(scope="module")
def model():
    return converted("llama", num_sinks=SINKS).float()


def layers_of(model, ids):
    """(layer, x, near, context) of each layer, as the base has them."""
    found = []

    def attend(*given):
        found.append(given)
        return base_output(given[0], *given[2:])

    watch(model, attend, input_ids=ids)
    return found


def outputs(model, ids, count):
    """The first layer's output: what it reads does not depend on what is kept."""
    layer, x, near, _ = layers_of(model, ids)[0]
    return kept_attention(layer, near, key_difference(layer, x, BLOCK), count, BLOCK)


def test_keeping_all_is_the_bases_attention(model):
    for layer, x, near, context in layers_of(model, tokens(LENGTH, 1)):
        found = kept_attention(layer, near, key_difference(layer, x, BLOCK), LENGTH, BLOCK)
        torch.testing.assert_close(found, base_output(layer, near, context))


def test_keeping_none_is_window_and_sinks(model):
    layer, _, near, _ = layers_of(model, tokens(LENGTH, 1))[0]
    t, s = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    first = t // BLOCK * BLOCK
    seen = (s <= t) & ((s < SINKS) | (s > first - layer.window))
    q, k, v = (x[0].transpose(0, 1) for x in (near.q, near.k, near.v))
    q = q.unflatten(0, (len(k), -1)) * layer.scale
    weights = (q @ k[:, None].mT).masked_fill(~seen, -torch.inf).softmax(-1)
    expected = layer.o_proj((weights @ v[:, None]).flatten(0, 1).transpose(0, 1).flatten(1))
    torch.testing.assert_close(outputs(model, tokens(LENGTH, 1), 0)[0], expected)


def test_later_tokens_change_nothing(model):
    ids = tokens(LENGTH, 1)
    changed = ids.clone()
    changed[:, 30:] = (changed[:, 30:] + 7) % 50
    found = [outputs(model, these, 3)[0] for these in (ids, changed, ids[:, :30])]
    torch.testing.assert_close(found[0][:30], found[1][:30])
    torch.testing.assert_close(found[0][:30], found[2])
    assert not torch.equal(found[0][30:], found[1][30:])


@pytest.mark.parametrize("count", [0, 1, 5, 100])
def test_the_kept_set_is_the_largest_of_those_that_left(model, count):
    layer = model.model.layers[0].self_attn
    score = torch.randint(4, (2, LENGTH), generator=torch.Generator().manual_seed(2)).float()
    sets = list(kept_sets(layer, score, count, BLOCK))
    assert [found[:3] for found in sets] == list(blocks(layer, BLOCK, LENGTH))
    for _, _, left, kept in sets:
        for group, own in enumerate(kept):
            order = sorted(range(SINKS, left), key=lambda s: (-float(score[group, s]), -s))
            assert sorted(own.tolist()) == sorted(order[:count])
