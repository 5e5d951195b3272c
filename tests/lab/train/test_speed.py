"""Choices of speed: checked before anything starts; they compute the same model, and read nothing
of the GPU's values."""

from typing import Any

import pytest
import torch
from torch import nn

from latte.errors import LatteError
from latte.lab.train import speed
from latte.lab.train.recipe import recipe_from_dict
from latte.lab.train.run import train
from latte.lab.train.speed import compile_blocks
from latte.models import LatteForCausalLM, preset_config
from latte.ops import default_backend, use_backend
from latte.ops.triton_backend import launch


def a_recipe(preset: str = "latte-r-swa++", **training: Any) -> Any:
    return recipe_from_dict({"model": {"preset": preset}, "training": {"max_steps": 1, **training}})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("mode", ["missing", "compiler"])
def test_what_is_not_there_is_told_before_anything_starts(mode, monkeypatch, tmp_path):
    monkeypatch.setattr("latte.ops.triton_backend.launch.triton_mode", lambda: mode)
    recipe = a_recipe(backend="triton")
    recipe.output_dir = str(tmp_path / "run")
    found = "needs Triton, which is not installed" if mode == "missing" else "needs a GPU"
    with pytest.raises(LatteError, match=f"training.backend=triton {found}"):
        train(recipe, quiet=True)
    assert not (tmp_path / "run").exists()


def test_the_chunked_loss_is_for_own_models(monkeypatch):
    monkeypatch.setattr(nn, "LinearCrossEntropyOptions", object, raising=False)
    recipe = a_recipe(chunked_loss=True)
    recipe.model.architecture = "llama"
    with pytest.raises(LatteError, match="serves Latte's own models"):
        speed.check_speed(recipe)


def test_the_backend_holds_for_the_training_alone():
    before = default_backend()
    with speed.chosen_backend(a_recipe(backend="torch")):
        assert default_backend() == "torch"
    with speed.chosen_backend(a_recipe(backend="triton")):
        assert default_backend() == "triton"
    with speed.chosen_backend(a_recipe()):
        assert default_backend() == before
    assert default_backend() == before


def test_blocks_are_compiled_for_own_models_alone(monkeypatch):
    called = []
    monkeypatch.setattr(
        "latte.lab.train.speed.compile_blocks", lambda model: called.append("blocks")
    )
    model = torch.nn.Linear(1, 1)
    speed.apply_speed_options(model, a_recipe())
    assert called == [] and not hasattr(model, "chunked_loss")
    speed.apply_speed_options(model, a_recipe(chunked_loss=True))
    assert model.chunked_loss is True
    speed.apply_speed_options(model, a_recipe(torch_compile=True))
    assert called == ["blocks"]
    converted = a_recipe(torch_compile=True)
    converted.conversion.base = "a base"
    speed.apply_speed_options(model, converted)
    assert called == ["blocks"]


def make_model(preset="latte-r-swa++", **overrides):
    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    small |= {"intermediate_size": 48, "num_latents": 8, "sliding_window": 8, "vocab_size": 40}
    return LatteForCausalLM(preset_config(preset, "tiny", **(small | overrides))).train()


def loss_and_gradients(model, **inputs):
    ids = torch.arange(24).view(1, 24) % 40
    model.zero_grad()
    loss = model(ids, labels=ids, **inputs).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def test_compiled_blocks_compute_the_same(monkeypatch):
    model = make_model()
    plain = loss_and_gradients(model)
    names = set(model.state_dict())
    compiled = []
    original = nn.Module.compile

    def through_eager(self):  # the tracing is what is tested, not the C++ compiler
        compiled.append(type(self).__name__)
        original(self, backend="aot_eager")

    monkeypatch.setattr(nn.Module, "compile", through_eager)
    torch._dynamo.reset()
    assert compile_blocks(model) == 2 and compiled == ["LatteBlock"] * 2
    torch._dynamo.utils.counters.clear()
    torch.testing.assert_close(loss_and_gradients(model), plain)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # one serves both blocks
    assert set(model.state_dict()) == names


