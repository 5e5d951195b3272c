"""Sources of documents: local files, datasets of the Hugging Face Hub, this Python's library.

Local files are text, JSON lines or Parquet, plain or compressed. Datasets are loaded whole by
``datasets.load_dataset``, never streamed. Every Python installation has library sources and
documentation topics. They need no download and no licence to accept, so the demo and the tests run
anywhere. Their exact bytes depend on the Python version.
"""

from __future__ import annotations

import bz2
import contextlib
import glob
import gzip
import hashlib
import io
import json
import lzma
import os
import shutil
import sysconfig
import tempfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

from latte.errors import LatteError, one_line

TEXT_SUFFIXES = (".txt", ".md", ".py")
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIXES = (".parquet",)
SUFFIXES = TEXT_SUFFIXES + JSON_SUFFIXES + PARQUET_SUFFIXES
COMPRESSIONS = (".gz", ".xz", ".bz2", ".zst")
KNOWN = f"{', '.join(SUFFIXES)}, each plain or {', '.join(COMPRESSIONS)}"

PREFIX = "hub:"
BUILDERS = ("json", "csv", "parquet", "text", "arrow")  # of `datasets`, for local files
# Files up to this size are identified by all their bytes, larger ones by samples and their date.
FULL_DIGEST_BYTES = 256 << 20

Meter = Callable[[int], Any]


def no_meter(done: int) -> None:
    """A meter that shows no progress."""


class Source:
    """Documents in a fixed order. ``total`` counts ``unit``s (None until known), for a bar."""

    name: str
    unit = "B"
    total: int | None = None

    def fingerprint(self) -> str:
        """A digest that changes when the documents do."""
        raise NotImplementedError

    def documents(self, meter: Meter = no_meter) -> Iterator[str]:
        """The documents; ``meter`` gets the number of ``unit``s that are read."""
        raise NotImplementedError


# --- local files --------------------------------------------------------------------------------


def kind_of(path: Path) -> tuple[str, str]:
    """The (format, compression) suffixes of a path, ``("", "")`` if the format is unknown."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else ""
    if suffixes and suffixes[-1] in SUFFIXES:
        return suffixes[-1], compression
    return "", ""


def find_files(spec: str | os.PathLike[str]) -> list[Path]:
    """The corpus files of a path, a folder (with its subfolders) or a glob, sorted."""
    text = os.path.expanduser(os.fspath(spec))
    if not text:
        raise LatteError("expected the path of a corpus, got an empty one")
    path = Path(text)
    if path.is_file():
        if not kind_of(path)[0]:
            raise LatteError(f"{path}: unknown extension for a corpus; expected {KNOWN}")
        return [path]
    if path.is_dir():
        found = [
            Path(folder, name)
            for folder, _, names in os.walk(path)
            for name in names
            if not any(part.startswith(".") for part in Path(folder, name).relative_to(path).parts)
        ]
    elif glob.has_magic(text):
        found = [Path(name) for name in glob.glob(text, recursive=True) if os.path.isfile(name)]
        if not found:
            raise LatteError(f"{text}: no file matches this pattern")
    else:
        raise LatteError(
            f"{text}: no such file or folder (expected 'embedded', a path, a glob or 'hub:NAME')"
        )
    known = sorted(file for file in found if kind_of(file)[0])
    if not known:
        seen = Counter(file.suffix or "(none)" for file in found)
        listing = ", ".join(suffix for suffix, _ in seen.most_common(5)) or "no files at all"
        raise LatteError(f"{text}: no corpus file in it; expected {KNOWN}; found {listing}")
    return known


def _open_binary(path: Path, raw: IO[bytes], compression: str) -> IO[bytes]:
    if compression == ".gz":
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if compression == ".xz":
        return lzma.LZMAFile(raw)
    if compression == ".bz2":
        return bz2.BZ2File(raw)
    if compression == ".zst":
        try:
            import zstandard
        except ImportError as error:
            raise LatteError(
                f"{path}: reading .zst needs the package zstandard: pip install zstandard"
            ) from error
        # The largest window that zstd writes (--ultra --long=31).
        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        return io.BufferedReader(_ZstdFrames(raw, decompressor), 1 << 20)
    return raw


class _ZstdFrames(io.RawIOBase):
    """zstd frames one after another. A truncated one is an error, unlike in zstandard's reader."""

    def __init__(self, raw: IO[bytes], decompressor: Any) -> None:
        self._raw, self._decompressor = raw, decompressor
        self._frame: Any = None
        self._input = self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            if not self._input:
                self._input = self._raw.read(1 << 17)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("it ends within a frame")
                return 0
            if self._frame is None:
                self._frame = self._decompressor.decompressobj()
            self._output = self._frame.decompress(self._input)
            self._input = b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """(decompressed stream, raw file). A reading error becomes one line that names the file."""
    compression = path.suffix.lower() if path.suffix.lower() in COMPRESSIONS else ""
    try:
        with open(path, "rb") as raw:
            yield _open_binary(path, raw, compression), raw
    except LatteError:
        raise
    except Exception as error:
        # bz2 raises an OSError without a number for "Invalid data stream". zstandard's own error
        # class is recognised by its name.
        known = isinstance(error, (OSError, EOFError, lzma.LZMAError, zlib.error))
        if known and (not compression or getattr(error, "errno", None) is not None):
            reason = getattr(error, "strerror", None) or error
            raise LatteError(f"{path}: cannot be read ({reason})") from error
        if not known and type(error).__name__ != "ZstdError":
            raise
        raise LatteError(f"{path}: damaged or truncated {compression} file ({error})") from error


