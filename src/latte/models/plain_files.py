"""Files that a command reads: plain ones, and the JSON object in them. A mistake is one line.

A pipe in the place of a file would be waited for without an end, and a device read without one.
This module imports nothing heavy.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from latte.errors import LatteError, one_line


def check_plain(path: Path) -> Path:
    """The path of a file that can be opened.

    Raises:
        LatteError: There is no such file, it is a folder, a pipe or a device, or it must not be
            read.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise LatteError(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
        raise LatteError(f"{path} is {kind}; expected a file")
    if not os.access(path, os.R_OK):
        raise LatteError(f"{path} cannot be read: permission denied")
    return path


def read_object(path: Path, *needed: str, then: str = "") -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        needed: Keys that the object must have.
        then: What to do about a damaged file, for the error.

    Raises:
        LatteError: The file cannot be read, or has no such object.
    """
    check_plain(path)
    hint = f"; {then}" if then else ""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LatteError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # also thousands of digits or brackets
        raise LatteError(f"{path} is damaged ({one_line(error)}){hint}") from None
    if not isinstance(found, dict):
        kind = "null" if found is None else type(found).__name__
        raise LatteError(f"{path} is damaged (expected a JSON object, got {kind}){hint}")
    for key in needed:
        if key not in found:
            raise LatteError(f"{path} is damaged (it has no {key!r}){hint}")
    return found
