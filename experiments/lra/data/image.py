"""Image: CIFAR-10 in grey, one pixel after another, 1,024 tokens of 256 shades.

Source: Krizhevsky, *Learning multiple layers of features from tiny images* (2009), as in Long Range
Arena (Tay et al., arXiv 2011.04006): the last tenth of the training images is the validation
split, and grey is 0.2989 R + 0.587 G + 0.114 B.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from experiments.lra.data.examples import Examples, Task, check_counts, check_share
from latte.errors import LatteError
from latte.lab.data.hub_datasets import PREFIX, load_split, require_columns

PIXELS = 32 * 32
GREY = np.array([0.2989, 0.587, 0.114])
TRAIN_FILES = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST_FILES = ("test_batch",)


@dataclass
class ImageOptions:
    """`data` of an image recipe: the folder of the original files, or a dataset of the Hub."""

    name: ClassVar[str] = "image"
    vocab_size: ClassVar[int] = 256
    classes: ClassVar[tuple[str, ...]] = (
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    )  # fmt: skip
    towers: ClassVar[int] = 1

    # A folder with data_batch_1 ... 5 and test_batch (the Python version, or the binary one with
    # names in .bin), or hub:NAME (its splits `train` and `test`).
    source: str = f"{PREFIX}uoft-cs/cifar10"
    image_column: str = "img"  # of a Hub dataset
    label_column: str = "label"
    validation_share: float = 0.1  # of the training images, the last ones
    max_train_examples: int | None = None  # before the split, the first ones; None: all
    max_test_examples: int | None = None

    @property
    def longest(self) -> int:
        return PIXELS

    def check(self) -> None:
        check_counts(self, "max_train_examples", "max_test_examples")
        check_share(self.validation_share)

    def load(self, cache: Path, progress: bool = False, workers: int = 1) -> Task:
        """The task in grey pixels, row by row.

        Raises:
            LatteError: a missing, malformed or unsafe file, a wrong column, a label that is no
                class.
        """
        read = _from_hub if self.source.startswith(PREFIX) else _from_folder
        pixels, labels = (part[: self.max_train_examples] for part in read(self, "train"))
        held_out = round(self.validation_share * len(labels))
        if not 0 < held_out < len(labels):
            raise LatteError(
                f"{self.source}: a validation split of {self.validation_share} of"
                f" {len(labels)} images leaves one side empty"
            )
        cut = len(labels) - held_out
        test = (part[: self.max_test_examples] for part in read(self, "test"))
        return Task(
            self,
            of_pixels(pixels[:cut], labels[:cut]),
            of_pixels(pixels[cut:], labels[cut:]),
            of_pixels(*test),
        )


def of_pixels(pixels: np.ndarray, labels: np.ndarray) -> Examples:
    """Examples from (N, T) uint8, all of one length."""
    bounds = np.arange(len(labels) + 1, dtype=np.int64) * pixels.shape[1]
    return Examples(pixels.reshape(-1), bounds, labels.astype(np.int64))


def to_grey(rgb: np.ndarray) -> np.ndarray:
    """(..., 3) uint8 to (...) uint8."""
    return np.round(rgb @ GREY).clip(0, 255).astype(np.uint8)


def _check_labels(labels: np.ndarray, where: str) -> np.ndarray:
    if len(labels) and not (0 <= labels.min() and labels.max() <= 9):
        raise LatteError(f"{where}: expected labels 0 to 9, found {labels.min()}..{labels.max()}")
    return labels


def _from_hub(options: ImageOptions, split: str) -> tuple[np.ndarray, np.ndarray]:
    name = f"{options.source} [{split}]"
    dataset = load_split(options.source.removeprefix(PREFIX), None, name, split=split)
    require_columns(dataset, [options.image_column, options.label_column], name)
    pixels = np.zeros((len(dataset), PIXELS), dtype=np.uint8)
    for row, image in enumerate(dataset[options.image_column]):
        size = getattr(image, "size", None)
        if size != (32, 32):
            raise LatteError(
                f"{name}, row {row + 1}: expected an image of 32 x 32 in column"
                f" {options.image_column!r}, found {size or type(image).__name__}"
            )
        pixels[row] = to_grey(np.asarray(image.convert("RGB"))).reshape(-1)
    labels = np.asarray(dataset[options.label_column])
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise LatteError(
            f"{name}: expected a whole number in every row of column {options.label_column!r},"
            f" found {'images or lists' if labels.ndim != 1 else labels.dtype}"
        )
    return pixels, _check_labels(labels.astype(np.int64), name)


def _from_folder(options: ImageOptions, split: str) -> tuple[np.ndarray, np.ndarray]:
    folder = Path(options.source).expanduser()
    if not folder.is_dir():
        raise LatteError(f"{folder}: no such folder (expected the CIFAR-10 files, or 'hub:NAME')")
    for inner in ("cifar-10-batches-py", "cifar-10-batches-bin"):
        if (folder / inner).is_dir():
            folder = folder / inner
            break
    names = TRAIN_FILES if split == "train" else TEST_FILES
    found = []
    for name in names:
        if (folder / name).is_file():
            found.append(_pickled(folder / name))
        elif (folder / f"{name}.bin").is_file():
            found.append(_binary(folder / f"{name}.bin"))
        else:
            raise LatteError(f"{folder}: no file {name} or {name}.bin of CIFAR-10 in it")
    planes = np.concatenate([part[0] for part in found])
    labels = np.concatenate([part[1] for part in found])
    rgb = planes.reshape(-1, 3, PIXELS).transpose(0, 2, 1)
    return to_grey(rgb), labels


def _binary(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The binary version: one byte of label, then 1,024 of red, of green and of blue."""
    data = np.fromfile(path, dtype=np.uint8)
    if not len(data) or len(data) % (1 + 3 * PIXELS):
        raise LatteError(
            f"{path}: expected a multiple of {1 + 3 * PIXELS} bytes, found {len(data)}: damaged or"
            " truncated"
        )
    rows = data.reshape(-1, 1 + 3 * PIXELS)
    return rows[:, 1:], _check_labels(rows[:, 0].astype(np.int64), str(path))


