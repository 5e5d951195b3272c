"""Documents from a Hugging Face dataset, through ``datasets.load_dataset`` (never streamed)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from latte.data.files import Meter, file_digest, without_lone_surrogates
from latte.errors import LatteError, one_line

PREFIX = "hub:"


def load_split(dataset: str, config: str | None, name: str, **arguments: Any) -> Any:
    """``datasets.load_dataset``, whole; any failure is one LatteError that begins with `name`."""
    try:
        import datasets
    except ImportError as error:
        raise LatteError(
            f"{name}: reading it needs the package datasets: pip install 'latte-attention[train]'"
        ) from error
    try:
        return datasets.load_dataset(dataset, config, streaming=False, **arguments)
    # load_dataset raises two dozen types (network, hub, parsing): all of them are the answer
    # "this dataset cannot be had", whose reason is for the user to read.
    except Exception as error:
        raise LatteError(
            f"{name}: cannot be loaded: {type(error).__name__}: {one_line(error, first=True)}"
        ) from error


def require_columns(dataset: Any, columns: Sequence[str], name: str) -> None:
    """Raise LatteError for a column that a dataset does not have."""
    names = list(dataset.column_names)
    for column in columns:
        if column not in names:
            raise LatteError(
                f"{name}: no column {column!r}; there is {', '.join(map(repr, names))}"
            )


class HubSource:
    """One split of a dataset: a name on the Hugging Face Hub, a builder ("json"), or a folder.

    The dataset is downloaded and loaded when its documents are first asked for, not before: once
    its tokens are cached, neither the network nor the dataset is needed. The fingerprint is
    therefore that of the request (and of the local files in it): pin ``revision`` where a dataset
    may change.
    """

    unit = " documents"

    def __init__(
        self,
        name: str,
        *,
        config: str | None = None,
        split: str = "train",
        column: str = "text",
        revision: str | None = None,
        data_files: str | list[str] | Mapping[str, Any] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if not name:
            raise LatteError("'hub:' must be followed by a dataset name, as hub:owner/name")
        self.dataset = name
        self.config, self.split, self.column = config, split, column
        self.revision, self.data_files, self.cache_dir = revision, data_files, cache_dir
        self.name = f"{PREFIX}{name}" + (f"/{config}" if config else "") + f" [{split}]"
        self.total: int | None = None

    def fingerprint(self) -> str:
        request: dict[str, Any] = {
            "kind": "hub",
            "dataset": self.dataset,
            "config": self.config,
            "split": self.split,
            "column": self.column,
            "revision": self.revision,
            "data_files": self.data_files,
        }
        folder = Path(self.dataset)
        local = sorted(path for path in folder.rglob("*") if path.is_file())
        if self.data_files is not None:
            files: Any = self.data_files
            files = files.values() if isinstance(files, Mapping) else [files]
            for entry in files:
                paths = [entry] if isinstance(entry, str) else entry
                local += [Path(path) for path in paths if Path(path).is_file()]
        request["local"] = [file_digest(path) for path in local]
        return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()

    def load(self) -> Any:
        """The ``datasets.Dataset`` with the text column alone; any failure is one LatteError."""
        dataset = load_split(
            self.dataset,
            self.config,
            self.name,
            split=self.split,
            revision=self.revision,
            data_files=self.data_files,
            cache_dir=None if self.cache_dir is None else os.fspath(self.cache_dir),
        )
        require_columns(dataset, [self.column], self.name)
        kind = getattr(dataset.features[self.column], "dtype", "a structure")
        if kind not in ("string", "large_string"):
            raise LatteError(f"{self.name}: column {self.column!r} must hold text, found {kind}")
        self.total = len(dataset)
        return dataset.select_columns([self.column])

    def documents(self, meter: Meter | None = None) -> Iterator[str]:
        done = 0
        for batch in self.load().iter(batch_size=256):
            for value in batch[self.column]:
                done += 1
                if value is None:
                    raise LatteError(f"{self.name}, row {done}: column {self.column!r} is null")
                if meter is not None:
                    meter(done)
                yield without_lone_surrogates(value)
