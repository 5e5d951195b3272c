"""The options of latents: each is declared once, with its type, default, meaning and check.

``LatteConfig``, the configurations of converted models, :func:`latte.conversion.convert`, the
section `conversion` of recipes, ``latte convert`` and the tables of the reference pages take them
from here. A class that needs another default says so with :func:`with_default`. Torch is never
imported.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import partial
from typing import Any, Literal, get_args

LatentInput = Literal["none", "conv", "rglru"]
Forgetting = Literal["none", "static", "gated"]
Initial = Literal["auto", "landmarks", "random"]
LATENT_INPUTS, FORGETTING, INITIAL = map(get_args, (LatentInput, Forgetting, Initial))
KEPT_BLOCK = 64  # number of tokens after which it is decided anew which tokens are kept
LATENTS_PER_HEAD = 16  # of a new conversion, if no number of latents is given
# Options of `latte convert` that have another name than their field.
FLAGS = {"num_latents": "--latents", "rglru_decay_range": "--decay-range"}
FLAGS |= {"half_life_range": "--half-lives", "num_sinks": "--sinks"}


# --- checks: one line that says what was expected and what came


def check_probability(what: str, value: float) -> None:
    if not isinstance(value, (int, float)) or not 0.0 < value < 1.0:
        raise ValueError(f"{what} must be between 0 and 1, got {value!r}")


def check_decay_range(what: str, value: Sequence[float]) -> None:
    """``(low, high)`` with 0 < low <= high < 1."""
    _check_range(what, value, 1.0, "0 < low <= high < 1")


def check_half_lives(what: str, value: Sequence[float]) -> None:
    """``(low, high)`` with 0 < low <= high, in tokens."""
    _check_range(what, value, math.inf, "0 < low <= high")


def _check_range(what: str, value: Sequence[float], bound: float, wanted: str) -> None:
    pair = isinstance(value, (tuple, list)) and len(value) == 2
    if pair and all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in value):
        low, high = value
        if 0 < low <= high < bound:
            return
    raise ValueError(f"{what} must be two numbers with {wanted}, got {value!r}")


def check_half_life(what: str, value: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{what} must be a number above 0, got {value!r}")


def check_switch(what: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{what} must be True or False, got {value!r}")


def check_whole(what: str, value: int, least: int = 1, unit: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{what} must be a whole number, got {value!r}")
    if value < least:
        wanted = f"at least {least}{unit}" if least else "0 or more"
        raise ValueError(f"{what} must be {wanted}, got {value}")
    if value.bit_length() > 63:
        raise ValueError(f"{what} must be below 2^63, got {value}")


def check_counts(what: str, value: int | Sequence[int]) -> None:
    """A number, or several numbers, from 0 on."""
    for number in [value] if isinstance(value, int) else value:
        check_whole(what, number, least=0)


def check_kept(kept_tokens: int, delay_latents: bool, joint_softmax: bool) -> None:
    """Kept tokens need latents that read the others alone, in the same softmax."""
    if kept_tokens and not (delay_latents and joint_softmax):
        raise ValueError(
            f"kept_tokens={kept_tokens} needs delay_latents=True and joint_softmax=True, got"
            f" {delay_latents} and {joint_softmax}"
        )


def check_one(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{what} must be one of {choices}, got {value!r}")


# --- declaring options, and reading the declarations


def option(
    default: Any, help: str, check: Callable[[str, Any], None] | None = None, none: str = ""
) -> Any:
    """A dataclass field that is an option.

    Args:
        default: Default value. That of a configuration must never change: files that were saved
            before the option existed do not name it, and are loaded with the default.
        help: Meaning, for help texts and pages. Values are in backticks.
        check: Check of the name and the value, unless the value is None and the type has None.
        none: Meaning of a default that is None or empty.
    """
    return field(default=default, metadata={"help": help, "check": check, "none": none})


def with_default(kind: Any, name: str, default: Any) -> Any:
    """An option of a base class with another default."""
    return field(default=default, metadata=kind.__dataclass_fields__[name].metadata)


def window_option() -> Any:
    """The window's width. In a converted model ``sliding_window`` is the name of the base's own."""
    help = "number of keys that the window sees, the current token included"
    return option(128, help, partial(check_whole, unit=" key"))


def options_of(kind: Any) -> list[Field[Any]]:
    """The fields of a dataclass that are options."""
    return [each for each in fields(kind) if "help" in each.metadata]


def flag(each: Field[Any]) -> str:
    """The option of ``latte convert``, such as ``--window``."""
    return FLAGS.get(each.name, f"--{each.name.replace('_', '-')}")


def default_in_words(each: Field[Any]) -> str:
    """The default as help texts and pages have it."""
    if each.default in (None, ()):
        return str(each.metadata["none"])
    if isinstance(each.default, tuple):
        return " ".join(f"{number:g}" for number in each.default)
    return {"True": "yes", "False": "no"}.get(str(each.default), str(each.default))


def name_options(function: Any, kind: type) -> None:
    """Name a dataclass's options in signature and docstring of a function with ``**options``."""
    *own, _ = inspect.signature(function).parameters.values()
    keyword = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    named = [keyword(each.name, default=each.default) for each in options_of(kind)]
    function.__signature__ = inspect.Signature([*own, *named])
    about = (f"{x.name}: {x.metadata['help']} ({default_in_words(x)})" for x in options_of(kind))
    mark = f".{kind.__name__}`:"
    doc = function.__doc__ or ""
    function.__doc__ = doc.replace(mark, "\n            ".join([mark, *about]))


