"""Pathfinder: are the two dots at the ends of the same dashed path? 32 x 32 pixels, in a row.

Source: Linsley et al., *Learning long-range spatial dependencies with horizontal gated recurrent
units* (NeurIPS 2018), with the parameters of Long Range Arena (Tay et al., arXiv 2011.04006):

- two paths of `contour_length` dashes start `seed_distance` apart near the middle and grow in
  turns; from one dash to the next the direction turns by an angle drawn with the weight
  cos(min(continuity * turn, pi / 2))^2 among those that come near no other dash and no border;
- dots of radius `marker_radius` are where one path begins and where it, or the other one, ends;
- `num_distractors` short paths of `contour_length` // 3 dashes fill what is left.

The published generator works on pixel masks that it widens by `margin`; here dashes are line
segments whose distance is held above `clearance`, and are drawn by their distance to the pixels'
centres. The law is the published one, the pictures are not those of its files.

The released files: lists of pictures under `metadata/`, PNG files under `imgs/`.

    curv_contour_length_14/
      metadata/0.npy ...      a line per picture: folder, file, number, label, parameters
      imgs/0/sample_0.png ... 32 x 32

The lists of Long Range Arena's release are text files in spite of their names; those of the
published generator are NumPy arrays of strings. Both are read. Splits: 80% train, 10% validation,
10% test, as in Long Range Arena, by a hash of the seed and each picture's name.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from experiments.lra.data.examples import (
    Examples,
    Task,
    Tell,
    check_counts,
    generated,
    in_order,
)
from experiments.lra.data.image import of_pixels
from latte.errors import LatteError

FORMAT = 1  # of what the generator makes; part of the cached file's name
TURNS = np.linspace(-math.pi, math.pi, 32, endpoint=False)  # candidates for a change of direction
SAMPLES = np.linspace(0.0, 1.0, 3)  # places on a dash at which its distance to others is taken
DASHES_PER_SHORT_PATH = 20  # over the short paths' length: how many of them there are
PADDING = 1.0  # pixels along the border that no dash enters
CONTRAST = 1.5  # 2 * 0.75, cut at the markers' 1
MAX_TRIES = 10_000
SHORT_PATH_TRIES = 5
SIDE = 32  # pixels of a released picture


@dataclass
class PathfinderOptions:
    """`data` of a pathfinder recipe; the defaults are Long Range Arena's hard version."""

    name: ClassVar[str] = "pathfinder"
    vocab_size: ClassVar[int] = 256
    classes: ClassVar[tuple[str, ...]] = ("apart", "connected")
    towers: ClassVar[int] = 1

    # "generated", or a folder of the released files, such as pathfinder32/curv_contour_length_14,
    # which has metadata/ and imgs/; of the keys below only the seed then matters.
    source: str = "generated"
    size: int = 32
    contour_length: int = 14  # dashes of a path; 6 and 9 are the published easier versions
    paddle_length: float = 2.0
    paddle_thickness: float = 0.5
    margin: float = 1.0  # half of the gap between the dashes of a path
    continuity: float = 1.0  # above 1: straighter
    marker_radius: float = 1.5
    seed_distance: float = 7.0
    clearance: float = 2.4  # between dashes of different paths, centre line to centre line
    num_distractors: int | None = None  # None: 20 // (contour_length // 3)
    train_examples: int = 160_000
    validation_examples: int = 20_000
    test_examples: int = 20_000
    seed: int = 0

    @property
    def longest(self) -> int:
        return self.size**2

    @property
    def distractor_length(self) -> int:
        return self.contour_length // 3

    @property
    def distractors(self) -> int:
        if self.num_distractors is not None:
            return self.num_distractors
        return DASHES_PER_SHORT_PATH // max(1, self.distractor_length)

    def check(self) -> None:
        """Raise LatteError for impossible values."""
        check_counts(
            self, "train_examples", "validation_examples", "test_examples", "contour_length"
        )
        for key in ("paddle_length", "paddle_thickness", "continuity", "marker_radius"):
            if not getattr(self, key) > 0:
                raise LatteError(f"data.{key}: expected a number above 0, got {getattr(self, key)}")
        for key in ("margin", "clearance", "seed_distance", "seed"):
            if getattr(self, key) < 0:
                raise LatteError(f"data.{key}: expected 0 or more, got {getattr(self, key)}")
        if (self.num_distractors or 0) < 0:
            raise LatteError(
                f"data.num_distractors: expected 0 or more, got {self.num_distractors}"
            )
        least = 2 * self.seed_distance + 2 * PADDING
        if self.size < least:
            raise LatteError(
                f"data.size: expected at least {least:g} pixels for seed_distance"
                f" {self.seed_distance:g}, got {self.size}"
            )

    def load(self, cache: Path, progress: bool = False, workers: int = 1) -> Task:
        """The task: generated, once, and kept in `cache`; or read from the released files.

        Raises:
            LatteError: options that leave no room; missing or malformed files.
        """
        if self.source == "generated":
            return generated(self, FORMAT, make_splits, cache, progress, workers)
        return Task(self, **read_released(Path(self.source).expanduser(), self.seed, progress))


