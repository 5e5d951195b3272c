"""The native library of a running process: where it is, and why it is not there.

It is looked for beside its sources, then in the user's cache folder. ``LATTE_NATIVE`` in the
environment says what is wanted:

* ``auto``: use it where it is there; where it could be but is not, one warning says so.
* ``require``: without it ``latte.ops`` cannot be imported (:class:`LatteError`).
* ``skip``: do not load it, and do not warn.

It is never compiled here: that takes minutes, and each of many processes would do it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from latte.errors import LatteError
from latte.ops.cpp_backend import build

COMMAND = f"{sys.executable} -m latte.ops.cpp_backend"


def load() -> tuple[Path | None, str | None]:
    """Load the library: its path, or the reason why it is not there and how to repair that.

    Raises:
        LatteError: ``LATTE_NATIVE`` is require and the library is not there, or it is unknown.
    """
    try:
        mode = build.native_mode()
    except build.BuildError as error:
        raise LatteError(str(error)) from None
    if mode == "skip":
        return None, "LATTE_NATIVE=skip"
    failures = []
    for path in build.found_libraries():
        try:
            torch.ops.load_library(path)
            return path, None
        except OSError as error:
            why = str(error.__cause__ or error)  # the loader's, which PyTorch does not repeat
            failures.append(f"{path} cannot be loaded: {why.removeprefix(f'{path}: ')}")
    reason = f"{'; '.join(failures) or _not_built()}{mending(mode)}"
    if mode == "require":
        raise LatteError(f"LATTE_NATIVE=require: {reason}")
    return None, reason


def _not_built() -> str:
    reason = build.unsupported()
    if reason is not None:
        return reason
    others = build.of_other_sources()
    if others:
        return f"the native kernels' sources have changed since {others[0].name} was built"
    return "the native kernels are not built"


def mending(mode: str) -> str:
    """What builds the library, as the end of a sentence; "" where nothing can."""
    if build.unsupported() is not None:
        return ""
    # The command imports this module, which would refuse to be imported.
    command = f"LATTE_NATIVE=auto {COMMAND}" if mode == "require" else COMMAND
    try:
        build.find_compiler()
    except build.BuildError as error:
        return f"; {error}; install one, such as g++, then this builds them: {command}"
    return f"; this builds them: {command}"


def warns() -> bool:
    """Whether to warn about a missing library: it could be built, and was not switched off.

    Of the processes of torchrun only one warns.
    """
    speaks = os.environ.get("RANK", "0") == "0"
    return speaks and build.native_mode() != "skip" and build.unsupported() is None
