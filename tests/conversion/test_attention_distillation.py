"""The teacher is the base, its in-window mass is the closed form, and the latents learn from it.

The losses inside the layers reach a block's output, in order, and stay what they are.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from latte.conversion.attention import Projections
from latte.conversion.attention_distillation import Teacher, base_attention, carry, run_teacher
from latte.layers import Piece
from tests.conversion.bases import NAMES, WINDOW, base_logits, converted, tokens

EXACT = {"rtol": 1e-9, "atol": 1e-9}
PLAIN = Piece(torch.empty(2, 17, 0))


def random_local(layer, tokens_, batch=2, groups=2):
    generator = torch.Generator().manual_seed(3)

    def draw(heads):
        shape = (batch, tokens_, heads, layer.head_dim)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return Projections(draw(layer.num_heads), draw(groups), draw(groups))


@pytest.mark.parametrize("family", NAMES)
def test_a_pass_with_a_teacher_runs_the_base(family):
    ids = tokens(20)
    model = converted(family)
    teacher = Teacher()
    logits = model(ids, teacher=teacher, use_cache=False).logits
    torch.testing.assert_close(logits, base_logits(family, ids, "own"), **EXACT)
    assert len(teacher.output) == len(teacher.mass) == 4
    assert min(teacher.output) > 0 and min(teacher.mass) > 0


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_mass_splits_full_attention_into_window_and_rest(family, monkeypatch):
    """y = m SWA + (1 - m) REST, with REST the same softmax over what is out of the window."""
    monkeypatch.setattr(
        "latte.conversion.attention_distillation.CHUNK_ELEMENTS", 700
    )  # several chunks
    layer = converted(family).model.layers[1].self_attn  # Gemma 2's second has full attention
    assert layer.base_window is None
    local = random_local(layer, 17)
    out, mass = base_attention(layer, local, PLAIN)
    k, v = (x.repeat_interleave(2, 2) for x in (local.k, local.v))
    logits = torch.einsum("bthk,bshk->bhts", local.q, k) * layer.scale
    if layer.softcap:
        logits = layer.softcap * torch.tanh(logits / layer.softcap)
    place = torch.arange(17)
    gap = place[:, None] - place
    full = logits.masked_fill(gap < 0, -torch.inf).logsumexp(-1)
    near = logits.masked_fill((gap < 0) | (gap >= WINDOW), -torch.inf)
    torch.testing.assert_close(mass, (near.logsumexp(-1) - full).exp().transpose(1, 2), **EXACT)
    swa = torch.einsum("bhts,bshd->bthd", near.softmax(-1), v)
    far = logits.masked_fill(gap < WINDOW, -torch.inf).softmax(-1).nan_to_num()
    rest = torch.einsum("bhts,bshd->bthd", far, v)
    m = mass[..., None]
    torch.testing.assert_close(out, m * swa + (1 - m) * rest, **EXACT)
    assert torch.all(mass[:, :WINDOW] > 1 - 1e-12) and mass.min() < 0.9


@pytest.mark.parametrize(("family", "layers"), [("llama", (0, 2)), ("gemma3_text", (1, 3))])
def test_layers_that_are_not_converted_teach_and_learn_nothing(family, layers):
    ids = tokens(20)
    model, everywhere = converted(family, converted_layers=layers), converted(family)
    for at in layers:
        state = everywhere.model.layers[at].state_dict()
        model.model.layers[at].load_state_dict(state)
    teacher, all_teacher = (run_teacher(m, input_ids=ids) for m in (model, everywhere))
    logits = model(ids, teacher=Teacher(), use_cache=False).logits
    torch.testing.assert_close(logits, base_logits(family, ids, "own"), **EXACT)
    for found, whole in ((teacher.output, all_teacher.output), (teacher.mass, all_teacher.mass)):
        assert len(found) == 2
        expected = torch.stack(whole)[list(layers)]
        torch.testing.assert_close(torch.stack(found), expected, **EXACT)


def test_a_perfect_mixture_has_no_error():
    """Everything in the window: p(l=0) = 1 is right, and the errors say so."""
    model = converted("llama", local_window=64)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.latents.window_bias.fill_(60.0)
    output, mass = run_teacher(model, input_ids=tokens(20)).errors()
    assert output < 1e-12 and 0 <= mass < 1e-12


@pytest.mark.parametrize("option", [{}, {"num_sinks": 2}, {"delay_latents": True}])
def test_packed_teaches_what_apart_teaches(option):
    model = converted("gemma2", **option)
    parts = [tokens(n, 1, seed=n) for n in (9, 14)]
    bounds = torch.tensor([0, 9, 23], dtype=torch.int32)
    layers = []
    for layer in model.model.layers:
        layer.self_attn.latents.register_forward_hook(
            lambda _m, _i, out: layers.append(out[0].detach())
        )
    together = run_teacher(model, input_ids=torch.cat(parts, 1), cu_seq_lens_q=bounds)
    count = len(layers)
    apart = [run_teacher(model, input_ids=part) for part in parts]
    for index in range(count):  # the same logits, hence the same inputs and outputs below
        both = torch.cat([layers[count + index], layers[2 * count + index]], 1)
        torch.testing.assert_close(layers[index], both, **EXACT)
    mean = sum(part.shape[1] * torch.stack(t.mass) for part, t in zip(parts, apart, strict=True))
    torch.testing.assert_close(torch.stack(together.mass), mean / 23, **EXACT)


def test_sinks_count_as_seen_by_the_window():
    masses = {}
    for sinks in (0, 3):
        layer = converted("llama", num_sinks=sinks).model.layers[0].self_attn
        masses[sinks] = base_attention(layer, random_local(layer, 17), PLAIN)[1]
    assert torch.all(masses[3] >= masses[0] - 1e-12)
    assert torch.all(masses[3][:, WINDOW + 3 :] > masses[0][:, WINDOW + 3 :])


def test_padding_teaches_nothing():
    model = converted("llama")
    ids = tokens(14, 1)
    padded = torch.cat([torch.full((1, 5), 7), ids], 1)
    mask = torch.ones(1, 19, dtype=torch.long)
    mask[:, :5] = 0
    plain = run_teacher(model, input_ids=ids)
    with_padding = run_teacher(model, input_ids=padded, attention_mask=mask)
    for a, b in zip(plain.errors(), with_padding.errors(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


def test_latents_learn_each_layer_on_its_own():
    model = converted("llama").train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".latents." in name)
    ids = tokens(20, 4)
    # One layer's error has gradients in that layer alone.
    run_teacher(model, input_ids=ids).output[2].backward()
    touched = {n.split(".")[2] for n, p in model.named_parameters() if p.grad is not None}
    assert touched == {"2"}
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 3e-2)
    history = []
    for _ in range(20):
        optimiser.zero_grad()
        teacher = run_teacher(model, input_ids=ids)
        history.append([x.item() for x in teacher.errors()])
        teacher.loss().backward()
        optimiser.step()
    (first_output, first_mass), (last_output, last_mass) = history[0], history[-1]
    assert last_output < 0.7 * first_output
    assert last_mass < 0.5 * first_mass


# --- losses on the way of the hidden states -------------------------------------------------

LAYERS = 4


def latents_alone(**options):
    """A converted Llama, the base frozen."""
    model = copy.deepcopy(converted("llama", **options)).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".latents." in name)
    return model


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_values_and_gradients_pass_as_they_are():
    previous = torch.randn(2, 3, 5, requires_grad=True)
    x, loss = torch.randn(2, 3, 5), torch.tensor(2.0, requires_grad=True)
    arrived = []
    previous.register_hook(arrived.append)
    out, carried = carry(previous, x, loss)
    assert torch.equal(out, x) and out.requires_grad
    assert out.data_ptr() == x.data_ptr() and not out._is_view()  # no copy; FSDP2 minds views
    assert torch.equal(carried, loss)
    (carried * 3).backward(inputs=[loss, previous])
    assert loss.grad == 3
    (zero,) = arrived
    assert zero.shape == previous.shape and not zero.any()
    assert zero.untyped_storage().nbytes() == 4  # one number, expanded


def test_gradients_are_those_of_the_sum_of_losses():
    model = latents_alone()
    teacher = run_teacher(model, input_ids=tokens(20))
    weights = [p for p in model.parameters() if p.requires_grad]
    total = sum(teacher.output) / LAYERS + 0.3 * sum(teacher.mass) / LAYERS
    direct = torch.autograd.grad(1.7 * total, weights, retain_graph=True)
    (1.7 * teacher.loss(0.3)).backward()
    for weight, expected in zip(weights, direct, strict=True):
        assert weight.dtype == torch.float64
        torch.testing.assert_close(weight.grad, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(teacher.loss(0.3), total, rtol=1e-14, atol=0)


def test_nothing_of_the_base_is_kept_for_the_backward_pass():
    """The hidden states carry a gradient, and yet no feed-forward network is differentiated."""
    model, shapes = latents_alone(), []
    width = model.config.intermediate_size

    def pack(x):
        shapes.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        teacher = run_teacher(model, input_ids=tokens(20))
    assert teacher.loss().requires_grad and shapes
    assert not [shape for shape in shapes if width in shape[-1:]]


@pytest.mark.parametrize("layers", [(0, 1, 2, 3), (0, 3), (1, 2)])
def test_the_last_layer_is_first_and_one_ends_before_the_next(layers):
    model, seen = latents_alone(converted_layers=layers), []

    def watch(layer, _, out):  # as FSDP2 does
        index = layer.self_attn.layer_idx
        if out.requires_grad:
            out.register_hook(lambda _: seen.append(("begin", index)))

    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(watch)
        for parameter in layer.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda _, i=index: seen.append(("gradient", i))
                )
    run_teacher(model, input_ids=tokens(20)).loss().backward()
    order = [index for _, index in seen]
    assert order == sorted(order, reverse=True)
    begun = [index for what, index in seen if what == "begin"]
    assert begun == list(range(LAYERS - 1, layers[0] - 1, -1))
    for index in layers:  # a layer's output is reached before the layer's gradients
        first, *rest = [what for what, i in seen if i == index]
        assert first == "begin" and rest and set(rest) == {"gradient"}


@pytest.mark.parametrize(
    "option",
    [{}, {"latent_input": "rglru", "delay_latents": True}, {"converted_layers": (1, 3)}],
)
def test_checkpointing_and_accumulation_change_no_gradient(option):
    plain, lean = latents_alone(**option), latents_alone(**option)
    lean.gradient_checkpointing_enable()
    for seed in (0, 1):
        ids = tokens(20, seed=seed)
        loss = run_teacher(plain, input_ids=ids).loss()
        teacher = run_teacher(lean, input_ids=ids)
        assert torch.equal(teacher.loss(), loss)
        loss.backward()
        teacher.loss().backward()
        layers = len(option.get("converted_layers", range(LAYERS)))
        assert len(teacher.output) == len(teacher.mass) == layers  # computed again, counted once
    expected, found = gradients(plain), gradients(lean)
    assert set(found) == set(expected) == {n for n, _ in plain.named_parameters() if ".lat" in n}
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-15)


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("layers", [range(LAYERS), (0, 3)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_fully_sharded_blocks_are_gathered_in_turn(checkpointing, layers, one_process):
    """FSDP2's own hooks, on one process: a block's weights are there when its losses need them."""
    from latte.lab.train.trainer import shard

    option = {"converted_layers": tuple(layers)}
    plain, sharded = latents_alone(**option), latents_alone(**option)
    if checkpointing:
        sharded.gradient_checkpointing_enable()
    shard(sharded, torch.device("cpu"))
    assert all(isinstance(p, DTensor) for p in sharded.parameters())
    blocks = sharded.model.layers
    gathered = []
    for seed in (0, 1):  # twice: gradients add up
        ids = tokens(20, seed=seed)
        run_teacher(plain, input_ids=ids).loss().backward()
        teacher = run_teacher(sharded, input_ids=ids)
        for output in teacher.output:
            output.register_hook(
                lambda _: gathered.append(
                    [not isinstance(each.self_attn.o_proj.weight, DTensor) for each in blocks]
                )
            )
        teacher.loss().backward()
    assert len(gathered) == 2 * len(layers)
    for turn, there in enumerate(gathered):
        own = layers[len(layers) - 1 - turn % len(layers)]
        assert there[own]
        others = [index for index, here in enumerate(there) if here and index != own]
        assert others in ([], [own - 1])  # at most the next one, which FSDP2 gathers ahead
    assert all(isinstance(p, DTensor) for p in sharded.parameters())
    expected, found = gradients(plain), gradients(sharded)
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name].full_tensor(), gradient, rtol=1e-12, atol=1e-15)
