"""The configuration of a GGUF file's model, from its metadata, key by key."""

from __future__ import annotations

import math
import re
import struct
from typing import Any

from latte.conversion.gguf.documents import document_ends, special_token
from latte.conversion.gguf.file import ARCHITECTURES, GgufFile
from latte.errors import LatteError, one_line

# Keys of features that no decoder here has: experts, and heads that predict further tokens.
ABSENT = ("expert_count", "expert_used_count", "nextn_predict_layers")
# Widths that must be that of a head: values are as wide as keys, and heads are rotated whole.
WIDTHS = ("attention.key_length_swa", "attention.value_length", "attention.value_length_swa",
          "rope.dimension_count", "rope.dimension_count_swa")  # fmt: skip
# The number of layers of the models whose queries are scaled by another width than their heads'.
SCALED_BY_HIDDEN = {"gemma2": 46, "gemma3": 62}
# Windows: architecture -> n, where each n-th layer has no window.
WINDOWS = {"gemma2": 2, "gemma3": 6}
# Llama 3's scaling of the rotation. A file has only the divisors of the frequencies.
LOW, HIGH, PRETRAINED_LENGTH = 1.0, 4.0, 8192


def gguf_config(file: GgufFile) -> Any:
    """The configuration of a file's model.

    Raises:
        LatteError: A key is missing or has a value that does not fit, or the model has a feature
            that its class in Transformers lacks.
    """
    from transformers import AutoConfig

    own = file.key
    for name in ABSENT:
        if file.metadata.get(own(name), 0) != 0:
            file.refuse(own(name), "0: only decoders without experts and extra heads are read")
    if not file.flag(own("attention.causal"), True):
        file.refuse(own("attention.causal"), "True: only causal decoders are read")
    layers, hidden = _layers(file), file.whole(own("embedding_length"), least=1)
    heads = _of_all_layers(file, "attention.head_count", layers)
    key_heads = _of_all_layers(file, "attention.head_count_kv", layers, heads)
    if heads % key_heads:
        file.refuse(own("attention.head_count_kv"), f"a divisor of the {heads} heads")
    width = file.whole(own("attention.key_length"), hidden // heads, least=1)
    for name in WIDTHS:
        if file.whole(own(name), width) != width:
            file.refuse(own(name), f"{width}, the width of a head")
    ends = document_ends(file)
    values = {
        "vocab_size": _vocabulary(file),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": width,
        "intermediate_size": _of_all_layers(file, "feed_forward_length", layers),
        "max_position_embeddings": file.whole(own("context_length"), least=1),
        "rms_norm_eps": file.number(own("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rotation(file, width),
        "bos_token_id": ends.bos,
        "eos_token_id": ends.stops,
        "pad_token_id": special_token(file, "padding"),
    }
    if file.architecture != "qwen2":  # which always has them
        values["attention_bias"] = _has_bias(file, "attn_")
    if file.architecture == "llama":
        values["mlp_bias"] = _has_bias(file, "ffn_")
    if file.architecture in WINDOWS:
        values |= _gemma(file, hidden // heads, width, layers)
    try:
        return AutoConfig.for_model(ARCHITECTURES[file.architecture], **values)
    except Exception as error:  # of the checks of the configuration's class
        raise LatteError(
            f"the configuration of {file.path} cannot be read: {one_line(error)}"
        ) from None


def _layers(file: GgufFile) -> int:
    """The number of layers, which must be that of the weights."""
    key, numbers = file.key("block_count"), re.compile(r"blk\.(\d+)\.")
    found = {int(match[1]) for match in map(numbers.match, file.tensors) if match}
    layers: int = file.whole(key, least=1)
    if found and found != set(range(len(found))) or len(found) != layers:
        file.refuse(key, f"{len(found)}, the number of layers with weights")
    return layers


def _of_all_layers(file: GgufFile, name: str, layers: int, default: int | None = None) -> int:
    """A number that a file gives once, or for each layer; it must be the same for all."""
    key = file.key(name)
    found = file.metadata.get(key, default)
    if isinstance(found, list) and len(found) == layers and len(set(found)) == 1:
        found = found[0]
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        file.refuse(key, f"a whole number of at least 1, the same for all {layers} layers")
    return found


def _vocabulary(file: GgufFile) -> int:
    """The number of rows of the embedding. llama.cpp does not read the key `vocab_size` either."""
    if "token_embd.weight" not in file.tensors:
        raise LatteError(f"{file.path} lacks weights: token_embd.weight")
    rows: int = file.tensors["token_embd.weight"][1][0]
    tokens = len(file.tokens)
    if tokens > rows:
        raise LatteError(
            f"{file.path}: tokenizer.ggml.tokens has {tokens} tokens; expected at most {rows}, the"
            " rows of token_embd.weight"
        )
    return rows


def _has_bias(file: GgufFile, part: str) -> bool:
    return any(part in name and name.endswith(".bias") for name in file.tensors)


def _gemma(file: GgufFile, default_scale: int, width: int, layers: int) -> dict[str, Any]:
    """What Gemma 2 and 3 have besides: windows, the scale of queries, and caps of logits."""
    own, is_second = file.key, file.architecture == "gemma2"
    window = file.whole(own("attention.sliding_window"), 4096 if is_second else 0)
    if is_second and not window:
        file.refuse(own("attention.sliding_window"), "a whole number of at least 1")
    large = SCALED_BY_HIDDEN[file.architecture] == layers
    values: dict[str, Any] = {
        "sliding_window": window or file.whole(own("context_length")),  # without one, of no layer
        "layer_types": _layer_types(file, layers) if window else ["full_attention"] * layers,
        "query_pre_attn_scalar": default_scale if large else width,
        "final_logit_softcapping": None,
    }
    if is_second:
        values["attn_logit_softcapping"] = file.number(own("attn_logit_softcapping"), 50.0)
        values["final_logit_softcapping"] = file.number(own("final_logit_softcapping"), 30.0)
    elif file.metadata.get(own("final_logit_softcapping")):
        values["final_logit_softcapping"] = file.number(own("final_logit_softcapping"))
    return values


def _layer_types(file: GgufFile, layers: int) -> list[str]:
    """Which layers have a window: from a flag for each layer, or n: each n-th layer has none."""
    key = file.key("attention.sliding_window_pattern")
    found = file.metadata.get(key, WINDOWS[file.architecture])
    if isinstance(found, int) and not isinstance(found, bool) and found >= 0:
        found = [not found or i % found < found - 1 for i in range(layers)]
    if not isinstance(found, list) or len(found) != layers:
        file.refuse(key, f"a whole number, or one flag for each of the {layers} layers")
    return ["sliding_attention" if each else "full_attention" for each in found]


def _rotation(file: GgufFile, width: int) -> dict[str, Any]:
    """The rotary parameters. Gemma 3 has them twice, and those under a window are not scaled."""
    base = file.number(file.key("rope.freq_base"), 10000.0)
    default = 10000.0 if file.architecture == "gemma3" else base
    local = file.number(file.key("rope.freq_base_swa"), default)
    rotation = {"rope_type": "default", "rope_theta": base, **_scaling(file, base, width)}
    if file.architecture == "gemma3":
        under_window = {"rope_type": "default", "rope_theta": local}
        return {"full_attention": rotation, "sliding_attention": under_window}
    if file.architecture == "gemma2" and local != base:
        file.refuse(file.key("rope.freq_base_swa"), f"{base}, as in layers without a window")
    return rotation


def _scaling(file: GgufFile, base: float, width: int) -> dict[str, Any]:
    """How the rotary frequencies are scaled beyond the pretrained length; {} if they are not."""
    key = file.key("rope.scaling.type")
    kind, length = file.text(key, "linear"), file.key("rope.scaling.original_context_length")
    if kind not in ("none", "linear", "yarn"):
        file.refuse(key, "'none', 'linear' or 'yarn'")
    older, newer = file.key("rope.scale_linear"), file.key("rope.scaling.factor")
    given = newer if newer in file.metadata else older
    factor = file.number(given, 1.0) if file.metadata.get(given) else 1.0  # 0 is not scaled either
    scale = file.number(file.key("rope.scaling.attn_factor"), 1.0)
    if scale != 1 and (kind != "yarn" or "rope_freqs.weight" in file.tensors):
        file.refuse(file.key("rope.scaling.attn_factor"), "1.0: only YaRN's rotation is multiplied")
    if "rope_freqs.weight" in file.tensors:
        if kind != "none" and factor != 1:
            raise LatteError(
                f"{file.path} scales its rotary frequencies twice, by {given} and by"
                " rope_freqs.weight; expected one of them"
            )
        return _llama3(file, base, width)
    if kind == "yarn":
        return _yarn(
            file, factor, scale, file.whole(length, file.whole(file.key("context_length")))
        )
    return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1 else {}


def _yarn(file: GgufFile, factor: float, scale: float, length: int) -> dict[str, Any]:
    """YaRN's parameters. llama.cpp has the keys of its details for few architectures."""
    total = 1.0 + 0.1 * math.log(factor) if factor > 1 else 1.0
    for name, known in (("yarn_ext_factor", (1.0,)), ("yarn_attn_factor", (1.0, total))):
        key = file.key(f"rope.scaling.{name}")
        value = file.number(key, known[0])
        if not any(math.isclose(value, each, rel_tol=1e-4) for each in known):
            file.refuse(key, " or ".join(f"{each:g}" for each in known))
    return {
        "rope_type": "yarn",
        "factor": factor,
        "attention_factor": scale * total,
        "original_max_position_embeddings": length,
        "beta_fast": file.number(file.key("rope.scaling.yarn_beta_fast"), 32.0),
        "beta_slow": file.number(file.key("rope.scaling.yarn_beta_slow"), 1.0),
    }


def _llama3(file: GgufFile, theta: float, width: int) -> dict[str, Any]:
    """The rotary parameters of Llama 3, of which a file has the frequencies' divisors alone."""
    kind, shape = file.tensors["rope_freqs.weight"]
    half = width // 2
    found: tuple[float, ...] = ()
    if file.architecture == "llama" and kind == 0 and shape == (half,):
        with file.path.open("rb") as opened:
            opened.seek(file.offsets["rope_freqs.weight"])
            found = struct.unpack(f"<{half}f", opened.read(4 * half))
    factor = round(max(found, default=1.0), 3)
    expected = []
    for i in range(len(found)):
        turns = PRETRAINED_LENGTH * theta ** (-i / half) / (2 * math.pi)
        smooth = min(max((turns - LOW) / (HIGH - LOW), 0.0), 1.0)
        expected.append(1 / ((1 - smooth) / factor + smooth))
    pairs = zip(found, expected, strict=True)
    if not found or not all(math.isclose(x, y, rel_tol=1e-3) for x, y in pairs):
        raise LatteError(
            f"{file.path} has rotary frequencies of its own (rope_freqs) that are not Llama 3's,"
            " which is not supported"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LOW,
        "high_freq_factor": HIGH,
        "original_max_position_embeddings": PRETRAINED_LENGTH,
    }
