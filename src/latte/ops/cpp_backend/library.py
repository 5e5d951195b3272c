"""The native library of a running process: its place, or the reason why it is not there.

It is searched for in the folder of its sources, then in the user's cache folder. The environment
variable ``LATTE_NATIVE`` has three values:

* ``auto``: use the library if it is there. If it could be there but is not, warn once.
* ``require``: ``latte.ops`` cannot be imported without it (:class:`LatteError`).
* ``skip``: do not load it, and do not warn.

It is never compiled here, because this takes minutes, and each of many processes would do it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from latte.errors import LatteError
from latte.ops.cpp_backend import build
from latte.ops.processes import is_first_process

COMMAND = f"{sys.executable} -m latte.ops.cpp_backend"


def load() -> tuple[Path | None, str | None]:
    """Load the library: its path, or the reason why it is not there and how to repair that.

    Raises:
        LatteError: ``LATTE_NATIVE`` is require and the library is not there, or its value is
        unknown.
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
            why = str(error.__cause__ or error)  # the loader's message; PyTorch does not repeat it
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
    """How to build the library, as the end of a sentence; "" if it cannot be built."""
    if build.unsupported() is not None:
        return ""
    # The command imports this module, and with "require" this import would fail.
    command = f"LATTE_NATIVE=auto {COMMAND}" if mode == "require" else COMMAND
    try:
        build.find_compiler()
    except build.BuildError as error:
        return f"; {error}; install one, such as g++, then this builds them: {command}"
    return f"; this builds them: {command}"


def warns() -> bool:
    """Whether to warn about a missing library, because it could be built and was not switched off.

    Only one of the processes of torchrun warns.
    """
    switched_off = build.native_mode() == "skip"
    return is_first_process() and not switched_off and build.unsupported() is None
