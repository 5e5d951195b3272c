"""GGUF files: pretrained decoders in llama.cpp's format, weights and tokenizer in one file.

Transformers reads them (``from_pretrained(folder, gguf_file=...)``, with the ``gguf`` package).
This module works before and after Transformers. Before, it reads the header, in a fraction of a
second, and refuses files that cannot be loaded. After, it sets the values that Transformers leaves
at its defaults, as the file has them. It also makes documents begin and end as in the base's
training.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latte.errors import LatteError, one_line

INSTALL = "pip install 'latte-attention[gguf]'"
TRANSFORMERS = (5, 23)  # the first whose tokenizers of GGUF files split text as llama.cpp does
# Architectures by llama.cpp's names. Mistral's models are `llama` there.
ARCHITECTURES = ("gemma2", "gemma3", "llama", "qwen2", "qwen3")
# Tokens that begin or end a document, by all names that these model families use.
DOCUMENT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>")
DOCUMENT_STARTS = ("<|begin_of_text|>", "<|startoftext|>", "<bos>", "<s>")
CONTROL = 3  # the token type of marks, which text never is
# Weights that a decoder of these architectures has; the last are read as part of the configuration.
WEIGHTS = re.compile(
    r"token_embd\.weight|output\.weight|output_norm\.weight|rope_freqs\.weight"
    r"|blk\.\d+\.(attn_(q|k|v|output|norm|q_norm|k_norm)|ffn_(gate|up|down|norm)"
    r"|post_attention_norm|post_ffw_norm)\.weight"
    r"|blk\.\d+\.attn_[qkv]\.bias"
)
# The number of layers of the models whose queries are scaled by another width than their heads'.
SCALED_BY_HIDDEN = {"gemma2": 46, "gemma3": 62}
# How byte-level tokenizers split text. Of the last, Transformers does not know the digits.
PLAIN_SPLITS, DIGIT_SPLITS = ("gpt-2", "gpt2"), ("smollm", "starcoder", "refact", "codeshell")


@dataclass(frozen=True)
class GgufFile:
    """The header of a file.

    Attributes:
        metadata: Values by llama.cpp's keys. Arrays of strings are given by their length, except
            for the tokens.
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

    def own(self, key: str) -> Any:
        """Of the metadata under the architecture's name; None if it is not there."""
        return self.metadata.get(f"{self.architecture}.{key}")

    @property
    def kinds(self) -> Counter[str]:
        """How many tensors there are of each type, by its name, such as Q4_1."""
        from gguf import GGMLQuantizationType

        return Counter(GGMLQuantizationType(kind).name for kind, _ in self.tensors.values())

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
        LatteError: The file is damaged, truncated, a part of a split file, or of an unsupported
            architecture or kind; or a package is missing.
    """
    if importlib.util.find_spec("gguf") is None:
        raise LatteError(f"{path} is a GGUF file, which needs the gguf package: {INSTALL}")
    version = importlib.metadata.version("transformers")
    if tuple(map(int, version.split(".")[:2])) < TRANSFORMERS:
        raise LatteError(
            f"{path} is a GGUF file, which needs transformers {TRANSFORMERS[0]}.{TRANSFORMERS[1]}"
            f" or newer, got {version}: {INSTALL}"
        )
    try:
        with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as x:
            file, end = _header(path, x)
            size = len(x)
    except (struct.error, UnicodeDecodeError, ValueError, OverflowError) as error:
        why = "" if isinstance(error, struct.error) else f": {one_line(error)}"
        raise LatteError(f"{path} is no GGUF file, or damaged or cut short{why}") from None
    except OSError as error:
        raise LatteError(f"{path} cannot be read: {error.strerror or error}") from None
    if file.metadata.get("split.count", 1) > 1:
        raise LatteError(
            f"{path} is a part of a model split into {file.metadata['split.count']} files; expected"
            " one file: llama-gguf-split --merge makes it"
        )
    if file.architecture not in ARCHITECTURES:
        raise LatteError(
            f"{path} is of architecture {file.architecture!r}, which is not supported; expected one"
            f" of {', '.join(ARCHITECTURES)}"
        )
    unknown = [name for name in file.tensors if not WEIGHTS.fullmatch(name)]
    if unknown:
        raise LatteError(
            f"{path} has weights that a {file.architecture} decoder of Transformers does not know:"
            f" {unknown[0]}" + f" and {len(unknown) - 1} more" * (len(unknown) > 1)
        )
    if end > size:
        raise LatteError(f"{path} is cut short: expected at least {end:,} bytes, got {size:,}")
    return file


# Of metadata: number of its type -> struct's letter. 8 is a string, 9 an array.
_LETTERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9


def _header(path: Path, x: Any) -> tuple[GgufFile, int]:
    """(what the header of the bytes x says, where the last tensor ends)."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    magic, version, tensor_count, entries = struct.unpack_from("<4sIQQ", x, 0)
    if magic != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    if version not in (2, 3):
        raise ValueError(f"expected version 2 or 3 of the format, got {version}")
    at, metadata = 24, {}
    for _ in range(entries):
        key, at = _text(x, at)
        (kind,) = struct.unpack_from("<I", x, at)
        metadata[key], at = _value(x, at + 4, kind, key == "tokenizer.ggml.tokens")
    if not isinstance(metadata.get("general.architecture"), str):
        raise ValueError("it names no architecture")
    tensors, offsets, end = {}, {}, 0
    for _ in range(tensor_count):
        name, at = _text(x, at)
        (dimensions,) = struct.unpack_from("<I", x, at)
        shape = struct.unpack_from(f"<{dimensions}Q", x, at + 4)[::-1]
        kind, offset = struct.unpack_from("<IQ", x, at + 4 + 8 * dimensions)
        at += 16 + 8 * dimensions
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        tensors[name], offsets[name] = (kind, shape), offset
        end = max(end, offset + math.prod(shape) // block * block_bytes)
    alignment = metadata.get("general.alignment", 32)
    start = -(-at // alignment) * alignment
    offsets = {name: start + offset for name, offset in offsets.items()}
    return GgufFile(path, metadata, tensors, offsets), start + end


def _text(x: Any, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", x, at)
    (text,) = struct.unpack_from(f"<{length}s", x, at + 8)
    return text.decode(), at + 8 + length


def _value(x: Any, at: int, kind: int, keep: bool) -> tuple[Any, int]:
    """A value of the metadata and where it ends; of an array of strings its length, or `keep`."""
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
    if keep:
        texts = []
        for _ in range(count):
            text, at = _text(x, at)
            texts.append(text)
        return texts, at
    return count, _after_strings(x, at, count)


def _after_strings(x: Any, at: int, count: int) -> int:
    """Where an array of strings ends that begins at `at`."""
    for _ in range(count):
        at += 8 + struct.unpack_from("<Q", x, at)[0]
    return at


# --- what Transformers makes of it ---------------------------------------------------------------


def _place(file: GgufFile) -> dict[str, Any]:
    """Options of ``from_pretrained(file.path.parent)``: the file, and no code beside it."""
    return {"gguf_file": file.path.name, "trust_remote_code": False}


def gguf_config(file: GgufFile) -> Any:
    """The configuration of a file's model.

    Raises:
        LatteError: The file has a feature that Transformers does not read.
    """
    from transformers import AutoConfig

    with quick_reader(), _one_line(file, "configuration"):
        config: Any = AutoConfig.from_pretrained(file.path.parent, **_place(file))
    for name in ("_model_name_or_path", "unk_token_id"):
        config.__dict__.pop(name, None)
    # Values that Transformers does not read: it uses its own defaults for them.
    if "token_embd.weight" in file.tensors:
        config.vocab_size = file.tensors["token_embd.weight"][1][0]
    width = file.own("attention.key_length")
    if width is not None and hasattr(config, "head_dim"):
        config.head_dim = width
    if config.model_type == "mistral":  # its default is a window that llama.cpp does not have
        config.sliding_window = file.own("attention.sliding_window")
    if config.model_type == "gemma2":
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            setattr(config, name, file.own(name))
    if hasattr(config, "query_pre_attn_scalar"):
        config.query_pre_attn_scalar = config.head_dim
        if SCALED_BY_HIDDEN[file.architecture] == config.num_hidden_layers:
            config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    _check_attention(file, config)
    _scale_rotation(file, config)
    ends = _document_ends(file)
    config.bos_token_id, config.eos_token_id = ends.bos, ends.stops
    return config


def _check_attention(file: GgufFile, config: Any) -> None:
    """Refuse heads that are not rotated whole, or whose keys and values differ in width."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for key, what in (("rope.dimension_count", "rotated"), ("attention.value_length", "values of")):
        found = file.own(key)
        if found is not None and found != width:
            raise LatteError(
                f"{file.path} has heads of {width} with {what} {found} dimensions; expected all"
            )


def _scale_rotation(file: GgufFile, config: Any) -> None:
    """The rotary frequencies' scaling, of which Transformers reads nothing."""
    kind, factor = file.own("rope.scaling.type"), file.own("rope.scaling.factor")
    if kind not in (None, "none", "linear"):
        raise LatteError(
            f"{file.path} scales its rotary frequencies by {kind!r}, which is not read from a GGUF"
            " file yet; expected 'none' or 'linear'"
        )
    rope = config.rope_parameters
    if "rope_freqs.weight" in file.tensors:
        rope |= _llama3_rotation(file, rope["rope_theta"])
    if kind == "linear" and factor not in (None, 1.0):
        rope = rope.get("full_attention", rope)  # Gemma 3 scales that of its full layers alone
        rope |= {"rope_type": "linear", "factor": factor}


def _llama3_rotation(file: GgufFile, theta: float) -> dict[str, Any]:
    """The rotary parameters of Llama 3, of which a file has the frequencies' divisors alone."""
    kind, (half,) = file.tensors["rope_freqs.weight"]
    with file.path.open("rb") as opened:
        opened.seek(file.offsets["rope_freqs.weight"])
        found = struct.unpack(f"<{half}f", opened.read(4 * half)) if kind == 0 else ()
    low, high, length, factor = 1.0, 4.0, 8192, round(max(found, default=1.0), 3)
    expected = []
    for i in range(half):
        turns = length * theta ** (-i / half) / (2 * math.pi)  # in the context of pretraining
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        expected.append(1 / ((1 - smooth) / factor + smooth))
    pairs = zip(found, expected, strict=bool(found))
    if not found or not all(math.isclose(x, y, rel_tol=1e-3) for x, y in pairs):
        raise LatteError(
            f"{file.path} has rotary frequencies of its own (rope_freqs) that are not Llama 3's,"
            " which is not supported"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": length,
    }


@dataclass(frozen=True)
class _Ends:
    """The tokens around documents, the stop tokens, and a template with its own tokens."""

    bos: int | None
    eos: int | None
    stops: Any  # one token, or a list
    template: str | None


def _document_ends(file: GgufFile) -> _Ends:
    """What begins and ends documents: as in pretraining, not as in chats.

    A tuned model's file names the marks of a chat's turns. Text in training ended otherwise.
    """
    given, names = file.metadata, file.metadata.get("tokenizer.ggml.tokens") or []
    kinds = given.get("tokenizer.ggml.token_type") or []
    template = given.get("tokenizer.chat_template")
    bos, eos = (given.get(f"tokenizer.ggml.{each}_token_id") for each in ("bos", "eos"))
    marks = {names[i]: i for i, kind in enumerate(kinds[: len(names)]) if kind == CONTROL}
    end = next((marks[name] for name in DOCUMENT_ENDS if name in marks), None)
    if template is None or end is None:
        return _Ends(bos, eos, eos, template)

    def is_of_chat(name: str | None) -> bool:
        return name is not None and name not in known and name in template

    known = (*DOCUMENT_ENDS, *DOCUMENT_STARTS)
    first, last = (None if token is None else names[token] for token in (bos, eos))
    stops: Any = eos
    fixed = ""
    if is_of_chat(first) and not given.get("tokenizer.ggml.add_bos_token"):
        fixed += _set_in_template("bos_token", first, template)
        bos = end
    if is_of_chat(last):
        fixed += _set_in_template("eos_token", last, template)
        stops, eos = [end, eos], end
    return _Ends(bos, eos, stops, fixed + template)


def _set_in_template(variable: str, value: str | None, template: str) -> str:
    """What keeps a template's variable at its value when the tokenizer's changes."""
    return f"{{%- set {variable} = {value!r} -%}}" if variable in template else ""


def gguf_tokenizer(file: GgufFile) -> Any:
    """The tokenizer of a file's model, with its chat template.

    Raises:
        LatteError: There is no tokenizer, or it splits text in an unknown way.
    """
    from transformers import AutoTokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    split = file.metadata.get("tokenizer.ggml.pre")
    if not file.metadata.get("tokenizer.ggml.tokens"):
        raise LatteError(f"{file.path} has no tokenizer")
    known = (*PLAIN_SPLITS, *DIGIT_SPLITS, *GGUF_PRE_TOKENIZER_SPLITS)
    if file.metadata.get("tokenizer.ggml.model") == "gpt2" and split not in known:
        raise LatteError(
            f"the tokenizer of {file.path} splits text as {split!r}, which is not known; expected"
            f" one of {', '.join(known)}"
        )
    with quick_reader(), _one_line(file, "tokenizer"):
        tokenizer: Any = AutoTokenizer.from_pretrained(file.path.parent, **_place(file))
    if split in DIGIT_SPLITS:
        from tokenizers import pre_tokenizers

        digits = pre_tokenizers.Digits(individual_digits=True)
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, plain])
    ends = _document_ends(file)
    for name, token in (("bos_token", ends.bos), ("eos_token", ends.eos)):
        if token is not None:
            setattr(tokenizer, name, file.metadata["tokenizer.ggml.tokens"][token])
    tokenizer.chat_template = ends.template
    return tokenizer


def gguf_model(file: GgufFile, config: Any, dtype: Any = "auto") -> Any:
    """The file's model, dequantised: a plain model that can be trained and saved.

    Args:
        config: Configuration from :func:`gguf_config`.
        dtype: Dtype of all weights. ``auto`` is bf16 for quantised weights, else the file's.

    Raises:
        LatteError: Weights are missing, or have other shapes than the configuration says.
    """
    from transformers import AutoModelForCausalLM, GgufConfig

    kind: Any = AutoModelForCausalLM
    with quick_reader(), _one_line(file, "weights"):
        model, found = kind.from_pretrained(
            file.path.parent,
            **_place(file),
            config=config,
            dtype=file.dtype if dtype == "auto" else dtype,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
    if found["missing_keys"]:
        raise LatteError(f"{file.path} lacks weights: {min(found['missing_keys'])}")
    # The weights are plain ones now; saving and training would refuse a quantised model's.
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        model.__dict__.pop(name, None)
    for name in ("quantization_config", "_pre_quantization_dtype"):
        model.config.__dict__.pop(name, None)
    return model.eval()


@contextmanager
def _one_line(file: GgufFile, what: str) -> Iterator[None]:
    try:
        yield
    except LatteError:
        raise
    # Three libraries read the file, and each has errors of its own.
    except Exception as error:
        raise LatteError(f"the {what} of {file.path} cannot be read: {one_line(error)}") from None


@contextmanager
def quick_reader() -> Iterator[None]:
    """Within it, Transformers' reader leaves out vocabularies, and shows no bar and no warnings.

    It parses the whole header for a configuration and again for the weights: 15 seconds each for
    the 262,144 tokens of Gemma 3. Tokenizers are read by another reader. The warnings are of ids
    beyond a vocabulary that was left out, and of kernels for weights that stay quantised.
    """
    import gguf
    from transformers import modeling_gguf_pytorch_utils as utils
    from transformers.utils import logging

    class Quick(gguf.GGUFReader):  # type: ignore[misc]
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            kind = gguf.GGUFValueType(raw_type)
            if kind == gguf.GGUFValueType.ARRAY:
                blob: Any = self.data
                of, count = struct.unpack_from("<IQ", blob, orig_offs)
                if of == _STRING:
                    end = _after_strings(blob, int(orig_offs) + 12, count)
                else:
                    end = orig_offs + 12 + count * struct.calcsize(f"<{_LETTERS[of]}")
                # The bytes as one part, from which the reader knows where to continue.
                return end - orig_offs, [blob[orig_offs:end]], [], [kind]
            return super()._get_field_parts(orig_offs, raw_type)

    found, bar, level = gguf.GGUFReader, utils.tqdm, logging.get_verbosity()
    gguf.GGUFReader, utils.tqdm = Quick, lambda items, **_: items  # type: ignore
    logging.set_verbosity_error()
    try:
        yield
    finally:
        gguf.GGUFReader, utils.tqdm = found, bar  # type: ignore
        logging.set_verbosity(level)
