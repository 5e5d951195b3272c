"""Documents of local files: text, JSON lines or Parquet, plain or compressed."""

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
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from latte.errors import LatteError
from latte.lab.data.document_source import Meter, Source, no_meter, without_lone_surrogates
from latte.models.plain_files import check_plain

TEXT_SUFFIXES = (".txt", ".md", ".py")
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIXES = (".parquet",)
SUFFIXES = TEXT_SUFFIXES + JSON_SUFFIXES + PARQUET_SUFFIXES
COMPRESSIONS = (".gz", ".xz", ".bz2", ".zst")
KNOWN = f"{', '.join(SUFFIXES)}, each plain or {', '.join(COMPRESSIONS)}"
# Files up to this size are identified by all their bytes, larger ones by samples and their date.
FULL_DIGEST_BYTES = 256 << 20


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
    known = [check_plain(file) for file in sorted(found) if kind_of(file)[0]]
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
        except pa.ArrowException as error:
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
                try:
                    values = batch.column(0).to_pylist()
                except UnicodeDecodeError as error:
                    where = f"{path}, rows {done + 1} to {done + batch.num_rows}"
                    raise LatteError(f"{where}: expected UTF-8 text, found other bytes") from error
                for value in values:
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
