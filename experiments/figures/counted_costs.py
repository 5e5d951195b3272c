"""Writes counted_costs.csv: what Figure 7's models compute per token and keep, counted.

    python experiments/figures/counted_costs.py

FLOPs per token are those of the weights' products and of mixing in a forward pass, a third of those
of training (`latte.lab.machine.flops_per_token`). These models are made without memory (device
meta). The cache is that of one sequence in bf16, counted in a model of one layer after some tokens.
"""

from __future__ import annotations

from pathlib import Path

import torch

from latte import LatteCache
from latte.lab.evaluate.tables import write_csv
from latte.lab.machine import flops_per_token
from latte.models import LatteForCausalLM, preset_config

FILE = Path(__file__).with_suffix(".csv")
PRESETS = ("latte-conv-swa++", "latte-r-swa++", "transformer++")
READ = 300  # tokens: more than the window
COLUMNS = ("size", "model", "parameters", "tokens", "gflop_per_token", "cache_mb")
LENGTHS = tuple(2**power for power in range(10, 17))


def cache_bytes(preset: str, size: str) -> int:
    """Bytes that one layer of a model keeps after ``READ`` tokens, in bf16."""
    config = preset_config(preset, size, num_hidden_layers=1, vocab_size=100)
    model = LatteForCausalLM(config).bfloat16().eval()
    cache = LatteCache(config)
    with torch.no_grad():
        model(torch.zeros(1, READ, dtype=torch.long), past_key_values=cache)
    return cache.nbytes


def main() -> None:
    rows = []
    for size in ("400m", "2.6b"):
        for preset in PRESETS:
            with torch.device("meta"):
                model = LatteForCausalLM(preset_config(preset, size))
            layers = model.config.num_hidden_layers
            cache = layers * cache_bytes(preset, size)
            parameters = sum(p.numel() for p in model.parameters())
            for length in LENGTHS:
                flops = flops_per_token(model, length) / 3
                kept = cache * length / READ if preset == "transformer++" else cache
                counted = (f"{flops / 1e9:.3f}", f"{kept / 1e6:.1f}")
                values = (size, preset, parameters, length, *counted)
                rows.append(dict(zip(COLUMNS, values, strict=True)))
    write_csv(FILE, COLUMNS, rows)


if __name__ == "__main__":
    main()
