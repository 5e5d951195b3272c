"""A user's mistake is one line: the exception that says so, and a parser of arguments that does."""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
from collections.abc import Callable
from typing import NoReturn

from latte.processes import is_first_process


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


def exit_code(program: str, work: Callable[[], int | None], how_to_go_on: str) -> int:
    """Do the work of a command: 0, 2 for a user's mistake, 130 when interrupted; one line each.

    What the system refuses, such as to write on a full disk, is told as a mistake is. Characters
    that the output's encoding does not have are replaced.
    """
    replace_unknown_characters()
    try:
        return work() or 0
    except LatteError as error:
        code, line = 2, f"error: {' '.join(str(error).split())}"
    except BrokenPipeError:  # such as of `latte generate ... | head`: no mistake
        raise
    except OSError as error:  # such as a full disk in the middle of the work
        code, line = 2, f"error: {_of_system(error)}"
        if is_disk_full(error):
            line += f"; {how_to_go_on}"
    except KeyboardInterrupt:
        code, line = 130, f"interrupted; {how_to_go_on}"
    except Exception as error:
        code = 2
        if is_out_of_memory(error):
            line = f"error: out of memory: {one_line(error, first=True)}"
        elif is_disk_full(error):
            line = f"error: {why_not_written(error)}; {how_to_go_on}"
        else:
            raise
    if is_first_process():  # one line, not one per process of torchrun
        print(f"{program}: {line}", file=sys.stderr, flush=True)
    return code


def replace_unknown_characters() -> None:
    """Read and print ``?`` for what the encoding of standard input or output does not have."""
    for stream in (sys.stdin, sys.stdout):
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _of_system(error: OSError) -> str:
    """`runs/mine/metrics.jsonl: No space left on device`, as far as the error says so."""
    reason = error.strerror or one_line(error)
    return f"{error.filename}: {reason}" if error.filename else reason


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


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, like every other mistake."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")
