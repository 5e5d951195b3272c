"""Killed with SIGKILL, a run ends with the very bytes of an uninterrupted one.

`python -m tests.lab.train.kill_harness FOLDER 10 60 1 2-ddp 2-fsdp2` does the same with ten kills.
"""

import json

import pytest
import transformers
from packaging.version import Version

from tests.helpers import python

HARNESS = "tests.lab.train.kill_harness"


# With 5.17 something is loaded to "cpu:0", which PyTorch does not know; with 5.23 it is not.
two_on_a_cpu = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="this Transformers cannot resume two processes on a CPU",
)
BY_TWO = [pytest.param(case, marks=two_on_a_cpu) for case in ("2-ddp", "2-fsdp2")]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """One process, two with DDP and two with FSDP2, each killed once."""
    folder = tmp_path_factory.mktemp("killed")
    done = python("-m", HARNESS, folder, 1, 12, "1", "2-ddp", "2-fsdp2")
    outcomes = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            outcomes |= json.loads(line)
    return folder, outcomes


@pytest.mark.parametrize("case", ["1", *BY_TWO])
def test_resumed_weights_are_bit_identical(killed, case):
    outcome = killed[1][case]
    assert outcome["identical"], outcome
    assert 0 < outcome["killed_after_log_lines"][0] < 15  # it was killed midway, not at the end


def test_metrics_of_a_killed_run_have_no_gap_and_no_repeat(killed):
    from latte.lab.train.metrics import read_metrics

    records = read_metrics(killed[0] / "1" / "killed", "train")
    assert [record["step"] for record in records] == list(range(1, 13))
    whole = read_metrics(killed[0] / "1" / "whole", "train")
    assert [r["loss"] for r in records] == [r["loss"] for r in whole]


@two_on_a_cpu
def test_fsdp2_trains_as_ddp_does(killed):
    """Sharding changes where weights are, not what is learnt: only the order of sums differs."""
    import torch
    from safetensors.torch import load_file

    ddp = load_file(killed[0] / "2-ddp" / "whole" / "model.safetensors")
    sharded = load_file(killed[0] / "2-fsdp2" / "whole" / "model.safetensors")
    assert ddp.keys() == sharded.keys()
    for name, tensor in ddp.items():
        torch.testing.assert_close(sharded[name], tensor, rtol=0, atol=2e-4, msg=name)
    assert (killed[0] / "2-fsdp2" / "killed").joinpath("checkpoint-12", "shards").is_dir()
