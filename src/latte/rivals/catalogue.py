"""The models that the paper's tables compare with, by name, at the sizes of our own.

    model.preset=griffin        in any recipe of `latte train` and `latte compare`

Each name stands for a model of a library, or for one of our own layers where no library keeps it
(`latte.rivals`). All get the vocabulary, width, depth and heads of the size, and then
as many parameters as `transformer++` has there, as nearly as the width of their feed-forward
network (or, where there is none, their depth) allows.

    python -m latte.rivals tiny    # what there is, its parameters, what is missing
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

from huggingface_hub.errors import StrictDataclassError

from latte.errors import LatteError

Fields = dict[str, Any]
GET_FLA = "pip install 'latte-attention[baselines]'"
GET_TRITON = "pip install 'latte-attention[gpu]'"

# What a recipe may override for every model alike: fields of LatteConfig that set the size. The
# first ones mean something to Latte alone, and are passed over as `transformer++` passes them over.
OURS_ALONE = ("num_latents", "conv_kernel_size", "window_probability", "rglru_decay_range")
SIZE_FIELDS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "intermediate_size", "max_position_embeddings", "sliding_window"),
    *("embedding_multiplier", "embedding_dropout", "hidden_dropout"),
    *("initializer_range", "tie_word_embeddings"),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
)


@dataclass(frozen=True)
class Comparator:
    """One model of the tables.

    Attributes:
        fields: from a `transformer++` config of the wanted size to fields of the model's own.
        matched: the field that is fitted until the numbers of parameters agree.
        causal: a language model; otherwise it reads both ways, and only classifies.
    """

    name: str
    title: str
    paper: str
    library: Literal["transformers", "flash-linear-attention", "latte"]
    model_type: str
    fields: Callable[[Any], Fields]
    matched: str = "intermediate_size"
    causal: bool = True

    def missing(self) -> str | None:
        """What keeps the model from running here, with the way to get it, or None."""
        if self.library != "flash-linear-attention":
            return None
        import torch

        lacks = []
        if importlib.util.find_spec("fla") is None:
            lacks.append(f"flash-linear-attention ({GET_FLA})")
        if importlib.util.find_spec("triton") is None:  # without it `import fla` has no models
            lacks.append(f"Triton ({GET_TRITON})")
        if not torch.cuda.is_available():
            lacks.append("a GPU that Triton compiles for")
        return " and ".join(filter(None, [", ".join(lacks[:-1]), *lacks[-1:]])) or None

    def config(self, **values: Any) -> Any:
        """A config of the model's own class."""
        from transformers.models.auto.configuration_auto import AutoConfig

        make_known(self.model_type)
        return AutoConfig.for_model(self.model_type, **values)


def _common(size: Any) -> Fields:
    """Fields that every config names alike."""
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings")
    return {name: getattr(size, name) for name in (*names, *SIZE_FIELDS[-3:])}


def _width(size: Any) -> Fields:
    return {"intermediate_size": size.intermediate_size}


def _griffin(size: Any) -> Fields:
    # Two recurrent blocks, then one that attends; with fewer layers, the last one attends.
    pattern = ["recurrent"] * min(2, size.num_hidden_layers - 1) + ["attention"]
    return (
        _common(size)
        | _width(size)
        | {
            "num_attention_heads": size.num_attention_heads,
            "num_key_value_heads": 1,  # multi-query attention, as in the paper
            "attention_window_size": size.sliding_window,
            "block_types": pattern,
            "rms_norm_eps": size.norm_eps,
        }
    )


def _mamba(size: Any) -> Fields:
    return _common(size) | {"initializer_range": size.initializer_range}


