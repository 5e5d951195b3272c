"""`latte benchmark`: options and action. Heavy imports stay inside."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from latte.cli.evaluate_command import names


def add_options(parser: ArgumentParser) -> None:
    """What `latte benchmark` takes; what is not given is left to `evaluate.benchmark`."""
    options: list[tuple[str, Any, str]] = [
        ("--ops", names, "latte, macchiato, window, linear, rg-lru, softmax, or none"),
        ("--models", names, "presets and comparators, or none"),
        ("--modes", names, "forward, forward+backward, decode (of models); all"),
        ("--size", str, "of the models: tiny, small, paper, 400m, 2.6b; tiny"),
        ("--batch", int, "sequences side by side; 1"),
        ("--heads", int, "of the ops; 8"),
        ("--latents", int, "of the ops, per head; 32"),
        ("--head-dim", int, "of the ops, width of keys and values; 64"),
        ("--window", int, "of the ops, in keys; 128"),
        ("--dtype", str, "float32, bfloat16 or float16; float32"),
        ("--backend", str, "of the ops: reference, torch or triton; the library's choice"),
        ("--device", str, "such as cpu or cuda; a GPU if there is one"),
        ("--budget", float, "seconds of timed calls of each; 1"),
    ]
    for option, kind, text in options:
        parser.add_argument(option, type=kind, default=SUPPRESS, help=text)
    parser.add_argument(
        "--no-memory", action="store_true", help="times alone; memory costs a process per case"
    )
    parser.add_argument("--output", default="runs/benchmark", help="folder of benchmark.csv")


def run(options: Namespace) -> int:
    """latte benchmark ..."""
    from latte.evaluate.benchmark import Settings, benchmark

    given = {k: v for k, v in vars(options).items() if k in Settings.__dataclass_fields__}
    for name in ("ops", "models", "modes", "lengths"):
        if name in given:
            given[name] = () if given[name] == ["none"] else tuple(given[name])
    settings = Settings(**given, memory=not options.no_memory)
    benchmark(settings, Path(options.output))
    print(f"written: {Path(options.output) / 'benchmark.csv'}")
    return 0
