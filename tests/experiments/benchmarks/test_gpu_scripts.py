"""The GPU scripts run end to end on a CPU at tiny sizes; only their times mean nothing there."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from experiments.benchmarks import (
    figures,
    gpu_baselines,
    gpu_check,
    gpu_common,
    gpu_models,
    gpu_ops,
    gpu_profile,
)
from experiments.benchmarks.records import MODES, RESULTS, read_rows
from latte.ops import (
    causal_conv1d,
    latte_attention,
    macchiato_attention,
    rg_lru,
    sliding_window_attention,
)
from latte.ops.triton_backend import checked
from tests.ops import gpu_correctness

MACHINE = {"device", "card", "cuda", "triton", "ptxas", "fla", "transformers"}
MACHINE |= {"torch", "python", "latte", "date"}
TIMES = {"median_ms", "p10_ms", "p90_ms", "calls"}


def arguments(out, *more):
    return [*more, "--quick", "--device", "cpu", "--out", str(out)]


def rows_of(script, part, out, columns):
    """Run a part of a script in this process; the rows of its CSV file, which have the columns."""
    script.main(arguments(out, part))
    rows = read_rows(out / f"gpu_{part}.csv")
    assert rows and set(rows[0]) >= columns | MACHINE
    assert all(row["device"] == "cpu" and row["torch"] == torch.__version__ for row in rows)
    (figure,) = figures.draw_all(out)
    assert figure.name == f"gpu_{part}.png"
    assert figure.read_bytes().startswith(b"\x89PNG") and figure.stat().st_size < 200_000
    return rows


def a_place(tmp_path, **changes):
    parser = gpu_common.options("a test", 60)
    return gpu_common.place(parser.parse_args(arguments(tmp_path)))._replace(**changes)


def test_latte(tmp_path, capsys):
    columns = {"side", "mode", "times_latte", "expected_ms", "saved_mb", "of_copy"}
    rows = rows_of(gpu_ops, "latte", tmp_path, TIMES | columns)
    assert {(r["mode"], r["B"]) for r in rows} == {(mode, B) for mode in MODES for B in ("1", "2")}
    own = [r for r in rows if r["side"] == "latte"]
    assert len(own) == 6 and {r["sigma"] for r in own} == {"1.0", "8.0"}
    for row in own:
        # q, k and v of 64 tokens, 8 heads, 16 wide, fp32: saved once each, and not much more.
        assert 3 * 64 * 8 * 16 * 4 <= float(row["saved_mb"]) * 2**20 * 1.01 <= 4 * 64 * 8 * 16 * 4
    forgetting = [r for r in rows if r["side"].startswith("forgets")]
    assert len(forgetting) == 8 and {r["sigma"] for r in forgetting} == {"1.0"}
    for row in own + forgetting:
        inputs, out = (3 if row["side"] == "latte" else 4), 1
        moved = inputs + out if row["mode"] == MODES[0] else 3 * inputs + 2 * out
        assert int(row["least_bytes"]) == moved * 64 * 8 * 16 * 4
    wrong = {r["side"]: r for r in read_rows(tmp_path / "gpu_latte_errors.csv")}
    assert set(wrong) == {"latte", "forgets 1/64", "forgets 1/4"}
    assert all(0 < float(row["error_dk"]) < 1e-5 for row in wrong.values())
    goals = read_rows(tmp_path / gpu_common.TARGETS)
    assert [g["verdict"] for g in goals] == ["miss"]  # a CPU does not reach 60% of a copy
    assert "share of copy bandwidth" in capsys.readouterr().out


def test_macchiato(tmp_path):
    rows = rows_of(gpu_ops, "macchiato", tmp_path, TIMES | {"side", "mode", "times_macchiato"})
    sides = {"macchiato", "its latents", "its window", "flash"}
    found = {(r["mode"], r["side"]) for r in rows}
    assert found == {(m, s) for m in MODES for s in sides} | {("forward", "flex window")}
    goals = read_rows(tmp_path / gpu_common.TARGETS)
    assert {g["target"] for g in goals} == {"<= 1.15"}


def test_converted(tmp_path):
    columns = {"side", "mode", "times_converted", "expected_ms"}
    rows = rows_of(gpu_ops, "converted", tmp_path, TIMES | columns)
    sides = {"converted", "plain", *gpu_ops.ALONE, "flash"}
    assert {(r["mode"], r["side"]) for r in rows} == {(m, s) for m in MODES for s in sides}
    assert all(float(r["expected_ms"]) > 0 for r in rows if r["side"] == "converted")
    goals = read_rows(tmp_path / gpu_common.TARGETS)
    assert {g["target"] for g in goals} == {"<= 1.5"}


def test_kept(tmp_path):
    """Beside the same layer without kept tokens; a quick run is too short for the goal."""
    rows = rows_of(gpu_ops, "kept", tmp_path, TIMES | {"side", "mode", "times_kept", "expected_ms"})
    sides = {"kept", "converted", "flash"}
    assert {(r["mode"], r["side"]) for r in rows} == {(m, s) for m in MODES for s in sides}
    assert all(float(r["expected_ms"]) > 0 for r in rows if r["side"] == "kept")
    rows = [
        {"T": 16384, "L": 16, "side": s, "median_ms": x}
        for s, x in (("kept", 3.0), ("converted", 2.0))
    ]
    (goal,) = gpu_ops.kept_goals(MODES[0], rows)
    assert goal.met


def test_flex_window_is_the_window(tmp_path):
    from latte.ops import sliding_window_attention

    at = a_place(tmp_path)
    q, k, v = (torch.randn(1, 512, 2, 16) for _ in range(3))
    out = gpu_ops.flex_window(at, 512)(*(x.transpose(1, 2) for x in (q, k, v)))
    want, _ = sliding_window_attention(q, k, v, window=gpu_ops.WINDOW)
    torch.testing.assert_close(out.transpose(1, 2), want, atol=1e-5, rtol=1e-5)


def test_rglru(tmp_path):
    rows = rows_of(gpu_ops, "rglru", tmp_path, TIMES | {"op", "side", "mode", "times_ours"})
    assert {(r["op"], r["side"]) for r in rows} == {
        ("rg_lru", "rg_lru"),
        ("conv", "conv"),
        ("conv", "conv1d"),
    }
    x, weight, bias = torch.randn(2, 9, 4), torch.randn(4, 3), torch.randn(4)
    want, _ = causal_conv1d(x, weight, bias)
    torch.testing.assert_close(gpu_ops.conv1d(x, weight, bias), want)


def test_decode(tmp_path):
    rows = rows_of(
        gpu_models, "decode", tmp_path, TIMES | {"side", "how", "context", "tokens_per_s"}
    )
    sizes = {(r["side"], r["B"], r["context"]): int(r["cache_bytes"]) for r in rows}
    assert sizes["latte-r-swa++", "1", "300"] == sizes["latte-r-swa++", "1", "600"]
    assert 2 * sizes["llama", "2", "300"] == sizes["llama", "2", "600"]
    goals = read_rows(tmp_path / gpu_common.TARGETS)
    assert [g["goal"].split(": ")[0] for g in goals] == [
        "decoding, B = 1, eager",
        "decoding, B = 2, eager",
    ]


def test_runtime(tmp_path):
    rows = rows_of(gpu_models, "runtime", tmp_path, TIMES | {"side", "size", "T", "tokens_per_s"})
    sides = {*gpu_models.LATTES, "transformer++, flash", "transformer++, standard"}
    assert {r["side"] for r in rows} == sides and {r["T"] for r in rows} == {"64", "128"}


def test_training(tmp_path):
    rows = rows_of(
        gpu_models, "training", tmp_path, TIMES | {"side", "compiled", "tokens_per_s", "mfu"}
    )
    assert [r["side"] for r in rows] == [gpu_models.OURS, gpu_models.RIVAL]
    row = {"compiled": True, "mfu": 0.5, "side": gpu_models.OURS, "T": 4096}
    goals = gpu_models.training_goals(
        [row | {"tokens_per_s": 30.0}, row | {"tokens_per_s": 10.0, "side": gpu_models.RIVAL}]
    )
    assert [(g.target, g.measured) for g in goals] == [(1.3, 3.0), (0.4, 0.5)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_and_exit_code_2(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        gpu_check.main(["--out", str(tmp_path / "out")])
    assert stopped.value.code == 2
    assert capsys.readouterr().out.splitlines() == [
        "no GPU here: expected a CUDA device that PyTorch can use (or --device cpu)"
    ]
    assert not (tmp_path / "out").exists()


def test_checks_in_processes_of_their_own(tmp_path, monkeypatch, capfd):
    """One that dies is a failed check, and the next one runs."""
    monkeypatch.setattr(gpu_check, "groups", lambda: ["no:such", "conv:float32"])
    assert gpu_check.main(arguments(tmp_path, "--only", "check")) == 1
    printed = capfd.readouterr().out
    assert "FAIL  no:such: ended with exit code" in printed
    assert "pass  conv:float32: fp64 reference" in printed
    rows = read_rows(tmp_path / "gpu_checks.csv")
    assert set(rows[0]) >= {"check", "verdict", "detail", "seconds"} | MACHINE
    verdicts = {row["check"]: row["verdict"] for row in rows}
    assert verdicts["no:such"] == "FAIL"
    assert verdicts["conv:float32: fp64 reference"] == "pass"
    assert verdicts["conv:float32: no synchronisation"] == "skip"
    assert [p.name for p in tmp_path.glob("gpu_checks*")] == ["gpu_checks.csv"]


@pytest.mark.parametrize(
    "group",
    [
        pytest.param("latte:bfloat16", marks=pytest.mark.slow),
        pytest.param("forgetting:float32", marks=pytest.mark.slow),
        pytest.param("macchiato:float16", marks=pytest.mark.slow),
        "macchiato-forgetting:float16",
        "converted:float32",
        pytest.param("kept:float32", marks=pytest.mark.slow),
        "kept-window:float32",
        pytest.param("window-sinks:float32", marks=pytest.mark.slow),
        pytest.param("delayed-forgetting:float32", marks=pytest.mark.slow),
        pytest.param("macchiato-bidirectional:float32", marks=pytest.mark.slow),
        "window-bidirectional:float32",
        "rg_lru-reversed:float32",
        pytest.param("rg_lru:float32", marks=pytest.mark.slow),
        "huge",
    ],
)
def test_checks_pass(tmp_path, group):
    assert gpu_correctness.main(arguments(tmp_path, group)) == 0
    rows = read_rows(tmp_path / f"gpu_checks-{group.replace(':', '-')}.csv")
    assert len(rows) >= 5 and {r["verdict"] for r in rows} <= {"pass", "skip"}
    assert sum(r["verdict"] == "pass" for r in rows) >= 4


def wrong_latte(q, k, v, *, backend, **options):
    """Right in the reference; elsewhere one output in a thousand is off."""
    out, state = latte_attention(q, k, v, backend=backend, **options)
    if backend != "reference":
        out = out + 0.1 * (torch.arange(out.shape[1]) % 50 == 49)[None, :, None, None].to(out)
    return out, state


def test_a_wrong_kernel_fails_and_the_checks_go_on(tmp_path, monkeypatch, capsys):
    broken = replace(gpu_correctness.CASES["latte"], run=wrong_latte)
    monkeypatch.setitem(gpu_correctness.CASES, "latte", broken)
    monkeypatch.setattr(gpu_correctness, "compiles_in_one_graph", lambda b, T: "not looked at")
    assert gpu_correctness.main(arguments(tmp_path, "latte:float32")) == 1
    rows = read_rows(tmp_path / "gpu_checks-latte-float32.csv")
    verdicts = {row["check"].split(": ", 1)[1]: row["verdict"] for row in rows}
    assert verdicts["fp64 reference"] == verdicts["rows sum to 1"] == "FAIL"
    assert verdicts["runs repeat"] == "pass"
    assert f"FAIL  latte:float32: fp64 reference: {rows[0]['detail']}" in capsys.readouterr().out


def test_the_table_of_defaults_is_that_of_the_checks(tmp_path):
    """The one in the package is made of the checks that are kept here."""
    checks = read_rows(RESULTS / gpu_check.CHECKS)
    made = tmp_path / "checked.csv"
    gpu_check.renew_table(checks, made)
    assert made.read_text() == checked.TABLE.read_text()
    assert {row.name for row in checked.read()} <= set(gpu_correctness.CASES) <= set(checked.FORMS)


def test_a_failed_check_takes_its_kernels_out_of_the_table(tmp_path):
    """Of its card alone, and single tokens apart."""
    made = tmp_path / "checked.csv"
    kept = checked.Checked(80, "conv", False, "float32", 0, 0, 0, 9, "A100", "", "", "", "")
    checked.write([kept], made)
    machine = {"card": "90", "device": "H100", "torch": "2.14.1", "triton": "3.8.0"}
    machine |= {"ptxas": "12.9", "date": "2026-12-01"}
    passed = ["fp64 reference", "steps are the whole", "H = 8, G = 2, L = 16, K = 128, D = 128"]
    rows = [
        machine | {"check": f"{group}: {check}", "verdict": "pass", "detail": ""}
        for group in ("macchiato:bfloat16", "latte:bfloat16")
        for check in passed
    ]
    failed = {"check": "latte:bfloat16: runs repeat", "verdict": "FAIL", "detail": "a race"}
    left_out = {"check": "macchiato:bfloat16: large", "verdict": "FAIL", "detail": "out of memory"}
    gpu_check.renew_table([*rows, machine | failed, machine | left_out], made)
    found = checked.read(made)
    assert [(r.card, r.name, r.step) for r in found] == [
        (80, "conv", False),
        (90, "latte", True),
        (90, "macchiato", False),
        (90, "macchiato", True),
    ]
    assert found[2][4:8] == (32, 128, 128, 3) and found[2].ptxas == "12.9"


def gated_linear_attention(q, k, v, g, scale):
    """What chunk_gla computes, step by step."""
    state = torch.zeros(q.shape[0], *q.shape[2:], v.shape[-1])
    out = []
    for t in range(q.shape[1]):
        state = g[:, t, ..., None].exp() * state + k[:, t, ..., None] * v[:, t, :, None]
        out.append(scale * (q[:, t, :, None] @ state)[..., 0, :])
    return torch.stack(out, 1), None


def test_gla_with_these_gates_is_latte(monkeypatch):
    q, k, v = (torch.randn(2, 19, 2, n) for n in (3, 3, 5))
    monkeypatch.setattr(
        gpu_baselines,
        "find",
        lambda module, name: gated_linear_attention if "gla" in name else None,
    )
    want, _ = latte_attention(q, k, v)
    torch.testing.assert_close(gpu_baselines.latte_baselines()["chunk_gla"](q, k, v), want)


def hgrn(x, g):
    """What chunk_hgrn computes, step by step."""
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = g[:, t].exp() * h + x[:, t]
        out.append(h)
    return torch.stack(out, 1), None


def test_hgrn_with_these_inputs_is_the_rg_lru(monkeypatch):
    x, r, i = (torch.randn(2, 19, 4) for _ in range(3))
    theta = torch.randn(4)
    monkeypatch.setattr(gpu_baselines, "find", lambda module, name: hgrn)
    want, _ = rg_lru(x, r, i, theta)
    torch.testing.assert_close(gpu_baselines.rg_lru_baselines()["chunk_hgrn"](x, r, i, theta), want)


def test_profile(tmp_path, capsys):
    gpu_profile.main(arguments(tmp_path))
    rows = read_rows(tmp_path / "gpu_profile.csv")
    assert set(rows[0]) >= MACHINE
    wholes = [row for row in rows if not row["kernel"]]
    models = [gpu_models.OURS, gpu_models.RIVAL, gpu_models.OURS, gpu_models.LLAMA]
    assert [row["model"] for row in wholes] == models
    for whole in wholes:
        place = whole["case"], whole["model"]
        own = [row for row in rows if row["kernel"] and (row["case"], row["model"]) == place]
        assert sum(float(row["launches"]) for row in own) == float(whole["launches"])
        assert float(whole["busy_us"]) > 0 and float(whole["allocated_mb"]) > 0
        assert float(whole["busy_us"]) + float(whole["gap_us"]) <= float(whole["host_us"])
        assert float(whole["read_gb"]) > 0
    assert "aten::add" in {row["kernel"] for row in rows}
    (fused,) = read_rows(tmp_path / "gpu_fused.csv")
    assert float(fused["times_both"]) > 0 and fused["kernels"] in ("1", "2")


def test_two_kernels_and_a_mixture_compute_what_one_does():
    lq, lk, q, k, v = (torch.randn(1, 19, 2, n) for n in (4, 3, 8, 8, 8))
    branches = (
        partial(sliding_window_attention, q, k, v, window=5),
        partial(latte_attention, lq[..., 1:], lk, v),
    )
    found = gpu_profile.in_two(lq.softmax(-1)[..., :1], *branches)
    torch.testing.assert_close(found, macchiato_attention(lq, lk, q, k, v, window=5)[0])


def test_one_kernel_serves_the_lengths_that_were_measured():
    """Two would need the times of both branches, and of a copy of what they write and read."""
    times = {
        (int(row["T"]), row["side"]): row
        for row in read_rows(RESULTS / "gpu_macchiato.csv")
        if row["mode"] == "forward"
    }
    rate = float(read_rows(RESULTS / "gpu_latte.csv")[0]["copy_gb_per_s"])
    lengths = {T for T, _ in times}
    assert lengths == {2048, 32768, 131072}
    for T in lengths:
        fused, window, latents = (
            times[T, side] for side in ("macchiato", "its window", "its latents")
        )
        moved = 3 * 2 * T * int(fused["H"]) * int(fused["D"])  # bytes: two are read, one is written
        two = sum(float(row["median_ms"]) for row in (window, latents)) + moved / rate / 1e6
        assert gpu_profile.kernels_of_row({"fused": fused["median_ms"], "two": two}) == 1
    assert gpu_profile.kernels_of_row({"fused": 1.0, "two": 0.9}) == 2


def test_gaps_are_what_no_kernel_fills():
    times = {"a": (0, 4), "b": (2, 5), "c": (8, 9)}
    ran = [gpu_profile.Kernel(name, *time) for name, time in times.items()]
    assert gpu_profile.busy_and_gaps(ran) == (6, 3) and gpu_profile.busy_and_gaps([]) == (0, 0)
