"""The benchmark of serving runs on a tiny checkpoint."""

import pytest

from experiments.benchmarks import records

pytest.importorskip("transformers.cli.serving.systemone", reason="a server of Transformers 5.23")


@pytest.mark.slow
def test_second_turns(tmp_path, command):
    assert "are equal: True" in command("serving")
    rows = records.read_rows(tmp_path / "serving.csv")
    at = {(row["server"], row["turn"], row["document_tokens"]): row for row in rows}
    assert len(rows) == len(at) == 2 * (2 + 3)
    kept, anew = (at[name, "second turn", "256"] for name in ("states", "anew"))
    assert kept["prompt_tokens"] == anew["prompt_tokens"] and anew["cached_tokens"] == "0"
    alone = at["anew", "new tokens alone", "256"]
    read = int(kept["prompt_tokens"]) - int(kept["cached_tokens"])
    assert read == int(alone["prompt_tokens"]) + 1


@pytest.mark.slow
def test_clients_at_once(tmp_path, command):
    command("serving_clients")
    rows = records.read_rows(tmp_path / "serving_clients.csv")
    served = [row for row in rows if row["side"] == "latte serve"]
    assert [(row["clients"], row["streamed"]) for row in served] == [
        *(("1", "True"), ("1", "False")),
        *(("2", "True"), ("2", "False")),
    ]
    assert [(row["side"], row["clients"]) for row in rows[len(served) :]] == [
        *(("between tokens", "alone"), ("between tokens", "long prompt")),
        ("between tokens", "one piece and a step"),
        *(("generate, padded", "1"), ("generate, padded", "2")),
    ]


@pytest.mark.slow
def test_bad_clients(tmp_path, command):
    command("serving_soak", "--minutes", "0.05")
    last = records.read_rows(tmp_path / "serving_soak.csv")[-1]
    assert int(last["requests"]) > 0 and last["wrong"] == "0"
