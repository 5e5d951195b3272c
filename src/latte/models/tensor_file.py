"""Files of tensors in safetensors format, with a table of strings and a checksum, whole or absent.

Each kind of file has a number of its format. The files of format 1 have no checksum. They are read
as well.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from latte.errors import LatteError, one_line

CHECKSUM = "sha256"  # name of the checksum in the table of strings


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str], kind: str
) -> None:
    """Write a temporary file and rename it.

    Args:
        path: File to write. An existing one is replaced.
        tensors: Contiguous tensors on the CPU, of which no two share memory.
        about: Strings that are kept with them.
        kind: Kind of the file, such as "state".

    Raises:
        LatteError: The file cannot be written.
    """
    aside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    about = {**about, "format": f"latte {kind} 2"}
    try:
        save_file(dict(tensors), aside, about | {CHECKSUM: _checksum(about, tensors)})
        os.replace(aside, path)
    except (OSError, SafetensorError) as error:
        raise LatteError(f"{kind} {path} cannot be written: {one_line(error)}") from None
    finally:
        aside.unlink(missing_ok=True)


def read_tensors(path: Path, kind: str, writer: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The strings and the tensors of a file.

    Args:
        path: File that :func:`write_tensors` wrote.
        kind: Kind of the file, as when it was written.
        writer: Public function that writes such files, for messages.

    Raises:
        LatteError: There is no such file, it is of another kind, or it is damaged: it is truncated,
            or a string, a name, a shape, a dtype or a value in it was changed.
    """
    expected = f"expected a file written by {writer}"
    if not path.is_file():
        verb = "do" if kind.endswith("s") else "does"
        raise LatteError(f"{kind} {path} {verb} not exist; {expected}")
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            if about.get("format") not in (f"latte {kind} 1", f"latte {kind} 2"):
                raise LatteError(f"{kind} {path}: {expected}, found another kind of file")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except LatteError:
        raise
    except Exception as error:  # a damaged header ends in errors of several libraries
        raise damaged(path, kind, one_line(error)) from None
    found = about.pop(CHECKSUM, None)
    if about["format"] != f"latte {kind} 1" and found != _checksum(about, tensors):
        raise damaged(path, kind, "its checksum is not that of its contents")
    return about, tensors


def damaged(path: str | Path, kind: str, reason: str) -> LatteError:
    """The error of a file that was changed since it was written."""
    return LatteError(f"{kind} {path}: the file is truncated or damaged: {reason}")


def check_finite(
    path: str | Path, kind: str, tensors: Mapping[str, Tensor], below: tuple[str, ...] = ()
) -> None:
    """Raise LatteError if a value is NaN or infinite.

    Args:
        path: File of the tensors.
        kind: Kind of the file.
        tensors: Tensors to check.
        below: Ends of the names of tensors that may have -inf.
    """
    for name, x in tensors.items():
        finite = x.isfinite() | (x == -torch.inf) if name.endswith(below) else x.isfinite()
        if not bool(finite.all()):
            raise damaged(path, kind, f"{name} has values that are not finite")


def _checksum(about: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """A digest of all strings, and of the names, dtypes, shapes and bytes of all tensors."""
    digest = hashlib.sha256(json.dumps(sorted(about.items())).encode())
    for name, x in sorted(tensors.items()):
        digest.update(json.dumps([name, str(x.dtype), list(x.shape)]).encode())
        digest.update(x.detach().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
