"""Long Range Arena (Tay et al., arXiv 2011.04006): five classification tasks on long sequences.

    task = load_task("listops", ListOpsOptions(train_examples=1000), cache="cache/")
    batch = task.train.batch([0, 1, 2])  # input_ids, labels and, if lengths differ, attention_mask

Every task has options of its own, `OPTIONS[name]`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from experiments.lra.data.examples import Balance, Examples, Task, TaskOptions, class_balance
from experiments.lra.data.image import ImageOptions
from experiments.lra.data.listops import ListOpsOptions
from experiments.lra.data.pathfinder import PathfinderOptions
from experiments.lra.data.text import RetrievalOptions, TextOptions
from latte.errors import LatteError

KINDS = (ListOpsOptions, TextOptions, RetrievalOptions, ImageOptions, PathfinderOptions)
OPTIONS: dict[str, type[Any]] = {kind.name: kind for kind in KINDS}

__all__ = [
    "OPTIONS",
    "Balance",
    "Examples",
    "ImageOptions",
    "ListOpsOptions",
    "PathfinderOptions",
    "RetrievalOptions",
    "Task",
    "TaskOptions",
    "TextOptions",
    "class_balance",
    "load_task",
    "options_of",
]


def options_of(name: str) -> type[Any]:
    """The class of a task's options; LatteError for a task that there is not."""
    if not isinstance(name, str) or name not in OPTIONS:
        raise LatteError(f"task: expected one of {', '.join(OPTIONS)}, got {name!r}")
    return OPTIONS[name]


def load_task(
    name: str,
    options: TaskOptions,
    cache: str | os.PathLike[str],
    progress: bool = False,
    workers: int = 1,
) -> Task:
    """A task's three splits. What is generated, by `workers` processes, is kept in `cache`.

    Raises:
        LatteError: a wrong name, impossible options, missing or malformed files.
    """
    kind = options_of(name)
    if not isinstance(options, kind):
        raise LatteError(f"task {name}: expected {kind.__name__}, got {type(options).__name__}")
    options.check()
    return options.load(Path(cache).expanduser(), progress, workers)
