"""Page faults of a training step whose logits are large, with and without ``keep_memory``.

A decoder of the plain kind with a vocabulary of 49,152, tokens 1 x 512, fp32: the logits and their
gradient are 100 MB each. Each side is a process of its own; the first steps, which fill the heap
and the optimiser's state, are not counted.

    python benchmarks/page_faults.py [--steps 5]
"""

from __future__ import annotations

import argparse
import resource
from statistics import median

import torch

from latte import machine
from latte.memory import keep_memory
from latte.models import LatteForCausalLM, preset_config

VOCABULARY, TOKENS, WARM_UP = 49_152, 512, 2


def steps(keep: bool, count: int) -> list[tuple[int, float]]:
    """Minor page faults and seconds of each step."""
    if keep and not keep_memory():
        raise SystemExit("memory cannot be kept: no glibc, or LATTE_KEEP_MEMORY=0")
    torch.manual_seed(0)
    model = LatteForCausalLM(preset_config("latte-r-swa++", "tiny", vocab_size=VOCABULARY)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(VOCABULARY, (1, TOKENS))

    def step() -> None:
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    found = []
    for _ in range(WARM_UP + count):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        seconds = machine.seconds_of(step)
        found.append((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, seconds))
    return found[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="steps counted")
    count = parser.parse_args().steps
    for name, keep in (("as malloc is", False), ("kept", True)):
        faults, seconds = zip(*machine.in_fresh_process(steps, keep, count), strict=True)
        print(f"{name:>12}: {median(faults):>7,.0f} page faults, {median(seconds):.3f} s a step")
    print(machine.describe())


if __name__ == "__main__":
    main()
