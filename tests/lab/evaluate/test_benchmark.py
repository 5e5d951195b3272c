"""`latte benchmark` at tiny sizes: every case has a time, memory grows with the inputs."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from latte.cli import main
from latte.errors import LatteError
from latte.lab.evaluate import benchmark as module
from latte.lab.evaluate.benchmark import COLUMNS, Case, Settings, benchmark, check
from latte.lab.evaluate.benchmark_ops import OPS
from latte.models.registry import find_model

TINY: dict[str, Any] = {
    "heads": 2, "latents": 4, "head_dim": 8, "window": 16, "lengths": (20, 40), "budget": 1e-3,
}  # fmt: skip


def test_every_case_has_a_time(tmp_path: Path, capsys: Any) -> None:
    models = ("latte-r-swa++", "griffin")
    settings = Settings(ops=OPS, models=models, memory=False, **TINY)
    rows = benchmark(settings, tmp_path).rows
    assert len(rows) == 2 * (2 * len(OPS) + 2 * len(models) + 1)  # decode: the preset's alone
    assert all(0 < row["min_ms"] <= row["median_ms"] <= row["p90_ms"] for row in rows)
    assert capsys.readouterr().out.count(" tokens ") == len(rows)
    with open(tmp_path / "benchmark.csv", newline="") as file:
        stored = list(csv.DictReader(file))
    assert len(stored) == len(rows) and tuple(stored[0]) == COLUMNS
    assert {row["torch"] for row in stored} == {torch.__version__}
    used = {row["name"]: row["backend"] for row in stored if row["mode"] == "forward"}
    assert used["latte"] in ("cpu", "torch") and used["softmax"] == "" and used["linear"] == "torch"
    row = next(r for r in stored if r["mode"] == "decode" and r["tokens"] == "40")
    assert float(row["tokens_per_second"]) == pytest.approx(1e3 / float(row["median_ms"]), rel=0.01)


def test_memory_is_that_of_a_process_of_its_own(tmp_path: Path) -> None:
    """q, k and v of 32,768 tokens in fp32 are 16 + 16 + 8 MB, and the output is 8 MB.

    In this process, which has run other tests, it may all lie where they freed memory.
    """
    sizes: dict[str, Any] = {"heads": 2, "latents": 64, "head_dim": 32, "lengths": (32768,)}
    chosen: dict[str, Any] = {"ops": ("latte",), "models": (), "modes": ("forward",)}
    settings = Settings(device="cpu", budget=1e-3, **sizes, **chosen)
    (row,) = benchmark(settings, tmp_path, quiet=True).rows
    assert row["peak_net_mb"] > 40 and row["note"] == ""


def test_what_runs_out_of_memory_stands_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(length: int) -> Any:
        if length > 20:
            raise torch.OutOfMemoryError("no room")
        return lambda: None

    cases = {Case("op", "softmax", "forward"): make, Case("op", "latte", "forward"): lambda n: int}
    found = module._times(cases, 40, 1e-3)
    assert [isinstance(value, str) for value in found.values()] == [True, False]
    assert next(iter(found.values())) == "out of memory"


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_model("gla").missing()
    with pytest.raises(LatteError, match="comparator 'gla' needs .*a GPU"):
        check(Settings(models=("gla",), device="cpu"))
    with pytest.raises(LatteError, match="models: expected some of .*, got 'longformer'"):
        check(Settings(models=("longformer",), device="cpu"))


def test_the_command(tmp_path: Path, capsys: Any) -> None:
    sizes = ["--heads", "2", "--latents", "4", "--head-dim", "8", "--budget", "0.001"]
    choice = ["--ops", "window", "--models", "none", "--modes", "forward", "--lengths", "20"]
    output = ["--device", "cpu", "--no-memory", "--output", str(tmp_path / "out")]
    assert main(["benchmark", *sizes, *choice, *output]) == 0
    out = capsys.readouterr().out
    assert "window" in out and f"written: {tmp_path / 'out' / 'benchmark.csv'}" in out


def test_inputs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(LatteError, match="take at least .* PB, and there are .* memory"):
        check(Settings(batch=10**9))
    with pytest.raises(LatteError, match="10,000,000,000,000 tokens take at least"):
        check(Settings(ops=(), lengths=(10**13,)))