# --- the options


@dataclass(kw_only=True, repr=False)
class LatentFields:
    """Options of the latents: fields of ``LatteConfig`` and of converted models' configurations."""

    num_latents: int | None = option(
        128,
        "total number of latents over all query heads, a multiple of their number",
        check_whole,
        f"{LATENTS_PER_HEAD} per head",
    )
    latent_input: LatentInput = option(
        "rglru",
        "what the latents' logits are computed from: `none` (x), `conv` or `rglru`",  # eq. 18-19
        partial(check_one, choices=LATENT_INPUTS),
    )
    # A bias on the window's query logit sets it. Without one it is about 1 / (L + 1).
    window_probability: float | None = option(
        None, "initial value of p(l=0), the window's share", check_probability, "no bias"
    )
    # Griffin's range of a_t where the recurrence gate is fully open, r = 1.
    rglru_decay_range: Sequence[float] = option(
        (0.9, 0.999), "lowest and highest initial decay of the RG-LRU", check_decay_range
    )
    # Beyond the paper. With delayed latents the decay is computed from the query's token.
    forgetting: Forgetting = option(
        "none",
        "decay of the latents: `none`, `static` (a rate per latent) or `gated` (one per token)",
        partial(check_one, choices=FORGETTING),
    )
    half_life_range: Sequence[float] = option(
        (4.0, 512.0),
        "shortest and longest initial half-life of latents that forget, in tokens",
        check_half_lives,
    )

    def latent_options(self) -> dict[str, Any]:
        """The options of this class, which are keywords of :class:`latte.layers.LatentLogits`."""
        return {each.name: getattr(self, each.name) for each in fields(LatentFields)}

    def check_options(self) -> None:
        """Raise ValueError if the value of an option is not as expected."""
        for each in options_of(self):
            value, check = getattr(self, each.name), each.metadata["check"]
            if check is not None and not (value is None and "None" in str(each.type)):
                check(each.name, value)

    def lists_to_tuples(self) -> None:
        """Make tuples of the lists that JSON has in their place."""
        for each in options_of(self):
            if isinstance(value := getattr(self, each.name), list):
                setattr(self, each.name, tuple(value))