class _DeadEnd(Exception):
    """A path can go nowhere: begin the picture again."""


class _Field:
    """The dashes of a picture so far. Places are complex numbers x + iy."""

    def __init__(self, options: PathfinderOptions) -> None:
        self.options = options
        most = (2 + options.distractors * SHORT_PATH_TRIES) * options.contour_length
        self._places = np.zeros((most, len(SAMPLES)), dtype=complex)
        self.count = 0

    def dashes(self) -> np.ndarray:
        """(dashes, 2): both ends."""
        return self._places[: self.count, [0, -1]]

    def free(self, places_CS: np.ndarray, neighbour: int | None) -> np.ndarray:
        """(C,) which candidates are inside and clear of all dashes but the neighbour."""
        low, high = PADDING, self.options.size - PADDING
        x, y = places_CS.real, places_CS.imag
        inside = (x >= low) & (x <= high) & (y >= low) & (y <= high)
        found = np.asarray(inside.all(1))
        near = self._places[: self.count]
        if neighbour is not None:
            near = np.delete(near, neighbour, axis=0)
        if len(near) and found.any():
            offset = places_CS[found].reshape(-1, 1) - near.reshape(1, -1)
            closest = (offset.real**2 + offset.imag**2).min(1).reshape(-1, len(SAMPLES)).min(1)
            found[found] = closest >= self.options.clearance**2
        return found

    def add(self, places_S: np.ndarray) -> int:
        self._places[self.count] = places_S
        self.count += 1
        return self.count - 1


@dataclass
class _Path:
    """A path: where it begins, where its last dash ends and in which direction."""

    start: complex
    tail: complex
    angle: float = 0.0
    last: int | None = None  # its last dash in the field


def picture(options: PathfinderOptions, index: int) -> tuple[np.ndarray, int]:
    """Picture `index`, (size, size) uint8, and whether its dots are connected.

    A pure function of both. No global random state.

    Raises:
        LatteError: the options leave no room for the paths.
    """
    rng = np.random.default_rng((options.seed, index))
    label = int(rng.integers(2))
    for _ in range(MAX_TRIES):
        field = _Field(options)
        try:
            paths = _long_paths(rng, field)
        except _DeadEnd:
            continue
        first = int(rng.integers(2))
        dots = np.array([paths[first].start, paths[first if label else 1 - first].tail])
        _short_paths(rng, field)
        return _draw(field.dashes(), dots, options), label
    raise LatteError(
        f"Pathfinder: no room for two paths of contour_length {options.contour_length} in"
        f" {options.size} x {options.size} pixels after {MAX_TRIES:,} tries"
    )


def _long_paths(rng: np.random.Generator, field: _Field) -> list[_Path]:
    """Two paths, grown in turns. Raises _DeadEnd where one has no way on."""
    options = field.options
    low = min(2 * options.seed_distance, options.size / 2)
    x, y, direction = rng.uniform(low, max(low, options.size - low), 2).tolist() + [
        rng.uniform(-math.pi, math.pi)
    ]
    place = complex(x, y)
    other = place + complex(options.seed_distance * np.exp(1j * direction))
    paths = [_Path(place, place), _Path(other, other)]
    for _ in range(options.contour_length):
        for path in paths:
            _extend(rng, path, field)
    return paths


