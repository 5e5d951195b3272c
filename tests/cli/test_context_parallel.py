"""Blocks and windows cut over two processes, as torchrun starts them, against one process."""

import torch
from safetensors.torch import load_file

from latte.cli import main
from latte.lab.data.blocks import SharedBlocks
from tests.helpers import python, read_csv

# What torchrun does, its processes forked from one that has imported what each of them needs.
LAUNCH = """
import shutil, sys
from pathlib import Path
import latte.models.modeling, latte.lab.train.run, torch.optim, torch.utils.tensorboard
from torch import distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from latte.cli import main

def work(recipe, folder):
    train = ["train", recipe, "training.context_parallel=2"]
    codes = [main([*train, f"output_dir={folder}/two"])]
    if dist.get_rank() == 0:  # a run that was killed after its second step
        shutil.copytree(f"{folder}/two", f"{folder}/resumed")
        for name in ("checkpoint-4", "finished.json", "model.safetensors", "manifest.json"):
            path = Path(folder, "resumed", name)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    dist.barrier()
    codes += [main([*train, f"output_dir={folder}/resumed"])]
    for name, options in (("cut", ["--context-parallel", "2"]), ("shared", [])):
        words = ["evaluate", f"{folder}/two", "--lengths", "1,20", "--positions", "7,13"]
        codes += [main([*words, "--output", f"{folder}/{name}", *options])]
    return max(codes)

standalone = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": "two"}
launch = elastic_launch(LaunchConfig(1, 1, 2, start_method="fork", **standalone), work)
sys.exit(max(launch(*sys.argv[1:]).values()))
"""


def scores(folder):
    rows = []
    for name in ("evaluation.csv", "positions.csv"):
        rows += read_csv(folder / name)
    assert len(rows) == 6
    return [[float(row[name]) for name in ("length", "tokens", "loss")] for row in rows]


def test_two_processes_train_and_score_as_one(place, tmp_path):
    done = python("-c", LAUNCH, place.recipe(), tmp_path)
    assert "4 steps of 64 tokens on 2 processes" in done.stdout  # both have the same blocks
    alone, two, resumed = (
        load_file(folder / "model.safetensors")
        for folder in (place.trained(), tmp_path / "two", tmp_path / "resumed")
    )
    for name, weight in alone.items():
        torch.testing.assert_close(two[name], weight, rtol=0, atol=1e-4)
        assert torch.equal(resumed[name], two[name])
    # One process on the same model; at 1 a window is shorter than a group is large.
    words = ["evaluate", str(tmp_path / "two"), "--lengths", "1,20", "--positions", "7,13"]
    assert main([*words, "--output", str(tmp_path / "one")]) == 0
    expected = torch.tensor(scores(tmp_path / "one"), dtype=torch.float64)
    for name in ("cut", "shared"):
        found = torch.tensor(scores(tmp_path / name), dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert done.stdout.count("written: ") == 2  # one process speaks


def test_a_group_reads_the_same_blocks():
    """Four processes take batches of three by turns; groups of two are given the same ones."""
    shared = SharedBlocks(list(range(12)), 3, 2)
    batches = [[shared[3 * batch + i] for i in range(3)] for batch in range(len(shared) // 3)]
    steps = [batches[i : i + 4] for i in range(0, len(batches), 4)]
    first, second, third, fourth = [0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]
    assert steps == [[first, first, second, second], [third, third, fourth, fourth]]
