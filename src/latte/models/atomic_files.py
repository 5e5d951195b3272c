"""Files and folders that are written whole or not at all, and never over another."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from latte.errors import LatteError

GO_ON = "choose another name, or add --force to replace"


def check_new_file(path: str | Path, what: str, *, force: bool = False) -> Path:
    """A path that the user named for a new file.

    Raises:
        LatteError: The path exists. With ``force`` it may be a plain file.
    """
    place = Path(path).expanduser()
    if os.path.lexists(place) and not (force and place.is_file()):
        kind = "file" if place.is_file() else "folder" if place.is_dir() else "device or a link"
        hint = f"{GO_ON} it" if place.is_file() else "expected the name of a new file"
        raise LatteError(f"{what} {place} exists and is a {kind}; {hint}")
    if not place.parent.is_dir():
        raise LatteError(f"{what} {place} cannot be written: its folder does not exist")
    return place


@contextmanager
def staged_beside(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target`, removed at the end if it is still there.

    Folders that killed processes have left are removed first. A process holds a lock on its own,
    which ends with the process.
    """
    for path in target.parent.glob(f".{glob.escape(target.name)}.tmp-*"):
        if path.name.rpartition("-")[2].isdigit() and path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError), _locked(path):
                shutil.rmtree(path)
    staged = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    try:
        staged.mkdir(parents=True)
        with _locked(staged):
            yield staged
    finally:
        shutil.rmtree(staged, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock. Raises BlockingIOError if another process does."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def check_writable(folder: Path, what: str = "output folder") -> None:
    """Raise LatteError if a folder, there or to be made, cannot be written. Makes nothing."""
    place = folder.expanduser().absolute()
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise LatteError(f"{what} {folder} cannot be written: {place} is not a writable folder")


def writable_folder(folder: Path) -> Path:
    """Create a folder for results, or say in one line that it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise LatteError(
            f"output folder {folder} cannot be written: {error.strerror or error}"
        ) from None
    return folder


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file as `write_text` does."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a temporary file and rename it: a reader gets the old file or the new one."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
