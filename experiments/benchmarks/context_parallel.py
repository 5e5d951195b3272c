"""Context parallelism on one machine, over gloo: peak memory of each process, bytes exchanged.

One forward and backward pass of a small model (two layers of width 32, a window of 128) over one
row of tokens. Memory is the most that any process of a group used beyond what it held before the
pass; bytes are what a process sends in all forward exchanges of a layer, the halo among them.

    python -m experiments.benchmarks.context_parallel [--tokens 32768 ...] [--processes 1 2 4]
        [--preset NAME]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from latte.lab import machine
from latte.models import LatteForCausalLM, preset_config
from latte.parallel import context_parallel, handover, shard_batch

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "num_latents": 16,
    "sliding_window": 128,
}
MIB = 2**20


def measure(rank: int, processes: int, preset: str, tokens: int, store: str, out: Any) -> None:
    """One pass in one of the processes; its peak and what it has sent go to ``out``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes)
    torch.manual_seed(0)
    model = LatteForCausalLM(preset_config(preset, "tiny", **SIZES)).train()
    ids = torch.randint(64, (1, tokens))
    batch = shard_batch({"input_ids": ids, "labels": ids})
    sent, gather = [0], handover.all_gather

    def counted(x_N: torch.Tensor, group: Any) -> torch.Tensor:
        sent[0] += x_N.nbytes
        return gather(x_N, group)

    handover.all_gather = counted
    machine.reset_peak_memory()
    before = machine.memory_bytes()
    with context_parallel(model):
        loss = model(**batch).loss
        loss.backward()
    layers = model.config.num_hidden_layers
    out[rank] = (machine.peak_memory_bytes() - before, sent[0] // layers, loss.item())
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2**15, 2**16, 2**17, 2**18])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--preset", default="latte-r-swa++")
    options = parser.parse_args()
    print("| tokens | processes | peak, MiB a process | of one process | bytes a layer | loss |")
    print("|---:|---:|---:|---:|---:|---:|")
    for tokens in options.tokens:
        alone = None
        for processes in options.processes:
            with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
                out = manager.dict()
                store = f"file://{Path(folder, 'store')}"
                arguments = (processes, options.preset, tokens, store, out)
                mp.start_processes(measure, arguments, processes, start_method="fork")
                peak, sent, loss = (max(x) for x in zip(*out.values(), strict=True))
            alone = alone or peak
            print(
                f"| {tokens:,} | {processes} | {peak / MIB:,.1f} | {peak / alone:.3f} | {sent:,} |"
                f" {loss:.6f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
