"""Pathfinder's released files: lists of pictures under `metadata/`, PNG files under `imgs/`.

    curv_contour_length_14/
      metadata/0.npy ...      a line per picture: folder, file, number, label, parameters
      imgs/0/sample_0.png ... 32 x 32

The lists of Long Range Arena's release are text files in spite of their names; those of the
published generator are NumPy arrays of strings. Both are read. Splits: 80% train, 10% validation,
10% test, as in Long Range Arena, by a hash of the seed and each picture's name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from latte.errors import LatteError
from replication.lra.data.examples import Examples

SIDE = 32


def read_released(folder: Path, seed: int, progress: bool = False) -> dict[str, Examples]:
    """The three splits of a folder.

    Raises:
        LatteError: no such folder, no lists in it, a malformed list, a missing or wrong picture.
    """
    from tqdm import tqdm

    from replication.lra.data.image import of_pixels

    entries = [entry for file in _lists(folder) for entry in _entries(file)]
    if len(entries) < 10:
        raise LatteError(f"{folder}: expected at least 10 pictures, found {len(entries)}")
    entries.sort(key=lambda entry: hashlib.blake2b(f"{seed} {entry[0]}".encode()).digest())
    pixels = np.empty((len(entries), SIDE * SIDE), dtype=np.uint8)
    bar = tqdm(entries, desc="reading pathfinder", leave=False, disable=not progress or None)
    for row, (name, _) in enumerate(bar):
        pixels[row] = _pixels(folder / name)
    labels = np.array([label for _, label in entries], dtype=np.int64)
    tenth = len(entries) // 10
    parts = {
        "test": slice(0, tenth),
        "validation": slice(tenth, 2 * tenth),
        "train": slice(2 * tenth, None),
    }
    return {split: of_pixels(pixels[part], labels[part]) for split, part in parts.items()}


def _lists(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise LatteError(f"{folder}: no such folder (expected 'generated' or the released files)")
    found = sorted((folder / "metadata").glob("*.npy"), key=lambda file: (len(file.name), file))
    if not found:
        raise LatteError(f"{folder}: no metadata/*.npy in it; expected a folder such as"
                         " pathfinder32/curv_contour_length_14")  # fmt: skip
    return found


def _entries(file: Path) -> Iterator[tuple[str, int]]:
    """(path below the folder, label) of each picture of a list."""
    try:
        data = file.read_bytes()
        if data.startswith(b"\x93NUMPY"):
            table = np.load(file, allow_pickle=False)
            rows = [[str(cell) for cell in row] for row in np.atleast_2d(table)]
        else:
            rows = [line.split() for line in data.decode("utf-8").splitlines() if line.strip()]
    except (OSError, ValueError, TypeError) as error:
        raise LatteError(f"{file}: not a list of pictures ({error})") from None
    for number, row in enumerate(rows, 1):
        if len(row) < 4 or row[3] not in ("0", "1"):
            raise LatteError(
                f"{file}, line {number}: expected folder, file, number and label 0 or 1, found"
                f" {' '.join(row)[:80]!r}"
            )
        yield f"{row[0]}/{row[1]}", int(row[3])


def _pixels(path: Path) -> np.ndarray:
    try:
        from PIL import Image
    except ImportError:
        raise LatteError(
            f"{path}: reading it needs the package pillow: pip install pillow"
        ) from None
    try:
        with Image.open(path) as image:
            if image.size != (SIDE, SIDE):
                raise LatteError(f"{path}: expected {SIDE} x {SIDE} pixels, found {image.size}")
            return np.asarray(image.convert("L")).reshape(-1)
    except FileNotFoundError:
        raise LatteError(f"{path}: no such picture, though the list names it") from None
    except (OSError, SyntaxError) as error:  # Pillow's answers to a damaged file
        raise LatteError(
            f"{path}: damaged picture ({error}); delete its line in the list"
        ) from None
