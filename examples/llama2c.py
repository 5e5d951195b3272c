"""Import models of llama2.c (its unversioned fp32 `.bin` files) into Transformers.

    python -m examples.llama2c CHECKPOINT TOKENIZER OUT

A checkpoint is seven int32 (E, M, N, H, G, V, T) and then fp32 weights, little-endian; V is
negative when the classifier is not shared with the embedding. A tokenizer is an int32 (the bytes
of the longest token) and then, for each token, its score (fp32), its length (int32) and its bytes.
Format and arithmetic: github.com/karpathy/llama2.c, `export.py`, `tokenizer.py` and `run.c`.

Shape suffixes: V vocabulary, E hidden size, M MLP width, N layers, H query heads, G key/value
heads, K width of a head (E / H), T positions.
"""

from __future__ import annotations

import math
import os
import shutil
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latte.errors import LatteError
from latte.lab.command_line import OneLineParser

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

HEADER = struct.Struct("<7i")
VERSIONED_MAGIC = 0x616B3432  # "ak42": the first word of the versioned exports
ROPE_BASE = 10000.0  # fixed in run.c, as is the epsilon
NORM_EPSILON = 1e-5
UNK, BOS, EOS = "<unk>", "<s>", "</s>"  # ids 0, 1, 2; the file spells the latter two "\n<s>\n"
FIRST_BYTE = 3  # id of "<0x00>"; the other bytes follow
FIRST_PIECE = FIRST_BYTE + 256
LOWEST_SCORE = -1e10  # run.c never merges into a token at or below it


