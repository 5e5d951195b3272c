"""`latte benchmark` at tiny sizes: every case has a time, memory grows with the inputs."""

import pytest
import torch

from latte.errors import LatteError
from latte.lab.evaluate.benchmark import COLUMNS, Settings, benchmark, check
from latte.lab.evaluate.benchmark_ops import OPS
from latte.models.registry import find_model
from tests.helpers import read_csv

TINY = {
    "heads": 2, "latents": 4, "head_dim": 8, "window": 16, "lengths": (20, 40), "budget": 1e-3,
}  # fmt: skip


def test_every_case_has_a_time(tmp_path, capsys):
    models = ("latte-r-swa++", "griffin")
    settings = Settings(ops=OPS, models=models, memory=False, **TINY)
    rows = benchmark(settings, tmp_path).rows
    assert len(rows) == 2 * (2 * len(OPS) + 2 * len(models) + 1)  # decode: the preset's alone
    assert all(0 < row["min_ms"] <= row["median_ms"] <= row["p90_ms"] for row in rows)
    assert capsys.readouterr().out.count(" tokens ") == len(rows)
    stored = read_csv(tmp_path / "benchmark.csv")
    assert len(stored) == len(rows) and tuple(stored[0]) == COLUMNS
    assert {row["torch"] for row in stored} == {torch.__version__}
    used = {row["name"]: row["backend"] for row in stored if row["mode"] == "forward"}
    assert used["latte"] in ("cpu", "torch") and used["softmax"] == "" and used["linear"] == "torch"
    row = next(r for r in stored if r["mode"] == "decode" and r["tokens"] == "40")
    assert float(row["tokens_per_second"]) == pytest.approx(1e3 / float(row["median_ms"]), rel=0.01)


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_model("gla").missing()
    with pytest.raises(LatteError, match="comparator 'gla' needs .*a GPU"):
        check(Settings(models=("gla",), device="cpu"))
    with pytest.raises(LatteError, match="models: expected some of .*, got 'longformer'"):
        check(Settings(models=("longformer",), device="cpu"))


def test_inputs_that_do_not_fit_are_refused():
    with pytest.raises(LatteError, match="take at least .* PB, and there are .* memory"):
        check(Settings(batch=10**9))
    with pytest.raises(LatteError, match="10,000,000,000,000 tokens take at least"):
        check(Settings(ops=(), lengths=(10**13,)))
