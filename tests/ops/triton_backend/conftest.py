"""The kernels' tests need a GPU, or ``TRITON_INTERPRET=1`` before Triton is imported.

Without either they are not collected, and ``test_interpreted.py`` starts them in a process of
their own.
"""

from __future__ import annotations

import os


def runnable() -> bool:
    """Whether kernels can run in this process: Triton, and a GPU or the interpreter."""
    import torch

    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"


# Kernels run in these files, and in no others.
collect_ignore_glob = [] if runnable() else ["test_kernels_*.py"]
