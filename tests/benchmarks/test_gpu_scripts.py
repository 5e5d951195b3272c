"""The GPU scripts run end to end on a CPU at tiny sizes; only their times mean nothing there."""

import sys

import gpu_check
import gpu_common
import gpu_correctness
import gpu_figures
import gpu_latte
import gpu_rivals
import pytest
import torch
from common import Times
from records import read_rows

from latte.ops import latte_attention, rg_lru

MACHINE = {"device", "cuda", "triton", "fla", "transformers", "torch", "python", "latte", "date"}
TIMES = {"median_ms", "p10_ms", "p90_ms", "calls"}


def arguments(out, *more):
    return [*more, "--quick", "--device", "cpu", "--out", str(out)]


def rows_of(script, out, columns, *more):
    """Run a script in this process; the rows of its CSV file, which have the columns."""
    script.main(arguments(out, *more))
    rows = read_rows(out / f"{script.__name__}.csv")
    assert rows and set(rows[0]) >= columns | MACHINE
    assert all(row["device"] == "cpu" and row["torch"] == torch.__version__ for row in rows)
    return rows


def a_place(tmp_path, **changes):
    parser = gpu_common.options("a test", 60)
    return gpu_common.place(parser.parse_args(arguments(tmp_path)))._replace(**changes)


def test_latte(tmp_path, capsys):
    rows = rows_of(gpu_latte, tmp_path, TIMES | {"side", "mode", "times_latte", "saved_mb"})
    assert {(r["mode"], r["B"]) for r in rows} == {
        (mode, B) for mode in gpu_common.MODES for B in ("1", "2")
    }
    for row in rows:
        # q, k and v of 64 tokens, 8 heads, 16 wide, fp32: saved once each, and not much more.
        assert 3 * 64 * 8 * 16 * 4 <= float(row["saved_mb"]) * 2**20 * 1.01 <= 4 * 64 * 8 * 16 * 4
    errors = read_rows(tmp_path / "gpu_latte_errors.csv")
    assert 0 < float(errors[0]["error_dk"]) < 1e-5
    goals = read_rows(tmp_path / gpu_common.TARGETS)
    assert [g["verdict"] for g in goals] == ["miss"]  # a CPU does not reach 60% of a copy
    assert "share of copy bandwidth" in capsys.readouterr().out
    assert gpu_figures.of_latte(tmp_path).read_bytes().startswith(b"\x89PNG")


def test_an_exhausted_budget_leaves_out_and_says_so(tmp_path, capsys):
    gpu_latte.main(arguments(tmp_path, "--budget", "0"))
    assert "out of time: 2 sizes left out" in capsys.readouterr().out


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


def test_a_failed_check_or_part_gives_exit_code_1(tmp_path, monkeypatch):
    row = {"check": "a", "verdict": "pass", "detail": "", "seconds": 0}
    monkeypatch.setattr(gpu_check, "run_checks", lambda at, seconds: [row])
    monkeypatch.setattr(gpu_check, "run_part", lambda name, at, seconds: None)
    assert gpu_check.main(arguments(tmp_path)) == 0
    row["verdict"] = "FAIL"
    assert gpu_check.main(arguments(tmp_path)) == 1
    row["verdict"] = "pass"
    monkeypatch.setattr(gpu_check, "run_part", lambda name, at, seconds: "out of time")
    assert gpu_check.main(arguments(tmp_path)) == 1


def test_a_part_beyond_its_time_is_ended():
    line = [sys.executable, "-c", "import time; time.sleep(60)"]
    slow = gpu_check.Running("slow", line, 0.0)
    assert slow.ended() and slow.broken() == "out of time"


@pytest.mark.parametrize(
    "group",
    [
        pytest.param("latte:bfloat16", marks=pytest.mark.slow),
        "macchiato:float16",
        pytest.param("rg_lru:float32", marks=pytest.mark.slow),
        "huge",
    ],
)
def test_checks_pass(tmp_path, group):
    assert gpu_correctness.main(arguments(tmp_path, group)) == 0
    rows = read_rows(tmp_path / f"gpu_checks-{group.replace(':', '-')}.csv")
    assert len(rows) >= 5 and {r["verdict"] for r in rows} <= {"pass", "skip"}
    assert sum(r["verdict"] == "pass" for r in rows) >= 5


