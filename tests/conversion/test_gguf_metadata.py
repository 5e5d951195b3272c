"""Keys of GGUF files: read, by default, or refused in one line (docs/reference/gguf.md).

Expected logits are those of Transformers' model with these values in its configuration. Expected
tokens are llama.cpp's.
"""

import importlib.metadata
import re
import struct
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from latte.errors import LatteError
from latte.lab.data.tokenizers import document_ends, load_tokenizer
from latte.lab.evaluate.checkpoint import load_checkpoint

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")

from latte.conversion.gguf import TRANSFORMERS, gguf_config, gguf_tokenizer, open_gguf  # noqa: E402
from tests.conversion.gguf_files import (  # noqa: E402
    MERGES,
    PIECES,
    SENTENCEPIECE,
    TOKENIZER,
    TOKENS,
    small_base,
    write_gguf,
)

VERSION = tuple(map(int, importlib.metadata.version("transformers").split(".")[:2]))
pytestmark = pytest.mark.skipif(
    VERSION < TRANSFORMERS, reason=f"GGUF files need transformers {TRANSFORMERS}, this is {VERSION}"
)
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "gguf.md"
IDS = torch.randint(3, len(TOKENS), (1, 40), generator=torch.Generator().manual_seed(0))
MIXED = [True, False, True, True, False, True]


def rotated(kind="default", **values):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0} | values}


def gemma3_rotated(base=1e6, local=10000.0, **values):
    full = {"rope_type": "default", "rope_theta": base} | values
    return {"rope_parameters": {"full_attention": full, "sliding_attention":
                                {"rope_type": "default", "rope_theta": local}}}  # fmt: skip


def kinds(flags):
    return ["sliding_attention" if each else "full_attention" for each in flags]


def scaled(kind=None, factor=None, **keys):
    """Keys of a Llama's rope.scaling."""
    return {"keys": {f"llama.rope.scaling.{name}": value for name, value in
                     ({"type": kind,
                     "factor": factor} | keys).items() if value is not None}}  # fmt: skip


LINEAR = rotated("linear", factor=4.0)
# Half of the heads' usual number, so that a head has the default width.
HALF = {"num_attention_heads": 2, "num_key_value_heads": 1}
NO_WIDTH = {"add_key_length": None, "add_value_length": None, "add_rope_dimension_count": None}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0}