def _mamba2(size: Any) -> Fields:
    inner = 2 * size.hidden_size
    head_dim = 64 if inner % 64 == 0 else inner // size.num_attention_heads
    heads = {"head_dim": head_dim, "num_heads": inner // head_dim, "n_groups": 1}
    return _mamba(size) | heads


def _rwkv4(size: Any) -> Fields:
    return _common(size) | _width(size) | {"context_length": size.max_position_embeddings}


def _lightning(size: Any) -> Fields:
    # MiniMax without its softmax layers and with a single expert, that is, a plain SwiGLU.
    return (
        _common(size)
        | _width(size)
        | {
            "num_attention_heads": size.num_attention_heads,
            "num_key_value_heads": size.num_attention_heads,
            "layer_types": ["linear_attention"] * size.num_hidden_layers,
            "num_local_experts": 1,
            "num_experts_per_tok": 1,
            "initializer_range": size.initializer_range,
            "rms_norm_eps": size.norm_eps,
        }
    )


def _longformer(size: Any) -> Fields:
    # Padding has an id of its own, after all tokens: the tasks mask it, and any id is a token.
    # Positions count from that id on, as in RoBERTa, so that as many rows of them are never read;
    # where these were more than are read, 0 is padding.
    pad = size.pad_token_id
    if pad is None:
        pad = size.vocab_size if size.vocab_size <= size.max_position_embeddings else 0
    values = (
        _common(size)
        | _width(size)
        | {
            "pad_token_id": pad,
            "num_attention_heads": size.num_attention_heads,
            "vocab_size": max(size.vocab_size, pad + 1),
            "max_position_embeddings": size.max_position_embeddings + pad + 1,
            "attention_window": size.sliding_window + size.sliding_window % 2,  # must be even
            "hidden_dropout_prob": size.hidden_dropout,
            "attention_probs_dropout_prob": 0.0,
            "initializer_range": size.initializer_range,
        }
    )
    del values["tie_word_embeddings"]
    return values


def _fla(size: Any) -> Fields:
    return _common(size) | {
        "num_heads": size.num_attention_heads,
        "max_position_embeddings": size.max_position_embeddings,
        "initializer_range": size.initializer_range,
        "norm_eps": size.norm_eps,
        "fuse_cross_entropy": False,  # the trainer computes every model's loss alike
        **_width(size),
    }


def _ours(mixer: str, **fields: Any) -> Callable[[Any], Fields]:
    """Fields of ComparatorConfig: all those of the size that say nothing about mixing."""

    def build(size: Any) -> Fields:
        names = set(SIZE_FIELDS) - {"sliding_window", "num_key_value_heads"}
        values = {name: getattr(size, name) for name in names}
        return {**values, "norm_eps": size.norm_eps, "mixer": mixer, **fields}

    return build


_FLA: Literal["flash-linear-attention"] = "flash-linear-attention"
_HF: Literal["transformers"] = "transformers"
_OURS: Literal["latte"] = "latte"
_OWN_TYPE = "latte_comparator"
_DEPTH = "num_hidden_layers"
_PLACES = {"position": "sinusoidal"}  # attention alone does not know the order of tokens
_ALL = (
    Comparator("griffin", "Griffin", "2402.19427", _HF, "recurrent_gemma", _griffin),
    Comparator("mamba", "Mamba", "2312.00752", _HF, "mamba", _mamba, _DEPTH),
    Comparator("mamba2", "Mamba-2", "2405.21060", _HF, "mamba2", _mamba2, _DEPTH),
    Comparator("rwkv4", "RWKV-4", "2305.13048", _HF, "rwkv", _rwkv4),
    Comparator("lightning", "Lightning Attention", "2401.04658", _HF, "minimax", _lightning),
    Comparator(
        "longformer", "Longformer", "2004.05150", _HF, "longformer", _longformer, causal=False
    ),
    Comparator("gla", "GLA", "2312.06635", _FLA, "gla", _fla),
    Comparator("retnet", "RetNet", "2307.08621", _FLA, "retnet", _fla),
    Comparator("rwkv6", "RWKV-6", "2404.05892", _FLA, "rwkv6", _fla),
    Comparator("mega", "Mega", "2209.10655", _OURS, _OWN_TYPE, _ours("mega")),
    Comparator("h3", "H3", "2212.14052", _OURS, _OWN_TYPE, _ours("h3")),
    Comparator("s5", "S5", "2208.04933", _OURS, _OWN_TYPE, _ours("s5")),
    Comparator("luna", "Luna", "2106.01540", _OURS, _OWN_TYPE, _ours("luna", **_PLACES)),
    Comparator(
        "linformer",
        "Linformer",
        "2006.04768",
        _OURS,
        _OWN_TYPE,
        _ours("linformer", is_causal=False, **_PLACES),
        causal=False,
    ),
)
COMPARATORS = {comparator.name: comparator for comparator in _ALL}


def is_comparator(model_type: str) -> bool:
    """Whether a model type is that of a comparator, whose state the library does not carry on."""
    return any(comparator.model_type == model_type for comparator in _ALL)


def find(name: str, *, causal: bool | None = None) -> Comparator:
    """The comparator of a name.

    Raises:
        LatteError: an unknown name, a bidirectional one where a causal one is wanted, or something
            that the model needs is missing.
    """
    if name not in COMPARATORS:
        raise LatteError(f"unknown comparator {name!r}, expected one of {', '.join(COMPARATORS)}")
    comparator = COMPARATORS[name]
    if causal and not comparator.causal:
        raise LatteError(
            f"comparator {name!r} reads both ways: it classifies, but is no language model"
        )
    if lacks := comparator.missing():
        raise LatteError(f"comparator {name!r} needs {lacks}")
    return comparator


def check_name(preset: str) -> None:
    """Raise LatteError for a name that is neither a preset's nor a comparator's."""
    from latte.models import PRESETS

    if preset not in PRESETS and preset not in COMPARATORS:
        raise LatteError(
            f"unknown preset {preset!r}, expected one of {', '.join(PRESETS)}, or of the models to"
            f" compare with: {', '.join(COMPARATORS)}"
        )


def make_known(model_type: str) -> None:
    """Let Transformers' Auto classes know a model type, and see that it runs as well as it can.

    Raises:
        LatteError: the library, Triton or a GPU for it is missing.
    """
    for comparator in _ALL:
        if comparator.model_type == model_type and comparator.library == _FLA:
            find(comparator.name)
            importlib.import_module("fla")
        elif comparator.model_type == model_type and comparator.library == _HF:
            _keep_own(model_type)
    if model_type == "mamba":
        from latte.rivals.mamba_scan import install

        install()


def _keep_own(model_type: str) -> None:
    """Once imported, flash-linear-attention's Mambas stand in the place of Transformers' own."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    own = getattr(transformers, CONFIG_MAPPING_NAMES[model_type])
    if CONFIG_MAPPING[model_type] is not own:
        transformers.AutoConfig.register(model_type, own, exist_ok=True)


def comparator_config(name: str, size: str = "tiny", **overrides: Any) -> Any:
    """The config of a comparator at one of `latte.models.SIZES`.

    It has as many parameters as `transformer++` has there: `intermediate_size` (or, of models
    without a feed-forward network, `num_hidden_layers`) is what `transformer++` has, and is fitted
    here.

    Args:
        overrides: sizes by LatteConfig's names, for `transformer++` and the comparator alike, or
            fields of the comparator's own config.

    Raises:
        LatteError: an unknown name, size or field, values that do not fit, or something that the
            model needs is missing.
    """
    from latte.models import count_parameters, preset_config

    comparator = find(name)
    sizes = {key: value for key, value in overrides.items() if key in SIZE_FIELDS}
    own = {k: v for k, v in overrides.items() if k not in (*SIZE_FIELDS, *OURS_ALONE)}
    sizes.setdefault("sliding_window", preset_config("swa++", size).sliding_window)
    known = _field_names(type(comparator.config())) | {"num_labels"}
    if (
        comparator.library != "latte"
        and own.pop("is_causal", comparator.causal) != comparator.causal
    ):
        ways = "reads both ways" if not comparator.causal else "is causal"
        raise LatteError(f"comparator {name!r} {ways}, and cannot do otherwise")
    if "num_labels" in own and not _classifies(comparator):
        raise LatteError(f"comparator {name!r} has no classifier in {comparator.library}")
    for field in own:
        if field not in known:
            raise LatteError(f"unknown field {field!r} of comparator {name!r}")

    def build(matched: int) -> Any:
        values = preset_config("transformer++", size, **{**sizes, comparator.matched: matched})
        return comparator.config(**{**comparator.fields(values), **own})

    try:
        reference = preset_config("transformer++", size, **sizes)
        return _fit(build, count_parameters(reference), comparator)
    except LatteError:
        raise
    except StrictDataclassError as error:
        raise LatteError(f"comparator {name!r}: {error.__cause__ or error}") from None
    except (AssertionError, ImportError, LookupError, TypeError, ValueError) as error:
        # A library's own check, or what it stumbles over where it has none.
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        given = ", ".join(f"{key}={value!r}" for key, value in (own or overrides).items())
        what = " ".join(f"{kind}{error}; got {given}".split())
        raise LatteError(f"comparator {name!r}: {what}") from None


def count(config: Any, comparator: Comparator) -> int:
    """Parameters of a comparator without its classifier's head, tied ones once."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    causal = comparator.causal and getattr(config, "is_causal", True)
    kind: Any = AutoModelForCausalLM if causal else AutoModel
    with torch.device("meta"):
        model = kind.from_config(config)
    return sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())


