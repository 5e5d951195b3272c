"""malloc: keep freed memory for the next tensor, or give it back to the system.

The C library of Linux (glibc) takes every piece above 32 MB from the system and gives it back when
it is freed. Each of its pages is then a page fault and zeroed anew: of a step of training with a
large vocabulary, whose logits are such pieces, that can be the longest part.

https://www.gnu.org/software/libc/manual/html_node/Malloc-Tunable-Parameters.html
"""

from __future__ import annotations

import ctypes
import functools
import os

# Numbers of glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8


def keep_memory() -> bool:
    """Let this process keep the memory that it frees, for its next large tensors.

    Its resident memory then stays at the peak. :func:`release_memory` returns free memory to the
    system. It has no effect on GPUs, on systems without glibc, and with ``LATTE_KEEP_MEMORY=0`` in
    the environment. The commands of ``latte`` call it. Your own program can call it too, before its
    first tensor. Processes that the program starts must call it themselves.

    Returns:
        Whether memory is kept.
    """
    glibc = _glibc()
    if glibc is None or os.environ.get("LATTE_KEEP_MEMORY") == "0":
        return False
    # No block gets a mapping of its own, and free memory at the end of the heap is not given back
    # (-1 is the largest size). All threads share one heap, because other heaps hold 64 MB at most,
    # and larger blocks would be mapped again.
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_ARENA_MAX, 1))
    return all([glibc.mallopt(name, value) for name, value in settings])


def release_memory() -> None:
    """Give memory that is free back to the system, where there is glibc."""
    glibc = _glibc()
    if glibc is not None:
        glibc.malloc_trim(0)


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    """The C library of this process, if it is glibc."""
    try:
        library = ctypes.CDLL(None)
        if hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt"):
            return library
    except (OSError, TypeError):  # Windows
        pass
    return None
