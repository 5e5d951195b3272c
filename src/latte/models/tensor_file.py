"""Files of tensors in safetensors format, with a table of strings, complete or absent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from latte.errors import LatteError, one_line


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str], what: str
) -> None:
    """Write a temporary file and rename it.

    Args:
        path: File to write. An existing one is replaced.
        tensors: Contiguous tensors on the CPU, of which no two share memory.
        about: Strings that are kept with them.
        what: Kind of the file in error messages.

    Raises:
        LatteError: The file cannot be written.
    """
    aside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        save_file(dict(tensors), aside, dict(about))
        os.replace(aside, path)
    except (OSError, SafetensorError) as error:
        raise LatteError(f"{what} {path} cannot be written: {one_line(error)}") from None
    finally:
        aside.unlink(missing_ok=True)


def read_tensors(path: Path, damaged: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The strings and the tensors of a file.

    Args:
        damaged: What the error says of a file that cannot be read, before the reason.

    Raises:
        LatteError: The file is no file of tensors, or is truncated.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return file.metadata() or {}, tensors
    except (OSError, SafetensorError) as error:
        raise LatteError(f"{damaged}: {one_line(error)}") from None