@dataclass(kw_only=True, repr=False)
class PartitionFields(LatentFields):
    """Options of how window, sinks and latents divide the past (beyond the paper)."""

    # arXiv 2309.17453. Their distance is at most that of the window's edge, unless `far_sinks`.
    num_sinks: int = option(
        0, "number of first tokens that stay visible to the window", partial(check_whole, least=0)
    )
    # The two branches then share no token. While none has left the window, p(l=0) is 1.
    delay_latents: bool = option(
        False, "latents read a token only when it has left the window", check_switch
    )
    # Beyond the paper. The log-mass of the window's logits is added to the learned logit of p(l=0).
    joint_softmax: bool = option(
        False, "the window's keys and the latents share one softmax", check_switch
    )
    # Beyond the paper. The latents read only the tokens that are not kept.
    kept_tokens: int | Sequence[int] = option(
        0,
        "number of tokens, of each key/value head, that stay visible after they have left the"
        " window: those with the largest scores (a converted model: also one number per layer)",
        check_counts,
    )
    kept_block: int = option(
        KEPT_BLOCK,
        "number of tokens after which it is decided anew which tokens are kept",
        partial(check_whole, unit=" token"),
    )
    # Scores are logarithms of weights. Without it ever fewer of the last tokens are kept.
    kept_half_life: float | None = option(
        None,
        "number of tokens after which the weight by which a token is kept has halved",
        check_half_life,
        "it does not fall",
    )
    kept_dtype: str = option(
        "auto",
        "type of the keys and values that a state with kept tokens has: `auto`, that of the"
        " activations, or `mxint8`, 8 bits, to which they are rounded",
        partial(check_one, choices=("auto", "mxint8")),
    )


@dataclass(kw_only=True, repr=False)
class ConvertedFields(PartitionFields):
    """Options that a converted model's configuration and a new conversion have."""

    window_probability: float = with_default(LatentFields, "window_probability", 0.95)
    # Without it the state of kept layers, and the time of a step, grow with the text.
    kept_window: int | None = option(
        None,
        "number of keys that layers in `keep_layers` see, besides sinks",
        check_whole,
        "all of the past",
    )
    # A model that keeps all tokens is then its base. From the window's edge sinks get more weight.
    far_sinks: bool = option(
        False,
        "queries of layers with kept tokens look at sinks from where they are, and not from the"
        " window's edge",
        check_switch,
    )
    # Many bases find a single far token only well within the range that they were trained for.
    kept_range: int | None = option(
        None,
        "number of positions that kept tokens are seen from at most: farther ones are rotated as if"
        " they stood there",
        check_whole,
        "the base's `max_position_embeddings`",
    )


@dataclass(kw_only=True)
class ConversionOptions(ConvertedFields):
    """Options of a new conversion. Defaults that differ from the configuration's come first.

    The configuration's defaults keep the meaning of models saved before an option existed.
    """

    num_latents: int | None = with_default(ConvertedFields, "num_latents", None)
    latent_input: LatentInput = with_default(ConvertedFields, "latent_input", "none")
    num_sinks: int = with_default(ConvertedFields, "num_sinks", 4)
    delay_latents: bool = with_default(ConvertedFields, "delay_latents", True)
    joint_softmax: bool = with_default(ConvertedFields, "joint_softmax", True)
    window: int = window_option()
    keep_layers: Sequence[int] = option(
        (), "layers that keep the base's attention, by number from 0", none="none"
    )
    # "auto" is "random" too, with a warning, if there are no tokens to compute landmarks from.
    initial: Initial = option(
        "auto", "initial latents: `landmarks`, `random`, or `auto` (landmarks if latents read x)"
    )

    def fields(self) -> dict[str, Any]:
        """The values that are fields of a converted model's configuration, by their names there."""
        values = {each.name: getattr(self, each.name) for each in options_of(ConvertedFields)}
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        own = {"local_window": self.window, "keep_layers": tuple(sorted(set(self.keep_layers)))}
        return values | own
