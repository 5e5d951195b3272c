"""Results in order by several processes: the same, an early end, and a process that is killed."""

from __future__ import annotations

import os
import signal
from concurrent.futures.process import BrokenProcessPool

import pytest

from experiments.lra.data.examples import in_order

# A process that hangs fails its test in a minute, not in the ten of the whole suite.
pytestmark = pytest.mark.timeout(60)


def large(index: int) -> bytes:
    """A result that is longer than a pipe's buffer: sending it takes as long as it is not read."""
    return bytes([index % 256]) * 1_000_000


def killed(index: int) -> int:
    if index == 40:
        os.kill(os.getpid(), signal.SIGKILL)
    return index


def test_processes_that_are_sending_do_not_hold_up_the_end() -> None:
    results = in_order(large, workers=2)
    assert [next(results)[0] for _ in range(40)] == list(range(40))
    results.close()


def test_a_killed_process_ends_the_work() -> None:
    with pytest.raises(BrokenProcessPool):
        for expected, found in zip(range(1000), in_order(killed, workers=2), strict=False):
            assert found == expected
