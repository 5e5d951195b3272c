"""The benchmarks run, on tiny sizes and without JAX, and their arithmetic is right."""

import json
import os

import pytest
import torch

from experiments.benchmarks import cpu_decode, cpu_ops, cpu_training, listing1, records
from latte.ops import latte_attention


def rows_of(script, out):
    """The rows of the script's CSV file; a figure must be there too."""
    figure = (out / f"{script}.png").read_bytes()
    assert figure.startswith(b"\x89PNG") and len(figure) < 200_000
    rows = records.read_rows(out / f"{script}.csv")
    for row in rows:
        assert float(row["p10_ms"]) <= float(row["median_ms"]) <= float(row["p90_ms"])
        assert row["torch"] == torch.__version__ and row["cpu"] and row["date"]
    return rows


def test_ops_and_their_scaling_without_jax(tmp_path, tmp_path_factory, command):
    hidden = tmp_path_factory.mktemp("hidden")
    (hidden / "jax.py").write_text("raise ImportError('no jax in this test')\n")
    paths = [str(hidden), *filter(None, [os.environ.get("PYTHONPATH")])]
    printed = command("cpu_ops", PYTHONPATH=os.pathsep.join(paths))
    rows = rows_of("cpu_ops", tmp_path)
    assert printed.count("jax is not installed") == 1
    both = {"macchiato", "rg-lru", "conv"}  # in fp32 and in bf16
    sides = both | {side + cpu_ops.BF16 for side in both} | set(cpu_ops.DECAYS)
    sides |= {"latte", "sinks, late", "packed 15:1", "window 128", "sdpa"}
    modes = {"forward", "forward+backward"}
    found = {(row["side"], row["mode"]) for row in rows}
    assert found == {(side, mode) for side in sides for mode in modes}
    assert "with the fp64 reference: relative difference" in printed
    rows = records.read_rows(tmp_path / "cpu_scaling.csv")
    assert len(rows) == 4 and (tmp_path / "cpu_scaling.png").exists()
    assert all(float(row["median_ms"]) > 0 and float(row["peak_net_mb"]) >= 0 for row in rows)
    goals = records.read_rows(tmp_path / "goals.csv")
    assert {goal["script"] for goal in goals} == {"cpu_ops"}
    assert sum("exponent" in goal["goal"] for goal in goals) == 4
    assert all(goal["goal"] in printed for goal in goals)


@pytest.mark.filterwarnings("ignore:.*log-scaled")  # other tests have used more memory before
def test_decode(tmp_path, quick, capfd):
    quick(cpu_decode)
    printed, rows = capfd.readouterr().out, rows_of("cpu_decode", tmp_path)
    models = {"latte-r-swa++", "transformer++", "weights"}
    assert {row["model"] for row in rows} == models
    assert {row["dtype"] for row in rows} == {"float32", "bfloat16"}
    rows = [row for row in rows if row["dtype"] == "float32"]
    caches = {(row["model"], row["context"]): row["cache_bytes"] for row in rows}
    short, long = sorted({row["context"] for row in rows}, key=int)
    assert caches["latte-r-swa++", short] == caches["latte-r-swa++", long]
    growth = int(caches["transformer++", long]) / int(caches["transformer++", short])
    assert growth == pytest.approx(int(long) / int(short), rel=0.01)
    assert "tiny, bfloat16, 1000 tokens: time over transformer++'s" in printed
    assert "tensor operations: ATen calls per layer" in printed


def test_training(tmp_path, quick, capfd):
    quick(cpu_training)
    printed, rows = capfd.readouterr().out, rows_of("cpu_training", tmp_path)
    sides, dtypes = ("latte-r-swa++", "transformer++"), ("float32", "bfloat16")
    found = [(row["dtype"], row["side"]) for row in rows]
    assert found == [(dtype, side) for dtype in dtypes for side in sides]
    assert all(int(row["aten_calls"]) > 1000 and float(row["tokens_per_s"]) > 0 for row in rows)
    assert "tokens_per_s" in printed


