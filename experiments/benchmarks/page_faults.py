"""Page faults and time of a training step: as malloc is, after one large tensor, and kept.

Two loops of ``latte-r-swa++`` at size tiny, fp32: 4 x 256 tokens with its own vocabulary, and
1 x 512 tokens with a vocabulary of 49,152, where the logits and their gradient are 100 MB each.
Each row is a process of its own. The first steps, which fill the heap and the optimiser's state,
are not counted.

glibc's malloc gives free memory at the heap's end back to the system beyond a threshold. The
threshold is twice the largest piece of at most 32 MB that was freed so far. So a loop's page faults
depend on what the process freed before it: "one tensor first" frees 31 MB.

    python -m experiments.benchmarks.page_faults [--steps 10]
"""

from __future__ import annotations

import argparse
import resource
from statistics import median

import torch

from latte.lab import machine
from latte.lab.malloc import keep_memory
from latte.models import LatteForCausalLM, preset_config

LOOPS = {
    "4 x 256, own vocabulary": (4, 256, {}),
    "1 x 512, 49,152": (1, 512, {"vocab_size": 49152}),
}
SIDES = ("as malloc is", "one tensor first", "kept")
WARM_UP = 3


def steps(loop: str, side: str, count: int) -> list[tuple[int, float]]:
    """Minor page faults and seconds of each step."""
    if side == "kept" and not keep_memory():
        raise SystemExit("memory cannot be kept: no glibc, or LATTE_KEEP_MEMORY=0")
    rows, tokens, overrides = LOOPS[loop]
    torch.manual_seed(0)
    model = LatteForCausalLM(preset_config("latte-r-swa++", "tiny", **overrides)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(model.config.vocab_size, (rows, tokens))
    if side == "one tensor first":
        torch.zeros(31 << 20, dtype=torch.uint8)

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
    parser.add_argument("--steps", type=int, default=10, help="steps counted")
    count = parser.parse_args().steps
    for loop in LOOPS:
        print(loop)
        for side in SIDES:
            faults, seconds = zip(*machine.in_fresh_process(steps, loop, side, count), strict=True)
            print(
                f"{side:>18}: {median(faults):>7,.0f} page faults, {median(seconds):.3f} s a step"
            )
    print(machine.describe())


if __name__ == "__main__":
    main()
