"""Training steps on a CPU, 256 to 16k tokens: tokens per second, peak memory, ATen calls.

``latte-r-swa++`` beside ``transformer++`` of the same size: loss, gradients, clipping and fused
AdamW on random tokens, in turns in one process, in fp32 and under autocast to bf16. Peak memory is
of one step in a process of its own, in all and beyond what was resident before the model. At 16k
tokens, where a step lasts a minute, that step is timed as well, in fp32 alone. Calls are PyTorch's
operations in the profiler; operations inside others are counted too. Both models keep freed memory
(``latte.lab.malloc.keep_memory``), as ``latte train`` does.

    python -m experiments.benchmarks.cpu_training [--quick] [--resume] [--out DIR]
        [--budget SECONDS]
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from experiments.benchmarks import records
from experiments.benchmarks.records import Goal, Row, ratio, say, select
from latte.lab import machine
from latte.lab.malloc import keep_memory
from latte.models import LatteForCausalLM, preset_config

OURS, RIVAL = "latte-r-swa++", "transformer++"
# Size, batch, tokens; and the tokens per second to reach, of the rival's.
SHAPES = (("tiny", 4, 256), ("small", 1, 1024), ("small", 1, 4096), ("small", 1, 16384))
LONG = 8192  # from here on one step is all there is time for
TARGETS = {256: 0.95, 1024: 1.1, 4096: 2.0, 16384: 3.5}
DTYPES = ("float32", "bfloat16")


class TrainingStep:
    """One model and its optimiser; each call is one step, as `latte train` makes it."""

    def __init__(self, model: Any, ids: torch.Tensor, autocast: bool) -> None:
        self.model, self.ids, self.autocast = model.train(), ids, autocast
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def __call__(self) -> None:
        with torch.autocast(self.ids.device.type, torch.bfloat16, enabled=self.autocast):
            loss = self.model(self.ids, labels=self.ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def make_step(name: str, size: str, B: int, T: int, dtype: str) -> TrainingStep:
    """A step of a model on random tokens."""
    keep_memory()
    torch.manual_seed(0)
    model = LatteForCausalLM(preset_config(name, size))
    ids = torch.randint(model.config.vocab_size, (B, T))
    return TrainingStep(model, ids, dtype == "bfloat16")


def step_apart(name: str, size: str, B: int, T: int, dtype: str) -> Row:
    """Time and peak memory of one step, in this process."""
    records.use_all_threads()
    before = machine.memory_bytes()
    step = make_step(name, size, B, T, dtype)
    return machine.Times.of([machine.seconds_of(step)]).row() | records.peaks(before)


def goals_of(rows: Sequence[Row]) -> list[Goal]:
    """Throughput by length, memory at 4,096 tokens, calls of the short step."""
    goals = []
    for dtype, T in itertools.product(DTYPES, TARGETS):
        ours, baseline = (select(rows, side=side, dtype=dtype, T=T) for side in (OURS, RIVAL))
        name = f"training, {dtype}, T = {T}: "
        rates = name + f"tokens/s over {RIVAL}'s"
        goals += ratio(rates, TARGETS[T], ours, baseline, "tokens_per_s", at_least=True)
        if T == 4096:
            memory = name + f"peak memory over {RIVAL}'s"
            goals += ratio(memory, 1.0, ours, baseline, "peak_process_mb")
        if T == 256 and dtype == DTYPES[0] and ours:
            text = "training, 4 x 256 tokens at size tiny: ATen calls of a step"
            goals.append(Goal(text, 6000, float(ours[0]["aten_calls"]), False))
    return goals


SHOWN = {
    "tokens_per_s": "Tokens per second, by tokens of a sequence:",
    "peak_process_mb": "Peak memory of the process of one step, MB:",
}


def main() -> None:
    args = records.parser(__doc__).parse_args()
    out, threads = records.output_folder(args), records.use_all_threads()
    budget = args.budget or (0.05 if args.quick else 3.0)
    say(f"training: {threads} threads")
    table = records.Table(out / "cpu_training.csv", resume=args.resume)
    apart = records.Apart(args.quick)
    shapes = (("tiny", 1, 64),) if args.quick else SHAPES
    for dtype, (size, B, T) in ((dtype, shape) for dtype in DTYPES for shape in shapes):
        if table.has(size=size, T=T, dtype=dtype) or (T >= LONG and dtype != DTYPES[0]):
            continue
        timed: dict[str, Row] = {OURS: {}, RIVAL: {}}
        calls = dict.fromkeys(timed, 0)
        if T < LONG:
            steps = {name: make_step(name, size, B, T, dtype) for name in timed}
            timed = {k: x.row() for k, x in machine.interleave(steps, budget).items()}
            calls = {k: records.aten_calls(step) if T <= 1024 else 0 for k, step in steps.items()}
            del steps
        for name, statistics in timed.items():
            row: Row = {"side": name, "size": size, "B": B, "T": T}
            row |= apart(step_apart, name, size, B, T, dtype) | statistics
            row |= {"tokens_per_s": round(1e3 * B * T / row["median_ms"], 1)}
            table.add_and_say(row | {"aten_calls": calls[name], "dtype": dtype})
    from experiments.benchmarks.figures import (
        publish,  # here: matplotlib is not part of what is measured
    )

    publish(table, "training", ("side", "dtype"), "T", SHOWN)
    records.report_goals(out / "goals.csv", "cpu_training", goals_of(table.rows))


if __name__ == "__main__":
    main()
