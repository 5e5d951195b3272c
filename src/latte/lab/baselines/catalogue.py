"""The models that the paper's tables compare with, by name, at the sizes of our own.

    model.preset=griffin        in any recipe of `latte train` and `latte compare`

Each name is a model of a library, or one of our own layers if no library has it
(`latte.lab.baselines`). All models get the vocabulary, width, depth and heads of the size. Their
number of parameters is then fitted to that of `transformer++`, by the width of their feed-forward
network, or by their depth if they have no such network.

    python -m latte.lab.baselines tiny    # the models, their parameters, what is missing
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

from huggingface_hub.errors import StrictDataclassError

from latte.errors import LatteError
from latte.layers.latent_fields import LatentFields
from latte.models.registry import ModelEntry

Fields = dict[str, Any]
_FLA: Literal["flash-linear-attention"] = "flash-linear-attention"
_HF: Literal["transformers"] = "transformers"
_OURS: Literal["latte"] = "latte"
_OWN_TYPE = "latte_comparator"
_DEPTH = "num_hidden_layers"
GET_FLA = "pip install 'latte-attention[baselines]'"
GET_TRITON = "pip install 'latte-attention[gpu]'"

# Fields of LatteConfig that set the size. A recipe may override them for every model. The first
# ones have a meaning only for Latte, and are ignored here, as `transformer++` ignores them.
OURS_ALONE = (
    "conv_kernel_size",
    *(field.name for field in fields(LatentFields) if field.name != "latent_input"),
)
SIZE_FIELDS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "intermediate_size", "max_position_embeddings", "sliding_window"),
    *("embedding_multiplier", "embedding_dropout", "hidden_dropout"),
    *("initializer_range", "embedding_initializer_range", "tie_word_embeddings"),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
)


@dataclass(frozen=True)
class Baseline(ModelEntry):
    """One model of the tables.

    Attributes:
        fields: Function from a `transformer++` config of the wanted size to the model's own fields.
        matched: Field that is fitted until the numbers of parameters agree.
    """

    carries_state: bool = False  # few of the libraries' models can, so all read whole windows
    library: Literal["transformers", "flash-linear-attention", "latte"] = "latte"
    paper: str = ""  # its arXiv number
    fields: Callable[[Any], Fields] = dict
    matched: str = "intermediate_size"

    def missing(self) -> str | None:
        """The reason why the model cannot run here, and how to mend that; None if it can."""
        if self.library != _FLA:
            return None
        import torch

        lacks = []
        if importlib.util.find_spec("fla") is None:
            lacks.append(f"flash-linear-attention ({GET_FLA})")
        if importlib.util.find_spec("triton") is None:  # without Triton, `import fla` has no models
            lacks.append(f"Triton ({GET_TRITON})")
        if not torch.cuda.is_available():
            lacks.append("a GPU that Triton compiles for")
        return " and ".join(filter(None, [", ".join(lacks[:-1]), *lacks[-1:]])) or None

    def prepare(self) -> None:
        """Register the model with Transformers' Auto classes, and prepare its fastest code.

        Raises:
            LatteError: The library, Triton or a GPU for it is missing.
        """
        if self.library == _FLA:
            self.check()
            importlib.import_module("fla")
        elif self.library == _HF:
            import transformers
            from transformers.models.auto import configuration_auto as auto

            # When it is imported, flash-linear-attention's Mambas replace those of Transformers.
            own = getattr(transformers, auto.CONFIG_MAPPING_NAMES[self.model_type])
            if auto.CONFIG_MAPPING[self.model_type] is not own:
                transformers.AutoConfig.register(self.model_type, own, exist_ok=True)
            from latte.lab.baselines import scans

            scans.install(self.model_type)

    def add_dropout(self, model: Any) -> None:
        """That of the recipe's sizes, which the libraries' models do not have."""
        if self.library != _OURS:
            from latte.lab.baselines.dropout import add_dropout

            add_dropout(model)

    def own_config(self, **values: Any) -> Any:
        """A config of the model's own class."""
        from transformers.models.auto.configuration_auto import AutoConfig

        self.prepare()
        return AutoConfig.for_model(self.model_type, **values)

    def config(self, size: str = "tiny", **overrides: Any) -> Any:
        """Its config at one of `latte.models.SIZES`.

        It has as many parameters as `transformer++` has there. `intermediate_size` sets that of
        `transformer++`, and is then fitted for this model. For models without a feed-forward
        network this is `num_hidden_layers`.

        Args:
            overrides: Sizes by LatteConfig's names, for both `transformer++` and the baseline,
                or fields of the baseline's own config.

        Raises:
            LatteError: A size or field is unknown, values do not fit, or something that the model
                needs is missing.
        """
        from transformers.models.auto import modeling_auto as auto

        from latte.models import count_parameters, preset_config

        self.check()
        sizes = {key: value for key, value in overrides.items() if key in SIZE_FIELDS}
        own = {k: v for k, v in overrides.items() if k not in (*SIZE_FIELDS, *OURS_ALONE)}
        sizes.setdefault("sliding_window", preset_config("swa++", size).sliding_window)
        known = _field_names(type(self.own_config())) | {"num_labels"}
        if self.library != _OURS and own.pop("is_causal", self.causal) != self.causal:
            ways = "reads both ways" if not self.causal else "is causal"
            raise LatteError(f"comparator {self.name!r} {ways}, and cannot do otherwise")
        classifiers = auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
        classifies = self.library == _OURS or self.model_type in classifiers
        if "num_labels" in own and not classifies:
            raise LatteError(f"comparator {self.name!r} has no classifier in {self.library}")
        for field in own:
            if field not in known:
                raise LatteError(f"unknown field {field!r} of comparator {self.name!r}")

        def build(matched: int) -> Any:
            values = preset_config("transformer++", size, **{**sizes, self.matched: matched})
            config = self.own_config(**{**self.fields(values), **own})
            if self.library != _OURS:  # for latte.lab.baselines.dropout
                config.embedding_dropout = values.embedding_dropout
                config.hidden_dropout = values.hidden_dropout
            return config

        try:
            reference = preset_config("transformer++", size, **sizes)
            return self._fit(build, count_parameters(reference))
        except LatteError:
            raise
        except StrictDataclassError as error:
            raise LatteError(f"comparator {self.name!r}: {error.__cause__ or error}") from None
        except (AssertionError, ImportError, LookupError, TypeError, ValueError) as error:
            # A library's own check, or the error that occurs without one.
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            given = ", ".join(f"{key}={value!r}" for key, value in (own or overrides).items())
            what = " ".join(f"{kind}{error}; got {given}".split())
            raise LatteError(f"comparator {self.name!r}: {what}") from None

    def count(self, config: Any) -> int:
        """Number of parameters of a config's model, without a classifier's head, tied ones once."""
        import torch
        from transformers import AutoModel

        from latte.models import count_parameters

        if self.causal and getattr(config, "is_causal", True):
            return count_parameters(config)
        with torch.device("meta"):
            model = AutoModel.from_config(config)
        return sum(parameter.numel() for parameter in model.parameters())

    def _fit(self, build: Callable[[int], Any], target: int) -> Any:
        """The width in steps of 16, or the depth, at which the parameters come nearest `target`."""
        from latte.models.parameters import nearest_size

        step = 1 if self.matched == _DEPTH else 16
        return build(nearest_size(lambda size: self.count(build(size)), target, step))


