"""`convert`: from a folder to a folder, weights kept; bad input gets one line, leaves nothing."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast

import latte
from latte.cli import main
from latte.conversion import convert
from latte.errors import LatteError
from latte.lab.evaluate.checkpoint import load_config
from tests.conversion.bases import NAMES, base, tokens


@pytest.fixture
def save_base(tmp_path):
    """save_base(family) -> a folder with the base's weights (fp32) and a tokeniser."""

    def save(family):
        folder = tmp_path / f"{family}-base"
        base(family).save_pretrained(folder)
        words = {f"w{i}": i for i in range(50)}
        tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w1")
        fast.save_pretrained(folder)
        return folder

    return save


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_the_new_weights_of_a_half_precision_base_are_fp32(save_base, half):
    folder = save_base("qwen3")
    AutoModelForCausalLM.from_pretrained(folder, dtype=half).save_pretrained(folder)
    model = convert(folder, window=4, num_latents=8, initial="random")
    assert model.model.layers[0].self_attn.q_proj.weight.dtype == half
    new = {n: p for n, p in model.named_parameters() if ".latents." in n}
    assert new and {p.dtype for p in new.values()} == {torch.float32}
    digits = torch.cat([p.flatten() for p in new.values() if p.ndim > 1])
    assert (digits != digits.to(half).float()).float().mean() > 0.9  # drawn in fp32, not widened
    assert model(tokens()).logits.isfinite().all()


@pytest.mark.parametrize("family", NAMES)
def test_a_converted_folder_loads_with_the_auto_classes(family, save_base, tmp_path):
    out, folder = tmp_path / "out", save_base(family)
    if family == "mistral":  # as from version 0.2 on; with a window there is nothing to convert
        _edit(folder, sliding_window=None)
    given = {"dtype": torch.float64, "calibration": [tokens()]}
    model = convert(folder, out, window=5, num_latents=8, **given)
    assert model.config.model_type == f"macchiato_{family}"
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64)
    assert type(loaded) is type(model)
    ids = tokens()
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-11, atol=1e-11)
    decoder = AutoModel.from_pretrained(out, dtype=torch.float64)
    assert decoder(ids).last_hidden_state.shape == (2, 23, 32)
    assert AutoConfig.from_pretrained(out).local_window == 5
    stored = load_file(out / "model.safetensors")
    for name, weight in base(family).state_dict().items():
        if name in stored:  # a tied head is stored once
            assert torch.equal(stored[name], weight), name
    assert (out / "tokenizer.json").is_file()


def test_a_control_is_chosen_when_loading(save_base, tmp_path):
    out = tmp_path / "out"
    convert(save_base("llama"), out, window=5, num_latents=8, dtype="float64")
    ids = tokens()
    plain = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64)(ids).logits
    own = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64, mixing="base")(ids).logits
    reference = base("llama")(ids, attention_mask=_causal(23)).logits
    torch.testing.assert_close(own, reference, rtol=1e-9, atol=1e-9)
    assert (plain - own).abs().max() > 1e-3


def _causal(length):
    from tests.conversion.bases import band

    return band(length, None)


def test_the_seed_decides_the_new_weights(save_base):
    folder = save_base("llama")
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    models = [
        convert(folder, window=5, num_latents=8, seed=seed, initial="random") for seed in (1, 1, 2)
    ]
    assert torch.equal(torch.random.get_rng_state(), before)
    keys = [m.model.layers[0].self_attn.latents.k_proj.weight for m in models]
    assert torch.equal(keys[0], keys[1]) and not torch.equal(keys[0], keys[2])


def test_initial_decays_lie_in_the_chosen_range(save_base, tmp_path):
    chosen = {"rglru_decay_range": [0.2, 0.4], "window": 5, "num_latents": 8}
    chosen["latent_input"] = "rglru"
    convert(save_base("llama"), tmp_path / "out", **chosen)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.config.rglru_decay_range == (0.2, 0.4)
    for layer in loaded.model.layers:
        rglru = layer.self_attn.latents.input.rglru
        decay = torch.exp(-8 * torch.nn.functional.softplus(rglru.theta))
        assert rglru.decay_range == (0.2, 0.4)
        assert decay.min() >= 0.2 - 1e-5 and decay.max() <= 0.4 + 1e-5


