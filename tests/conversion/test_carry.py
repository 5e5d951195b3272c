"""The losses inside the layers reach a block's output, in order, and stay what they are."""

import copy

import pytest
import torch
import torch.distributed as dist
from bases import converted, tokens
from torch.distributed.tensor import DTensor

from latte.conversion.transfer import carry, run_teacher

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


def test_the_last_layer_is_first_and_one_ends_before_the_next():
    model, seen = latents_alone(), []

    def watch(layer, _, out):  # as FSDP2 does
        index = layer.self_attn.layer_idx
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
    assert [index for what, index in seen if what == "begin"] == [3, 2, 1, 0]
    for index in range(LAYERS):  # a layer's output is reached before the layer's gradients
        first, *rest = [what for what, i in seen if i == index]
        assert first == "begin" and rest and set(rest) == {"gradient"}


@pytest.mark.parametrize("option", [{}, {"latent_input": "rglru", "delay_latents": True}])
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
        assert len(teacher.output) == len(teacher.mass) == LAYERS  # computed again, counted once
    expected, found = gradients(plain), gradients(lean)
    assert set(found) == set(expected) == {n for n, _ in plain.named_parameters() if ".lat" in n}
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-15)


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_fully_sharded_blocks_are_gathered_in_turn(checkpointing, one_process):
    """FSDP2's own hooks, on one process: a block's weights are there when its losses need them."""
    from latte.train.sharding import shard

    plain, sharded = latents_alone(), latents_alone()
    if checkpointing:
        sharded.gradient_checkpointing_enable()
    shard(sharded, torch.device("cpu"))
    assert all(isinstance(p, DTensor) for p in sharded.parameters())
    layers = sharded.model.layers
    gathered = []
    for seed in (0, 1):  # twice: gradients add up
        ids = tokens(20, seed=seed)
        run_teacher(plain, input_ids=ids).loss().backward()
        teacher = run_teacher(sharded, input_ids=ids)
        for output in teacher.output:
            output.register_hook(
                lambda _: gathered.append(
                    [not isinstance(each.self_attn.o_proj.weight, DTensor) for each in layers]
                )
            )
        teacher.loss().backward()
    assert len(gathered) == 2 * LAYERS
    for turn, blocks in enumerate(gathered):
        own = LAYERS - 1 - turn % LAYERS
        assert blocks[own]
        others = [index for index, here in enumerate(blocks) if here and index != own]
        assert others in ([], [own - 1])  # at most the next one, which FSDP2 gathers ahead
    assert all(isinstance(p, DTensor) for p in sharded.parameters())
    expected, found = gradients(plain), gradients(sharded)
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name].full_tensor(), gradient, rtol=1e-12, atol=1e-15)
