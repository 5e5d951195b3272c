"""Set Triton's interpreter up; small tiles for its kernels."""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests import triton_interpreter

    triton_interpreter.speed_up_interpreter()
    triton_interpreter.scan_and_round()


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 16 tokens and 4 channels for Triton's recurrences, which else have one chunk here.

    They go chunk by chunk, however many programs there are.
    """
    from latte.ops.triton_backend import launch, recurrence

    monkeypatch.setattr(recurrence, "LRU_CHUNK", 16)
    for options in (launch.LRU_BY_CHUNK, launch.LRU_WALK, launch.LRU_BACK, launch.LRU_CARRY):
        monkeypatch.setitem(options, "BE", 4)
    monkeypatch.setitem(launch.LRU_CARRY, "U", 2)
    for name, size in {"C": 16, "BE": 4}.items():
        monkeypatch.setitem(launch.CONVOLUTION, name, size)
    monkeypatch.setattr(recurrence, "LRU_WALKS_FROM", 10**9)
