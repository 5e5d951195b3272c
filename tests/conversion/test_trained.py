"""Trained latents as a file: the same model from the base, and no other base."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from latte.cli import main
from latte.conversion import apply_latents, convert, save_latents
from latte.errors import LatteError
from latte.models.tensor_file import read_tensors
from tests.conversion.bases import base, converted, tokens

FIELDS = {"latent_input": "none", "num_sinks": 2, "delay_latents": True, "joint_softmax": True}


@pytest.fixture
def folder(tmp_path):
    """The base, fp64, and a tokeniser."""
    place = tmp_path / "base"
    base("qwen3").save_pretrained(place)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(50)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(place)
    return place


def test_base_and_latents_are_the_model(folder, tmp_path):
    model, file = converted("qwen3", **FIELDS), tmp_path / "latents.safetensors"
    save_latents(model, file, dtype=torch.float64)
    ids = tokens()
    expected = model(ids).logits
    found = apply_latents(folder, file, tmp_path / "out")
    # The new weights of a loaded model are fp32, unless the base is fp64.
    assert found.dtype == torch.float64
    torch.testing.assert_close(found(ids).logits, expected, rtol=1e-11, atol=1e-11)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    torch.testing.assert_close(loaded(ids).logits, expected, rtol=1e-11, atol=1e-11)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    # The file has no weight of the base.
    assert file.stat().st_size < sum(p.numel() * 8 for p in model.parameters()) / 2


def test_more_layers_may_keep_full_attention(folder, tmp_path):
    model, file = converted("qwen3", **FIELDS), tmp_path / "latents.safetensors"
    save_latents(model, file, dtype=torch.float64)
    hybrid = converted("qwen3", **FIELDS, converted_layers=(0, 3))
    hybrid.load_state_dict(model.state_dict(), strict=False)
    found = apply_latents(folder, file, keep_layers=[1, 2])
    assert found.config.converted_layers == (0, 3)
    ids = tokens()
    torch.testing.assert_close(found(ids).logits, hybrid(ids).logits, rtol=1e-11, atol=1e-11)
    found = apply_latents(folder, file, keep_layers=[1, 2], kept_window=9)
    assert found.config.kept_window == 9 and found.model.layers[1].self_attn.window == 9
    narrow = tmp_path / "narrow.safetensors"
    save_latents(found, narrow)
    assert apply_latents(folder, narrow).config.kept_window == 9
    for words, window in ((["--kept-window", "all"], None), ([], 9)):
        out = tmp_path / f"kept-{window}"
        assert main(["convert", str(folder), str(out), "--trained", str(narrow), *words]) == 0
        assert AutoConfig.from_pretrained(out).kept_window == window
    # With a window over the whole text the latents have nothing to read: it is the base.
    wide = apply_latents(folder, file, window=len(ids[0]))
    assert wide.config.local_window == len(ids[0])
    base = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    torch.testing.assert_close(wide(ids).logits, base(ids).logits, rtol=1e-11, atol=1e-11)
    with pytest.raises(LatteError, match="window"):
        apply_latents(folder, file, window=0)


def test_as_many_tokens_are_kept_as_asked_for(folder, tmp_path):
    def scored(**kept):
        return converted("qwen3", **FIELDS, local_window=5, kept_block=4, **kept)

    file, ids = tmp_path / "latents.safetensors", tokens(length=40)
    model = scored(kept_tokens=3)
    save_latents(model, file, dtype=torch.float64)
    for number in (3, 1, [0, 2, 3, 0], 0):
        wanted = scored(kept_tokens=number)
        wanted.load_state_dict(model.state_dict(), strict=False)
        found = apply_latents(folder, file, tmp_path / f"{number}", kept_tokens=number)
        torch.testing.assert_close(found(ids).logits, wanted(ids).logits, rtol=1e-11, atol=1e-11)
    unscored = tmp_path / "unscored.safetensors"
    save_latents(converted("qwen3", **FIELDS), unscored)
    some = tmp_path / "some.safetensors"
    save_latents(scored(kept_tokens=(3, 0, 3, 3)), some)
    for path, layer in ((unscored, 0), (some, 1)):
        said = f"no scores of tokens in layer {layer}: expected kept_tokens=0 there, got 3"
        with pytest.raises(LatteError, match=said):
            apply_latents(folder, path, kept_tokens=3)
    out = tmp_path / "out"
    given = ["convert", str(folder), str(out), "--trained", str(file), "--kept-tokens", "2,0,0,1"]
    assert main(given) == 0
    assert AutoConfig.from_pretrained(out).kept_tokens in ([2, 0, 0, 1], (2, 0, 0, 1))


def test_weights_in_bf16_are_the_default(folder, tmp_path):
    model, file = converted("qwen3", **FIELDS), tmp_path / "latents.safetensors"
    save_latents(model, file)
    found = apply_latents(folder, file)
    for name, x in model.state_dict().items():
        expected = x.bfloat16().double() if ".latents." in name else x
        assert torch.equal(found.state_dict()[name], expected), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_low_rank_updates_of_the_base_are_kept(folder, tmp_path, dtype):
    model, file = converted("qwen3", **FIELDS).to(dtype), tmp_path / "latents.safetensors"
    torch.manual_seed(1)
    attention = model.model.layers[1].self_attn
    with torch.no_grad():
        for matrix in (attention.q_proj.weight, attention.o_proj.weight):
            up, down = torch.randn(matrix.shape[0], 3), torch.randn(3, matrix.shape[1])
            matrix += 0.1 * (up @ down).to(dtype)
    save_latents(model, file, base=folder, rank=3, dtype=torch.float64)
    found = apply_latents(folder, file, dtype=dtype).state_dict()
    for name, x in model.state_dict().items():
        # In bf16 the sum was rounded: the update from the rounded sum differs a little.
        rounding = 1e-7 + 2 * torch.finfo(dtype).eps * x.abs().max()
        torch.testing.assert_close(found[name].to(x.dtype), x, rtol=0, atol=rounding.item())
    with pytest.raises(LatteError, match="q_proj.weight differs from the base's by more than"):
        save_latents(model, tmp_path / "low", base=folder, rank=1)
    assert not (tmp_path / "low").exists()


def test_another_base_is_refused(folder, tmp_path):
    model, file = converted("qwen3", **FIELDS), tmp_path / "latents.safetensors"
    with torch.no_grad():  # as training of q, k, v and o does
        model.model.layers[1].self_attn.q_proj.weight += 1e-3
    save_latents(model, file)
    with pytest.raises(LatteError, match="are for another base: .* has other weights"):
        apply_latents(folder, file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_base_of_another_shape_is_refused(folder, tmp_path):
    file = tmp_path / "latents.safetensors"
    last = base("qwen3").config.num_hidden_layers - 1
    save_latents(convert(folder, window=5, keep_layers=[last]), file)
    config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers, config.layer_types = last, config.layer_types[:last]
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "smaller")
    with pytest.raises(LatteError, match="latents .* are for another base, base: keep_layers"):
        apply_latents(tmp_path / "smaller", file)
    with pytest.raises(LatteError, match="^base .*gone does not exist"):
        apply_latents(tmp_path / "gone", file)


def test_files_that_are_no_latents(folder, tmp_path):
    file = tmp_path / "latents.safetensors"
    with pytest.raises(LatteError, match="do not exist; expected a file written by save_latents"):
        apply_latents(folder, file)
    file.write_bytes(b"no")
    with pytest.raises(LatteError, match="truncated or damaged"):
        apply_latents(folder, file)
    save_file({"x": torch.zeros(1)}, file)
    with pytest.raises(LatteError, match="found another kind of file"):
        apply_latents(folder, file)
    with pytest.raises(LatteError, match="latents .* exists and is a file"):
        save_latents(converted("qwen3"), file)
    with pytest.raises(LatteError, match="expected a converted model, got Qwen3ForCausalLM"):
        save_latents(base("qwen3"), tmp_path / "other")


def replace_by(change):
    """Harm: another tensor in the place of one."""
    return lambda held, about, name: held.update({name: change(held[name])})


def about(**strings):
    return lambda held, about, name: about.update(strings)


WEIGHT = "model.layers.1.self_attn.latents.q_proj.weight"
UPDATE = "model.layers.1.self_attn.q_proj.weight"
HARMS = {
    "no latents": (WEIGHT, lambda held, about, name: held.pop(name)),
    "no sample": ("sample", lambda held, about, name: held.pop(name)),
    "half an update": (f"{UPDATE}.down", lambda held, about, name: held.pop(name)),
    "a name": (f"{UPDATE}.up", lambda held, about, name: held.update({"x.up": held.pop(name)})),
    "a dtype": (WEIGHT, replace_by(lambda x: x.to(torch.int32))),
    "an update's dtype": (f"{UPDATE}.up", replace_by(lambda x: x.to(torch.int32))),
    "the sample's dtype": ("sample", replace_by(lambda x: x.to(torch.float64))),
    "a shape": (WEIGHT, replace_by(lambda x: torch.cat([x, x], -1))),
    "an update's shape": (f"{UPDATE}.up", replace_by(lambda x: torch.cat([x, x]))),
    "an update's rank": (f"{UPDATE}.down", replace_by(lambda x: x[:1])),
    "no dimension": (f"{UPDATE}.up", replace_by(lambda x: x[0, 0])),
    "not a number": (WEIGHT, replace_by(lambda x: x * torch.nan)),
    "fields that are no JSON": ("", about(fields="{")),
    "fields that are a list": ("", about(fields="[]")),
    "an unknown field": ("", about(fields='{"keep_layers": [], "what": 1}')),
    "a field's type": ("", about(fields='{"keep_layers": [], "num_sinks": "two"}')),
    "layers": ("", about(fields='{"keep_layers": "all"}')),
    "the base's dtype": ("", about(dtype="no")),
    "a dtype of whole numbers": ("", about(dtype="int64")),
    "no fields": ("", lambda held, about, name: about.pop("fields")),
}


@pytest.mark.parametrize("checksum", [True, False])
def test_damaged_latents_are_refused_in_one_line(folder, tmp_path, checksum):
    """Also a file of format 1, which has no checksum."""
    model, file = converted("qwen3", **FIELDS), tmp_path / "latents.safetensors"
    with torch.no_grad():
        matrix = model.model.layers[1].self_attn.q_proj.weight
        matrix += 0.1 * torch.outer(
            *(torch.ones(size, dtype=matrix.dtype) for size in matrix.shape)
        )
    save_latents(model, file, base=folder, rank=2, dtype=torch.float64)
    with safe_open(file, framework="pt") as opened:
        strings, tensors = opened.metadata(), {x: opened.get_tensor(x) for x in opened.keys()}
    if not checksum:
        del strings["sha256"]
        strings["format"] = "latte latents 1"
        save_file(tensors, file, strings)
        assert torch.equal(
            apply_latents(folder, file).state_dict()[WEIGHT], model.state_dict()[WEIGHT]
        )
    for harm, (name, change) in HARMS.items():
        said, held = dict(strings), dict(tensors)
        change(held, said, name)
        save_file({name: x.contiguous() for name, x in held.items()}, file, said)
        with pytest.raises(LatteError, match="checksum" if checksum else "latents") as error:
            apply_latents(folder, file, tmp_path / "out")
        assert "\n" not in str(error.value), harm
        assert not (tmp_path / "out").exists()


def test_the_shipped_latents_are_whole():
    shipped = sorted((Path(__file__).parents[2] / "recipes").rglob("*.safetensors"))
    assert shipped
    for file in shipped:
        about, _ = read_tensors(file, "latents", "save_latents")
        assert about["format"] == "latte latents 2"  # with a checksum


def test_the_command(folder, tmp_path, capsys):
    file, out = tmp_path / "latents.safetensors", tmp_path / "out"
    save_latents(converted("qwen3", **FIELDS), file)
    given = ["convert", str(folder), str(out), "--trained", str(file)]
    assert main([*given, "--latents", "7"]) == 2
    assert (
        "expected only --window, --keep-layers, --kept-window, --kept-tokens, --kept-half-life,"
        " --kept-dtype, --kept-range, --dtype, --weights, got --latents" in capsys.readouterr().err
    )
    assert main([*given, "--recipe", "x.yaml"]) == 2
    assert "--trained and --recipe: expected one of them" in capsys.readouterr().err
    assert main([*given, "--keep-layers", "2", "--window", "9"]) == 0
    assert "3 of 4 layers converted" in (said := capsys.readouterr().out)
    assert f"new ones, from {file}" in said
