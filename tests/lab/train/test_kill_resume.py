"""Killed with SIGKILL, a run ends with the very bytes of an uninterrupted one.

The harness (`kill_harness.py`) does the same with ten kills:
    python tests/lab/train/kill_harness.py --kills 10 1 2-ddp 2-fsdp2
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

HARNESS = Path(__file__).with_name("kill_harness.py")
SOURCES = Path(__file__).parents[3] / "src"


# With 5.17 something is loaded to "cpu:0", which PyTorch does not know; with 5.23 it is not.
two_on_a_cpu = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="this Transformers cannot resume two processes on a CPU",
)
BY_TWO = [pytest.param(case, marks=two_on_a_cpu) for case in ("2-ddp", "2-fsdp2")]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """One process, two with DDP and two with FSDP2, each killed once."""
    folder = tmp_path_factory.mktemp("killed")
    command = [sys.executable, str(HARNESS), "--kills", "1", "--steps", "12"]
    done = subprocess.run(
        [*command, "--output", str(folder), "1", "2-ddp", "2-fsdp2"],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCES)},
    )
    outcomes: dict = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            outcomes |= json.loads(line)
    assert outcomes, done.stderr[-3000:]
    return folder, outcomes


@pytest.mark.parametrize("case", ["1", *BY_TWO])
def test_resumed_weights_are_bit_identical(killed: tuple[Path, dict], case: str) -> None:
    outcome = killed[1][case]
    assert outcome["identical"], outcome
    assert 0 < outcome["killed_after_log_lines"][0] < 15  # it was killed midway, not at the end


def test_metrics_of_a_killed_run_have_no_gap_and_no_repeat(killed: tuple[Path, dict]) -> None:
    from latte.lab.train.metrics import read_metrics

    records = read_metrics(killed[0] / "1" / "killed", "train")
    assert [record["step"] for record in records] == list(range(1, 13))
    whole = read_metrics(killed[0] / "1" / "whole", "train")
    assert [r["loss"] for r in records] == [r["loss"] for r in whole]


@two_on_a_cpu
def test_fsdp2_trains_as_ddp_does(killed: tuple[Path, dict]) -> None:
    """Sharding changes where weights are, not what is learnt: only the order of sums differs."""
    import torch
    from safetensors.torch import load_file

    ddp = load_file(killed[0] / "2-ddp" / "whole" / "model.safetensors")
    sharded = load_file(killed[0] / "2-fsdp2" / "whole" / "model.safetensors")
    assert ddp.keys() == sharded.keys()
    for name, tensor in ddp.items():
        torch.testing.assert_close(sharded[name], tensor, rtol=0, atol=2e-4, msg=name)
    assert (killed[0] / "2-fsdp2" / "killed").joinpath("checkpoint-12", "shards").is_dir()
