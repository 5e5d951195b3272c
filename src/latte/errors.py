"""A user's mistake is one line: the exception that says so, and a parser of arguments that does."""

from __future__ import annotations

import errno
import os
import re


class LatteError(ValueError):
    """A user's mistake, or a state of the user's machine: the message says what was expected.

    Library functions raise it (or a plain ``ValueError``) for bad input; ``latte`` prints the
    message on one line and leaves with exit code 2.
    """


def one_line(error: BaseException, *, first: bool = False) -> str:
    """What an error says, or else its type, in one line of at most 300 characters.

    first: take its first line alone, where what follows it is a traceback or advice.
    """
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = " ".join(" ".join(lines[:1] if first else lines).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


LARGEST_SEED = 2**32 - 1  # that NumPy takes


def check_seed(name: str, seed: int) -> None:
    """Raise LatteError if NumPy and PyTorch do not both take this seed."""
    if not 0 <= seed <= LARGEST_SEED:
        raise LatteError(f"{name}: expected 0 to {LARGEST_SEED}, got {seed}")


def is_disk_full(error: BaseException) -> bool:
    """Whether an error is one of a full disk, or of a limit on what may be written there."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    # As safetensors says it, and as PyTorch's writer of archives does, which hides the reason.
    return bool(re.search(r"\(os error (28|122|27)\)|unexpected pos \d+", str(error)))


def why_not_written(error: BaseException) -> str:
    """Why a file was not written, in one line."""
    if is_disk_full(error):
        return getattr(error, "strerror", None) or os.strerror(errno.ENOSPC)
    return getattr(error, "strerror", None) or one_line(error, first=True)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is one of memory: Python's, or PyTorch's of a GPU or a CPU."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or "can't allocate memory" in str(error)