chunks = pytest.mark.skipif(
    not hasattr(nn, "LinearCrossEntropyOptions"), reason="this PyTorch has no loss in chunks"
)


def largest_saved(model, **inputs):
    """Elements of the largest tensor that a training step keeps for its backward pass."""
    sizes = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda x: sizes.append(x.numel()) or x, lambda x: x
    )
    with hooks:
        model(inputs["ids"], labels=inputs["ids"])
    return max(sizes)


@chunks
@pytest.mark.parametrize("items", [None, 7, torch.tensor(5)])
def test_the_loss_in_chunks_is_the_loss(items):
    model = make_model("latte++", vocab_size=300)
    bounds = torch.tensor([0, 10, 24], dtype=torch.int32)
    options = {"num_items_in_batch": items, "cu_seq_lens_q": bounds}
    plain = loss_and_gradients(model, **options)
    ids = torch.arange(96).view(1, 96)
    assert largest_saved(model, ids=ids) >= 95 * 300  # the logits
    model.chunked_loss = True
    torch.testing.assert_close(loss_and_gradients(model, **options), plain)
    assert model(ids, labels=ids).logits is None
    assert largest_saved(model, ids=ids) < 95 * 300
    assert model.eval()(ids, labels=ids).logits.shape == (1, 96, 300)
    assert model.train()(ids).logits.shape == (1, 96, 300)


@chunks
def test_a_head_that_is_more_than_a_linear_map_is_called():
    model, ids = make_model("latte++", vocab_size=300), torch.arange(24).view(1, 24)
    model.lm_head.register_forward_hook(lambda _module, _inputs, out: 9 * out)
    expected = model(ids, labels=ids).loss
    model.chunked_loss = True
    assert torch.equal(model(ids, labels=ids).loss, expected)


@chunks
def test_the_loss_in_chunks_under_autocast():
    model = make_model("latte++", vocab_size=300)
    with torch.autocast("cpu", torch.bfloat16):
        plain = loss_and_gradients(model)
        model.chunked_loss = True
        found = loss_and_gradients(model)
    assert found[0].dtype == torch.float32
    for x, y in zip(found, plain, strict=True):
        assert x.dtype == y.dtype
        assert (x - y).norm() <= 0.02 * y.norm()


def test_no_loss_in_chunks_is_told(monkeypatch):
    monkeypatch.delattr(nn, "LinearCrossEntropyOptions", raising=False)
    with pytest.raises(LatteError, match="needs PyTorch 2.13 or newer, this is "):
        speed.check_speed(a_recipe(chunked_loss=True))


@pytest.mark.parametrize(
    ("preset", "packed"),
    [
        ("latte-r-swa++", False),
        ("latte-conv-swa++", False),
        ("transformer++", False),
        ("latte++", False),
        ("latte++", True),
        ("latte-conv-swa++", True),
        ("latte-r-swa++", True),
    ],
)
def test_a_training_step_on_a_gpu_reads_nothing_back(preset, packed, monkeypatch):
    """Tensors on the meta device have no values: a synchronisation in our code raises here."""
    pytest.importorskip("triton", reason="Triton is not installed")
    # The kernels take any device under the interpreter; what runs here are their shapes alone.
    monkeypatch.setattr(launch, "triton_mode", lambda: "interpreter")
    config = make_model(preset).config
    with torch.device("meta"):
        model = LatteForCausalLM(config).train()
        ids = torch.zeros(1, 24, dtype=torch.long)
        bounds = torch.zeros(4, dtype=torch.int32) if packed else None
        with use_backend("triton"):
            loss = model(ids, labels=ids, cu_seq_lens_q=bounds).loss
            loss.backward()
        with pytest.raises(RuntimeError, match="meta"):
            loss.item()
    assert all(p.grad is not None for p in model.parameters())
