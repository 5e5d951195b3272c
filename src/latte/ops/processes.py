"""The processes that torchrun started, as their environment describes them.

Without torchrun there is one process. This module does not import torch.
"""

from __future__ import annotations

import os


def number_of_processes() -> int:
    """The number of processes of this run, on all machines."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_process() -> bool:
    """Whether this is the process that prints and writes the results."""
    return int(os.environ.get("RANK", "0")) == 0


def number_on_machine() -> int:
    """The number of this process on its machine, from 0: the GPU that it uses."""
    return int(os.environ.get("LOCAL_RANK", "0"))
