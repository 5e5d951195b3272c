"""The generation benchmark runs on tiny checkpoints, and its arithmetic is right."""

import sys

import pytest
import torch

from experiments.benchmarks import generation, records
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--llama-cpp", "llama.cpp=base.gguf"], "error: llama-cpp-python is not installed: pip"),
        (["--llama-cpp", "a=base.gguf,mixing=window"], "^--llama-cpp: expected NAME=FILE.gguf al"),
        (["--checkpoint", "base"], "--checkpoint: .*expected NAME=PATH"),
    ],
)
def test_what_cannot_be_timed_is_one_line(monkeypatch, arguments, message):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setattr("sys.argv", ["generation", *arguments])
    with pytest.raises(SystemExit, match=message):
        generation.main()
