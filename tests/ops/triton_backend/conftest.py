"""Triton's interpreter for the tests of this folder: quicker, and with bf16 that rounds.

The kernels' tests need a GPU, or ``TRITON_INTERPRET=1`` before Triton is imported; without either
they are not collected, and ``test_interpreted.py`` starts them in a process of their own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path[:0] = [str(folder) for folder in (Path(__file__).parent, *Path(__file__).parents[1:3])]

from triton_interpreter import quicken  # noqa: E402


def scan_whole_rows(self, inputs):
    """The interpreter's sequential scan, on whole slices instead of single elements."""
    import numpy as np

    axis = self.axis
    data = [np.moveaxis(x.handle.data, axis, 0) for x in inputs]
    out = [np.zeros_like(x) for x in data]
    for j, x in enumerate(data):
        out[j][0] = x[0]
    for i in range(1, data[0].shape[0]):
        earlier = [self.to_tensor(o[i - 1 : i], x.dtype) for o, x in zip(out, inputs, strict=True)]
        here = [self.to_tensor(d[i : i + 1], x.dtype) for d, x in zip(data, inputs, strict=True)]
        merged = self.combine_fn.fn(*earlier, *here)
        merged = merged if isinstance(merged, tuple) else (merged,)
        for j, x in enumerate(merged):
            out[j][i : i + 1] = x.handle.data
    return [
        self.to_tensor(np.ascontiguousarray(np.moveaxis(o, 0, axis)), x.dtype)
        for o, x in zip(out, inputs, strict=True)
    ]


def round_to_nearest(cast):
    """The interpreter cuts bf16 off; a GPU rounds to nearest even, as PyTorch does."""

    def cast_impl(self, source, target):
        import torch
        from triton import language as tl
        from triton.runtime.interpreter import TensorHandle

        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return cast(self, source, target)
        rounded = torch.tensor(source.data).bfloat16().view(torch.uint16)
        return TensorHandle(rounded.numpy(), target.scalar)

    return cast_impl


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

quicken()
if os.environ.get("TRITON_INTERPRET") == "1":
    try:
        from triton.runtime import interpreter
    except ImportError:
        pass
    else:
        interpreter.ScanOps.generic_scan = scan_whole_rows
        builder = interpreter.InterpreterBuilder
        builder.cast_impl = round_to_nearest(builder.cast_impl)
