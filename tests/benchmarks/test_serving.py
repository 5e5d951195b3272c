"""The benchmark of serving runs on a tiny checkpoint."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import records

pytest.importorskip("transformers.cli.serving.systemone", reason="a server of Transformers 5.23")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serving.py"


@pytest.mark.slow
def test_second_turns(tmp_path):
    command = [sys.executable, str(SCRIPT), "--quick", "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "are equal: True" in done.stdout
    rows = records.read_rows(tmp_path / "serving.csv")
    at = {(row["server"], row["turn"], row["document_tokens"]): row for row in rows}
    assert len(rows) == len(at) == 2 * (2 + 3)
    kept, anew = (at[name, "second turn", "256"] for name in ("states", "anew"))
    assert kept["prompt_tokens"] == anew["prompt_tokens"] and anew["cached_tokens"] == "0"
    alone = at["anew", "new tokens alone", "256"]
    read = int(kept["prompt_tokens"]) - int(kept["cached_tokens"])
    assert read == int(alone["prompt_tokens"]) + 1


@pytest.mark.slow
def test_clients_at_once(tmp_path):
    script = SCRIPT.with_name("serving_clients.py")
    command = [sys.executable, str(script), "--quick", "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = records.read_rows(tmp_path / "serving_clients.csv")
    sides = [(row["side"], row["clients"]) for row in rows]
    assert sides == [
        *(("latte serve", "1"), ("latte serve", "2")),
        *(("between tokens", "alone"), ("between tokens", "long prompt")),
        ("between tokens", "one piece and a step"),
        *(("generate, padded", "1"), ("generate, padded", "2")),
    ]


@pytest.mark.slow
def test_bad_clients(tmp_path):
    script = SCRIPT.with_name("serving_soak.py")
    command = [sys.executable, str(script), "--quick", "--minutes", "0.05", "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    last = records.read_rows(tmp_path / "serving_soak.csv")[-1]
    assert int(last["requests"]) > 0 and last["wrong"] == "0"
