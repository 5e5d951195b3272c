"""What command lines share: a parser whose errors are one line, and exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from latte.errors import LatteError, is_disk_full, is_out_of_memory, one_line, why_not_written
from latte.ops.processes import is_first_process


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


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, like every other mistake."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")
