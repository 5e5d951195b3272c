"""Models side by side: names, overrides of a config, and whose weights they are."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from latte.conversion import convert
from latte.errors import LatteError
from latte.lab.data import byte_tokenizer
from latte.lab.evaluate.sides import Side, side, sides


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    where = tmp_path_factory.mktemp("sides")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 16, "vocab_size": 260}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)
    model.save_pretrained(where / "base")
    byte_tokenizer().save_pretrained(where / "base")
    convert(where / "base", where / "converted", window=4, num_latents=4, latent_input="none")
    return where


def test_what_a_command_line_names():
    assert side("base=runs/x") == Side("base", "runs/x")
    found = side("ours#2=runs/x,mixing=window,local_window=152,keep_layers=[7,20]")
    assert (found.name, found.seed, found.folder) == ("ours", "2", "runs/x")
    assert dict(found.overrides) == {
        "mixing": "window", "local_window": 152, "keep_layers": [7, 20]
    }  # fmt: skip
    for wrong in ("base", "=x", "base=", "base=,mixing=window"):
        with pytest.raises(LatteError, match="expected NAME=PATH"):
            side(wrong)


def test_one_name_twice(folders):
    base = folders / "base"
    assert len(sides([f"a#0={base}", f"a#1={base}"])) == 2
    with pytest.raises(LatteError, match="two models are called 'a'"):
        sides([f"a={base}", f"a={base}"])
    with pytest.raises(LatteError, match="at least one model"):
        sides([])
    with pytest.raises(LatteError, match="does not exist"):
        sides(["a=nowhere"])


def test_overrides_make_a_control_of_the_same_weights(folders):
    ids = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(0))
    ours = f"x={folders / 'converted'}"
    with torch.no_grad():
        logits = {
            fields: side(ours + fields).load(dtype="float64")[0](ids).logits
            for fields in ("", ",mixing=window", ",mixing=window,local_window=40", ",mixing=base")
        }
        base = side(f"x={folders / 'base'}").load(dtype="float64")[0](ids).logits
    # A window that holds everything is the base's own attention.
    torch.testing.assert_close(logits[",mixing=window,local_window=40"], base)
    torch.testing.assert_close(logits[",mixing=base"], base)
    assert not torch.allclose(logits[",mixing=window"], base, atol=1e-2)
    assert not torch.allclose(logits[""], logits[",mixing=window"], atol=1e-5)
    same = [side(ours + fields).identity() for fields in ("", ",mixing=window")]
    assert same[0]["weights"] == same[1]["weights"] and same[1]["overrides"] == "mixing=window"
    assert side(f"x={folders / 'base'}").identity()["weights"] != same[0]["weights"]
    assert side(ours).load(dtype="float64")[0].dtype == torch.float64


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (",local_windoww=3", "local_windoww: the config of .* has no such field"),
        (",local_window=0", "local_window must be at least 1"),
        (",mixing=half", "mixing: expected one of"),
    ],
)
def test_overrides_that_cannot_be(folders, fields, message):
    with pytest.raises(LatteError, match=message):
        side(f"x={folders / 'converted'}{fields}").load()


def test_the_identity_of_a_gguf_file_is_its_content(tmp_path):
    digests = set()
    for content in (b"GGUF one", b"GGUF two"):
        (tmp_path / "base.gguf").write_bytes(content)
        digests |= {side(f"x={tmp_path / 'base.gguf'}").identity()["weights"]}
        digests |= {side(f"x={tmp_path}").identity()["weights"]}
    assert len(digests) == 2