# What it is -> (family, fields of the expected configuration, how the file differs).
READ = {
    "rope.freq_base": ("qwen2", rotated(rope_theta=500.0), {}),
    "no rope.freq_base": (
        "gemma3_text", gemma3_rotated(base=10000.0), {"add_rope_freq_base": None},
    ),
    "rope.freq_base_swa": (
        "gemma3_text", gemma3_rotated(local=500.0), {"keys": {"gemma3.rope.freq_base_swa": 500.0}},
    ),
    "scaling by type and factor": ("llama", LINEAR, scaled("linear", 4.0)),
    "scaling by rope.scaling.factor alone": ("llama", LINEAR, scaled(factor=4.0)),
    "scaling by rope.scale_linear": ("llama", LINEAR, {"keys": {"llama.rope.scale_linear": 4.0}}),
    "rope.scaling.factor before the older key": (
        "llama", LINEAR, {"keys": {"llama.rope.scale_linear": 2.0,
        "llama.rope.scaling.factor": 4.0}},
    ),
    "rope.scaling.type without a factor": ("llama", {}, scaled("linear")),
    "a factor of 0": ("llama", {}, scaled("linear", 0.0)),
    "rope.scaling.type none": ("llama", {}, scaled("none", 4.0)),
    "a window's layers are not scaled": (
        "gemma3_text", gemma3_rotated(rope_type="linear", factor=4.0),
        {"keys": {"gemma3.rope.scaling.factor": 4.0}},
    ),
    "yarn": (
        "llama", rotated("yarn", **YARN), scaled("yarn", 4.0, original_context_length=16),
    ),
    "yarn without rope.scaling.original_context_length": (
        "llama", rotated("yarn", **(YARN | {"original_max_position_embeddings": 64})),
        scaled("yarn", 4.0),
    ),
    "yarn without a factor": ("llama", {}, scaled("yarn")),
    "rope.scaling.attn_factor of yarn": (
        "llama", rotated("yarn", attention_factor=1.5 * 1.1386294, **YARN),
        scaled("yarn", 4.0, original_context_length=16, attn_factor=1.5),
    ),
    "yarn_beta_fast and yarn_beta_slow": (
        "llama", rotated("yarn", **(YARN | {"beta_fast": 8.0, "beta_slow": 2.0})),
        scaled("yarn", 4.0, original_context_length=16, yarn_beta_fast=8.0, yarn_beta_slow=2.0,
               yarn_ext_factor=1.0, yarn_attn_factor=1.1386294),
    ),
    "no attention.key_length": ("qwen3", HALF, NO_WIDTH),
    "no attention.key_length in Gemma 3": ("gemma3_text", HALF, NO_WIDTH),
    "no attention.key_length and rope.dimension_count": ("llama", HALF, NO_WIDTH),
    "no attention.head_count_kv": (
        "llama", {"num_key_value_heads": 4}, {"add_head_count_kv": None},
    ),
    "attention.head_count, attention.head_count_kv and feed_forward_length by layer": (
        "llama", {},
        {"add_head_count": [4, 4], "add_head_count_kv": [2, 2],
        "add_feed_forward_length": [96, 96]},
    ),
    "attention.layer_norm_rms_epsilon": ("llama", {"rms_norm_eps": 0.1}, {}),
    "attention.sliding_window": ("gemma2", {"sliding_window": 3}, {}),
    "no attention.sliding_window in Gemma 3": (
        "gemma3_text", {"layer_types": ["full_attention"] * 6}, {"add_sliding_window": None},
    ),
    "attention.sliding_window_pattern as a number": (
        "gemma3_text", {"layer_types": kinds([True, True, False] * 2)},
        {"add_sliding_window_pattern": 3},
    ),
    "attention.sliding_window_pattern by layer": (
        "gemma3_text", {"layer_types": kinds(MIXED)}, {"add_sliding_window_pattern": MIXED},
    ),
    "attention.sliding_window of others": (
        "qwen3", {}, {"keys": {"qwen3.attention.sliding_window": 3}},
    ),
    "attn_logit_softcapping and final_logit_softcapping": (
        "gemma2", {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0}, {},
    ),
    "no attn_logit_softcapping and no final_logit_softcapping": (
        "gemma2", {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        {"add_attn_logit_softcapping": None, "add_final_logit_softcapping": None},
    ),
    "final_logit_softcapping of Gemma 3": (
        "gemma3_text", {"final_logit_softcapping": 2.0},
        {"keys": {"gemma3.final_logit_softcapping": 2.0}},
    ),
    "output.weight": ("llama", {"tie_word_embeddings": False}, {}),
    "no output.weight": ("llama", {"tie_word_embeddings": True}, {}),
    "biases of attention": ("llama", {"attention_bias": True}, {}),
    "biases of ffn_": ("llama", {"mlp_bias": True}, {}),
    "general.alignment": ("llama", {}, {"add_custom_alignment": 64}),
    "Gemma 1": ("gemma", {}, {}),
    "keys that nothing depends on": (
        "llama", {},
        {"keys": {"llama.vocab_size": 7, "llama.attention.scale": 9.0, "general.name": "mistral",
                  "llama.rope.scaling.finetuned": True, "llama.tensor_data_layout": "other",
                  "tokenizer.ggml.add_sep_token": True,
                  "general.file_type": 999, "tokenizer.ggml.added_tokens": ["x"],
                  "tokenizer.huggingface.json": "{}", "mine.own": 1}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_a_key_that_is_read(name, tmp_path):
    family, fields, file = READ[name]
    layers = {} if family == "gemma3_text" else {"num_hidden_layers": 2}
    base = small_base(family, **(layers | fields))
    with torch.no_grad():
        for weight in (
            name_ for n, name_ in base.named_parameters() if "q_proj" in n or "k_proj" in n
        ):
            weight.mul_(3)  # so that what attention reads decides the logits
    path = write_gguf(tmp_path / "a.gguf", base, **file)
    with torch.no_grad():
        torch.testing.assert_close(
            load_checkpoint(path, "cpu")[0](IDS).logits, base(IDS).logits, rtol=1e-4, atol=1e-4
        )


def key(name, value):
    return {"keys": {name: value}}


def tokenizer(**changes):
    return {"tokenizer": {k: v for k, v in (TOKENIZER | changes).items() if v is not None}}


def pieces(**changes):
    return {"tokenizer": {k: v for k, v in (SENTENCEPIECE | changes).items() if v is not None}}


ZEROS = torch.zeros(8, 64)
# What it is -> (family, how the file differs, what the line says).
REFUSED = {
    "general.type": (
        "llama", {"add_type": "adapter"}, "general.type is 'adapter'; expected 'model'",
    ),
    "general.quantization_version": (
        "llama", {"add_quantization_version": 1},
        "general.quantization_version is 1; expected 2",
    ),
    "split.count": ("llama", key("split.count", 3), "part of a model split into 3 files; expected"),
    "no context_length": (
        "llama", {"add_context_length": None},
        "llama.context_length is missing; expected a whole number of at least 1",
    ),
    "no attention.layer_norm_rms_epsilon": (
        "qwen2", {"add_layer_norm_rms_eps": None},
        "qwen2.attention.layer_norm_rms_epsilon is missing; expected a number",
    ),
    "no embedding_length": (
        "llama", {"add_embedding_length": None}, "llama.embedding_length is miss",
    ),
    "embedding_length": (
        "llama", {"add_embedding_length": 128},
        r"token_embd.weight has the shape \[263, 64\]; expected \[263, 128\], by its metadata",
    ),
    "block_count": (
        "qwen2", {"add_block_count": 10**9}, "qwen2.block_count is 1000000000; expected 1",
    ),
    "fewer than block_count": (
        "llama", {"extra": {"blk.1.attn_norm.weight": torch.zeros(64)}},
        "llama.block_count is 1; expected 2, the number of layers with weights",
    ),
    "no attention.head_count": (
        "llama", {"add_head_count": None}, "llama.attention.head_count is mis",
    ),
    "attention.head_count_kv": (
        "llama", {"add_head_count_kv": 3},
        "llama.attention.head_count_kv is 3; expected a divisor of the 4 heads",
    ),
    "attention.head_count_kv by layer": (
        "llama", {"add_head_count_kv": [2, 1]},
        r"llama.attention.head_count_kv is \[2, 1\]; expected a whole number .* the same for all",
    ),
    "feed_forward_length by layer": (
        "llama", {"add_feed_forward_length": [96, 64]},
        r"llama.feed_forward_length is \[96, 64\]; expected a whole number .* the same for all 1",
    ),
    "attention.value_length": (
        "qwen3", {"add_value_length": 16}, "qwen3.attention.value_length is 16; expected 32",
    ),
    "rope.dimension_count": (
        "qwen2", key("qwen2.rope.dimension_count", 8),
        "qwen2.rope.dimension_count is 8; expected 16, the width of a head",
    ),
    **{
        name: ("gemma3_text", key(f"gemma3.{name}", 8), f"gemma3.{name} is 8; expected 32")
        for name in ("attention.key_length_swa", "attention.value_length_swa",
                     "rope.dimension_count_swa")
    },
    "attention.causal": (
        "qwen2", key("qwen2.attention.causal", False),
        "qwen2.attention.causal is False; expected True",
    ),
    "expert_count": ("llama", key("llama.expert_count", 8), "llama.expert_count is 8; expected 0"),
    "expert_used_count": (
        "llama", key("llama.expert_used_count", 2), "expert_used_count is 2; exp",
    ),
    "nextn_predict_layers": (
        "qwen3", key("qwen3.nextn_predict_layers", 1), "layers is 1; expected 0",
    ),
    "attention.sliding_window": (
        "gemma2", {"add_sliding_window": 0},
        "gemma2.attention.sliding_window is 0; expected a whole",
    ),
    "attention.sliding_window_pattern": (
        "gemma3_text", {"add_sliding_window_pattern": [True]},
        r"pattern is \[True\]; expected a whole number, or one flag for each of the 6",
    ),
    "attn_logit_softcapping": (
        "gemma2", {"add_attn_logit_softcapping": 0.0},
        "gemma2.attn_logit_softcapping is 0.0; expected a number above 0",
    ),
    "rope.freq_base": (
        "llama", {"add_rope_freq_base": float("nan")},
        "llama.rope.freq_base is nan; expected a numb",
    ),
    "a value of another type": (
        "llama", {"add_rope_freq_base": None} | key("llama.rope.freq_base", "10000"),
        "llama.rope.freq_base is '10000'; expected a number",
    ),
    "rope.freq_base_swa of Gemma 2": (
        "gemma2", key("gemma2.rope.freq_base_swa", 5.0),
        "gemma2.rope.freq_base_swa is 5.0; expected",
    ),
    "rope.scaling.type": (
        "llama", scaled("longrope", 4.0), "type is 'longrope'; expected 'none', 'linear' or 'yarn'",
    ),
    "a factor below 0": (
        "llama", scaled(factor=-2.0), "rope.scaling.factor is -2.0; expected a numb",
    ),
    "rope.scaling.attn_factor": (
        "llama", scaled(factor=2.0, attn_factor=1.5),
        "rope.scaling.attn_factor is 1.5; expected 1.0",
    ),
    "rope.scaling.yarn_ext_factor": (
        "llama", scaled("yarn", 4.0, yarn_ext_factor=0.5), "yarn_ext_factor is 0.5; expected 1",
    ),
    "rope.scaling.yarn_attn_factor": (
        "llama", scaled("yarn", 4.0, yarn_attn_factor=2.0),
        "yarn_attn_factor is 2.0; expected 1 or 1.13863",
    ),
    "rope_freqs.weight of another length": (
        "llama", {"extra": {"rope_freqs.weight": torch.ones(8)}}, "that are not Llama 3's",
    ),
    "rope_freqs.weight and a factor": (
        "llama", {"extra": {"rope_freqs.weight": torch.ones(16)}} | scaled(factor=4.0),
        "scales its rotary frequencies twice, by llama.rope.scaling.factor and by rope_freq",
    ),
    "rope_freqs.weight of others": (
        "qwen2", {"extra": {"rope_freqs.weight": torch.ones(8)}}, "that are not Llama 3's",
    ),
    "blk.N.attn_q_norm.weight in a Llama": (
        "llama", {"extra": {"blk.0.attn_q_norm.weight": torch.ones(32)}},
        "has weights that a llama decoder of Transformers does not know: blk.0.attn_q_norm.weight",
    ),
    "output.bias": (
        "qwen2", {"extra": {"output.bias": torch.ones(263)}},
        "qwen2 decoder .* not know: output.bias",
    ),
    "blk.N.ffn_gate_exps.weight": (
        "llama", {"extra": {"blk.0.ffn_gate_exps.weight": ZEROS}}, "not know: blk.0.ffn_gate_exps",
    ),
    "no token_embd.weight": (
        "llama", {"extra": {"token_embd.weight": None}}, "lacks weights: token_embd.weight",
    ),
    "tokens beyond the rows": (
        "llama", {"extra": {"token_embd.weight": ZEROS}},
        "ggml.tokens has 263 tokens; expected at most 8, the rows of token_embd.weight",
    ),
    "no tokenizer.ggml.tokens": ("llama", {"tokenizer": None}, "has no tokenizer"),
    "the same of tokenizer.ggml.tokens twice": (
        "llama", tokenizer(token_list=[*TOKENS[:-1], "a"]), "tokens has 'a' twice; expected once",
    ),
    "tokenizer.ggml.model": (
        "llama", tokenizer(model="bert"),
        "tokenizer.ggml.model is 'bert'; expected 'llama' .* or 'gpt2'",
    ),
    "no tokenizer.ggml.model": (
        "llama", tokenizer(model=None), "tokenizer.ggml.model is missing; exp",
    ),
    "no tokenizer.ggml.pre": (
        "llama", tokenizer(pre=None), "ggml.pre is missing; expected one of gpt-2",
    ),
    "tokenizer.ggml.pre": (
        "llama", tokenizer(pre="falcon"), "ggml.pre is 'falcon'; expected one of gpt",
    ),
    "no tokenizer.ggml.merges": (
        "llama", tokenizer(token_merges=None),
        "tokenizer.ggml.merges is missing; expected the pairs",
    ),
    "tokenizer.ggml.merges": (
        "llama", tokenizer(token_merges=["t h", "z q"]),
        "ggml.merges has 'z q'; expected a pair of tok",
    ),
    "tokenizer.ggml.token_type": (
        "llama", tokenizer(token_types=[3, 3]),
        "token_type is .3, 3.; expected one type for each of the",
    ),
    "no tokenizer.ggml.scores": (
        "llama", pieces(token_scores=None),
        "tokenizer.ggml.scores is missing; expected one number for",
    ),
    "tokenizer.ggml.scores that are equal": (
        "llama", pieces(token_scores=[0.0] * len(PIECES)),
        r"tokenizer.ggml.scores is \[0.0, 0.0, .*; expected different scores: they decide",
    ),
    "tokenizer.ggml.add_bos_token": (
        "llama", tokenizer(add_bos_token=None) | key("tokenizer.ggml.add_bos_token", 1),
        "tokenizer.ggml.add_bos_token is 1; expected true or false",
    ),
    "tokenizer.ggml.add_bos_token without a token": (
        "llama", tokenizer(add_bos_token=True, bos_token_id=None),
        "tokenizer.ggml.bos_token_id is missing; expected a token: it is added to every text",
    ),
    "tokenizer.ggml.add_eos_token without a token": (
        "llama", tokenizer(add_eos_token=True, eos_token_id=None),
        "ggml.eos_token_id is missing; exp",
    ),
    **{
        f"tokenizer.ggml.{name}": (
            "llama",
            key(f"tokenizer.ggml.{name}", -1) if short is None else tokenizer(**{short: 263}),
            f"tokenizer.ggml.{name} is (263|-1); expected the number of a token, 0 to 262",
        )
        for name, short in {
            "bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "eot_token_id": None,
            "eom_token_id": None, "unknown_token_id": "unk_token_id",
            "padding_token_id": "pad_token_id",
        }.items()
    },
    "a line end in a name": (
        "llama", {"extra": {"blk.0.ffn\n_up.weight": ZEROS}}, r"not know: blk.0.ffn\\n_up.weight$",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_key_that_is_refused_in_one_line(name, tmp_path):
    family, file, message = REFUSED[name]
    layers = {} if family == "gemma3_text" else {"num_hidden_layers": 1}
    sizes = {"vocab_size": len(PIECES)} if name.endswith(("scores", "equal")) else {}
    path = write_gguf(tmp_path / "a.gguf", small_base(family, **layers, **sizes), **file)
    with pytest.raises(LatteError, match=message) as caught:
        load_checkpoint(path, "cpu")
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def _bytes(path, change):
    content = path.read_bytes()
    path.write_bytes(change(content))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:4] + struct.pack(">I", 3) + x[8:],
        "big-endian file; expected a little-endian"),
        (lambda x: x.replace(b"blk.0.ffn_up", b"blk.0.attn_q"), "it has blk.0.attn_q.weight twice"),
        (lambda x: x.replace(b"my.one", b"my.two"), "damaged or cut short: it has my.two twice"),
        (
            lambda x: x.replace(b"general.alignmenT" + struct.pack("<II", 4, 32),
                                b"general.alignment" + struct.pack("<II", 4, 24)),
            "general.alignment is 24; expected a power of two",
        ),
        (
            lambda x: x.replace(b"general.alignmenT" + struct.pack("<II", 4, 32),
                                b"general.alignment" + struct.pack("<II", 4, 0)),
            "general.alignment is 0; expected a whole number of at least 1",
        ),
        (lambda x: _type_of(x, 99),
        "output_norm.weight is of type 99; expected one that the package"),
        (lambda x: _type_of(x, 28),
        "output_norm.weight is of type F64; expected one that the packag"),
        (lambda x: _type_of(x, 2), "output_norm.weight has shape|begins at byte"),
    ],
)  # fmt: skip
def test_headers_that_are_refused(change, message, tmp_path):
    keys = {"my.one": 1, "my.two": 2}
    path = tmp_path / "a.gguf"
    write_gguf(path, small_base("llama", num_hidden_layers=1), keys=keys,
               add_uint32=("general.alignmenT", 32))  # fmt: skip
    with pytest.raises(LatteError, match=message) as caught:
        load_checkpoint(_bytes(path, change), "cpu")
    assert "\n" not in str(caught.value)


def _type_of(content, number):
    """The bytes of a file with another type of a one-dimensional weight."""
    at = content.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    return content[:at] + struct.pack("<I", number) + content[at + 4 :]


# --- tokenizers ---------------------------------------------------------------------------------


def names_of(text, path, **options):
    loaded = load_tokenizer(path)
    return loaded.convert_ids_to_tokens(loaded(text, **options).input_ids)


@pytest.fixture(scope="module")
def sentencepiece():
    return small_base("llama", vocab_size=len(PIECES), num_hidden_layers=1)


# What it is -> (changes of the tokenizer, text, its tokens in llama.cpp).
PIECES_OF = {
    "scores decide": ({}, "tot otto", ["<s>", "▁", "to", "t", "▁", "ot", "to"]),
    "a space begins a text that has one": ({}, " to", ["<s>", "▁▁", "to"]),
    "a space follows a control token": ({}, "x</s>to", ["<s>", "▁x", "</s>", "▁", "to"]),
    "a user's token is whole": ({}, "a<b>to", ["<s>", "▁", "a", "<b>", "▁", "to"]),
    "unknown characters are bytes": ({}, "é", ["<s>", "▁", "<0xC3>", "<0xA9>"]),
    "the unknown token": ({}, "<unk>a", ["<s>", "<unk>", "▁", "a"]),
    "a byte's name is text": ({}, "<0x4", ["<s>", "▁", "<", "<0x30>", "x", "<0x34>"]),
    "nothing": ({}, "", ["<s>"]),
    "add_space_prefix": ({"add_space_prefix": False}, " to", ["<s>", "▁", "to"]),
    "add_space_prefix after a token": (
        {"add_space_prefix": False}, "x</s>to", ["<s>", "x", "</s>", "to"],
    ),
    "add_bos_token": ({"add_bos_token": False}, "to", ["▁", "to"]),
    "add_eos_token": ({"add_eos_token": True}, "to", ["<s>", "▁", "to", "</s>"]),
    "bos_token_id": ({"bos_token_id": 3}, "to", ["<pad>", "▁", "to"]),
    "merges and remove_extra_whitespaces are of others": (
        {"token_merges": ["o t"], "remove_extra_whitespaces": True}, "  to", ["<s>", "▁▁", "▁",
        "to"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PIECES_OF)
def test_tokens_of_sentencepiece(name, sentencepiece, tmp_path):
    changes, text, expected = PIECES_OF[name]
    path = write_gguf(tmp_path / "a.gguf", sentencepiece, template=None, **pieces(**changes))
    assert names_of(text, path) == expected
    loaded = load_tokenizer(path)
    if "<" not in text:
        assert loaded.decode(loaded(text).input_ids, skip_special_tokens=True) == text
    loaded.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again(text).input_ids == loaded(text).input_ids


THE = ["the", "Ġ", "t", "h", "e"]
# What it is -> (changes of the tokenizer, text, its tokens in llama.cpp).
BYTES_OF = {
    "add_bos_token": ({"add_bos_token": True}, "the", ["<|im_start|>", "the"]),
    "add_eos_token": ({"add_eos_token": True}, "the", ["the", "<|endoftext|>"]),
    "no add_bos_token": ({"add_bos_token": None}, "the", ["the"]),
    "no add_bos_token of llama-bpe": (
        {"add_bos_token": None, "pre": "llama-bpe"}, "the", ["<|im_start|>", "the"],
    ),
    "a word that is a token": (
        {"pre": "llama-bpe", "token_merges": ["Ġ Ġ"], "add_bos_token": False}, "the", ["the"],
    ),
    "a word that is a token, of others": (
        {"pre": "qwen2", "token_merges": ["Ġ Ġ"]}, "the", ["t", "h", "e"],
    ),
    "token_type user defined": (
        {"token_types": [3, 3, 3, *[1] * 256, 1, 1, 4, 1]}, "x the", ["x", "Ġ", "the"],
    ),
    "no token_type": ({"token_types": None}, "a<|im_end|>", ["a", "<|im_end|>"]),
    "token_type control": (
        {"token_list": ["<｜begin▁of▁sentence｜>", *TOKENS[1:]], "eos_token_id": 0},
        "a<｜begin▁of▁sentence｜>", ["a", "<｜begin▁of▁sentence｜>"],
    ),
    "add_space_prefix is of others": ({"add_space_prefix": True}, "the", ["the"]),
    "smollm": ({}, "a  12", ["a", "ĠĠ", "1", "2"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def byte_level():
    return small_base("llama", num_hidden_layers=1)


@pytest.mark.parametrize("name", BYTES_OF)
def test_tokens_of_byte_level_vocabularies(name, byte_level, tmp_path):
    changes, text, expected = BYTES_OF[name]
    path = write_gguf(tmp_path / "a.gguf", byte_level, **tokenizer(**changes))
    assert names_of(text, path) == expected
    loaded = load_tokenizer(path)
    assert len(loaded) == len(TOKENS)


# What it is -> (tokenizer, further keys, (bos, eos, unk, pad), stop tokens).
ENDS = {
    "defaults of SentencePiece": (SENTENCEPIECE, {}, ("<s>", "</s>", "<unk>", None), 2),
    "given": (
        SENTENCEPIECE | {"bos_token_id": 2, "eos_token_id": 1, "unk_token_id": 3,
        "pad_token_id": 0}, {},
        ("</s>", "<s>", "<pad>", "<unk>"), [1, 2],
    ),
    "defaults of byte-level vocabularies": (
        TOKENIZER | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}, {},
        (None, None, None, None), [0, 2],
    ),
    "eot_token_id and eom_token_id": (
        TOKENIZER, {"tokenizer.ggml.eot_token_id": 100, "tokenizer.ggml.eom_token_id": 101},
        ("<|endoftext|>", "<|endoftext|>", None, "<|im_end|>"), [0, 2, 100, 101],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_special_tokens(name, sentencepiece, byte_level, tmp_path):
    given, keys, (bos, eos, unk, pad), stops = ENDS[name]
    base = sentencepiece if given["model"] == "llama" else byte_level
    given = {key: value for key, value in given.items() if value is not None}
    path = write_gguf(tmp_path / "a.gguf", base, tokenizer=given, keys=keys)
    file = open_gguf(path)
    loaded, config = gguf_tokenizer(file), gguf_config(file)
    assert (loaded.bos_token, loaded.eos_token, loaded.unk_token, loaded.pad_token) == (
        bos, eos, unk, pad,
    )  # fmt: skip
    assert config.eos_token_id == stops
    assert (config.bos_token_id, config.pad_token_id) == (loaded.bos_token_id, loaded.pad_token_id)


def test_several_chat_templates(byte_level, tmp_path):
    named = [{"name": "default", "template": "{{ eos_token }}"}, {"name": "rag", "template": "b"}]
    path = write_gguf(tmp_path / "a.gguf", byte_level, template=named,
                      **tokenizer(eos_token_id=1, bos_token_id=None))  # fmt: skip
    loaded = load_tokenizer(path)
    assert sorted(loaded.chat_template) == ["default", "rag"]
    chat = [{"role": "user", "content": "a"}]
    assert loaded.apply_chat_template(chat, tokenize=False, chat_template="rag") == "b"
    path = write_gguf(tmp_path / "b.gguf", byte_level, template=named[:1])
    assert load_tokenizer(path).chat_template == "{{ eos_token }}"


def test_an_empty_token_has_a_name(byte_level, tmp_path):
    path = write_gguf(tmp_path / "a.gguf", byte_level,
                      **tokenizer(token_list=["", *TOKENS[1:]],
                      token_merges=list(MERGES)))  # fmt: skip
    assert load_tokenizer(path).convert_ids_to_tokens(0) == "[EMPTY_0]"


def test_a_vocabulary_without_weights_is_a_tokenizer(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "a.gguf"), "llama")
    for name, value in SENTENCEPIECE.items():
        kind = {"model": "tokenizer_model", "pre": "tokenizer_pre"}.get(name, name)
        getattr(writer, f"add_{kind}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert document_ends(load_tokenizer(tmp_path / "a.gguf")) == (1, 2)
    with pytest.raises(LatteError, match="llama.block_count is missing; expected a whole"):
        load_checkpoint(tmp_path / "a.gguf")


# --- the page -----------------------------------------------------------------------------------


def test_every_key_of_the_page_is_tested():
    rows = re.findall(r"(?m)^\| (`.*?) \|", PAGE.read_text(encoding="utf-8"))
    keys = {key for row in rows for key in re.findall(r"`([^`]+)`", row)}
    code, *others = (
        Path(__file__).with_name(name).read_text(encoding="utf-8")
        for name in (Path(__file__).name, "gguf_files.py", "test_gguf.py")
    )
    assert len(keys) > 50
    for each in keys:
        name = each.removeprefix("A.").removeprefix("tokenizer.ggml.")
        assert name in code or name.rpartition(".")[2] in code + "".join(others), each
