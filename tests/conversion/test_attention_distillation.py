"""The base runs inside a converted model; its mass within the window has a closed form."""

import pytest
import torch

from latte.conversion.attention_distillation import (
    base_output,
    mass_divergence,
    relative_error,
    sampled_masses,
    watch,
)
from latte.layers import Context, Projected
from latte.layers.weights import mixture
from tests.conversion.bases import NAMES, WINDOW, base_logits, converted, tokens

EXACT = {"rtol": 1e-9, "atol": 1e-9}
PLAIN = Context()


def random_local(layer, tokens_, batch=2, groups=2):
    generator = torch.Generator().manual_seed(3)

    def draw(heads):
        shape = (batch, tokens_, heads, layer.head_dim)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return Projected(q=draw(layer.num_heads), k=draw(groups), v=draw(groups))


class Errors:
    """A teacher that measures each layer, as a fit of the layer alone does."""

    def __init__(self):
        self.output, self.mass = [], []

    def __call__(self, layer, x, near, context):
        target, real = base_output(layer, near, context), context.real(x)
        projected = layer.with_logits(x, near, context)
        out = layer.o_proj(layer._attend(x, projected, context)[0].flatten(-2))
        places = torch.arange(x.shape[1])
        mass, _ = sampled_masses(layer, near, places, context)
        self.output.append(relative_error(out, target, real))
        self.mass.append(mass_divergence(mixture(layer, projected, context), mass, real))
        return target


def errors(model, ids):
    found = Errors()
    watch(model, found, input_ids=ids)
    return found


@pytest.mark.parametrize("family", NAMES)
def test_a_pass_with_a_teacher_runs_the_base(family):
    ids = tokens(20)
    model, found = converted(family), Errors()
    logits = model(ids, teacher=found, use_cache=False).logits
    torch.testing.assert_close(logits, base_logits(family, ids, "own"), **EXACT)
    assert len(found.output) == len(found.mass) == 4
    assert min(found.output) > 0 and min(found.mass) > 0


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_mass_splits_full_attention_into_window_and_rest(family):
    """y = m SWA + (1 - m) REST, with REST the same softmax over what is out of the window."""
    layer = converted(family).model.layers[1].self_attn  # Gemma 2's second has full attention
    assert layer.base_window is None
    local, place = random_local(layer, 17), torch.arange(17)
    out, _ = layer.full_attention(local, PLAIN)
    mass, log_near = sampled_masses(layer, local, place, PLAIN)
    k, v = (x.repeat_interleave(2, 2) for x in (local.k, local.v))
    logits = torch.einsum("bthk,bshk->bhts", local.q, k) * layer.scale
    if layer.softcap:
        logits = layer.softcap * torch.tanh(logits / layer.softcap)
    gap = place[:, None] - place
    full = logits.masked_fill(gap < 0, -torch.inf).logsumexp(-1)
    near = logits.masked_fill((gap < 0) | (gap >= WINDOW), -torch.inf)
    torch.testing.assert_close(log_near, near.logsumexp(-1).transpose(1, 2), **EXACT)
    torch.testing.assert_close(mass, (near.logsumexp(-1) - full).exp().transpose(1, 2), **EXACT)
    swa = torch.einsum("bhts,bshd->bthd", near.softmax(-1), v)
    far = logits.masked_fill(gap < WINDOW, -torch.inf).softmax(-1).nan_to_num()
    rest = torch.einsum("bhts,bshd->bthd", far, v)
    m = mass[..., None]
    torch.testing.assert_close(out, m * swa + (1 - m) * rest, **EXACT)
    assert torch.all(mass[:, :WINDOW] > 1 - 1e-12) and mass.min() < 0.9
    some = torch.tensor([3, 11])
    torch.testing.assert_close(sampled_masses(layer, local, some, PLAIN)[0], mass[:, some], **EXACT)


@pytest.mark.parametrize(("family", "layers"), [("llama", (0, 2)), ("gemma3_text", (1, 3))])
def test_layers_that_are_not_converted_teach_and_learn_nothing(family, layers):
    ids = tokens(20)
    model, everywhere = converted(family, converted_layers=layers), converted(family)
    for at in layers:
        state = everywhere.model.layers[at].state_dict()
        model.model.layers[at].load_state_dict(state)
    own, every = (errors(m, ids) for m in (model, everywhere))
    for found, whole in ((own.output, every.output), (own.mass, every.mass)):
        assert len(found) == 2
        expected = torch.stack(whole)[list(layers)]
        torch.testing.assert_close(torch.stack(found), expected, **EXACT)


def test_a_perfect_mixture_has_no_error():
    """Everything in the window: p(l=0) = 1 is right, and the errors say so."""
    model = converted("llama", local_window=64)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.latents.window_bias.fill_(60.0)
    found = errors(model, tokens(20))
    assert max(found.output) < 1e-12 and 0 <= min(found.mass) and max(found.mass) < 1e-12


def test_sinks_count_as_seen_by_the_window():
    masses = {}
    for sinks in (0, 3):
        layer = converted("llama", num_sinks=sinks).model.layers[0].self_attn
        masses[sinks] = sampled_masses(layer, random_local(layer, 17), torch.arange(17), PLAIN)[0]
    assert torch.all(masses[3] >= masses[0] - 1e-12)
    assert torch.all(masses[3][:, WINDOW + 3 :] > masses[0][:, WINDOW + 3 :])
