"""Training throughput on a GPU: tokens per second, share of the peak, memory.

``latte-r-swa++`` beside ``transformer++`` (flash attention) at "paper" size, 32,768 tokens a step
as blocks of 1k, 4k and 16k, bf16 autocast, fp32 weights, fused AdamW, dropout as in the preset.
Plain, and with the blocks compiled as a recipe's ``training.torch_compile`` does.

The share of the peak (MFU) takes model FLOPs and data-sheet peaks from
``latte.machine``. Peak memory is of one step, weights and optimiser included.

    python benchmarks/gpu_training.py [--quick] [--out DIR] [--budget SECONDS] [--device DEVICE]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gpu_common as gpu
import torch
from records import Goal, Row, say

from latte import machine
from latte.ops import use_backend
from latte.train.speed import compile_blocks

TOKENS = 32768
OURS, RIVAL = "latte-r-swa++", "transformer++"
LENGTHS = (4096, 16384, 1024)
TARGETS = {1024: 0.9, 4096: 1.3, 16384: 3.0}


class Training:
    """One model and its optimiser; each call is one step."""

    def __init__(self, at: gpu.Place, name: str, size: str, compiled: bool, B: int, T: int) -> None:
        self.at, self.name, self.compiled = at, name, compiled
        self.model: Any = gpu.make_model(at, name, size, torch.float32).train()
        if compiled:
            compile_blocks(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.ids = gpu.tokens(at, self.model.config.vocab_size, B, T)

    def __call__(self) -> None:
        at = self.at
        with gpu.attention_by(at, "flash"), use_backend(at.backend):
            with torch.autocast(at.device.type, torch.bfloat16):
                loss = self.model(self.ids, labels=self.ids).loss
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def compare(at: gpu.Place, size: str, B: int, T: int, compiled: bool) -> list[Row]:
    """The rows of one length."""
    steps: dict[str, Training] = {}
    peaks: dict[str, float | str] = {}
    for name in (OURS, RIVAL):
        with gpu.tried(at, f"{name}, T = {T}, compiled {compiled}"):
            before = machine.memory_bytes(at.device)
            step = Training(at, name, size, compiled, B, T)
            step()
            gpu.wait(at.device)
            machine.reset_peak_memory(at.device)
            step()
            gpu.wait(at.device)
            peak_mb = round((machine.peak_memory_bytes(at.device) - before) / 2**20, 1)
            peaks[name] = peak_mb if at.cuda else ""
            steps[name] = step
    times, _ = gpu.measure(at, steps, budget=0.6 if at.cuda else 0.05, rounds=3, cold_cache=False)
    peak = machine.gpu_peak_flops(torch.cuda.get_device_name(at.device)) if at.cuda else None
    rows = []
    for name, t in times.items():
        rate = B * T / (t.median / 1e3)
        model = steps[name].model
        flops = machine.flops_per_token(model, T)
        row: Row = {"side": name, "compiled": compiled, "size": size, "B": B, "T": T}
        row |= {"parameters": model.num_parameters(), "dtype": "bfloat16", **t.row()}
        row |= {"tokens_per_s": round(rate, 1), "peak_mb": peaks[name]}
        row |= {"gflops_per_token": round(flops / 1e9, 4)}
        row |= {"mfu": "" if peak is None else round(rate * flops / peak, 4)}
        faster = times[RIVAL].median / t.median if RIVAL in times else ""
        row |= {"times_faster": faster and round(faster, 3)}
        rows.append(row)
    return rows


def goals_of(rows: Sequence[Row]) -> list[Goal]:
    """The better of plain and compiled, for either model."""
    best: dict[tuple[int, str], Row] = {}
    for row in rows:
        key = (row["T"], row["side"])
        if key not in best or row["tokens_per_s"] > best[key]["tokens_per_s"]:
            best[key] = row
    goals = []
    for T, target in TARGETS.items():
        ours, rival = best.get((T, OURS)), best.get((T, RIVAL))
        if ours and rival:
            name = f"training, T = {T}: tokens/s over {RIVAL}'s"
            note = f"{ours['tokens_per_s']:.0f} against {rival['tokens_per_s']:.0f} tokens/s"
            ratio = ours["tokens_per_s"] / rival["tokens_per_s"]
            goals.append(Goal(name, target, ratio, True, note))
    ours = best.get((4096, OURS))
    if ours and ours["mfu"] != "":
        note = "compiled" if ours["compiled"] else "not compiled"
        goals.append(Goal("training, T = 4096: MFU", 0.4, ours["mfu"], True, note))
    return goals


def main(argv: Sequence[str] | None = None) -> None:
    at = gpu.place(gpu.options(__doc__, 120).parse_args(argv))
    say(f"training: bf16 autocast, {at.device}, backend {at.backend}")
    size, total = ("tiny", 128) if at.quick else ("paper", TOKENS)
    lengths = (64,) if at.quick else LENGTHS
    table = at.table("gpu_training.csv")
    # Compiling takes long: everything plain first, for a run that is cut off.
    points = ((c, T) for c in ((False,) if at.quick else (False, True)) for T in lengths)
    for compiled, T in at.while_time(points):
        for row in compare(at, size, total // T, T, compiled):
            table.add(row)
            share = "" if row["mfu"] == "" else f", MFU {100 * row['mfu']:.0f}%"
            say(
                f"T = {T:5} {row['side']:14} compiled {compiled!s:5} "
                f"{row['tokens_per_s']:9.0f} tokens/s (step {row['median_ms']:.1f} ms, "
                f"p10 {row['p10_ms']:.1f}, p90 {row['p90_ms']:.1f}){share}, "
                f"peak {row['peak_mb']} MB"
            )
        torch._dynamo.reset()
    at.goals("gpu_training", goals_of(table.rows))


if __name__ == "__main__":
    main()
