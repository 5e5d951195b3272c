"""Where the kernels' tests run, on which sizes, and fences around their buffers."""

from __future__ import annotations

import torch

from tests.ops.opdb import F32, OPS, SIZES, Bench

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def kernels(op: str, **sizes: int) -> Bench:
    """A row of the table on Triton in fp32: with one head and a window of 16 by default."""
    few = SIZES | {"H": 1, "G": 1, "W": 16}
    return Bench(OPS[op], "triton", F32, few | sizes, torch.device(DEVICE))


class Fences:
    """Replaces PyTorch's empty buffers by NaN ones inside larger NaN ones."""

    def __init__(self) -> None:
        self.kept: list[tuple[torch.Tensor, int]] = []

    def fenced(self, shape, dtype, device, fence=512):
        size = 1
        for n in shape:
            size *= n
        whole = torch.full((size + 2 * fence,), torch.nan, dtype=dtype, device=device)
        self.kept.append((whole, size))
        return whole[fence : fence + size].view(shape)

    def of(self, x):
        """A copy of ``x`` inside NaN: what is read beyond it shows in the results."""
        out = self.fenced(x.shape, x.dtype, x.device)
        out.detach().copy_(x)
        return out

    def check(self, fence=512):
        assert self.kept
        for whole, size in self.kept:
            assert torch.isnan(whole[:fence]).all() and torch.isnan(whole[fence + size :]).all()

    def guard(self, monkeypatch):
        """From here on, buffers made by ``new_empty`` and ``empty_like`` are fenced."""
        plain = torch.Tensor.new_empty

        def new_empty(like, size, dtype=None, device=None):
            if not isinstance(size, tuple):
                return plain(like, size, device=device)  # the interpreter's own
            if not (dtype or like.dtype).is_floating_point:
                return plain(like, size, dtype=dtype, device=device)  # which cannot be NaN
            return self.fenced(size, dtype or like.dtype, like.device)

        def empty_like(x, memory_format=None):
            return self.fenced(tuple(x.shape), x.dtype, x.device)

        monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
        monkeypatch.setattr(torch, "empty_like", empty_like)
