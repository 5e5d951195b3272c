"""The generation benchmark runs on tiny checkpoints, and its arithmetic is right."""

import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

from experiments.benchmarks import generation, llama_cpp, records
from latte.models import LatteForCausalLM, preset_config


def test_two_checkpoints_side_by_side(tmp_path, quick):
    quick(generation)
    figure = (tmp_path / "generation.png").read_bytes()
    assert figure.startswith(b"\x89PNG") and len(figure) < 200_000
    rows = records.read_rows(tmp_path / "generation.csv")
    assert [(row["model"], row["context"]) for row in rows] == [
        (name, str(context)) for context in generation.QUICK_CONTEXTS for name in ("latte", "llama")
    ]
    sizes = {(row["model"], int(row["context"])): int(row["cache_bytes"]) for row in rows}
    short, long = generation.QUICK_CONTEXTS
    assert sizes["latte", short] == sizes["latte", long]
    assert sizes["llama", short] == 2 * 2 * 32 * 4 * short  # keys and values, layers, width, fp32
    assert sizes["llama", long] == sizes["llama", short] * long // short
    page = (tmp_path / "generation.md").read_text()
    each = [line for line in page.splitlines() if line.startswith(("| latte", "| llama"))]
    assert each[-2:] == ["| latte | 0 |", f"| llama | {2 * 2 * 32 * 4} |"]
    for row in rows:
        assert 0 < float(row["p10_ms"]) <= float(row["median_ms"]) <= float(row["p90_ms"])
        assert float(row["peak_process_mb"]) > float(row["peak_net_mb"]) >= 0
        assert float(row["weights_ms"]) > 0
        assert row["torch"] == torch.__version__ and row["dtype"] == "float32" and row["date"]


def test_a_model_s_weights_are_read_whole():
    model = LatteForCausalLM(preset_config("latte++", "tiny", vocab_size=64)).bfloat16()
    read = generation.Reader(model).numbers
    assert 0 <= sum(x.nbytes for x in model.parameters()) - read.nbytes < 4


def test_bytes_of_any_cache():
    model = LatteForCausalLM(preset_config("latte++", "tiny", vocab_size=64)).eval()
    with torch.no_grad():
        cache = model(torch.zeros(1, 3, dtype=torch.long), use_cache=True).past_key_values
    assert generation.cache_bytes(cache) == cache.nbytes
    plain = DynamicCache()
    plain.update(torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4), 0)
    assert generation.cache_bytes(plain) == 2 * 2 * 5 * 4 * 4


def test_prefilling_in_segments_is_prefilling(monkeypatch):
    """The cache has seen all the tokens, whatever the segment, and a copy is left alone."""
    torch.manual_seed(0)
    model = LatteForCausalLM(preset_config("latte-r-swa++", "tiny", vocab_size=64)).eval()
    with torch.no_grad():
        cache = generation.feed(model, None, 13, 5, 0)
        side = generation.Generator(model, cache)
        side()
        assert (cache.get_seq_length(), side.cache.get_seq_length()) == (13, 14)
        assert generation.feed(model, cache, 7, 4, 13).get_seq_length() == 20


class OfLlamaCpp:
    """llama_cpp.Llama, as far as it is used: remembers what it has read."""

    ctx = model = None

    def __init__(self, file, *, n_ctx, n_threads, n_threads_batch, verbose):
        self.most, self.read, self.n_tokens = n_ctx, [], 0

    def n_vocab(self):
        return 50

    def eval(self, tokens):
        self.read = self.read[: self.n_tokens] + tokens
        self.n_tokens = len(self.read)
        assert self.n_tokens <= self.most


def test_llama_cpp_is_a_side(monkeypatch):
    made = []
    module = SimpleNamespace(
        Llama=lambda *x, **y: made.append(OfLlamaCpp(*x, **y)) or made[-1],
        llama_model_n_params=lambda model: 7,
        llama_state_seq_get_size=lambda ctx, sequence: 10 * made[-1].n_tokens,
    )
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    which = llama_cpp.LlamaCppSide("llama.cpp", "base.gguf", most=20)
    model = generation.load(which, "cpu", None)
    rows = list(generation.time_all({"llama.cpp": model}, (8, 20), segment=5, budget=0.0))
    assert [(context, row["cache_bytes"]) for _, context, row in rows] == [(8, 80), (20, 200)]
    assert rows[0][2]["parameters"] == 7
    # Timed tokens are forgotten before the next context is read.
    assert len(made[0].read) > 20 and made[0].most == 20 + llama_cpp.TIMED
    again = generation.feed(model, None, 3, 5, 0)
    assert again.tokens == 3 and made[0].read == made[0].read[:3]


def test_an_absent_llama_cpp_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setattr("sys.argv", ["generation", "--llama-cpp", "llama.cpp=base.gguf"])
    with pytest.raises(SystemExit, match="error: llama-cpp-python is not installed: pip install"):
        generation.main()


def test_llama_cpp_takes_no_fields(monkeypatch):
    monkeypatch.setattr("sys.argv", ["generation", "--llama-cpp", "a=base.gguf,mixing=window"])
    with pytest.raises(SystemExit, match="^--llama-cpp: expected NAME=FILE.gguf alone, got .*mix"):
        generation.main()


def test_a_wrong_checkpoint_is_one_line(monkeypatch):
    monkeypatch.setattr("sys.argv", ["generation", "--checkpoint", "base"])
    with pytest.raises(SystemExit, match="--checkpoint: .*expected NAME=PATH"):
        generation.main()
