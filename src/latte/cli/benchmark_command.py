"""`latte benchmark`: options and action. Heavy imports stay inside."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from .evaluate_command import names


def add_options(parser: ArgumentParser) -> None:
    """What `latte benchmark` takes; defaults are those of `experiments.benchmark.Settings`."""
    parser.add_argument(
        "--ops", type=names, help="latte, macchiato, window, linear, rg-lru, softmax, or none"
    )
    parser.add_argument("--models", type=names, help="presets and comparators, or none")
    parser.add_argument("--modes", type=names, help="forward, forward+backward, decode (models)")
    parser.add_argument("--size", help="of the models: tiny, small, paper, 400m, 2.6b")
    parser.add_argument("--batch", type=int, help="sequences side by side")
    parser.add_argument("--heads", type=int, help="of the ops")
    parser.add_argument("--latents", type=int, help="of the ops, per head")
    parser.add_argument("--head-dim", type=int, help="of the ops: width of keys and values")
    parser.add_argument("--window", type=int, help="of the ops, in keys")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16")
    parser.add_argument("--backend", help="of the ops: reference, torch or triton")
    parser.add_argument("--device", help="such as cpu or cuda; a GPU if there is one")
    parser.add_argument("--budget", type=float, help="seconds of timed calls of each")
    parser.add_argument(
        "--no-memory", action="store_true", help="times alone; memory costs a process per case"
    )
    parser.add_argument("--output", default="runs/benchmark", help="folder of benchmark.csv")


def run(options: Namespace) -> int:
    """latte benchmark ..."""
    from ..experiments.benchmark import Settings, benchmark

    given = {
        name: value
        for name in Settings.__dataclass_fields__
        if (value := getattr(options, name, None)) is not None
    }
    for name in ("ops", "models", "modes"):
        if name in given:
            given[name] = () if given[name] == ["none"] else tuple(given[name])
    if "lengths" in given:
        given["lengths"] = tuple(given["lengths"])
    settings = Settings(**given, memory=not options.no_memory)
    benchmark(settings, Path(options.output))
    print(f"written: {Path(options.output) / 'benchmark.csv'}")
    return 0
