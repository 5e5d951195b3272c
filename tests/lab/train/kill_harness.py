"""Kill a training run with SIGKILL again and again; its weights must not show it.

    python -m tests.lab.train.kill_harness FOLDER KILLS STEPS 1 2-ddp 2-fsdp2

Trains a reference run to its end, then the same recipe in another folder, killed at random
moments (steps, saves and start-up alike) and started again each time, and compares every byte of
the final weights. Libraries are imported once; each attempt is a fork, which SIGKILL ends as it
would end any process.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

from tests.conftest import MODEL

RECIPE = {
    "model": {"preset": "latte-r-swa++", "size": "tiny"},
    "data": {"block_length": 64, "max_validation_tokens": 4096},
    "training": {
        "batch_size": 2,
        "gradient_accumulation": 2,
        "warmup_steps": 3,
        "log_steps": 1,
        "eval_steps": 7,
        "keep_checkpoints": 2,
    },
}


def write_corpus(folder: Path) -> str:
    """A few documents of pseudo-English, enough for some hundred blocks; number 0 is held out."""
    generator = random.Random(0)
    words = ["latent", "window", "state", "mean", "mass", "token", "sum", "of", "the", "a"]
    for number in range(8):
        text = " ".join(generator.choices(words, k=1500))
        (folder / f"document-{number}.txt").write_text(text + "\n", encoding="utf-8")
    return str(folder / "document-[1-7].txt")


def start(output_dir: Path, settings: dict, processes: int) -> list[int]:
    """Fork the processes of one attempt; gives their ids."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if processes > 1:
                    own = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
                    own |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
                    os.environ |= own | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                code = attempt(output_dir, settings)
            except BaseException as error:
                print(f"attempt failed: {error!r}", file=sys.stderr, flush=True)
            finally:
                os._exit(code)
        children.append(child)
    return children


def attempt(output_dir: Path, settings: dict) -> int:
    from latte.lab.train.recipe import recipe_from_dict
    from latte.lab.train.run import train

    recipe = recipe_from_dict({**settings, "output_dir": str(output_dir)})
    return 0 if train(recipe, quiet=True).finished else 1


def wait(children: list[int]) -> list[int]:
    """Exit codes (negative: the signal)."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def run(folder: Path, *, kills: int, processes: int, strategy: str, steps: int) -> dict:
    """The whole experiment; returns what happened, with `identical` True or False."""
    (folder / "text").mkdir(parents=True)
    settings = {section: dict(values) for section, values in RECIPE.items()}
    settings["model"]["overrides"] = {**MODEL, "hidden_dropout": 0.1}
    settings["data"] |= {
        "corpus": write_corpus(folder / "text"),
        "validation": str(folder / "text" / "document-0.txt"),
        "cache_dir": str(folder / "cache"),
    }
    settings["training"] |= {"max_steps": steps, "save_steps": 4, "strategy": strategy}
    began = time.perf_counter()
    codes = wait(start(folder / "whole", settings, processes))
    whole_seconds = time.perf_counter() - began
    if any(codes):
        return {"identical": False, "problem": f"the reference run ended with {codes}"}
    generator = random.Random(0)
    killed_at, done = [], 0
    while len(killed_at) < kills:
        children = start(folder / "killed", settings, processes)
        # Wait for a little progress, so that the kills walk through the run, then strike.
        target = (len(killed_at) + 1) * steps // (kills + 1)
        deadline = time.perf_counter() + 120
        while time.perf_counter() < deadline and lines(folder / "killed") < target:
            ended = os.waitpid(children[0], os.WNOHANG)[0]
            if ended:
                return {"identical": False, "problem": "a process ended before its kill"}
            time.sleep(0.002)
        time.sleep(generator.uniform(0, 1.5 * whole_seconds / (steps + 10)))
        for child in children:
            os.kill(child, signal.SIGKILL)
        wait(children)
        done = lines(folder / "killed")
        killed_at.append(done)
    codes = wait(start(folder / "killed", settings, processes))
    if any(codes):
        return {"identical": False, "problem": f"the last attempt ended with {codes}"}
    whole = (folder / "whole" / "model.safetensors").read_bytes()
    killed = (folder / "killed" / "model.safetensors").read_bytes()
    return {
        "identical": whole == killed,
        "bytes": len(whole),
        "killed_after_log_lines": killed_at,
        "checkpoints_left": sorted(p.name for p in (folder / "killed").glob("checkpoint-*")),
    }


def main() -> int:
    folder, kills, steps, *cases = sys.argv[1:]
    # Once for all attempts: importing takes longer than training.
    import torch.utils.tensorboard  # noqa: F401

    import latte.lab.train.run  # noqa: F401
    import latte.models.modeling  # noqa: F401

    for case in cases:
        processes, _, strategy = case.partition("-")
        own = {"processes": int(processes), "strategy": strategy or "ddp"}
        found = run(Path(folder, case), kills=int(kills), steps=int(steps), **own)
        print(json.dumps({case: found}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
