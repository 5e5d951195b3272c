"""Forward time of whole models on a GPU, 1k to 64k tokens at a constant number of tokens.

The paper's runtime figure: sizes 400m and 2.6b, bf16, 65,536 tokens as B = 64 to 1 sequences, the
hidden states of all tokens and the logits of each sequence's last one, no cache.

* ``latte-conv-swa++`` and ``latte-r-swa++``.
* ``transformer++, flash`` and ``transformer++, standard``: the same model with softmax attention
  by PyTorch's flash backend, and with the T x T weights in memory.

    python benchmarks/gpu_runtime.py [--quick] [--out DIR] [--budget SECONDS] [--device DEVICE]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gpu_common as gpu
import torch
from records import Row, say

from latte.ops import use_backend

TOKENS = 65536
LATTE = ("latte-conv-swa++", "latte-r-swa++")
RIVAL = "transformer++"
FLASH = f"{RIVAL}, flash"
LENGTHS = (1024, 65536, 8192, 32768, 2048, 16384, 4096)


def sides_of(at: gpu.Place, models: dict[str, Any], B: int, T: int) -> dict[str, Callable[[], Any]]:
    """A forward pass of every side."""
    ids = gpu.tokens(at, next(iter(models.values())).config.vocab_size, B, T)

    def forward(model: Any, kind: str) -> Any:
        with torch.inference_mode(), gpu.attention_by(at, kind), use_backend(at.backend):
            return model(ids, use_cache=False, logits_to_keep=1)

    sides: dict[str, Callable[[], Any]] = {
        name: lambda m=models[name]: forward(m, "flash") for name in LATTE
    }
    for kind in ("flash", "standard"):
        sides[f"{RIVAL}, {kind}"] = lambda k=kind: forward(models[RIVAL], k)
    return sides


def main(argv: Sequence[str] | None = None) -> None:
    at = gpu.place(gpu.options(__doc__, 80).parse_args(argv))
    say(f"runtime: {at.dtype}, {at.device}, backend {at.backend}")
    table = at.table("gpu_runtime.csv")
    models: dict[str, Any] = {}
    built = ""
    points = [(size, TOKENS, T) for size in ("400m", "2.6b") for T in LENGTHS]
    if at.quick:
        points = [("tiny", 128, 64), ("tiny", 128, 128)]
    for size, total, T in at.while_time(points):
        if size != built:
            models.clear()
            gpu.forget()
            models = {name: gpu.make_model(at, name, size, at.dtype) for name in (*LATTE, RIVAL)}
            built = size
        B = total // T
        times, _ = gpu.measure(
            at, sides_of(at, models, B, T), budget=0.2, rounds=3, cold_cache=False
        )
        for side, t in times.items():
            row: Row = {"side": side, "size": size, "B": B, "T": T}
            row |= {"parameters": models[side.partition(",")[0]].num_parameters()}
            row |= {"dtype": at.precision, **t.row()}
            row |= {"tokens_per_s": round(total / (t.median / 1e3), 1)}
            faster = times[FLASH].median / t.median if FLASH in times else ""
            row |= {"times_faster_than_flash": faster and round(faster, 3)}
            table.add(row)
            say(
                f"{size} T = {T:5} B = {B:2} {side:23} {t.median:9.2f} ms "
                f"(p10 {t.p10:.2f}, p90 {t.p90:.2f}), {row['tokens_per_s']:.0f} tokens/s"
            )


if __name__ == "__main__":
    main()