def test_a_resumed_table_keeps_the_rows_of_its_commit(tmp_path, monkeypatch):
    records.Table(tmp_path / "rows.csv").add({"tokens": 1})
    table = records.Table(tmp_path / "rows.csv", resume=True)
    assert table.has(tokens=1) and not table.has(tokens=2)
    table.add({"tokens": 2})
    assert [row["tokens"] for row in records.read_rows(table.path)] == ["1", "2"]
    monkeypatch.setattr(records, "commit", lambda: "another")
    assert not records.Table(table.path, resume=True).rows


def test_tables_go_into_a_page_between_the_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results: ops -->\nold\n<!-- /results -->\nafter\n")
    rows = [{"side": s, "T": t, "ms": m} for s, t, m in (("a", 1024, 2), ("b", "512", "1234.5"))]
    rows = [row | records.columns(None) for row in rows]
    table = records.pivot("Times:", rows, ("side",), "T", "ms")
    records.document(tmp_path, "ops", rows, table, page=page)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("<!-- /results -->\nafter\n")
    assert (
        "| side | 512 | 1,024 |\n| --- | ---: | ---: |\n| a |  | 2.00 |\n| b | 1,234.5 |  |" in text
    )
    assert torch.__version__ in text and "old" not in text


@pytest.mark.parametrize("mode", ["forward", "gradients"])
def test_listing_1_is_latte(mode):
    pytest.importorskip("jax")
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 33, 2, 3), (2, 33, 2, 3), (2, 33, 2, 5))
    q, k, v = (torch.randn(*s, generator=generator).requires_grad_() for s in shapes)
    out, _ = latte_attention(q.double(), k.double(), v.double(), backend="reference")
    dy = torch.randn(out.shape, generator=generator)
    if mode == "forward":
        pairs = [(out, listing1.forward(q, k, v, unroll=2)())]
    else:
        exact = torch.autograd.grad(out, (q, k, v), dy.double())
        pairs = list(zip(exact, listing1.gradients(q, k, v, dy, unroll=2)(), strict=True))
    for exact, found in pairs:
        torch.testing.assert_close(listing1.to_torch(found), exact.float())


def test_exponent_of_a_power_law():
    tokens = [4096 * 2**i for i in range(7)]
    assert cpu_ops.exponent(tokens, [3e-4 * t**1.25 for t in tokens]) == pytest.approx(1.25)


def test_goals_of_several_scripts_are_kept(tmp_path, capsys):
    fast = records.Goal("faster", 3.0, 4.0, True)
    linear = records.Goal("exponent", 1.05, 1.2, False, "too steep")
    records.report_goals(tmp_path / "goals.csv", "one", [fast])
    records.report_goals(tmp_path / "goals.csv", "two", [linear])
    records.report_goals(tmp_path / "goals.csv", "one", [fast._replace(measured=2.0)])
    rows = records.read_rows(tmp_path / "goals.csv")
    verdicts = {row["script"]: (row["measured"], row["verdict"]) for row in rows}
    assert verdicts == {"one": ("2.000", "miss"), "two": ("1.200", "miss")}
    assert "too steep" in capsys.readouterr().out.splitlines()[-1]


def test_the_worst_of_several_sizes_is_the_goal():
    (goal,) = records.worst("faster", 2.0, {"T = 1": 3.0, "T = 2": 1.5}, True)
    assert (goal.measured, goal.met, goal.note) == (1.5, False, "at T = 2; 1 of 2 pass")
    (goal,) = records.worst("memory", 2.0, {"T = 1": 3.0, "T = 2": 1.5}, False)
    assert (goal.measured, goal.met, goal.note) == (3.0, False, "at T = 1; 1 of 2 pass")
    assert records.worst("nothing ran", 2.0, {}, True) == []


def test_interrupted_runs_leave_their_rows(tmp_path):
    table = records.Table(tmp_path / "rows.csv")
    table.path.write_text("from an earlier run\n")
    table.add({"tokens": 1})
    table.add({"tokens": 2})
    assert [row["tokens"] for row in records.read_rows(table.path)] == ["1", "2"]
    assert json.loads(records.read_rows(table.path)[0]["threads"]) == torch.get_num_threads()