def test_the_command_takes_a_range_of_decays(save_base, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["convert", str(save_base("llama")), str(out), "--latents", "8"]
    assert main([*command, "--decay-range", "0.9", "0.2"]) == 2
    error = capsys.readouterr().err
    assert "rglru_decay_range must be two numbers with 0 < low <= high < 1" in error
    assert not out.exists()
    assert main([*command, "--decay-range", "0.2", "0.9"]) == 0
    assert AutoConfig.from_pretrained(out).rglru_decay_range == (0.2, 0.9)


def test_it_is_exported():
    assert latte.convert is convert


@pytest.mark.parametrize(
    ("family", "converted"),
    [("llama", [0, 1, 2, 3]), ("gemma2", [1, 3]), ("gemma3_text", [1, 3]), ("qwen2", [0, 1])],
)
def test_layers_with_a_window_of_their_own_stay(family, converted, save_base, tmp_path):
    folder = save_base(family)
    random = {"window": 5, "num_latents": 8, "initial": "random"}
    model = convert(folder, tmp_path / "out", **random)
    assert list(model.config.converted_layers) == converted and model.config.keep_layers == ()
    for at, layer in enumerate(model.model.layers):
        assert hasattr(layer.self_attn, "latents") == (at in converted)
    new = [
        name for name in load_file(tmp_path / "out" / "model.safetensors") if ".latents." in name
    ]
    assert {int(name.split(".")[2]) for name in new} == set(converted)
    hybrid = convert(folder, tmp_path / "hybrid", keep_layers=[converted[0]], **random)
    assert list(hybrid.config.converted_layers) == converted[1:]
    config = AutoConfig.from_pretrained(tmp_path / "hybrid")
    assert config.converted_layers == tuple(converted[1:])
    assert config.keep_layers == (converted[0],)


def test_a_conversion_is_loaded_with_fewer_converted_layers(save_base, tmp_path):
    """A hybrid of a finished conversion, as a model and as one side of a comparison."""
    folder = save_base("llama")
    convert(folder, tmp_path / "whole", window=5, num_latents=8, initial="random")
    hybrid, found = AutoModelForCausalLM.from_pretrained(
        tmp_path / "whole", converted_layers=(1, 3), output_loading_info=True
    )
    assert not found["unexpected_keys"] and not found["missing_keys"]
    assert hybrid.config.keep_layers == (0, 2)
    assert not hasattr(hybrid.model.layers[0].self_attn, "latents")
    given = convert(folder, window=5, num_latents=8, initial="random", keep_layers=[0, 2])
    given.load_state_dict(hybrid.state_dict())
    torch.testing.assert_close(hybrid(tokens()).logits, given(tokens()).logits)


@pytest.mark.parametrize(
    ("family", "keep", "message"),
    [
        ("mistral", [], "has a window of 9 tokens in every layer: it is linear in time already; e"),
        ("llama", [4], r"of full attention \(0 to 3\), got 4, and the base has 4 layers"),
        ("llama", [-1], r"keep_layers: expected .* \(0 to 3\), got -1, and the base has 4 layers"),
        ("gemma2", [0], r"\(1, 3\), got 0, which has a window of its own, of 9 tokens"),
        ("gemma2", [3, 1], r"got all of them \(1, 3\): nothing would be converted"),
    ],
)
def test_layers_that_cannot_be_kept(family, keep, message, save_base, tmp_path):
    folder = save_base(family)
    with pytest.raises(LatteError, match=message) as caught:
        convert(folder, tmp_path / "out", num_latents=8, keep_layers=keep)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_a_window_for_kept_layers_needs_some(save_base, tmp_path):
    folder = save_base("llama")
    message = "^kept_window .*: expected some there, got kept_window=9 without keep_layers$"
    with pytest.raises(LatteError, match=message):
        convert(folder, tmp_path / "out", num_latents=8, kept_window=9)
    assert not (tmp_path / "out").exists()


def test_the_command_keeps_layers(save_base, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["convert", str(save_base("llama")), str(out), "--latents", "8"]
    assert main([*command, "--keep-layers", "0,2"]) == 0
    assert "macchiato_llama, 2 of 4 layers converted, " in capsys.readouterr().out
    assert AutoConfig.from_pretrained(out).keep_layers == (0, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 0}, "local_window must be at least 1 key, got 0"),
        ({"num_latents": 6}, "num_latents must be a multiple of num_attention_heads, got num_late"),
        ({"window_probability": 1.0}, "window_probability must be between 0 and 1, got 1.0"),
        ({"rglru_decay_range": (0.5, 1)}, r"rglru_decay_range must be two .*, got \(0.5, 1\)"),
        ({"rglru_decay_range": 0.5}, "0 < low <= high < 1, got 0.5"),
        ({"latent_input": "lstm"}, "latent_input must be one of .*, got 'lstm'"),
        ({"seed": -1}, "seed: expected 0 to 4294967295, got -1"),
        ({"seed": 10**30}, "seed: expected 0 to 4294967295"),
        ({"num_sinks": -1}, "num_sinks must be 0 or more, got -1"),
    ],
)
def test_values_that_do_not_fit(arguments, message, save_base, tmp_path):
    with pytest.raises(LatteError, match=message) as caught:
        convert(save_base("llama"), tmp_path / "out", **arguments)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def _edit(folder, **values):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def _break(folder, kind):
    if kind == "architecture":
        _edit(folder, model_type="gpt2", architectures=["GPT2LMHeadModel"])
    elif kind == "vision":
        _edit(folder, model_type="gemma3")
    elif kind == "quantised":
        _edit(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    elif kind == "tokenizer":
        for file in folder.glob("tokenizer*"):
            file.unlink()
    elif kind == "config":
        (folder / "config.json").unlink()
    elif kind == "truncated":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:500])
    elif kind == "shape":
        _edit(folder, intermediate_size=40)
    elif kind == "layers":
        _edit(folder, num_hidden_layers=5)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("architecture", "of architecture 'gpt2', which is not supported; expected one of gemma, "),
        ("vision", "gemma3 with vision, which is not supported; expected its text model"),
        ("quantised", "is quantised; expected full-precision weights"),
        ("tokenizer", "has no tokenizer; expected tokenizer.json"),
        ("config", "config.json is missing"),
        ("truncated", "base .* (cannot be loaded|has damaged weights)"),
        ("shape", "has weights of another shape than its config: model.layers.0.mlp"),
        ("layers", "lacks weights: model.layers.4"),
    ],
)
def test_bases_that_cannot_be_converted(kind, message, save_base, tmp_path):
    folder = save_base("llama")
    _break(folder, kind)
    with pytest.raises(LatteError, match=message) as caught:
        convert(folder, tmp_path / "out", num_latents=8)
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["llama-base"]


def test_an_output_that_exists_is_left_alone(save_base, tmp_path):
    folder = save_base("llama")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    with pytest.raises(LatteError, match="out exists; expected the name of a new folder"):
        convert(folder, tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]


@pytest.mark.parametrize(
    "field",
    [
        {"num_hidden_layers": "two"},
        {"num_attention_heads": 0},
        {"dtype": "float99"},
        {"layer_types": ["x"]},
    ],
)
def test_a_base_whose_configuration_is_damaged(field, save_base, tmp_path):
    file = save_base("llama") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | field))
    with pytest.raises(LatteError, match="base .* cannot be read: ") as caught:
        convert(file.parent, tmp_path / "out")
    assert "\n" not in str(caught.value)
    with pytest.raises(LatteError, match="config.json is damaged or was edited: ") as caught:
        load_config(file.parent)
    assert "\n" not in str(caught.value)


def test_no_such_base(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # read when imported
    with pytest.raises(LatteError, match="base no/such-model cannot be read"):
        convert("no/such-model", tmp_path / "out")
    with pytest.raises(
        LatteError, match="base .*nothing does not exist; expected a folder, a GGUF"
    ):
        convert(tmp_path / "nothing", tmp_path / "out")
    assert not (tmp_path / "out").exists()
