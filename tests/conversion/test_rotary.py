"""Rotary positions: every scaling that Transformers knows, with sinks and without.

The frequencies of ``longrope`` and ``dynamic`` depend on the largest position of a call, those of
``dynamic`` also on the calls before. So the right answer is the base's own in the same calls.
"""

import copy

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.conversion.bases import ORIGINAL, SCALINGS, base, converted, tokens

EXACT = {"rtol": 1e-9, "atol": 1e-9}
FAMILIES = ["llama", "gemma3_text"]  # one rotary function, and one for each kind of layer
# The first tokens at once, and then in pieces. All beyond the original length, below it, across it.
CALLS = {
    "beyond": [(30,), (20, 10), (20, *[1] * 10)],
    "below": [(14,), (9, 5), (9, *[1] * 5)],
    "across": [(10, 20), (14, *[1] * 6)],
}
every_call = [calls for each in CALLS.values() for calls in each]
every_scaling = pytest.mark.parametrize("scaling", SCALINGS)
every_family = pytest.mark.parametrize("family", FAMILIES)


def read(model, ids, calls, grown=0):
    """Logits of tokens that are read in calls of so many; first a text of ``grown`` tokens."""
    cache, found = None, []
    with torch.no_grad():
        if grown:
            model(tokens(grown, 1), use_cache=False)
        for piece in ids.split(calls, 1):
            out = model(piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.logits)
    return torch.cat(found, 1)


def test_every_scaling_is_here():
    assert {*SCALINGS} == {"default", *ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize("sinks", [0, 2])
@every_scaling
@every_family
def test_the_base_control_is_the_base_in_the_same_calls(family, scaling, sinks):
    plain = copy.deepcopy(base(family, scaling))
    model = converted(family, scaling, mixing="base", num_sinks=sinks)
    for calls in every_call:
        ids = tokens(sum(calls))
        torch.testing.assert_close(read(model, ids, calls), read(plain, ids, calls), **EXACT)


@pytest.mark.parametrize("where", ["beyond", "below"])
@every_scaling
@every_family
def test_pieces_are_the_whole(family, scaling, where):
    """``dynamic`` has seen a longer text, so its frequencies are the same in all these calls."""
    (whole, *pieces), grown = CALLS[where], 40 if where == "beyond" else 0
    ids = tokens(*whole)
    options = {"num_sinks": 2, "kept_window": 9, "converted_layers": (1, 3)}
    options |= {"delay_latents": True, "latent_input": "none"}
    wanted = read(converted(family, scaling, **options), ids, whole, grown)
    for calls in pieces:
        found = read(converted(family, scaling, **options), ids, calls, grown)
        torch.testing.assert_close(found, wanted, **EXACT)


@every_scaling
@every_family
def test_all_tokens_kept_and_sinks_at_their_distance_are_the_base(family, scaling):
    options = {"num_sinks": 2, "delay_latents": True, "joint_softmax": True, "latent_input": "none"}
    options |= {"kept_tokens": 40, "kept_block": 2, "local_window": 4}
    options |= {"converted_layers": (1, 3)}  # those of Gemma with full attention
    for calls in every_call:
        model, ids = converted(family, scaling, **options, far_sinks=True), tokens(sum(calls))
        wanted = read(copy.deepcopy(base(family, scaling)), ids, calls)
        torch.testing.assert_close(read(model, ids, calls), wanted, **EXACT)
    near = read(converted(family, scaling, **options), ids, calls)
    assert not torch.allclose(near, wanted, atol=1e-3)  # queries look from the window's edge


@every_scaling
def test_sinks_have_the_frequencies_of_the_call(scaling):
    """While window and sinks hold all of a row it is the base's, whatever the row beside it."""
    window, sinks = 9, 4
    ids = tokens(window + sinks)
    places = torch.arange(window + sinks) + torch.tensor([[0], [30]])
    assert places.max() > ORIGINAL > window + sinks
    with torch.no_grad():
        wanted = copy.deepcopy(base("llama", scaling))(ids, position_ids=places).logits
        options = {"local_window": window, "num_sinks": sinks, "mixing": "window"}
        found = converted("llama", scaling, **options)(ids, position_ids=places).logits
    torch.testing.assert_close(found[:1], wanted[:1], **EXACT)