def wrong_latte(q, k, v, *, backend, **options):
    """Right in the reference; elsewhere one output in a thousand is off."""
    out, state = latte_attention(q, k, v, backend=backend, **options)
    if backend != "reference":
        out = out + 0.1 * (torch.arange(out.shape[1]) % 50 == 49)[None, :, None, None].to(out)
    return out, state


def test_a_wrong_kernel_fails_and_the_checks_go_on(tmp_path, monkeypatch, capsys):
    case = gpu_correctness.CASES["latte"]
    broken = gpu_correctness.Case(
        wrong_latte, case.make, case.state, case.tokens, case.values, case.sources
    )
    monkeypatch.setitem(gpu_correctness.CASES, "latte", broken)
    monkeypatch.setattr(gpu_correctness, "compiles_in_one_graph", lambda b, T: "not looked at")
    assert gpu_correctness.main(arguments(tmp_path, "latte:float32")) == 1
    rows = read_rows(tmp_path / "gpu_checks-latte-float32.csv")
    verdicts = {row["check"].split(": ", 1)[1]: row["verdict"] for row in rows}
    assert verdicts["fp64 reference"] == verdicts["rows sum to 1"] == "FAIL"
    assert verdicts["runs repeat"] == "pass"
    assert f"FAIL  latte:float32: fp64 reference: {rows[0]['detail']}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("check", "spoil"),
    [
        ("past_is_past", lambda x: x + x.mean(1, keepdim=True)),
        ("past_is_past", lambda x: torch.zeros_like(x)),
        ("rows_sum_to_one", lambda x: 1.01 * x),
        ("runs_repeat", lambda x: x + torch.rand_like(x)),
        ("source_gradients_vanish", lambda x: x * torch.linspace(0, 1, x.shape[1])[:, None, None]),
    ],
)
def test_every_law_can_be_broken(tmp_path, check, spoil):
    case = gpu_correctness.CASES["latte"]

    def run(q, k, v, **options):
        if check == "source_gradients_vanish":
            k = spoil(k)
        out, state = latte_attention(q, k, v, **options)
        return out if check == "source_gradients_vanish" else spoil(out), state

    at = a_place(tmp_path)
    sizes = gpu_correctness.QUICK
    for op, fails in ((case.run, False), (run, True)):
        changed = gpu_correctness.Case(op, case.make, case.state, 3, values=2, sources=1)
        bench = gpu_correctness.Bench(at, changed, torch.float32, sizes)
        if fails:
            with pytest.raises(gpu_correctness.Failed):
                getattr(gpu_correctness, check)(bench, 70)
        else:
            getattr(gpu_correctness, check)(bench, 70)


def test_an_op_without_kernels_is_skipped(tmp_path, capsys):
    code = gpu_correctness.main(arguments(tmp_path, "conv:float32", "--backend", "nothing"))
    assert code == 0 and "skip  conv:float32: all checks: " in capsys.readouterr().out


def test_a_side_that_cannot_run_is_told_and_the_others_go_on(tmp_path, capsys):
    def broken():
        raise RuntimeError("no kernel image\nand more")

    times, failed = gpu_common.measure(
        a_place(tmp_path), {"a": lambda: 1, "b": broken}, budget=1e-4
    )
    assert set(times) == {"a"} and isinstance(times["a"], Times)
    assert failed == {"b": "RuntimeError: no kernel image"}
    assert "b: RuntimeError: no kernel image" in capsys.readouterr().out


def test_flash_linear_attention_missing_is_one_line_each(monkeypatch, capsys):
    for name in ("fla", "fla.ops", "fla.ops.lightnet", "fla.ops.gla", "fla.ops.hgrn"):
        monkeypatch.setitem(sys.modules, name, None)
    assert gpu_rivals.latte_rivals() == {} and gpu_rivals.rg_lru_rival() is None
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all("is left out" in line for line in lines)


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
        gpu_rivals, "find", lambda module, name: gated_linear_attention if "gla" in name else None
    )
    want, _ = latte_attention(q, k, v)
    torch.testing.assert_close(gpu_rivals.latte_rivals()["chunk_gla"](q, k, v), want)
    given = gpu_rivals.gla_with_given_gates()
    torch.testing.assert_close(given(q.softmax(-1), *gpu_rivals.gates(k), v), want)


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
    monkeypatch.setattr(gpu_rivals, "find", lambda module, name: hgrn)
    want, _ = rg_lru(x, r, i, theta)
    torch.testing.assert_close(gpu_rivals.rg_lru_rival()(x, r, i, theta), want)
