"""Converted models with weights in 4 and 8 bits: a GGUF file's own bits, folders, commands."""

import copy
import functools

import pytest
import torch
from transformers import AutoModelForCausalLM

from latte import LatteCache, conversion
from latte.cli import main
from latte.errors import LatteError
from latte.lab.data.tokenizers import byte_tokenizer
from latte.lab.evaluate.checkpoint import load_checkpoint
from latte.layers.quantised import Quantised, QuantisedLinear
from latte.models import load_state, save_state
from latte.models.quantizer import LatteQuantizationConfig

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")

from tests.conversion.gguf_files import TOKENS, small_base, write_gguf  # noqa: E402

convert = functools.partial(conversion.convert, initial="random", num_latents=8, window=5)
IDS = torch.randint(3, len(TOKENS), (2, 19), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A file of a random Llama in Q4_1."""
    path = tmp_path_factory.mktemp("gguf") / "base.gguf"
    base = small_base("llama", num_hidden_layers=2, tie_word_embeddings=True)
    return write_gguf(path, base, kind="Q4_1")


@pytest.fixture(scope="module")
def folder(file):
    """The file converted in its own bits."""
    out = file.parent / "converted"
    convert(file, out, weights="file")
    return out


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids, use_cache=False).logits.float()


def close(model, other, bound):
    """Whether the logits differ by less than a part of their norm."""
    expected = logits(other)
    return (logits(model) - expected).norm() < bound * expected.norm()


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q6_K", "Q8_0"])
def test_a_files_bits_are_kept(kind, family, tmp_path):
    sizes = {} if family.startswith("gemma") else {"num_hidden_layers": 2}
    if kind.endswith("_K"):  # blocks of 256
        sizes |= {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    base = small_base(family, **sizes)
    path = tmp_path / "base.gguf"
    try:
        write_gguf(path, base, kind=kind)
    except NotImplementedError:  # the package reads it, and does not write it
        write_gguf(path, base, kind=kind, quantised=random_blocks)
    model = convert(path, weights="file")
    exact = convert(path, dtype="float32")
    formats = {m.kind for m in model.modules() if isinstance(m, QuantisedLinear)}
    assert formats == ({"int4", "int8"} if kind.startswith("Q4") else {"int8"})
    for name, module in model.named_modules():
        if isinstance(module, Quantised):
            weight = exact.get_submodule(name).weight
            step = weight.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True)
            if module.kind == "int4":  # only scale and zero are rounded: to bf16
                step = step * 2**-9 * 3
            elif kind == "Q8_0":  # only the scale
                step = step * 2**-8
            else:
                step = step / 127 * (0.5 + 127 * 2**-9)
            error = (module.dequantised(torch.float32) - weight).unflatten(1, (-1, 32))
            assert (error.abs() <= 1.01 * step).all(), name


def random_blocks(shape, of):
    """Bytes of random blocks of Q4_K or Q6_K with small scales."""
    import numpy as np

    rows, size = shape[0], gguf.GGML_QUANT_SIZES[of]
    count = shape[1] // size[0]
    random = np.random.default_rng(0)
    data = random.integers(0, 256, (rows, count, size[1]), dtype=np.uint8)
    scale = np.array([0.002], np.float16).view(np.uint8)
    for at in (0, 2) if of.name == "Q4_K" else (208,):
        data[..., at : at + 2] = scale
    return data.reshape(rows, -1)


def test_a_folder_is_loaded_as_it_was_saved_and_saved_as_it_was_loaded(folder, tmp_path):
    model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.bfloat16 and not model.training
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.scales is model.model.embed_tokens.scales
    assert not any(m.weight.requires_grad for m in model.modules() if isinstance(m, Quantised))
    latents = {x.dtype for name, x in model.named_parameters() if ".latents." in name}
    assert latents == {torch.float32}
    model.save_pretrained(tmp_path / "again")
    own, again = (path / "model.safetensors" for path in (folder, tmp_path / "again"))
    assert own.read_bytes() == again.read_bytes()
    assert (folder / "model.safetensors").stat().st_size < 0.45 * sum(
        2 * p.numel() for p in convert(folder.parent / "base.gguf").parameters()
    )


def test_a_token_at_a_time_is_the_same_as_the_whole_text(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    cache = LatteCache(model.config)
    with torch.no_grad():
        pieces = [model(x, past_key_values=cache).logits for x in IDS.split([9, *[1] * 10], 1)]
    whole = logits(model)
    assert (torch.cat(pieces, 1) - whole).norm() < 0.03 * whole.norm()


def test_a_hook_of_a_quantised_map_runs_in_a_step(folder):
    model, called = AutoModelForCausalLM.from_pretrained(folder), []
    layer = model.model.layers[0]
    for module in (layer.self_attn.q_proj, layer.mlp.gate_proj, layer.mlp.down_proj):
        module.register_forward_hook(lambda module, *_: called.append(module))
    cache = LatteCache(model.config)
    with torch.no_grad():
        for ids in IDS.split([17, 1, 1], 1):
            model(ids, past_key_values=cache)
    assert len(called) == 9


def test_plain_weights_are_todays(file, tmp_path):
    plain = convert(file).state_dict()
    for name, x in convert(file, weights="bfloat16").state_dict().items():
        assert torch.equal(x, plain[name]) and x.dtype == plain[name].dtype
    base = small_base("llama", num_hidden_layers=2).float()
    exact = write_gguf(tmp_path / "exact.gguf", base)
    with pytest.raises(LatteError, match="has no quantised weights; expected one of bf"):
        convert(exact, weights="file")


def test_dequantised_by_a_dtype_and_back_to_plain_weights(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    for dtype in ("bfloat16", "float32"):
        plain, _ = load_checkpoint(folder, "cpu", dtype=dtype)
        assert plain.dtype == getattr(torch, dtype) and not plain.is_quantized
        latents = {x.dtype for name, x in plain.named_parameters() if ".latents." in name}
        assert latents == {torch.float32}
        assert not any(isinstance(m, Quantised) for m in plain.modules())
        assert plain.lm_head.weight is plain.model.embed_tokens.weight
        assert close(model, plain, 0.03)
    wide = copy.deepcopy(model).dequantize(torch.float32)
    assert {x.dtype for x in wide.parameters()} == {torch.float32}
    assert main(["convert", str(folder), str(tmp_path / "plain"), "--weights", "bfloat16"]) == 0
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert not hasattr(again.config, "quantization_config")
    assert close(model, again, 0.03)
    with pytest.raises(LatteError, match="dtype: expected one of float32, bfloat16"):
        load_checkpoint(folder, dtype="int4")


@pytest.mark.parametrize("weights", ["int4", "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen2"])
def test_any_base_in_4_and_8_bits(family, weights, tmp_path):
    base = small_base(family)
    exact = convert(write_gguf(tmp_path / "base.gguf", base))
    model = convert(tmp_path / "base.gguf", tmp_path / "out", weights=weights)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model))
    assert close(model, exact, {"int4": 0.6, "int8": 0.1}[weights])
    kinds = {m.kind for m in model.model.layers.modules() if isinstance(m, Quantised)}
    assert kinds == {weights}


def test_an_own_model_in_8_bits(tmp_path, capsys):
    from latte.models import LatteForCausalLM, preset_config
    from tests.models.modeldb import VOCABULARY

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    torch.manual_seed(0)
    model = LatteForCausalLM(preset_config("latte-r-swa++", "tiny", num_latents=16, **sizes)).eval()
    model.save_pretrained(tmp_path / "own")
    config = LatteQuantizationConfig("int8")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "own", quantization_config=config)
    ids = torch.arange(3, 20)[None]
    expected = logits(model, ids)
    assert 0 < (logits(loaded, ids) - expected).norm() < 0.05 * expected.norm()
    loaded.save_pretrained(tmp_path / "bits")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "bits")
    assert torch.equal(logits(again, ids), logits(loaded, ids))
    out = again.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert out.shape == (1, 20)
    byte_tokenizer().save_pretrained(tmp_path / "own")
    assert main(["convert", str(tmp_path / "own"), str(tmp_path / "new"), "--weights", "int8"]) == 0
    assert "latte, 0.11M parameters, with int8 weights" in capsys.readouterr().out
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert (logits(made, ids) - expected).norm() < 0.06 * expected.norm()  # in bf16


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weights": "int3"}, "weights: expected one of int4, int8, got 'int3'"),
        ({"others": {"lm_head": "int2"}}, "expected one of int4, int8, none for lm_head"),
        ({"others": {"head": "int8"}}, "head is no map or embedding of this model"),
        ({"others": {"lm_head": "int4"}}, "of shape .* cannot be int4; expected int8"),
    ],
)
def test_a_configuration_that_does_not_fit_is_one_line(fields, message, file, tmp_path):
    convert(file, tmp_path / "plain")
    with pytest.raises(LatteError, match=message):
        config = LatteQuantizationConfig(**fields)
        AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)


def test_latents_are_trained_over_frozen_integers(folder):
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".latents." in name)
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(grad is not None and grad.isfinite().all() for grad in grads)
    assert any(grad.norm() > 0 for grad in grads)


def test_a_state_is_refused_for_other_bits_of_the_weights(file, folder, tmp_path):
    model, other = AutoModelForCausalLM.from_pretrained(folder), convert(file)
    cache = LatteCache(model.config)
    with torch.no_grad():
        model(IDS, past_key_values=cache)
    save_state(cache, tmp_path / "state")
    assert load_state(tmp_path / "state", copy.deepcopy(model)).get_seq_length() == IDS.shape[1]
    with pytest.raises(LatteError, match="its weights are int4, this one's are plain"):
        load_state(tmp_path / "state", other)
    moved = copy.deepcopy(model)
    with torch.no_grad():
        moved.model.layers[0].self_attn.q_proj.scales.mul_(1.1)
    with pytest.raises(LatteError, match="its weights are not this one's"):
        load_state(tmp_path / "state", moved)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--weights", "int3"), "weights: expected one of file, bfloat16, int4, int8, got 'int3'"),
        (("--weights", "int4"), "is quantised; expected full-precision weights, or bfloat16"),
        (("--weights", "file"), "weights=file keeps the bits of a GGUF file"),
        (("--weights", "bfloat16", "--dtype", "float32"), "weights=bfloat16 and dtype=float32"),
        (("--weights", "bfloat16", "--window", "9"), "is converted: expected weights and dtype"),
        (("--weights", "int4", "--recipe", "r.yaml"), "with --recipe"),
    ],
)
def test_weights_that_do_not_fit_are_refused_in_one_line(options, message, folder, capsys):
    assert main(["convert", str(folder), str(folder.parent / "new"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (folder.parent / "new").exists()


def test_a_processor_without_the_kernel_says_so_and_computes_the_same(folder, monkeypatch):
    fast = AutoModelForCausalLM.from_pretrained(folder)
    monkeypatch.setattr(f"{Quantised.__module__}.best_order", lambda *_: 0)
    with pytest.warns(UserWarning, match="no fast kernel for all of them .*--dtype bfloat16"):
        slow = AutoModelForCausalLM.from_pretrained(folder)
    assert close(slow, fast, 0.03)


def test_what_training_changed_has_eight_bits(file, tmp_path):
    trained = convert(file, dtype="float32")
    projections = [layer.self_attn.q_proj for layer in trained.model.layers]
    with torch.no_grad():  # updates far smaller than a step of 4 bits
        for module in projections:
            outputs, inputs = module.weight.shape
            module.weight += 1e-3 * torch.randn(outputs, 1) @ torch.randn(1, inputs)
    conversion.save_latents(trained, tmp_path / "latents", base=file, rank=1)
    model = conversion.apply_latents(file, tmp_path / "latents", weights="file")
    for layer, exact in zip(model.model.layers, projections, strict=True):
        assert (layer.self_attn.q_proj.kind, layer.self_attn.k_proj.kind) == ("int8", "int4")
        found, weight = layer.self_attn.q_proj.dequantised(torch.float32), exact.weight
        assert (found - weight).norm() < 0.01 * weight.norm()
    assert close(model, trained, 0.02)
