"""Generated splits: made once, by several processes if wanted, and kept in a folder."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import zipfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from latte.errors import LatteError
from replication.lra.data.examples import Examples

BLOCK = 1024  # results that are computed ahead of their use, at most
SPLITS = ("train", "validation", "test")
Tell = Callable[[int], object]
R = TypeVar("R")


def in_order(function: Callable[[int], R], workers: int = 1) -> Generator[R, None, None]:
    """function(0), function(1), ... without end, by so many processes; the same for any number.

    The function is pickled for them: a function of a module, or a partial of one.
    """
    if workers == 1:
        yield from map(function, itertools.count())
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for start in itertools.count(0, BLOCK):
            yield from pool.imap(function, range(start, start + BLOCK), chunksize=32)


def cached_splits(
    cache: Path,
    name: str,
    made_of: dict[str, Any],
    total: int,
    make: Callable[[Tell], dict[str, Examples]],
    progress: bool = False,
) -> dict[str, Examples]:
    """The splits of a generator, from the file in `cache` if it is there, else made and kept.

    Args:
        name: of the task; the file's name begins with it.
        made_of: all that decides what is made, as plain JSON; the file's name has its digest.
        total: examples of all splits together, for a bar.
        make: makes them; it is given a function to tell how many more are done.

    Raises:
        LatteError: a damaged file, or a folder that cannot be written (before anything is made).
    """
    key = json.dumps(made_of, sort_keys=True)
    file = cache / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:20]}.npz"
    if file.exists():
        return _read(file)
    from tqdm import tqdm

    with _kept_in(cache):
        cache.mkdir(parents=True, exist_ok=True)
        if not os.access(cache, os.W_OK):
            raise PermissionError(13, "not writable")
    bar = tqdm(total=total, desc=f"making {name}", unit="", leave=False,
               disable=not progress or None)  # fmt: skip
    with bar:
        splits = make(bar.update)
    _write(file, splits)
    return splits


def _write(file: Path, splits: dict[str, Examples]) -> None:
    arrays: dict[str, Any] = {}
    for split, examples in splits.items():
        arrays[f"{split}_tokens"] = examples.tokens_S
        arrays[f"{split}_bounds"] = examples.bounds
        arrays[f"{split}_labels"] = examples.labels_N
    temporary = file.with_name(f".{file.name}.tmp-{os.getpid()}")
    with _kept_in(file.parent):
        try:
            with open(temporary, "wb") as stream:
                np.savez(stream, **arrays)
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _kept_in(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LatteError(
            f"{cache}: generated data cannot be kept here ({error.strerror or error}); choose"
            " another cache_dir"
        ) from error


def _read(file: Path) -> dict[str, Examples]:
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return {
                split: Examples(
                    arrays[f"{split}_tokens"], arrays[f"{split}_bounds"], arrays[f"{split}_labels"]
                )
                for split in SPLITS
            }
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise LatteError(f"{file} is damaged ({error}); delete it to make it again") from error
