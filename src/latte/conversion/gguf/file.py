"""The header of a GGUF file: its metadata, and where its weights are.

It is read in a fraction of a second, before anything else. Long lists of texts, such as
vocabularies, are read when they are asked for.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import mmap
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from latte.errors import LatteError, one_line

INSTALL = "pip install 'latte-attention[gguf]'"
TRANSFORMERS = (5, 23)  # the first with the table of how byte-level vocabularies split text
# Architectures by llama.cpp's names -> Transformers' model types. Mistral's models are `llama`.
ARCHITECTURES = {
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
QUANTISATION = 2  # the version of the blocks' layout that every GGUF file has


class Texts(NamedTuple):
    """Where a list of texts is in a file: the first byte after its header, and how many."""

    start: int
    length: int


@dataclass(frozen=True)
class GgufFile:
    """The header of a file.

    Attributes:
        metadata: Values by llama.cpp's keys. Lists of texts are given by their place.
        tensors: Names and (number of the type in ggml, shape as in PyTorch).
        offsets: Names and the offsets of their bytes.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, tuple[int, tuple[int, ...]]]
    offsets: dict[str, int]

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    def key(self, name: str) -> str:
        """The whole key of one that is under the architecture's name."""
        return f"{self.architecture}.{name}"

    def refuse(self, key: str, expected: str) -> NoReturn:
        """Raise LatteError with a key, its value, and what was expected."""
        found = "is missing"
        if key in self.metadata:
            value = repr(self.metadata[key])
            found = f"is {value if len(value) <= 80 else value[:77] + '...'}"
        raise LatteError(f"{self.path}: {shown(key)} {found}; expected {expected}")

    def whole(self, key: str, default: int | None = None, *, least: int = 0) -> Any:
        """A whole number. Without a default the key must be there."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.refuse(key, f"a whole number of at least {least}")
        return value

    def number(self, key: str, default: float | None = None, *, above: float = 0.0) -> Any:
        """A finite number. Without a default the key must be there."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(key, "a number")
        if not (math.isfinite(value) and value > above):
            self.refuse(key, f"a number above {above:g}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> Any:
        """A text, or the default where the key is not there."""
        value = self.metadata.get(key, default)
        if value is not None and not isinstance(value, str):
            self.refuse(key, "a text")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of texts; empty if the key is not there."""
        place = self.metadata.get(key, Texts(0, 0))
        if not isinstance(place, Texts):
            self.refuse(key, "a list of texts")
        found, at = [], place.start
        with _readable(self.path) as x:
            for _ in range(place.length):
                text, at = _text(x, at)
                found.append(text)
        return found

    @cached_property
    def tokens(self) -> list[str]:
        """The vocabulary; empty if there is none. An empty token gets llama.cpp's name."""
        found = self.texts("tokenizer.ggml.tokens")
        return [token or f"[EMPTY_{i}]" for i, token in enumerate(found)]

    @property
    def kinds(self) -> Counter[str]:
        """How many tensors there are of each type, by its name, such as Q4_1."""
        return Counter(_name(kind) for kind, _ in self.tensors.values())

    @property
    def quantisation(self) -> str:
        """The file's type as llama.cpp names it, such as Q4_K_M; else its commonest tensor's."""
        from gguf import LlamaFileType

        try:
            return LlamaFileType(self.metadata["general.file_type"]).name.partition("_")[2]
        except (KeyError, ValueError):
            return self.kinds.most_common(1)[0][0]

    @property
    def note(self) -> str:
        """Where weights came from, for a configuration's ``converted_from``."""
        return f"{self.path.name} ({self.quantisation})"

    @property
    def dtype(self) -> str:
        """The dtype of the weights: bfloat16 for quantised ones, else what the file has."""
        plain = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
        found = {plain.get(kind, "bfloat16") for kind in self.kinds}
        return next(name for name in ("bfloat16", "float16", "float32") if name in found)


def shown(name: str) -> str:
    """A name that a file gives, for a message of one line."""
    return repr(name)[1:-1]


def gguf_at(place: str | Path) -> Path | None:
    """The GGUF file at a path or in a folder; None for another kind of folder, or a name.

    Raises:
        LatteError: A folder has several, or a file is of another kind.
    """
    path = Path(place)
    if path.is_file():
        if path.suffix != ".gguf":
            raise LatteError(f"{path} is a file; expected a folder or a GGUF file (.gguf)")
        return path
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    files = sorted(file for file in path.glob("*.gguf") if file.is_file())
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:3]) + ", ..." * (len(files) > 3)
        raise LatteError(f"{path} holds {len(files)} GGUF files ({names}); expected one: name it")
    return files[0] if files else None


def open_gguf(path: Path) -> GgufFile:
    """The header of a file that can be loaded, so far as a header can tell.

    Raises:
        LatteError: The file is damaged, truncated, a part of a split file, no model, or of an
            unsupported architecture or kind; or a package is missing.
    """
    if importlib.util.find_spec("gguf") is None:
        raise LatteError(f"{path} is a GGUF file, which needs the gguf package: {INSTALL}")
    version = importlib.metadata.version("transformers")
    if tuple(map(int, version.split(".")[:2])) < TRANSFORMERS:
        raise LatteError(
            f"{path} is a GGUF file, which needs transformers {TRANSFORMERS[0]}.{TRANSFORMERS[1]}"
            f" or newer, got {version}: {INSTALL}"
        )
    with _readable(path) as x:
        file, end = _header(path, x)
        size = len(x)
    parts = file.whole("split.count", 1)
    if parts > 1:
        raise LatteError(
            f"{path} is a part of a model split into {parts} files; expected one file:"
            " llama-gguf-split --merge makes it"
        )
    if file.text("general.type", "model") != "model":
        file.refuse("general.type", "'model'")
    if file.architecture not in ARCHITECTURES:
        raise LatteError(
            f"{path} is of architecture {file.architecture!r}, which is not supported; expected one"
            f" of {', '.join(ARCHITECTURES)}"
        )
    if file.whole("general.quantization_version", QUANTISATION) != QUANTISATION:
        file.refuse("general.quantization_version", f"{QUANTISATION}")
    if end > size:
        raise LatteError(f"{path} is cut short: expected at least {end:,} bytes, got {size:,}")
    return file


