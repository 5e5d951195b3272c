"""What a run reports: one readable line, a progress bar, metrics.jsonl and TensorBoard."""

from __future__ import annotations

import contextlib
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from latte.lab import machine
from latte.lab.progress import progress
from latte.lab.train.recipe import Recipe
from latte.models.atomic_files import write_text
from latte.models.plain_files import check_plain

METRICS_FILE = "metrics.jsonl"
# What a log line shows beside the loss, if the run's objective has it: key, name, format.
LOSS_PARTS = (
    ("perplexity", "ppl", ".4g"),
    ("bits_per_byte", "bpb", ".3f"),
)


class TrainingReport(TrainerCallback):
    """Reports losses, speeds, memory and remaining time to the terminal and to files.

    Args:
        recipe: Recipe of the run.
        label: Name of the bar in a command of several runs, such as the preset's name.
        quiet: Whether to print no bar and no lines. The files are written anyway.
    """

    def __init__(self, recipe: Recipe, label: str | None = None, quiet: bool = False) -> None:
        self.recipe = recipe
        self.label, self.labelled = label or recipe.name, label is not None
        self.quiet = quiet
        self.seconds = 0.0  # wall time of the run up to the last report, over all resumes
        self._writer: Any = None
        self._bar: Any = None
        self._lines: Any = None
        self._open = contextlib.ExitStack()
        self._file: Any = None
        self._last_time = 0.0
        self._last_step = 0

    def _elapsed(self) -> float:
        return self.seconds + (time.perf_counter() - self._last_time if self._last_time else 0.0)

    # ---- the Trainer's events

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        processes = args.world_size
        self._flops = machine.flops_per_token(model, self.recipe.data.block_length)
        self._peak, self._peak_source = machine.peak_flops(args.device, args.bf16, processes)
        self._tokens_per_step = self.recipe.tokens_per_step(processes)
        self._device = args.device
        self._last_time, self._last_step = time.perf_counter(), state.global_step
        machine.reset_peak_memory(self._device)
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir)
        self.seconds = drop_lines_after(folder / METRICS_FILE, state.global_step)
        self._file = open(folder / METRICS_FILE, "a", encoding="utf-8")  # noqa: SIM115
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=state.global_step + 1)
        if not self.quiet:
            from tqdm import tqdm

            self._bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                desc=self.label,
                unit="step",
                dynamic_ncols=True,
                disable=None,  # no bar where stderr is not a terminal
            )
            # There a line, where a minute has passed without one.
            lines = progress(state.max_steps, "step", label=self.label, bar=False)
            self._lines = self._open.enter_context(lines)
            self._lines.skip(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self._bar is not None:
            self._bar.update(1)
        if self._lines is not None:
            self._lines.update(1)
        if state.global_step >= state.max_steps:
            control.should_log = control.should_evaluate = True
        limit = self.recipe.training.max_minutes
        if limit is not None and control.should_log:
            over = torch.tensor(float(self._elapsed() > 60 * limit), device=args.device)
            if args.world_size > 1:  # all processes stop at the same step, by the first's clock
                torch.distributed.broadcast(over, src=0)
            if over.item() and state.global_step < state.max_steps:
                control.should_save = control.should_training_stop = True
                control.should_evaluate = True
        return control

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs.get("logs") or {}
        if not state.is_world_process_zero or self._file is None:
            return
        if "loss" in logs:
            record = {"step": state.global_step, **self._speeds(state)}
            record |= {k: _plain(v) for k, v in logs.items() if k not in ("epoch", "total_flos")}
            self._write("train", record)
            self._say(train_line(record, state.max_steps))
        elif "eval_loss" in logs:
            record = {"step": state.global_step, "tokens": self._tokens(state)}
            record |= {k: _plain(v) for k, v in logs.items() if k != "epoch"}
            self._write("eval", record)
            self._say(
                f"{self.label} | held-out after {record['tokens']:,} tokens |"
                f" loss {record['eval_loss']:.4f} | ppl {record['eval_perplexity']:.4g}"
                f" | bpb {record['eval_bits_per_byte']:.4f}"
            )

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluating and saving count as time of the run, but not against tokens per second.

        Nor do they count as memory: the peak that is reported is that of training steps.
        """
        machine.reset_peak_memory(self._device)
        if state.global_step > self._last_step:
            return  # steps without a log line yet: their time cannot be separated
        self.seconds = self._elapsed()
        self._last_time = time.perf_counter()

    on_evaluate = on_save

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds = self._elapsed()
        self._last_time = 0.0
        self.close()

    def close(self) -> None:
        """Close the bar, files and thread, also after training has failed."""
        for resource in (self._bar, self._writer, self._file):
            if resource is not None:
                resource.close()
        self._open.close()
        self._bar = self._writer = self._file = self._lines = None

    # ---- details

    def _tokens(self, state: Any) -> int:
        return state.global_step * self._tokens_per_step

    def _speeds(self, state: Any) -> dict[str, Any]:
        now = time.perf_counter()
        spent, steps = now - self._last_time, state.global_step - self._last_step
        self.seconds += spent
        self._last_time, self._last_step = now, state.global_step
        rate = steps * self._tokens_per_step / max(spent, 1e-9)
        remaining = state.max_steps - state.global_step
        record: dict[str, Any] = {
            "tokens": self._tokens(state),
            "seconds": round(self.seconds, 3),
            "tokens_per_second": rate,
            "eta_seconds": remaining * self._tokens_per_step / max(rate, 1e-9),
            "peak_memory_bytes": machine.peak_memory_bytes(self._device),
        }
        if self._peak is not None:
            record["mfu"] = rate * self._flops / self._peak
            record["peak_flops_source"] = self._peak_source
        return record

    def _write(self, kind: str, record: dict[str, Any]) -> None:
        self._file.write(json.dumps({"kind": kind, **record}) + "\n")
        self._file.flush()
        for key, value in record.items():
            if isinstance(value, int | float) and key != "step":
                name = key.removeprefix("eval_")
                self._writer.add_scalar(f"{kind}/{name}", value, record["step"])

    def _say(self, line: str) -> None:
        if self._bar is not None and not self._bar.disable:
            self._bar.write(line)
        elif not self.quiet:
            print(line, flush=True)
            if self._lines is not None:
                self._lines.spoke()


def train_line(record: dict[str, Any], max_steps: int) -> str:
    """One log step for people."""
    parts = [
        f"step {record['step']:>{len(str(max_steps))}}/{max_steps}",
        f"loss {record['loss']:.4f}",
        *(f"{short} {record[key]:{form}}" for key, short, form in LOSS_PARTS if key in record),
        f"grad {record.get('grad_norm', math.nan):.2f}",
        f"lr {record['learning_rate']:.2e}",
        f"{record['tokens_per_second']:,.0f} tok/s",
    ]
    if "mfu" in record:
        parts.append(f"mfu {100 * record['mfu']:.0f}%")
    parts.append(f"mem {record['peak_memory_bytes'] / 2**30:.2f} GiB")
    parts.append(f"eta {duration(record['eta_seconds'])}")
    return " | ".join(parts)


def duration(seconds: float) -> str:
    """3725 -> '1h02m'; 125 -> '2m05s'; 9 -> '9s'."""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def read_metrics(folder: str | Path, kind: str) -> list[dict[str, Any]]:
    """The records of metrics.jsonl of one kind, "train" or "eval"; half-written lines left out."""
    records = _records(Path(folder) / METRICS_FILE)
    return [record for record in records if record.get("kind") == kind]


def drop_lines_after(path: Path, step: int) -> float:
    """Remove reports of a killed run that are later than the checkpoint it resumes from.

    Returns the seconds of training that the kept lines account for.
    """
    kept = [record for record in _records(path) if record["step"] <= step]
    if path.exists():
        write_text(path, "".join(json.dumps(r) + "\n" for r in kept))
    return max((record.get("seconds", 0.0) for record in kept), default=0.0)


def _records(path: Path) -> list[dict[str, Any]]:
    """The readable lines of a file of metrics; none if there is no file."""
    found: list[dict[str, Any]] = []
    if not path.exists():
        return found
    for line in check_plain(path).read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, RecursionError):  # half-written
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                found.append(record)
    return found


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value