def _short_paths(rng: np.random.Generator, field: _Field) -> None:
    """As many short paths as there is room for."""
    options = field.options
    for _ in range(options.distractors):
        for _ in range(SHORT_PATH_TRIES):
            before = field.count
            place = complex(*rng.uniform(PADDING, options.size - PADDING, 2))
            path = _Path(place, place)
            try:
                for _ in range(options.distractor_length):
                    _extend(rng, path, field)
                break
            except _DeadEnd:
                field.count = before


def _extend(rng: np.random.Generator, path: _Path, field: _Field) -> None:
    """One more dash: on by `margin`, turn, on by `margin` again, draw. The first: anywhere."""
    options = field.options
    if path.last is None:
        gap, turns, weights = 0.0, TURNS, np.ones(len(TURNS))
    else:
        gap = options.margin
        weights = np.cos(np.minimum(np.abs(TURNS) * options.continuity, math.pi / 2)) ** 2
        turns, weights = TURNS[weights > 1e-9], weights[weights > 1e-9]
    pivot = path.tail + gap * complex(np.exp(1j * path.angle))
    along = np.exp(1j * (path.angle + turns))
    places = pivot + along[:, None] * (gap + SAMPLES * options.paddle_length)
    allowed = np.cumsum(weights * field.free(places, path.last))
    if not allowed[-1] > 0:
        raise _DeadEnd
    chosen = int(np.searchsorted(allowed, rng.random() * allowed[-1], side="right"))
    path.last = field.add(places[chosen])
    path.tail, path.angle = complex(places[chosen, -1]), float(path.angle + turns[chosen])


def _draw(dashes: np.ndarray, dots: np.ndarray, options: PathfinderOptions) -> np.ndarray:
    """Brightness by how much of a pixel a shape covers, to half a pixel."""
    centres = np.arange(options.size) + 0.5
    pixels = (centres[None, :] + 1j * centres[:, None]).reshape(-1, 1)
    base, along = dashes[:, 0], dashes[:, 1] - dashes[:, 0]
    share = ((pixels - base) * along.conj()).real / np.maximum(np.abs(along) ** 2, 1e-12)
    from_dashes = np.abs(pixels - base - share.clip(0, 1) * along).min(1)
    from_dots = np.abs(pixels - dots).min(1)
    width = options.paddle_thickness / 2 + 0.5
    light = np.minimum(1.0, CONTRAST * (width - from_dashes).clip(0, 1))
    light = np.maximum(light, (options.marker_radius + 0.5 - from_dots).clip(0, 1))
    return np.round(255 * light).astype(np.uint8).reshape(options.size, options.size)


def make_splits(
    options: PathfinderOptions, tell: Tell | None = None, workers: int = 1
) -> dict[str, Examples]:
    """The test split from the first pictures, then validation, then train.

    `tell` is called with 1 for every picture; `workers` processes share the work.
    """
    options.check()
    splits = {}
    pictures = in_order(partial(picture, options), workers)
    for split in ("test", "validation", "train"):
        count = getattr(options, f"{split}_examples")
        pixels = np.empty((count, options.longest), dtype=np.uint8)
        labels = np.empty(count, dtype=np.int64)
        for row in range(count):
            image, labels[row] = next(pictures)
            pixels[row] = image.reshape(-1)
            if tell is not None:
                tell(1)
        splits[split] = of_pixels(pixels, labels)
    pictures.close()  # and the processes with it
    return splits


# ---- the released files


def read_released(folder: Path, seed: int, progress: bool = False) -> dict[str, Examples]:
    """The three splits of a folder.

    Raises:
        LatteError: no such folder, no lists in it, a malformed list, a missing or wrong picture.
    """
    from tqdm import tqdm

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
