"""Page faults of memory that malloc keeps, and memory that it gives back."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from latte.lab import machine, malloc

needs_glibc = pytest.mark.skipif(malloc._glibc() is None, reason="there is no glibc here")
# Page faults of 100 MB taken, written and freed, twice; from whichever thread.
TWICE = """
import ctypes, os, resource, sys, threading
from latte import cli
from latte.lab import malloc
from latte.cli import commands

libc, size = ctypes.CDLL(None), 100_000_000
libc.malloc.restype = libc.memset.restype = ctypes.c_void_p

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    place = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(size)))
    libc.memset(place, 1, ctypes.c_size_t(size))
    libc.free(place)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def twice(options=None):
    print(faults(), faults())

if sys.argv[1] == "command":
    twice.__name__ = "benchmark"  # as the parser calls it
    commands.benchmark = twice
    cli.main(["benchmark"])
elif sys.argv[1] == "thread":
    assert malloc.keep_memory()
    thread = threading.Thread(target=twice)
    thread.start()
    thread.join()
else:
    assert malloc.keep_memory() is (os.environ.get("LATTE_KEEP_MEMORY") != "0")
    twice()
"""


def twice(how: str, **environment: str) -> list[int]:
    """The faults of the first and the second time, in a process of its own."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    del given["LATTE_KEEP_MEMORY"]
    done = subprocess.run(
        [sys.executable, "-c", TWICE, how],
        env=given | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(number) for number in done.stdout.split()]


@needs_glibc
@pytest.mark.parametrize("how", ["call", "thread", "command"])
def test_kept_memory_faults_once(how: str) -> None:
    first, second = twice(how)
    # 24,414 pages of 4 KiB; pages of other sizes are fewer, and the system may use huge ones.
    assert first > 20
    assert second < first / 4


@needs_glibc
def test_the_environment_turns_it_off() -> None:
    first, second = twice("call", LATTE_KEEP_MEMORY="0")
    assert second > first / 2


def test_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LATTE_KEEP_MEMORY")
    monkeypatch.setattr(malloc, "_glibc", lambda: None)
    assert malloc.keep_memory() is False
    malloc.release_memory()


def _kept_after_use() -> list[int]:
    """Resident bytes that 200 MB leave when they are freed, and after the peak starts anew."""
    malloc.keep_memory()
    before = machine.memory_bytes()
    piece: Any = bytearray(200_000_000)
    del piece
    kept = machine.memory_bytes() - before
    machine.reset_peak_memory()
    return [kept, machine.peak_memory_bytes() - before]


@needs_glibc
def test_a_new_peak_does_not_count_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LATTE_KEEP_MEMORY")
    kept, peak = machine.in_fresh_process(_kept_after_use)
    assert kept > 150_000_000 > 50_000_000 > peak