# Type number of a metadata value -> struct's letter. 8 is a string, 9 an array.
_LETTERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9


@contextmanager
def _readable(path: Path) -> Iterator[Any]:
    """The bytes of a file. Raises LatteError if they cannot be read, or not as a GGUF file."""
    try:
        with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as x:
            yield x
    except LatteError:
        raise
    except (struct.error, UnicodeDecodeError, ValueError, OverflowError) as error:
        why = "" if isinstance(error, struct.error) else f": {one_line(error)}"
        raise LatteError(f"{path} is no GGUF file, or damaged or cut short{why}") from None
    except OSError as error:
        raise LatteError(f"{path} cannot be read: {error.strerror or error}") from None


def _header(path: Path, x: Any) -> tuple[GgufFile, int]:
    """(what the header of the bytes x says, where the last tensor ends)."""
    magic, version, tensor_count, entries = struct.unpack_from("<4sIQQ", x, 0)
    if magic != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    if not version & 0xFFFF:  # a small number whose bytes are in the other order
        raise LatteError(f"{path} is a big-endian file; expected a little-endian one")
    if version not in (2, 3):
        raise ValueError(f"expected version 2 or 3 of the format, got {version}")
    at: int = 24
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key, at = _text(x, at)
        if key in metadata:
            raise ValueError(f"it has {key} twice")
        (kind,) = struct.unpack_from("<I", x, at)
        metadata[key], at = _value(x, at + 4, kind)
    if not isinstance(metadata.get("general.architecture"), str):
        raise ValueError("it names no architecture")
    file = GgufFile(path, metadata, {}, {})
    alignment = file.whole("general.alignment", 32, least=1)
    if alignment & (alignment - 1):
        file.refuse("general.alignment", "a power of two")
    end = last = 0
    for _ in range(tensor_count):
        name, at = _text(x, at)
        if name in file.tensors:
            raise ValueError(f"it has {name} twice")
        (dimensions,) = struct.unpack_from("<I", x, at)
        shape = struct.unpack_from(f"<{dimensions}Q", x, at + 4)[::-1]
        kind, offset = struct.unpack_from("<IQ", x, at + 4 + 8 * dimensions)
        at += 16 + 8 * dimensions
        if offset != end:
            raise ValueError(f"{name} begins at byte {offset} of the weights, expected {end}")
        if _block(kind) is None:
            raise LatteError(
                f"{path}: {shown(name)} is of type {_name(kind)}; expected one that the package"
                f" gguf {importlib.metadata.version('gguf')} can dequantise"
            )
        block, block_bytes = _block(kind)
        if not 0 < len(shape) <= 4 or shape[-1] % block:
            raise ValueError(f"{name} has shape {list(shape)}, expected rows of blocks of {block}")
        file.tensors[name], file.offsets[name] = (kind, shape), offset
        last = offset + math.prod(shape) // block * block_bytes
        end = -(-last // alignment) * alignment
    start = -(-at // alignment) * alignment
    file.offsets.update({name: start + offset for name, offset in file.offsets.items()})
    return file, start + last if file.tensors else at


@cache
def _block(kind: int) -> Any:
    """(weights, bytes) of a block of a type of ggml; None if it cannot be dequantised."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    try:
        sizes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        quants.dequantize(np.zeros((1, sizes[1]), np.uint8), GGMLQuantizationType(kind))
    except (ValueError, NotImplementedError):
        return None
    return sizes


def _name(kind: int) -> str:
    from gguf import GGMLQuantizationType

    names: dict[int, str] = {each.value: each.name for each in GGMLQuantizationType}
    return names.get(kind, str(kind))


def _text(x: Any, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", x, at)
    (text,) = struct.unpack_from(f"<{length}s", x, at + 8)
    return text.decode(), at + 8 + length


def _value(x: Any, at: int, kind: int) -> tuple[Any, int]:
    """A value of the metadata, and where it ends."""
    if kind == _STRING:
        return _text(x, at)
    if kind != _ARRAY:
        if kind not in _LETTERS:
            raise ValueError(f"its header has a value of unknown type {kind}")
        letter = _LETTERS[kind]
        return struct.unpack_from(f"<{letter}", x, at)[0], at + struct.calcsize(f"<{letter}")
    of, count = struct.unpack_from("<IQ", x, at)
    at += 12
    if of in _LETTERS:
        form = f"<{count}{_LETTERS[of]}"
        return list(struct.unpack_from(form, x, at)), at + struct.calcsize(form)
    if of != _STRING:
        raise ValueError(f"its header has an array of type {of}")
    start = at
    for _ in range(count):
        at += 8 + struct.unpack_from("<Q", x, at)[0]
    return Texts(start, count), at