def decode_text(data: bytes, where: str) -> str:
    """UTF-8 text, without a byte-order mark. An error gives the position of any other byte."""
    nul = data.find(b"\0")
    if nul >= 0:
        raise LatteError(f"{where}: expected UTF-8 text, found a binary file (NUL at byte {nul})")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise LatteError(
            f"{where}: expected UTF-8 text, found byte 0x{data[error.start]:02x} at position "
            f"{error.start}"
        ) from error


def without_lone_surrogates(text: str) -> str:
    """The text with U+FFFD for halves of surrogate pairs (legal in JSON, not in UTF-8)."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def text_field(row: object, field: str, where: str) -> str:
    """The text in a field of a JSON row. An error says where any other value is."""
    if not isinstance(row, dict):
        raise LatteError(f"{where}: expected a JSON object, found {type(row).__name__}")
    if field not in row:
        there = ", ".join(map(repr, list(row)[:12])) or "nothing"
        raise LatteError(f"{where}: no field {field!r}; there is {there}")
    value = row[field]
    if not isinstance(value, str):
        raise LatteError(f"{where}: field {field!r} must hold text, found {type(value).__name__}")
    return without_lone_surrogates(value)


def numbered_lines(path: Path, meter: Meter = no_meter) -> Iterator[tuple[str, str]]:
    """(place, text) of each line of a text file, plain or compressed, without empty lines."""
    with _opened(path) as (stream, raw):
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            text = decode_text(line, where)
            meter(raw.tell())
            yield where, text


def json_rows(path: Path, meter: Meter = no_meter) -> Iterator[tuple[str, Any]]:
    """(place, value) of each line of a file of JSON lines, without empty lines."""
    for where, line in numbered_lines(path, meter):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # also thousands of digits or brackets
            raise LatteError(f"{where}: malformed JSON ({getattr(error, 'msg', error)})") from error
        yield where, row


def _parquet_documents(path: Path, column: str, meter: Meter) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _opened(path) as (stream, raw), contextlib.ExitStack() as stack:
        if stream is not raw:  # Parquet is read from its end: unpack it first
            unpacked = stack.enter_context(tempfile.TemporaryFile())
            shutil.copyfileobj(stream, unpacked, 1 << 20)
            unpacked.seek(0)
            stream = unpacked
        try:
            file = pq.ParquetFile(stream)
        except pa.ArrowInvalid as error:
            raise LatteError(f"{path}: not a Parquet file, or a truncated one") from error
        schema = file.schema_arrow
        if column not in schema.names:
            there = ", ".join(map(repr, schema.names[:12]))
            raise LatteError(f"{path}: no column {column!r}; there is {there}")
        kind = schema.field(column).type
        plain = kind.value_type if pa.types.is_dictionary(kind) else kind
        texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
        if not any(is_text(plain) for is_text in texts):
            raise LatteError(f"{path}: column {column!r} must hold text, found {kind}")
        size, done, rows = path.stat().st_size, 0, max(1, file.metadata.num_rows)
        try:
            for batch in file.iter_batches(batch_size=256, columns=[column]):
                for value in batch.column(0).to_pylist():
                    done += 1
                    if value is None:
                        where = f"{path}, row {done}"
                        raise LatteError(f"{where}: column {column!r} holds no text (null)")
                    meter(size * done // rows)
                    yield value
        except (pa.ArrowException, OSError) as error:
            raise LatteError(f"{path}: damaged Parquet file ({error})") from error


def read_documents(path: Path, field: str = "text", meter: Meter = no_meter) -> Iterator[str]:
    """The documents of one file; ``meter`` gets the number of its bytes on disk that are read."""
    kind = kind_of(path)[0]
    if kind in JSON_SUFFIXES:
        for where, row in json_rows(path, meter):
            yield text_field(row, field, where)
    elif kind in PARQUET_SUFFIXES:
        yield from _parquet_documents(path, field, meter)
    else:
        with _opened(path) as (stream, raw):
            text = decode_text(stream.read(), str(path))
            meter(raw.tell())
        yield text


def first_document(file: str | Path) -> str:
    """The first document of a file that is not blank. Raises LatteError if there is none."""
    for document in read_documents(Path(file).expanduser()):
        if document.strip():
            return document
    raise LatteError(f"{file}: expected some text, found none")


def file_digest(path: Path) -> str:
    """A digest of a file: of its content, or of samples, size and date if it is very large."""
    digest = hashlib.sha256()
    try:
        status = path.stat()
        with open(path, "rb") as file:
            if status.st_size <= FULL_DIGEST_BYTES:
                while piece := file.read(1 << 20):
                    digest.update(piece)
            else:
                digest.update(f"{status.st_size} {status.st_mtime_ns}".encode())
                for i in range(64):
                    file.seek(status.st_size * i // 64)
                    digest.update(file.read(1 << 16))
    except OSError as error:
        raise LatteError(f"{path}: cannot be read ({error.strerror})") from error
    return digest.hexdigest()


class FileSource(Source):
    """The documents of several files, in order. A text file is one document."""

    def __init__(self, paths: Sequence[Path], field: str) -> None:
        self.paths = list(paths)
        self.field = field
        self.name = str(self.paths[0]) if len(paths) == 1 else f"{len(paths)} files"
        self.total = sum(path.stat().st_size for path in self.paths)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"files {self.field}".encode())
        for path in self.paths:
            digest.update(f"{''.join(kind_of(path))} {file_digest(path)}".encode())
        return digest.hexdigest()

    def documents(self, meter: Meter = no_meter) -> Iterator[str]:
        before = 0
        for path in self.paths:
            forward = partial(lambda start, done: meter(start + done), before)
            yield from read_documents(path, self.field, forward)
            before += path.stat().st_size


# --- datasets of the Hub ------------------------------------------------------------------------


def load_split(dataset: str, config: str | None, name: str, **arguments: Any) -> Any:
    """``datasets.load_dataset``, whole. Any failure is a LatteError that begins with `name`."""
    try:
        import datasets
    except ImportError as error:
        raise LatteError(
            f"{name}: reading it needs the package datasets: pip install 'latte-attention[train]'"
        ) from error
    from latte.hub import unreachable

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
        for batch in self.load().iter(batch_size=256):
            for value in batch[self.column]:
                done += 1
                if value is None:
                    raise LatteError(f"{self.name}, row {done}: column {self.column!r} is null")
                meter(done)
                yield without_lone_surrogates(value)


# --- texts of every Python ------------------------------------------------------------------

EXCLUDED_FOLDERS = {
    "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__",
}  # fmt: skip
EXCLUDED_PREFIXES = ("_sysconfigdata", "sitecustomize", "usercustomize")
HELD_OUT_FRACTION = 0.065
# A family of similar files (the code pages under encodings/) with more than this share of the
# corpus is training text. If it were held out, it would decide the score alone.
LARGEST_HELD_OUT_FAMILY = 0.008
# Two files are one family when this share of the smaller one's distinct lines is in the other.
SHARED_LINES = 0.3


@dataclass(frozen=True)
class EmbeddedFile:
    """One library source or documentation topic: a readable name, and its text."""

    name: str
    text: str


def _library_sources(root: Path) -> Iterator[EmbeddedFile]:
    for folder, names, files in os.walk(root):
        names[:] = sorted(
            name
            for name in names
            if name not in EXCLUDED_FOLDERS and not name.startswith(("config-", "."))
        )
        for name in sorted(files):
            path = Path(folder, name)
            relative = path.relative_to(root).as_posix()
            if (
                not name.endswith(".py")
                or name.startswith(EXCLUDED_PREFIXES)
                or relative == "pydoc_data/topics.py"  # its topics are separate documents
            ):
                continue
            try:
                text = path.read_bytes().decode("utf-8")
            except UnicodeDecodeError:  # a source in another encoding, by its coding cookie
                continue
            yield EmbeddedFile(relative, text.replace("\r\n", "\n"))


def families(texts: list[str]) -> list[int]:
    """Number the families of near-identical texts: ``family[i] == family[j]`` if i and j are kin.

    Two texts are kin when at least SHARED_LINES of the distinct lines of the smaller one occur in
    the other (identical texts always), and kinship is transitive.
    """
    parent = list(range(len(texts)))

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    holders: defaultdict[str, list[int]] = defaultdict(list)
    sizes = [0] * len(texts)
    first_with: dict[str, int] = {}
    for i, text in enumerate(texts):
        parent[find(i)] = find(first_with.setdefault(text, i))
        lines = {line for line in map(str.strip, text.splitlines()) if len(line) >= 12}
        sizes[i] = len(lines)
        for line in lines:
            holders[line].append(i)
    shared: Counter[tuple[int, int]] = Counter()
    for members in holders.values():
        # A line that is in very many files ("from __future__ ...", a licence) is ignored.
        if len(members) <= 150:
            for position, i in enumerate(members):
                for j in members[position + 1 :]:
                    shared[i, j] += 1
    for (i, j), count in shared.items():
        if count >= 2 and count >= SHARED_LINES * min(sizes[i], sizes[j]):
            parent[find(j)] = find(i)
    return [find(i) for i in range(len(texts))]


@cache
def embedded_files() -> tuple[tuple[EmbeddedFile, ...], tuple[EmbeddedFile, ...]]:
    """The (train, held-out) files, split by the hash of a file's family.

    A family is a set of files that are near-identical to one another (:func:`families`). All its
    files are on one side. The result depends only on the files' contents.
    """
    documented: dict[str, str] = {}
    with contextlib.suppress(ImportError):  # in some distributions the topics are another package
        from pydoc_data.topics import topics

        documented = topics
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [EmbeddedFile(f"topics/{name}.rst", text) for name, text in sorted(documented.items())]
    files = [file for file in (*_library_sources(root), *found) if file.text.strip()]
    if sum(len(file.text) for file in files) < 1_000_000:
        raise LatteError(
            f"the embedded corpus needs this Python's library sources: expected over 1 MB of .py "
            f"files under {root}, found {len(files)} files; give corpus= a path instead"
        )
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for i, family in enumerate(families([file.text for file in files])):
        groups[family].append(i)
    sizes = [len(file.text.encode()) for file in files]
    limit = LARGEST_HELD_OUT_FAMILY * sum(sizes)
    held_out = set()
    for members in groups.values():
        key = min(hashlib.sha256(files[i].text.encode()).digest() for i in members)
        chance = int.from_bytes(key[:8], "big") / 2**64
        if chance < HELD_OUT_FRACTION and sum(sizes[i] for i in members) <= limit:
            held_out.update(members)
    train = tuple(file for i, file in enumerate(files) if i not in held_out)
    return train, tuple(file for i, file in enumerate(files) if i in held_out)


class EmbeddedSource(Source):
    """One side of the embedded corpus."""

    def __init__(self, held_out: bool) -> None:
        self._texts = [file.text for file in embedded_files()[held_out]]
        self.total = sum(len(text.encode()) for text in self._texts)
        self.name = f"embedded ({'held out' if held_out else 'train'})"

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for text in self._texts:
            digest.update(hashlib.sha256(text.encode()).digest())
        return digest.hexdigest()

    def documents(self, meter: Meter = no_meter) -> Iterator[str]:
        done = 0
        for text in self._texts:
            done += len(text.encode())
            meter(done)
            yield text