def _field_names(kind: type) -> set[str]:
    """Fields of a config class: those of a dataclass, else the arguments of ``__init__``."""
    names = set(inspect.signature(kind).parameters) - {"kwargs"}
    return names | {field.name for field in fields(kind)} if is_dataclass(kind) else names


# --- from the sizes of `transformer++` to each library's own fields ----------------------------


def _common(size: Any) -> Fields:
    """Fields that have the same name in every config."""
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings")
    return {name: getattr(size, name) for name in (*names, *SIZE_FIELDS[-3:])}


def _width(size: Any) -> Fields:
    return {"intermediate_size": size.intermediate_size}


def _griffin(size: Any) -> Fields:
    # Two recurrent blocks, then one with attention. With fewer layers, the last one has attention.
    pattern = ["recurrent"] * min(2, size.num_hidden_layers - 1) + ["attention"]
    return {
        **_common(size),
        **_width(size),
        "num_attention_heads": size.num_attention_heads,
        "num_key_value_heads": 1,  # multi-query attention, as in the paper
        "attention_window_size": size.sliding_window,
        "block_types": pattern,
        "rms_norm_eps": size.norm_eps,
    }


def _mamba(size: Any) -> Fields:
    return _common(size) | {"initializer_range": size.initializer_range}


def _mamba2(size: Any) -> Fields:
    inner = 2 * size.hidden_size
    head_dim = 64 if inner % 64 == 0 else inner // size.num_attention_heads
    heads = {"head_dim": head_dim, "num_heads": inner // head_dim, "n_groups": 1}
    if importlib.util.find_spec("mamba_ssm") is None:
        # Without the kernels every chunk is padded, and its cost is its length squared times the
        # state.
        heads["chunk_size"] = 64
    return _mamba(size) | heads


def _rwkv4(size: Any) -> Fields:
    return _common(size) | _width(size) | {"context_length": size.max_position_embeddings}


def _lightning(size: Any) -> Fields:
    # MiniMax without its softmax layers and with a single expert, that is, a plain SwiGLU.
    return {
        **_common(size),
        **_width(size),
        "num_attention_heads": size.num_attention_heads,
        "num_key_value_heads": size.num_attention_heads,
        "layer_types": ["linear_attention"] * size.num_hidden_layers,
        "num_local_experts": 1,
        "num_experts_per_tok": 1,
        "initializer_range": size.initializer_range,
        "rms_norm_eps": size.norm_eps,
    }


def _longformer(size: Any) -> Fields:
    # Padding has its own id, after all tokens, because any other id is a token. The tasks mask it.
    # Positions count from this id on, as in RoBERTa, so this number of rows of the table is never
    # read. If these rows were more than the rows that are read, padding is 0.
    pad = size.pad_token_id
    if pad is None:
        pad = size.vocab_size if size.vocab_size <= size.max_position_embeddings else 0
    values = {
        **_common(size),
        **_width(size),
        "pad_token_id": pad,
        "num_attention_heads": size.num_attention_heads,
        "vocab_size": max(size.vocab_size, pad + 1),
        "max_position_embeddings": size.max_position_embeddings + pad + 1,
        "attention_window": size.sliding_window + size.sliding_window % 2,  # must be even
        "hidden_dropout_prob": size.hidden_dropout,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": size.initializer_range,
    }
    del values["tie_word_embeddings"]
    return values


def _fla(size: Any) -> Fields:
    return _common(size) | {
        "num_heads": size.num_attention_heads,
        "max_position_embeddings": size.max_position_embeddings,
        "initializer_range": size.initializer_range,
        "norm_eps": size.norm_eps,
        "fuse_cross_entropy": False,  # the trainer computes the loss of every model
        **_width(size),
    }


def _ours(mixer: str, **fields: Any) -> Callable[[Any], Fields]:
    """Fields of ComparatorConfig: all fields of the size that do not concern the mixer."""

    def build(size: Any) -> Fields:
        names = set(SIZE_FIELDS) - {"sliding_window", "num_key_value_heads"}
        values = {name: getattr(size, name) for name in names}
        return {**values, "norm_eps": size.norm_eps, "mixer": mixer, **fields}

    return build


_PLACES = {"position": "sinusoidal"}  # attention alone ignores the order of tokens
_ALL = (
    Baseline("griffin", "recurrent_gemma", library=_HF, paper="2402.19427", fields=_griffin),
    Baseline("mamba", "mamba", library=_HF, paper="2312.00752", fields=_mamba, matched=_DEPTH),
    Baseline("mamba2", "mamba2", library=_HF, paper="2405.21060", fields=_mamba2, matched=_DEPTH),
    Baseline("rwkv4", "rwkv", library=_HF, paper="2305.13048", fields=_rwkv4),
    Baseline("lightning", "minimax", library=_HF, paper="2401.04658", fields=_lightning),
    Baseline(
        "longformer",
        "longformer",
        causal=False,
        library=_HF,
        paper="2004.05150",
        fields=_longformer,
    ),
    Baseline("gla", "gla", library=_FLA, paper="2312.06635", fields=_fla),
    Baseline("retnet", "retnet", library=_FLA, paper="2307.08621", fields=_fla),
    Baseline("rwkv6", "rwkv6", library=_FLA, paper="2404.05892", fields=_fla),
    Baseline("mega", _OWN_TYPE, paper="2209.10655", fields=_ours("mega")),
    Baseline("h3", _OWN_TYPE, paper="2212.14052", fields=_ours("h3")),
    Baseline("s5", _OWN_TYPE, paper="2208.04933", fields=_ours("s5")),
    Baseline("luna", _OWN_TYPE, paper="2106.01540", fields=_ours("luna", **_PLACES)),
    Baseline(
        "linformer",
        _OWN_TYPE,
        causal=False,
        paper="2006.04768",
        fields=_ours("linformer", is_causal=False, **_PLACES),
    ),
)
BASELINES = {comparator.name: comparator for comparator in _ALL}