def language_model(config: Any) -> Any:
    """A freshly initialised language model of any causal config, ours or a library's."""
    from transformers import AutoModelForCausalLM

    from latte.models import LatteConfig, LatteForCausalLM

    plain = type(config) is LatteConfig
    return LatteForCausalLM(config) if plain else AutoModelForCausalLM.from_config(config)


def _fit(build: Callable[[int], Any], target: int, comparator: Comparator) -> Any:
    """The width in steps of 16, or the depth, at which the parameters come nearest `target`."""
    step = 1 if comparator.matched == _DEPTH else 16
    # Parameters are affine in either: two counts give the line.
    one, two = (count(build(n * step), comparator) for n in (1, 2))
    return build(max(1, round(1 + (target - one) / (two - one))) * step)


def _classifies(comparator: Comparator) -> bool:
    from transformers.models.auto import modeling_auto as auto

    names = auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    return comparator.library == _OURS or comparator.model_type in names


def _field_names(kind: type) -> set[str]:
    """Fields of a config class: a dataclass's, or arguments where it is written the old way."""
    names = set(inspect.signature(kind).parameters) - {"kwargs"}
    return names | {field.name for field in fields(kind)} if is_dataclass(kind) else names


def main(arguments: list[str] | None = None) -> int:
    """Print the comparators at a size: parameters, and what is missing here."""
    from transformers.utils import logging

    from latte.models import SIZES, count_parameters, preset_config

    words = sys.argv[1:] if arguments is None else arguments
    size = words[0] if words else "tiny"
    if len(words) > 1 or size not in SIZES:
        expected = f"expected one of the sizes {', '.join(SIZES)}"
        print(f"comparators: error: {expected}, got {' '.join(words)}", file=sys.stderr)
        return 2
    logging.set_verbosity_error()
    target = count_parameters(preset_config("transformer++", size))
    print("| name | library | paper | causal | parameters | to `transformer++` |")
    print("|---|---|---|---|---:|---:|")
    print(f"| `transformer++` | latte | | yes | {target / 1e6:.2f}M | 1 |")
    for name, comparator in COMPARATORS.items():
        line = f"| `{name}` | {comparator.library} | arXiv {comparator.paper} |"
        line += f" {'yes' if comparator.causal else 'no'} |"
        if lacks := comparator.missing():
            print(f"{line} needs {lacks} | |")
        else:
            number = count(comparator_config(name, size), comparator)
            print(f"{line} {number / 1e6:.2f}M | {number / target:.3f} |")
    return 0
