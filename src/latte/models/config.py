"""The configuration of every model in the family, its checks, and the presets."""

import difflib
import math
from dataclasses import fields
from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers.configuration_utils import PreTrainedConfig

from latte.errors import LatteError
from latte.layers.latent_fields import PartitionFields, check_kept, window_option, with_default
from latte.models.registry import (
    find_mixer,
    mixer_names,
    preset_fields,
    preset_names,
    register_preset,
)

BLOCK_TYPES = "attention", "recurrent"


@strict
class LatteConfig(PartitionFields, PreTrainedConfig):
    r"""Configuration of Latte models; the presets are below.

    The fields of the latents, and of how they and the window divide the past, are those of
    :class:`latte.layers.latent_fields.PartitionFields`. With
    ``mixer="linear"``, ``num_latents`` is the number of features. With ``"swa"``, ``latent_input``
    is the source of the window's queries, keys and values.

    Args:
        mixer: Mixer of the tokens: ``latte`` (eq. 7-14), ``macchiato`` (eq. 15-17), ``swa``
            (window only), ``softmax`` (full attention), ``linear`` (undirected, eq. 4-5), ``gated``
            (macchiato with a gate, :class:`latte.layers.GatedMacchiato`), or one of your own
            (:mod:`latte.models.registry`).
        block_types: Mixers of the first layers, ``attention`` (which is ``mixer``) or ``recurrent``
            (Griffin's recurrent block, :class:`latte.layers.RecurrentBlock`). Later layers repeat
            them. So ``["recurrent", "recurrent", "attention"]`` has ``mixer`` in every third layer.
        value_dim: Width of a head's values with ``gated``; None is twice hidden_size / heads. With
            the other mixers values are as wide as keys.
        short_conv_size: Number of taps of the convolution of q, k and v with ``gated``, and of that
            of a recurrent block.
        position: Position encoding: ``sinusoidal`` (added to the embeddings), ``rope`` (in the
            window or full attention) or ``none``.
        embedding_multiplier: Factor of the token embeddings. None is sqrt(hidden_size) if
            sinusoidal positions are added (arXiv 1706.03762), else 1.
        initializer_range: Standard deviation of the initial matrices.
        embedding_initializer_range: Standard deviation of the initial embeddings, and so of a
            tied head; None is ``initializer_range``.
        norm, mlp: Norm and MLP: ``rmsnorm`` and ``swiglu`` (the "++" models), or ``layernorm`` and
            ``gelu``. With ``mlp="none"`` a block is a mixer alone, and ``intermediate_size`` has
            no effect.
        attn_logit_softcapping: Cap of the local logits, which become ``cap * tanh(logit / cap)``.
        feature_map: Feature map of ``linear``: ``elu`` (elu + 1), ``exp``, ``softplus`` or
            ``relu``.
        is_causal: Whether the layers are causal. Bidirectional models classify, and cannot
            generate.
        max_position_embeddings: Training length in tokens. It is information only; nothing
            depends on it.

    Raises:
        LatteError: A value has a wrong type, sizes do not fit, or a keyword looks like a misspelt
            field.
    """

    model_type = "latte"
    # Both names of the cache in Transformers (latte.models.cache_name).
    keys_to_ignore_at_inference = ["past_key_values", "cache"]

    vocab_size: int = 50267
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int = 3072
    mixer: str = "macchiato"
    block_types: list[str] | tuple[str, ...] = ("attention",)
    value_dim: int | None = None
    sliding_window: int | None = window_option()  # of ``macchiato``, ``gated`` and ``swa``
    kept_tokens: int = with_default(PartitionFields, "kept_tokens", 0)  # all layers are alike
    conv_kernel_size: int = 3
    short_conv_size: int = 4
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    norm_eps: float | int = 1e-6
    mlp: Literal["gelu", "swiglu", "none"] = "swiglu"
    position: Literal["sinusoidal", "rope", "none"] = "rope"
    rope_theta: float | int = 10000.0
    attn_logit_softcapping: float | int | None = None
    feature_map: Literal["elu", "exp", "softplus", "relu"] = "elu"
    is_causal: bool = True
    embedding_multiplier: float | int | None = None
    embedding_dropout: float | int = 0.0
    hidden_dropout: float | int = 0.0
    classifier_dropout: float | int = 0.0
    initializer_range: float | int = 0.02
    embedding_initializer_range: float | int | None = None
    max_position_embeddings: int = 1024
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._reject_misspelt(kwargs)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        self.lists_to_tuples()
        self.block_types = tuple(self.block_types)
        super().__post_init__(**kwargs)

    def _reject_misspelt(self, extra: dict[str, Any]) -> None:
        """Refuse unknown keywords that look like typos; Hugging Face keeps them as attributes."""
        names = [field.name for field in fields(self)]
        for name in extra:
            close = difflib.get_close_matches(name, names, n=1, cutoff=0.8)
            if close and not hasattr(PreTrainedConfig, name):
                raise ValueError(f"unknown field {name!r}, did you mean {close[0]!r}?")

    @property
    def mixer_uses(self) -> tuple[str, ...]:
        """The fields that this mixer reads, among those that not every mixer reads."""
        return find_mixer(self.mixer).uses

    def validate_fields(self) -> None:
        """Part of ``@strict``: every size is right by itself, and then with the choices."""
        self.check_options()
        self._check_sizes()
        self._check_choices()

    def _check_sizes(self) -> None:
        """Check that every size is positive and that sizes divide each other as they must."""
        uses = self.mixer_uses
        sizes = (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
            "value_dim",
            "conv_kernel_size",
            "short_conv_size",
            "max_position_embeddings",
        )
        for name in sizes:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(
                f"pad_token_id must be in the vocabulary, from 0 to {self.vocab_size - 1}, got"
                f" {self.pad_token_id}"
            )
        if self.head_dim is None:
            self._divides("num_attention_heads", "hidden_size")
        self._divides("num_key_value_heads", "num_attention_heads")
        if self.latent_input == "rglru" or "recurrent" in (*self.block_types, self.mixer):
            self._divides("num_attention_heads", "hidden_size")  # the gates' blocks
        for name in ("num_latents", "sliding_window"):
            if name in uses and getattr(self, name) is None:
                raise ValueError(f"{name} must be given for mixer={self.mixer!r}, got None")
        if "num_latents" in uses:
            self._divides("num_attention_heads", "num_latents")

    def _check_choices(self) -> None:
        """Check that the choices fit together."""
        uses = self.mixer_uses
        if not self.block_types or not {*self.block_types} <= {*BLOCK_TYPES}:
            raise ValueError(
                f"block_types must be names among {BLOCK_TYPES}, got {list(self.block_types)}"
            )
        if "recurrent" in (*self.block_types, self.mixer) and not self.is_causal:
            raise ValueError("recurrent blocks need is_causal=True, got False")
        if "latent_input" not in uses and self.latent_input != "none":
            raise ValueError(
                f"latent_input must be 'none' for mixer={self.mixer!r}, got {self.latent_input!r}"
            )
        if self.position == "rope":
            if "rope_theta" not in uses:
                able = [
                    repr(name) for name in mixer_names() if "rope_theta" in find_mixer(name).uses
                ]
                raise ValueError(
                    f"position='rope' needs a mixer with local queries and keys, "
                    f"{', '.join(able[:-1])} or {able[-1]}, got mixer={self.mixer!r}"
                )
            if self.width_per_head % 2:
                raise ValueError(
                    f"position='rope' needs heads of an even width, got {self.width_per_head}"
                )
        if self.window_probability is not None and "window_probability" not in uses:
            raise ValueError(
                f"window_probability must be None for mixer={self.mixer!r}, got"
                f" {self.window_probability}"
            )
        if self.value_dim is not None and "value_dim" not in uses:
            raise ValueError(
                f"value_dim must be None for mixer={self.mixer!r}, got {self.value_dim}"
            )
        check_kept(self.kept_tokens, self.delay_latents, self.joint_softmax)
        for name in ("num_sinks", "delay_latents", "joint_softmax", "kept_tokens"):
            value = getattr(self, name)
            if value and name not in uses:
                raise ValueError(f"{name} must not be set for mixer={self.mixer!r}, got {value}")
            if value and not self.is_causal:
                raise ValueError(f"{name}={value} needs is_causal=True, got False")
        if self.forgetting != "none":
            if "forgetting" not in uses:
                raise ValueError(
                    f"forgetting must be 'none' for mixer={self.mixer!r}, got {self.forgetting!r}"
                )
            if not self.is_causal:
                raise ValueError(f"forgetting={self.forgetting!r} needs is_causal=True, got False")
        for name in ("embedding_dropout", "hidden_dropout", "classifier_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        positive = (
            *("norm_eps", "rope_theta", "attn_logit_softcapping"),
            *("embedding_multiplier", "initializer_range", "embedding_initializer_range"),
        )
        for name in positive:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                wanted = "finite" if value > 0 else "positive"
                raise ValueError(f"{name} must be {wanted}, got {value}")

    def _divides(self, divisor: str, dividend: str) -> None:
        if getattr(self, dividend) % getattr(self, divisor):
            raise ValueError(
                f"{dividend} must be a multiple of {divisor}, got {dividend}="
                f"{getattr(self, dividend)} and {divisor}={getattr(self, divisor)}"
            )

    def mixer_of(self, layer_idx: int) -> str:
        """The name of a layer's mixer."""
        kind = self.block_types[layer_idx % len(self.block_types)]
        return self.mixer if kind == "attention" else kind

    def state_grows(self, layer_idx: int) -> bool:
        """Whether a layer's state keeps every token. Only full softmax attention does."""
        kind = self.block_types[layer_idx % len(self.block_types)]
        return kind == "attention" and find_mixer(self.mixer).grows

    def kept_sizes(self, layer_idx: int) -> tuple[int, int, int] | None:
        """Numbers of kept tokens, of the window's keys and of a block's tokens; None if none."""
        window = self.sliding_window
        if not (self.kept_tokens and window) or self.mixer_of(layer_idx) == "recurrent":
            return None
        return self.kept_tokens, window, self.kept_block

    @property
    def embedding_scale(self) -> float:
        """The factor of the token embeddings, before positions are added."""
        if self.embedding_multiplier is not None:
            return self.embedding_multiplier
        # Embeddings and positions then have a similar size.
        return math.sqrt(self.hidden_size) if self.position == "sinusoidal" else 1.0

    @property
    def width_per_head(self) -> int:
        """Width of a head's keys and values: ``head_dim`` or hidden_size / heads."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


def one_line_errors(cls: type) -> None:
    """Turn the two-line errors of ``@strict`` into a LatteError of one line.

    Fields that ``from_pretrained`` changes are checked too: ``@strict`` checks their types alone.
    """

    def wrap(original: Any) -> Any:
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                original(self, *args, **kwargs)
            except StrictDataclassError as error:
                raise LatteError(f"{cls.__name__}: {error.__cause__ or error}") from error
            except LatteError:
                raise
            except ValueError as error:
                raise LatteError(f"{cls.__name__}: {error}") from error

        wrapped.__name__, wrapped.__doc__ = original.__name__, original.__doc__
        return wrapped

    for name in ("__init__", "__setattr__"):
        setattr(cls, name, wrap(getattr(cls, name)))

    def validate(self: Any) -> None:
        self.validate()

    check = wrap(validate)
    read = cls.from_dict.__func__  # type: ignore[attr-defined]

    def from_dict(own: Any, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        found = read(own, config_dict, **kwargs)
        check(found[0] if isinstance(found, tuple) else found)
        return found

    from_dict.__doc__ = read.__doc__
    cls.from_dict = classmethod(from_dict)  # type: ignore[attr-defined]


one_line_errors(LatteConfig)


# --- the named models of the paper and their controls, at several sizes --------------------------

# "++" means RMSNorm and SwiGLU, the config's defaults. Plain mixers read x alone, so they need
# positions. A convolution or an RG-LRU makes positions unnecessary. Windows use rotary positions.
_PLAIN = {"latent_input": "none", "position": "sinusoidal"}

_PRESETS: dict[str, dict[str, Any]] = {
    "latte": {"mixer": "latte", **_PLAIN, "norm": "layernorm", "mlp": "gelu"},
    "latte++": {"mixer": "latte", **_PLAIN},
    "latte-conv++": {"mixer": "latte", "latent_input": "conv", "position": "none"},
    "latte-conv-swa++": {"mixer": "macchiato", "latent_input": "conv", "position": "rope"},
    "latte-r++": {"mixer": "latte", "latent_input": "rglru", "position": "none"},
    "latte-r-swa++": {"mixer": "macchiato", "latent_input": "rglru", "position": "rope"},
    "r-swa++": {"mixer": "swa", "latent_input": "rglru", "position": "rope"},
    "swa++": {"mixer": "swa", "latent_input": "none", "position": "rope"},
    "transformer++": {"mixer": "softmax", "latent_input": "none", "position": "rope"},
    "linear++": {"mixer": "linear", **_PLAIN},
}

# Beyond the paper: latents with decay, and blocks that are a gated mixer alone.
_BEYOND = {
    f"{name}-f++": {**_PRESETS[f"{name}++"], "forgetting": "gated"}
    for name in ("latte-conv-swa", "latte-r-swa")
}
# It has about as many parameters as the other presets: no MLPs, but twice as many layers. Wide
# values gain more than wide keys and many latents (experiments/results/shakespeare.md).
_BEYOND["latte-gated"] = {
    **_BEYOND["latte-conv-swa-f++"],
    **{"mixer": "gated", "mlp": "none"},
    "num_hidden_layers": lambda size: 2 * size["num_hidden_layers"],
    "num_latents": lambda size: size["num_latents"] // 2,
    "head_dim": lambda size: size["hidden_size"] // (4 * size["num_attention_heads"]),
}

# The decays of its recurrent blocks begin as in Griffin's code, faster than in the paper.
_BEYOND["latte-hybrid"] = {
    **_BEYOND["latte-conv-swa-f++"],
    "block_types": ("recurrent", "recurrent", "attention"),
    "rglru_decay_range": (0.43, 0.992),
    "half_life_range": (1.0, 64.0),
}

_SIZE_FIELDS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("intermediate_size", "num_latents", "sliding_window", "max_position_embeddings"),
)
_SIZE_TABLE = {
    # The demo's model: bytes, and a window well below the training length.
    "tiny": (260, 128, 4, 4, 512, 64, 64, 256),
    # About 10M parameters with a vocabulary of about 8,000.
    "small": (8192, 256, 8, 4, 1024, 64, 128, 512),
    "paper": (50267, 768, 12, 8, 3072, 128, 128, 1024),
    "400m": (50267, 1024, 20, 16, 4096, 256, 128, 2048),
    "2.6b": (50267, 2560, 23, 20, 10240, 320, 128, 4096),
}
_SIZES: dict[str, dict[str, Any]] = {
    name: dict(zip(_SIZE_FIELDS, row, strict=True)) for name, row in _SIZE_TABLE.items()
}
_SIZES["paper"] |= {"embedding_dropout": 0.1, "hidden_dropout": 0.1}

for _name, _fields in (_PRESETS | _BEYOND).items():
    register_preset(_name, **_fields)

PRESETS = tuple(_PRESETS)
SIZES = tuple(_SIZES)


def preset_config(name: str, size: str = "tiny", **overrides: Any) -> LatteConfig:
    """The configuration of a named model at a named size.

    Args:
        name: Name of a preset: one of ``PRESETS`` (the paper's), e.g. ``"latte-r-swa++"``;
            ``"latte-conv-swa-f++"`` or ``"latte-r-swa-f++"``, whose latents forget;
            ``"latte-gated"``, whose layers are gated mixers without MLPs; ``"latte-hybrid"``, of
            Griffin's recurrent blocks and latents that forget; or a registered one.
        size: Name of a size, one of ``SIZES``.
        overrides: Fields of :class:`LatteConfig`, e.g. ``vocab_size=8192``.

    Raises:
        LatteError: The name, size or field is unknown, or sizes do not fit.
    """
    preset = preset_fields(name)
    if preset is None:
        raise LatteError(f"unknown preset {name!r}, expected one of {', '.join(preset_names())}")
    if size not in _SIZES:
        raise LatteError(f"unknown size {size!r}, expected one of {', '.join(SIZES)}")
    known = {field.name for field in fields(LatteConfig)} | {"num_labels"} | set(preset)
    for field in overrides:
        if field not in known:
            raise LatteError(f"unknown field {field!r} of LatteConfig")
    sizes = dict(_SIZES[size])
    mixer = overrides.get("mixer", preset["mixer"])
    for field in ("num_latents", "sliding_window"):
        if mixer in mixer_names() and field not in find_mixer(mixer).uses:
            sizes[field] = None
    made = {key: value(_SIZES[size]) if callable(value) else value for key, value in preset.items()}
    return LatteConfig(**(sizes | made | overrides))
