"""The loss, gradients, checkpointing, low precision, compiling."""

import pytest
import torch

from latte.models import PRESETS, LatteForCausalLM, preset_config
from latte.ops import macchiato_attention

TOLERANCE = {"atol": 1e-10, "rtol": 1e-10}


@pytest.fixture
def fresh(config):
    """A model of one's own, in training mode."""

    def make(preset, dtype=torch.float64, **overrides):
        torch.manual_seed(0)
        return LatteForCausalLM(config(preset, **overrides)).to(dtype).train()

    return make


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_parameter_gets_a_gradient(fresh, tokens, preset):
    model, ids = fresh(preset), tokens(2, 20)
    model(ids, labels=ids).loss.backward()
    for name, grad in gradients(model).items():
        assert torch.isfinite(grad).all(), name
        assert grad.abs().max() > 0, name


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("preset", PRESETS)
def test_gradient_checkpointing_changes_nothing(fresh, tokens, preset, reentrant):
    model, ids = fresh(preset, hidden_dropout=0.1), tokens(2, 12)
    results = []
    for checkpoint in (False, True):
        if checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        torch.manual_seed(1)
        loss = model(ids, labels=ids).loss
        loss.backward()
        results.append((loss.detach(), gradients(model)))
    assert model.is_gradient_checkpointing
    torch.testing.assert_close(results[0], results[1], **TOLERANCE)


def test_checkpointing_computes_layers_twice(fresh, tokens):
    model, ids = fresh("latte++"), tokens(1, 6)
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    model.gradient_checkpointing_enable()
    model(ids, labels=ids).loss.backward()
    assert len(calls) == 2


def test_loss_is_the_mean_over_predicted_tokens(build, tokens):
    model, ids = build("latte-r-swa++"), tokens(2, 10)
    labels = ids.clone()
    labels[0, :4] = -100
    with torch.no_grad():
        out = model(ids, labels=labels)
        nll = torch.nn.functional.cross_entropy(
            out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        ).view(2, 9)
        predicted = labels[:, 1:] != -100
        torch.testing.assert_close(out.loss.double(), nll[predicted].mean(), rtol=1e-5, atol=0)
        # Trainer counts the tokens of all micro-batches, and the model divides by that.
        summed = model(ids, labels=labels, num_items_in_batch=torch.tensor(50)).loss
    torch.testing.assert_close(summed.double(), nll[predicted].sum() / 50, rtol=1e-5, atol=0)


def test_trainer_knows_who_divides(config):
    import inspect

    assert LatteForCausalLM.accepts_loss_kwargs is True
    parameters = inspect.signature(LatteForCausalLM.forward).parameters
    assert "num_items_in_batch" in parameters
    assert all(p.kind is not p.VAR_KEYWORD for p in parameters.values())


def test_packed_loss_predicts_nothing_across_a_boundary(build, tokens):
    model, ids = build("latte-r-swa++"), tokens(1, 20)
    bounds = torch.tensor([0, 8, 13, 20], dtype=torch.int32)
    labels = ids.clone()
    with torch.no_grad():
        packed = model(ids, labels=labels, cu_seq_lens_q=bounds).loss
        parts = [
            model(ids[:, a:b], labels=ids[:, a:b], num_items_in_batch=17).loss
            for a, b in ((0, 8), (8, 13), (13, 20))
        ]
    torch.testing.assert_close(packed, sum(parts))
    assert torch.equal(labels, ids)  # the caller's labels are as they were


def test_logits_to_keep(build, tokens):
    model, ids = build("latte++"), tokens(2, 7)
    with torch.no_grad():
        full = model(ids).logits
        last = model(ids, logits_to_keep=2).logits
        kept = model(ids, logits_to_keep=torch.tensor([1, 5])).logits
    torch.testing.assert_close(last, full[:, -2:], **TOLERANCE)
    torch.testing.assert_close(kept, full[:, [1, 5]], **TOLERANCE)
    with pytest.raises(ValueError, match="labels must be"):
        model(ids, labels=ids, logits_to_keep=2)


def test_dropout_works_in_training_alone(fresh, tokens):
    model, ids = fresh("latte-r-swa++", hidden_dropout=0.5, embedding_dropout=0.5), tokens(1, 8)
    with torch.no_grad():
        assert not torch.equal(model(ids).logits, model(ids).logits)
        model.eval()
        assert torch.equal(model(ids).logits, model(ids).logits)


@pytest.mark.parametrize("preset", PRESETS)
def test_bf16_autocast_is_close_to_fp32(fresh, tokens, preset):
    model, ids = fresh(preset, torch.float32, initializer_range=0.1), tokens(2, 16)
    exact = model(ids, labels=ids).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert abs(loss.item() - exact.item()) < 0.02 * exact.item()
    assert all(torch.isfinite(grad).all() for grad in gradients(model).values())


@pytest.mark.parametrize("preset", PRESETS)
def test_bf16_model_decodes(fresh, tokens, preset):
    model, ids = fresh(preset, torch.bfloat16).eval(), tokens(2, 9)
    with torch.no_grad():
        out = model(ids[:, :8])
        step = model(ids[:, 8:], past_key_values=out.past_key_values)
    assert step.logits.dtype == torch.bfloat16
    assert torch.isfinite(step.logits).all()
    layer = out.past_key_values.layers[0]
    if preset.startswith("latte"):
        assert layer.log_mass.dtype == layer.mean.dtype == torch.float32
    if layer.rglru is not None:
        assert layer.rglru.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["latte-r-swa++", "transformer++"])
def test_model_compiles_in_one_graph(fresh, tokens, preset):
    model, ids = fresh(preset, torch.float32, num_hidden_layers=1), tokens(2, 16)
    eager = model(ids, labels=ids)
    eager.loss.backward()
    expected = gradients(model)
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True)(ids, labels=ids)
    compiled.loss.backward()
    torch.testing.assert_close(compiled.logits, eager.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(gradients(model), expected, atol=1e-4, rtol=1e-3)


def operations(step):
    """How many of PyTorch's operations a call runs, those inside others counted as well."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    return sum(event.name.startswith("aten::") for event in profile.events())


@pytest.mark.parametrize(
    ("preset", "most"),
    # The RG-LRU without its native kernel is a loop of some 4,000 operations.
    [("latte-r-swa++", 9000), ("latte-conv-swa++", 5100), ("transformer++", 1950)],
)
def test_a_training_step_runs_few_operations(preset, most):
    """4 x 256 tokens at size tiny, the optimiser aside: overhead that no machine hides."""
    torch.manual_seed(0)
    model = LatteForCausalLM(preset_config(preset, "tiny")).train()
    ids = torch.randint(model.config.vocab_size, (4, 256))

    def step():
        model(ids, labels=ids).loss.backward()
        model.zero_grad()

    assert operations(step) <= most


def test_macchiato_saves_its_inputs_and_little_else():
    """Neither branch's output, nor a probability: what grows with T is in memory anyway."""
    torch.manual_seed(0)
    H, L, D, T = 4, 16, 32, 1024
    shapes = [(1, T, H, L + 1), (1, T, H, L), *[(1, T, H, D)] * 3]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        macchiato_attention(*inputs, window=64)
    given = sum(x.untyped_storage().nbytes() for x in inputs)
    assert sum(kept.values()) <= 1.05 * given