@dataclass(frozen=True)
class Header:
    """The sizes of a checkpoint, and whether its classifier is the embedding."""

    hidden_size: int  # E
    intermediate_size: int  # M
    num_layers: int  # N
    num_heads: int  # H
    num_kv_heads: int  # G
    vocab_size: int  # V
    max_positions: int  # T
    shared_classifier: bool

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads  # K

    def parts(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of everything after the header, in the file's order."""
        size, width, depth = self.hidden_size, self.intermediate_size, self.num_layers
        kv_size = self.num_kv_heads * self.head_size
        table = (self.max_positions, self.head_size // 2)
        parts: dict[str, tuple[int, ...]] = {
            "embedding": (self.vocab_size, size),
            "attention_norm": (depth, size),
            "wq": (depth, size, size),
            "wk": (depth, kv_size, size),
            "wv": (depth, kv_size, size),
            "wo": (depth, size, size),
            "mlp_norm": (depth, size),
            "w1": (depth, width, size),
            "w2": (depth, size, width),
            "w3": (depth, width, size),
            "final_norm": (size,),
            "cos": table,  # run.c computes the rotations anew, and so does Transformers
            "sin": table,
        }
        if not self.shared_classifier:
            parts["classifier"] = (self.vocab_size, size)
        return parts


def read_header(checkpoint: str | Path) -> Header:
    """The sizes of a checkpoint whose length is exactly what they ask for.

    Raises:
        LatteError: no such file, a versioned (also quantised) export, impossible sizes, a file
            that is too short or too long.
    """
    path = Path(checkpoint)
    start, length = _read(path, HEADER.size)
    what = f"checkpoint {path}"
    if len(start) < HEADER.size:
        raise LatteError(f"{what}: expected a llama2.c header of 28 bytes, got {length} bytes")
    values = HEADER.unpack(start)
    if values[0] == VERSIONED_MAGIC:
        raise LatteError(
            f"{what} is a llama2.c export of version {values[1]}; expected the unversioned fp32"
            " format (version 0)"
        )
    size, width, depth, heads, kv_heads, vocabulary, positions = values
    header = Header(size, width, depth, heads, kv_heads, abs(vocabulary), positions, vocabulary > 0)
    named = f"hidden {size}, MLP {width}, {depth} layers, {heads} heads, {kv_heads} key/value heads"
    named += f", vocabulary {abs(vocabulary)}, {positions} positions"
    if (
        min(size, width, depth, heads, kv_heads, abs(vocabulary), positions) < 1
        or size % heads
        or heads % kv_heads
        or header.head_size % 2
    ):
        raise LatteError(f"{what} is not a llama2.c model: its header says {named}")
    expected = HEADER.size + 4 * sum(math.prod(shape) for shape in header.parts().values())
    if length != expected:
        raise LatteError(f"{what}: expected {expected} bytes for {named}; got {length} bytes")
    return header


def load_llama2c(checkpoint: str | Path) -> LlamaForCausalLM:
    """The model of a llama2.c checkpoint as an fp32 Llama of Transformers, in evaluation mode.

    llama2.c rotates neighbouring rows (2i, 2i+1) of each head, Transformers rows (i, i + K/2):
    the rows of wq and wk are put in the latter order, which leaves every q.k as it was.

    Raises:
        LatteError: as `read_header`, and for weights that are not finite.
    """
    header = read_header(checkpoint)
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.initialization import no_init_weights

    config = LlamaConfig(
        vocab_size=header.vocab_size,
        hidden_size=header.hidden_size,
        intermediate_size=header.intermediate_size,
        num_hidden_layers=header.num_layers,
        num_attention_heads=header.num_heads,
        num_key_value_heads=header.num_kv_heads,
        max_position_embeddings=header.max_positions,
        rms_norm_eps=NORM_EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
        tie_word_embeddings=header.shared_classifier,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    with no_init_weights():  # every weight is in the file; the caller's random state stays as it is
        model = LlamaForCausalLM(config)
    model.load_state_dict(_weights(Path(checkpoint), header))
    model.tie_weights()
    # Models trained with llama2.c end a text by the token that opens the next one, as run.c does.
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=[2, 1])
    return model.eval()


def _weights(path: Path, header: Header) -> dict[str, torch.Tensor]:
    """The weights under Transformers' names, mapped from the file rather than read at once."""
    import numpy as np
    import torch

    stored: dict[str, Any] = {}
    offset = HEADER.size
    for name, shape in header.parts().items():
        stored[name] = np.memmap(path, dtype="<f4", mode="r", offset=offset, shape=shape)
        offset += stored[name].nbytes
        if name not in ("cos", "sin") and not np.isfinite(stored[name]).all():
            raise LatteError(f"checkpoint {path}: {name} has values that are not finite")

    def tensor(name: str, layer: int | None = None) -> torch.Tensor:
        part = stored[name] if layer is None else stored[name][layer]
        return torch.from_numpy(np.array(part, dtype=np.float32))

    weights = {
        "model.embed_tokens.weight": tensor("embedding"),
        "model.norm.weight": tensor("final_norm"),
        "lm_head.weight": tensor("embedding" if header.shared_classifier else "classifier"),
    }
    for layer in range(header.num_layers):
        own = {
            "input_layernorm": tensor("attention_norm", layer),
            "self_attn.q_proj": _halves(tensor("wq", layer), header.num_heads),
            "self_attn.k_proj": _halves(tensor("wk", layer), header.num_kv_heads),
            "self_attn.v_proj": tensor("wv", layer),
            "self_attn.o_proj": tensor("wo", layer),
            "post_attention_layernorm": tensor("mlp_norm", layer),
            "mlp.gate_proj": tensor("w1", layer),
            "mlp.down_proj": tensor("w2", layer),
            "mlp.up_proj": tensor("w3", layer),
        }
        weights |= {f"model.layers.{layer}.{name}.weight": value for name, value in own.items()}
    return weights


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """(heads * K, E): of each head, the even rows and then the odd ones."""
    pairs = weight.unflatten(0, (heads, -1, 2))  # (heads, K/2, 2, E)
    return pairs.transpose(1, 2).flatten(0, 2).contiguous()


def read_tokens(tokenizer: str | Path) -> tuple[list[str], list[float]]:
    """The strings and scores of a llama2.c tokenizer, by id, as the file spells them.

    Raises:
        LatteError: no such file, cut short, not of the format, or without its 256 byte tokens.
    """
    path = Path(tokenizer)
    data, length = _read(path)
    what = f"tokenizer {path}"
    if length < 4:
        raise LatteError(f"{what}: expected a llama2.c tokenizer, got {length} bytes")
    (longest,) = struct.unpack_from("<i", data)
    texts: list[str] = []
    scores: list[float] = []
    at = 4
    while at < length:
        here = f"{what}: token {len(texts)}"
        if at + 8 > length:
            raise LatteError(f"{here} is cut short: the file ends after {length} bytes")
        score, size = struct.unpack_from("<fi", data, at)
        at += 8
        if not 0 < size <= longest or not math.isfinite(score):
            raise LatteError(
                f"{here}: expected a finite score and 1 to {longest} bytes, got {score} and {size}"
            )
        if at + size > length:
            raise LatteError(f"{here} is cut short: the file ends after {length} bytes")
        try:
            texts.append(data[at : at + size].decode("utf-8"))
        except UnicodeDecodeError:
            raise LatteError(f"{here}: expected UTF-8, got {data[at : at + size]!r}") from None
        scores.append(score)
        at += size
    for byte in range(256):
        index, text = FIRST_BYTE + byte, f"<0x{byte:02X}>"
        if index >= len(texts) or texts[index] != text:
            found = repr(texts[index]) if index < len(texts) else "the end of the file"
            raise LatteError(f"{what}: expected token {index} to be {text}, got {found}")
    return texts, scores


def merges_by_score(texts: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that llama2.c tries, best first: each two tokens that make up a third.

    llama2.c joins, again and again, the neighbours whose joint token scores highest, the leftmost
    of equals. A merge list ranks pairs, so the scores of joint tokens have to differ. Only one
    split of each token ever comes up, in whatever order they are listed: until a token's span is
    joined, merging within it goes as it would alone, and only one state of that has two tokens.

    Raises:
        LatteError: two joint tokens have one score.
    """
    pieces = {text for index, text in enumerate(texts) if index >= FIRST_BYTE}
    joint: dict[float, str] = {}
    ranked: list[tuple[float, tuple[str, str]]] = []
    for text, score in zip(texts[FIRST_PIECE:], scores[FIRST_PIECE:], strict=True):
        splits = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        splits = [split for split in splits if pieces.issuperset(split)]
        if not splits or score <= LOWEST_SCORE:
            continue
        if score in joint:
            raise LatteError(
                f"the tokens {joint[score]!r} and {text!r} have the same score {score}: expected"
                " a BPE tokenizer, whose merges are ordered"
            )
        joint[score] = text
        ranked += [(-score, split) for split in splits]
    return [pair for _, pair in sorted(ranked)]


def load_llama2c_tokenizer(
    tokenizer: str | Path, *, vocab_size: int | None = None, max_length: int | None = None
) -> PreTrainedTokenizerFast:
    """A llama2.c tokenizer as a fast tokenizer of Transformers, with the same ids for any text.

    A space is put before a text, characters without a token become their UTF-8 bytes, and
    decoding takes one leading space away. Encoding starts with `<s>`, as run.c does; text that
    spells a special token stays text.

    Args:
        vocab_size: the number of tokens that there have to be.
        max_length: `model_max_length` of the result, the model's positions.

    Raises:
        LatteError: as `read_tokens` and `merges_by_score`, two tokens with one text, no token for
            the space, or another number of tokens than `vocab_size`.
    """
    texts, scores = read_tokens(tokenizer)
    what = f"tokenizer {tokenizer}"
    if vocab_size is not None and len(texts) != vocab_size:
        raise LatteError(f"{what} has {len(texts)} tokens; expected the model's {vocab_size}")
    spelled = [UNK, BOS, EOS, *texts[FIRST_BYTE:]]
    vocabulary: dict[str, int] = {}
    for index, text in enumerate(spelled):
        if vocabulary.setdefault(text, index) != index:
            raise LatteError(f"{what}: tokens {vocabulary[text]} and {index} are both {text!r}")
    if " " not in vocabulary:
        raise LatteError(f"{what} has no token for the space, which starts every text")
    try:
        merges = merges_by_score(texts, scores)
    except LatteError as error:
        raise LatteError(f"{what}: {error}") from None

    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=UNK, byte_fallback=True)
    )
    # Tokens keep the plain space of the file: with SentencePiece's "▁" in its place, a text that
    # has that character itself would be read as if it had a space.
    backend.normalizer = normalizers.Prepend(" ")
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([UNK, BOS, EOS])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=UNK,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
        **({} if max_length is None else {"model_max_length": max_length}),
    )


def import_llama2c(checkpoint: str | Path, tokenizer: str | Path, output: str | Path) -> Path:
    """Write a folder that AutoModelForCausalLM and AutoTokenizer load; returns it.

    Everything is read and checked before anything is written, and the folder appears whole.

    Raises:
        LatteError: `output` exists or cannot be written; `load_llama2c` or
            `load_llama2c_tokenizer` refuses its file, or the two do not belong together.
    """
    folder = Path(output)
    if os.path.lexists(folder):
        raise LatteError(f"output folder {folder} exists; expected a new one")
    header = read_header(checkpoint)
    fast = load_llama2c_tokenizer(
        tokenizer, vocab_size=header.vocab_size, max_length=header.max_positions
    )
    model = load_llama2c(checkpoint)
    from safetensors import SafetensorError

    partial = folder.parent / f".{folder.name}.{os.getpid()}.partial"
    try:
        partial.mkdir(parents=True)
        try:
            model.save_pretrained(partial)
            fast.save_pretrained(partial)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # gone already, unless something failed
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LatteError(f"output folder {folder} cannot be written: {reason}") from None
    return folder


def _read(path: Path, limit: int = -1) -> tuple[bytes, int]:
    """The first `limit` bytes of a file (all by default), and its length."""
    try:
        with path.open("rb") as file:
            return file.read(limit), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise LatteError(f"{path} cannot be read: {error.strerror or error}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m examples.llama2c`; returns the exit code, 2 for a user's mistake."""
    parser = OneLineParser(
        prog="python -m examples.llama2c",
        description="Import a llama2.c checkpoint and its tokenizer as a folder of Transformers.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", help="the model's .bin file (fp32, unversioned)")
    parser.add_argument("tokenizer", help="the tokenizer's .bin file")
    parser.add_argument("output", help="the folder to write; it must not exist")
    options = parser.parse_args(arguments)
    try:
        folder = import_llama2c(options.checkpoint, options.tokenizer, options.output)
    except LatteError as error:
        print(f"{parser.prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(f"written: {folder}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
