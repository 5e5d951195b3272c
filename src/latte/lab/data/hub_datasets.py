"""Documents of datasets of the Hugging Face Hub, loaded whole, never streamed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latte.errors import LatteError, one_line
from latte.lab.data.document_source import Meter, Source, no_meter, without_lone_surrogates
from latte.lab.data.files import file_digest

PREFIX = "hub:"
BUILDERS = ("json", "csv", "parquet", "text", "arrow")  # of `datasets`, for local files


def load_split(dataset: str, config: str | None, name: str, **arguments: Any) -> Any:
    """``datasets.load_dataset``, whole. Any failure is a LatteError that begins with `name`."""
    try:
        import datasets
    except ImportError as error:
        raise LatteError(
            f"{name}: reading it needs the package datasets: pip install 'latte-attention[train]'"
        ) from error
    from latte.models.hub import unreachable

    offline = datasets.config.HF_HUB_OFFLINE
    away = dataset not in BUILDERS and unreachable(dataset)
    try:
        datasets.config.HF_HUB_OFFLINE = offline or bool(away)
        return datasets.load_dataset(dataset, config, streaming=False, **arguments)
    # load_dataset raises two dozen types (network, hub, parsing). All of them mean that this
    # dataset cannot be loaded, and the user gets the reason.
    except Exception as error:
        raise LatteError(
            f"{name}: cannot be loaded: "
            + (away or f"{type(error).__name__}: {one_line(error, first=True)}")
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = offline


def require_columns(dataset: Any, columns: Sequence[str], name: str) -> None:
    """Raise LatteError for a column that a dataset does not have."""
    names = list(dataset.column_names)
    for column in columns:
        if column not in names:
            raise LatteError(
                f"{name}: no column {column!r}; there is {', '.join(map(repr, names))}"
            )


def dataset_of(rows: list[dict[str, Any]]) -> Any:
    """Rows of the same fields as a ``datasets.Dataset``."""
    import datasets

    return datasets.Dataset.from_list(rows)


@dataclass
class HubSource(Source):
    """One split of a dataset: a name on the Hugging Face Hub, a builder ("json"), or a folder.

    The dataset is downloaded and loaded when its documents are first read. Once its tokens are
    cached, neither the network nor the dataset is needed. The fingerprint is therefore that of the
    request (and of the local files in it). So set ``revision`` if the dataset may change.
    """

    dataset: str
    config: str | None = None
    split: str = "train"
    column: str = "text"
    revision: str | None = None
    data_files: str | list[str] | Mapping[str, Any] | None = None
    cache_dir: str | os.PathLike[str] | None = None

    unit = " documents"

    def __post_init__(self) -> None:
        if not self.dataset:
            raise LatteError("'hub:' must be followed by a dataset name, as hub:owner/name")
        config = f"/{self.config}" if self.config else ""
        self.name = f"{PREFIX}{self.dataset}{config} [{self.split}]"

    def fingerprint(self) -> str:
        decisive = ("dataset", "config", "split", "column", "revision", "data_files")
        request = {"kind": "hub", **{name: getattr(self, name) for name in decisive}}
        local = sorted(path for path in Path(self.dataset).rglob("*") if path.is_file())
        if self.data_files is not None:
            files: Any = self.data_files
            files = files.values() if isinstance(files, Mapping) else [files]
            for entry in files:
                paths = [entry] if isinstance(entry, str) else entry
                local += [Path(path) for path in paths if Path(path).is_file()]
        request["local"] = [file_digest(path) for path in local]
        return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()

    def load(self) -> Any:
        """The ``datasets.Dataset`` with only the text column. Any failure is one LatteError."""
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

    def documents(self, meter: Meter = no_meter) -> Iterator[str]:
        done = 0
        try:
            for batch in self.load().iter(batch_size=256):
                for value in batch[self.column]:
                    done += 1
                    if value is None:
                        where = f"{self.name}, row {done}"
                        raise LatteError(f"{where}: column {self.column!r} is null")
                    meter(done)
                    yield without_lone_surrogates(value)
        except UnicodeDecodeError as error:
            where = f"{self.name}, after row {done}"
            raise LatteError(f"{where}: expected UTF-8 text, found other bytes") from error