def _pickled(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The Python version: a pickled dict with `data` (N, 3072) uint8 and `labels`."""
    try:
        content = _OnlyArrays(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        data = np.asarray(content[b"data"] if b"data" in content else content["data"])
        labels = content[b"labels"] if b"labels" in content else content["labels"]
        labels = np.asarray(labels, dtype=np.int64)
    except LatteError as error:
        raise LatteError(f"{path}: {error}") from None
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, AttributeError,
            ImportError, IndexError, OSError, OverflowError, MemoryError) as error:  # fmt: skip
        raise LatteError(
            f"{path}: expected a batch of CIFAR-10 (data and labels), found something else or a"
            f" damaged file ({type(error).__name__}: {error})"
        ) from None
    if data.dtype != np.uint8 or data.shape != (len(labels), 3 * PIXELS):
        raise LatteError(
            f"{path}: expected data ({len(labels)}, {3 * PIXELS}) uint8, found {data.shape}"
            f" {data.dtype}"
        )
    return data, _check_labels(labels, str(path))


class _OnlyArrays(pickle.Unpickler):
    """Builds arrays and plain values, and nothing that runs code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return np.dtype
        arrays = ("numpy.core.multiarray", "numpy._core.multiarray")
        if module in arrays and name == "_reconstruct":
            return np.zeros(0).__reduce__()[0]
        if (module, name) == ("_codecs", "encode"):  # bytes, as Python 3 writes them for 2
            import _codecs

            return _codecs.encode
        raise LatteError(
            f"refused to load {module}.{name}: a batch of CIFAR-10 needs no such thing"
        )
